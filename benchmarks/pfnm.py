"""The figures of Yurochkin et al. (2019) on real data: tables and pictures.

Each point is a run of ``fit`` and ``test`` in a folder of its own; one run has neural matching and
all baselines that are made of the same networks (``MatchingBaselines``), another has downpour SGD.
What is there already is not run again, and what was cut short goes on.

    python benchmarks/pfnm.py --jobs 2 --markdown tables.md -- --data.init_args.root=data
    python benchmarks/pfnm.py --figures clients --data mnist --seeds 1 -- --data.init_args.root=data

What follows ``--`` goes to ``fit`` and ``test`` of every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from lightning_fl.aggregators.matching.search import SEARCHED, narrowest
from lightning_fl.datamodules import CIFAR10, MNIST
from lightning_fl.functional.networks import Layers, MatchingOptions, match_networks
from lightning_fl.models import MLPClassifier
from lightning_fl.partition import IID, Dirichlet
from runs import (
    ROOT,
    Arms,
    Run,
    apart,
    check_options,
    fit_and_test_all,
    given,
    machine_line,
    mean_and_spread,
    newest,
    publish,
    result,
    rows,
    rule,
    shared_options,
    table,
)

CONFIGS = Path(__file__).parents[1] / "configs"
#: Options of the data: its inputs, and what the paper's table 1 has for it.
DATA: dict[str, tuple[int, list[str]]] = {
    "mnist": (784, []),
    "cifar10": (
        3072,
        [
            "--data=CIFAR10",
            "--model.init_args.optimizer.init_args.lr=0.001",
            "--model.init_args.optimizer.init_args.weight_decay=1e-5",
        ],
    ),
}
SPLITS: Arms = {
    "homogeneous": (),
    "heterogeneous": (given("data.init_args.partition", "Dirichlet", alpha=0.2, min_size=32),),
}
#: The paper's options of neural matching: sigma is chosen by training accuracy, and a layer of 700
#: neurons or more grows by one neuron per client.
PAPER = tuple(
    f"--federation.aggregator.init_args.{option}"
    for option in ("gamma=1", "prior_variance=10", "tolerance=0", "max_width=700")
)
#: What is drawn: the name in a result, and in the legend.
SERIES = {
    "test_acc": "neural matching",
    "test_ensemble/uniform": "uniform ensemble",
    "test_ensemble/weighted": "weighted ensemble",
    "test_ensemble/distilled": "distillation",
    "test_ensemble/local": "local networks",
    "test_ensemble/average": "naive average",
    "downpour": "downpour SGD",
}


class Sweep(NamedTuple):
    """Accuracy over something.

    Args:
        question: What it asks, a line.
        label: Of the horizontal axis.
        values: On it.
        clients: Of a value.
        depth: Hidden layers of a value.
    """

    question: str
    label: str
    values: tuple[int, ...]
    clients: Callable[[int], int]
    depth: Callable[[int], int]


SWEEPS = {
    "clients": Sweep(
        "Figure 2: one hidden layer of 50 neurons, one shot. The training data are divided among J"
        " clients.",
        "clients J",
        (5, 10, 15, 20, 25, 30),
        lambda value: value,
        lambda value: 1,
    ),
    "depth": Sweep(
        "Figure 3: ten clients, one to six hidden layers of 50 neurons.",
        "hidden layers C",
        (1, 2, 3, 4, 5, 6),
        lambda value: 10,
        lambda value: value,
    ),
}


class Arm(NamedTuple):
    """A run of its own.

    Args:
        name: In the table.
        config: Its file.
        options: Beside it.
    """

    name: str
    config: str
    options: tuple[str, ...] = ()


BASELINES = given("trainer.callbacks+", "baselines.MatchingBaselines")
#: One step of the server's Adam per round, with the mean of the updates of local SGD.
MEAN = (
    *rule("FedOpt", optimizer={"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}),
    given("model.init_args.optimizer", "torch.optim.SGD", lr=0.1),
)
#: Clients take turns: each starts from the model that the last one has updated.
CURRENT = (
    "--federation.clients_per_round=1",
    "--federation.sampler=RoundRobinSampler",
    "--vectorize=1",
)
#: What FedMA's authors take; a search of networks this large takes minutes.
FEDMA = ("gamma=7", "client_variance=1", "prior_variance=1")
ARMS = {
    "streaming": [
        Arm("StreamingPFNM", "pfnm_streaming_mnist"),
        Arm(
            "PFNM, local networks continue independently",
            "pfnm_streaming_mnist",
            (
                "--federation.aggregator=PFNM",
                "--federation.aggregator.init_args.restart=own",
                BASELINES,
            ),
        ),
        Arm("FedAvg", "pfnm_streaming_mnist", ("--federation.aggregator=FedAvg",)),
        Arm("Downpour", "pfnm_streaming_mnist", ("--federation.aggregator=Downpour",)),
    ],
    "convolutions": [
        Arm("FedMA, four rounds", "fedma_mnist", (BASELINES,)),
        Arm("FedMA, one round", "fedma_mnist", ("--trainer.max_epochs=1", BASELINES)),
        Arm(
            "PFNM, one round",
            "fedma_mnist",
            (
                "--trainer.max_epochs=1",
                "--federation.aggregator=PFNM",
                *(f"--federation.aggregator.init_args.{o}" for o in ("std=null", *FEDMA)),
                BASELINES,
            ),
        ),
        Arm("FedAvg, four rounds", "fedma_mnist", ("--federation.aggregator=FedAvg",)),
    ],
    "communication": [
        Arm(
            f"{name}, {rounds} round{'s' * (rounds > 1)}",
            "downpour_mnist",
            (
                f"--federation.policy.init_args.local_epochs={10 / rounds:g}",
                f"--trainer.max_epochs={rounds * turns}",
                f"--trainer.check_val_every_n_epoch={turns}",
                f"--checkpoint.every_n_rounds={turns}",
                "--data.init_args.num_clients=25",
                *SPLITS["heterogeneous"],
                *options,
            ),
        )
        for name, turns, options in (
            ("updates in turn", 1, ()),
            ("updates in turn, each of the current model", 25, CURRENT),
            ("mean update", 1, MEAN),
        )
        for rounds in (1, 10, 100, 1000)
    ],
}
#: What one picture of streaming shows beside its arms, of the second.
STREAMING = {
    "ensemble/uniform": "uniform ensemble",
    "ensemble/weighted": "weighted ensemble",
    "ensemble/average": "naive average",
}
#: Pages that match the networks of runs again: their sweep, and its values.
AGAIN = {
    "sensitivity": ("clients", (25,)),
    "variance": ("clients", SWEEPS["clients"].values),
    "selection": ("depth", SWEEPS["depth"].values),
}
#: Ways to choose gamma, sigma and sigma0: values to try, the loss of training accuracy that a
#: narrower network may have, and other options.
CHOICES: dict[str, tuple[tuple[tuple[float, ...], ...], float, dict[str, Any]]] = {
    "the narrowest network within half a point (default)": (SEARCHED, 0.005, {}),
    "the most accurate network": (SEARCHED, 0.0, {}),
    "gamma = 1, sigma0² = 10, the best sigma (the paper)": (
        ((1.0,), SEARCHED[1], (10.0,)),
        0.0,
        {},
    ),
    "the most accurate network, with the limits of the authors' program": (
        SEARCHED,
        0.0,
        {"popularity": 1.0, "cap": 10, "max_width": 700},
    ),
}
#: Widths and numbers of hidden layers of the networks that are trained as by the authors' program.
COMPACT = ((50, 1), (50, 2), (50, 3), (100, 1), (100, 2))
GRID: dict[str, tuple[float, ...]] = {
    "client_variance": (0.01, 0.1, 0.5, 1.0, 2.0),
    "prior_variance": (1.0, 5.0, 10.0, 50.0),
    "gamma": (0.001, 1.0, 50.0),
}


def point(out: Path, figure: str, data: str, split: str, value: int, seed: int) -> dict[str, Run]:
    """Return the runs of a point of a sweep."""
    sweep, (inputs, options) = SWEEPS[figure], DATA[data]
    clients, depth = sweep.clients(value), sweep.depth(value)
    sizes = [inputs, *[50] * depth, 10]
    options = [
        f"--seed_everything={seed}",
        *options,
        *SPLITS[split],
        f"--data.init_args.num_clients={clients}",
        f"--vectorize={min(clients, 10)}",
        f"--model.init_args.net.init_args.sizes={sizes}",
    ]
    lr = 0.01 if data == "mnist" else 0.001
    place = out / "points" / f"{data}-{split}-J{clients}-C{depth}-{seed}"
    adam = given("federation.aggregator.init_args.optimizer", "torch.optim.Adam", lr=lr)
    student = {"class_path": "MLPClassifier", "init_args": {"sizes": [inputs, *[500] * depth, 10]}}
    baselines = given("trainer.callbacks+", "baselines.MatchingBaselines", student=student, lr=lr)
    own = {"pfnm": (*PAPER, baselines), "downpour": (adam,)}
    return {
        name: Run(
            place.with_name(f"{place.name}-{name}"),
            ["--config", str(CONFIGS / f"{name}_mnist.yaml"), *options, *more],
        )
        for name, more in own.items()
    }


def runs(args: argparse.Namespace) -> list[Run]:
    """Return all runs that the figures need, each once."""
    found = []
    for figure in args.figures:
        if figure in SWEEPS:
            for seed, split, data, value in product(
                args.seeds, SPLITS, args.data, SWEEPS[figure].values
            ):
                found += point(args.out, figure, data, split, value, seed).values()
        elif figure in ARMS:
            found += [arm_run(args.out, figure, a, s) for s, a in product(args.seeds, ARMS[figure])]
        elif figure in AGAIN:
            sweep, values = AGAIN[figure]
            for data, split, value in product(args.data, SPLITS, values):
                found.append(point(args.out, sweep, data, split, value, args.seeds[0])["pfnm"])
    return list({run.place: run for run in found}.values())


def arm_run(out: Path, figure: str, arm: Arm, seed: int) -> Run:
    """Return an arm's run."""
    name = "".join(c if c.isalnum() else "_" for c in arm.name)
    config = ["--config", str(CONFIGS / f"{arm.config}.yaml"), f"--seed_everything={seed}"]
    return Run(out / figure / f"{name}-{seed}", [*config, *arm.options])


