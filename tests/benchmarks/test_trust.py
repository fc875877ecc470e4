"""The script runs each arm once, and shows tables; no accuracy is judged."""

import sys

import pytest

import quick_cli


@pytest.fixture
def commands(bench, command_line):
    """Stand in for the command line: two rounds with all figures."""
    names = "round,clients,dropped,val_acc,virtual_time,backdoor_acc,epsilon,clip_norm\n"
    return command_line(names + "1,20,10,0.5,3.0,0.2,1.5,0.5\n2,20,5,0.95,7.0,0.3,2.5,0.25\n")


def test_arms_run_once_and_tables_show_them(bench, commands, page, tmp_path):
    given = ["--parts", "faults", "privacy", "--seeds", "1", "2"]
    text = page(*given)
    runs = len(commands)
    assert runs == 2 * 2 * (len(bench.FAULTS) + len(bench.PRIVACY))
    page(*given, "--show")
    assert len(commands) == runs
    # 15 of 40 updates are lost; 0.9 is reached in the second round, at 7 s.
    assert "| FedAvg, no faults | 90.0 ± 0.0 | 37.5 ± 0.0 % | 7 ± 0 | 7 ± 0 |" in text
    assert "| z = 1 | 2.50 | 90.0 ± 0.0 | 0.25 ± 0.00 |" in text
    assert (tmp_path / "docs" / "trust-faults.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_fails_the_script(bench, commands, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys.modules["runs"], "command", lambda *_: None)
    with pytest.raises(SystemExit, match=f"{len(bench.PRIVACY)} runs failed, the tables lack them"):
        bench.main(["--parts", "privacy", "--out", str(tmp_path)])
    assert "| z = 1 | - | - | - |" in capsys.readouterr().out


def test_attacks_have_a_table_each(bench, commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "FRACTIONS", (0.0, 0.4))
    monkeypatch.setitem(bench.PARTS, "attacks", ("robust_mnist", bench.attack_arms()))
    bench.main(["--parts", "attacks", "--out", str(tmp_path)])
    # Without attackers, one run stands for all attacks but the backdoor.
    assert len(commands) == 2 * (len(bench.ATTACKS) + 2) * len(bench.RULES)
    text = capsys.readouterr().out
    assert text.count("| Multi-Krum | 90.0 / 30.0 | 90.0 / 30.0 |") == len(bench.ATTACKS)


@pytest.mark.slow
def test_every_arm_is_a_config_that_parses(bench, monkeypatch):
    monkeypatch.setattr(bench, "FRACTIONS", (0.4,))
    monkeypatch.setitem(bench.PARTS, "attacks", ("robust_mnist", bench.attack_arms()))
    arms = [(part, arm) for part in bench.PARTS for arm in bench.PARTS[part][1]]
    rules = {arm[1]: arm for part, arm in arms if part == "attacks"}
    attacks = {arm[0]: arm for part, arm in arms if part == "attacks"}
    for part, arm in arms:  # each rule and each attack once
        if part == "attacks" and arm not in (*rules.values(), *attacks.values()):
            continue
        quick_cli.parse(*bench.options(part, arm, 1))
