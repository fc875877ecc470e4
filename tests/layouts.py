"""Data sets in torchvision's layout, made here."""

import pickle

import numpy as np

N_TRAIN, N_TEST = 20, 10


def write_idx(path, array):
    """The format of MNIST's files: type and rank, sizes, bytes."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4")
    path.write_bytes(header.tobytes() + array.astype(np.uint8).tobytes())


def mnist_layout(root, name="MNIST", train=N_TRAIN, test=N_TEST):
    """Every image is grey, its label is the last digit of the grey."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for kind, count, first in (("train", train, 0), ("t10k", test, 100)):
        grey = first + np.arange(count)
        write_idx(
            folder / f"{kind}-images-idx3-ubyte", grey[:, None, None].repeat(28, 1).repeat(28, 2)
        )
        write_idx(folder / f"{kind}-labels-idx1-ubyte", grey % 10)


def cifar_layout(root):
    """Every image has its own red, green 100 and blue 200."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    size = N_TRAIN // 5
    greys = {f"data_batch_{i + 1}": np.arange(size) + i * size for i in range(5)}
    greys["test_batch"] = 100 + np.arange(N_TEST)
    for name, red in greys.items():
        image = np.stack([red, np.full_like(red, 100), np.full_like(red, 200)], 1).repeat(1024, 1)
        content = {"data": image.astype(np.uint8), "labels": (red % 10).tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [f"class {i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))