# --- sweeps ---------------------------------------------------------------------------------------


def values_of(args: argparse.Namespace, figure: str, data: str, split: str) -> dict[str, Any]:
    """Return lists over seeds, by series and value; ``width`` and ``stacked`` are sizes."""
    found: dict[str, dict[int, list[float]]] = {}
    for value, seed in product(SWEEPS[figure].values, args.seeds):
        each = point(args.out, figure, data, split, value, seed)
        if (pfnm := result(each["pfnm"].place)) is not None:
            last = rows(each["pfnm"].place)[-1]
            widths = [float(v) for name, v in last.items() if name.startswith("width_")]
            figures = {name: pfnm[name] for name in SERIES if name in pfnm}
            figures |= {"width": sum(widths), "stacked": float(last["neurons"])}
            for name, number in figures.items():
                found.setdefault(name, {}).setdefault(value, []).append(number)
        if (downpour := result(each["downpour"].place)) is not None:
            found.setdefault("downpour", {}).setdefault(value, []).append(downpour["test_acc"])
    return found


def sweep_page(args: argparse.Namespace, figure: str) -> list[str]:
    """Return tables of a sweep, and draw it."""
    sweep, text = SWEEPS[figure], [f"## {figure.capitalize()}", SWEEPS[figure].question]
    shown, axes = plt.subplots(
        len(args.data),
        2 * len(SPLITS),
        figsize=(14, 3.4 * len(args.data)),
        layout="constrained",
        squeeze=False,
    )
    for row, data in enumerate(args.data):
        for column, split in enumerate(SPLITS):
            found = values_of(args, figure, data, split)
            if not found:
                continue
            names = {
                **SERIES,
                "width": "neurons of the merged network",
                "stacked": "neurons of all local networks",
            }
            lines = [[sweep.label, *map(str, sweep.values)]]
            for name, label in names.items():
                if name in found:
                    how = (1, 0) if name in ("width", "stacked") else (100, 1)
                    each = [mean_and_spread(found[name].get(v, []), *how) for v in sweep.values]
                    lines.append([label, *each])
            trials = max(len(each) for each in found["test_acc"].values())
            text += [
                f"### {data}, {split}, {trials} trial{'s' * (trials > 1)}",
                table(lines[0], lines[1:]),
            ]
            curves(axes[row, 2 * column], found, SERIES, 100)
            axes[row, 2 * column].set(title=f"{data}, {split}", ylabel="test accuracy, %")
            curves(axes[row, 2 * column + 1], found, {"width": "merged", "stacked": "all"}, 1)
            axes[row, 2 * column + 1].set(title=f"{data}, {split}", ylabel="hidden neurons")
    for each in axes.flat:
        tidy(each, sweep.label)
    return [*text, *saved(args, shown, figure)]


