"""Spoken words: files of every kind, spectrograms, augmentation, and the two data sets."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from layouts import speech_commands_layout, spoken_digits_layout, tone, write_wav
from lightning_fl.datamodules import Augment, LogMel, SpeechCommands, SpokenDigits
from lightning_fl.datamodules.audio import read_wav
from lightning_fl.partition import ByLabel, Natural
from lightning_fl.types import FederationError
from numbered import plan

# --- files ----------------------------------------------------------------------------------------


def test_short_clips_are_padded_and_long_ones_cropped(tmp_path):
    ramp = np.arange(100) / 200
    write_wav(tmp_path / "a.wav", ramp)
    exact = read_wav(tmp_path / "a.wav", 8000, 100)
    assert torch.equal(read_wav(tmp_path / "a.wav", 8000, 40), exact[30:70])
    padded = read_wav(tmp_path / "a.wav", 8000, 150)
    assert torch.equal(padded[:100], exact)
    assert not padded[100:].any()


def test_files_of_another_format_are_refused(tmp_path):
    path = tmp_path / "a.wav"
    for wave, rate, dtype in (
        (tone(), 8001, np.int16),
        (tone(), 8000, np.float32),
        (np.stack([tone()] * 2, 1), 8000, np.int16),
        (tone()[:0], 8000, np.int16),
    ):
        write_wav(path, wave, rate, dtype)
        with pytest.raises(ValueError, match=r"a\.wav must have one channel .* 16 bits at 8000 Hz"):
            read_wav(path, 8000, 8000)


@pytest.mark.parametrize("length", [46, 1044, 15_000])
def test_a_file_that_is_cut_short_is_named(tmp_path, length):
    write_wav(tmp_path / "whole.wav", tone())
    (tmp_path / "cut.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.wav"):
        read_wav(tmp_path / "cut.wav", 8000, 8000)


# --- features -------------------------------------------------------------------------------------


def test_a_tone_is_a_line_at_its_height():
    features = LogMel(8000, 8000)
    low, high = (
        features(torch.from_numpy(tone(hertz=hertz)).float()[None])[0, 0] for hertz in (300, 2500)
    )
    assert low.shape == (32, 32)
    assert low[:, 5:-5].argmax(0).unique().numel() == 1
    assert low[:, 16].argmax() < high[:, 16].argmax()


def test_each_clip_is_standardized():
    clips = torch.from_numpy(np.stack([tone(), 0.01 * tone(hertz=900)])).float()
    clips = clips + 0.001 * torch.randn_like(clips)
    x = LogMel(8000, 8000)(clips)
    torch.testing.assert_close(x.mean((1, 2, 3)), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std((1, 2, 3), correction=0), torch.ones(2), atol=1e-3, rtol=0)
    assert LogMel(8000, 8000)(torch.zeros(1, 8000)).isfinite().all()  # silence


def test_amounts_out_of_range_are_refused():
    with pytest.raises(FederationError, match="time_shift"):
        Augment(time_shift=2.0)
    with pytest.raises(FederationError, match="mask"):
        Augment(mask=-1)


def test_masks_have_all_widths_up_to_their_maximum():
    torch.manual_seed(0)
    ones = torch.ones(200, 1, 16, 16)
    masked = Augment(mask=2).spectrograms(ones, torch.rand(200, 7))[:, 0] == 0
    for axis in (1, 2):
        assert masked.all(axis).sum(1).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("recorded", [False, True])
def test_background_is_that_of_the_data_set_or_white_noise(commands, recorded):
    data = SpeechCommands(str(commands), keywords=["yes", "no"], num_clients=2, augment=True)
    if recorded:
        folder = data.folder / "_background_noise_"
        folder.mkdir()
        write_wav(folder / "hum.wav", tone(1.5, 16_000), rate=16_000)
        write_wav(folder / "rain.wav", 0.1 * tone(0.2, 16_000), rate=16_000)
    data.setup("fit")
    background = data._background_on(torch.device("cpu"))
    assert len(background) == (27_200 if recorded else 60 * 16_000)
    torch.testing.assert_close(background.std(), torch.tensor(1.0))
    data.plan = lambda: plan(data)
    batch = next(iter(data.train_dataloader()))
    clips, labels, draws = batch
    x, y = data.on_after_batch_transfer(batch, 0)
    uniform = draws.numbers.double() / 2**24
    for i, clip in enumerate(clips):
        source = torch.arange(16_000) - (int(uniform[i, 0] * 3201) - 1600)
        is_inside = (source >= 0) & (source < 16_000)
        shifted = torch.where(is_inside, clip[source.clamp(0, 15_999)] / 2**15, 0)
        start = int(uniform[i, 1] * (len(background) - 15_999))
        noisy = shifted + 0.005 * uniform[i, 2] * background[start : start + 16_000]
        expected = data.features(noisy[None].float())
        is_kept = x[i] != 0
        torch.testing.assert_close(x[i][is_kept], expected[0][is_kept], atol=1e-4, rtol=1e-4)
    assert torch.equal(y, labels)


# --- data sets ------------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path):
    spoken_digits_layout(tmp_path)
    return tmp_path


@pytest.fixture
def commands(tmp_path):
    speech_commands_layout(tmp_path)
    return tmp_path


def test_spoken_digits_are_split_as_their_authors_have_it(digits):
    data = SpokenDigits(str(digits), partition=Natural(), num_clients=None, val_size=0)
    data.setup()
    assert (len(data.train), len(data.test)) == (60, 20)
    assert data.num_samples.tolist() == [30, 30]
    assert set(data.train.keys) == {"anna", "ben_2"}
    x, y = data.example()
    assert (x.shape, y.dtype) == ((2, 1, 32, 32), torch.int64)


def test_speech_commands_are_split_by_their_lists(commands):
    data = SpeechCommands(
        str(commands), keywords=["yes", "no"], partition=Natural(), num_clients=None
    )
    data.setup()
    assert [len(part) for part in (data.train, data.val, data.test)] == [4, 2, 2]
    assert data.train.tensors[0].shape == (4, 16000)
    assert data.train.keys == ["c", "d", "c", "d"]
    assert data.train.tensors[1].tolist() == [0, 0, 1, 1]
    assert data.num_samples.tolist() == [2, 2]


def test_kept_features_are_those_of_the_device(digits):
    kept, made = (
        SpokenDigits(str(digits), cache_features=cache, val_size=0) for cache in (True, False)
    )
    for data in (kept, made):
        data.setup("fit")
    x, y = made.on_after_batch_transfer(made.train.fetch(torch.arange(8)), 0)
    again, labels = kept.on_after_batch_transfer(kept.train.fetch(torch.arange(8)), 0)
    torch.testing.assert_close(x, again)
    assert torch.equal(y, labels)


def test_a_damaged_clip_ends_the_run(digits):
    bad = next((digits / "free-spoken-digit-dataset" / "recordings").glob("3_anna_6*"))
    bad.write_bytes(b"RIFF")
    with pytest.raises(FederationError, match=rf"{bad.name} is not a readable WAV file"):
        SpokenDigits(str(digits)).setup("fit")


def test_what_is_missing_is_named_with_the_remedy(tmp_path, digits, commands):
    with pytest.raises(FederationError, match="download=true"):
        SpeechCommands(str(tmp_path / "none")).setup()
    with pytest.raises(FederationError, match="clone https"):
        SpokenDigits(str(tmp_path / "none")).setup()
    with pytest.raises(FederationError, match="no clips of 'down'"):
        SpeechCommands(str(commands)).setup()
    (digits / "free-spoken-digit-dataset" / "recordings" / "what.wav").write_bytes(b"")
    with pytest.raises(FederationError, match=r"what\.wav is not a clip"):
        SpokenDigits(str(digits)).setup()
    (commands / "SpeechCommands" / "speech_commands_v0.02" / "testing_list.txt").unlink()
    with pytest.raises(FederationError, match=r"incomplete, download it again: .*testing_list"):
        SpeechCommands(str(commands), keywords=["yes", "no"]).setup("test")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seconds": 0}, "seconds"),
        ({"image_size": 0}, "image_size"),
        ({"cache_features": True, "augment": Augment()}, "cache_features"),
    ],
)
def test_wrong_options_are_refused(options, named):
    with pytest.raises(FederationError, match=named):
        SpokenDigits(**options)
    with pytest.raises(FederationError, match="keywords"):
        SpeechCommands(keywords=["yes", "yes"])


# --- real clips -----------------------------------------------------------------------------------


def real(name):
    root = os.environ.get("LIGHTNING_FL_DATA")
    if not root or not Path(root, name).is_dir():
        pytest.skip(f"real clips: set LIGHTNING_FL_DATA to a folder that holds {name}")
    return root


@pytest.mark.slow
def test_the_ten_keywords(tmp_path):
    data = SpeechCommands(real("SpeechCommands"), partition=ByLabel())
    data.setup()
    assert [len(part) for part in (data.train, data.val, data.test)] == [2889, 357, 828]
    x, _ = data.on_after_batch_transfer(data.train.fetch(torch.arange(64)), 0)
    assert x.isfinite().all()
    assert x.mean().abs() < 0.01


def test_the_spoken_digits():
    data = SpokenDigits(real("free-spoken-digit-dataset"), partition=Natural(), num_clients=None)
    data.setup()
    assert data.num_clients == 6
    assert len(data.train) == 2700
    assert len(data.test) == 300
