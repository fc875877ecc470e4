"""Image models of timm, without downloads."""

import sys

import pytest
import torch

import extras
from lightning_fl.models import LoRA, TimmModel
from lightning_fl.types import FederationError

pytestmark = extras.PEFT

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2}


def test_a_model_is_made_by_name_and_adapted(tmp_path):
    torch.manual_seed(0)
    net = TimmModel("vit_tiny_patch16_224", 3, TINY)
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    torch.save(net.net.state_dict(), tmp_path / "weights.pt")
    other = TimmModel("vit_tiny_patch16_224", 4, TINY, str(tmp_path / "weights.pt"))
    assert torch.equal(other.net.patch_embed.proj.weight, net.net.patch_embed.proj.weight)
    assert other.net.head.weight.shape == (4, 8)
    made = LoRA(net, 2, target_modules=["qkv"], train=["net.head.*"])
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    batched = torch.vmap(lambda x: made(x))(torch.randn(3, 2, 1, 8, 8))  # without a warning
    assert batched.shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "vit_teeny"}, "timm cannot make vit_teeny with None: Unknown model"),
        ({"options": {"pretrained": True}}, "multiple values for keyword argument 'pretrained'"),
        ({"options": {"legs": 4}}, "timm cannot make vit_tiny_patch16_224 with {'legs': 4}"),
        ({"num_classes": 0}, "num_classes must be an integer of at least 1"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(FederationError, match=words):
        TimmModel(**{"name": "vit_tiny_patch16_224", **options})


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(FederationError, match=r'pip install "lightning_fl\[peft\]"'):
        TimmModel("vit_tiny_patch16_224")
