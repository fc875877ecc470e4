"""Low-rank adapters in any network."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.options import check_flag, check_integer, check_number


class LoRA(nn.Module):
    r"""Add low-rank adapters to a network, and freeze the rest (LoRA; Hu et al., 2022).

    Layers whose name ends in one of ``target_modules`` get an adapter of peft, which adds
    :math:`\frac{\alpha}{r} B A x` to the output of the layer. :math:`B` starts at 0, so that the
    network computes at first what it computed before. Adapters and the parameters in ``train`` are
    trained; clients send nothing else. BatchNorm layers still update their statistics.

    With ``freeze_a`` only :math:`B` is trained (FFA-LoRA; Sun et al., 2024): the average of
    :math:`B_k A` is exactly the average of :math:`B_k` times :math:`A`, and :math:`A` is not
    exchanged, which is half of the adapter of a square layer.

    Requires the package peft: ``pip install "lightning_fl[peft]"``.

    Args:
        net: The network.
        rank: Rank :math:`r` of the adapters.
        alpha: :math:`\alpha`; None is the rank, a scaling of 1.
        target_modules: Names of the layers to adapt, or their last parts, such as ``qkv``; linear
            layers, convolutions and embeddings.
        dropout: Dropout probability of the inputs of adapters.
        train: Names of further parameters of ``net`` to train, with ``*`` for any characters, such
            as ``head.*``.
        freeze_a: Whether :math:`A` stays frozen at its random start.
        seed: Seed of :math:`A`, so that all processes and runs start from the same.

    Raises:
        FederationError: If peft is missing, an option is out of range, or a name matches nothing.

    Example:
        >>> net = LoRA(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), rank=2,
        ...     target_modules=["0"], train=["2.*"])
        >>> [name for name, param in net.named_parameters() if param.requires_grad]
        ['net.0.lora_A.default.weight', 'net.0.lora_B.default.weight', 'net.2.weight', 'net.2.bias']
    """

    def __init__(
        self,
        net: nn.Module,
        rank: int = 8,
        alpha: float | None = None,
        target_modules: Sequence[str] = (),
        dropout: float = 0.0,
        train: Sequence[str] = (),
        freeze_a: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_integer("rank", rank, min=1)
        check_number("alpha", alpha, above=0, optional=True)
        check_number("dropout", dropout, min=0, below=1)
        check_integer("seed", seed, min=0)
        check_flag("freeze_a", freeze_a)
        _check_targets(net, target_modules)
        trained = _matching(net, train)
        self.net = _adapted(net, rank, alpha, list(target_modules), dropout, seed)
        for path, parameter in self.net.named_parameters():
            is_adapter = "lora_" in path and not (freeze_a and _is_a(path))
            parameter.requires_grad_(is_adapter or id(parameter) in trained)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the network with its adapters."""
        return cast("Tensor", self.net(*args, **kwargs))


def _adapted(
    net: nn.Module, rank: int, alpha: float | None, targets: list[str], dropout: float, seed: int
) -> nn.Module:
    """Return the network with adapters, in place."""
    peft = imported("peft", "LoRA", "peft")
    options: dict[str, Any] = {"r": rank, "lora_alpha": rank if alpha is None else alpha}
    config = peft.LoraConfig(target_modules=targets, lora_dropout=dropout, **options)
    with seeded_rng(seed):
        adapted: nn.Module = peft.inject_adapter_in_model(config, net)
    return adapted


def _is_a(path: str) -> bool:
    return "lora_A." in path or "lora_embedding_A." in path


def _check_targets(net: nn.Module, targets: Sequence[str]) -> None:
    """Check that each target matches a layer, as peft warns only if none does."""
    names = [name for name, _ in net.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            layers = [n for n, m in net.named_modules() if isinstance(m, nn.Linear)]
            raise FederationError(
                f"target_modules has {target!r}, which is no layer of {type(net).__name__}; its"
                f" linear layers are {', '.join(layers) or 'none'!s:.300}"
            )
    if not targets:
        raise FederationError("target_modules is empty: name the layers to adapt, such as [qkv]")


def _matching(net: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return the parameters with a name that matches a pattern, by id."""
    named = dict(net.named_parameters())
    trained = set()
    for pattern in patterns:
        matching = [id(p) for name, p in named.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise FederationError(
                f"train has {pattern!r}, which is no parameter of {type(net).__name__}; its"
                f" parameters are {', '.join(named)!s:.300}"
            )
        trained.update(matching)
    return trained
