"""Commands that answer without torch."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import quick_cli
from child import python
from lightning_fl.cli import quick
from lightning_fl.cli.arguments import COMMANDS, OF_TRAINER, named_runs, with_configs

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = """
import sys
from lightning_fl.cli import main
try:
    main({words!r})
except SystemExit:
    pass
assert not {{"torch", "lightning", "matplotlib"}} & sys.modules.keys()
"""


@pytest.mark.parametrize("words", [[], ["--version"], ["configs"], ["methods"], ["ft"], ["report"]])
def test_help_lists_and_mistakes_do_not_wait_for_torch(words):
    python("-c", WITHOUT_TORCH.format(words=words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.yaml", "--x", "20"], ["--config", "a.yaml", "--x", "20"]),
        (["--x", "20", "a.yaml"], ["--x", "20", "--config", "a.yaml"]),
        (["-c", "a.yaml", "b.yml"], ["-c", "a.yaml", "--config", "b.yml"]),
        (["--x=-1", "a.yaml"], ["--x=-1", "--config", "a.yaml"]),
        (["--data", "a.yaml"], ["--data", "a.yaml"]),
        (["--config", "{data: digits.yaml}"], ["--config", "{data: digits.yaml}"]),
    ],
)
def test_file_without_an_option_is_a_configuration(words, expected):
    assert with_configs(words) == expected


@pytest.mark.parametrize(
    "words", [["-c", "digits.yaml"], ["--config=configs/digits.yaml"], ["--config", "digits"]]
)
def test_configuration_of_the_package_is_found_unless_there_is_a_file(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = with_configs(words)[-1].removeprefix("--config=")
    assert Path(found).samefile(ROOT / "configs" / "digits.yaml")
    own = tmp_path / words[-1].removeprefix("--config=")
    own.parent.mkdir(exist_ok=True)
    own.touch()
    assert with_configs(words) == words


def test_help_names_all_commands_and_the_version_is_printed(cli):
    assert re.fullmatch(r"lightning-fl \d+\.\d+\.\d+\n", cli("--version"))
    shown = " ".join(cli().split())
    assert all(f"{name} {text}" in shown for name, text in COMMANDS.items())
    assert LightningCLI.subcommands().keys() == set(OF_TRAINER)


@pytest.mark.parametrize("words", [["rapport"], ["configs", "--sort"], ["check", "--rounds", "x"]])
def test_mistyped_word_is_named(words, cli):
    assert words[-1] in cli(*words, expect=2)


def test_every_config_is_listed_with_a_description(cli):
    lines = cli("configs").splitlines()
    names = {
        path.relative_to(ROOT / "configs").as_posix() for path in ROOT.glob("configs/**/*.yaml")
    }
    assert {line.split()[0] for line in lines} == names
    for line in lines:
        description = line.partition("  ")[2].strip()
        assert len(description.split()) > 2, line
        assert description.endswith("."), line
        assert not re.match(r"(Data is read|Not run|test_acc|val_acc|accuracy)", description), line


def test_methods_are_searched(cli):
    out = cli("methods", "DITTO")
    assert "objectives.Ditto" in out
    assert "ditto_mnist.yaml" in out
    assert "FedAvg" not in out
    every = cli("methods")
    assert "FedBuff" in every
    assert not re.search(r"\]\(|\(results\)|`", every)
    cli("methods", "no such method", expect=2)


def test_a_wheel_has_the_page_of_methods_elsewhere(monkeypatch, tmp_path, cli):
    page = tmp_path / "index.md"
    page.write_text("## Mine\n\n| a | b |\n|---|---|\n| my method | `Name` |\n")
    monkeypatch.setattr(quick, "METHODS", (tmp_path / "missing.md", page))
    assert cli("methods") == "Mine: my method\n    Name\n"


def test_folders_of_a_report_can_be_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("a1", "a2", "b", "lr=0.1"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.html").touch()
    words = ["A=a*", "B=b", "lr=0.1", "x/lr=1", "A=b", "C=c*", "=b"]
    assert named_runs(words) == {
        "A": ["a1/", "a2/", "b/"],
        "B": ["b/"],
        "": ["lr=0.1", "x/lr=1", "=b"],
        "C": ["c*"],  # the report says that there is no such folder
    }


def test_reader_of_the_output_may_leave():
    command = [sys.executable, "-m", "lightning_fl", "configs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_folder_that_cannot_be_written_is_named(monkeypatch, cli):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "there")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "there: Permission denied: choose another folder" in cli("init", "there", expect=2)


def test_a_new_project_runs(monkeypatch, tmp_path, cli):
    assert "Next: cd 'my own' && lightning-fl fit" in cli("init", "my own")
    folder = tmp_path / "my own"
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.yaml", "module.py"}
    assert (folder / "README.md").read_text().startswith("# my own\n")
    assert "my own exists and is not empty" in cli("init", "my own", expect=2)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "module", raising=False)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 30
    with quick_cli.no_pictures():
        assert "val_acc" in cli("fit", "--config", "config.yaml", "--trainer.max_epochs=2")
    rounds = (folder / "runs" / "version_0" / "rounds.csv").read_text().splitlines()
    assert len(rounds) == 3
    cli("predict", "--config", "config.yaml")
    assert (folder / "runs" / "version_0" / "predictions.pt").is_file()
    monkeypatch.delitem(sys.modules, "module")
