"""The commands that pages print are ones that the scripts accept."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("re*/*.md")),  # records and results
    ROOT / "docs" / "speed.md",
]


def commands(text):
    """Return the commands of scripts in ``benchmarks`` on lines of their own, and within lines."""
    text = re.sub(r"\\\n\s*", "", text)
    own = re.findall(r"^ *python benchmarks/(\w+)\.py (.*)$", text, re.MULTILINE)
    return [*own, *re.findall(r"(?<!`)`(\w+)\.py ([^`]+)`", text)]


def test_commands_are_found_over_several_lines():
    page = "    python benchmarks/rules.py --seeds 1 \\\n        --jobs 2\n\n`kept.py a\nb`"
    assert commands(page) == [("rules", "--seeds 1 --jobs 2"), ("kept", "a\nb")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_accept_the_commands_of_a_page(page, script, capsys):
    for name, line in commands(page.read_text()):
        words = shlex.split(line)
        end = words.index("--") if "--" in words else len(words)
        # `--help` ends the script after what stands before it has been read.
        with pytest.raises(SystemExit) as stopped:
            script(name).main([*words[:end], "--help"])
        assert stopped.value.code == 0, f"{name} {line}\n{capsys.readouterr().err}"
