"""Generated texts about topics, which need no download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.storage import InMemory
from lightning_fl.functional.randomness import generator
from lightning_fl.options import check_integer, check_number


class TopicText(FederatedDataModule):
    r"""Generated texts, each about one of several topics; the topic is the class.

    A text is a sequence of tokens, ``[length]``, padded with zeros behind its last token. Tokens
    are drawn independently: with probability ``clarity`` from the words of the topic, else from all
    words. Both have frequencies :math:`\propto 1 / \text{rank}` (Zipf's law), and each topic ranks
    a tenth of the words in an order of its own. The number of tokens is uniform between a quarter
    of ``length`` and ``length``.

    Args:
        num_classes: Number of topics.
        vocabulary: Number of tokens, including 0 for padding.
        length: Maximum number of tokens of a text.
        train_size: Number of training samples, from which validation samples are held out.
        test_size: Number of test samples.
        clarity: Probability of a word of the topic, in (0, 1].
        text_seed: Seed of the words of topics and of all texts, independent of the run's seed.
        options: Options of :class:`FederatedDataModule`, such as ``partition``, ``num_clients`` and
            ``batch_size``.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> data = TopicText(num_clients=5, train_size=200, length=12)
        >>> data.setup("fit")
        >>> tokens, topic = data.train[0]
        >>> tokens.shape, data.num_samples.sum()
        (torch.Size([12]), tensor(180))
    """

    def __init__(
        self,
        num_classes: int = 10,
        vocabulary: int = 1000,
        length: int = 32,
        train_size: int = 5000,
        test_size: int = 1000,
        clarity: float = 0.3,
        text_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(train=None, test=None, **options)
        self.num_classes = check_integer("num_classes", num_classes, min=2)
        self.vocabulary = check_integer("vocabulary", vocabulary, min=21)
        self.length = check_integer("length", length, min=4)
        self.train_size = check_integer("train_size", train_size, min=1)
        self.test_size = check_integer("test_size", test_size, min=1)
        self.clarity = check_number("clarity", clarity, above=0, max=1)
        self.text_seed = check_integer("text_seed", text_seed, min=0)

    def load(self, train: bool) -> InMemory:
        """Return the training or the test samples."""
        words = self.vocabulary - 1
        of_topics = generator(self.text_seed, 0)
        count = words // 10
        ranked = torch.stack(
            [torch.randperm(words, generator=of_topics)[:count] for _ in range(self.num_classes)]
        )
        size = self.train_size if train else self.test_size
        draws = generator(self.text_seed, 1 if train else 2)
        topics = torch.randint(self.num_classes, (size,), generator=draws)
        shape = (size, self.length)
        common = _zipf(words, shape, draws)
        own = ranked[topics[:, None], _zipf(count, shape, draws)]
        is_own = torch.rand(shape, generator=draws) < self.clarity
        lengths = torch.randint(-(-self.length // 4), self.length + 1, (size, 1), generator=draws)
        is_token = torch.arange(self.length) < lengths
        return InMemory((torch.where(is_own, own, common) + 1) * is_token, topics)

    @property
    def checksum(self) -> str:
        """Checksum of the split and of the options of the texts."""
        texts = [self.num_classes, self.vocabulary, self.length, self.clarity, self.text_seed]
        return f"{super().checksum}-{texts}"


def _zipf(count: int, shape: tuple[int, int], draws: torch.Generator) -> Tensor:
    """Draw ranks from 0 with probabilities proportional to ``1 / (rank + 1)``."""
    cumulative = (1 / torch.arange(1, count + 1, dtype=torch.float64)).cumsum(0)
    uniform = torch.rand(shape, generator=draws, dtype=torch.float64)
    return torch.searchsorted(cumulative / cumulative[-1], uniform).clamp(max=count - 1)
