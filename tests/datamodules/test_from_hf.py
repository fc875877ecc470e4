"""Data sets of the Hugging Face package ``datasets``."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import hf_rows
from hf_rows import datasets, femnist, table
from lightning_fl.datamodules import FederatedDataModule, FromHuggingFace
from lightning_fl.partition import ByLabel
from lightning_fl.types import FederationError
from numbered import fitted

WRITERS = [f"f{i % 7:04d}_14" for i in range(60)]


def images():
    """Rows of FEMNIST, and their pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 6), dtype=np.uint8)
    return femnist([Image.fromarray(each) for each in pixels], WRITERS, 5), pixels


def numbers(n=60):
    return hf_rows.numbers(WRITERS[:n])


def split(rows, **options):
    """Clients of the rows of :func:`numbers`."""
    return fitted(FromHuggingFace(rows, **{"input": "x", "val_size": 0} | options))


def test_images_by_writer():
    given, pixels = images()
    options = {"label": "character", "partition_by": "writer_id", "val_size": 0}
    data = fitted(FederatedDataModule.from_hf(given, **options))
    assert data.client_names == sorted(set(WRITERS))
    assert data.num_samples.tolist() == [WRITERS.count(name) for name in sorted(set(WRITERS))]
    x, y = data.train[9]
    assert (x.shape, x.dtype, int(y)) == (torch.Size([1, 8, 6]), torch.float32, 4)
    assert torch.equal(x[0], torch.from_numpy(pixels[9]) / 255)
    mine = torch.cat([y for _, y in data.samples_of(2)])
    assert mine.tolist() == [i % 5 for i in range(60) if WRITERS[i] == "f0002_14"]
    assert data.class_counts.sum(0).tolist() == [12] * 5


def pictures(*given):
    """Rows with these images."""
    return table(image=(given, datasets.Image()), label=([0] * len(given), "int64"))


RED = Image.new("RGB", (4, 3), (255, 0, 0))


@pytest.mark.parametrize("mode", ["P", "CMYK", "1", "F", "I"])
def test_images_of_other_modes_need_a_transform(mode):
    rows = pictures(RED.convert("L").convert(mode))
    data = fitted(FromHuggingFace(rows, num_clients=1, val_size=0))
    with pytest.raises(FederationError, match=f"8-bit gray or RGB, got the mode {mode}: pass"):
        data.train[0]
    data = fitted(FromHuggingFace(rows, transform=pil_to_tensor, num_clients=1, val_size=0))
    assert data.train[0][0].shape[1:] == (3, 4)


@pytest.mark.parametrize("transform", [None, np.array])
def test_a_mask_needs_a_label_transform(transform):
    classes = Image.fromarray(np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8))
    rows = table(image=([RED], datasets.Image()), mask=([classes], datasets.Image()))
    options = {"label": "mask", "transform": transform, "num_clients": 1, "val_size": 0}
    data = fitted(FromHuggingFace(rows, **options))
    with pytest.raises(TypeError, match="PIL"):
        next(data.samples_of(0))
    data = fitted(FromHuggingFace(rows, label_transform=pil_to_tensor, **options))
    assert data.train[0][1].tolist() == [[[0, 1, 2], [2, 1, 0]]]


def test_rows_can_be_sent_to_loader_processes():
    data = fitted(FromHuggingFace(images()[0], label="character", partition_by="writer_id"))
    sent = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(sent[9][0], data.train[9][0])
    assert sent.keys == data.train.keys == WRITERS


@pytest.mark.parametrize("transform", [None, torch.tensor])
def test_labels_of_the_split_are_those_of_the_samples(transform):
    rows = numbers().remove_columns("label").add_column("label", ["cat", "dog", "cow"] * 20)
    data = split(
        rows,
        transform=transform,
        label_transform={"cow": 0, "dog": 1, "cat": 2}.__getitem__,  # of texts, not of tensors
        partition=ByLabel(),
        num_clients=3,
    )
    for client, part in enumerate(data.parts):
        assert {data.train[i][1] for i in part.tolist()} == {client}
    assert data.class_counts.tolist() == [[20, 0, 0], [0, 20, 0], [0, 0, 20]]


@pytest.mark.parametrize("transform", [None, torch.tensor])
@pytest.mark.parametrize("label", [[1.0, 0.0], 0.5])
def test_a_label_is_the_same_with_a_transform_of_the_input(transform, label):
    rows = numbers().remove_columns("label").add_column("label", [label] * 60)
    data = split(rows, transform=transform, num_clients=1)
    y = next(data.samples_of(0))[1]
    assert y.dtype == torch.float32
    assert y.tolist() == [label] * 60


def test_a_format_of_the_user_is_kept():
    data = split(numbers().with_format("numpy"), num_clients=3)
    assert isinstance(data.train[0][0], np.ndarray)
    doubled = numbers()
    doubled.set_transform(lambda batch: {**batch, "x": [np.array(x) * 2 for x in batch["x"]]})
    data = split(doubled, num_clients=3, val_size=0)
    assert data.train[1][0].tolist() == pytest.approx([2 * x for x in numbers()[1]["x"]])


