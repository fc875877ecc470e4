"""Figures over clients, beside plain ones."""

import csv

import pytest
import torch

from lightning_fl.callbacks.client_table import summary, write_table


@pytest.mark.parametrize(("clients", "decile"), [(1, 1), (9, 1), (25, 2), (40, 4)])
def test_the_worst_decile_is_the_mean_of_the_lowest_scores(clients, decile):
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"test_samples": 1 + k, "kept": k / clients} for k in order]
    found = summary(rows, "kept")
    assert found["worst"] == pytest.approx(sum(range(decile)) / decile / clients)
    assert found["mean"] == pytest.approx((clients - 1) / 2 / clients)
    assert summary(rows, "local") == {}


def test_a_client_without_a_model_has_an_empty_cell(tmp_path):
    write_table(tmp_path / "clients.csv", [{"client": 0, "kept": 0.5}, {"client": 1}])
    assert list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines())) == [
        {"client": "0", "kept": "0.5"},
        {"client": "1", "kept": ""},
    ]


def test_the_names_of_clients_are_in_the_table(tmp_path):
    rows = [{"client": 1, "server": 0.5}, {"client": 0, "server": 0.25}]
    write_table(tmp_path / "clients.csv", rows, ["north", "south"])
    found = (tmp_path / "clients.csv").read_text().splitlines()
    assert found == ["client,name,server", "1,south,0.5", "0,north,0.25"]
