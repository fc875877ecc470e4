"""Options of a data module that are refused."""

import numpy as np
import pytest

from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.partition import IID
from lightning_fl.types import FederationError
from numbered import federated, held, numbered


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "^batch_size must be an integer of at least 1, or None, got 0"),
        ({"eval_batch_size": -3}, "^eval_batch_size must be an integer of at least 1, got -3"),
        ({"val_size": -1}, "at least 0, got -1: pass a fraction in .* number of samples"),
        (
            {"val_size": float("nan")},
            "at least 0, got nan: pass a fraction",
        ),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, or None, got 2.5"),
        ({"eval_batch_size": None}, "eval_batch_size must be an integer of at least 1, got None"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
        ({"num_clients": 2.5}, "num_clients must be an integer of at least 1, or None, got 2.5"),
        ({"num_clients": 0}, "num_clients must be an integer of at least 1, or None, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, or None, got -1"),
        ({"val_size": "a"}, "got 'a': pass a fraction in .* or a number of samples"),
        ({"val_size": None}, "got None: pass a fraction in"),
        ({"partition": IID}, r"partition must be a rule, such as IID\(\), got <class"),
        ({"partition": "IID"}, "partition must be a rule, .* got 'IID'"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(options, words):
    with pytest.raises(FederationError, match=words):
        FederatedDataModule(numbered(), **options)


def test_numbers_of_numpy_are_numbers():
    names = ("num_clients", "batch_size", "eval_batch_size", "num_workers", "seed")
    data = federated(val_size=np.int64(6), **{name: np.int64(2) for name in names})
    assert [type(getattr(data, name)) for name in names] == [int] * 5
    assert data.num_samples.tolist() == [27, 27]
    assert len(held(federated(val_size=np.float32(0.25)))) == 15
