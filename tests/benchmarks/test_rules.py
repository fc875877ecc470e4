"""The script runs arms once, and shows tables and pictures; no accuracy is judged."""

import json

import pytest
import torch

import quick_cli


@pytest.fixture
def commands(bench, command_line):
    """Stand in for the command line: two rounds, of which the second has all figures."""

    def leave(line, run):
        (run / "config.yaml").write_text("client_rotations:\n  - 0\n  - 180\nnum_clients: 4\n")
        rule = {"cluster_of": torch.tensor([0, 1, 0, 0, -1])}
        state = {"FederatedLoop": {"aggregator": rule, "num_clients": 4}}
        torch.save({"callbacks": state}, run / "last.ckpt")

    table = "round,val_acc,server/mean,clusters\n1,0.5,,1\n2,0.7,0.8,2\n"
    return command_line(table, leave=leave)


def test_arms_run_once_and_tables_show_means(commands, page, tmp_path, capsys):
    given = ["--experiments", "clustered2", "control", "--seeds", "1", "2"]
    text = page(*given, "--jobs", "2")
    assert len(commands) == 2 * 2 * (2 + 4)
    page(*given)
    assert len(commands) == 2 * 2 * (2 + 4)
    # Of six pairs that of 1 and 3 is apart, those of 3 with 0 and 2 are together: all wrongly.
    row = "| ClusteredFL | 80.0 ± 0.0 | - | 2.000 ± 0.000 | 50.0 ± 0.0 |"
    assert row in text
    assert "| FedControl, lambda = 0.8 | 90.0 ± 0.0 | 2 ± 0 |" in text
    for name in ("clustered2", "control"):
        assert (tmp_path / "docs" / f"rules-{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        page(*given, "--", "--trainer.max_epochs=3")
    assert "choose another --out" in capsys.readouterr().err
    assert json.loads((tmp_path / "options.json").read_text()) == []


def test_arms_that_are_named_run_alone_and_others_are_not_in_the_table(
    bench, commands, tmp_path, capsys
):
    given = ["--experiments", "control", "--seeds", "1", "--out", str(tmp_path)]
    bench.main([*given, "--arms", "FedAvg"])
    assert len(commands) == 2
    table = capsys.readouterr().out
    assert "| FedAvg |" in table
    assert "FedControl, lambda" not in table
    with pytest.raises(SystemExit):
        bench.main([*given, "--arms", "FedAvgg"])
    assert "no arm 'FedAvgg'" in capsys.readouterr().err


def test_accuracy_at_a_virtual_time_is_the_last_one_before(bench):
    table = [("2.5", "0.1"), ("9", ""), ("12", "0.3")]
    table = [{"virtual_time": time, "val_acc": accuracy} for time, accuracy in table]
    assert [bench.accuracy_at(table, seconds) for seconds in (3, 10, 12)] == [0.1, 0.1, 0.3]
    assert bench.accuracy_at(table, 13) != bench.accuracy_at(table, 13)  # the run was shorter
    assert bench.accuracy_at(table, 2) != bench.accuracy_at(table, 2)  # too early


@pytest.mark.slow
def test_every_arm_is_a_config_that_parses(bench):
    for experiment in bench.EXPERIMENTS.values():
        for arm in experiment.arms:
            quick_cli.parse(*bench.options(experiment, arm, 1))
