"""Error messages and warnings of the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pydoc import locate
from typing import get_type_hints


def explain(message: str, options: Sequence[str] = ()) -> str:
    """Return a short version of a jsonargparse error message, with a suggestion if possible.

    Args:
        message: Error message of jsonargparse.
        options: Existing flags.

    Example:
        >>> explain("unrecognized arguments: --trainer.max_epoch=3", ["--trainer.max_epochs"])
        'unknown option --trainer.max_epoch: did you mean --trainer.max_epochs?'
        >>> explain("the following arguments are required: fit.data, fit.model")
        'no data and no model: set --config, such as --config digits.yaml'
        >>> explain("unrecognized arguments: digits.yaml")
        'unknown argument digits.yaml: set --config digits.yaml'
    """
    if found := re.search(r"unrecognized arguments: ([^-\s]\S*)", message):
        is_config = found[1].endswith((".yaml", ".yml"))
        remedy = f"set --config {found[1]}" if is_config else "options begin with --"
        return f"unknown argument {found[1]}: {remedy}"
    if found := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        return f"unknown option {found[1]}{did_you_mean(found[1], options)}"
    if found := re.search(r"does not accept option '([^']+)'", message):
        names = [option.removeprefix("--") for option in options]
        return f"unknown option {found[1]}{did_you_mean(found[1], names)}"
    required = r"the following arguments are required: (.*)"
    if found := re.search(required, message):
        missing = [name.partition(".")[2] or name for name in found[1].split(", ")]
        if set(missing) <= {"model", "data"}:
            return f"no {' and no '.join(missing)}: set --config, such as --config digits.yaml"
    key = ".".join(re.findall(r'[Kk]ey "([^"]+)"', message))
    value = re.search(r"Given value: (?:NestedArg\(.* val=(\{.*\})\)|([^N].*))", message)
    got = (value[1] or value[2])[:200] if value else ""
    if found := re.search(r"Import path.* does not correspond to a subclass of (\w+)", message):
        remedy = ": FromDataModule takes its data" * (found[1] == "FederatedDataModule")
        return f"{key} must be a {found[1]}, got {got}{remedy}"
    malformed = "Option 'class_path' is not|Expected an instantiatable class|Not a valid subclass"
    malformed += "|'init_args': None"
    if got and re.search(malformed, message) and "dot import path" not in message:
        form = "{class_path: NAME, init_args: {OPTION: VALUE}}"
        return f"{key} must be the name of a class or {form}, got {got}"
    owned = r"Option '([^']+)' is not accepted(?:\. Got value: Namespace\(class_path='([^']+)')?"
    if found := re.search(owned, message):
        owner = found[2] or re.findall(r"class_path '([^']+)'", message[: found.start()])[-1]
        names = list(inspect.signature(locate(owner)).parameters)  # type: ignore[arg-type]
        similar = did_you_mean(found[1], names) or f": it has {', '.join(names) or 'none'}"
        if owner.endswith(".Callback"):  # as the list has no entry yet
            similar = f": name the class first, as in --{key}+=ClientFaults"
        return f"{key}: {owner.rpartition('.')[2]} has no option {found[1]}{similar}"
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        names = known_names(message)
        known = f"\nKnown names: {', '.join(names)}" * bool(names)
        elsewhere = f": lightning-fl methods {found[1]} tells whether it is another kind of method"
        similar = did_you_mean(found[1], names) or elsewhere
        return f"{key}: unknown class {found[1]}{similar}{known}"
    if found := re.search(rf"Problem with given class_path '([^']+)':\s+{required}", message):
        options = " ".join(f"--{key}.{name}" for name in found[2].split(", "))
        return f"{key}: {found[1].rpartition('.')[2]} requires {found[2]}: set {options}"
    reason = r"(module '[^']+' has no attribute '[^']+'|No module named '[^']+')"
    if found := re.search(rf"Problem with given class_path '([^']+)':\s+{reason}", message):
        module, _, name = found[1].rpartition(".")
        owner = locate(module)
        similar = did_you_mean(name, [] if owner is None else dir(owner))
        return f"{key}: unknown class {found[1]}: {found[2]}{similar}"
    if wrong := _wrong_type(key, message):
        return wrong
    names = known_names(message)
    text = " ".join(message.split())
    short = text if len(text) <= 400 else f"{text[:300]} ... {text[-90:]}"
    return short + f"\nKnown names: {', '.join(names)}" * bool(names)


def _wrong_type(key: str, message: str) -> str | None:
    """Return what a value has to be, and what it is; None if the message does not say it."""
    inner = message[message.rfind('arser key "') :]
    expected = [(kind, "") for kind in re.findall(r"Not of type (\w+): ", inner)]
    expected += re.findall(r"Expected an? (.+?)(?:\. Got value: (.*))?$", inner, re.MULTILINE)
    value = re.search(r"Given value: (.*)", inner)
    got = value[1] if value else ""
    if with_value := [(kind, at) for kind, at in expected if at]:  # of the option itself
        expected, got = with_value, with_value[0][1]
    types = [describe_type(kind) for kind, _ in expected]
    nested = re.search(r"NestedArg\(key='([^']+)'", message)
    if nested and got.startswith("NestedArg("):  # an option of no class
        return f"{key} has no class yet: name it first, as in --{key}=CLASS --{key}.{nested[1]}=..."
    if nested and not key.endswith(nested[1].rpartition(".")[2]):
        key = f"{key}.{nested[1]}"
    if not types or not got:
        return None
    if "a number" in types:
        types = [kind for kind in types if kind != "a whole number"]
    return f"{key} must be {' or '.join(dict.fromkeys(types))}, got {got!r:.200}"


def describe_type(kind: str) -> str:
    """Return the description of a type in jsonargparse's messages.

    Example:
        >>> describe_type("<class 'int'>"), describe_type("typing.Literal['mean', 'sum']")
        ('a whole number', "one of 'mean', 'sum'")
    """
    name = kind.removeprefix("<class '").removesuffix("'>")
    if found := re.fullmatch(r"typing\.Literal\[(.*)\]", name):
        return f"one of {found[1]}"
    words = {"int": "a whole number", "float": "a number", "NoneType": "null", "str": "a text"}
    words |= {"PositiveInt": "a positive whole number", "dict": "a mapping"}
    words |= {"bool": "true or false", "Sequence": "a list, such as [X]"}
    last = name.rpartition(".")[2]
    return words.get(last, last)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a suggestion for an unknown name; empty if no known name is similar.

    Example:
        >>> did_you_mean("Dirichlett", ["Dirichlet", "IID"]), did_you_mean("x", [])
        (': did you mean Dirichlet?', '')
        >>> did_you_mean("SCAFFOLD", ["Scaffold"])
        ': did you mean Scaffold?'
    """
    by_lower_case = {each.lower(): each for each in names}
    similar = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.7)
    return f": did you mean {by_lower_case[similar[0]]}?" if similar else ""


