"""The experiments of ``rules.py``: each has several arms, a config with options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from runs import Arms, callback, given, rule, split, term


class Experiment(NamedTuple):
    """What is compared.

    Args:
        title: Heading.
        question: What it asks, a line.
        config: The file that all arms share, in ``configs`` or ``benchmarks/published``.
        arms: Options of each, by the name that it has in the table.
        figures: Columns: of the table of rounds (the last round that has it), ``test_acc``, ``R60``
            (the first round with a validation accuracy of 60 %, or another share), ``best`` (the
            highest validation accuracy), ``groups`` (the share of pairs of clients that are rightly
            in one cluster or in two), or ``val_acc, 20 s`` (the last validation accuracy in that
            virtual time).
        curve: What is drawn.
        across: Column over which it is drawn: ``round`` or ``virtual_time``.
        published: Figures of others by arm, in columns by their source.
    """

    title: str
    question: str
    config: str
    arms: Arms
    figures: tuple[str, ...] = ("test_acc",)
    curve: str = "val_acc"
    across: str = "round"
    published: Mapping[str, Mapping[str, str]] = {}


def policy(name: str, **init: object) -> tuple[str, ...]:
    """Return the option of a policy."""
    return (given("federation.policy", name, **init),)


def rounds(number: int) -> tuple[str, ...]:
    """Return the option of the number of rounds."""
    return (f"--trainer.max_epochs={number}",)


def for_all(name: str, options: tuple[str, ...], arms: Arms) -> dict[str, tuple[str, ...]]:
    """Return arms with an addition to their names, and further options."""
    return {f"{arm}{name}": (*options, *own) for arm, own in arms.items()}


#: A model for all, averaged, in the place of a rule of its own.
FEDAVG = rule("FedAvg")
#: Clients with two classes each.
TWO_CLASSES = split("ByLabel", classes_per_client=2)
#: Options that make the config of clusters one of four groups.
FOUR = ("--data.init_args.client_rotations=[0,90,180,270]",)
#: Clients without a term of the loss.
NO_TERMS = ("--model.init_args.terms=[]",)
NO_STRAGGLERS = ("--federation.policy.init_args.fraction=0",)
#: FedAvg in the configs of pFedMe.
PLAIN_SGD = (
    given("model.init_args.optimizer", "torch.optim.SGD", lr=0.02),
    "--federation.optimizer_state=reset",
)
#: Mixing of the global model and the mean of the clients' models (pFedMe's beta).
BETA_2 = rule("FedOpt", optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 2.0}})


def one_model(net: str, **init: object) -> tuple[str, ...]:
    """Return the option of a component of FedEM as a model for all."""
    inner = {"class_path": net, "init_args": init}
    return (given("model", "ClientModule", net=inner),)


MILD = split("Dirichlet", alpha=0.4, min_size=50)
#: FedEM's data in the authors' experiment on CIFAR-10, with fewer clients and a smaller network.
CIFAR_NET = {"width": 8, "hidden": 128}
CIFAR = (
    "--data=CIFAR10",
    given("model.init_args.net", "CifarCNN", **CIFAR_NET),
    *MILD,
    "--federation.policy.init_args.lr=0.03",
)
#: The candidates of the config of policies.
RATES = (0.001, 0.01, 0.03, 0.1, 0.3)


def candidates(pairs: list[tuple[float, int]]) -> tuple[str, ...]:
    """Return the option of learning rates and numbers of local steps to choose from."""
    each = [{"lr": lr, "num_steps": steps} for lr, steps in pairs]
    return (f"--federation.policy.init_args.candidates={each}".replace("'", '"'),)


def fixed(pairs: list[tuple[float, int]]) -> dict[str, tuple[str, ...]]:
    """Return an arm for each learning rate and number of local steps, for all clients."""
    several = len({steps for _, steps in pairs}) > 1
    return {
        f"lr {lr:g}" + f", {steps} steps" * several: policy("Schedule", lr=lr, num_steps=steps)
        for lr, steps in pairs
    }


def policies(pairs: list[tuple[float, int]]) -> dict[str, tuple[str, ...]]:
    """Return the arms of both policies, and those of each candidate for all clients."""
    learned = {"contribution": (), "reward": ("--federation.policy.init_args.method=reward",)}
    return {**for_all("", candidates(pairs), learned), **fixed(pairs)}


#: Synchronous rounds in the config of asynchronous ones.
SYNCHRONOUS = (*rule("FedAvg", weighting="uniform"), "--federation.sampler=UniformSampler")
CONTROL: Arms = {
    "FedControl, lambda = 0.8": (),
    "FedControl, lambda = 1": ("--federation.aggregator.init_args.decay=1.0",),
    "FedCostWAvg": rule("FedCostWAvg"),
    "FedAvg": FEDAVG,
}
#: FedAvg and synchronous SGD, which is FedAvg with one step per round.
SGD: Arms = {
    "FedAvg, 20 steps, 50 rounds": (*rounds(50), *policy("Schedule", lr=0.1, num_steps=20)),
    "SGD, 50 rounds": (*rounds(50), *policy("Schedule", lr=0.1, num_steps=1)),
    "SGD, 1,000 rounds": (*rounds(1000), *policy("Schedule", lr=0.1, num_steps=1)),
}

EXPERIMENTS = {
    "sgd": Experiment(
        "FedAvg and SGD",
        "Ten clients. At equal rounds, what do local steps gain over synchronous SGD? At equal"
        " steps, what do they lose?",
        "fedavg_mnist_iid",
        {
            **for_all(", IID", ("--vectorize=10",), SGD),
            **for_all(", two digits", ("--vectorize=10", *TWO_CLASSES), SGD),
        },
        ("test_acc", "R90"),
    ),
    "fedprox": Experiment(
        "FedProx",
        "Nine of the ten clients of a round are stragglers. Are their partial updates used or"
        " dropped?",
        "fedprox_mnist",
        {
            "FedProx, mu = 1": (),
            "FedAvg, stragglers kept": NO_TERMS,
            "FedAvg, stragglers dropped": (*NO_TERMS, "--federation.policy.init_args.drop=true"),
            "FedAvg, no stragglers": (*NO_TERMS, *NO_STRAGGLERS),
            "FedProx, mu = 0.1, no stragglers": (*term("Proximal", mu=0.1), *NO_STRAGGLERS),
            "FedProx, mu = 1, no stragglers": NO_STRAGGLERS,
        },
    ),
    "fedopt": Experiment(
        "Server optimizers",
        "What do server optimizers gain over averaging?",
        "fedopt_mnist",
        {
            "FedAdam": (),
            "FedYogi": rule("FedYogi", lr=0.01),
            "FedAdagrad": rule("FedAdagrad", lr=0.01),
            "FedAvgM": rule("FedAvgM", lr=1),
            "FedAvg": FEDAVG,
        },
    ),
    "fedavgplus": Experiment(
        "FedAvg+",
        "What does a client gain by local fine-tuning?",
        "fedavgplus_mnist",
        {"FedAvg+": (), "FedAvg": (*FEDAVG, *policy("Schedule", lr=0.02, local_epochs=5))},
        ("server/mean", "personal/mean", "personal/worst", "local/mean", "test_acc"),
    ),
    "fedavgplus-small": Experiment(
        "FedAvg+, small clients",
        "The same with 500 clients of about 88 training samples, too few to do well alone:"
        " Dirichlet(0.5).",
        "fedavgplus_mnist",
        for_all(
            "",
            (
                "--data.init_args.num_clients=500",
                *split("Dirichlet", alpha=0.5, min_size=20),
                "--federation.clients_per_round=20",
            ),
            {"FedAvg+": (), "FedAvg": (*FEDAVG, *policy("Schedule", lr=0.02, local_epochs=5))},
        ),
        ("server/mean", "personal/mean", "personal/worst", "local/mean", "test_acc"),
    ),
    "clustered2": Experiment(
        "Clustered FL, two groups",
        "Every second client has images that are upside down. Does the rule identify the two"
        " groups?",
        "clustered_mnist",
        {"ClusteredFL": (), "FedAvg": FEDAVG},
        ("server/mean", "server/worst", "clusters", "groups"),
        "server/mean",
    ),
    "clustered4": Experiment(
        "Clustered FL, four groups",
        "The same with four groups, whose images are rotated by multiples of 90 degrees.",
        "clustered_mnist",
        {"ClusteredFL": FOUR, "FedAvg": (*FOUR, *FEDAVG)},
        ("server/mean", "server/worst", "clusters", "groups"),
        "server/mean",
    ),
    "pfedme": Experiment(
        "pFedMe",
        "Personal models of clients with two digits each.",
        "pfedme_mnist",
        {"pFedMe": (), "FedAvg": PLAIN_SGD},
        ("server/mean", "kept/mean", "kept/worst", "personal/mean", "personal/worst"),
    ),
    "pfedme-800": Experiment(
        "pFedMe, 800 rounds",
        "The same with the authors' number of rounds, and beta, the server's step towards the mean"
        " of the clients' models.",
        "pfedme_mnist",
        for_all(
            "",
            rounds(800),
            {"pFedMe, beta = 1": (), "pFedMe, beta = 2": BETA_2, "FedAvg": PLAIN_SGD},
        ),
        ("server/mean", "kept/mean", "kept/worst", "personal/mean", "personal/worst", "R80"),
    ),
    "fedem": Experiment(
        "FedEM",
        "A mixture of three models for each client. Each client has two digits.",
        "fedem_mnist",
        {
            "FedEM": (),
            "FedEM, no server": rule("Gossip", graph="erdos_renyi"),
            "FedAvg": one_model("MLPClassifier", sizes=[784, 50, 10]),
        },
        ("server/mean", "server/worst", "test_acc"),
        "server/mean",
    ),
    "fedem-mild": Experiment(
        "FedEM, mild skew",
        "The same with mild label skew, Dirichlet(0.4).",
        "fedem_mnist",
        {"FedEM": MILD, "FedAvg": (*MILD, *one_model("MLPClassifier", sizes=[784, 50, 10]))},
        ("server/mean", "server/worst", "test_acc"),
        "server/mean",
    ),
    "fedem-cifar10": Experiment(
        "FedEM, CIFAR-10",
        "The same on CIFAR-10, with small convolutional networks.",
        "fedem_mnist",
        {"FedEM": CIFAR, "FedAvg": (*one_model("CifarCNN", **CIFAR_NET), *CIFAR)},
        ("server/mean", "server/worst", "test_acc"),
        "server/mean",
    ),
    "drift": Experiment(
        "SCAFFOLD",
        "Clients with two digits drift apart in a local epoch. What do control variates gain?",
        "scaffold_mnist",
        {
            "SCAFFOLD, option II": (),
            "SCAFFOLD, option I": ("--federation.aggregator.init_args.option=I",),
            "FedAvg": FEDAVG,
        },
    ),
    "steps": Experiment(
        "FedNova",
        "Half of the sampled clients make fewer local steps. What does normalization gain?",
        "fednova_mnist",
        {"FedNova": (), "FedAvg": FEDAVG},
    ),
    "gossip": Experiment(
        "Gossip",
        "How accurate is averaging among neighbors in a graph, without a server?",
        "gossip_mnist",
        {
            "ring": (),
            "grid": ("--federation.aggregator.init_args.graph=grid",),
            "Erdos-Renyi": ("--federation.aggregator.init_args.graph=erdos_renyi",),
            "complete": ("--federation.aggregator.init_args.graph=complete",),
            "FedAvg": FEDAVG,
        },
        ("test_acc", "consensus_distance"),
    ),
    "control": Experiment(
        "FedControl",
        "Aggregation weights from sample counts, the decrease of the loss and the sum of past"
        " losses, on Fashion-MNIST, IID.",
        "fedcontrol_fashion",
        for_all("", (*rounds(100), "--vectorize=auto"), CONTROL),
        ("test_acc", "R60", "R80"),
    ),
    "control-noniid": Experiment(
        "FedCostWAvg, label skew",
        "The same in the setting in which the paper found an advantage of FedCostWAvg: clients"
        " with skewed labels, here two classes each, and 150 rounds.",
        "fedcontrol_fashion",
        for_all(
            "",
            (*rounds(150), *split("Shards")),
            {name: CONTROL[name] for name in ("FedCostWAvg", "FedAvg")},
        ),
        ("test_acc", "R60"),
    ),
    "asynchronous": Experiment(
        "Asynchronous rounds",
        "The speeds of clients are log-normal: the slowest of 30 takes about eight times as long"
        " as the median. What does the server gain if it does not wait, at equal virtual time?",
        "fedbuff_mnist",
        {
            "FedBuff, 30 clients train": rounds(80),
            "FedAvg, rounds of 30": (*SYNCHRONOUS, "--federation.clients_per_round=30", *rounds(8)),
            "FedAvg, rounds of 30, deadline 1.5 s": (
                *SYNCHRONOUS,
                "--federation.clients_per_round=30",
                *rounds(18),
                *callback("ClientFaults", step_seconds=0.01, speed_sigma=1.0, deadline=1.5),
            ),
        },
        ("val_acc, 10 s", "val_acc, 20 s"),
        across="virtual_time",
    ),
    "policy": Experiment(
        "Policies",
        "Policies that learn one of five learning rates, compared with each fixed rate.",
        "personalized_policy_mnist",
        policies([(rate, 5) for rate in RATES]),
    ),
    "policy-two": Experiment(
        "Policies, two hyperparameters",
        "Policies that learn the learning rate and the number of local steps at once.",
        "personalized_policy_mnist",
        policies([(lr, steps) for lr in (0.03, 0.1, 0.3) for steps in (2, 5, 10)]),
    ),
    "policy-labels": Experiment(
        "Policies, clients with wrong labels",
        "Eight of the 20 clients have wrong labels, so that the best learning rate is not the same"
        " for all clients.",
        "personalized_policy_mnist",
        for_all(
            "",
            (*split("IID"), *callback("LabelFlip", clients=0.4)),
            policies([(rate, 5) for rate in RATES]),
        ),
    ),
    "policy-conv": Experiment(
        "Policies, a convolutional network",
        "The same with a convolutional network on Fashion-MNIST.",
        "personalized_policy_mnist",
        for_all(
            "",
            ("--data=FashionMNIST", "--model.init_args.net=FashionCNN", "--vectorize=auto"),
            policies([(rate, 5) for rate in RATES]),
        ),
    ),
    "policy-resnet": Experiment(
        "Policies, ResNet-18",
        "The same with torchvision's ResNet-18 on CIFAR-10, in a short schedule.",
        "personalized_policy_mnist",
        for_all(
            "",
            (
                "--data=CIFAR10",
                given("model.init_args.net", "torchvision.models.resnet18", num_classes=10),
                "--vectorize=1",
                "--federation.buffers=average",
                "--data.init_args.num_clients=10",
                *rounds(20),
            ),
            policies([(rate, 5) for rate in (0.01, 0.03, 0.1)]),
        ),
    ),
}


# --- tables of other papers -----------------------------------------------------------------------

#: Ends a run in the first round that reaches 99 %.
UNTIL_99 = callback(
    "lightning.pytorch.callbacks.EarlyStopping",
    **{"monitor": "val_acc", "mode": "max", "stopping_threshold": 0.99, "patience": 10_000},
)
#: Table 2 of McMahan et al. (2017): epochs E and batch size B, rounds to 99 % on IID clients and on
#: clients with two shards of the sorted samples.
MCMAHAN = {
    (1, None): (626, 483),
    (5, None): (179, 1000),
    (1, 50): (65, 600),
    (20, None): (234, 672),
    (1, 10): (34, 350),
    (5, 50): (29, 334),
    (20, 50): (32, 426),
    (5, 10): (20, 229),
    (20, 10): (18, 173),
}


def mcmahan(epochs: int, batch_size: int | None, lr: float, most: int) -> tuple[str, ...]:
    """Return the options of a row of the table."""
    size = f"--data.init_args.batch_size={batch_size or 'null'}"
    return *rounds(most), size, *policy("Schedule", lr=lr, local_epochs=epochs), *UNTIL_99


def mcmahan_name(epochs: int, batch_size: int | None) -> str:
    """Return the name of a row of the table."""
    return f"E = {epochs}, B = {batch_size or 'all'}"


def mcmahan_rows(lrs: Mapping[tuple[int, int | None], float], column: int) -> Experiment:
    """Return the rows of the table that are run, with their learning rates, for one split."""
    kind = ("IID clients", "clients with two shards")[column]
    found = {mcmahan_name(*row): {"paper": str(MCMAHAN[row][column])} for row in lrs}
    arms = {
        mcmahan_name(*row): mcmahan(*row, lr, 2 * MCMAHAN[row][column]) for row, lr in lrs.items()
    }
    options = split("Shards") if column else ()
    return Experiment(
        f"McMahan et al. (2017), table 2, {kind}",
        "In how many rounds does the CNN reach 99 % on the test samples of MNIST? Ten of 100"
        " clients take part in a round.",
        "mcmahan2017",
        for_all("", options, arms),
        ("R99", "best"),
        published=found,
    )


#: NIID-Bench by Flower's baseline: the best accuracy over 50 rounds for each data set and method,
#: in the order of NIID_SPLITS.
NIID_BENCH = {
    "MNIST": {
        "FedAvg": (99.09, 98.89, 19.33, 96.86, 97.86),
        "FedProx": (99.16, 99.02, 51.79, 96.85, 97.85),
        "SCAFFOLD": (99.06, 99.07, 9.93, 96.92, 97.91),
        "FedNova": (99.05, 98.03, 52.58, 96.65, 97.62),
    },
    "FashionMNIST": {
        "FedAvg": (89.23, 88.09, 28.39, 78.10, 82.43),
        "FedProx": (89.42, 88.15, 32.65, 78.05, 82.99),
        "SCAFFOLD": (89.33, 88.44, 10.0, 33.8, 80.32),
        "FedNova": (89.36, 88.22, 16.86, 71.67, 81.97),
    },
    "CIFAR10": {
        "FedAvg": (71.32, 62.47, 10.0, 51.17, 59.11),
        "SCAFFOLD": (71.66, 68.08, 10.0, 49.42, 61.00),
    },
}
NIID_METHODS: Arms = {
    "FedAvg": (),
    "FedProx": term("Proximal", mu=0.01),
    "SCAFFOLD": rule("Scaffold", weighting="samples"),
    "FedNova": rule("FedNova"),
}
NIID_SPLITS: Arms = {
    "IID": (),
    "Dirichlet(0.5)": split("Dirichlet", alpha=0.5, min_size=10, balanced=True),
    "one class": split("ByLabel", classes_per_client=1),
    "two classes": split("ByRandomLabel", classes_per_client=2),
    "three classes": split("ByRandomLabel", classes_per_client=3),
}


def niid_bench(data: str) -> Experiment:
    """Return the cells of a data set."""
    net = given("model.init_args.net", "published_parts.LeNet5", channels=3, size=32)
    color = (net, "--data.init_args.augment=true") * (data == "CIFAR10")
    shared = (f"--data=published_parts.Plain{data}", *color)
    arms, found = {}, {}
    for method, figures in NIID_BENCH[data].items():
        for (name, options), figure in zip(NIID_SPLITS.items(), figures, strict=True):
            arms[f"{method}, {name}"] = (*shared, *NIID_METHODS[method], *options)
            found[f"{method}, {name}"] = {"Flower, 50 rounds": f"{figure}"}
    return Experiment(
        f"NIID-Bench, {data}",
        "Ten clients make ten local epochs in each round. What is the best accuracy over rounds?",
        "niid_bench",
        arms,
        ("best", "test_acc"),
        published=found,
    )


#: PFLlib's page of benchmarks (docs/benchmark.html): the best accuracy in 2,000 rounds on
#: Fashion-MNIST, with two classes per client, and with Dirichlet(0.1). Its options are not known.
#: Its FedAMP trains each client alone, as its penalty has no gradient.
PFLLIB = {
    "FedAvg": (80.41, 85.85),
    "FedProx": (78.08, 85.63),
    "Per-FedAvg": (99.18, 95.10),
    "pFedMe": (99.35, 97.25),
    "Ditto": (99.44, 97.47),
    "APFL": (99.41, 97.25),
    "FedAMP": (99.42, 97.20),
    "FedALA": (99.57, 97.66),
}
PFLLIB_METHODS: Arms = {
    "local training": rule("FedAMP", strength=0),
    "FedAvg": (),
    "FedProx": term("Proximal", mu=0.01),
    "Per-FedAvg": (
        "--model=PerFedAvg",
        given("model.init_args.net", "published_parts.PfllibCNN"),
        "--model.init_args.inner_lr=0.005",
        # A step has two batches of ten, and PFLlib makes two epochs.
        "--data.init_args.batch_size=20",
        *policy("Schedule", lr=0.005, local_epochs=2),
    ),
    "pFedMe": (
        given(
            "model.init_args.optimizer",
            "lightning_fl.optimizers.PFedMe",
            **{"lr": 0.005, "personal_lr": 0.01, "lam": 15, "inner_steps": 5},
        ),
        "--federation.optimizer_state=keep",
    ),
    "Ditto": term("Ditto", strength=0.1),
    "APFL": term("APFL", alpha=0.5),
    "FedAMP": rule("FedAMP"),
    "FedALA": rule("FedALA"),
}


def pfllib(column: int) -> Experiment:
    """Return the cells of a column of PFLlib's table."""
    kind, options = (
        ("two classes per client", TWO_CLASSES),
        ("Dirichlet(0.1)", split("Dirichlet", alpha=0.1, min_size=40, balanced=True)),
    )[column]
    return Experiment(
        f"PFLlib, Fashion-MNIST, {kind}",
        "Twenty clients make a local epoch in each round, and hold out a quarter of their samples"
        " for the test. What is the accuracy on all test samples, of the global model (server) and"
        " of the clients' own ones (kept; server for FedAMP)?",
        "pfllib_fashion",
        for_all("", options, PFLLIB_METHODS),
        ("server/weighted", "kept/weighted"),
        "server/weighted",
        published={name: {"PFLlib, 2,000 rounds": f"{f[column]}"} for name, f in PFLLIB.items()},
    )


EXPERIMENTS |= {
    "pfllib-classes": pfllib(0),
    "pfllib-dirichlet": pfllib(1),
    "mcmahan2017-iid": mcmahan_rows(
        {(1, 10): 0.1, (5, 10): 0.1, (20, 10): 0.1, (1, 50): 0.2, (5, 50): 0.2, (1, None): 0.5}, 0
    ),
    "mcmahan2017-shards": mcmahan_rows({(1, 10): 0.05, (5, 10): 0.05, (1, 50): 0.1}, 1),
    **{f"niid-bench-{data.lower()}": niid_bench(data) for data in NIID_BENCH},
    "pfl-cifar10": Experiment(
        "pfl-research, CIFAR-10",
        "Fifty of 1,000 clients of 50 samples make an epoch in each of 1,500 rounds.",
        "pfl_cifar10",
        {"FedAvg": ()},
        ("best", "test_acc"),
    ),
}
