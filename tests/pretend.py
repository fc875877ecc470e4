"""A pretend accelerator, ``pretend:0``: its tensors lie on the CPU, and behave as a GPU's do.

``install`` makes it known to torch, for the rest of the process: use a process of its own, as
``tests/test_accelerator.py`` does. It imitates what breaks or stalls on a GPU:

* An operation on tensors of two devices is an error, as is a CPU generator for a device tensor.
  Allowed, as on a GPU, are copies, numbers (CPU tensors without dimensions) and CPU indices.
* ``waits`` records each time that Python waits for the device, with its cause and its place in the
  code: a value that is read (``item``, ``if tensor:``, ``tolist``, printing), a copy to the CPU,
  a copy to the device (but for ``non_blocking`` ones), and a result whose shape depends on values
  (``nonzero``, ``unique``, boolean indices). On a GPU all work that was launched before has to end.

Not imitated: speed, streams, pinned memory, CUDA graphs, ``torch.compile``, several devices, a
generator of its own (it draws from the CPU's), and waits inside of kernels (``torch.linalg``).
Pickled, a tensor becomes one of the CPU.

Based on torch's wrapper subclasses (``__torch_dispatch__``) and its backends in Python
(``torch.utils.backend_registration._setup_privateuseone_for_python_backend``, from torch 2.10 on).
"""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

NAME = "pretend"
#: Function of torch that makes it known, from torch 2.10 on.
SETUP = "_setup_privateuseone_for_python_backend"
#: Operations that may have tensors of both devices.
_COPIES = ("_to_copy", "copy_", "_foreach_copy_", "_copy_from")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
#: Those that accept no number from the CPU, which others do.
_JOINS = ("stack", "cat")
#: Those whose result has a shape that depends on values; ``index`` only with a boolean index.
_SHAPES = torch.Tag.dynamic_output_shape
_VALUES = torch.Tag.data_dependent_output

_recorders: list[Counter] = []


class PretendTensor(Tensor):
    """A tensor on the pretend device.

    Args:
        host: The CPU tensor that holds its values.
    """

    @staticmethod
    def __new__(cls, host):
        tensor = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.host = host
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, *args, **(kwargs or {}))

    def __reduce_ex__(self, protocol):
        _record("copy to the CPU")
        return self.detach().host.__reduce_ex__(protocol)


def _run(op, *args, **kwargs):
    """Run an operation of torch on the tensors behind those of the device."""
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    ours = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type != NAME
    _check_devices(op, leaves, ours, args, to_host)
    if (cause := _wait(op, leaves, ours, args, kwargs, to_host)) is not None:
        _record(cause)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs = {name: _map(_host, value) for name, value in kwargs.items()}
    found = op(*_map(_host, args), **kwargs)
    if to_host or not (ours or device is not None):
        return found
    same = {id(tensor.host): tensor for tensor in ours}
    # In place, the result is the tensor that was given: on the CPU, too.
    if ours and found is not None and _written(op, args) is found and id(found) not in same:
        return found

    def wrapped(value):
        if not isinstance(value, Tensor):
            return value
        if (known := same.get(id(value))) is None:
            return PretendTensor(value)
        if known.shape != value.shape:  # squeeze_, in a product of a vector and a matrix
            Tensor.data.__set__(known, PretendTensor(value))
            known.host = value
        return known

    return _map(wrapped, found)


