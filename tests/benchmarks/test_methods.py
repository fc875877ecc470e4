"""The script tunes, runs methods once and shows tables; no accuracy is judged."""

from itertools import cycle

import pytest

import quick_cli


@pytest.fixture
def commands(bench, command_line):
    """Stand in for the command line: the second learning rate has the best validations."""

    def leave(line, run):
        score = 0.8 if any("lr=0.03" in option for option in line) else 0.5
        last = f"{score},4,1000000,3000000,0.25"
        table = f"val_acc,clients,bytes_up,bytes_down,kept/mean\n0.99,4,1,1,0.1\n,4,1,1,\n{last}\n"
        (run / "rounds.csv").write_text(table + f"{last}\n" * 2)

    return command_line("", leave=leave)


def test_learning_rates_are_tuned_once_for_each_method(bench, commands, page, tmp_path, capsys):
    chosen = ["--methods", "FedAvg", "SCAFFOLD", "--data", "mnist", "--seeds", "1", "2"]
    text = page("heterogeneity", *chosen)
    fits = [line for line in commands if "fit" in line]
    assert len(fits) == 2 * len(bench.RATES) + 2 * 2 * len(bench.SKEWS)
    tuned = fits[2 * len(bench.RATES) :]
    assert all("--federation.policy.init_args.lr=0.03" in line for line in tuned)
    assert {o for line in tuned for o in line if "seed_everything" in o} == {
        "--seed_everything=1",
        "--seed_everything=2",
    }
    row = "| SCAFFOLD | " + "90.0 ± 0.0 | " * len(bench.SKEWS) + "0.03 | 0 | "
    assert row in text
    assert "| FedNova |" not in text
    page("heterogeneity", *chosen)
    assert len([line for line in commands if "fit" in line]) == len(fits)
    with pytest.raises(SystemExit):
        bench.main(["heterogeneity", "--methods", "FedSGD", "--out", str(tmp_path)])
    assert "unknown method 'FedSGD'" in capsys.readouterr().err


def test_the_columns_are_those_of_the_models_of_a_method(bench, commands, page):
    chosen = ["--methods", "Per-FedAvg", "FedRep", "--data", "cifar10", "--seeds", "1"]
    text = page("personalization", *chosen)
    assert len([line for line in commands if "fit" in line]) == 2 * len(bench.GROUPS)
    assert "| global | personal | worst tenth | variance | s | MB |" in text
    # The stand-in leaves kept/mean alone: the personal model of Per-FedAvg, but not of FedRep.
    assert text.count("| Per-FedAvg | - | 25.0 | - | - | 0 | 1 |") == len(bench.GROUPS)
    assert text.count("| FedRep | - | - | - | - | 0 | 1 |") == len(bench.GROUPS)
    patterns = {word for line in commands for word in line if "local_parameters" in word}
    assert patterns == {'--federation.local_parameters=["net.11.*"]'}
    assert bench.MODELS.keys() == bench.PERSONALIZATION.keys()


@pytest.mark.slow
def test_every_run_is_a_config_that_parses(bench):
    for name, experiment in bench.EXPERIMENTS.items():
        # Each option once; a method has the same options on all data sets and splits.
        for arm, data, split in zip(
            experiment.arms, cycle(bench.DATA), cycle(experiment.splits), strict=False
        ):
            quick_cli.parse(*bench.options(name, bench.Case(data, arm, split, 1, 0.1)))
