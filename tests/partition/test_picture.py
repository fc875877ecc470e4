"""The picture shows the counts."""

import io

import pytest
import torch
from matplotlib.figure import Figure

from lightning_fl.partition import IID, Dirichlet, label_drift, plot
from numbered import counts, rng


def picture(rule, num_clients, num_classes=10, **options):
    labels = torch.arange(40 * num_clients) % num_classes
    parts = rule(labels, num_clients, rng())
    figure = plot(parts, labels, **options)
    assert isinstance(figure, Figure)
    assert figure.canvas.manager is None  # no window: pyplot does not know it
    figure.savefig(io.BytesIO(), format="png")
    return figure, counts(parts, labels)


@pytest.mark.parametrize("num_clients", [10, 200])
def test_a_picture_shows_sizes_drift_and_the_counts_of_classes(num_clients):
    figure, table = picture(Dirichlet(), num_clients)
    top, drift, grid = figure.axes[:3]
    assert [bar.get_height() for bar in top.patches] == table.sum(1).tolist()
    assert [bar.get_height() for bar in drift.patches] == pytest.approx(label_drift(table).tolist())
    assert grid.images[0].get_array().T.tolist() == table.tolist()


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 1), (2, 3), (60, 100)])
def test_any_shape_can_be_drawn(num_clients, num_classes):
    picture(IID(), num_clients, num_classes)
