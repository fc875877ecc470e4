"""The data of any LightningDataModule."""

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, FromDataModule
from lightning_fl.partition import IID, ByLabel
from lightning_fl.types import FederationError
from numbered import fitted
from tutorial import Net, trainer


@pytest.fixture
def fit(tmp_path):
    """Federate a data module; returns the Trainer."""

    def run(mine, rounds=1, module=None, logger=False, **options):
        made = trainer(tmp_path, FederatedLoop(seed=0), rounds=rounds, logger=logger)
        data = mine if isinstance(mine, FromDataModule) else FromDataModule(mine, num_clients=4)
        made.fit(Net() if module is None else module, datamodule=data, **options)
        return made

    return run


class Mine(LightningDataModule):
    """A data module as tutorials write them."""

    def __init__(self, **loader):
        super().__init__()
        self.loader = {"batch_size": 5, "shuffle": True} | loader
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] > 0).long()
        if stage == "fit":
            halves = random_split(TensorDataset(x, y), [50, 10], torch.Generator().manual_seed(0))
            self.train, self.val = halves
        else:
            self.test = TensorDataset(x[:12], y[:12])

    def train_dataloader(self):
        return DataLoader(self.train, **self.loader)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=7)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=3)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=4)

    def teardown(self, stage):
        self.calls.append("end of " + stage)


def test_it_federates_in_one_line(fit):
    mine, module = Mine(), Net()
    data = FederatedDataModule.from_datamodule(mine, IID(), num_clients=4)
    made = fit(data, 5, module)
    assert float(made.callback_metrics["val_acc"]) > 0.7
    assert mine.trainer is made
    assert data.batch_size == 5
    assert data.num_samples.tolist() == [13, 13, 12, 12]
    assert made.test(module, datamodule=data, verbose=False)[0]["val_acc"] > 0.7
    predicted = made.predict(module, datamodule=data)
    assert [len(each) for each in predicted] == [4, 4, 4]  # by the loader of the data module
    assert mine.calls == [
        *("prepare", "fit", "end of fit", "prepare", "test", "end of test"),
        *("prepare", "predict", "end of predict"),
    ]


def test_samples_labels_and_validation_are_those_of_the_loaders():
    mine = Mine()
    data = fitted(FromDataModule(mine, ByLabel(classes_per_client=1), num_clients=2))
    assert sorted((data.class_counts > 0).sum(1).tolist()) == [1, 1]
    x = torch.cat([x for client in (0, 1) for x, _ in data.samples_of(client)])
    assert torch.equal(x.sort(0).values, torch.stack([x for x, _ in mine.train]).sort(0).values)
    val = torch.cat([batch[0] for batch in data.val_dataloader()])
    assert torch.equal(val, torch.stack([x for x, _ in mine.val]))
    assert [len(y) for _, y in data.val_dataloader()] == [7, 3]


def test_a_batch_size_is_used_instead_of_that_of_the_loaders():
    data = fitted(FromDataModule(Mine(drop_last=True), batch_size=None, num_clients=5))
    data.setup("test")
    assert (data.batch_size, data.eval_batch_size, data.drop_last) == (None, 3, True)
    assert [len(y) for _, y in data.test_dataloader()] == [3, 3, 3, 3]


def test_loaders_of_one_data_set_have_their_own_collate_fn():
    """Batches for training would be those of the validation loader, without augmentation."""

    def marked(sign):
        return lambda samples: (default_collate([x for x, _ in samples]), torch.tensor(sign))

    mine, samples = LightningDataModule(), [(torch.zeros(4), 0)] * 12
    for sign, kind in enumerate(("train", "val", "test")):
        loader = DataLoader(samples, batch_size=3, collate_fn=marked(sign))
        setattr(mine, f"{kind}_dataloader", lambda loader=loader: loader)
    data = fitted(FromDataModule(mine, num_clients=2))
    data.setup("test")
    assert {int(sign) for _, sign in data.samples_of(0)} == {0}
    assert {int(sign) for _, sign in data.train_dataloader()} == {0}
    assert {int(sign) for _, sign in data.val_dataloader()} == {1}
    assert {int(sign) for _, sign in data.test_dataloader()} == {2}


