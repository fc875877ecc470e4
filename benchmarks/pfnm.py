"""The figures of Yurochkin et al. (2019) on real data: tables and pictures.

Each point is a run of ``fit`` and ``test`` in a folder of its own; one run has neural matching and
all baselines that are made of the same networks (``MatchingBaselines``), another has downpour SGD.
What is there already is not run again, and what was cut short goes on.

    python benchmarks/pfnm.py --jobs 2 --markdown docs/results/pfnm.md -- --data.init_args.root=data
    python benchmarks/pfnm.py --figures clients --data mnist --seeds 1 -- --data.init_args.root=data

What follows ``--`` goes to ``fit`` and ``test`` of every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from lightning_fl.functional.networks import Layers, MatchingOptions, match_networks
from runs import (
    Run,
    apart,
    check_options,
    fit_and_test_all,
    given,
    machine_line,
    newest,
    publish,
    result,
    rows,
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
SPLITS: dict[str, list[str]] = {
    "homogeneous": [],
    "heterogeneous": [
        '--data.init_args.partition={"class_path":"Dirichlet","init_args":'
        '{"alpha":0.2,"min_size":32}}'
    ],
}
CALLBACK = '--trainer.callbacks+={"class_path":"MatchingBaselines","init_args":%s}'
STUDENT = '{"student":{"class_path":"MLPClassifier","init_args":{"sizes":[%d,500,10]}},"lr":%s}'
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


BASELINES = CALLBACK % "{}"
#: One step of the server's Adam per round, with the mean of the updates of local SGD.
MEAN = (
    '--federation.aggregator={"class_path":"FedOpt","init_args":{"optimizer":'
    '{"class_path":"torch.optim.Adam","init_args":{"lr":0.01}}}}',
    '--model.init_args.optimizer={"class_path":"torch.optim.SGD","init_args":{"lr":0.1}}',
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
                f"--trainer.max_epochs={rounds}",
                "--data.init_args.num_clients=25",
                *SPLITS["heterogeneous"],
                *options,
            ),
        )
        for name, options in (("updates in turn", ()), ("mean update", MEAN))
        for rounds in (1, 10, 100, 1000)
    ],
}
#: What one picture of streaming shows beside its arms, of the second.
STREAMING = {
    "ensemble/uniform": "uniform ensemble",
    "ensemble/weighted": "weighted ensemble",
    "ensemble/average": "naive average",
}
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
    own = {"pfnm": CALLBACK % (STUDENT % (inputs, lr)), "downpour": adam}
    return {
        name: Run(
            place.with_name(f"{place.name}-{name}"),
            ["--config", str(CONFIGS / f"{name}_mnist.yaml"), *options, more],
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
        elif figure == "sensitivity":
            for split in SPLITS:
                found.append(point(args.out, "clients", "mnist", split, 25, args.seeds[0])["pfnm"])
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
            lines.append(["---"] + ["---:"] * len(sweep.values))
            for name, label in names.items():
                if name in found:
                    scale = 1 if name in ("width", "stacked") else 100
                    each = [shown_mean(found[name].get(v, []), scale) for v in sweep.values]
                    lines.append([label, *each])
            trials = max(len(each) for each in found["test_acc"].values())
            text += [f"### {data}, {split}, {trials} trial{'s' * (trials > 1)}", as_table(lines)]
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
    lines.append(["---"] + ["---:"] * (len(names) + 1))
    shown, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for arm in ARMS[figure]:
        places = [arm_run(args.out, figure, arm, seed).place for seed in args.seeds]
        places = [place for place in places if result(place) is not None]
        each = [result(place) or {} for place in places]
        tables = [rows(place) for place in places]
        line = [shown_mean([f[name] for f in each if name in f], 100) for name in names]
        widths = [
            sum(float(v) for name, v in table[-1].items() if name.startswith("width_") and v)
            for table in tables
        ]
        lines.append([arm.name, *line, shown_mean([w for w in widths if w], 1)])
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
        as_table(lines),
        *saved(args, shown, figure),
    ]


def draw_rounds(
    axes: Axes, tables: Sequence[Sequence[Mapping[str, str]]], name: str, label: str
) -> None:
    """Draw a column of tables of rounds: mean and range."""
    found: dict[int, list[float]] = {}
    for table in tables:
        for row in table:
            if row.get(name):
                found.setdefault(int(row["round"]), []).append(float(row[name]))
    curves(axes, {name: found}, {name: label}, 1)


# --- in this process ------------------------------------------------------------------------------


def sensitivity_page(args: argparse.Namespace) -> list[str]:
    """Match the networks of 25 clients again, with other options."""
    shown, axes = plt.subplots(
        len(SPLITS), len(GRID["gamma"]), figsize=(11, 6.5), layout="constrained", squeeze=False
    )
    text = [
        "## Sensitivity",
        "Supplement 4.3: the networks of 25 clients on MNIST, merged with different"
        " hyperparameters. Values are the test accuracy in percent and, in parentheses, the number"
        " of neurons of the merged network (of 1250).",
    ]
    for row, split in enumerate(SPLITS):
        place = point(args.out, "clients", "mnist", split, 25, args.seeds[0])["pfnm"].place
        if result(place) is None:
            continue
        networks, counts = saved_networks(place)
        x, y = test_samples(place)
        lines = [[f"{split}: gamma, sigma²", *(f"sigma0² = {v:g}" for v in GRID["prior_variance"])]]
        lines.append(["---"] + ["---:"] * len(GRID["prior_variance"]))
        for column, gamma in enumerate(GRID["gamma"]):
            heat = []
            for client_variance in GRID["client_variance"]:
                found = [
                    match_networks(
                        networks, counts, MatchingOptions(client_variance, prior_variance, gamma)
                    )
                    for prior_variance in GRID["prior_variance"]
                ]
                heat.append([100 * accuracy(each.layers, x, y) for each in found])
                widths = [each.widths[0] for each in found]
                line = [f"{a:.1f} ({w})" for a, w in zip(heat[-1], widths, strict=True)]
                lines.append([f"{gamma:g}, {client_variance:g}", *line])
            image = axes[row, column].imshow(heat, cmap="viridis", vmin=60, vmax=100)
            axes[row, column].set(
                title=f"{split}, gamma = {gamma:g}",
                xticks=range(len(GRID["prior_variance"])),
                xticklabels=[f"{v:g}" for v in GRID["prior_variance"]],
                yticks=range(len(GRID["client_variance"])),
                yticklabels=[f"{v:g}" for v in GRID["client_variance"]],
                xlabel="sigma0²",
                ylabel="sigma²",
            )
            for i, values in enumerate(heat):
                for j, value in enumerate(values):
                    axes[row, column].text(
                        j, i, f"{value:.0f}", ha="center", va="center", color="w"
                    )
        text.append(as_table(lines))
    shown.colorbar(image, ax=axes, label="test accuracy, %", shrink=0.6)
    return [*text, *saved(args, shown, "sensitivity")]


def saved_networks(place: Path) -> tuple[list[Layers], torch.Tensor | None]:
    """Return the clients' networks of a run, and their class counts."""
    checkpoint = torch.load(newest(place, "last.ckpt"), map_location="cpu", weights_only=True)
    state = checkpoint["callbacks"]["MatchingBaselines"]
    networks = [list(zip(flat[::2], flat[1::2], strict=True)) for flat in state["networks"]]
    return networks, state["class_counts"]


