"""Federation of the data of any LightningDataModule."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.loader import Batches, Collate
from lightning_fl.datamodules.splits import labels_of, samples_checksum
from lightning_fl.datamodules.storage import check_absent, check_map_style, in_memory, subset
from lightning_fl.hooks import overrides
from lightning_fl.partition import Partition
from lightning_fl.runners.step_hooks import TRANSFER_HOOKS
from lightning_fl.types import FederationError, check_package

#: Values of options until a loader determines them.
_UNTIL_LOADED = {"batch_size": 1, "eval_batch_size": 1, "drop_last": False}


class FromDataModule(FederatedDataModule):
    """Split the training samples of a LightningDataModule over clients.

    The data module prepares and loads its data, applies its transforms, and keeps its hooks for
    transfers and checkpoints and its hyperparameters. Its loaders only name their data sets, batch
    size, ``drop_last``, ``collate_fn`` and ``worker_init_fn``: this class draws the batches of
    clients. Validation and test use the module's own data sets in order; prediction uses its own
    loader.

    Args:
        datamodule: The data module.
        partition: Rule that splits the training samples over clients; None means
            :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None if the rule determines it.
        batch_size: Samples per local step; None means all samples of a client, ``loader`` the batch
            size of the training loader.
        eval_batch_size: Samples per batch in validation and test; ``loader`` as above, for the
            loaders of validation and test, or the training loader before one of them is read.
        drop_last: Drop the incomplete batch at the end of a pass, unless it is the only one;
            ``loader`` as above.
        collate_fn: Function that makes a batch from samples; None means those of the loaders.
        options: Further options of :class:`FederatedDataModule`, such as ``labels`` and ``keys``.
            ``val_size`` is used if the data module has no validation loader.

    Raises:
        FederationError: If a loader is not a ``DataLoader`` of a map-style data set, or has
            batches or a sampler of its own.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> class Mine(LightningDataModule):
        ...     def train_dataloader(self):
        ...         samples = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
        ...         return DataLoader(samples, batch_size=5, shuffle=True)
        >>> data = FromDataModule(Mine(), num_clients=6, val_size=0)
        >>> data.setup("fit")
        >>> data.num_samples, data.batch_size
        (tensor([10, 10, 10, 10, 10, 10]), 5)
    """

    test_remedy = "return a DataLoader from test_dataloader of the data module"

    def __init__(
        self,
        datamodule: LightningDataModule,
        partition: Partition | None = None,
        num_clients: int | None = 10,
        batch_size: int | Literal["loader"] | None = "loader",
        eval_batch_size: int | Literal["loader"] = "loader",
        drop_last: bool | Literal["loader"] = "loader",
        collate_fn: Collate | None = None,
        **options: Any,
    ) -> None:
        check_package(datamodule, LightningDataModule)
        if not isinstance(datamodule, LightningDataModule):
            raise FederationError(
                f"datamodule must be a LightningDataModule, got {type(datamodule).__name__}"
            )
        if isinstance(datamodule, FederatedDataModule):
            raise FederationError(
                f"{type(datamodule).__name__} is a FederatedDataModule already: pass it to the"
                " Trainer"
            )
        check_absent(options, "the data module determines", "train", "val", "test")
        self.datamodule = datamodule
        given: dict[str, Any] = {
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
            "drop_last": drop_last,
        }
        #: Options that the loaders determine.
        self._open = {name for name, value in given.items() if value == "loader"}
        known = given | {name: _UNTIL_LOADED[name] for name in self._open}
        self._has_collate = collate_fn is not None
        super().__init__(
            train=None,
            val=None,
            test=None,
            partition=partition,
            num_clients=num_clients,
            batch_size=known["batch_size"],
            eval_batch_size=known["eval_batch_size"],
            drop_last=known["drop_last"],
            collate_fn=collate_fn,
            **options,
        )
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        for name in (*TRANSFER_HOOKS, "state_dict", "load_state_dict", "on_exception"):
            if overrides(datamodule, name, LightningDataModule):
                vars(self)[name] = getattr(datamodule, name)
        for name in ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"):
            if name in vars(datamodule):  # for loggers and checkpoints
                vars(self)[name] = vars(datamodule)[name]
        #: Stages for which the data module is set up.
        self._set_up: set[str] = set()
        #: Functions that make a batch and that start a loader process, by the name of the data set.
        self._collates: dict[str, Any] = {}
        self._worker_inits: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Call the hook of the data module, which gets the Trainer first."""
        self.datamodule.trainer = self.trainer
        self.datamodule.prepare_data()

    def teardown(self, stage: str) -> None:
        """Call the hook of the data module. What it releases is set up again by :meth:`setup`."""
        self.datamodule.teardown(stage)
        if overrides(self.datamodule, "teardown", LightningDataModule):
            self._set_up.clear()

    def setup(self, stage: str | None = None) -> None:
        """Set up the data module, and split its training samples; see the base class."""
        self.datamodule.trainer = self.trainer
        if stage == "fit" and not self.parts:  # later, the loop has set the Trainer's option
            self._warn_of_new_loaders()
        if stage == "predict":
            self._set_up_for("predict")
            return
        if "test" not in self._set_up:
            self.test = None
        if self.parts and stage != "test" and "fit" not in self._set_up:
            self._load_again()
        super().setup(stage)

    def _warn_of_new_loaders(self) -> None:
        """Warn if the Trainer is to ask for new loaders during a fit."""
        if self.trainer is not None and self.trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"reload_dataloaders_every_n_epochs has no effect: the loaders of"
                f" {type(self.datamodule).__name__} are read once, and clients keep their samples"
            )

    def _load_again(self) -> None:
        """Load the samples that the data module has released, and keep the split."""
        name, self.val = type(self.datamodule).__name__, None
        before = samples_checksum(self.train, labels_of(self.train))
        train = in_memory(self.load(train=True), "train")
        if len(train) != (count := len(self.train)):
            raise FederationError(
                f"{name} has {len(train)} training samples after another setup, and had {count}:"
                " make its split reproducible, or use a new FromDataModule"
            )
        if samples_checksum(train, labels_of(train)) != before:
            rank_zero_warn(
                f"{name} has other training samples after another setup, but clients keep their"
                " indices: make its split reproducible, for example with a generator"
            )
        self.train, self.val = train, in_memory(self.val, "val")
        if self.val is None and len(self.split.held_out):
            self.val = subset(train, self.split.held_out)

    def _set_up_for(self, stage: str) -> None:
        if stage not in self._set_up:
            self._set_up.add(stage)
            self.datamodule.setup(stage)

    def load(self, train: bool) -> Any:
        """Return the samples of the training or the test loader."""
        if not train:
            if not overrides(self.datamodule, "test_dataloader", LightningDataModule):
                return None
            self._set_up_for("test")
            return self._samples("test")
        self._set_up_for("fit")
        if overrides(self.datamodule, "val_dataloader", LightningDataModule):
            self.val = self._samples("val")
        return self._samples("train")

    def _samples(self, name: str) -> Any:
        """Return the data set of a loader, and take over the loader's options."""
        method = f"{type(self.datamodule).__name__}.{name}_dataloader"
        loader = getattr(self.datamodule, f"{name}_dataloader")()
        if isinstance(loader, list | tuple) and len(loader) == 1:
            (loader,) = loader
        is_absent = loader is None or (isinstance(loader, list | tuple) and not loader)
        if name != "train" and is_absent:
            return None
        _check_loader(loader, method, self.replacement)
        option = "batch_size" if name == "train" else "eval_batch_size"
        if option in self._open:
            setattr(self, option, loader.batch_size)
        if name == "train" and "eval_batch_size" in self._open and self.val is self.test is None:
            self.eval_batch_size = loader.batch_size  # of the samples that are held out
        if name == "train" and "drop_last" in self._open:
            self.drop_last = loader.drop_last
        if not self._has_collate:
            self._collates[name] = loader.collate_fn
            if name == "train":
                self.collate_fn = loader.collate_fn
        self._worker_inits[name] = loader.worker_init_fn
        return loader.dataset

    @property
    def has_samples_in_front(self) -> bool:
        """See the base class; a hook of the data module may change whole batches."""
        changes = any(name in vars(self) for name in TRANSFER_HOOKS)
        return super().has_samples_in_front and not changes

    def predict_dataloader(self) -> Any:
        """Return the loader of the data module."""
        return self.datamodule.predict_dataloader()

    def _batches(self, data: Any, use: str = "train") -> Batches:
        batches = super()._batches(data, use)
        batches.worker_init = self._worker_inits.get("train")
        # Loaders may share a data set and make other batches of it.
        sets = {"train": self.train, "val": self.val, "test": self.test}
        names = (name for name in (use, *sets) if sets[name] is data)
        if (name := next(names, use)) in self._worker_inits:  # an attack changes a data set
            batches.collate = self._collates.get(name, batches.collate)
            batches.worker_init = self._worker_inits[name]
        return batches


