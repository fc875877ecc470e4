"""The script runs each point once, and shows tables and pictures; no accuracy is judged."""

import re

import pytest
import torch

import quick_cli
from lightning_fl.datamodules import InMemory


@pytest.fixture
def commands(bench, command_line):
    """Stand in for the command line: a round with all figures, two networks of two neurons."""
    return command_line(
        "round,width_1,neurons,ensemble/uniform,ensemble/average,val_acc\n1,3,4,0.9,0.2,0.8\n",
        "│ test_acc │ 0.9 │\n│ test_ensemble/uniform │ 0.95 │\n",
    )


def test_points_run_once_and_tables_show_means(commands, page, tmp_path):
    given = ["--figures", "clients", "depth", "--data", "mnist", "--seeds", "1", "2"]
    text = page(*given, "--jobs", "2")
    # Six values of each sweep, ten clients with one layer in both; two splits, two seeds, two runs
    # of fit and test each.
    assert len(commands) == (6 + 6 - 1) * 2 * 2 * 2 * 2
    page(*given)
    assert len(commands) == (6 + 6 - 1) * 2 * 2 * 2 * 2
    assert "### mnist, heterogeneous, 2 trials" in text
    assert "| uniform ensemble | 95.0 ± 0.0 |" in text
    assert "| downpour SGD | 90.0 ± 0.0 |" in text
    assert "| neurons of the merged network | 3 ± 0 |" in text
    for name in ("clients", "depth"):
        assert (tmp_path / "docs" / f"pfnm-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_arms(commands, page):
    text = page("--figures", "streaming", "communication", "--seeds", "1")
    assert len(commands) == 2 * (4 + 12)
    assert "| StreamingPFNM | 90.0 | 95.0 |" in text


@pytest.fixture
def again(bench, page, tmp_path, monkeypatch):
    """Leave two networks of two neurons at a point; return a function that shows pages of them."""
    monkeypatch.setattr(
        bench,
        "GRID",
        {"client_variance": (0.5,), "prior_variance": (1.0, 9.0), "gamma": (1.0, 5.0)},
    )
    both = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    half = both[0], torch.tensor([0, 0])
    monkeypatch.setattr(bench, "samples", lambda place, data: (both, half))

    def show(sweep, value, *figures):
        place = bench.point(tmp_path, sweep, "mnist", "homogeneous", value, 1)["pfnm"].place
        run = place / "version_0"
        run.mkdir(parents=True)
        (place / "result.json").write_text('{"test_acc": 0.9}')
        flat = [torch.eye(2), torch.zeros(2), torch.eye(2), torch.zeros(2)]
        state = {"networks": [flat, flat], "class_counts": torch.ones(2, 2)}
        torch.save({"callbacks": {"MatchingBaselines": state}}, run / "last.ckpt")
        return page("--figures", *figures, "--data", "mnist", "--seeds", "1", "--show")

    return show


def test_sensitivity_and_cost(bench, again, monkeypatch):
    monkeypatch.setattr(bench, "seconds", lambda clients, width: clients * width / 1000)
    text = again("clients", 25, "sensitivity", "variance", "cost")
    assert "| 1, 0.5 | 100.0, 50.0 (2) | 100.0, 50.0 (2) |" in text
    assert "| 0.5 | - | - | - | - | 100.0, 50.0 (2) | - |" in text
    assert "| seconds | 0.50 | 1.00 |" in text


def test_the_ways_to_choose_options(bench, again, monkeypatch):
    figures = {0.001: (0.9, 3), 1.0: (0.95, 9), 50.0: (0.949, 4)}

    def matched(self, options):
        train, neurons = figures[options.gamma]
        limited = 1 if options.max_width else 0
        return bench.Merged(train, options.prior_variance / 100, (neurons - limited,))

    monkeypatch.setattr(bench.Saved, "matched", matched)
    text = again("depth", 3, "selection")
    empty = "| - | - |"
    assert f"half a point (default) {empty} 94.9, 1.0 (4) |" in text
    assert f"| the most accurate network {empty} 95.0, 1.0 (9) |" in text
    assert f"(the paper) {empty} 95.0, 10.0 (9) |" in text
    assert f"authors' program {empty} 95.0, 1.0 (8) |" in text


@pytest.mark.slow
def test_networks_trained_as_by_the_authors_are_kept(bench, page, monkeypatch):
    random = torch.Generator().manual_seed(0)
    y = torch.arange(640) % 10
    x = torch.randint(20, (640, 1, 28, 28), dtype=torch.uint8, generator=random)
    x[torch.arange(640), 0, y] = 255  # a row of white pixels tells the class

    class Images:
        def __init__(self, root, val_size):
            assert (root, val_size) == ("images", 0)
            self.train = self.test = InMemory(x, y)

        def setup(self, stage):
            pass

    monkeypatch.setattr(bench, "MNIST", Images)
    monkeypatch.setattr(bench, "COMPACT", ((4, 1), (3, 2)))
    few = {
        name: (tuple(some[-2:] for some in values), *others)
        for name, (values, *others) in bench.CHOICES.items()
    }
    monkeypatch.setattr(bench, "CHOICES", few)
    given = ["--figures", "compactness", "--seeds", "1", "--", "--data.init_args.root=images"]
    text = page(*given)
    assert "| 4 each | 3 + 3 each |" in text
    row = next(line for line in text.splitlines() if line.startswith("| the most accurate"))
    accuracies, widths = re.findall(r"([\d.]+), [\d.]+ \(", row), re.findall(r"\((.*?)\)", row)
    assert min(map(float, accuracies)) > 30  # chance is 10
    assert 4 <= int(widths[0]) <= 40
    assert all(3 <= int(width) <= 30 for width in widths[1].split(" + "))
    monkeypatch.delattr(bench, "trained_alone")
    assert page(*given) == text


def test_matching_is_timed(bench):
    assert 0 < bench.seconds(3, 6) < 5


@pytest.mark.slow
def test_every_run_is_a_config_that_parses(bench, tmp_path):
    runs = [
        bench.arm_run(tmp_path, figure, arm, 1) for figure, a in bench.ARMS.items() for arm in a
    ]
    for data, split in (("mnist", "homogeneous"), ("cifar10", "heterogeneous")):
        runs += bench.point(tmp_path, "depth", data, split, 3, 1).values()
    for run in runs:
        quick_cli.parse(*run.options)