def curves(
    axes: Axes, found: Mapping[str, Mapping[int, list[float]]], names: Mapping[str, str], scale: int
) -> None:
    """Draw means over trials, and the range."""
    for name, label in names.items():
        if name in found:
            at = sorted(found[name])
            lines = [[scale * number for number in found[name][x]] for x in at]
            axes.plot(at, [mean(line) for line in lines], marker=".", label=label)
            axes.fill_between(at, [min(x) for x in lines], [max(x) for x in lines], alpha=0.15)


# --- arms -----------------------------------------------------------------------------------------


def arms_page(args: argparse.Namespace, figure: str, question: str) -> list[str]:
    """Return a table of arms, and draw their rounds."""
    names = ["test_acc", *(name for name in SERIES if "/" in name)]
    lines = [["", *(SERIES[name] if "/" in name else "test accuracy" for name in names), "neurons"]]
    shown, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for arm in ARMS[figure]:
        places = [arm_run(args.out, figure, arm, seed).place for seed in args.seeds]
        places = [place for place in places if result(place) is not None]
        each = [result(place) or {} for place in places]
        tables = [rows(place) for place in places]
        line = [mean_and_spread([f[name] for f in each if name in f]) for name in names]
        widths = [
            sum(float(v) for name, v in table[-1].items() if name.startswith("width_") and v)
            for table in tables
        ]
        lines.append([arm.name, *line, mean_and_spread([w for w in widths if w], 1, 0)])
        draw_rounds(axes, tables, "val_acc", arm.name)
        if figure == "streaming" and arm is ARMS[figure][1]:
            for name, label in STREAMING.items():
                draw_rounds(axes, tables, name, label)
    axes.set(ylabel="accuracy on the server's validation samples")
    if figure == "communication":
        axes.set_xscale("log")
    tidy(axes, "round")
    return [
        f"## {figure.capitalize()}",
        question,
        table(lines[0], lines[1:]),
        *saved(args, shown, figure),
    ]