def test_samples_are_held_out_without_a_validation_loader():
    mine = Mine()
    mine.val_dataloader = lambda: None
    data = fitted(FromDataModule(mine, num_clients=4, val_size=10))
    assert (len(data.val), int(data.num_samples.sum())) == (10, 40)
    assert [len(y) for _, y in data.val_dataloader()] == [5, 5]  # as in the training loader
    assert [len(y) for _, y in data.samples_of(0)] == [5, 5]
    data.setup("test")
    assert [len(y) for _, y in data.test_dataloader()] == [3, 3, 3, 3]


def test_hooks_of_transfers_are_those_of_the_data_module(fit):
    class Doubling(Mine):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.calls.append("transfer")
            return batch

    mine = Doubling()
    data = fitted(FromDataModule(mine, num_clients=4))
    assert not data.has_samples_in_front  # the hook may change whole batches
    fit(data)
    assert mine.calls.count("transfer") >= 12
    plain = fitted(FromDataModule(Mine(), num_clients=4))
    assert plain.has_samples_in_front


def test_its_state_is_in_checkpoints(fit, tmp_path):
    class Stateful(Mine):
        def state_dict(self):
            return {"seen": 7}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    fit(Stateful()).save_checkpoint(tmp_path / "one.ckpt")
    mine = Stateful()
    fit(mine, 2, ckpt_path=tmp_path / "one.ckpt")
    assert mine.seen == 7


class Streaming(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


PLAIN = r"train_dataloader must return DataLoader\(data, batch_size=..., shuffle=...\) without"


class Scaled(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield 1000 * x, y


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (lambda own: DataLoader(Streaming(), batch_size=2), "must be a map-style data set"),
        (lambda own: [DataLoader(own), DataLoader(own)], "must return one DataLoader, got list"),
        (lambda own: {"a": DataLoader(own)}, "must return one DataLoader, got dict"),
        (lambda own: DataLoader(own, sampler=WeightedRandomSampler([1.0] * 50, 50)), PLAIN),
        (lambda own: DataLoader(own, batch_size=None), PLAIN),
        (lambda own: DataLoader(own, sampler=RandomSampler(own, replacement=True)), PLAIN),
        (lambda own: DataLoader(own, sampler=RandomSampler(range(10))), PLAIN),
        (lambda own: DataLoader(own, sampler=SequentialSampler(range(7))), PLAIN),
        (lambda own: Scaled(own), PLAIN),
        (lambda own: None, "train_dataloader must return one DataLoader, got NoneType"),
    ],
)
def test_loaders_whose_meaning_would_change_are_refused(loader, match):
    mine = Mine()
    mine.train_dataloader = lambda: loader(mine.train)
    with pytest.raises(FederationError, match=match):
        FromDataModule(mine).setup("fit")


@pytest.mark.parametrize("absent", [None, []])
def test_loaders_that_are_absent_give_no_samples(absent):
    mine = Mine()
    mine.val_dataloader = mine.test_dataloader = lambda: absent
    data = fitted(FromDataModule(mine, val_size=0))
    data.setup("test")
    assert data.val is data.test is None


class Opened(Dataset):
    """A data set with a file that loader processes open and that a teardown closes."""

    def __init__(self, file):
        self.file = file

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(self.file)), index % 2


class Opening(LightningDataModule):
    """A data module with an open file from its setup to its teardown."""

    def setup(self, stage):
        self.data = Opened(7)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4)

    def teardown(self, stage):
        self.data.file = None


