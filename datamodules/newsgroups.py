"""20 Newsgroups, posts about twenty topics (Lang, 1995)."""

from __future__ import annotations

from typing import Any

import torch

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.inputs import Words
from lightning_fl.datamodules.storage import InMemory, not_found
from lightning_fl.extras import imported
from lightning_fl.files import data_root
from lightning_fl.options import check_flag


def _datasets() -> Any:
    return imported("sklearn.datasets", "Newsgroups", "sklearn")


class Newsgroups(FederatedDataModule):
    """The posts of 20 Newsgroups as indices of words, ``[length]``; the newsgroup is the class.

    scikit-learn downloads the version that is sorted by date, without headers, footers and quotes:
    11,314 posts for training and 7,532 for test. Requires scikit-learn: ``pip install
    "lightning_fl[sklearn]"``.

    Args:
        root: Folder of data sets. None means the folder in the environment variable
            ``LIGHTNING_FL_DATA``, or ``data`` if it is not set.
        download: Download the files into ``root`` if they are missing.
        length: Number of words of a post; see :class:`Words`.
        vocabulary: Number of indices of words; see :class:`Words`.
        options: Options of :class:`FederatedDataModule`.

    Raises:
        FederationError: If the files are missing and ``download`` is off, or an option is out of
            range.
    """

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        length: int = 64,
        vocabulary: int = 10_000,
        **options: Any,
    ) -> None:
        super().__init__(train=None, test=None, **options)
        self.root, self.download = data_root(root), check_flag("download", download)
        self.words = Words(length, vocabulary)

    def prepare_data(self) -> None:
        """Download the files if ``download`` is set."""
        if self.download:
            _datasets().fetch_20newsgroups(data_home=self.root)

    def load(self, train: bool) -> InMemory:
        """Return the training or the test samples."""
        try:
            posts = _datasets().fetch_20newsgroups(
                data_home=self.root,
                subset="train" if train else "test",
                remove=("headers", "footers", "quotes"),
                shuffle=False,
                download_if_missing=False,
            )
        except OSError as error:
            raise not_found(self, f"root={self.root!r}") from error
        return InMemory(torch.stack(list(map(self.words, posts.data))), torch.tensor(posts.target))