def draw_rounds(
    axes: Axes, tables: Sequence[Sequence[Mapping[str, str]]], name: str, label: str
) -> None:
    """Draw a column of tables of rounds: mean and range."""
    found: dict[int, list[float]] = {}
    for each in tables:
        for row in each:
            if row.get(name):
                found.setdefault(int(row["round"]), []).append(float(row[name]))
    curves(axes, {name: found}, {name: label}, 1)


# --- in this process ------------------------------------------------------------------------------


Samples = tuple[torch.Tensor, torch.Tensor]


class Saved(NamedTuple):
    """Networks of clients, to be matched with any options.

    Args:
        networks: Of the clients.
        counts: Samples of each class that the clients have.
        train: Training samples, all, as the networks see them.
        test: Test samples.
    """

    networks: Sequence[Layers]
    counts: torch.Tensor | None
    train: Samples
    test: Samples

    @classmethod
    def of(cls, place: Path, data: str) -> Saved:
        """Return the networks of a run in a folder on a data set."""
        checkpoint = torch.load(newest(place, "last.ckpt"), map_location="cpu", weights_only=True)
        state = checkpoint["callbacks"]["MatchingBaselines"]
        return cls(
            [list(zip(flat[::2], flat[1::2], strict=True)) for flat in state["networks"]],
            state["class_counts"],
            *samples(place, data),
        )

    def matched(self, options: MatchingOptions) -> Merged:
        """Return the merged network, in figures."""
        random = torch.Generator().manual_seed(0)
        found = match_networks(self.networks, self.counts, options, generator=random)
        train, test = (accuracy(found.layers, *each) for each in (self.train, self.test))
        return Merged(train, test, found.widths)


class Merged(NamedTuple):
    """Accuracies of a merged network on training and test samples, and widths of its layers."""

    train: float
    test: float
    widths: Sequence[int]

    def __str__(self) -> str:
        widths = " + ".join(map(str, self.widths))
        return f"{100 * self.train:.1f}, {100 * self.test:.1f} ({widths})"


