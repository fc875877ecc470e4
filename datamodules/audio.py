"""Base class of data sets of spoken words: clips in memory, features on the device."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from scipy.io import wavfile
from torch import Tensor, nn

from lightning_fl.datamodules.batches import Draws
from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.loader import module_dtype
from lightning_fl.datamodules.storage import InMemory, not_found
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.files import data_root, error_context
from lightning_fl.functional.augmentation import choices, mask_span, shift
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_flag, check_integer, check_number

#: Number of clips per chunk when the features of all clips are precomputed.
CHUNK = 500


class Clip(NamedTuple):
    """Path, label and speaker of a recording."""

    path: Path
    label: int
    speaker: str


def read_wav(path: Path, rate: int, samples: int) -> Tensor:
    """Read a clip, resample it to ``rate`` and pad or crop it to ``samples`` samples.

    Short clips are padded with silence at the end. Long clips are cropped to their middle. Channels
    are averaged.

    Args:
        path: A WAV file of any sample format.
        rate: Target sampling rate, in Hz.
        samples: Target number of samples.

    Returns:
        int16, ``[samples]``.

    Raises:
        ValueError: If the file is damaged, truncated or empty.
    """
    wave = read_recording(path, rate)
    if len(wave) >= samples:
        start = (len(wave) - samples) // 2
        wave = wave[start : start + samples]
    else:
        wave = torch.cat([wave, wave.new_zeros(samples - len(wave))])
    return (wave * 2**15).round().clamp(-(2**15), 2**15 - 1).to(torch.int16)


def read_recording(path: Path, rate: int) -> Tensor:
    """Read a recording in full and resample it to ``rate``; channels are averaged.

    Args:
        path: A WAV file of any sample format.
        rate: Target sampling rate, in Hz.

    Returns:
        float32 in [-1, 1], ``[samples]``.

    Raises:
        ValueError: If the file is damaged, truncated or empty.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Reached EOF prematurely", wavfile.WavFileWarning)
            found, data = wavfile.read(path)
    except Exception as error:  # scipy raises errors of many types for damaged files
        raise ValueError(f"{path} is not a readable WAV file: {error}") from error
    if not data.size or not np.isfinite(data).all():
        raise ValueError(f"{path} has no samples, or non-finite samples")
    kind, bits = data.dtype.kind, 8 * data.dtype.itemsize
    # Integers are signed, except for those of 8 bits, which are centered at 128.
    scaled = data if kind == "f" else data / 2.0 ** (bits - 1) - (kind == "u")
    wave = torch.from_numpy(scaled.astype(np.float32))
    wave = wave.mean(1) if wave.ndim == 2 else wave
    if found != rate:
        # An approximate ratio: the size of the filter grows with numerator and denominator.
        ratio = Fraction(found, rate).limit_denominator(1000)
        functional = imported("torchaudio.functional", "read_recording", "audio")
        wave = functional.resample(wave, ratio.numerator, ratio.denominator)
    return wave


class LogMel(nn.Module):
    r"""Compute log-mel spectrograms of a batch, :math:`\log(10^{-6} + \mathrm{mel}(x))`.

    Each spectrogram is scaled to mean 0 and standard deviation 1.

    Args:
        rate: Sampling rate of the clips, in Hz.
        samples: Number of samples per clip.
        size: Number of mel bands and of time frames; a spectrogram is ``[1, size, size]``.

    Example:
        >>> LogMel(8000, 8000)(torch.zeros(2, 8000, dtype=torch.int16)).shape
        torch.Size([2, 1, 32, 32])
    """

    def __init__(self, rate: int, samples: int, size: int = 32) -> None:
        super().__init__()
        check_integer("rate", rate, min=1)
        self.size = check_integer("size", size, min=2)
        hint = "increase seconds, or decrease image_size"
        hop = check_integer("samples", samples, min=max(2, size), hint=hint) // size
        # The window is twice the hop, rounded up to a power of two: at 16 kHz 64 ms every 31 ms.
        transforms = imported("torchaudio.transforms", "LogMel", "audio")
        self.mel = transforms.MelSpectrogram(
            rate, n_fft=1 << (2 * hop - 1).bit_length(), hop_length=hop, n_mels=size, power=2.0
        )

    def forward(self, clips: Tensor) -> Tensor:
        """Return spectrograms ``[n, 1, size, size]`` of int16 or float clips ``[n, samples]``."""
        dtype = self.mel.mel_scale.fb.dtype
        wave = clips.to(dtype) / 2**15 if clips.dtype == torch.int16 else clips.to(dtype)
        x = (self.mel(wave)[..., : self.size] + 1e-6).log()
        flat = x.flatten(1)
        mean, std = flat.mean(1), flat.std(1, correction=0)
        found: Tensor = ((x - mean[:, None, None]) / (std[:, None, None] + 1e-5))[:, None]
        return found


