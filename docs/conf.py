"""The documentation site: `make docs`; why it is so is in decisions/0013-documentation-site.md."""

import inspect
import json
import os
import pkgutil
import sys
from importlib import import_module
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning.pytorch import Trainer
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # this checkout's package, whatever is installed
# The same for the notebooks, which run in processes of their own.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as fast for small models
# Warnings that notebooks do not show: tqdm finds no widgets, Lightning 2.6 calls what torch 2.14
# deprecates, and Lightning calls `dataloader_iter`, which a notebook has refused, experimental.
HIDDEN = "IProgress not found", "`isinstance(treespec", "You are using the `dataloader_iter`"
os.environ["PYTHONWARNINGS"] = ",".join(f"ignore:{start}" for start in HIDDEN)

import lightning_fl  # noqa: E402
from lightning_fl.federation.checks import REFUSED, REQUIRED  # noqa: E402

project = "lightning_fl"
version = release = version("lightning_fl")
URLS = dict(url.split(", ") for url in metadata("lightning_fl").get_all("Project-URL") or ())
#: The repository on GitHub; None where pyproject.toml names none.
REPOSITORY = URLS.get("Repository")

extensions = [
    "myst_nb",  # Markdown, too, as myst_parser does
    "sphinx-mathjax-offline",  # formulas without a network
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_*"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Notebooks are stored without outputs and run here, so that no output is older than the code.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds per cell
nb_execution_in_temp = True
nb_output_stderr = "remove-warn"  # a warning in a notebook fails the build
nb_merge_streams = True

html_theme = "furo"
html_title = f"lightning_fl {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_search_summary = False  # opened as files, pages cannot be fetched for their excerpts

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True  # as the code says, not the repr of the value
autodoc_mock_imports = [name for name in ("flwr", "nvflare") if not find_spec(name)]
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Every name of this package has to lead somewhere; those of others cannot without a network.
nitpicky = True
default_role = "py:obj"  # `name`: a link, where there is something of that name
nitpick_ignore_regex = [
    ("py:obj", r"\w+"),
    # As annotations name them.
    ("py:class", r"(tuple\[~torch\.)?Tensor|nn\.Parameter|dict\[\w+|Figure|Path"),
    ("py:.*", r"(abc|argparse|collections|contextlib|datetime|enum|os|pathlib|zipfile)\..*"),
    ("py:.*", r"(jsonargparse|lightning|numpy|torch|torchmetrics)\..*"),
    ("py:.*", r"flwr\..*|ArrayRecord|ConfigRecord|MetricRecord|Grid|Result"),
    ("py:.*", r"nvflare\..*|FLModel|ModelAggregator"),
    ("py:.*", r"lightning_fl\.(\w+\.)*_\w+"),
    ("py:class", r"lightning_fl\.callbacks\.attacks\.ReplaceableData"),  # a protocol of one method
    # Parts of a sampler, of the report, of matching and of a step that are not public.
    ("py:class", r"lightning_fl\.(samplers\.(clock|durations)|callbacks\.client_history)\.\w+"),
    ("py:class", r"lightning_fl\.aggregators\.matching\.[\w.]+"),
    ("py:class", r"lightning_fl\.runners\.(global_model|local_step|tensors)\.[\w.]+"),
    # Base classes that are not public.
    ("py:class", r"lightning_fl\.(objectives\.(terms|calibrated|two_passes)|policies\.base)\.\w+"),
]


# Napoleon takes an attribute's "Rounds: ..." for a type with its description.
GoogleDocstring._consume_inline_attribute = lambda self: (
    "",
    GoogleDocstring(self._dedent(self._consume_to_end()), self._config).lines(),
)


#: Rooms without public names of their own, whose files are sections of a page.
BY_FILE = tuple(
    f"lightning_fl.{name}"
    for name in ("cli", "contracts", "federation", "functional", "integrations")
)


def modules(package: ModuleType) -> list[str]:
    """Return the modules of a package that have a page."""
    found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return sorted(module.name for module in found if not module.name.endswith("__"))


def write_api(app: Sphinx) -> None:
    """Write a page a room, so that what is new appears by itself.

    A room that says what is public (``__all__``) is one section; others have one for each file.
    """
    pages, rows = {}, []
    for name in modules(lightning_fl):
        if name == "lightning_fl.types":  # whose names are those of contracts
            continue
        room = import_module(name)
        is_by_file = name in BY_FILE
        own = [] if is_by_file and hasattr(room, "__all__") else [name]
        parts = [*own, *(modules(room) if is_by_file else [])]
        title = name.removeprefix("lightning_fl.")
        text = [f"# {title}", ""]
        for part in parts:
            if part != name:
                text += [f"## {part.removeprefix(name + '.')}", ""]
            text += ["```{eval-rst}", f".. automodule:: {part}", "```", ""]
        pages[title] = "\n".join(text)
        about = (room.__doc__ or "").partition("\n")[0].replace("``", "`")
        rows.append(f"| [{title}]({title}.md) | {about} |")
    pages["index"] = API_PAGE.format(rows="\n".join(rows))
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    for page in folder.glob("*.md"):
        if page.stem not in pages:  # of a room that is gone
            page.unlink()
    for title, content in pages.items():
        page = folder / f"{title}.md"
        if not page.exists() or page.read_text() != content:  # else it would be read anew
            page.write_text(content)


API_PAGE = """\
# API reference

Every public class and function, by package. Names are relative to `lightning_fl`. A method that
implements one of a base class is described there. The pages of the
[methods](../methods/index.md) say when to use which class.

| page | content |
| --- | --- |
{rows}

```{{toctree}}
:glob:
:hidden:

*
```
"""


def write_trainer_options(app: Sphinx) -> None:
    """Write the page of the Trainer's options, from the checks at the start of a fit."""
    options = inspect.signature(Trainer.__init__).parameters
    rows = []
    for name in list(options)[1:]:
        value, why = REQUIRED.get(name, (None, None))
        rows.append(f"| `{name}` | " + (f"only `{value}`: {why} |" if why else "yes |"))
    callbacks = [f"- `{kind.__name__}`: {why}." for kind, why in REFUSED.items()]
    text = TRAINER_PAGE.format(options="\n".join(rows), callbacks="\n".join(callbacks))
    page = HERE / "concepts" / "trainer_options.md"
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


TRAINER_PAGE = """\
# Options of the Trainer

This page is generated from the checks at the start of a fit (`lightning_fl.federation.checks`).
What is not supported is refused there, with a message. `fast_dev_run` limits the batches itself and
is exempt.

| option | supported |
| --- | --- |
{options}

`max_epochs` is the number of rounds. `check_val_every_n_epoch` must be a number of rounds, not
None. With several processes, `strategy` must be `client_parallel`, which trains different clients
on each process, or Lightning's `ddp`, which splits the batches of a client; `ddp` is not supported
with `VectorizedClients`.

## Precision

`bf16-mixed`, `bf16-true`, `16-true`, `32-true` and `64-true` are supported. `16-mixed` is refused,
because its gradient scaler would carry the loss scale of one client to the next: use `bf16-mixed`.

## Callbacks

Callbacks of Lightning and of users are called as in ordinary training, with an epoch for a round,
except those that would mix clients:

{callbacks}

`BackboneFinetuning` and other subclasses of `BaseFinetuning` are supported for a plain module, and
not with `VectorizedClients`.
"""


def link_to_colab(app: Sphinx, page: str, source: list[str]) -> None:
    """Put a badge that opens the notebook on Colab below its title."""
    if REPOSITORY is None or not page.startswith("notebooks/") or page.endswith("/index"):
        return
    notebook, colab = json.loads(source[0]), "https://colab.research.google.com"
    place = f"{REPOSITORY.removeprefix('https://github.com/')}/blob/main/docs/{page}.ipynb"
    badge = f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/github/{place})"
    first = notebook["cells"][0]
    title, _, text = "".join(first["source"]).partition("\n")
    first["source"] = f"{title}\n\n{badge}\n{text}"
    source[0] = json.dumps(notebook)


