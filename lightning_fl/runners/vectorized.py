"""The local step of several clients: at once with ``vmap``, or one after another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners.attributes import left_alone
from lightning_fl.runners.graphs import Graphs, can_update, graphs_made, sgd_update
from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors, gradients_of
from lightning_fl.runners.optimizer_values import rates_scaled
from lightning_fl.runners.samples import Padded, Samples, copied
from lightning_fl.runners.side_by_side import SideBySide
from lightning_fl.runners.stacks import Stacks
from lightning_fl.runners.tensors import beside, placed, scattered, select
from lightning_fl.types import FederationError, first_line

#: Maximum number of batch shapes to compile.
MOST_GRAPHS = 2


class VectorizedStep:
    """Compute the losses of a local step of all clients, ready for the backward pass.

    Args:
        stacks: The tensors of the clients.
        optimizer: The optimizer of the stacked parameters.
        rewrites: Whether to rewrite compiled graphs for a CPU.
    """

    def __init__(
        self, stacks: Stacks, optimizer: torch.optim.Optimizer, rewrites: bool = True
    ) -> None:
        module = stacks.module
        self.stacks, self.module, self.optimizer = stacks, module, optimizer
        self.local = LocalStep(module, stacks.tensors.constants)
        #: Whether smaller batches are padded with samples of weight 0.
        self.weighted = getattr(module, "federated_knows_weights", False) and not any(
            isinstance(m, _BatchNorm) for m in module.modules()
        )
        #: Compiled forms of the step, or None.
        self.graphs: Graphs | None = None
        #: The compiled step of one client, for clients that train one after another, or None.
        self.side_by_side: SideBySide | None = None
        #: Ratios of the clients' learning rates to the optimizer's; empty if all rates are equal.
        self.rate_ratios: Sequence[float] = ()
        #: Whether the last step has also updated the parameters.
        self.has_updated = False
        #: Clients with a gradient, ``[k]``, of each parameter of which another client has none.
        self.partial: Tensors = {}
        #: Whether to compile for batch shapes, by :func:`shape_of`. If clients train at once, the
        #: first has been checked by :func:`tune`.
        self.shapes: dict[str, bool] = {}
        self._gradients: Tensors = {}
        self._rewrites = rewrites
        self._has_warned = False

    def compile(self) -> None:
        """Compile forward and backward pass into one graph per batch shape."""
        self.graphs = Graphs(self.local, self.optimizer, self._rewrites)

    def compile_one(self) -> None:
        """Compile the step of one client into one graph per batch shape; see `SideBySide`."""
        self.side_by_side = SideBySide(self.local, self.stacks, self.optimizer, self._rewrites)

    def discard_one(self) -> None:
        """Return to the step of one client that is not compiled."""
        self.close()
        self.side_by_side = None

    def close(self) -> None:
        """End the threads of the compiled step of one client."""
        if self.side_by_side is not None:
            self.side_by_side.close()

    def loss(self, samples: Samples, active: Tensor, updates: bool) -> tuple[Tensor, Outcome]:
        """Make the forward pass of all clients, and update the buffers of the active clients.

        Args:
            samples: The samples of each client.
            active: Mask of the clients that still train, ``[k]``.
            updates: Whether the step may also update the parameters, as SGD would.

        Returns:
            The sum of losses, for the backward pass, and the outcome of the step.
        """
        self.has_updated, self.partial = False, {}
        if not self.stacks.maps or not self._can_stack(samples):
            return self.one_by_one(samples, active, updates)
        total, outcome = self.mapped(samples, active, updates)
        for name, buffer in outcome.buffers.items():
            after = buffer.detach()
            if not active.all():
                after = torch.where(beside(active, after), after, self.stacks.buffers[name])
            self.stacks.buffers[name] = after
        return total, outcome

    def _can_stack(self, samples: Samples) -> bool:
        """Return whether batches can be stacked; warn once if they cannot."""
        why = samples.why_not_stacked()
        if why is not None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(self.module).__name__} trains its clients one after another in such steps,"
                f" not at once: {why}"
            )
        return why is None

    # --- one client after another -----------------------------------------------------------------

    def one_by_one(self, samples: Samples, active: Tensor, updates: bool) -> tuple[Tensor, Outcome]:
        """Make the clients' steps one after another, each with its backward pass.

        Each step runs on the module itself, with the client's tensors in place. A client that is
        done makes no step, since a module may count its steps. See :meth:`loss`.
        """
        if isinstance(samples, Padded) and self.stacks.channels_last:
            samples = samples._replace(tensors=tree_map(self.stacks.laid_out, samples.tensors))
        rows, outcomes, started = active.nonzero()[:, 0], list[Outcome](), list[int]()
        trained: dict[str, list[int]] = {}
        self.has_updated = updates and can_update(self.optimizer)
        for row in rows.tolist():
            batch = samples.client(row)
            if self.has_updated and (begun := self._start(row, batch)) is not None:
                started.append(len(outcomes))
                outcomes.append(begun)
                continue
            with self.stacks.client(row), self._rate(row), torch.enable_grad():
                outcome, grads = self.local.by_itself({}, batch)
            if self.has_updated:
                sgd_update(self.optimizer, self.stacks.params, row, grads)
                grads = {}
            for name, grad in grads.items():
                self._gradient_memory(name)[row] = grad
                trained.setdefault(name, []).append(row)
            outcomes.append(tree_map(lambda t: t.detach(), outcome))
        if self.side_by_side is not None:
            self.side_by_side.wait()
        for i in started:
            outcomes[i] = self._finish(int(rows[i]), outcomes[i])
        self._check_logs(outcomes)
        known = {name: self._gradient_memory(name) for name in trained}
        for name, clients in trained.items():
            for other in set(range(self.stacks.count)).difference(clients):
                known[name][other] = 0
        self._note_partial(trained, len(rows))
        stacked = tree_map(lambda *t: scattered(torch.stack(t), rows, self.stacks.count), *outcomes)
        return _with_gradients(stacked.loss, self.stacks.params, known), stacked

    def _rate(self, row: int) -> AbstractContextManager[None]:
        """Return a context with the learning rate of a client, for a step that reads it."""
        groups = self.optimizer.param_groups if self.rate_ratios else []
        return rates_scaled(groups, self.rate_ratios[row] if groups else 1.0)

    def _check_logs(self, outcomes: list[Outcome]) -> None:
        """Refuse names that a step logs for some of the clients only."""
        first, *others = (set(outcome.logs) for outcome in outcomes)
        if some := first.union(*others) - first.intersection(*others):
            raise FederationError(
                f"{type(self.module).__name__}.training_step logs {sorted(some)} in the step of"
                " some clients only, as their batches differ. Clients of a group must log the same"
                " names in a step: log these in each step, or train the module without"
                " VectorizedClients"
            )

    def _start(self, row: int, batch: Any) -> Outcome | None:
        """Start the compiled step of a client; None if there is no graph for its batch."""
        side = self.side_by_side
        if side is None or not self._is_worth_one(side, row, batch):
            return None
        before = graphs_made()
        try:
            begun = side.start(row, batch)
        except Exception as error:  # torch.compile and the compilers below it fail in many ways
            side.wait()
            self.discard_one()
            rank_zero_info(f"The step of a client is not compiled: {first_line(error)}")
            return None
        if graphs_made() != before:
            side.wait()  # the trial restores the tensors of all clients
            self._uses_all(self.tried(row, batch))
        return begun

    def _finish(self, row: int, outcome: Outcome) -> Outcome:
        """Keep the buffers of a compiled step for its client; return the rest of its outcome."""
        for name, buffer in outcome.buffers.items():
            self.stacks.buffers[name][row].copy_(buffer[0])
        found: Outcome = tree_map(lambda t: t[0], outcome._replace(buffers={}))
        return found

    def _is_worth_one(self, side: SideBySide, row: int, batch: Any) -> bool:
        """Return whether to compile a client's step for a batch's shape: only the first ones.

        A graph returns zeros for a parameter without a gradient, so that a trial looks for them.
        """
        shape = shape_of(batch)
        if shape not in self.shapes and len(self.shapes) < MOST_GRAPHS:
            side.wait()  # the trial restores the tensors of all clients
            unused = self.unused(self.tried(row, batch))
            is_dense = all(
                type(leaf) is Tensor and leaf.layout == torch.strided for leaf in tree_leaves(batch)
            )
            self.shapes[shape] = is_dense and not unused
        return self.shapes.get(shape, False)

    def tried(self, row: int, batch: Any) -> Tensors:
        """Return the gradients of a client's step that is not compiled, which changes nothing.

        Args:
            row: The client.
            batch: Its batch.
        """
        with self.undone(), self.stacks.client(row):
            return self.local.by_itself({}, copied(batch))[1]

    def tried_first(self, samples: Samples) -> Tensors:
        """Return the gradients of the first client that makes a step; see :meth:`tried`."""
        row = next(i for i in range(self.stacks.count) if samples.client(i) is not None)
        return self.tried(row, samples.client(row))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a step does to the module, its clients and the random numbers."""
        with (
            left_alone(self.module),
            seeded_rng(0, self.module.device),
            self.stacks.untouched(),
            torch.enable_grad(),
        ):
            yield

    def _note_partial(self, trained: Mapping[str, list[int]], count: int) -> None:
        """Note the parameters with a gradient of only some of the clients.

        Args:
            trained: Clients with a gradient, by the name of the parameter.
            count: Number of clients that make a step.
        """
        for name, clients in trained.items():
            if len(clients) < count:
                self.partial[name] = torch.zeros(self.stacks.count, dtype=torch.bool)
                self.partial[name][clients] = True

    def _gradient_memory(self, name: str) -> Tensor:
        """Return memory for a gradient; it is reused, since allocating takes longer than a copy."""
        param = self.stacks.params[name]
        if name not in self._gradients or self._gradients[name].shape != param.shape:
            self._gradients[name] = torch.empty_like(param)
        return self._gradients[name]

    # --- vectorized -------------------------------------------------------------------------------

    def mapped(self, samples: Samples, active: Tensor, updates: bool) -> tuple[Tensor, Outcome]:
        """Make the step of all clients at once, or one after another if that fails.

        The first step was checked, but a later step may use operations that ``vmap`` does not
        support.
        """
        versions = self.stacks.versions()
        try:
            if isinstance(samples, Padded) and samples.is_full:
                return self._all(samples.tensors, None, updates)
            # A graph would also update clients that are done.
            whole = updates and bool(active.all())
            if isinstance(samples, Padded) and self.weighted and len(samples.sizes.unique()) > 1:
                return self._all(samples.tensors, self._weights(samples), whole)
            return self._groups(samples.groups(), whole)
        except Exception as error:
            if versions != self.stacks.versions():
                raise  # the step has already written to parameters
            self.stacks.train_one_by_one()
            result = self.one_by_one(samples, active, updates)
            rank_zero_warn(
                f"{type(self.module).__name__} is trained one client after another from here on,"
                f" not at once: {first_line(error)}"
            )
            return result

    def _weights(self, samples: Padded) -> Tensor:
        """Return the weights of the samples in the mean of their client, ``[k, B]``; 0 of padding.

        Without weights, padding would change the means.
        """
        most, sizes = tree_leaves(samples.tensors)[0].shape[1], samples.sizes[:, None]
        weight = (torch.arange(most) < sizes).double() / sizes
        return placed(weight.to(self.stacks.first.dtype.to_real()), self.stacks.first)

    def _groups(self, groups: list[tuple[Tensor, Any]], updates: bool) -> tuple[Tensor, Outcome]:
        """Make the step of each group of clients with batches of the same shape."""
        if len(groups) == 1 and len(groups[0][0]) == self.stacks.count:
            return self._all(groups[0][1], None, updates)
        outcomes, trained = [], dict[str, list[int]]()
        for rows, batch in groups:
            outcome, names = self._some(rows, batch)
            outcomes.append(outcome)
            for name in names:
                trained.setdefault(name, []).extend(rows.tolist())
        total = torch.stack([outcome.loss.sum() for outcome in outcomes]).sum()
        at = torch.cat([rows for rows, _ in groups])
        self._note_partial(trained, len(at))
        return total, tree_map(lambda *t: scattered(torch.cat(t), at, self.stacks.count), *outcomes)

    def _some(self, rows: Tensor, batch: Any) -> tuple[Outcome, list[str]]:
        """Make the step of some clients; their batches are ``[len(rows), ...]``.

        Returns:
            The outcome, and the names of the parameters that get a gradient.
        """
        stacks = self.stacks
        own = stacks.arguments(partial(select, rows=rows))
        params: Tensors = own["params"]
        outcome = self.local.many(**own, batch=batch, weight=None, at_once=True)
        for name, param in stacks.params.items():  # the step may write, as an EMA teacher does
            if params[name]._version:
                param.data.index_copy_(0, placed(rows, param), params[name].detach())
        return outcome, used(outcome.loss, params)

    def _all(self, batch: Any, weight: Tensor | None, updates: bool) -> tuple[Tensor, Outcome]:
        """Make the step of all clients; their batches are ``[k, ...]``."""
        stacks = self.stacks
        params: Tensors = dict(stacks.params)
        tensors = (params, stacks.buffers, stacks.fixed, batch, weight)
        how: dict[str, Any] = {"fixed_is_shared": stacks.fixed_is_shared, "at_once": True}
        how["hyperparameters"] = stacks.hyperparameters
        if self.graphs is not None and self._is_worth_a_graph(batch):
            before = graphs_made()
            try:
                made = self._compiled(self.graphs, updates, *tensors, **how)
            except Exception as error:  # torch.compile and the compilers below it fail in many ways
                self.graphs = None
                rank_zero_warn(
                    f"the vectorized step is not compiled: {type(error).__name__}: {error}"
                )
            else:
                if graphs_made() == before or self._uses_all(self._tried_at_once(batch, weight)):
                    return made
                self.shapes[shape_of(batch)] = False
        outcome = self.local.many(*tensors, **how)
        if self.graphs is not None and len(self.shapes) < MOST_GRAPHS:
            # A graph returns zeros for a parameter without a gradient.
            self.shapes[shape_of(batch)] = not self.unused(used(outcome.loss, params))
        return outcome.loss.sum(), outcome

    def _tried_at_once(self, batch: Any, weight: Tensor | None) -> Tensors:
        """Return the gradients of a step of all clients, which changes nothing."""
        with self.undone():
            own = self.stacks.arguments(lambda t: t)
            outcome = self.local.many(**own, batch=copied(batch), weight=weight, at_once=True)
            return gradients_of(outcome.loss.sum(), own["params"])

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the trained parameters that are not among those that a step uses."""
        params = self.stacks.params.items()
        return [name for name, p in params if p.requires_grad and name not in names]

    def _uses_all(self, names: Collection[str]) -> bool:
        """Return whether a new graph uses all parameters that it may change.

        A graph returns zeros for the others, with which momentum and weight decay would change
        them. It is made anew if the step depends on a number that changes, such as the round.

        Args:
            names: The parameters that the step uses.

        Raises:
            FederationError: If the graph has already changed others.
        """
        unused = self.unused(names)
        is_plain = type(self.optimizer) is torch.optim.SGD and not any(
            group["momentum"] or group["weight_decay"] for group in self.optimizer.param_groups
        )
        if not unused or is_plain:
            return True
        if self.has_updated:
            raise FederationError(
                f"{type(self.module).__name__}.training_step does not use {unused[0]} in this"
                " round, and the compiled step has changed it all the same, by momentum or weight"
                " decay: train with VectorizedClients(compile=False)"
            )
        return False

    def _compiled(
        self, graphs: Graphs, updates: bool, *tensors: Any, **how: Any
    ) -> tuple[Tensor, Outcome]:
        """Make a compiled step, which yields gradients or also updates the parameters."""
        grads: Tensors = {}
        with torch.no_grad():
            if updates and can_update(self.optimizer):
                outcome = graphs.update(*tensors, **how)
                self.has_updated = True
            else:
                grads, outcome = graphs.gradients(*tensors, **how)
        return _with_gradients(outcome.loss, self.stacks.params, grads), outcome

    def _is_worth_a_graph(self, batch: Any) -> bool:
        """Return whether to compile for a batch's shape: only the first shapes are frequent.

        A step with another shape than the first is made once without a graph, to see whether it
        uses all parameters.
        """
        if not self.shapes:
            self.shapes[shape_of(batch)] = True
        return self.shapes.get(shape_of(batch), False)


def shape_of(batch: Any) -> str:
    """Return the shapes of a batch's tensors."""
    return str([list(t.shape) if isinstance(t, Tensor) else type(t) for t in tree_leaves(batch)])


