"""The optimizers of local training: fresh for each client, or kept per client."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fl.errors import FederationError
from lightning_fl.runners.optimizer import params_of, tensors_in, with_inner

Rows = Mapping[str, Tensor]
#: Options of each parameter group of an optimizer, by name.
Options = list[dict[str, Any]]

#: Prefixes of the names that :meth:`ClientOptimizer.rows` returns: of tensors and of numbers.
OPTIMIZER_ROWS = ("optimizer.", "number.")
#: Attributes of an optimizer that schedulers set, or that are restored elsewhere.
_OTHERS = {"param_groups", "defaults", "step", "zero_grad", "_opt_called", "_step_count"}
#: Types of the options of parameter groups.
_PLAIN = (bool, int, float, str, tuple, Tensor, type(None))


class ClientOptimizer:
    """Give each client a fresh optimizer, by a deep copy that shares the parameters.

    What the optimizers of ``torch.optim`` learn is in ``state``. Others also store counters and
    estimates in parameter groups, in attributes, or in an inner optimizer (Lookahead). A client
    starts from a copy of all of this from before the first step of the round. An entry of a
    parameter group that changes in a step is learned; the other ones are options, which
    :class:`~lightning_fl.federation.schedulers.Schedulers` restores.

    Args:
        optimizer: The optimizer, before its first step.
        index: Its index among the optimizers of the module.

    Raises:
        FederationError: If the optimizer cannot be copied, or holds a copy of its parameters.
    """

    def __init__(self, optimizer: Optimizer, index: int = 0) -> None:
        self.optimizer, self.optimizers = optimizer, with_inner(optimizer)
        #: Whether everything that it learns is in ``state``, which it makes in its first step.
        self.is_simple = type(optimizer).__module__.startswith("torch.optim.")
        self.is_simple &= not optimizer.state
        #: Prefix of the parameters and groups in names of :meth:`rows`; none for the first one.
        self.prefix = f"{index}:" * bool(index)
        self._has_stepped, self._before = False, list[dict[str, Any]]()
        #: Rates of the groups without the ratio of the client; only in a step of such a client.
        self._own_lr = list[Any]()
        #: Parameters that the client does not train in this step, with their values.
        self.held = list[tuple[Tensor, Tensor]]()
        #: Names of the learned entries of each parameter group, by its index.
        self.learned = defaultdict[int, set[str]](set)
        #: Attributes of each optimizer, and entries of each parameter group, before the first step.
        self._fresh = ([dict[str, Any]()], [dict[str, Any]()])
        if self.is_simple:
            return
        self._fresh, own = self._copied(), {id(param) for param in params_of(optimizer)}
        groups = [each.param_groups for each in self.optimizers]
        if any(id(t) not in own and _varies(t) for t in tensors_in([self._fresh, groups])):
            raise FederationError(
                f"{type(optimizer).__name__} cannot be reset for each client, since it holds a copy"
                " of its parameters from the start: choose another optimizer, or create this state"
                " in optimizer.state in its first step"
            )

    # --- a fresh optimizer ------------------------------------------------------------------------

    def enter_step(self, ratio: float = 1.0) -> None:
        """Set the client's learning rate for this step only, since schedulers also change it.

        Args:
            ratio: Ratio of the client's rate to the optimizer's.
        """
        self.leave_step()  # after an exception inside a step
        if not self.is_simple:
            self._before = [_marked(group) for group in self.optimizer.param_groups]
        if ratio != 1:
            self._own_lr = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * ratio

    def complete_step(self) -> Any:
        """Restore the rates; note the entries of the parameter groups that the step has changed.

        Returns:
            The first group's rate in the step without the ratio, which hooks may have set. A tensor
            is copied instead of read, since reading waits for the device.
        """
        lr = self._own_lr[0] if self._own_lr else self.optimizer.param_groups[0].get("lr", 0.0)
        lr = lr.detach().clone() if isinstance(lr, Tensor) else lr
        self.leave_step()
        with torch.no_grad():
            for param, value in self.held:
                param.copy_(value)
        self._has_stepped = True
        if not self.is_simple:
            for i, (before, group) in enumerate(
                zip(self._before, self.optimizer.param_groups, strict=True)
            ):
                now = _marked(group)
                self.learned[i] |= {n for n in now if n not in before or before[n] != now[n]}
        return lr

    def leave_step(self) -> None:
        """Restore the rates, also after an exception inside a step."""
        if self._own_lr:
            for group, lr in zip(self.optimizer.param_groups, self._own_lr, strict=True):
                group["lr"] = lr
        self._own_lr = []

    def reset(self) -> None:
        """Restore what was there before the first step of the round."""
        if self.is_simple:
            self.optimizer.state.clear()
            return
        if not self._has_stepped:  # what was set since then belongs to all clients
            self._fresh = self._copied()
            return
        self._has_stepped = False
        attributes, groups = copy.deepcopy(self._fresh, self._shared())
        for optimizer, fresh in zip(self.optimizers, attributes, strict=True):
            now = vars(optimizer)
            for name in _own(optimizer).keys() - fresh.keys():
                del now[name]
            now.update(fresh)
        for i, (fresh, group) in enumerate(zip(groups, self.optimizer.param_groups, strict=False)):
            others = (name for name in group if not _is_option(name, group[name]))
            for name in self.learned[i].union(others):
                if name in fresh:
                    group[name] = fresh[name]
                elif name != "params":
                    del group[name]

    def options(self) -> Options:
        """Return a copy of the options of each parameter group."""
        return [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if _is_option(name, value) and name not in self.learned[i]
            }
            for i, group in enumerate(self.optimizer.param_groups)
        ]

    def set_options(self, options: Options) -> None:
        """Restore the options that :meth:`options` returned; groups that came later keep theirs."""
        for group, values in zip(self.optimizer.param_groups, options, strict=False):
            for name, value in values.items():
                group[name] = value.clone() if isinstance(value, Tensor) else value

    def _copied(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        try:
            return copy.deepcopy(([_own(each) for each in self.optimizers], groups), self._shared())
        except Exception as error:  # locks, threads and tensors of a graph raise different kinds
            raise FederationError(
                f"{type(self.optimizer).__name__} cannot be reset for each client, since it cannot"
                f" be copied ({error}): choose another optimizer"
            ) from error

    def _shared(self) -> dict[int, Any]:
        """Return what copies share: parameters, optimizers, their groups, and modules."""
        shared: list[Any] = [*params_of(self.optimizer), *self.optimizers]
        for each in self.optimizers:
            shared += [each.param_groups, *each.param_groups]
            shared += [value for value in vars(each).values() if isinstance(value, nn.Module)]
        return {id(value): value for value in shared}

    # --- state kept per client --------------------------------------------------------------------

    def rows(self) -> dict[str, Tensor]:
        """Return what ``optimizer.state_dict()`` saves as tensors, without options.

        Names are ``optimizer.<parameter>.<name>`` and ``optimizer.group<index>.<name>``; Python
        numbers have the prefix ``number`` instead. Of a second optimizer, ``<parameter>`` is
        ``1:<parameter>``.

        Raises:
            FederationError: If a value is neither a tensor nor a number.
        """
        saved = self.optimizer.state_dict()
        rows: dict[str, Tensor] = {}
        for index, entries in saved["state"].items():
            if not isinstance(index, int) or not isinstance(entries, dict):
                raise self._not_kept("state without a parameter")
            for name, value in entries.items():
                rows |= self._row(f"{self.prefix}{index}.{name}", value)
        for index, group in enumerate(saved["param_groups"]):
            for name in sorted(self.learned[index] & group.keys()):
                rows |= self._row(f"{self.prefix}group{index}.{name}", group[name])
        return rows

    def _row(self, name: str, value: Any) -> dict[str, Tensor]:
        if value is None:
            return {}
        if isinstance(value, Tensor):
            return {f"optimizer.{name}": value.detach()}
        if isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else None
            return {f"number.{name}": torch.tensor(value, dtype=dtype)}
        raise self._not_kept(f"{name.partition('.')[2]}, which is not a tensor")

    def load(self, rows: Rows) -> None:
        """Load the tensors of :meth:`rows` into the fresh optimizer; leave out those of others."""
        self._has_stepped = True  # it is not fresh, even if the client makes no step
        saved = self.optimizer.state_dict()
        state = {index: dict(entries) for index, entries in saved["state"].items()}
        for name, row in rows.items():
            kind, where, key = name.split(".", 2)
            if where[: where.find(":") + 1] != self.prefix:
                continue
            where = where.removeprefix(self.prefix)
            value = row.item() if kind == "number" else row.clone()
            if where.startswith("group"):
                index = int(where.removeprefix("group"))
                saved["param_groups"][index][key] = value
                self.learned[index].add(key)
            else:
                state.setdefault(int(where), {})[key] = value
        self.optimizer.load_state_dict({**saved, "state": state})

    def _not_kept(self, what: str) -> FederationError:
        return FederationError(
            f"optimizer_state='keep' does not support {type(self.optimizer).__name__}: it holds"
            f" {what}. Choose optimizer_state='reset' or another optimizer"
        )


class ClientOptimizers:
    """The optimizers of a client: one, or several if the module optimizes manually.

    Args:
        optimizers: The optimizers, before their first steps.

    Raises:
        FederationError: See :class:`ClientOptimizer`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.each = [ClientOptimizer(optimizer, i) for i, optimizer in enumerate(optimizers)]

    def reset(self) -> None:
        """Restore what was there before the first step of the round."""
        for each in self.each:
            each.reset()

    def options(self) -> list[Options]:
        """Return a copy of the options of each parameter group of each optimizer."""
        return [each.options() for each in self.each]

    def set_options(self, options: Sequence[Options]) -> None:
        """Restore the options that :meth:`options` returned."""
        for each, of_optimizer in zip(self.each, options, strict=False):
            each.set_options(of_optimizer)

    def rows(self) -> dict[str, Tensor]:
        """Return what the optimizers have learned; see :meth:`ClientOptimizer.rows`."""
        return {name: row for each in self.each for name, row in each.rows().items()}

    def load(self, rows: Rows) -> None:
        """Load the tensors of :meth:`rows` into the fresh optimizers."""
        for each in self.each:
            each.load(rows)

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all optimizers, with the prefix of the names of their rows."""
        for each in self.each:
            for i, param in enumerate(params_of(each.optimizer)):
                yield f"optimizer.{each.prefix}{i}.", param


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that may be a part of what it learns."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OTHERS and not name.startswith("_optimizer_")
    }


def _is_option(name: str, value: Any) -> bool:
    return name != "params" and isinstance(value, _PLAIN)


def _marked(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that compare unequal once an option of a parameter group has changed."""
    return {
        name: (id(value), value._version) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if _is_option(name, value)
    }


def _varies(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())