def test_samples(place: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MNIST's test samples as the networks of a run see them."""
    from lightning_fl.datamodules import MNIST

    config = newest(place, "config.yaml").read_text()
    root = config.partition("\n    root: ")[2].partition("\n")[0]
    data = MNIST(root=None if root == "null" else root)
    data.setup("test")
    batch = data.on_after_batch_transfer(tuple(data.test.tensors), 0)  # type: ignore[union-attr]
    return batch[0].flatten(1), batch[1]


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
    first += [["---"] + ["---:"] * len(by_clients)]
    first += [["seconds", *(f"{value:.2f}" for value in by_clients.values())]]
    second = [["neurons per client, with 10 clients", *map(str, by_width)]]
    second += [["---"] + ["---:"] * len(by_width)]
    second += [["seconds", *(f"{value:.2f}" for value in by_width.values())]]
    return [
        "## Cost",
        "Time of one matching with five sweeps, 784 inputs and ten classes. Half of the neurons are"
        " common to all clients, up to noise. One thread; minimum of three runs.",
        as_table(first),
        as_table(second),
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


def shown_mean(values: Sequence[float], scale: int) -> str:
    """Show mean and standard deviation over trials."""
    if not values:
        return "-"
    digits = 1 if scale == 100 else 0
    spread = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean(values):.{digits}f}{spread}"


def as_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines as a table of Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
        " per client update (`downpour_mnist.yaml`). Mean update: one step of the server's Adam per"
        " round, with the mean of the updates of local SGD (`FedOpt`).",
    ),
    "sensitivity": sensitivity_page,
    "cost": cost_page,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, show what is there."""
    given, extra = apart(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs", "pfnm"))
    parser.add_argument("--show", action="store_true", help="run nothing, show what is there")
    parser.add_argument("--markdown", type=Path, help="write tables here, pictures beside them")
    args = parser.parse_args(given)
    if wrong := check_options(args.out, extra):
        parser.error(wrong)
    failed: list[str] = []
    if not args.show:
        wanted = (run._replace(options=[*run.options, *extra]) for run in runs(args))
        failed = fit_and_test_all(wanted, args.jobs)
    torch.set_num_threads(1)
    text = [machine_line()]
    for name in args.figures:
        text += PAGES[name](args)
    publish("\n\n".join(text) + "\n", args.markdown, failed)


if __name__ == "__main__":
    main()
