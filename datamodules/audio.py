"""What data sets of spoken words have in common: clips in memory, features on the device."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from scipy.io import wavfile
from torch import Tensor, nn
from torchaudio.functional import resample
from torchaudio.transforms import FrequencyMasking, MelSpectrogram, TimeMasking

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.storage import InMemory
from lightning_fl.files import data_root
from lightning_fl.partition import Partition
from lightning_fl.types import FederationError

#: Clips whose features are computed at once, where all are wanted.
CHUNK = 500
#: Samples a second that a file may have.
RATES = (1_000, 768_000)


class Clip(NamedTuple):
    """A file, what is said in it, and who says it."""

    path: Path
    label: int
    speaker: str


class Clips(InMemory):
    """Clips and their labels in memory, and who speaks: the keys of ``Natural``."""

    def __init__(self, clips: Tensor, labels: Tensor, keys: list[str]) -> None:
        super().__init__(clips, labels)
        self.keys = keys


def read_wav(path: Path, rate: int, samples: int) -> Tensor:
    """Read a clip as ``samples`` numbers at ``rate`` a second: resampled, padded or cropped.

    What is short has silence after it; of what is long the middle is kept. Channels are averaged.

    Args:
        path: A WAV file of any sample format.
        rate: Wanted, in Hz.
        samples: Wanted number.

    Returns:
        int16, ``[samples]``.

    Raises:
        ValueError: If the file is damaged, cut short or empty.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Reached EOF prematurely", wavfile.WavFileWarning)
            found, data = wavfile.read(path)
    except Exception as error:  # scipy raises what the bytes lead to
        raise ValueError(f"{path} is not a WAV file that can be read: {error}") from error
    if not data.size:
        raise ValueError(f"{path} has no samples")
    wave = _floating(data)
    if not wave.isfinite().all():
        raise ValueError(f"{path} has samples that are not finite")
    wave = wave.mean(1) if wave.ndim == 2 else wave
    if not RATES[0] <= found <= RATES[1]:
        raise ValueError(f"{path} has {found} samples a second, not {RATES[0]} to {RATES[1]}")
    if found != rate:
        # Close is enough: the filter is as large as the product of the two.
        ratio = Fraction(found, rate).limit_denominator(1000)
        wave = resample(wave, ratio.numerator, ratio.denominator)
    if len(wave) >= samples:
        start = (len(wave) - samples) // 2
        wave = wave[start : start + samples]
    else:
        wave = torch.cat([wave, wave.new_zeros(samples - len(wave))])
    return (wave * 2**15).round().clamp(-(2**15), 2**15 - 1).to(torch.int16)


def _floating(data: np.ndarray) -> Tensor:
    """Samples from -1 to 1, whatever their format."""
    if data.dtype == np.uint8:
        return torch.from_numpy(data.astype(np.float32) / 2**7 - 1)
    if np.issubdtype(data.dtype, np.integer):
        return torch.from_numpy((data / 2.0 ** (8 * data.dtype.itemsize - 1)).astype(np.float32))
    return torch.from_numpy(data.astype(np.float32))


