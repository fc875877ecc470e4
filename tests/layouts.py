"""Small data sets, made here, in the layouts of the real ones."""

import math
import pickle

import numpy as np
from scipy.io import wavfile

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


def tone(seconds=1.0, rate=8000, hertz=440.0):
    """A sine of half of full scale."""
    t = np.arange(int(seconds * rate)) / rate
    return 0.5 * np.sin(2 * math.pi * hertz * t)


def write_wav(path, wave, rate=8000, dtype=np.int16):
    """Write numbers from -1 to 1 in one of the sample formats."""
    scale = {np.uint8: 127.5, np.int16: 2**15, np.int32: 2.0**31, np.float32: 1}[dtype]
    data = wave * scale + (127.5 if dtype is np.uint8 else 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, data.astype(dtype))


def spoken_digits_layout(root):
    """Ten digits of two speakers, as tones of their own."""
    folder = root / "free-spoken-digit-dataset" / "recordings"
    for digit in range(10):
        for speaker in ("anna", "ben_2"):
            for index in range(4, 8):
                wave = tone(0.3 + 0.05 * index, hertz=200 + 300 * digit)
                write_wav(folder / f"{digit}_{speaker}_{index}.wav", wave)


def speech_commands_layout(root):
    """Two words of four speakers."""
    folder = root / "SpeechCommands" / "speech_commands_v0.02"
    for i, word in enumerate(("yes", "no")):
        for speaker in "abcd":
            path = folder / word / f"{speaker}_nohash_0.wav"
            write_wav(path, tone(1, 16000, 300 + i), 16000)
    (folder / "validation_list.txt").write_text("yes/a_nohash_0.wav\nno/a_nohash_0.wav\n")
    (folder / "testing_list.txt").write_text("yes/b_nohash_0.wav\nno/b_nohash_0.wav\n")