class Augment:
    """Augment clips and their spectrograms, independently for each sample and local step.

    Noise is a random section of the background recordings of the data set, if it has some
    (``_background_noise_`` of Speech Commands), else white noise.

    Args:
        time_shift: Maximum shift in both directions, as a fraction of the clip; the gap is filled
            with silence.
        noise: Maximum standard deviation of the noise, as a fraction of full scale.
        mask: Maximum width of one frequency mask, in mel bands, and of one time mask, in frames
            (SpecAugment). Masked values are 0. 0 disables masking.

    Raises:
        FederationError: If a value is out of range.
    """

    #: Number of random numbers per sample.
    draws: ClassVar[int] = 7

    def __init__(self, time_shift: float = 0.1, noise: float = 0.005, mask: int = 4) -> None:
        self.time_shift = check_number("time_shift", time_shift, min=0, max=1)
        self.noise = check_number("noise", noise, min=0, max=1)
        self.mask = check_integer("mask", mask, min=0)

    @property
    def changes_clips(self) -> bool:
        """Whether clips are changed before their spectrograms are computed."""
        return self.time_shift > 0 or self.noise > 0

    def clips(self, clips: Tensor, uniform: Tensor, background: Tensor) -> Tensor:
        """Shift clips in time and add noise.

        Args:
            clips: int16 or float, ``[n, samples]``.
            uniform: Uniform random numbers of each clip, ``[n, 7]``.
            background: Recordings with standard deviation 1, at least as long as a clip, ``[t]``.

        Returns:
            Clips from -1 to 1 before noise, ``[n, samples]``.
        """
        wave = clips.float() / 2**15 if clips.dtype == torch.int16 else clips
        samples = wave.shape[1]
        if most := int(self.time_shift * samples):
            wave = shift(wave, choices(uniform[:, 0], 2 * most + 1) - most)
        if self.noise:
            start = choices(uniform[:, 1], len(background) - samples + 1)
            section = background[start[:, None] + torch.arange(samples, device=wave.device)]
            wave = wave + self.noise * uniform[:, 2:3] * section
        return wave

    def spectrograms(self, x: Tensor, uniform: Tensor) -> Tensor:
        """Mask one frequency band and one time span of each spectrogram.

        Args:
            x: Spectrograms, ``[n, 1, bands, frames]``.
            uniform: Uniform random numbers of each spectrogram, ``[n, 7]``.
        """
        for dim, at in ((2, 3), (3, 5)):
            width = choices(uniform[:, at], self.mask + 1)
            start = (uniform[:, at + 1] * (x.shape[dim] - width + 1)).long()
            x = mask_span(x, start, width, dim)
        return x


