"""HDF5 files in the layout of TensorFlow Federated."""

import pickle

import numpy as np
import pytest
import torch

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, FromHDF5
from lightning_fl.types import FederationError
from tutorial import Net, trainer

h5py = pytest.importorskip("h5py", reason='needs pip install ".[hdf5]"')

SIZES = {"f0001_41": 6, "f0000_14": 3, "f0020_02": 9}


def written(path, fields=None):
    """Write clients as EMNIST of TensorFlow Federated has them."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, n in SIZES.items():
            x = random.normal(size=(n, 4)).astype(np.float32)
            mine = {"pixels": x, "label": (x[:, 0] > 0).astype(np.int32)}
            for field, values in (fields(n) if fields else mine).items():
                file.create_dataset(f"examples/{name}/{field}", data=values)
    return str(path)


def test_each_client_of_the_file_is_a_client(tmp_path):
    path = written(tmp_path / "train.h5")
    data = FederatedDataModule.from_hdf5(path, val_size=0)
    data.setup("fit")
    assert data.client_names == sorted(SIZES)
    assert data.num_samples.tolist() == [3, 6, 9]
    with h5py.File(path) as file:
        for client, name in enumerate(data.client_names):
            x, y = next(data.samples_of(client))
            assert torch.equal(x, torch.from_numpy(file[f"examples/{name}/pixels"][()]))
            assert y.tolist() == file[f"examples/{name}/label"][()].tolist()
            assert data.class_counts[client].tolist() == y.bincount(minlength=2).tolist()


def test_it_trains_and_tests(tmp_path):
    files = [written(tmp_path / f"{name}.h5") for name in ("train", "test")]
    data = FromHDF5(*files, batch_size=3, val_size=3, num_workers=1)
    made, module = trainer(tmp_path, FederatedLoop(seed=0), rounds=5), Net()
    made.fit(module, datamodule=data)
    assert made.test(module, datamodule=data, verbose=False)[0]["val_acc"] > 0.7


def test_texts_are_strings_and_a_single_field_is_the_sample(tmp_path):
    path = written(tmp_path / "text.h5", lambda n: {"snippets": [b"to be"] * (n - 1) + [b"or"]})
    data = FromHDF5(path, fields=["snippets"], label=None, val_size=0, transform=len)
    data.setup("fit")
    assert [data.train[i] for i in (0, 2)] == [5, 2]
    assert data.class_counts is None


def test_a_transform_may_change_a_sample_in_place(tmp_path):
    data = FromHDF5(
        written(tmp_path / "train.h5"),
        transform=lambda sample: (sample[0].mul_(2), sample[1]),
        val_size=0,
    )
    data.setup("fit")
    assert torch.equal(data.train[0][0], data.train[0][0])


def test_labels_and_indices_are_int64_and_images_stay_bytes(tmp_path):
    def fields(n):
        return {
            "image": np.zeros((n, 2, 2), dtype=np.uint8),
            "tokens": np.zeros((n, 3), dtype=np.int32),
            "label": np.zeros(n, dtype=np.uint8),
            "weight": np.zeros(n, dtype=np.float32),
        }

    data = FromHDF5(written(tmp_path / "all.h5", fields), fields=list(fields(1)), val_size=0)
    data.setup("fit")
    dtypes = [value.dtype for value in data.train[0]]
    assert dtypes == [torch.uint8, torch.int64, torch.int64, torch.float32]


@pytest.mark.parametrize(
    ("pixels", "label"), [(">f4", "uint16"), (">f8", ">i4"), ("float32", "uint64"), ("f4", "bool")]
)
def test_numbers_of_any_type_and_byte_order_are_read(tmp_path, pixels, label):
    path = written(
        tmp_path / "other.h5",
        lambda n: {
            "pixels": np.arange(4 * n).reshape(n, 4).astype(pixels),
            "label": (np.arange(n) % 2).astype(label),
        },
    )
    data = FromHDF5(path, val_size=0)
    data.setup("fit")
    x, y = next(data.samples_of(0))
    assert x.is_floating_point()
    assert (x[2].tolist(), y.tolist()) == ([8, 9, 10, 11], [0, 1, 0])
    assert data.class_counts.tolist() == [[2, 1], [3, 3], [5, 4]]


def test_one_field_may_be_a_text(tmp_path):
    data = FromHDF5(written(tmp_path / "train.h5"), fields="pixels", val_size=0)
    data.setup("fit")
    assert data.train[0].shape == (4,)


def test_only_the_first_clients_are_read(tmp_path):
    data = FromHDF5(written(tmp_path / "train.h5"), max_clients=2, val_size=0)
    data.setup("fit")
    assert data.client_names == ["f0000_14", "f0001_41"]


def test_clients_without_samples_are_left_out(tmp_path):
    path = written(tmp_path / "train.h5")
    with h5py.File(path, "a") as file:
        file["examples/a_nobody/pixels"] = np.zeros((0, 4), dtype=np.float32)
        file["examples/a_nobody/label"] = np.zeros(0, dtype=np.int32)
    data = FromHDF5(path, val_size=0)
    data.setup("fit")
    assert data.client_names == sorted(SIZES)
    assert next(data.samples_of(0))[0].shape == (3, 4)


def test_a_copy_for_a_loader_process_opens_the_file_itself(tmp_path):
    data = FromHDF5(written(tmp_path / "train.h5"), val_size=0)
    data.setup("fit")
    copy = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(copy[7][0], data.train[7][0])


def test_wrong_files_are_refused(tmp_path):
    def refused(match, path, **options):
        with pytest.raises(FederationError, match=match):
            FromHDF5(str(path), **options).setup("fit")

    refused(r"missing\.h5' cannot be read", tmp_path / "missing.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    refused(r"text\.h5' cannot be read", tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_group("clients")
    refused("has no clients with samples under examples/", tmp_path / "other.h5")
    path = written(tmp_path / "train.h5")
    words = r"client 'f0000_14' .* must have the fields \['pixels', 'label'\] with one value per s"
    refused(r"must have the fields \['tokens', 'label'\] .*missing", path, fields=["tokens"])
    uneven = written(tmp_path / "uneven.h5", lambda n: {"pixels": [0.0] * n, "label": [1]})
    refused(words + r"ample \(\{'pixels': 3, 'label': 1\}\)", uneven)
    single = written(tmp_path / "single.h5", lambda n: {"pixels": [0.0] * n, "label": 1})
    refused(words, single)
    with h5py.File(tmp_path / "flat.h5", "w") as file:
        file["examples/f0000_14"] = [1.0, 2.0]
    refused(words, tmp_path / "flat.h5")
    with pytest.raises(FederationError, match="fields must name at least one field"):
        FromHDF5(path, fields=[])
    with pytest.raises(TypeError, match="num_clients"):
        FromHDF5(path, num_clients=3)