def _leaves(values):
    """Yield what operations are given, without the lists around it."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _map(function, value):
    """Apply a function to what operations are given, or return, and to what is in lists."""
    if isinstance(value, list | tuple):
        return type(value)([_map(function, part) for part in value])
    return function(value)


def _host(value):
    return value.host if isinstance(value, PretendTensor) else value


@cache
def _name(op):
    return op.__name__.split(".")[0]


def _written(op, args):
    """Return the tensor that an operation writes to."""
    is_in_place = _name(op).endswith("_") and args and isinstance(args[0], Tensor)
    return args[0] if is_in_place else None


def _check_devices(op, leaves, ours, args, to_host):
    name = _name(op)
    on_device = bool(ours) or any(
        isinstance(leaf, torch.device) and leaf.type == NAME for leaf in leaves
    )
    if on_device and not to_host:
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf.device.type == "cpu":
                raise RuntimeError(f"Expected a '{NAME}' device type for generator: {op}")
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_of_the_cpu(leaf)]
    if not ours or not others or name in _COPIES:
        return
    if name in _INDEXING and isinstance(args[0], PretendTensor):
        others = [value for value in _leaves(args[2:]) if _is_of_the_cpu(value)]
    allowed = [other for other in others if not other.ndim and name not in _JOINS]
    written = _written(op, args)
    if len(allowed) < len(others) or any(written is other for other in others):
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {op} has tensors of"
            f" {[tuple(tensor.shape) for tensor in ours]} on {NAME}:0 and of"
            f" {[tuple(other.shape) for other in others]} on cpu"
        )


def _is_of_the_cpu(value):
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _wait(op, leaves, ours, args, kwargs, to_host):
    """Return why Python would wait for a GPU in an operation; None if it would not."""
    name = _name(op)
    if name in _COPIES:
        if ours and (to_host or any(map(_is_of_the_cpu, _leaves(args[:1])))):
            return "copy to the CPU"
        others = [leaf for leaf in leaves if _is_of_the_cpu(leaf) and leaf.numel()]
        is_async = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        return "copy to the device" if others and not to_host and not is_async else None
    if not ours:
        return None
    if name in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        is_filled = name != "index" and args[2].numel() == 1 and len(masks) == len(indices) == 1
        if masks and not is_filled:
            return "boolean index"
        return "copy to the device" if any(map(_is_of_the_cpu, indices)) else None
    if _VALUES in op.tags:
        return "read"
    return "shape" if _SHAPES in op.tags else None


def _record(cause):
    if not _recorders:
        return
    place = _place()
    for recorder in _recorders:
        recorder[cause, place] += 1


def _place():
    """Return the line that waits: the last one that is neither torch's nor this file's."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path != Path(__file__) and path.suffix == ".py":
            return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"


@contextmanager
def waits():
    """Count the waits for the device by cause and place, in the ``with`` block.

    Example:
        >>> with waits() as found:
        ...     pass
        >>> found.total()
        0
    """
    recorder = Counter()
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders[:] = [other for other in _recorders if other is not recorder]


def _as_tensors(index):
    """Return lists in an index as tensors, which torch would make on the device."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


_MAKERS = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
_ITEMS = {Tensor.__getitem__, Tensor.__setitem__}
_READS = {Tensor.tolist, Tensor.__format__, Tensor.__repr__}
_MEMORY = {Tensor.data_ptr, Tensor.untyped_storage}
_ARRAYS = {Tensor.numpy, Tensor.__array__}


class _PretendFunctions(TorchFunctionMode):
    """What torch does in C++ with a tensor's memory, past the dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _MAKERS:
            return _made(func, args, kwargs)
        tensor = args[0] if args else None
        if not (isinstance(tensor, Tensor) and tensor.device.type == NAME):
            return func(*args, **kwargs)
        rest = args[1:]
        if func in _ITEMS:
            return func(tensor, _as_tensors(rest[0]), *rest[1:])
        if func in _READS:
            if isinstance(tensor, PretendTensor):
                _record("read")
                return func(tensor.detach().host, *rest, **kwargs)
        elif func in _MEMORY:
            if isinstance(tensor, PretendTensor):
                return func(tensor.host)
        elif func in _ARRAYS:
            raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy: use Tensor.cpu()")
        found = func(*args, **kwargs)
        if func == Tensor.data.__set__:  # a new object each time
            tensor.host = rest[0].detach().host
        return found


def _made(func, args, kwargs):
    """Make a tensor of data on the CPU, and copy it."""
    if func is Tensor.new_tensor:
        like, *args = args
        kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
    device = kwargs.get("device")
    data = args[0] if args else kwargs.get("data")
    if device is None and isinstance(data, Tensor) and func is torch.as_tensor:
        return func(*args, **kwargs)
    if device is None or torch.device(device).type != NAME:
        func = torch.tensor if func is Tensor.new_tensor else func
        return func(*args, **kwargs)
    if isinstance(data, Tensor):  # as_tensor keeps what is there already
        return data.to(device, kwargs.get("dtype") or data.dtype)
    requires_grad = kwargs.pop("requires_grad", False)
    host = torch.tensor(*args, **{**kwargs, "device": "cpu"})
    return host.to(device).requires_grad_(requires_grad)


class PretendAccelerator(CPUAccelerator):
    """What Lightning asks of an accelerator."""

    def setup_device(self, device): ...

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME, 0)]

    @staticmethod
    def name():
        return NAME


@cache
def install():
    """Make the device known to torch, for the rest of the process, and return it."""
    getattr(backend_registration, SETUP)(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, dispatch_key="PrivateUse1")
    install.kept = library, _PretendFunctions()  # undone when they are garbage
    install.kept[1].__enter__()
    return torch.device(NAME, 0)


@contextmanager
def unwatched():
    """Run what stays on the CPU, in the ``with`` block, without a look at each of its functions."""
    install()
    mode = install.kept[1]
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