def sensitivity_page(args: argparse.Namespace) -> list[str]:
    """Match the networks of 25 clients again, with other options."""
    text = [
        "## Sensitivity",
        "Supplement, figure 4: the networks of 25 clients, merged with different hyperparameters."
        " Values are the accuracy in percent on the training and on the test samples and, in"
        " parentheses, the number of neurons of the merged network (of 1250).",
    ]
    shown, axes = plt.subplots(
        len(args.data) * len(SPLITS),
        len(GRID["gamma"]),
        figsize=(11, 3.3 * len(args.data) * len(SPLITS)),
        layout="constrained",
        squeeze=False,
    )
    for row, (data, split) in zip(axes, product(args.data, SPLITS), strict=True):
        place = point(args.out, "clients", data, split, 25, args.seeds[0])["pfnm"].place
        if result(place) is None:
            continue
        saved_run = Saved.of(place, data)
        lines = [["gamma, sigma²", *(f"sigma0² = {v:g}" for v in GRID["prior_variance"])]]
        heats = {gamma: list[list[float]]() for gamma in GRID["gamma"]}
        for (gamma, heat), variance in product(heats.items(), GRID["client_variance"]):
            found = [
                saved_run.matched(MatchingOptions(variance, prior, gamma))
                for prior in GRID["prior_variance"]
            ]
            heat.append([100 * each.train for each in found])
            lines.append([f"{gamma:g}, {variance:g}", *map(str, found)])
        accuracies = [*chain(*chain(*heats.values()))]
        limits = min(accuracies), max(accuracies)
        for panel, (gamma, heat) in zip(row, heats.items(), strict=True):
            draw_heat(panel, heat, limits, f"{data}, {split}, gamma = {gamma:g}")
        text += [f"### {data}, {split}", table(lines[0], lines[1:])]
    return [*text, *saved(args, shown, "sensitivity")]


def draw_heat(axes: Axes, heat: list[list[float]], limits: tuple[float, float], title: str) -> None:
    """Draw training accuracies over both variances, with colors between two limits."""
    axes.imshow(heat, cmap="viridis", vmin=limits[0], vmax=limits[1])
    axes.set(title=title, xlabel="sigma0²", ylabel="sigma²")
    axes.set_xticks(range(len(heat[0])), [f"{v:g}" for v in GRID["prior_variance"]])
    axes.set_yticks(range(len(heat)), [f"{v:g}" for v in GRID["client_variance"]])
    for i, values in enumerate(heat):
        for j, value in enumerate(values):
            color = "k" if value > sum(limits) / 2 else "w"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=color)


def variance_page(args: argparse.Namespace) -> list[str]:
    """Match the networks of all numbers of clients again, with other variances."""
    text = [
        "## Variance",
        "Supplement, figure 5: sigma² with sigma0² = 10 and gamma = 1. Values as above.",
    ]
    clients = SWEEPS["clients"].values
    for data, split in product(args.data, SPLITS):
        cells = {variance: ["-"] * len(clients) for variance in GRID["client_variance"]}
        for column, value in enumerate(clients):
            place = point(args.out, "clients", data, split, value, args.seeds[0])["pfnm"].place
            if result(place) is not None:
                saved_run = Saved.of(place, data)
                for variance, cell in cells.items():
                    cell[column] = str(saved_run.matched(MatchingOptions(variance, 10.0, 1.0)))
        lines = [[f"{variance:g}", *cell] for variance, cell in cells.items()]
        head = ["sigma²", *(f"J = {value}" for value in clients)]
        text += [f"### {data}, {split}", table(head, lines)]
    return text


def selection_page(args: argparse.Namespace) -> list[str]:
    """Match the networks of ten clients again, with options chosen in other ways."""
    text = [
        "## Selection",
        "The networks of ten clients, with gamma, sigma and sigma0 chosen by training accuracy in"
        " several ways. Values as above, with the number of neurons of each hidden layer.",
    ]
    for data, split in product(args.data, SPLITS):
        found = {}
        for depth in SWEEPS["depth"].values:
            place = point(args.out, "depth", data, split, depth, args.seeds[0])["pfnm"].place
            found[f"C = {depth}"] = None if result(place) is None else Saved.of(place, data)
        text += [f"### {data}, {split}", choices(found)]
    return text


