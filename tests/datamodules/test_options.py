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
        ({"val_size": -1}, "at least 0, got -1: pass a fraction in .* number of samples"),
        ({"val_size": float("nan")}, "at least 0, got nan: pass a fraction"),
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