def used(loss: Tensor, params: Tensors) -> list[str]:
    """Return the names of the trained parameters in the graph of a loss, which is kept."""
    nodes, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in nodes:
            nodes.add(node)
            waiting += [node for node, _ in node.next_functions]
    return [
        name
        for name, param in params.items()
        if param.requires_grad and torch.autograd.graph.get_gradient_edge(param).node in nodes
    ]


class _Known(torch.autograd.Function):
    """Assign known gradients to parameters in the backward pass of a loss.

    They bypass autograd, which would copy each of them.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, params: list[nn.Parameter], grads: list[Tensor]
    ) -> Tensor:
        ctx.params, ctx.grads = params, grads
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, ...]:
        scale, grads = outer[0], ctx.grads
        # Reading the scale would wait for a GPU, so there gradients are multiplied even by 1.
        if grads and (scale.device.type != "cpu" or scale != 1):
            grads = torch._foreach_mul(grads, scale)
        for param, grad in zip(ctx.params, grads, strict=True):
            param.grad = grad if param.grad is None else param.grad + grad
        return (None,) * 4


def _with_gradients(
    loss: Tensor, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
) -> Tensor:
    """Return the sum of losses; its backward pass yields the given gradients."""
    anchor = next(param for param in params.values() if param.requires_grad)
    wanted = [params[name] for name in grads]
    total: Tensor = _Known.apply(anchor, loss, wanted, list(grads.values()))
    return total
