"""Frozen tensors in a file beside the checkpoints, to which checkpoints refer by a digest.

Parameters that are constant in a fit, such as a pretrained backbone, are written once per folder.
A checkpoint holds their names, shapes and one digest. When it is loaded, they are taken from the
module if its own have that digest, else from the file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.federation.boundary import place
from lightning_fl.federation.compare import compare
from lightning_fl.files import archive_size, check_sums, error_context, write_atomically
from lightning_fl.runners.constants import checksums
from lightning_fl.types import FederationError

#: Entry of a checkpoint that refers to frozen tensors.
REFERENCE = "frozen_tensors"
#: Structure of the entry: the digest; data type and shape of each tensor; and the names that were
#: left out of ``state_dict`` and of the state ``server`` of callbacks, each with its tensor's name.
_REFERENCE: dict[str, Any] = {
    "digest": str,
    "tensors": {str: {"dtype": str, "shape": [range(2**40), ...]}},
    "state_dict": {str: str},
    "servers": {str: {str: str}},
}


class FrozenTensors:
    """Leave constant tensors out of checkpoints.

    Tensors of a checkpoint are recognized by their memory. If a parameter was changed after the
    fit, the checkpoint holds everything.

    Args:
        parameters: The constant parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: list[int] = []
        self._digest = ""
        #: Folders in which the file was written or verified.
        self._folders: set[Path] = set()

    def leave_out(self, checkpoint: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return a checkpoint that refers to the tensors; write their file if it is missing.

        Args:
            checkpoint: The checkpoint, which is not changed.
            folder: Folder of the checkpoint.
        """
        if not self._parameters:
            return checkpoint
        sums = checksums(self._parameters)
        if not self._digest:  # once per fit
            self._sums, self._digest = sums, digest(self._parameters)
        if sums != self._sums:  # changed after the fit
            return checkpoint
        names = {place(p.detach()): name for name, p in self._parameters.items()}
        state, left = _without(checkpoint["state_dict"], names)
        callbacks, servers = dict(checkpoint.get("callbacks", {})), dict[str, Any]()
        for key, own in callbacks.items():
            if isinstance(own, dict) and isinstance(own.get("server"), dict):
                server, servers[key] = _without(own["server"], names)
                callbacks[key] = {**own, "server": server}
        if not left and not any(servers.values()):
            return checkpoint
        self._write(folder)
        reference: dict[str, Any] = {"digest": self._digest, "tensors": _kinds(self._parameters)}
        reference |= {"state_dict": left, "servers": servers}
        same = {**checkpoint, "state_dict": state, REFERENCE: reference}
        return same | ({"callbacks": callbacks} if "callbacks" in checkpoint else {})

    def _write(self, folder: Path) -> None:
        path = folder / file_name(self._digest)
        if folder in self._folders and path.exists():
            return
        tensors = {name: p.detach() for name, p in self._parameters.items()}
        if not _is_intact(path, self._digest, tensors):
            # Cloned if the memory holds more than the tensor, which would be saved, too.
            saved = {
                name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t
                for name, t in tensors.items()
            }
            write_atomically(path, lambda file: torch.save(saved, file))
        self._folders.add(folder)


def complete(checkpoint: dict[str, Any], path: str | Path | None, module: nn.Module | None) -> None:
    """Add the frozen tensors to a checkpoint that refers to them, in place.

    Args:
        checkpoint: The checkpoint.
        path: Its path; None if unknown, and then only the module is searched.
        module: Module that may have the same tensors; None reads the file.

    Raises:
        FederationError: If the tensors are not found, or the reference or the file is damaged.
    """
    if REFERENCE not in checkpoint:
        return
    reference = checkpoint.pop(REFERENCE)
    with error_context("its reference to frozen tensors is damaged", Exception):
        compare(reference, _REFERENCE)
        if re.fullmatch("[0-9a-f]{64}", reference["digest"]) is None:
            raise FederationError(f"{reference['digest']!r:.80} is no digest")
        tensors = None if module is None else _of_module(module, reference)
    if tensors is None:
        tensors = _from_file(reference, path)
    callbacks = checkpoint.get("callbacks")
    parts: list[Any] = [("state_dict", checkpoint.get("state_dict"), reference["state_dict"])]
    for key, names in reference["servers"].items():
        own = callbacks.get(key) if isinstance(callbacks, dict) else None
        parts += [(key, own.get("server") if isinstance(own, dict) else None, names)]
    additions: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
    for key, part, names in parts:
        if names and not isinstance(part, dict):
            raise FederationError(f"its frozen tensors are of {key!r:.80}, which it does not have")
        if unknown := sorted({*names.values()} - tensors.keys()):
            raise FederationError(f"its frozen tensors do not include {unknown[0]!r:.80}")
        additions.append((part, {name: tensors[source] for name, source in names.items()}))
    for part, added in additions:  # at last, since parts of a changed file may be the same object
        if added:
            part |= added


def _of_module(module: nn.Module, reference: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the tensors of a module if they have the digest, else None."""
    own, cast = dict(module.named_parameters()), {}
    for name, kind in reference["tensors"].items():
        dtype = getattr(torch, kind["dtype"], None)
        if name not in own or list(own[name].shape) != kind["shape"]:
            return None
        if not isinstance(dtype, torch.dtype):
            return None
        # A precision plugin may convert the module only after the checkpoint is loaded.
        cast[name] = dtype
    is_equal = digest(own, cast) == reference["digest"]
    return {name: own[name].detach() for name in cast} if is_equal else None


def _from_file(reference: Mapping[str, Any], path: str | Path | None) -> dict[str, Tensor]:
    names = list(reference["tensors"])
    what = f"{len(names)} frozen tensors ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
    remedy = (
        "build the module with the weights that it had in the fit, or save with"
        " FederatedLoop(checkpoint_frozen=True)"
    )
    if path is None or "://" in str(path):
        raise FederationError(
            f"the checkpoint was saved without {what}, and the module's own are others: write a"
            " whole checkpoint with lightning_fl.complete_checkpoint(path, output), load it in a"
            f" Trainer with a FederatedLoop, {remedy}"
        )
    file = Path(path).parent / file_name(reference["digest"])
    if not file.is_file():
        raise FederationError(
            f"it was saved without {what}. The module's own are others, and {file} does not exist:"
            f" copy this file from the folder of the run to the checkpoint, {remedy}"
        )
    return _read(file, reference["digest"], reference["tensors"])


def _read(path: Path, wanted: str, kinds: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read and verify a file of frozen tensors."""
    with error_context(f"{path} is damaged, or not a file of frozen tensors", Exception):
        archive_size(path)
        check_sums(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        compare(tensors, {str: Tensor})
        for name, kind in kinds.items():
            tensor = tensors.get(name)
            if tensor is None or type(tensor) is not Tensor or tensor.layout != torch.strided:
                raise FederationError(f"it has no tensor {name!r:.80}")
            if _kinds({name: tensor}) != {name: kind}:
                raise FederationError(f"{name!r:.80} has another shape or data type")
        tensors = {name: tensors[name] for name in kinds}
        if digest(tensors) != wanted:
            raise FederationError("its digest is not that in the name")
    return tensors


def _is_intact(path: Path, wanted: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file of an earlier fit has the tensors."""
    if not path.exists():
        return False
    try:
        _read(path, wanted, _kinds(tensors))
    except FederationError:
        return False
    return True


def digest(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None) -> str:
    """Return a SHA-256 digest of names, data types, shapes and values.

    Args:
        tensors: Tensors by name, in any order.
        dtypes: Data types to which they are converted, by name, for the tensors to include; None
            includes all as they are.

    Example:
        >>> one, two = {"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.float64)}
        >>> digest(one) == digest(two), digest(one, {"w": torch.float64}) == digest(two)
        (False, True)
    """
    sha = hashlib.sha256()
    for name in sorted(tensors if dtypes is None else dtypes):
        tensor = tensors[name].detach()
        tensor = tensor if dtypes is None else tensor.to(dtypes[name])
        sha.update(f"{name}\0{_dtype_name(tensor)}\0{list(tensor.shape)}\0".encode())
        for piece in _pieces(tensor):
            sha.update(piece)
    return sha.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[Any]:
    """Return the bytes of a tensor, in pieces of 64 MiB that are copied to the CPU."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(2**26):
        yield piece.cpu().numpy()


def file_name(digest: str) -> str:
    """Return the name of the file of the tensors with a digest."""
    return f"frozen-{digest}.pt"


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return data type and shape of each tensor."""
    return {n: {"dtype": _dtype_name(t), "shape": list(t.shape)} for n, t in tensors.items()}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _without(
    state: Mapping[str, Any], names: Mapping[Any, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a state without tensors in the given memory, and the names of those left out."""
    left = {
        key: names[at]
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.numel()
        and (at := place(value)) in names
    }
    return {key: value for key, value in state.items() if key not in left}, left
