"""The table of rounds: what is in a row, what is not, and its file."""

import csv

import torch

from lightning_fl.federation.table import RoundTable


def test_a_row_takes_late_figures_until_it_is_closed():
    table = RoundTable()
    table.add({"round": 1})
    table.complete({"a": 1})
    table.complete({"a": 2, "b": 3}, close=True)
    table.complete({"a": 9, "c": 9})
    assert table.rows == [{"round": 1, "a": 2.0, "b": 3.0}]


def test_the_file_has_a_column_for_everything_that_any_round_had(tmp_path):
    table = RoundTable()
    table.rows = [
        {"round": 1, "loss": 0.1, "dropped_clients": ""},
        {"round": 2, "loss": 1e-20, "dropped_clients": "3 5", "val_acc": 0.5},
    ]
    path = tmp_path / "run" / "rounds.csv"
    table.write(path)
    assert path.read_text() == ("round,loss,dropped_clients,val_acc\n1,0.1,,\n2,1e-20,3 5,0.5\n")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["loss"]) == 1e-20
    assert [p.name for p in path.parent.iterdir()] == ["rounds.csv"]


def test_a_table_that_grows_is_written_as_if_at_once(tmp_path):
    rows = [{"round": 1}, {"round": 2, "loss": 0.5}, {"round": 3, "val": 1.0}, {"round": 4}]
    table = RoundTable()
    for row in rows:
        table.rows.append(row)
        table.write(tmp_path / "grown.csv")
        RoundTable(table.rows).write(tmp_path / "at_once.csv")
        assert (tmp_path / "grown.csv").read_bytes() == (tmp_path / "at_once.csv").read_bytes()
    with open(tmp_path / "grown.csv", newline="") as file:
        assert [row["val"] for row in csv.DictReader(file)] == ["", "", "1.0", ""]


def test_a_metric_with_the_name_of_a_column_does_not_replace_it():
    table = RoundTable()
    table.begin({})
    table.add({"round": 1, "late": 2})
    for close in (False, True):  # a checkpoint asks before the round is over
        table.complete({"late": torch.tensor(0.5), "acc": torch.tensor(1.0)}, close)
    assert table.rows == [{"round": 1, "late": 2, "acc": 1.0, "module/late": 0.5}]
