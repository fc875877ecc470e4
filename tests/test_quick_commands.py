"""Commands that answer without torch."""

import errno
import inspect
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import quick_cli
from lightning_fl.cli import COMMANDS, listing, main
from lightning_fl.cli.arguments import (
    export_words,
    named_runs,
    partition_words,
    with_shipped_configs,
)

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
    code = WITHOUT_TORCH.format(words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_interruption_of_an_import_is_no_error_of_a_package(tmp_path):
    """A package of this name in the working directory takes the place of torch."""
    code = """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("a traceback") from None
    """
    (tmp_path / "torch.py").write_text(inspect.cleandoc(code))
    command = [sys.executable, "-m", "lightning_fl", "fit", "--config=digits.yaml"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # `make check &` ignores it
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, preexec_fn=heard
    )
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


@pytest.mark.parametrize("option", ["--config", "-c"])
def test_a_config_is_a_shipped_file_or_a_text(option):
    _, _, found = with_shipped_configs(["fit", option, "digits.yaml"])
    assert Path(found).samefile(ROOT / "configs" / "digits.yaml")
    words = ["fit", option, "trainer: {default_root_dir: " + 300 * "x" + "}"]  # no name of a file
    assert with_shipped_configs(words) == words


def test_help_names_all_commands(capsys):
    main([])
    out = capsys.readouterr().out
    main(["--help"])
    assert capsys.readouterr().out == out
    assert all(f"  {name} " in out and text in out for name, text in COMMANDS.items())
    assert LightningCLI.subcommands().keys() <= COMMANDS.keys()


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert re.fullmatch(r"lightning-fl \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_mistyped_command_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["rapport"])
    assert "unknown command rapport: did you mean report?" in capsys.readouterr().err


def test_every_config_is_listed_with_a_description(capsys):
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    names = {
        path.relative_to(ROOT / "configs").as_posix() for path in ROOT.glob("configs/**/*.yaml")
    }
    assert {line.split()[0] for line in lines} == names
    for line in lines:
        description = line.partition("  ")[2].strip()
        assert len(description.split()) > 2, line
        assert description.endswith("."), line
        assert not re.match(r"(Data is read|Not run|test_acc|val_acc|accuracy)", description), line


def test_methods_are_searched(capsys):
    main(["methods", "DITTO"])
    out = capsys.readouterr().out
    assert "objectives.Ditto" in out
    assert "ditto_mnist.yaml" in out
    assert "FedAvg" not in out
    main(["methods"])
    every = capsys.readouterr().out
    assert "FedBuff" in every
    assert not re.search(r"\]\(|\(results\)|`", every)
    with pytest.raises(SystemExit, match="2"):
        main(["methods", "no such method"])


def test_a_wheel_has_the_page_of_methods_elsewhere(monkeypatch, tmp_path, capsys):
    page = tmp_path / "index.md"
    page.write_text("## Mine\n\n| a | b |\n|---|---|\n| my method | `Name` |\n")
    monkeypatch.setattr(listing, "METHODS", (tmp_path / "missing.md", page))
    main(["methods"])
    assert capsys.readouterr().out == "Mine\n\n  my method\n      Name\n\n"


def test_a_shell_completes_commands_and_options(capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit, match="0"):
        main(["completion", "bash"])
    script = capsys.readouterr().out
    assert f"subparsers=({' '.join(COMMANDS)})" in script
    assert "--federation.clients_per_round" in script
    done = subprocess.run(["bash", "-n"], input=script, text=True, check=False)
    assert done.returncode == 0


CHANGE = ["--data.init_args.num_clients", "20"]
FILE = ["--config", "digits.yaml"]


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["digits.yaml", *CHANGE], [*FILE, *CHANGE]),
        ([*CHANGE, "digits.yaml"], [*FILE, *CHANGE]),
        ([*FILE, *CHANGE], [*FILE, *CHANGE]),
        ([*CHANGE, *FILE], [*FILE, *CHANGE]),
        ([*CHANGE, "--config=digits.yaml"], [*FILE, *CHANGE]),
        (["digits.yaml", "--config", "b.yaml"], [*FILE, "--config", "b.yaml"]),
        (["--data.shift", "-1", "digits.yaml"], [*FILE, "--data.shift", "-1"]),
        (["--data={'a': 1}", "digits.yaml"], [*FILE, "--data={'a': 1}"]),
        (["--print_config", "digits.yaml"], [*FILE, "--print_config"]),
    ],
)
def test_a_value_is_not_taken_for_the_configuration(words, rest):
    assert partition_words([*words, "--output", "out"]) == ("out", ["fit", *rest])
    assert partition_words(["--output=out", *words]) == ("out", ["fit", *rest])


def test_values_are_not_taken_for_what_is_exported():
    asked, rest = export_words(["--data.shift", "3", "flower", *CHANGE, "digits.yaml"])
    assert (asked.target, asked.config, asked.output) == ("flower", "digits.yaml", "app")
    assert rest == ["--data.shift", "3", *CHANGE]
    assert export_words(["flower", "a.yaml", *FILE])[1] == FILE


def test_the_folder_of_a_new_project_is_quoted(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    main(["init", "my project"])
    assert "Next: cd 'my project' && lightning-fl fit" in capsys.readouterr().out


def test_folders_of_a_report_can_be_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("a1", "a2", "b", "lr=0.1"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.html").touch()
    words = ["A=a*", "B=b", "lr=0.1", "x/lr=1", "A=b", "C=c*", "=b"]
    assert named_runs(words) == {
        "A": ["a1", "a2", "b"],
        "B": ["b"],
        "": ["lr=0.1", "x/lr=1", "=b"],
        "C": ["c*"],  # the report says that there is no such folder
    }


def test_a_name_that_is_too_long_is_no_traceback(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["init", 300 * "a"])
    assert end.value.code == 2
    assert "File name too long: choose another folder" in capsys.readouterr().err


def test_a_reader_of_the_output_may_leave():
    code = """
        import sys
        from lightning_fl.cli import printing
        sys.stdin.read()  # until the reader has left
        with printing():
            print("one line")
        print("done", file=sys.stderr)
    """
    command = [sys.executable, "-c", inspect.cleandoc(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "done\n"
    assert process.returncode == 0


def test_a_folder_that_cannot_be_written_is_no_traceback(monkeypatch, tmp_path, capsys):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", "there")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SystemExit) as end:
        main(["init", str(tmp_path / "there")])
    assert end.value.code == 2
    assert "there: Read-only file system: choose another folder" in capsys.readouterr().err


def test_a_new_project_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    main(["init", "mine"])
    folder = tmp_path / "mine"
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.yaml", "module.py"}
    assert (folder / "README.md").read_text().startswith("# mine\n")
    with pytest.raises(SystemExit, match="2"):
        main(["init", "mine"])
    assert "mine exists and is not empty" in capsys.readouterr().err
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "module", raising=False)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 30
    with quick_cli.no_pictures():
        quick_cli.call(
            *("fit", "--config", "config.yaml", "--trainer.max_epochs=2"),
        )
    assert "val_acc" in capsys.readouterr().out
    rounds = (folder / "runs" / "version_0" / "rounds.csv").read_text().splitlines()
    assert len(rounds) == 3
    quick_cli.call("predict", "--config", "config.yaml")
    assert (folder / "runs" / "version_0" / "predictions.pt").is_file()
    monkeypatch.delitem(sys.modules, "module")
