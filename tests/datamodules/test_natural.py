"""Configurations of natural federated data sets, on generated data with the real columns."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.datasets
import yaml
from PIL import Image

import quick_cli
from layouts import cifar_layout, speech_commands_layout, spoken_digits_layout
from lightning_fl.files import read_text

CONFIGS = Path(__file__).parents[2] / "configs" / "natural"
N = 60
USERS = [f"user_{i % 6}" for i in range(N)]
RANDOM = np.random.default_rng(0)


def image(*shape):
    return Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8))


def femnist(hf_rows):
    return hf_rows.femnist([image(28, 28) for _ in range(N)], USERS, 62)


def shakespeare(hf_rows):
    text = "KING. Now is the winter of our discontent\nMade glorious summer " * 4
    return hf_rows.table(
        character_id=(USERS, "string"),
        x=([text[i : i + 80] for i in range(N)], "string"),
        y=([text[i + 80] for i in range(N)], "string"),
    )


def sentiment140(hf_rows):
    texts = [f"@friend what a {'good' if i % 2 else 'bad'} day {i}!" for i in range(N)]
    return hf_rows.table(
        text=(texts, "string"),
        date=(["Mon Apr 06 22:19:45 PDT 2009"] * N, "string"),
        user=(USERS, "string"),
        sentiment=([4 * (i % 2) for i in range(N)], "int32"),
        query=(["NO_QUERY"] * N, "string"),
    )


def fed_isic2019(hf_rows):
    return hf_rows.table(
        image=([image(40 + i % 3, 50, 3) for i in range(N)], hf_rows.datasets.Image()),
        center=([i % 6 for i in range(N)], "int64"),
        label=([i % 8 for i in range(N)], hf_rows.datasets.ClassLabel(num_classes=8)),
    )


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Run a config for two rounds and return the clients' numbers of samples."""
    monkeypatch.chdir(tmp_path)

    def run(name, *options):
        quick_cli.call(
            *("fit", "--config", CONFIGS / f"{name}.yaml", "--trainer.default_root_dir=runs"),
            *("--trainer.max_epochs=2", "--trainer.enable_progress_bar=false", "--threads=1"),
            *options,
        )
        run = Path("runs/version_0")
        assert len((run / "rounds.csv").read_text().splitlines()) == 3
        return [row.split(",") for row in (run / "participation.csv").read_text().splitlines()]

    return run


@pytest.mark.parametrize("columns", [femnist, shakespeare, sentiment140, fed_isic2019])
def test_data_sets_of_hugging_face(fit, columns):
    import hf_rows  # needs an extra

    name, values = columns.__name__, columns(hf_rows)
    hf_rows.datasets.DatasetDict(train=values).save_to_disk("saved")
    asked = yaml.safe_load(read_text(CONFIGS / f"{name}.yaml"))["federation"]
    few = ["--federation.clients_per_round=3"] if "clients_per_round" in asked else []
    steps = "--federation.policy.init_args.num_steps=2"
    if "num_steps" not in asked["policy"]["init_args"]:
        few.append("--federation.policy.init_args.local_epochs=null")
    if name == "femnist":
        few.append("--model.init_args.net.init_args={width: 2, hidden: 4}")
    if name == "shakespeare":
        few.append("--model.init_args.net.init_args={hidden: 4}")
    rows = fit(
        name, "--data.init_args.dataset=saved", "--data.init_args.load_options=null", steps, *few
    )
    key = {"femnist": "writer_id", "shakespeare": "character_id", "sentiment140": "user"}
    clients = sorted(set(map(str, values[key.get(name, "center")])))
    assert [row[1] for row in rows] == ["name", *clients]
    assert sum(int(row[2]) for row in rows[1:]) == 54


SMALL = "model.init_args.net.init_args={width: 2, hidden: 4}"
#: The layout of the files of a data set, and options for few samples.
FILES = {
    "cifar10_dirichlet": (
        *(cifar_layout, "data.init_args.partition.init_args.min_size=2"),
        *("data.init_args.num_clients=3", "data.init_args.val_size=5"),
        "model.init_args.net.init_args.width=2",
    ),
    "speech_commands": (
        *(speech_commands_layout, 'data.init_args.keywords=["yes","no"]'),
        *("data.init_args.val_size=0", "federation.clients_per_round=1", SMALL),
    ),
    "spoken_digits": (spoken_digits_layout, "data.init_args.val_size=0", SMALL),
}


@pytest.mark.parametrize(("name", "clients"), list(zip(FILES, (3, 2, 2), strict=True)))
def test_data_sets_of_files(fit, tmp_path, name, clients):
    layout, *small = FILES[name]
    layout(tmp_path)
    rows = fit(name, *(f"--{each}" for each in (f"data.init_args.root={tmp_path}", *small)))
    assert len(rows) == 1 + clients


def test_newsgroups(fit, monkeypatch):
    asked = []

    def fetched(**options):
        asked.append(options)
        posts = [f"the {'team' if i % 2 else 'church'} number {i}" for i in range(N)]
        return SimpleNamespace(data=posts, target=np.arange(N) % 20)

    monkeypatch.setattr(sklearn.datasets, "fetch_20newsgroups", fetched)
    small = ["num_clients=4", "partition.init_args.min_size=3", "root=here"]
    rows = fit(
        "newsgroups",
        *(f"--data.init_args.{o}" for o in small),
        "--federation.clients_per_round=2",
        "--federation.policy.init_args.num_steps=2",
    )
    assert len(rows) == 5
    assert asked[0]["subset"] == "train"
    assert asked[0]["data_home"] == "here"
    assert not asked[0]["download_if_missing"]