def without_internals(
    app: Sphinx,
    what: str,
    name: str,
    thing: object,
    options: object,
    signature: str | None,
    result: str | None,
) -> tuple[str, str | None] | None:
    """Return a signature without ``<factory>``, the default of fields that ``dataclass`` makes."""
    if not signature or "<factory>" not in signature:
        return None
    return signature.replace("<factory>", "..."), result


def is_repetition(
    app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object
) -> bool | None:
    """Return True for a method that implements one of a base class and says nothing of its own.

    The base class describes what all rules, policies or callbacks do. A method with more than a
    line of documentation stays.
    """
    function = getattr(thing, "fget", thing)
    if not inspect.isfunction(function) or "." not in function.__qualname__:
        return None
    owner: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split(".")[:-1]:
        owner = getattr(owner, part, None)
    if owner is None:  # a class in a function, or one that namedtuple() makes
        return None
    is_short = "\n" not in (function.__doc__ or "").strip()
    return True if is_short and any(name in vars(base) for base in owner.__mro__[1:]) else None


def setup(app: Sphinx) -> None:
    """Hook in the above."""
    app.connect("source-read", link_to_colab)
    app.connect("autodoc-process-signature", without_internals)
    app.connect("autodoc-skip-member", is_repetition)
    app.connect("builder-inited", write_api)
    app.connect("builder-inited", write_trainer_options)
