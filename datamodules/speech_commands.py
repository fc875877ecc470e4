"""Speech Commands, one-second clips of single words (Warden, 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_fl.datamodules.audio import AudioDataModule, Clip
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.files import error_context
from lightning_fl.options import check_flag, check_that

#: Words of the ten-keyword task.
KEYWORDS = ("down", "go", "left", "no", "off", "on", "right", "stop", "up", "yes")
VERSION = "speech_commands_v0.02"
#: Files with the clips of a part. Other clips are training data.
LISTS = {"test": "testing_list.txt", "val": "validation_list.txt"}


class SpeechCommands(AudioDataModule):
    """Ten keywords of Speech Commands v0.02, ``[1, 32, 32]`` log-mel spectrograms.

    The validation and test clips are listed in files of the data set; all other clips are training
    data. Each speaker is in one part only. ``Natural`` makes each training speaker a client.

    Args:
        download: Download the files into ``root`` if they are missing.
        keywords: Words in the order of their labels.
        options: Options of :class:`AudioDataModule`.

    Raises:
        FederationError: If the files are missing and ``download`` is off, or a keyword has no
            files.
    """

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        keywords: Sequence[str] = KEYWORDS,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        are_distinct = len(set(keywords)) == len(keywords) > 0
        check_that("keywords", keywords, are_distinct, "distinct words")
        self.download, self.keywords = check_flag("download", download), list(keywords)

    @property
    def folder(self) -> Path:
        """Folder in which torchaudio stores the clips, one folder per word."""
        return Path(self.root, "SpeechCommands", VERSION)

    def background_files(self) -> list[Path]:
        """Return the recordings of background noise that are part of the data set."""
        return sorted(Path(self.folder, "_background_noise_").glob("*.wav"))

    def prepare_data(self) -> None:
        """Download the files if ``download`` is set."""
        if self.download and not self.folder.is_dir():
            Path(self.root).mkdir(parents=True, exist_ok=True)
            datasets = imported("torchaudio.datasets", "SpeechCommands", "audio")
            datasets.SPEECHCOMMANDS(self.root, VERSION, download=True)

    def clips(self, part: Literal["train", "val", "test"]) -> list[Clip] | None:
        """Return the clips of a part, according to the lists of the data set."""
        listed: dict[str, str] = {}
        with error_context(f"{type(self).__name__} is incomplete, download it again", OSError):
            for name, file in LISTS.items():
                listed |= dict.fromkeys(Path(self.folder, file).read_text().split(), name)
        if part == "val" and part not in listed.values():
            return None  # the samples for validation are held out
        found = []
        for label, word in enumerate(self.keywords):
            paths = sorted(Path(self.folder, word).glob("*.wav"))
            if not paths:
                raise FederationError(f"there are no clips of {word!r} in {self.folder}")
            for path in paths:
                if listed.get(f"{word}/{path.name}", "train") == part:
                    found.append(Clip(path, label, path.name.partition("_nohash_")[0]))
        return found