def _check_loader(loader: Any, method: str, replacement: bool) -> None:
    """Refuse a loader whose batches are not those of its data set."""
    if not isinstance(loader, DataLoader):
        raise FederationError(
            f"{method} must return one DataLoader, got {type(loader).__name__}: combine the data"
            " sets, for example with torch.utils.data.ConcatDataset"
        )
    check_map_style(loader.dataset, f"the data set of {method}")
    if type(loader).__iter__.__module__.partition(".")[0] not in ("torch", "torchdata"):
        raise FederationError(
            f"{method} returns a {type(loader).__name__}, whose __iter__ would not be called, since"
            " batches are drawn from the samples of each client: return a DataLoader, and change"
            " samples in the data set, in collate_fn or in on_after_batch_transfer"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise FederationError(
            f"{method} returns a DataLoader with batches of its own (batch_sampler, or"
            " batch_size=None), but batches are drawn from the samples of each client: return a"
            " DataLoader with a batch_size"
        )
    _check_sampler(loader, method, replacement)


def _check_sampler(loader: DataLoader[Any], method: str, replacement: bool) -> None:
    """Refuse a sampler that does not draw each sample of the data set once."""
    sampler: Any = loader.sampler
    kind, count = type(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if kind not in (RandomSampler, SequentialSampler, DistributedSampler):
        raise FederationError(
            f"{method} returns a DataLoader with a {kind.__name__}, which is not used, since"
            " batches are drawn from the samples of each client: return a DataLoader without a"
            " sampler"
        )
    draws_again = kind is RandomSampler and sampler.replacement
    if draws_again and not replacement:
        raise FederationError(
            f"{method} draws samples with replacement: pass replacement=True, or return a"
            " DataLoader without this sampler"
        )
    if draws_again and sampler.num_samples != count:
        raise FederationError(
            f"{method} draws {sampler.num_samples} samples in an epoch, but its data set has"
            f" {count}, and an epoch of a client has as many as the client: leave out num_samples,"
            " and set the number of local steps with Schedule(num_steps=...)"
        )
    drawn = len(sampler.dataset if kind is DistributedSampler else sampler.data_source)
    if drawn == count and kind is RandomSampler and not draws_again:
        drawn = len(sampler)  # its num_samples
    if drawn != count:
        raise FederationError(
            f"{method} returns a DataLoader with a {kind.__name__} of {drawn} samples, but its data"
            f" set has {count}, and all of them are used: return a DataLoader of a Subset, without"
            " a sampler"
        )
