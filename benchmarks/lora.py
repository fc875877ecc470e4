"""LoRA adapters of equal and of mixed ranks, beside full fine-tuning: accuracy, traffic and costs.

A perceptron that was trained on MNIST is fine-tuned on Fashion-MNIST by 100 clients. What is there
already is not run again. Costs are measured in fresh processes, on a perceptron of 100 million
parameters.

    python benchmarks/lora.py --root /data --markdown tables.md
    python benchmarks/lora.py --root /data --alpha 0.3 --skip-costs
    python benchmarks/lora.py --root /data --quick
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from contestants import fresh, peak
from lightning_fl import ClientModule, FederatedLoop, VectorizedClients
from lightning_fl.aggregators import Aggregator, FedAvg, FlexLoRA, ZeroPadding
from lightning_fl.datamodules import MNIST, FashionMNIST, FederatedDataModule, InMemory
from lightning_fl.models import LoRA, MLPClassifier
from lightning_fl.partition import IID, Dirichlet
from lightning_fl.policies import Schedule
from runs import machine_line, mean_and_spread, publish, table

SIZES = [784, 200, 200, 10]
#: Maximum rank, and the shares of clients by rank: most clients are weak.
RANK, MIXED = 32, {1: 0.8, 32: 0.2}
#: Rule, rank of the module's adapters (0: full fine-tuning), and whether A is frozen, by the name
#: in the table.
ARMS: dict[str, tuple[Callable[[], Aggregator], int, bool]] = {
    "FlexLoRA, mixed ranks": (lambda: FlexLoRA(MIXED), RANK, False),
    "zero-padding, mixed ranks": (lambda: ZeroPadding(MIXED), RANK, False),
    "zero-padding by norm, mixed ranks": (lambda: ZeroPadding(MIXED, "norm"), RANK, False),
    "FedIT, rank 1": (FedAvg, 1, False),
    "FedIT, rank 32": (FedAvg, RANK, False),
    "FFA-LoRA, rank 32": (FedAvg, RANK, True),
    "full fine-tuning": (FedAvg, 0, False),
}
#: Networks of 100 million parameters whose costs are measured: the rank, the number of clients at
#: once, and whether there is a federation, or plain PyTorch with the samples of these clients.
COSTS = {
    "LoRA, rank 8": (8, 1, 1),
    "LoRA, rank 8, vectorized": (8, 8, 1),
    "LoRA, rank 8, a loop in PyTorch, batch of 8": (8, 1, 0),
    "LoRA, rank 8, a loop in PyTorch, batch of 64": (8, 8, 0),
    "full fine-tuning": (0, 1, 1),
}


def pretrained(out: Path, root: str, epochs: int) -> MLPClassifier:
    """Return a network trained on MNIST, which is saved in ``out``."""
    net, path = MLPClassifier(SIZES), out / f"pretrained-{epochs}.pt"
    if not path.exists():
        torch.manual_seed(0)
        net = MLPClassifier(SIZES)
        data = MNIST(root=root, num_clients=1)
        data.setup("fit")
        x, y = data.train.tensors
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(epochs):
            for index in torch.randperm(len(x)).split(128):
                images, labels = data.on_after_batch_transfer([x[index], y[index]], 0)
                optimizer.zero_grad()
                F.cross_entropy(net(images), labels).backward()
                optimizer.step()
        out.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), path)
    net.load_state_dict(torch.load(path))
    return net


def adapted(net: nn.Module, rank: int, freeze_a: bool = False) -> nn.Module:
    """Add adapters and freeze the rest, unless the rank is 0."""
    if rank:
        targets, head = ["1", "3"], ["5.*"]
        return LoRA(net, rank, target_modules=targets, train=head, freeze_a=freeze_a)
    return net


def trainer(loop: FederatedLoop, rounds: int) -> L.Trainer:
    """Return a quiet Trainer that validates at the end."""
    return L.Trainer(
        max_epochs=rounds,
        callbacks=[loop],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=5,
    )


def run(
    arm: str, lr: float, seed: int, rounds: int, net: nn.Module, root: str, alpha: float | None
) -> dict[str, Any]:
    """Train and test an arm."""
    rule, rank, freeze_a = ARMS[arm]
    L.seed_everything(seed, verbose=False)
    net = adapted(net, rank, freeze_a)
    nn.init.zeros_(net.get_parameter("net.5.weight" if rank else "5.weight"))  # of other classes
    module = ClientModule(
        net, optimizer=lambda p: torch.optim.Adam([q for q in p if q.requires_grad], lr=lr)
    )
    partition = IID() if alpha is None else Dirichlet(alpha)
    data = FashionMNIST(
        root=root, partition=partition, num_clients=100, val_size=5000, eval_batch_size=1000
    )
    policy = Schedule(num_steps=20)
    loop = FederatedLoop(rule(), policy, clients_per_round=10, seed=seed)
    loop.table_name = None
    fit, start = trainer(loop, rounds), perf_counter()
    fit.fit(VectorizedClients(module, 10, compile=False), datamodule=data)
    seconds = perf_counter() - start
    tested = fit.test(module, datamodule=data, verbose=False)[0]
    accuracies = [row["val_acc"] for row in loop.rows if "val_acc" in row]
    return {
        "test_acc": tested["test_acc"],
        "val_acc": accuracies,
        "bytes_up": mean(row["bytes_up"] / row["clients"] for row in loop.rows),
        "lost_energy": loop.rows[-1].get("lost_energy"),
        "rounds": rounds,
        "seconds": seconds,
    }


# --- costs, each in a fresh process ---------------------------------------------------------------


def cost(rank: int, at_once: int, is_federated: int, width: int) -> None:
    """Print peak memory and time per round of eight clients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = adapted(MLPClassifier([64, width, width, 10]), rank)
    x, y = torch.randn(8 * 8 * 4, 64), torch.arange(8 * 8 * 4) % 10
    data = FederatedDataModule(InMemory(x, y), InMemory(x[:8], y[:8]), num_clients=8, batch_size=8)
    params = [(p.numel(), p.requires_grad) for p in net.parameters()]
    found: dict[str, Any] = {
        "frozen_mib": sum(n for n, trained in params if not trained) * 4 / 2**20,
        "trained_mib": sum(n for n, trained in params if trained) * 4 / 2**20,
    }

    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([q for q in p if q.requires_grad], lr=0.01)

    start = perf_counter()
    if is_federated:
        module = ClientModule(net, optimizer=make)
        loop = FederatedLoop(policy=Schedule(num_steps=2), seed=0)
        loop.table_name = None
        wrapped = VectorizedClients(module, at_once, compile=False) if at_once > 1 else module
        trainer(loop, 3).fit(wrapped, datamodule=data)
        found["bytes_up"] = loop.rows[-1]["bytes_up"] / 8
    else:
        optimizer = make(net.parameters())
        for _ in range(3 * 2 * 8 // at_once):
            F.cross_entropy(net(x[: 8 * at_once]), y[: 8 * at_once]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found["seconds"] = (perf_counter() - start) / 3
    print(json.dumps(found | {"peak_mib": peak()}))


def measured(case: Sequence[int], width: int) -> dict[str, Any]:
    """Return what :func:`cost` prints in a fresh process, beside that of a small network."""
    found, small = (
        json.loads(fresh(__file__, "--cost", *map(str, (*case, size)))) for size in (width, 100)
    )
    return found | {"base_mib": small["peak_mib"]}


# --- tables ---------------------------------------------------------------------------------------


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result in a file, or make and write it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make()) + "\n")
        print(f"{path.stem}: {path.read_text().strip()[:100]}", file=sys.stderr)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def accuracy_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Show test accuracies, the bytes of an update and the energy lost."""
    head = ["", "test accuracy, %", "last three validations, %", "KiB up per client"]
    head, rows = [*head, "lost energy, %"], []
    for arm, each in results.items():
        lost = [100 * r["lost_energy"] for r in each if r["lost_energy"] is not None]
        rows.append(
            [
                arm,
                mean_and_spread([r["test_acc"] for r in each]),
                mean_and_spread([mean(r["val_acc"][-3:]) for r in each]),
                f"{mean(r['bytes_up'] for r in each) / 1024:,.0f}",
                f"{mean(lost):.2g}" if lost else "",
            ]
        )
    return table(head, rows)


def cost_table(costs: dict[str, dict[str, Any]]) -> str:
    """Show peak memory, time and traffic."""
    head = ["", "frozen, MiB", "trained, MiB", "peak, MiB", "of a small network, MiB"]
    head, rows = [*head, "difference, MiB", "s per round", "MiB up per client"], []
    for name, found in costs.items():
        sizes = [found["frozen_mib"], found["trained_mib"], found["peak_mib"]]
        sizes += [found["base_mib"], found["peak_mib"] - found["base_mib"]]
        sent = f"{found['bytes_up'] / 2**20:,.2f}" if "bytes_up" in found else ""
        rows.append([name, *(f"{s:,.1f}" for s in sizes), f"{found['seconds']:.2f}", sent])
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and show what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", default="data", help="folder of MNIST and Fashion-MNIST")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of clients")
    parser.add_argument("--alpha", type=float, help="label skew Dirichlet(alpha); default: IID")
    parser.add_argument("--skip-costs", action="store_true", help="measure accuracy only")
    parser.add_argument("--quick", action="store_true", help="one seed, few rounds, small costs")
    parser.add_argument("--out", type=Path, default=Path("runs", "lora"))
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--cost", nargs=4, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if args.cost:
        cost(*args.cost)
        return
    torch.set_num_threads(1)
    seeds, rounds, width = (
        (args.seeds[:1], 10, 1000) if args.quick else (args.seeds, args.rounds, 10_000)
    )
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
    for seed, arm in product(seeds, args.arms):
        skew = "iid" if args.alpha is None else f"{args.alpha:g}"
        name = f"{arm.replace(', ', '-').replace(' ', '_')}-{skew}-{args.lr:g}-{rounds}-{seed}.json"

        def make(arm: str = arm, seed: int = seed) -> dict[str, Any]:
            net = pretrained(args.out, args.root, 3)
            return run(arm, args.lr, seed, rounds, net, args.root, args.alpha)

        results[arm].append(kept(args.out / name, make))
    cases = {} if args.skip_costs else COSTS
    costs = {
        name: kept(args.out / f"cost-{name}-{width}.json", partial(measured, case, width))
        for name, case in cases.items()
    }
    count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}, {rounds} rounds, learning rate {args.lr:g}"
    text = [machine_line(), f"## Accuracy\n\n{count}.\n\n{accuracy_table(results)}"]
    if costs:
        text.append(f"## Costs\n\n{cost_table(costs)}")
    publish("\n\n".join(text) + "\n", args.markdown)


if __name__ == "__main__":
    main()