def compactness_page(args: argparse.Namespace) -> list[str]:
    """Match networks that are trained as by the authors' program, with options chosen likewise."""
    text = [
        "## Compactness",
        "MNIST, ten clients, with networks that are trained as by the authors' program: inputs from"
        " 0 to 1, all 60,000 training samples, weights from a normal distribution with standard"
        " deviation 0.1 and biases of 0.1, ten epochs of Adam (amsgrad) with learning rate 0.01."
        " Values as above.",
    ]
    images = loaded(MNIST, args.root)
    for split in SPLITS:
        found = {
            f"{' + '.join([str(width)] * depth)} each": trained(
                images, args.out / "compactness", split, width, depth, args.seeds[0]
            )
            for width, depth in COMPACT
        }
        text += [f"### mnist, {split}", choices(found)]
    return text


def choices(found: Mapping[str, Saved | None]) -> str:
    """Return a table: what each way to choose options makes of several sets of networks."""
    lines = [
        [name, *("-" if each is None else str(selected(each, name)) for each in found.values())]
        for name in CHOICES
    ]
    return table(["", *found], lines)


def selected(saved_run: Saved, name: str) -> Merged:
    """Return the merged network that a way to choose gamma, sigma and sigma0 selects."""
    values, tolerance, options = CHOICES[name]
    tried = [
        MatchingOptions(client_variance, prior_variance, gamma, **options)
        for gamma, client_variance, prior_variance in product(*values)
    ]
    found = {each: saved_run.matched(each) for each in tried}
    best, _ = narrowest(tried, tolerance, lambda each: (found[each].train, sum(found[each].widths)))
    return found[best]


def samples(place: Path, data: str) -> tuple[Samples, Samples]:
    """Return all training and test samples as the networks of a run see them."""
    config = newest(place, "config.yaml").read_text()
    root = config.partition("\n    root: ")[2].partition("\n")[0]
    module = loaded(MNIST if data == "mnist" else CIFAR10, None if root == "null" else root)
    both: Any = (module.train, module.test)
    train, test = (module.on_after_batch_transfer(tuple(each.tensors), 0) for each in both)
    return (train[0].flatten(1), train[1]), (test[0].flatten(1), test[1])


def loaded(kind: type[Any], root: str | None) -> Any:
    """Return a data module with all training and test samples."""
    module = kind(root=root, val_size=0)
    module.setup("fit")
    module.setup("test")
    return module


def trained(images: Any, out: Path, split: str, width: int, depth: int, seed: int) -> Saved:
    """Return ten networks trained as by the authors' program; they are kept in a folder."""
    both = (images.train.tensors, images.test.tensors)
    (x, y), test = ((pixels.flatten(1) / 255, labels) for pixels, labels in both)
    rule = IID(stratified=True) if split == "homogeneous" else Dirichlet(0.2, min_size=32)
    parts = rule(y, 10, torch.Generator().manual_seed(seed))
    path = out / f"{split}-{width}-{depth}-{seed}.pt"
    if not path.exists():
        torch.manual_seed(seed)
        networks = [trained_alone(x[part], y[part], [784, *[width] * depth, 10]) for part in parts]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(networks, path)
    counts = torch.stack([y[part].bincount(minlength=10) for part in parts])
    return Saved(torch.load(path, weights_only=True), counts, (x, y), test)


def trained_alone(x: torch.Tensor, y: torch.Tensor, sizes: Sequence[int]) -> Layers:
    """Train a network as the authors' program does; return its layers."""
    net = MLPClassifier(sizes)
    linear = [each for each in net if isinstance(each, torch.nn.Linear)]
    for each in linear:
        torch.nn.init.normal_(each.weight, std=0.1)
        torch.nn.init.constant_(each.bias, 0.1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=1e-6, amsgrad=True)
    for _ in range(10):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    return [(each.weight.detach(), each.bias.detach()) for each in linear]


