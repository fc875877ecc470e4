"""Free Spoken Digit Dataset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal

from lightning_fl.datamodules.audio import AudioDataModule, Clip
from lightning_fl.errors import FederationError

NAME = re.compile(r"(?P<digit>[0-9])_(?P<speaker>.+)_(?P<index>[0-9]+)\.wav")


class SpokenDigits(AudioDataModule):
    """Free Spoken Digit Dataset: six speakers, digits 0 to 9, 8 kHz, ``[1, 32, 32]`` spectrograms.

    The test set is the official one, clips 0 to 4 of each speaker and digit. ``Natural`` makes each
    speaker a client.
    """

    rate: ClassVar[int] = 8_000
    remedy = "clone https://github.com/Jakobovski/free-spoken-digit-dataset into root"

    @property
    def folder(self) -> Path:
        """Folder of the recordings."""
        return Path(self.root, "free-spoken-digit-dataset", "recordings")

    def clips(self, part: Literal["train", "val", "test"]) -> list[Clip] | None:
        """Return the clips of a part, ``<digit>_<speaker>_<index>.wav``."""
        if part == "val":
            return None
        found = []
        for path in sorted(self.folder.glob("*.wav")):
            if (name := NAME.fullmatch(path.name)) is None:
                raise FederationError(
                    f"{path} is not a clip of this data set: file names must be"
                    " <digit>_<speaker>_<index>.wav, such as 7_theo_3.wav"
                )
            if (int(name["index"]) < 5) == (part == "test"):
                found.append(Clip(path, int(name["digit"]), name["speaker"]))
        return found
