"""Rules that split a data set over clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import check_flag, check_integer, check_number
from lightning_fl.partition.base import Partition, classes_of

#: Hint of an error about the concentration of a Dirichlet distribution.
CONCENTRATION = (
    "small values, such as 0.1, give skewed clients, large values, such as 100, similar clients;"
    " for equal clients use IID"
)

#: Number of classes of real-valued targets.
BINS = 10


class IID(Partition):
    r"""Assign the samples at random, in equal numbers.

    By default the classes are ignored (McMahan et al., 2017, section 3), so the class counts of
    clients vary at random. With ``stratified=True`` each class is shuffled and divided separately
    (Yurochkin et al., 2019, supplement 4, "homogeneous"; Ben Mansour et al., 2022), so that all
    clients have the same class distribution: for a class with :math:`n` samples and :math:`K`
    clients, each client holds :math:`\lfloor n / K \rfloor` or :math:`\lceil n / K \rceil` samples.
    Classes with fewer samples than clients are missing from some clients. In both cases the sizes
    of clients differ by at most one.

    Args:
        stratified: Whether to divide each class separately. This requires the class of each sample.

    Raises:
        FederationError: If ``stratified`` is not a boolean.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        >>> parts = IID(stratified=True)(labels, 2, torch.Generator().manual_seed(0))
        >>> [labels[part].tolist() for part in parts]
        [[0, 0, 1, 1], [0, 0, 1, 1]]
    """

    def __init__(self, stratified: bool = False) -> None:
        self.stratified = check_flag("stratified", stratified)
        self.splits_by = "labels" if self.stratified else "samples"

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        if not self.stratified:
            return list(torch.randperm(len(labels), generator=generator).tensor_split(num_clients))
        order, _ = _by_class(labels, generator)
        # Each class continues at the client after the last one of the previous class, so that the
        # sizes of clients are equal, too.
        return [order[client::num_clients] for client in range(num_clients)]


class ByLabel(Partition):
    r"""Give each client `n` classes: client `i` holds classes :math:`(i n + j) \bmod C, j < n`.

    Classes are ordered by label; labels may be any integers. Each class is divided as equally as
    possible among its clients. One class per client is the extreme case of label skew.

    Args:
        classes_per_client: Number of classes per client, `n`.

    Raises:
        FederationError: If `n` exceeds the number of classes, or a class would have no client.

    Example:
        >>> labels = torch.tensor([7, 9, 7, 9, 8, 8])
        >>> ByLabel(classes_per_client=1)(labels, 3, torch.Generator())
        [tensor([0, 2]), tensor([4, 5]), tensor([1, 3])]
    """

    def __init__(self, classes_per_client: int = 1) -> None:
        self.classes_per_client = check_integer("classes_per_client", classes_per_client, min=1)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        order, sizes = _by_class(labels, generator)
        n, num_classes = self.classes_per_client, len(sizes)
        least, hint = -(-num_classes // num_clients), f"each of {num_classes} classes has a client"
        check_integer("classes_per_client", n, min=least, max=num_classes, hint=hint)
        # Client i has the places i n, ..., i n + n - 1. The samples of a class go round its places.
        held = self._classes(num_clients, num_classes, generator)
        owners, places = held.bincount(minlength=num_classes), held.argsort(stable=True)
        rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        first = (owners.cumsum(0) - owners).repeat_interleave(sizes)
        owner = places[first + rank % owners.repeat_interleave(sizes)] // n
        return _group(order, owner, num_clients)

    def _classes(self, num_clients: int, num_classes: int, generator: torch.Generator) -> Tensor:
        """Return the classes of client 0, then of client 1, and so on, ``[num_clients n]``."""
        return torch.arange(num_clients * self.classes_per_client) % num_classes


class ByRandomLabel(ByLabel):
    r"""Give client `i` the class :math:`i \bmod C` and :math:`n - 1` other classes at random.

    This is the split "#C = n" of NIID-Bench (Li et al., 2022, section 4.1), and Flower's
    ``PathologicalPartitioner`` with the mode ``first-deterministic``. Each class is divided as
    equally as possible among its clients.

    Args:
        classes_per_client: Number of classes per client, `n`.

    Raises:
        FederationError: If `n` exceeds the number of classes, or there are fewer clients than
            classes.

    Example:
        >>> labels = torch.arange(4).repeat(6)
        >>> parts = ByRandomLabel(2)(labels, 4, torch.Generator().manual_seed(0))
        >>> [labels[part].unique().tolist() for part in parts]
        [[0, 1], [0, 1], [2, 3], [0, 3]]
    """

    def __init__(self, classes_per_client: int = 2) -> None:
        super().__init__(classes_per_client)

    def _classes(self, num_clients: int, num_classes: int, generator: torch.Generator) -> Tensor:
        """See `ByLabel`."""
        hint = f"each of {num_classes} classes has a client"
        check_integer("num_clients", num_clients, min=num_classes, hint=hint)
        keys = torch.rand(num_clients, num_classes, generator=generator)
        client = torch.arange(num_clients)
        keys[client, client % num_classes] = -1
        return keys.argsort(1)[:, : self.classes_per_client].flatten()


class Shards(Partition):
    """Sort by label and assign equal shards at random (McMahan et al., 2017, section 3).

    With two shards per client "most clients will only have examples of two digits". The order of
    samples within a class is random.

    Args:
        shards_per_client: Number of shards per client.

    Raises:
        FederationError: If there are more shards than samples.

    Example:
        >>> labels = torch.arange(10).repeat(6)
        >>> parts = Shards()(labels, 5, torch.Generator().manual_seed(0))
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(self, shards_per_client: int = 2) -> None:
        self.shards_per_client = check_integer("shards_per_client", shards_per_client, min=1)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        num_shards = num_clients * self.shards_per_client
        most, hint = (
            len(labels) // num_clients,
            f"{num_clients} clients share {len(labels)} samples",
        )
        check_integer("shards_per_client", self.shards_per_client, min=1, max=most, hint=hint)
        order, _ = _by_class(labels, generator)
        shards = order.tensor_split(num_shards)
        deal = torch.randperm(num_shards, generator=generator).view(num_clients, -1)
        return [torch.cat([shards[i] for i in hand]) for hand in deal.tolist()]