def accuracy(layers: Layers, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the accuracy of a network with ReLUs."""
    for weight, bias in layers[:-1]:
        x = torch.relu(x @ weight.mT.to(x) + bias.to(x))
    weight, bias = layers[-1]
    return float(((x @ weight.mT.to(x) + bias.to(x)).argmax(1) == y).double().mean())


def cost_page(args: argparse.Namespace) -> list[str]:
    """Time the matching of networks: J and width grow."""
    shown, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    by_clients = {j: seconds(j, 100) for j in (5, 10, 15, 20, 25, 30)}
    by_width = {w: seconds(10, w) for w in (25, 50, 100, 200, 400)}
    left.plot(list(by_clients), list(by_clients.values()), marker=".")
    right.plot(list(by_width), list(by_width.values()), marker=".")
    left.set(title="100 neurons each", ylabel="seconds")
    right.set(title="10 clients", ylabel="seconds", xscale="log", yscale="log")
    tidy(left, "clients J", legend=False)
    tidy(right, "neurons of a client", legend=False)
    first = [["clients, with 100 neurons each", *map(str, by_clients)]]
    first += [["seconds", *(f"{value:.2f}" for value in by_clients.values())]]
    second = [["neurons per client, with 10 clients", *map(str, by_width)]]
    second += [["seconds", *(f"{value:.2f}" for value in by_width.values())]]
    return [
        "## Cost",
        "Time of one matching with five sweeps, 784 inputs and ten classes. Half of the neurons are"
        " common to all clients, up to noise. One thread; minimum of three runs.",
        table(first[0], first[1:]),
        table(second[0], second[1:]),
        *saved(args, shown, "cost"),
    ]


def seconds(clients: int, width: int) -> float:
    """Return how long it takes to match networks that have half of their neurons in common."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(*shape, generator=random)

    common = draw(width // 2, 784), draw(10, width // 2)
    networks: list[Layers] = []
    for _ in range(clients):
        rest = width - width // 2
        into = torch.cat([common[0] + 0.1 * draw(width // 2, 784), draw(rest, 784)])
        out = torch.cat([common[1] + 0.1 * draw(10, width // 2), draw(10, rest)], 1)
        order = torch.randperm(width, generator=random)
        networks.append([(into[order], torch.zeros(width)), (out[:, order], torch.zeros(10))])
    times = []
    for _ in range(3):
        begin = perf_counter()
        match_networks(networks, generator=torch.Generator().manual_seed(0))
        times.append(perf_counter() - begin)
    return min(times)


# --- pages ----------------------------------------------------------------------------------------


def tidy(axes: Axes, label: str, legend: bool = True) -> None:
    """Give a panel its label and a quiet look."""
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.lines:
        axes.legend(frameon=False, fontsize=7)


def saved(args: argparse.Namespace, figure: Any, name: str) -> list[str]:
    """Save a picture beside the page, where there is one; return its line there."""
    if not args.markdown:
        plt.close(figure)
        return []
    path = args.markdown.with_name(f"{args.markdown.stem}-{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return [f"![{name}]({path.name})"]


PAGES: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "clients": lambda args: sweep_page(args, "clients"),
    "depth": lambda args: sweep_page(args, "depth"),
    "streaming": lambda args: arms_page(
        args,
        "streaming",
        "Figure 3b of the supplement: three clients with heterogeneous data (Dirichlet 0.2), which"
        " arrive in 15 steps. The ensembles and the naive average combine local networks that"
        " continue independently.",
    ),
    "convolutions": lambda args: arms_page(
        args,
        "convolutions",
        "LeNets of five clients, trained independently on MNIST from different initializations.",
    ),
    "communication": lambda args: arms_page(
        args,
        "communication",
        "Figure 3a of the supplement: downpour SGD with 25 clients and heterogeneous data. Ten"
        " epochs are divided into 1 to 1000 rounds. Updates in turn: one step of the server's Adam"
        " per client update (`downpour_mnist.yaml`), with all updates of a round from the same"
        " model, or with one client at a time, which starts from the current model. Mean update:"
        " one step of the server's Adam per round, with the mean of the updates of local SGD"
        " (`FedOpt`).",
    ),
    "sensitivity": sensitivity_page,
    "variance": variance_page,
    "selection": selection_page,
    "compactness": compactness_page,
    "cost": cost_page,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, show what is there."""
    given, extra = apart(arguments)
    parser = shared_options(__doc__, "pfnm")
    parser.add_argument("--figures", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--show", action="store_true", help="run nothing, show what is there")
    args = parser.parse_args(given)
    roots = [option.partition("=")[2] for option in extra if option.startswith(ROOT)]
    args.root = roots[-1] if roots else None
    if wrong := check_options(args.out, extra):
        parser.error(wrong)
    failed: list[str] = []
    if not args.show:
        wanted = (run._replace(options=[*run.options, *extra]) for run in runs(args))
        failed = fit_and_test_all(wanted, args.jobs)
    torch.set_num_threads(1)
    text = [machine_line(args.out)]
    for name in args.figures:
        text += PAGES[name](args)
    publish("\n\n".join(text) + "\n", args.markdown, failed)


if __name__ == "__main__":
    main()
