"""Federation of the data of any LightningDataModule."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.loader import Batches
from lightning_fl.datamodules.splits import Split
from lightning_fl.datamodules.storage import check_map_style
from lightning_fl.errors import FederationError, check_package
from lightning_fl.hooks import TRANSFER_HOOKS, overrides
from lightning_fl.options import check_that, is_list
from lightning_fl.partition import Partition


class FromDataModule(FederatedDataModule):
    """Split the training samples of a LightningDataModule over clients.

    The data module prepares and loads its data, applies its transforms, and keeps its hooks for
    transfers and checkpoints and its hyperparameters. Each of its loaders must be a
    ``DataLoader(data, batch_size=..., shuffle=...)`` of a map-style data set. A loader is read
    once, for its data set, batch size, ``drop_last``, ``collate_fn`` and ``worker_init_fn``: this
    class draws the batches of clients. There may be a list of validation loaders; all have the
    batch size of the first. Validation and test use the module's own data sets in order;
    prediction uses its own loader.
    A module finds the other attributes of the data module, such as ``num_classes``, at
    ``self.trainer.datamodule``.

    Args:
        datamodule: The data module.
        partition: Rule that splits the training samples over clients; None means
            :class:`~lightning_fl.partition.IID`.
        num_clients: Number of clients; None if the rule determines it.
        batch_size: Samples per local step; None means all samples of a client, ``loader`` the batch
            size of the training loader.
        options: Further options of :class:`FederatedDataModule`, such as ``labels`` and ``keys``.
            ``val_size`` is used if the data module has no validation loader.

    Raises:
        FederationError: If a loader is not a ``DataLoader`` of a map-style data set, or has a
            ``batch_sampler``, a custom sampler or a custom ``__iter__``.

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
        **options: Any,
    ) -> None:
        check_package(datamodule, LightningDataModule)
        is_federated = isinstance(datamodule, FederatedDataModule)  # which the Trainer takes
        is_right = isinstance(datamodule, LightningDataModule) and not is_federated
        wanted = "a LightningDataModule that is not a FederatedDataModule"
        check_that("datamodule", type(datamodule).__name__, is_right, wanted)
        self.datamodule = datamodule
        self._reads_batch_size = batch_size == "loader"
        super().__init__(
            train=None,
            val=None,
            test=None,
            partition=partition,
            num_clients=num_clients,
            batch_size=None if batch_size == "loader" else batch_size,
            eval_batch_size=1,  # this one and the next are those of the loaders after the setup
            drop_last=False,
            collate_fn=None,
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
        #: Loaders of the data module, by the use of their samples.
        self._loaders: dict[str, DataLoader[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the data module, for readers of ``trainer.datamodule``."""
        if name.startswith("__") or "datamodule" not in vars(self):
            raise AttributeError(name)
        return getattr(self.datamodule, name)

    def prepare_data(self) -> None:
        """Call the hook of the data module, which gets the Trainer first."""
        self.datamodule.trainer = self.trainer
        self.datamodule.prepare_data()

    def teardown(self, stage: str) -> None:
        """Call the hook of the data module. What it releases is set up again by :meth:`setup`."""
        super().teardown(stage)
        self.datamodule.teardown(stage)
        if overrides(self.datamodule, "teardown", LightningDataModule):
            self._set_up.clear()

    def setup(self, stage: str | None = None) -> None:
        """Set up the data module, and split its training samples; see the base class.

        After a teardown the samples are split again, with the same result for the same samples.
        """
        self.datamodule.trainer = self.trainer
        if stage == "predict":
            self._set_up_for("predict")
            return
        if "test" not in self._set_up:
            self.test = None
        if stage != "test" and "fit" not in self._set_up:
            self.split, self.val, self.more_val = Split(), None, []
        super().setup(stage)

    def _set_up_for(self, stage: str) -> None:
        if stage not in self._set_up:
            self._set_up.add(stage)
            self.datamodule.setup(stage)

    def load(self, train: bool) -> Any:
        """Return the samples of the training or the test loader."""
        if not train:
            return self._samples("test")[0]
        samples = self._samples("train")[0]
        self.val, *self.more_val = self._samples("val")
        return samples

    def _samples(self, use: Literal["train", "val", "test"]) -> list[Any]:
        """Return the data sets of loaders, and take over the options of the first one."""
        method = f"{use}_dataloader"
        if use != "train" and not overrides(self.datamodule, method, LightningDataModule):
            return [None]
        self._set_up_for("test" if use == "test" else "fit")
        loader = getattr(self.datamodule, method)()
        if use != "train" and (loader is None or (is_list(loader) and not loader)):
            return [None]
        has_several = is_list(loader) and (use == "val" or len(loader) == 1)
        loaders = list(loader) if has_several else [loader]
        for i, each in enumerate(loaders):
            _check_loader(each, f"{type(self.datamodule).__name__}.{method}", self.replacement)
            self._loaders[f"{use} {i}" if i else use] = each
        first: Any = loaders[0]
        self.eval_batch_size = first.batch_size
        if use == "train":
            self.drop_last, self.collate_fn = first.drop_last, first.collate_fn
            self.batch_size = first.batch_size if self._reads_batch_size else self.batch_size
        return [each.dataset for each in loaders]

    def predict_dataloader(self) -> Any:
        """Return the loader of the data module."""
        return self.datamodule.predict_dataloader()

    def _batches(self, data: Any, use: str = "train") -> Batches:
        batches = super()._batches(data, use)
        loader = self._loaders.get(use) or self._loaders.get("train")
        if loader is not None:
            batches.collate, batches.worker_init = loader.collate_fn, loader.worker_init_fn
        return batches


def _check_loader(loader: Any, method: str, replacement: bool) -> None:
    """Refuse a loader whose batches are not random ones of all samples of its data set."""
    if not isinstance(loader, DataLoader):
        raise FederationError(
            f"{method} must return one DataLoader, got {type(loader).__name__}: combine the data"
            " sets, for example with torch.utils.data.ConcatDataset"
        )
    check_map_style(loader.dataset, f"the data set of {method}")
    sampler: Any = loader.sampler
    is_plain = (
        type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")
        and type(loader.batch_sampler) is BatchSampler
        and type(sampler) in (RandomSampler, SequentialSampler)
        and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]  # it is map-style
        and (replacement or type(sampler) is SequentialSampler or not sampler.replacement)
    )
    if not is_plain:
        raise FederationError(
            f"{method} must return DataLoader(data, batch_size=..., shuffle=...) without its own"
            " sampler, batches or __iter__, since this library draws the batches; replacement=True"
            " of this class allows a RandomSampler with replacement"
        )