def known_names(message: str) -> list[str]:
    """Return the class names that an option accepts, from a jsonargparse error message."""
    head, unknown, _ = message.partition("Expected a dot import path string")
    owner, _, option = head.rpartition('Parser key "')
    key, _, types = option.partition('"')
    if unknown and "Subtypes" not in types:  # a single type, which is not part of the message
        owner = owner.rpartition("class_path '")[2].partition("'")[0]
        with suppress(NameError, TypeError):  # annotations that cannot be read
            types = str(get_type_hints(getattr(locate(owner), "__init__", None)).get(key))
    # Without classes of torch: there are hundreds of networks.
    found = [locate(name) for name in re.findall(r"\blightning[\w.]+", types) if unknown]
    classes = [c for c in found if isinstance(c, type)]
    for c in classes:
        classes += c.__subclasses__()
    return sorted({c.__name__ for c in classes if not inspect.isabstract(c) and _is_public(c)})


def _is_public(kind: type) -> bool:
    """Return whether a class is for users; of this library, what its packages export is."""
    package = ".".join(kind.__module__.split(".")[:2])
    if package.startswith("lightning_fl."):
        return getattr(import_module(package), kind.__name__, None) is kind
    return not kind.__name__.startswith("_")


def with_notes(error: BaseException) -> str:
    """Return the message of an error with its notes, which give the round and the clients.

    Example:
        >>> error = ValueError("wrong")
        >>> error.add_note("in round 2, client 7")
        >>> print(with_notes(error))
        wrong
        in round 2, client 7
    """
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    r"""Format a warning for the command line, without the line of code.

    Example:
        >>> show_warning("2 of 10 updates", UserWarning, "file.py", 3)
        'lightning-fl: warning: 2 of 10 updates\n'
    """
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    return f"lightning-fl: {kind}: {message}\n"