class LogMel(nn.Module):
    r"""Log-mel spectrograms of whole batches, :math:`\log(10^{-6} + \mathrm{mel}(x))`.

    Args:
        rate: Of the clips, in Hz.
        samples: Of a clip.
        size: Mel bands, and frames in time: an image is ``[1, size, size]``.
        normalize: ``clip`` gives each clip mean 0 and standard deviation 1; ``none`` leaves it.

    Example:
        >>> LogMel(8000, 8000)(torch.zeros(2, 8000, dtype=torch.int16)).shape
        torch.Size([2, 1, 32, 32])
    """

    def __init__(
        self, rate: int, samples: int, size: int = 32, normalize: Literal["clip", "none"] = "clip"
    ) -> None:
        super().__init__()
        hop = max(1, samples // size)
        self.size, self.normalize = size, normalize
        # Windows of twice the hop, a power of two: at 16 kHz 64 ms every 31 ms.
        self.mel = MelSpectrogram(
            rate, n_fft=1 << (2 * hop - 1).bit_length(), hop_length=hop, n_mels=size, power=2.0
        )

    def forward(self, clips: Tensor) -> Tensor:
        """Return ``[n, 1, size, size]`` for int16 or floating clips, ``[n, samples]``."""
        dtype = self.mel.mel_scale.fb.dtype
        wave = clips.to(dtype) / 2**15 if clips.dtype == torch.int16 else clips.to(dtype)
        x = (self.mel(wave)[..., : self.size] + 1e-6).log()
        if self.normalize == "clip":
            flat = x.flatten(1)
            mean, std = flat.mean(1), flat.std(1, correction=0)
            x = (x - mean[:, None, None]) / (std[:, None, None] + 1e-5)
        found: Tensor = x[:, None]
        return found


class Augment(nn.Module):
    """Random changes of clips and of their spectrograms, each sample its own.

    Args:
        time_shift: Largest shift either way, as a share of the clip; silence moves in.
        noise: Largest standard deviation of white noise, as a share of full scale.
        mask: Largest width of one band of frequencies, and one of time, that are set to 0
            (SpecAugment), in bands and frames; 0 for none.
    """

    def __init__(self, time_shift: float = 0.1, noise: float = 0.005, mask: int = 4) -> None:
        super().__init__()
        for name, value, most in (("time_shift", time_shift, 1.0), ("noise", noise, 1.0)):
            if not 0 <= value <= most:
                raise FederationError(f"{name} must be from 0 to {most:g}, got {value}")
        if mask < 0:
            raise FederationError(f"mask must be at least 0, got {mask}")
        self.time_shift, self.noise, self.mask = time_shift, noise, mask
        self.masks = nn.Sequential(
            FrequencyMasking(mask, iid_masks=True), TimeMasking(mask, iid_masks=True)
        )

    def clips(self, clips: Tensor) -> Tensor:
        """Shift clips, ``[n, samples]``, and add noise; returns floating numbers from -1 to 1."""
        wave = clips.float() / 2**15 if clips.dtype == torch.int16 else clips
        n, samples = wave.shape
        if most := int(self.time_shift * samples):
            shift = torch.randint(-most, most + 1, (n, 1), device=wave.device)
            at = torch.arange(samples, device=wave.device) - shift
            inside = (at >= 0) & (at < samples)
            wave = wave.gather(1, at.clamp(0, samples - 1)) * inside
        if self.noise:
            strength = self.noise * torch.rand(n, 1, device=wave.device)
            wave = wave + strength * torch.randn_like(wave)
        return wave

    def spectrograms(self, x: Tensor) -> Tensor:
        """Mask a band of frequencies and a stretch of time of each, ``[n, 1, bands, frames]``."""
        masked: Tensor = self.masks(x) if self.mask else x
        return masked


class AudioDataModule(FederatedDataModule, ABC):
    """Spoken words in memory as int16; log-mel spectrograms are computed on the training device.

    Whole batches become ``[n, 1, 32, 32]`` after they were moved to the device.

    Args:
        root: Folder of data sets. None is the folder that the environment variable
            ``LIGHTNING_FL_DATA`` names, or ``data`` if it is not set.
        seconds: Length of a clip; shorter ones are padded, longer ones cropped.
        image_size: Mel bands and frames.
        normalize: ``clip`` gives each spectrogram mean 0 and standard deviation 1, ``none`` leaves
            it as it is.
        cache_features: Compute all spectrograms once, at the start, and keep them instead of clips.
        augment: Random changes in training; None for none.
        skip_damaged: Leave out files that cannot be read, with a warning, instead of ending.
        partition: Rule that splits the training samples over clients; ``Natural`` makes speakers
            clients; None is ``IID``.
        num_clients: Number of clients; None, where the rule knows it.
        batch_size: Samples a local step; None is a client's whole data.
        options: Those of :class:`FederatedDataModule`.

    Raises:
        FederationError: If the files are not there, one is damaged, or an option is out of range.
    """

    #: Samples a second that clips are brought to.
    rate: ClassVar[int] = 16_000
    num_classes: ClassVar[int] = 10
    #: How to come by the files.
    remedy: ClassVar[str]

    def __init__(
        self,
        root: str | None = None,
        seconds: float = 1.0,
        image_size: int = 32,
        normalize: Literal["clip", "none"] = "clip",
        cache_features: bool = False,
        augment: Augment | None = None,
        skip_damaged: bool = False,
        partition: Partition | None = None,
        num_clients: int | None = 10,
        batch_size: int | None = 64,
        **options: Any,
    ) -> None:
        super().__init__(
            partition=partition, num_clients=num_clients, batch_size=batch_size, **options
        )
        if not 0 < seconds < 3600:
            raise FederationError(f"seconds must be positive, got {seconds}")
        if image_size < 1:
            raise FederationError(f"image_size must be at least 1, got {image_size}")
        if normalize not in ("clip", "none"):
            raise FederationError(f"normalize must be clip or none, got {normalize!r}")
        if cache_features and augment is not None and (augment.time_shift or augment.noise):
            raise FederationError(
                "cache_features keeps spectrograms, and augment changes clips (time_shift, noise):"
                " set both to 0, or cache_features to false"
            )
        self.root, self.skip_damaged = data_root(root), skip_damaged
        self.cache_features, self.augment = cache_features, augment
        self.samples = max(1, round(seconds * self.rate))
        self.features = LogMel(self.rate, self.samples, image_size, normalize)

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Where the clips are."""

    @abstractmethod
    def clips(self, part: Literal["train", "val", "test"]) -> list[Clip] | None:
        """Return the clips of a part; None, where there is no such part."""

    def setup(self, stage: str | None = None) -> None:
        """Read the clips, those of the server's validation too, where the data set has some."""
        if self.val is None and stage in {"fit", "validate", None}:
            self.val = self._read("val")
        super().setup(stage)

    def load(self, train: bool) -> Clips | None:
        """Read clips and labels into memory."""
        return self._read("train" if train else "test")

    def _read(self, part: Literal["train", "val", "test"]) -> Clips | None:
        if not self.folder.is_dir():
            raise FederationError(
                f"{type(self).__name__} is not under {self.folder}: set root to the folder that"
                f" holds it, or {self.remedy}"
            )
        clips = self.clips(part)
        if clips is None:
            return None
        waves, kept, damaged = [], list[Clip](), list[str]()
        for clip in clips:
            try:
                waves.append(read_wav(clip.path, self.rate, self.samples))
                kept.append(clip)
            except ValueError as error:
                damaged.append(str(error))
        if damaged and not self.skip_damaged:
            raise FederationError(
                f"{len(damaged)} of {len(clips)} clips are damaged: {damaged[0]}. Fetch them again,"
                " or leave them out with skip_damaged=true (data.init_args.skip_damaged)"
            )
        if not kept:
            raise FederationError(f"{type(self).__name__} has no {part} clips under {self.root!r}")
        if damaged:
            rank_zero_warn(
                f"{len(damaged)} clips are damaged and left out: {', '.join(damaged[:3])}"
            )
        x = torch.stack(waves)
        if self.cache_features:
            x = torch.cat([self.features(chunk) for chunk in x.split(CHUNK)])
        return Clips(x, torch.tensor([clip.label for clip in kept]), [c.speaker for c in kept])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Turn clips into spectrograms, on the device where they are."""
        x, *rest = batch
        trainer = self.trainer
        augment = self.augment if trainer is not None and trainer.training else None
        if not self.cache_features:
            if augment is not None:
                x = augment.clips(x)
            if self.features.mel.mel_scale.fb.device != x.device:
                self.features.to(x.device)
            x = self.features(x)
        if augment is not None:
            x = augment.spectrograms(x)
        return x.to(self.module_dtype), *rest
