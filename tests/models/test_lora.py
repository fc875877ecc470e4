"""Adapters of peft in any network: what is trained, a start that repeats, and what is refused."""

import sys
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

import extras
from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import TopicText
from lightning_fl.models import LoRA, TextTransformer
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError

pytestmark = extras.PEFT

SIZES = {"vocabulary": 40, "num_classes": 3, "width": 8, "depth": 2, "heads": 2, "length": 8}
TARGETS = ["query", "value"]


def text():
    torch.manual_seed(0)
    return TextTransformer(**SIZES)


def adapted(**options):
    given = {"rank": 2, "target_modules": TARGETS, "train": ["head.*"], **options}
    return LoRA(text(), **given)


def trained(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def test_adapters_and_named_parameters_are_trained():
    names = [name.removeprefix("net.") for name in trained(adapted())]
    kinds = ["layers.[01].query.lora_[AB].*", "layers.[01].value.lora_[AB].*", "head.*"]
    counts = [sum(fnmatch(name, kind) for name in names) for kind in kinds]
    assert counts == [4, 4, 2]
    assert len(names) == sum(counts)
    half = trained(adapted(freeze_a=True))
    assert not any("lora_A" in name for name in half)
    assert len(half) == len(names) - 4
    # A head that is adapted and trained, too.
    both = trained(adapted(target_modules=["head"]))
    names = {name.removeprefix("net.head.").removesuffix(".weight") for name in both}
    assert names == {"base_layer.bias", "base_layer", "lora_A.default", "lora_B.default"}


def test_the_start_is_that_of_the_network_and_repeats():
    x = torch.randint(1, 40, (3, 8))
    net, plain = adapted(alpha=16), text()
    torch.testing.assert_close(net(x), plain(x))
    one, other = adapted(), adapted(seed=1)
    for (name, p), q in zip(net.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(p, q), name
    (a,) = [n for n in trained(one) if "0.query.lora_A" in n]
    assert not torch.equal(trained(one)[a], trained(other)[a])


def test_the_scaling_is_alpha_divided_by_the_rank():
    x = torch.randint(1, 40, (3, 8))
    outputs = []
    for options in ({"alpha": 4}, {"alpha": 8}, {}):
        net = adapted(rank=2, target_modules=["head"], **options)
        head = net.net.head
        nn.init.ones_(head.lora_B["default"].weight)
        outputs.append(net(x) - text()(x))
    torch.testing.assert_close(outputs[1], 2 * outputs[0])
    torch.testing.assert_close(outputs[0], 2 * outputs[2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1"),
        ({"target_modules": ["keys"]}, "target_modules has 'keys', which is no layer of TextTrans"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": "query"}, "target_modules has 'q', which is no layer"),
        ({"train": ["tail.*"]}, r"train has 'tail\.\*', which is no parameter of TextTransformer"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(FederationError, match=words):
        adapted(**options)


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FederationError, match=r'pip install "lightning_fl\[peft\]"'):
        adapted()


# --- in a federation ------------------------------------------------------------------------------


def test_four_bytes_are_sent_per_trained_parameter(trainer):
    sizes = {}
    for freeze_a in (False, True):
        module = ClientModule(adapted(freeze_a=freeze_a))
        data = TopicText(3, 40, 8, 60, 30, num_clients=4, batch_size=8)
        loop = FederatedLoop(policy=Schedule(num_steps=1), seed=1)
        trainer(loop, 1).fit(module, datamodule=data)
        count = sum(p.numel() for p in trained(module).values())
        assert loop.rows[0]["bytes_up"] == loop.rows[0]["bytes_down"] == 4 * 4 * count
        sizes[freeze_a] = count
    assert sizes[False] - sizes[True] == 4 * 2 * 8, "half of the adapters' parameters"


def test_ffa_lora_averages_products_exactly(trainer):
    sgd = lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.5)  # noqa: E731
    module = ClientModule(adapted(freeze_a=True), optimizer=sgd).double()
    data = TopicText(3, 40, 8, 120, 30, num_clients=4, batch_size=8)
    loop = FederatedLoop(policy=Schedule(num_steps=3), seed=1)
    trainer(loop, 1).fit(module, datamodule=data)
    start = adapted(freeze_a=True)
    for name, p in module.net.named_parameters():
        if "lora_A" in name:
            torch.testing.assert_close(p, dict(start.named_parameters())[name].double())
        if "lora_B" in name:
            assert p.any()
    assert not any("lora_A" in name for name in loop.fit.federation.layout.shapes)


# --- the networks and the texts -------------------------------------------------------------------


def test_padding_changes_nothing():
    net = text().eval()
    x = torch.tensor([[5, 9, 3]])
    padded = torch.nn.functional.pad(x, (0, 5))
    torch.testing.assert_close(net(padded), net(x))
    assert net(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()
    moved = torch.tensor([[9, 5, 3]])
    assert not torch.allclose(net(moved), net(x)), "positions count"


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_weights_are_read_from_a_local_file(tmp_path, ending):
    source, path = text(), tmp_path / f"weights.{ending}"
    if ending == "pt":
        torch.save(source.state_dict(), path)
    else:
        pytest.importorskip("safetensors.torch").save_file(source.state_dict(), path)
    torch.manual_seed(3)
    same = TextTransformer(**SIZES, weights=str(path))
    other = TextTransformer(**{**SIZES, "num_classes": 5}, weights=str(path))
    for name, value in source.state_dict().items():
        assert torch.equal(same.state_dict()[name], value)
        if "head" not in name:
            assert torch.equal(other.state_dict()[name], value)
    with pytest.raises(FederationError, match=r"cannot be loaded.*size mismatch"):
        TextTransformer(**{**SIZES, "width": 16}, weights=str(path))
    with pytest.raises(FederationError, match=r"cannot be loaded.*No such file"):
        TextTransformer(**SIZES, weights=str(tmp_path / "missing.pt"))
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(FederationError, match=r"cannot be loaded.*Missing key"):
        TextTransformer(**SIZES, weights=str(tmp_path / "other.pt"))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(FederationError, match="it holds no state_dict"):
        TextTransformer(**SIZES, weights=str(tmp_path / "list.pt"))
