import importlib
import importlib.metadata
import os
import shutil
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

import lightning_fl
import lightning_fl.callbacks
import lightning_fl.datamodules
import try_release
from child import python
from grids import others_slow
from lightning_fl.cli import quick

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("callbacks", "datamodules")
LINKS = (*LINKED, "configs")
FOLDERS = ("lightning_fl", *LINKS, "docs", "examples", "tests")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "Makefile")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules() -> set[str]:
    """Every module of the package, as the wheel should name it."""
    own = [path.relative_to(ROOT) for path in (ROOT / "lightning_fl").rglob("*.py")]
    linked = [path.relative_to(ROOT) for name in LINKED for path in (ROOT / name).rglob("*.py")]
    return {path.as_posix() for path in [*own, *(Path("lightning_fl", path) for path in linked)]}


def build(source: Path, out: Path, *options: str) -> Path:
    """Run the build front end without a network; return what it made."""
    python("-m", "build", "--no-isolation", "--outdir", out, *options, source)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a clone holds, so that building leaves nothing behind."""
    copy = tmp_path_factory.mktemp("checkout")
    rubbish = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=rubbish)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    return build(checkout, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    return build(checkout, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def without_links(checkout, tmp_path_factory):
    """A checkout by git on Windows, where each link is a text file that holds its target."""
    copy = tmp_path_factory.mktemp("windows") / "lightning_fl"
    shutil.copytree(checkout, copy, symlinks=True)
    for link in (copy / "lightning_fl" / name for name in LINKS):
        target = link.readlink().as_posix()
        link.unlink()
        link.write_text(target)
    return copy


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(
    scope="module", params=others_slow(["built"], ["built", "unpacked", "without_links"])
)
def wheel(request, tmp_path_factory):
    """Wheels of the checkout, of the sdist, and of a checkout without links."""
    source = request.getfixturevalue(request.param)
    is_built = request.param == "built"
    return source if is_built else build(source, tmp_path_factory.mktemp("wheel"), "--wheel")


def test_three_relative_links_and_no_other_lead_into_the_package():
    found = (path for name in ("lightning_fl", *LINKED) for path in (ROOT / name).rglob("*"))
    links = {path.relative_to(ROOT): path.readlink() for path in found if path.is_symlink()}
    assert links == {Path("lightning_fl", name): Path("..", name) for name in LINKS}


def test_a_checkout_whose_links_are_text_files_says_what_to_do(without_links):
    done = python("-c", "import lightning_fl", cwd=without_links, expect=1)
    assert "ImportError" in done.stderr
    assert "git clone -c core.symlinks=true, or run pip install ." in done.stderr


def test_windows_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="requires Linux or macOS"):
        importlib.reload(lightning_fl)


@pytest.mark.parametrize("name", LINKED)
def test_the_linked_folder_is_one_module_under_its_full_name(name):
    module = sys.modules[f"lightning_fl.{name}"]
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"
    assert name not in sys.modules


def test_the_version_is_that_of_the_metadata():
    assert lightning_fl.__version__ == importlib.metadata.version("lightning_fl")
    assert lightning_fl.__version__ == PYPROJECT["project"]["version"]


def test_citation_and_changelog_have_the_version():
    version = PYPROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert citation["version"] == version
    assert f"\n## [{version}] - " in changelog


def test_every_dependency_has_one_lower_bound():
    lines = [try_release.lowest(requirement) for requirement in try_release.requirements()]
    names = {line.partition("==")[0] for line in lines}
    assert names > {"torch", "torchvision", "torchaudio", "matplotlib", "scikit-learn"}
    assert len(names) == len(lines)
    assert set(lines) < set(try_release.constraints("lowest").splitlines())


def test_the_pythons_of_the_classifiers_are_tried():
    start = "Programming Language :: Python :: "
    named = [c.removeprefix(start) for c in PYPROJECT["project"]["classifiers"] if start in c]
    assert [f"python{python}" for python in named] == list(try_release.PYTHONS)
    badges = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n\n")[0]
    assert f"python-{'%20%7C%20'.join(named)}-blue" in badges
    workflows = [
        yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
        for name in ("tests.yml", "publish.yml")
    ]
    assert workflows[1]["jobs"]["wheel"]["strategy"]["matrix"]["python"] == named
    ci, *others = named
    assert workflows[0]["jobs"]["ci"]["steps"][1]["with"]["python-version"] == ci
    assert workflows[0]["jobs"]["pythons"]["strategy"]["matrix"]["python"] == others
    (left_out,) = workflows[1]["jobs"]["wheel"]["strategy"]["matrix"]["exclude"]
    assert f"python{left_out['python']}" == try_release.NEWEST_ONLY
    assert workflows[0]["jobs"]["lowest"]["steps"][1]["with"]["python-version"] == ci


def test_the_script_of_the_release_finds_commands_and_code():
    commands = try_release.commands_of((quick.FILES / "README.md.txt").read_text())
    assert f"lightning-fl fit --config config.yaml {try_release.FEW_ROUNDS}" in commands
    assert "lightning-fl report runs/version_0" in commands
    code = try_release.own_module()
    assert "class MyModule(L.LightningModule)" in code
    assert "max_epochs=3," in code


def test_the_wheel_holds_every_module_and_config_once_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = Counter(name for name in archive.namelist() if ".dist-info/" not in name)
    configs = {f"lightning_fl/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.yaml")}
    of_reports = ("figures.mplstyle", "page.html", "page.js")
    others = {"lightning_fl/py.typed", *(f"lightning_fl/report/{name}" for name in of_reports)}
    others |= {"lightning_fl/methods/index.md"}  # what `lightning-fl methods` reads
    others |= {f"lightning_fl/cli/project_files/{path.name}" for path in quick.FILES.iterdir()}
    app = (ROOT / "lightning_fl" / "integrations" / "flower_app").iterdir()
    others |= {f"lightning_fl/integrations/flower_app/{path.name}" for path in app}
    assert names == Counter(modules() | configs | others)


def test_the_wheel_carries_licence_and_command(wheel):
    info = f"lightning_fl-{lightning_fl.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert f"{info}/licenses/LICENSE" in archive.namelist()
        commands = archive.read(f"{info}/entry_points.txt").decode()
    assert "lightning-fl = lightning_fl.cli:main" in commands


#: The command, in the package that was installed.
RUN = """
import sys, lightning_fl, lightning_fl.cli
print(lightning_fl.__file__)
sys.argv = ["lightning-fl", *sys.argv[1:]]
lightning_fl.cli.main()
"""


@pytest.mark.slow
def test_the_wheel_runs_a_config_that_it_brings(built, tmp_path):
    """That of the checkout: the test above says that the other holds the same."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile")
    python(*install, "--target", site, built)
    options = ["fit", "--config", "digits.yaml", "--trainer.max_epochs=1"]
    options.append("--federation.policy.init_args.num_steps=1")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = python("-c", RUN, *options, cwd=empty, env=environment)
    written = yaml.safe_load((empty / "runs/digits/version_0/config.yaml").read_text())
    assert written["data"]["class_path"].endswith("Digits")
    assert Path(done.stdout.splitlines()[0]).is_relative_to(site)


def test_the_sdist_holds_the_checkout_once(checkout, sdist):
    with tarfile.open(sdist) as archive:
        names = Counter(Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames())
    assert max(names.values()) == 1
    found = [path for name in FOLDERS for path in (checkout / name).rglob("*") if path.is_file()]
    assert {path.relative_to(checkout).as_posix() for path in found} | set(FILES) <= names.keys()
    # The links stay behind: followed, they would ship their folders a second time.
    assert names.keys().isdisjoint(f"lightning_fl/{name}" for name in LINKS)