def test_a_transform_of_the_user_may_make_columns():
    rows = numbers().with_transform(
        lambda batch: {"values": [2 * torch.tensor(x) for x in batch["x"]], "y": batch["label"]}
    )
    data = split(rows, input="values", label="y", partition_by="site")
    assert data.train[1][0].tolist() == pytest.approx([2 * x for x in numbers()[1]["x"]])
    assert data.class_labels is None


def test_several_columns_are_a_dictionary():
    rows = numbers().rename_column("x", "input_ids").add_column("mask", [1] * 60)
    batch = next(split(rows, input=["input_ids", "mask"], num_clients=3).samples_of(0))
    shapes = {name: tuple(value.shape) for name, value in batch.items()}
    assert shapes == {"input_ids": (20, 4), "mask": (20,), "label": (20,)}


def test_a_selection_keeps_its_own_order():
    rows = numbers().shuffle(seed=0).select(range(40))
    data = split(rows, partition_by="site")
    for client, name in enumerate(data.client_names):
        expected = [row["label"] for row in rows if row["site"] == name]
        assert torch.cat([y for _, y in data.samples_of(client)]).tolist() == expected
    assert data.class_labels.tolist() == rows["label"]


def test_rows_of_the_server_need_no_client():
    val, test = numbers(5).remove_columns("site"), numbers(8).remove_columns("site")
    parts = datasets.DatasetDict(train=numbers(), validation=val, test=test)
    data = split(parts, partition_by="site")
    data.setup("test")
    assert (len(data.val), len(data.test), data.num_clients) == (5, 8, 7)


def test_files_are_loaded_by_name(tmp_path):
    numbers().select_columns(["label", "site"]).to_csv(tmp_path / "rows.csv")
    data = FromHuggingFace(
        "csv",
        input="site",
        label="label",
        num_clients=3,
        load_options={"data_files": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "c")},
    )
    data.prepare_data()
    data.setup("fit")
    assert data.train[0] == ("f0000_14", numbers()[0]["label"])


def test_memory_is_that_of_the_rows_that_are_read(tmp_path):
    """Rows stay on disk: Arrow holds none of them after set-up, and those of a batch after it."""
    import pyarrow as pa

    n, width = 20_000, 100
    x = np.zeros((n, width), dtype=np.float32)
    columns = {"x": list(x), "label": [i % 2 for i in range(n)], "who": [i % 50 for i in range(n)]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    del columns
    before = pa.total_allocated_bytes()
    data = split(str(tmp_path / "saved"), partition_by="who", batch_size=20)
    next(data.samples_of(3))
    assert pa.total_allocated_bytes() - before < x.nbytes / 10


@pytest.mark.parametrize("options", [{"input": "a"}, {"partition_by": "a"}, {"label": "a"}])
def test_missing_columns_are_named(options):
    with pytest.raises(ValueError, match=r"'a'.*not in the dataset"):
        FromHuggingFace(images()[0], **{"label": "character"} | options).setup("fit")


def test_a_rule_without_keys_is_refused():
    with pytest.raises(FederationError, match="does not read the column partition_by"):
        FromHuggingFace(images()[0], partition_by="writer_id", partition=ByLabel())


def test_streams_and_missing_data_are_refused(tmp_path):
    with pytest.raises(FederationError, match=r"a Dataset .* that does not stream, got Iter"):
        FromHuggingFace(numbers().to_iterable_dataset(), "x", num_clients=3).setup("fit")
    with pytest.raises(FederationError, match=r"the data set .*nothing' cannot be loaded: "):
        FromHuggingFace(str(tmp_path / "nothing"), input="x", num_clients=3).setup("fit")
    with pytest.raises(FederationError, match=r"got NoneType in .* the splits \['test'\]"):
        FromHuggingFace(datasets.DatasetDict(test=numbers()), input="x").setup("fit")


def named(*classes):
    labels = [i % 2 for i in range(10)]
    return table(x=(labels, "float32"), label=(labels, datasets.ClassLabel(names=classes)))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_splits_with_classes_in_another_order_are_refused(part):
    parts = datasets.DatasetDict({"train": named("cat", "dog"), part: named("dog", "cat")})
    name = part.removesuffix("idation")
    with pytest.raises(FederationError, match=f"the labels of {name} are the classes"):
        FromHuggingFace(parts, input="x", num_clients=2).setup("fit")
    data = FromHuggingFace(parts, input="x", num_clients=2, classes=["cat", "dog"], val_size=2)
    data.setup()
    labels = [int(y) for _, y in getattr(data, name)]
    assert labels == [1, 0] * 5
    FromHuggingFace(parts, input="x", num_clients=2, label_transform=int).setup("fit")


def test_keys_that_are_numbers_are_in_their_order():
    rows = numbers().add_column("center", [(11 * i) % 3 + 9 for i in range(60)])
    assert split(rows, partition_by="center").client_names == ["9", "10", "11"]
    data = split(rows, partition_by="center", num_clients=2)
    assert data.client_names == ["9 and 1 more", "10"]
