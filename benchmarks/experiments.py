"""The experiments of ``rules.py``: each has several arms, a config with options."""

from __future__ import annotations

from typing import NamedTuple

from runs import Arms, callback, given, rule, split, term


class Experiment(NamedTuple):
    """What is compared.

    Args:
        title: Heading.
        question: What it asks, a line.
        config: The file that all arms share.
        arms: Options of each, by the name that it has in the table.
        figures: Columns: of the table of rounds (the last round that has it), ``test_acc``, ``R60``
            (the first round with a validation accuracy of 60 %, or another share), ``groups`` (the
            share of pairs of clients that are rightly in one cluster or in two), or
            ``val_acc, 20 s`` (the last validation accuracy in that virtual time).
        curve: What is drawn.
        across: Column over which it is drawn: ``round`` or ``virtual_time``.
    """

    title: str
    question: str
    config: str
    arms: Arms
    figures: tuple[str, ...] = ("test_acc",)
    curve: str = "val_acc"
    across: str = "round"


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
            "FedAvg, stragglers dropped": (
                *NO_TERMS,
                "--federation.policy.init_args.drop=true",
            ),
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
        {
            "FedAvg+": (),
            "FedAvg": (*FEDAVG, *policy("Schedule", lr=0.02, local_epochs=5)),
        },
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
            {
                "FedAvg+": (),
                "FedAvg": (*FEDAVG, *policy("Schedule", lr=0.02, local_epochs=5)),
            },
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
            "FedAvg, rounds of 30": (
                *SYNCHRONOUS,
                "--federation.clients_per_round=30",
                *rounds(8),
            ),
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
            (
                *split("IID"),
                *callback("LabelFlip", clients=0.4),
            ),
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