class AudioDataModule(FederatedDataModule, ABC):
    """Keep clips in memory as int16 and compute log-mel spectrograms on the training device.

    Each batch becomes ``[n, 1, 32, 32]`` after its transfer to the device. Requires torchaudio:
    ``pip install "lightning_fl[audio]"``.

    Args:
        root: Folder of data sets. None means the folder in the environment variable
            ``LIGHTNING_FL_DATA``, or ``data`` if it is not set.
        seconds: Length of a clip; shorter clips are padded, longer clips are cropped.
        image_size: Number of mel bands and of time frames.
        cache_features: Compute all spectrograms once, at the start, and keep them instead of the
            clips.
        augment: Augmentation of the training clips on the device; true means ``Augment()``.
        batch_size: Samples per local step; None means all samples of a client.
        options: Options of :class:`FederatedDataModule`, such as ``partition``; ``Natural`` makes
            each speaker a client.

    Raises:
        FederationError: If the files are missing, one is damaged, or an option is out of range.
    """

    #: Sampling rate of all clips after resampling, in Hz.
    rate: ClassVar[int] = 16_000
    num_classes: ClassVar[int] = 10
    #: How to obtain the files, for an error message; by default with ``download=true``.
    remedy: ClassVar[str] = ""

    def __init__(
        self,
        root: str | None = None,
        seconds: float = 1.0,
        image_size: int = 32,
        cache_features: bool = False,
        augment: bool | Augment = False,
        batch_size: int | None = 64,
        **options: Any,
    ) -> None:
        super().__init__(train=None, val=None, test=None, batch_size=batch_size, **options)
        check_number("seconds", seconds, above=0, below=3600)
        check_integer("image_size", image_size, min=2)
        self.cache_features = check_flag("cache_features", cache_features)
        if isinstance(augment, Augment):
            self.augment: Augment | None = augment
        else:
            self.augment = Augment() if check_flag("augment", augment) else None
        if self.cache_features and self.augment is not None and self.augment.changes_clips:
            raise FederationError(
                "cache_features=true stores spectrograms, so augment cannot change the clips:"
                " set time_shift and noise of augment to 0, or cache_features to false"
            )
        self.root = data_root(root)
        self.draws = 0 if self.augment is None else Augment.draws
        self._background: Tensor | None = None
        self.samples = max(1, round(seconds * self.rate))
        self.features = LogMel(self.rate, self.samples, image_size)

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Folder of the clips."""

    @abstractmethod
    def clips(self, part: Literal["train", "val", "test"]) -> list[Clip] | None:
        """Return the clips of a part; None or no clips if the data set has no such part."""

    def background_files(self) -> list[Path]:
        """Return recordings of background noise, of any length; none by default."""
        return []

    def load(self, train: bool) -> InMemory | None:
        """Read clips and labels into memory, for training with those for validation."""
        if not train:
            return self._read("test")
        self.val = self._read("val")
        return self._read("train")

    def _read(self, part: Literal["train", "val", "test"]) -> InMemory | None:
        if not self.folder.is_dir():
            raise not_found(self, str(self.folder), self.remedy)
        clips = self.clips(part)
        if not clips:
            return None
        with error_context(f"{type(self).__name__} in {self.folder}", ValueError):
            x = torch.stack([read_wav(clip.path, self.rate, self.samples) for clip in clips])
        if self.cache_features:
            x = torch.cat([self.features(chunk) for chunk in x.split(CHUNK)])
        data = InMemory(x, torch.tensor([clip.label for clip in clips]))
        data.keys = [clip.speaker for clip in clips]  # for Natural
        return data

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Convert clips to spectrograms on the device of the batch, and augment training clips."""
        x, *rest = batch
        uniform = rest.pop().uniform() if rest and isinstance(rest[-1], Draws) else None
        if not self.cache_features:
            if self.augment is not None and uniform is not None:
                x = self.augment.clips(x, uniform, self._background_on(x.device))
            if self.features.mel.mel_scale.fb.device != x.device:
                self.features.to(x.device)
            x = self.features(x)
        if self.augment is not None and uniform is not None:
            x = self.augment.spectrograms(x, uniform)
        return x.to(module_dtype(self.trainer)), *rest

    def _background_on(self, device: torch.device) -> Tensor:
        """Return the recordings that are added to clips on a device, with standard deviation 1."""
        if self._background is None or self._background.device != device:
            sounds = [read_recording(path, self.rate) for path in self.background_files()]
            if not sounds:
                count = max(60 * self.rate, 2 * self.samples)
                sounds = [torch.randn(count, generator=generator(0, RandomStream.AUGMENTATION))]
            sound = torch.cat(sounds).repeat(-(-self.samples // sum(map(len, sounds))))
            self._background = (sound / sound.std().clamp(min=1e-6)).to(device)
        return self._background
