"""Data sets of the Hugging Face package ``datasets``, made here."""

import numpy as np
import pytest

datasets = pytest.importorskip("datasets", reason='needs pip install ".[hf]"')


def table(**columns):
    """Return a data set of columns; each is its values and its type, or the name of a type."""
    kinds = {n: datasets.Value(k) if isinstance(k, str) else k for n, (_, k) in columns.items()}
    values = {name: each for name, (each, _) in columns.items()}
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


def femnist(images, writers, num_classes):
    """Columns and types of FEMNIST as LEAF's on the hub."""
    characters = [i % num_classes for i in range(len(images))]
    return table(
        image=(images, datasets.Image()),
        writer_id=(writers, "string"),
        hsf_id=([0] * len(images), "int64"),
        character=(characters, datasets.ClassLabel(num_classes=num_classes)),
    )


def numbers(sites):
    """Four numbers, a label and the site of each row."""
    x = np.random.default_rng(0).normal(size=(len(sites), 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(int).tolist()
    floats = datasets.List(datasets.Value("float32"))
    return table(x=(x.tolist(), floats), label=(labels, "int64"), site=(sites, "string"))
