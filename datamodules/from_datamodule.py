"""Federation of the data of any LightningDataModule."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.loader import Batches, Collate
from lightning_fl.datamodules.storage import check_absent, check_map_style
from lightning_fl.hooks import overrides
from lightning_fl.partition import Partition
from lightning_fl.runners.step_hooks import TRANSFER_HOOKS
from lightning_fl.types import FederationError, check_package

#: Values of options until a loader determines them.
_UNTIL_LOADED = {"batch_size": 1, "eval_batch_size": 1, "drop_last": False}


class FromDataModule(FederatedDataModule):
    """Split the training samples of a LightningDataModule over clients.

    The data module prepares and loads its data, applies its transforms, and keeps its hooks for
    transfers and checkpoints. Its loaders only name their data sets, batch size, ``drop_last`` and
    ``collate_fn``: this class draws the batches of clients. Validation and test use the module's
    own data sets in order; prediction uses its own loader.

    Args:
        datamodule: The data module.
        partition: Rule that splits the training samples over clients; None means
            :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None if the rule determines it.
        batch_size: Samples per local step; None means all samples of a client, ``loader`` the batch
            size of the training loader.
        eval_batch_size: Samples per batch in validation and test; ``loader`` as above, for the
            loaders of validation and test.
        drop_last: Drop the incomplete batch at the end of a pass, unless it is the only one;
            ``loader`` as above.
        collate_fn: Function that makes a batch from samples; None means those of the loaders.
        options: Further options of :class:`FederatedDataModule`, such as ``labels`` and ``keys``.
            ``val_size`` is used if the data module has no validation loader.

    Raises:
        FederationError: If a loader is not a ``DataLoader`` of a map-style data set, or has a
            sampler of its own.

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
        self._set_up: set[str] = set()
        #: Function that makes a batch, by the name of the data set.
        self._collates: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Call the hook of the data module, which gets the Trainer first."""
        self.datamodule.trainer = self.trainer
        self.datamodule.prepare_data()

    def teardown(self, stage: str) -> None:
        """Call the hook of the data module."""
        self.datamodule.teardown(stage)

    def setup(self, stage: str | None = None) -> None:
        """Set up the data module, and split its training samples; see the base class."""
        self.datamodule.trainer = self.trainer
        if stage == "predict":
            self._set_up_for("predict")
        else:
            super().setup(stage)

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
        method, owner = f"{name}_dataloader", type(self.datamodule).__name__
        loader = getattr(self.datamodule, method)()
        if isinstance(loader, list | tuple) and len(loader) == 1:
            (loader,) = loader
        if name == "val" and isinstance(loader, list | tuple) and not loader:
            return None
        if not isinstance(loader, DataLoader):
            raise FederationError(
                f"{owner}.{method} must return one DataLoader, got {type(loader).__name__}: combine"
                " the data sets, for example with torch.utils.data.ConcatDataset"
            )
        check_map_style(loader.dataset, f"the data set of {owner}.{method}")
        sampler = loader.sampler
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise FederationError(
                f"{owner}.{method} returns a DataLoader with batches of its own (batch_sampler, or"
                " batch_size=None), but batches are drawn from the samples of each client: return a"
                " DataLoader with a batch_size"
            )
        if type(sampler) not in (RandomSampler, SequentialSampler, DistributedSampler):
            raise FederationError(
                f"{owner}.{method} returns a DataLoader with a {type(sampler).__name__}, which is"
                " not used, since batches are drawn from the samples of each client: return a"
                " DataLoader without a sampler"
            )
        if isinstance(sampler, RandomSampler) and sampler.replacement and not self.replacement:
            raise FederationError(
                f"{owner}.{method} draws samples with replacement: pass replacement=True, or return"
                " a DataLoader without this sampler"
            )
        option = "batch_size" if name == "train" else "eval_batch_size"
        if option in self._open:
            setattr(self, option, loader.batch_size)
        if name == "train" and "drop_last" in self._open:
            self.drop_last = loader.drop_last
        if not self._has_collate:
            self._collates[name] = loader.collate_fn
            if name == "train":
                self.collate_fn = loader.collate_fn
        return loader.dataset

    @property
    def has_samples_in_front(self) -> bool:
        """See the base class; a hook of the data module may change whole batches."""
        changes = any(name in vars(self) for name in TRANSFER_HOOKS)
        return super().has_samples_in_front and not changes

    def predict_dataloader(self) -> Any:
        """Return the loader of the data module."""
        return self.datamodule.predict_dataloader()

    def _batches(self, data: Any) -> Batches:
        batches = super()._batches(data)
        for name, own in (("val", self.val), ("test", self.test)):
            if data is own and name in self._collates:
                batches.collate = self._collates[name]
        return batches