@pytest.mark.parametrize("has_val", [True, False])
def test_what_a_teardown_releases_is_set_up_again(fit, has_val):
    mine = Opening()
    mine.val_dataloader = lambda: DataLoader(mine.data, batch_size=4) if has_val else []
    data, module = FromDataModule(mine, num_clients=4), Net()
    made = fit(data, module=module)
    split = [part.tolist() for part in data.parts]
    made.validate(module, datamodule=data, verbose=False)
    fit(data, module=module)
    assert [part.tolist() for part in data.parts] == split


def test_samples_after_a_teardown_are_split_again():
    class Growing(Mine):
        def setup(self, stage):
            super().setup(stage)
            self.train = TensorDataset(*(t[: self.count] for t in self.train.dataset.tensors))

    mine = Growing()
    data = FromDataModule(mine, num_clients=4)
    for mine.count in (50, 40):
        data.setup("fit")
        assert sorted(torch.cat(data.parts).tolist()) == list(range(mine.count))
        data.teardown("fit")


def test_hyperparameters_are_those_of_the_data_module(fit, tmp_path):
    class Saving(Mine):
        def __init__(self, augment=True):
            super().__init__()
            self.save_hyperparameters()

    made = fit(Saving(False), logger=CSVLogger(tmp_path))
    assert "augment: false" in Path(made.logger.log_dir, "hparams.yaml").read_text()
    made.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert saved["datamodule_hyper_parameters"] == {"augment": False}


def test_a_random_sampler_with_replacement_needs_the_option():
    mine = Mine()
    mine.train_dataloader = lambda: DataLoader(
        mine.train, 5, sampler=RandomSampler(mine.train, replacement=True)
    )
    data = fitted(FromDataModule(mine, replacement=True))
    assert data.batch_size == 5


def test_what_is_no_data_module_is_refused():
    for wrong in (TensorDataset(torch.zeros(3)), FederatedDataModule()):
        words = f"that is not a .*, got '{type(wrong).__name__}'"
        with pytest.raises(FederationError, match=words):
            FromDataModule(wrong)
    for option in ("val", "eval_batch_size", "drop_last", "collate_fn"):
        with pytest.raises(TypeError, match=option):
            FromDataModule(Mine(), **{option: None})


class Unseeded(Mine):
    """Draws another split in each setup, as random_split does without a generator."""

    def setup(self, stage):
        super().setup(stage)
        self.train, self.val = random_split(self.train.dataset, [50, 10])


def test_a_run_that_resumes_with_another_split_of_the_samples_is_warned(fit, tmp_path):
    def run(seed, rounds, **options):
        torch.manual_seed(seed)
        return fit(Unseeded(), rounds, **options)

    run(0, 1).save_checkpoint(tmp_path / "one.ckpt")
    run(0, 2, ckpt_path=tmp_path / "one.ckpt")  # the same split; warnings are errors
    with pytest.warns(UserWarning, match="with other options: checksum of the training labels is"):
        run(1, 2, ckpt_path=tmp_path / "one.ckpt")


def test_a_module_finds_what_it_reads_from_its_data_module(fit):
    class Normalized(Mine):
        mean = 0.5

        @property
        def num_classes(self):
            return 2

    class Reading(Net):
        def setup(self, stage):
            data = self.trainer.datamodule
            self.found = data.num_classes, data.mean, data.loader["batch_size"], data.num_clients

    module = Reading()
    data = FromDataModule(Normalized(), num_clients=4)
    fit(data, module=module)
    assert module.found == (2, 0.5, 5, 4)
    with pytest.raises(AttributeError, match="'Normalized' object has no attribute 'std'"):
        _ = data.std
    assert copy.deepcopy(data).mean == 0.5


def start(worker):
    get_worker_info().dataset.file = 3


def test_loader_processes_are_started_as_those_of_the_loader():
    mine, loader = LightningDataModule(), DataLoader(Opened(0), num_workers=1, worker_init_fn=start)
    mine.train_dataloader = lambda: loader
    data = fitted(FromDataModule(mine, num_clients=4, num_workers=1, val_size=0))
    x, _ = next(iter(data.train_dataloader()))
    assert x.unique().tolist() == [3]