class Dirichlet(Partition):
    r"""Divide each class over the clients in proportions :math:`p_c \sim \mathrm{Dir}_K(\alpha)`.

    This is the split of Yurochkin et al. (2019), without their retries. Hsu et al. (2019) draw the
    class proportions of each client instead. A small `alpha` gives clients with few classes and
    very different sizes; a large `alpha` gives nearly equal clients. The proportions are drawn
    once. Clients with fewer than `min_size` samples receive random samples of the currently largest
    client.

    Args:
        alpha: Concentration, greater than 0.
        min_size: Minimum number of samples per client.
        balanced: Whether a client that holds :math:`N / K` samples gets none of the classes after
            them, as in the programs of Yurochkin et al., NIID-Bench and PFLlib, and in Flower's
            ``DirichletPartitioner``. The sizes of clients are then less skewed.

    Raises:
        FederationError: If there are too few samples for `min_size`.

    Example:
        >>> labels = torch.arange(10).repeat(100)
        >>> rule = Dirichlet(alpha=0.01, min_size=20)
        >>> sizes = [len(part) for part in rule(labels, 30, torch.Generator().manual_seed(0))]
        >>> sum(sizes), min(sizes)
        (1000, 20)
    """

    def __init__(self, alpha: float = 0.5, min_size: int = 1, balanced: bool = False) -> None:
        self.alpha = check_number("alpha", alpha, above=0, hint=CONCENTRATION)
        self.min_size = check_integer("min_size", min_size, min=1)
        self.balanced = check_flag("balanced", balanced)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        least, n = self.min_size, len(labels)
        hint = f"{num_clients} clients share {n} samples"
        check_integer("min_size", least, min=1, max=n // num_clients, hint=hint)
        order, sizes = _by_class(labels, generator)
        # torch cannot draw gamma variates from a generator.
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
        shape = (len(sizes), num_clients)
        # Gamma(a) = Gamma(a + 1) U^(1/a), computed as logarithms relative to the largest U of the
        # row: for small alpha all plain variates underflow to 0.
        log_u = -rng.standard_exponential(shape)
        with np.errstate(over="ignore"):
            log_u = (log_u - log_u.max(1, keepdims=True)) / self.alpha
        log_gamma = np.log(rng.standard_gamma(self.alpha + 1, shape)) + log_u
        # One random offset per class makes the expected counts exactly p_c n_c, even if n_c < K.
        offsets, held = rng.random(len(sizes)), np.zeros(num_clients, dtype=np.int64)
        counts = np.zeros(shape, dtype=np.int64)
        for row, logs, size, offset in zip(counts, log_gamma, sizes.tolist(), offsets, strict=True):
            if self.balanced:
                logs[held * num_clients >= n] = -np.inf
            shares = np.exp(logs - logs.max()).cumsum()
            cuts = np.minimum(np.floor(shares / shares[-1] * size + offset), size)
            row[:] = np.diff(cuts, prepend=0)
            held += row
        owner = torch.from_numpy(np.tile(np.arange(num_clients), len(sizes)).repeat(counts.ravel()))
        return _top_up(_group(order, owner, num_clients), least, generator)


class QuantitySkew(Dirichlet):
    r"""Give clients IID samples of different sizes :math:`N p, p \sim \mathrm{Dir}_K(\alpha)`.

    Li et al. (2022, "Federated learning on non-IID data silos", section 4.3).

    Args:
        alpha: Concentration, greater than 0; small values give few large clients and a long tail.
        min_size: Minimum number of samples per client.

    Raises:
        FederationError: If there are too few samples for `min_size`.

    Example:
        >>> parts = QuantitySkew(alpha=0.5)(torch.zeros(900), 6, torch.Generator().manual_seed(0))
        >>> len(parts), sum(len(part) for part in parts)
        (6, 900)
    """

    splits_by = "samples"

    def __init__(self, alpha: float = 1.0, min_size: int = 1) -> None:
        super().__init__(alpha, min_size)

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`."""
        # With a single class, the Dirichlet rule varies only the sizes.
        return super().split(torch.zeros(len(labels), dtype=torch.long), num_clients, generator)


class Natural(Partition):
    """Make each key (speaker, writer, device) a client, in ascending order of the keys.

    If there are fewer clients than keys, each key is assigned as a whole, in descending order of
    size, to the client with the fewest samples so far (Graham, 1969). The rule is deterministic.

    Raises:
        FederationError: If there are more clients than keys.

    Example:
        >>> Natural()(torch.tensor([31, 8, 8, 31, 5]), 3, torch.Generator())
        [tensor([4]), tensor([1, 2]), tensor([0, 3])]
    """

    splits_by = "keys"

    def count_clients(self, labels: Tensor) -> int:
        """Return the number of keys."""
        return len(labels.unique())

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """See `Partition.split`. `labels` are the keys."""
        keys, codes, sizes = classes_of(labels)
        hint = "each client needs a key"
        check_integer("num_clients", num_clients, min=1, max=len(keys), hint=hint)
        owner = torch.arange(len(keys))
        if num_clients < len(keys):
            samples = np.zeros(num_clients, dtype=np.int64)
            for key in sizes.argsort(descending=True, stable=True).tolist():
                owner[key] = client = int(samples.argmin())  # the first of the smallest
                samples[client] += int(sizes[key])
        return _group(torch.arange(len(labels)), owner[codes], num_clients)


def target_bins(targets: Tensor) -> Tensor:
    """Return the class of each real number, ``[N]``: its decile, or its value if it has few values.

    A decile is one of ten bins with nearly equal numbers of samples; equal targets share a bin. At
    most ten distinct values are classes themselves.

    Raises:
        FederationError: If a target is not finite.

    Example:
        >>> target_bins(torch.arange(40.0))[[0, 3, 4, 39]]
        tensor([0, 0, 1, 9])
    """
    if not targets.isfinite().all():
        raise FederationError("targets must be finite numbers: remove NaN and infinity")
    values, codes = targets.unique(return_inverse=True)
    edges = torch.from_numpy(np.quantile(targets.double(), np.arange(1, BINS) / BINS))
    return codes if len(values) <= BINS else torch.bucketize(targets.double(), edges, right=True)


def _by_class(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return samples sorted by class and shuffled within each, [N], and the class sizes, [C]."""
    labels = target_bins(labels) if labels.is_floating_point() else labels
    _, codes, sizes = classes_of(labels)
    order = torch.randperm(len(labels), generator=generator)
    return order[codes[order].argsort(stable=True)], sizes


def _group(samples: Tensor, owner: Tensor, num_clients: int) -> list[Tensor]:
    """Return the samples of each client; ``owner[i]`` is the client of ``samples[i]``."""
    sizes = owner.bincount(minlength=num_clients)
    return list(samples[owner.argsort(stable=True)].split(sizes.tolist()))


def _top_up(parts: list[Tensor], min_size: int, generator: torch.Generator) -> list[Tensor]:
    """Move random samples from the currently largest client to clients below `min_size`."""
    short = [client for client, part in enumerate(parts) if len(part) < min_size]
    if not short:
        return parts
    hands = [part[torch.randperm(len(part), generator=generator)].tolist() for part in parts]
    sizes = np.array([len(hand) for hand in hands])
    for client in short:
        while sizes[client] < min_size:
            donor = int(sizes.argmax())  # the first of the largest
            hands[client].append(hands[donor].pop())
            sizes[client] += 1
            sizes[donor] -= 1
    return [torch.tensor(hand) for hand in hands]
