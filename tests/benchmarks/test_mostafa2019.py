"""The script runs cells once, goes on where it was, and shows tables; no accuracy is judged."""

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def commands(bench, command_line):
    """Stand in for the command line: a table of two rounds, an accuracy by method, a time."""

    def rule(name, **options):
        return {"class_path": f"a.b.{name}", "init_args": options}

    config = {
        "model": rule("M", net=rule("Net", width=4, bias=None), terms=[rule("Term"), rule("Pull")]),
        "data": rule("D", batch_size=64),
        "federation": {"policy": rule("Schedule", lr=0.1)},
    }

    def leave(line, run):
        (run / "config.yaml").write_text(json.dumps(config))
        if clock := [a for a in line if "mostafa2019.Clock" in a]:
            path = json.loads(clock[0].partition("=")[2])[0]["init_args"]["path"]
            took = 3.0 if "fa_rm" in run.parent.name else 2.0
            Path(path).write_text(json.dumps([took, took + 0.1, 9.0]))

    def printed(folder):
        accuracy = 0.9 if "fa_rm" in folder.name else 0.5 + 0.01 * int(folder.name[-1])
        return f"│ test_acc │ {accuracy} │"

    table = "round,mean_lr,mean_num_steps,val_loss\n1,0.05,10,2.3\n2,0.06,9,1.5\n"
    return command_line(table, printed, leave)


def test_cells_run_once_and_tables_show_means(bench, commands, page, tmp_path, capsys):
    least = ["--tasks", "kws", "--splits", "noniid", "--seeds", "1", "3"]
    least += ["--participation", "1.0", "--methods", "fa"]
    page(*least)
    assert len(commands) == 4
    fit = " ".join(commands[0])
    for word in ("kws.yaml", "noniid.yaml", "fa.yaml", "--federation.client_fraction=1.0"):
        assert word in fit
    assert "coefficient" not in fit
    text = page(*least, "fa_rm", "--jobs", "2")
    assert len(commands) == 8
    assert "--model.init_args.terms.coefficient=1.0" in " ".join(commands[-1])

    assert "| C=1, non-IID | 52.0 ± 1.4 (28.4) | - (29.9) | - (81.1) | 90.0 ± 0.0 (79.2) |" in text
    assert "2 seeds, 2 rounds" in text
    assert "- FA: network Net(width=4); terms Term(), Pull(); policy Schedule(lr=0.1); b" in text
    assert capsys.readouterr().out.endswith(text + "\n")
    assert len(bench.main(["--out", str(tmp_path), *least, "fa_rm"])) == 4


def test_a_method_can_have_options_of_its_own(bench, commands, tmp_path, capsys):
    given = ["--tasks", "mnist", "--splits", "iid", "--participation", "1", "--seeds", "1"]
    given += ["--out", str(tmp_path), "--methods", "fa", "fa_rm_same"]
    bench.main([*given, "--with", "fa_rm_same --a=1", "--with=fa_rm_same --b=2", "--", "c=3"])
    fits = [line for line in commands if "fit" in line]
    assert [("--a=1" in line, "--b=2" in line) for line in fits] == [(False,) * 2, (True,) * 2]
    assert all("c=3" in line for line in commands)
    assert "| FA+AH | FA+RM, same layers |" in capsys.readouterr().out
    noted = json.loads((tmp_path / "options.json").read_text())
    assert noted == ["c=3", "fa_rm_same --a=1", "fa_rm_same --b=2"]
    for wrong, words in ((["--", "c=3"], "another --out"), (["--with", "fb x"], "got 'fb x'")):
        with pytest.raises(SystemExit):
            bench.main([*given, *wrong])
        assert words in capsys.readouterr().err


def test_a_cell_that_fails_is_named_and_the_others_go_on(bench, commands, tmp_path, capsys):
    given = ["--tasks", "mnist", "--methods", "fa", "--seeds", "1", "--out", str(tmp_path)]
    given += ["--splits", "iid", "noniid", "--participation", "1"]
    with pytest.raises(SystemExit, match=r"2 runs failed.*: mnist-iid-1-fa-1, mnist-noniid-1-fa-1"):
        bench.main([*given, "--", "fail"])
    assert "mnist-iid-1-fa-1 failed:\nno data" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main([*given, "--", "--trainer.max_epochs=3"])
    assert "choose another --out" in capsys.readouterr().err
    assert json.loads((tmp_path / "options.json").read_text()) == ["fail"]


def test_a_worker_that_raises_is_heard(bench, monkeypatch, tmp_path):
    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["runs"], "fit_and_test", broken)
    with pytest.raises(OSError, match="disk full"):
        bench.main(["--tasks", "mnist", "--seeds", "1", "--out", str(tmp_path)])


def test_figure_3(bench, commands, tmp_path):
    given = ["--tasks", "mnist", "kws", "--seeds", "1", "2", "--out", str(tmp_path / "out")]
    picture = tmp_path / "docs" / "figure.png"
    bench.main([*given, "--methods", "fa_rm_ah", "--figure", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="needs results of fa_rm_ah"):
        bench.main([*given, "--methods", "fa", "--figure", str(picture)])


def test_overhead_is_a_ratio_of_runs_of_as_many_steps(bench, commands, tmp_path, capsys):
    bench.main(["--tasks", "mnist", "--overhead", "2", "--out", str(tmp_path)])
    assert len(commands) == 2 * len(bench.PUBLISHED)
    assert sum(any("num_steps: [10]" in a for a in line) for line in commands) == 2 * 2
    row = capsys.readouterr().out.splitlines()[2]
    fast, slow = "2.100 (1.00)", "3.100 (1.48)"
    assert row == f"| mnist | {fast} | {fast} | {slow} | {slow} | {fast} |"


def test_the_clock_notes_rounds(bench, tmp_path):
    for rounds, left in ((3, 1), (31, 20)):
        clock = bench.Clock(str(tmp_path / "seconds.json"))
        for _ in range(rounds):
            clock.on_train_epoch_end(None, None)
        clock.on_fit_end(None, None)
        assert len(json.loads((tmp_path / "seconds.json").read_text())) == left
