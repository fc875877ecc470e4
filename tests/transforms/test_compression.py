"""Compression between client and server: error feedback, bytes, and what the server gets."""

import pytest
import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.federation.client_memory import ClientMemory
from lightning_fl.store import ClientStore
from lightning_fl.transforms import Quantize, TopK, UpdateTransform
from lightning_fl.types import ClientUpdate, Cohort


def module():
    torch.manual_seed(0)
    return ClientModule(nn.Linear(6, 3), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()


def test_error_feedback_by_hand():
    transform, memory, random = TopK(0.3), {}, torch.Generator()
    error = torch.zeros(5).double()
    for round in range(6):
        update = torch.randn(5, generator=torch.Generator().manual_seed(round)).double()
        sent = transform(update, memory, random)
        wanted = update + error
        largest = wanted.abs().argsort(descending=True)[:2]
        expected = torch.zeros(5).double()
        expected[largest] = wanted[largest]
        assert torch.equal(sent, expected)
        error = wanted - expected
        assert torch.equal(memory["error"], error)


def test_errors_wait_while_other_layers_are_trained():
    """Layers may be trained in turn; the error of one of them is not that of the other."""
    layout = VectorLayout({"w": torch.Size([4])}, 4)
    federation = Federation(1, Cohort(1, 1), layout=layout)
    memory = ClientMemory(ClientStore(), [TopK(0.5)], [], federation, torch.device("cpu"))

    def sent(round, trained, *delta):
        update = ClientUpdate(torch.tensor([0]), torch.tensor([delta]), torch.tensor([1]))
        found = memory.keep(update, [{}], [], round, torch.tensor(trained)).delta
        memory.store.commit()
        return found[0].tolist()

    assert sent(0, [0, 1], 4.0, 1.0, 0.0, 0.0) == [4, 0, 0, 0]
    assert sent(1, [2, 3], 0.0, 0.0, 2.0, 8.0) == [0, 0, 0, 8]
    assert sent(2, [0, 1], 0.0, 0.5, 0.0, 0.0) == [0, 1.5, 0, 0]
    assert sent(3, [2, 3], 0.0, 0.0, 0.5, 0.0) == [0, 0, 2.5, 0]


def test_all_that_was_not_sent_is_kept():
    """All that was sent and what is left is all that there was."""
    for transform in (TopK(0.2), Quantize(1), Quantize(4, error_feedback=True)):
        memory, random, total = {}, torch.Generator().manual_seed(0), torch.zeros(10).double()
        sent = torch.zeros(10).double()
        for round in range(20):
            update = torch.randn(10, generator=torch.Generator().manual_seed(round)).double()
            total += update
            sent += transform(update, memory, random)
        torch.testing.assert_close(sent + memory["error"], total)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([], 21 * 8),
        ([TopK(0.1)], 3 * (8 + 4)),
        ([TopK(1.0)], 21 * 12),
        ([Quantize(8)], 21 + 4),
        ([Quantize(1)], 3 + 4),
        ([TopK(0.1), Quantize(8)], 3 * (1 + 4) + 4),
        ([TopK(0.1), Quantize(1)], 3 * 4 + 3 + 4),
    ],
)
def test_bytes_are_counted(fit, data, transforms, expected):
    loop = FederatedLoop(update_transforms=transforms, client_fraction=0.5)
    fit(module(), loop, data(), rounds=2)
    for row in loop.rows:
        assert row["bytes_up"] == 2 * expected
        assert row["bytes_down"] == 2 * 21 * 8


def test_buffers_go_as_they_are(fit, data, foreign):
    loop = FederatedLoop(buffers="average", update_transforms=[Quantize(1)])
    fit(foreign(), loop, data(), rounds=1)
    numbers = sum(p.numel() for p in foreign().parameters())
    # Of BatchNorm: mean and variance of eight features, and a counter of 64 bits.
    rest = 16 * 8 + 8
    assert loop.rows[0]["bytes_up"] == 4 * (-(-numbers // 8) + 4 + rest)
    assert loop.rows[0]["bytes_down"] == 4 * (8 * numbers + rest)


class Half(UpdateTransform):
    def __call__(self, update, memory, generator):
        memory["calls"] = memory.get("calls", torch.zeros(())) + 1
        return update / 2


def test_the_server_gets_what_was_sent(fit, data, flat):
    start = flat(module())
    plain, half = module(), module()
    fit(plain, FederatedLoop(), data(), rounds=1)
    loop = FederatedLoop(update_transforms=[Half()])
    fit(half, loop, data(), rounds=1)
    torch.testing.assert_close(flat(half) - start, (flat(plain) - start) / 2)
    loop = FederatedLoop(update_transforms=[Half(), Half()], seed=3, client_fraction=0.5)
    fit(module(), loop, data(), rounds=3)
    calls = [list(map(float, kept.values())) for kept in loop.store.rows.values()]
    assert all(one == other for one, other in calls)
    assert sum(one for one, _ in calls) == 6


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 12)])
def test_quantization_is_unbiased_in_half_precision(dtype, bits):
    """A sum with the random numbers that was rounded to this precision would be too large."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:1000] = 0
    sent = [Quantize(bits)(x, {}, torch.Generator().manual_seed(seed)) for seed in range(100)]
    assert all(each.dtype == dtype and not each[:1000].any() for each in sent)
    mean = torch.stack(sent).double().mean(0)[1000:]
    scale = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    assert abs(float((mean - x[1000:].double()).mean())) < 0.03 * scale
