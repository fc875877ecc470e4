"""Figures over clients, beside plain ones."""

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


def test_a_table_has_names_of_clients_and_empty_cells(tmp_path):
    rows = [{"client": 1, "server": 0.5}, {"client": 0}]
    write_table(tmp_path / "clients.csv", rows, ["north", "south"])
    found = (tmp_path / "clients.csv").read_text()
    assert found == "client,name,server\n1,south,0.5\n0,north,\n"
