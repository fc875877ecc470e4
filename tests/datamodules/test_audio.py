"""Spoken words: files of every kind, spectrograms, augmentation, and the two data sets."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from layouts import speech_commands_layout, spoken_digits_layout, tone, write_wav
from lightning_fl.datamodules import Augment, LogMel, SpeechCommands, SpokenDigits
from lightning_fl.datamodules.audio import read_wav
from lightning_fl.partition import ByLabel, Natural
from lightning_fl.types import FederationError
from numbered import fitted, plan

# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32])
def test_every_sample_format_is_read_alike(tmp_path, dtype):
    write_wav(tmp_path / "a.wav", tone(), dtype=dtype)
    found = read_wav(tmp_path / "a.wav", 8000, 8000)
    assert found.dtype == torch.int16
    steps = 2 * 2**8 if dtype is np.uint8 else 2
    assert (found - torch.from_numpy(tone()) * 2**15).abs().max() < steps


def test_short_clips_are_padded_and_long_ones_cropped(tmp_path):
    ramp = np.arange(100) / 200
    write_wav(tmp_path / "a.wav", ramp)
    exact = read_wav(tmp_path / "a.wav", 8000, 100)
    assert torch.equal(read_wav(tmp_path / "a.wav", 8000, 40), exact[30:70])
    padded = read_wav(tmp_path / "a.wav", 8000, 150)
    assert torch.equal(padded[:100], exact)
    assert not padded[100:].any()


def test_other_rates_are_resampled_and_channels_averaged(tmp_path):
    write_wav(tmp_path / "a.wav", tone(rate=44100), rate=44100)
    found = read_wav(tmp_path / "a.wav", 8000, 8000).double() / 2**15
    inner = slice(200, 7800)
    assert (found[inner] - torch.from_numpy(tone())[inner]).abs().max() < 0.01
    write_wav(tmp_path / "b.wav", np.stack([tone(), -tone()], 1))
    assert read_wav(tmp_path / "b.wav", 8000, 8000).abs().max() <= 1


@pytest.mark.parametrize("length", [46, 1044, 15_000])
def test_a_file_that_is_cut_short_is_named(tmp_path, length):
    wavfile.write(tmp_path / "whole.wav", 8000, tone())
    (tmp_path / "cut.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.wav"):
        read_wav(tmp_path / "cut.wav", 8000, 8000)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_not_finite_are_named(tmp_path, value):
    wavfile.write(tmp_path / "bad.wav", 8000, np.array([0.1, value, 0.2], dtype=np.float32))
    with pytest.raises(ValueError, match=r"bad\.wav has no samples, or non-finite"):
        read_wav(tmp_path / "bad.wav", 8000, 8000)


@pytest.mark.parametrize("rate", [8001, 44_101, 11_025])
def test_odd_rates_take_no_more_memory(tmp_path, rate):
    seconds = np.arange(rate) / rate
    wavfile.write(tmp_path / "odd.wav", rate, np.sin(2 * np.pi * 440 * seconds).astype(np.float32))
    wave = read_wav(tmp_path / "odd.wav", 8000, 8000).double()
    assert int(torch.fft.rfft(wave).abs().argmax()) == 440


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


def test_clips_are_shifted_each_by_its_own():
    torch.manual_seed(0)
    clips = torch.arange(1, 101).repeat(50, 1).to(torch.int16)
    augment = Augment(time_shift=0.2, noise=0, mask=0)
    shifted = augment.clips(clips, torch.rand(50, 7), torch.zeros(100)) * 2**15
    first = []
    for row in shifted.round().int().tolist():
        inside = [v for v in row if v]
        assert inside == list(range(inside[0], inside[-1] + 1))
        first.append(inside[0] - row.index(inside[0]) - 1)
        assert len(inside) == 100 - abs(first[-1])
    assert len(set(first)) > 10
    assert max(map(abs, first)) <= 20


def test_noise_is_a_section_of_the_background():
    background = torch.arange(10.0)
    uniform = torch.tensor([[0.0, 0.5, 0.2, 0, 0, 0, 0], [0.0, 0.0, 1.0, 0, 0, 0, 0]])
    noisy = Augment(time_shift=0, noise=0.01, mask=0).clips(torch.zeros(2, 4), uniform, background)
    expected = torch.stack([0.01 * 0.2 * background[3:7], 0.01 * background[:4]])
    torch.testing.assert_close(noisy, expected)


def test_masks_have_all_widths_up_to_their_maximum():
    torch.manual_seed(0)
    ones = torch.ones(200, 1, 16, 16)
    masked = Augment(mask=2).spectrograms(ones.clone(), torch.rand(200, 7))[:, 0] == 0
    for axis in (1, 2):
        assert masked.all(axis).sum(1).unique().tolist() == [0, 1, 2]
    assert torch.equal(Augment(mask=0).spectrograms(ones.clone(), torch.rand(200, 7)), ones)


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
    options = {"partition": Natural(), "num_clients": None}
    data = SpeechCommands(str(commands), keywords=["yes", "no"], **options)
    data.setup()
    assert [len(part) for part in (data.train, data.val, data.test)] == [4, 2, 2]
    assert data.train.tensors[0].shape == (4, 16000)
    assert data.train.keys == ["c", "d", "c", "d"]
    assert data.train.tensors[1].tolist() == [0, 0, 1, 1]
    assert data.num_samples.tolist() == [2, 2]


def test_kept_features_are_those_of_the_device(digits):
    kept, made = (
        fitted(SpokenDigits(str(digits), cache_features=cache, val_size=0))
        for cache in (True, False)
    )
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


def test_wrong_options_are_refused():
    with pytest.raises(FederationError, match="cache_features"):
        SpokenDigits(cache_features=True, augment=Augment())
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
