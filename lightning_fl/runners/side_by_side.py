"""Compiled local steps of single clients, side by side on the cores of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum, auto
from functools import cached_property
from threading import Barrier
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_fl.runners.graphs import SGDGroup, own_code, sgd_groups, sgd_step
from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors
from lightning_fl.runners.stacks import Stacks


class SideBySide:
    """Make the local steps of several clients at the same time, each with its share of the cores.

    Small convolutions do not use several cores well. The step of one client, with the update of
    SGD, is compiled into one graph (``fullgraph``). The calling thread runs the Python code, in
    which torch checks that the graph is still valid. The other threads only get compiled code and
    the tensors of a client, so that they share no Python object of the module.

    In each step, torch checks the graph for the first client. The other clients differ only in the
    values of tensors; see :class:`Checked`.

    Compiled code draws random numbers from seeds. The calling thread draws them in the order of the
    clients, so that results do not depend on the timing of threads.

    Args:
        local: The step.
        stacks: The tensors of the clients, on a CPU.
        optimizer: The optimizer of the stacked parameters, ``torch.optim.SGD``.
        rewrites: Whether to rewrite graphs.
    """

    def __init__(
        self,
        local: LocalStep,
        stacks: Stacks,
        optimizer: torch.optim.Optimizer,
        rewrites: bool = True,
    ) -> None:
        self.local, self.stacks, self.optimizer = local, stacks, optimizer
        self._rewrites = rewrites
        #: Seeds of the step that is being started.
        self._seeds = torch.empty(0)
        #: The last graph that was started, its inputs and its outputs.
        self._called: tuple[Callable[..., list[Tensor]], Sequence[Tensor], list[Tensor]] | None
        #: The graph of the clients of a step, once it was checked.
        self._checked: Checked | None = None
        self._step = torch.compile(
            own_code(seeded_step), dynamic=False, fullgraph=True, backend=self._backend
        )

    @cached_property
    def _threads(self) -> Threads:
        """The threads, one for each client of the first group if there are enough cores."""
        return Threads(self.stacks.count)

    def start(self, row: int, batch: Any) -> Outcome:
        """Start the step of a client, and return its outcome, ``[1, ...]``; see :meth:`wait`.

        Args:
            row: The client.
            batch: Its batch.
        """
        stacks, rows = self.stacks, slice(row, row + 1)
        self._seeds = torch.zeros(MOST_SEEDS, dtype=torch.int64)
        arguments: dict[str, Any] = {
            "seeds": self._seeds,
            "groups": sgd_groups(self.optimizer, stacks.params, rows),
            "batch": tree_map(lambda t: t[None], batch),
            **stacks.leaves(lambda t: t[rows]),
        }
        leaves = tree_leaves(arguments)
        if self._checked is not None and self._checked.fits(leaves):
            return self._checked.start(leaves)
        self._called = None
        with torch.no_grad(), self.local.placeholders():
            outcome, _ = self._step(self.local, **arguments)
        assert isinstance(outcome, Outcome)
        self._checked = checked(leaves, outcome, *self._called) if self._called else None
        return outcome

    def _backend(self, module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph for ``torch.compile``, into a function that starts it in a thread."""
        run, draws = compiled(module, inputs, self._threads.cores, self._rewrites)
        outputs: list[Tensor] = []

        def fill(empty: Sequence[Tensor], tensors: Sequence[Any]) -> None:
            for output, found in zip(empty, run(*tensors), strict=True):
                output.copy_(found)

        def start(*tensors: Any) -> list[Tensor]:
            """Return the outputs, which are complete after :meth:`wait`."""
            if draws is Draws.SEEDS:
                self._seeds.random_()
            if not outputs or draws is Draws.UNKNOWN:
                self._threads.wait()
                outputs[:] = self._threads.start(run, *tensors).result()
                returned = list(outputs)
            else:
                returned = [t.new_empty_strided(t.shape, t.stride()) for t in outputs]
                self._threads.start(fill, returned, tensors)
            self._called = start, tensors, returned
            return returned

        return start

    def wait(self) -> None:
        """Wait for the steps that were started. Their outcomes are not complete before."""
        self._checked = None
        self._threads.wait()

    def close(self) -> None:
        """End the threads."""
        if (threads := vars(self).pop("_threads", None)) is not None:
            threads.close()


class Checked(NamedTuple):
    """A graph that torch has checked for a client, for the other clients of the same step.

    Args:
        graph: Function that starts the graph.
        form: What the clients have in common: everything but the values of tensors.
        inputs: Inputs of the graph: positions among a client's arguments, or tensors of the module.
        outputs: Positions of the graph's outputs in the outcome.
        outcome: Structure of the outcome.
    """

    graph: Callable[..., list[Tensor]]
    form: list[Any]
    inputs: list[int | Tensor]
    outputs: list[int]
    outcome: TreeSpec

    def fits(self, leaves: list[Any]) -> bool:
        """Return whether the graph is that of a client with these arguments."""
        return form_of(leaves) == self.form

    def start(self, leaves: list[Any]) -> Outcome:
        """Start the step of a client, and return its outcome."""
        found = self.graph(*(leaves[at] if type(at) is int else at for at in self.inputs))
        outcome: Outcome = tree_unflatten([found[at] for at in self.outputs], self.outcome)
        return outcome


def checked(
    leaves: list[Any],
    outcome: Outcome,
    graph: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    outputs: list[Tensor],
) -> Checked | None:
    """Return the graph of a step for the other clients; None if the step does more than the graph.

    Args:
        leaves: Arguments of the first client's step.
        outcome: Its outcome.
        graph: Function that starts the graph.
        inputs: Inputs of the graph in the client's step.
        outputs: Outputs of the graph in the client's step.
    """
    found, structure = tree_flatten(outcome)
    given = {id(leaf): at for at, leaf in enumerate(leaves)}
    returned = {id(output): at for at, output in enumerate(outputs)}
    at = [returned.get(id(leaf)) for leaf in found]
    # One output is the seeds; another one would be what the step keeps in the module.
    if None in at or len(set(at)) != len(outputs) - 1:
        return None
    known = [given.get(id(each), each) for each in inputs]
    return Checked(graph, form_of(leaves), known, [i for i in at if i is not None], structure)


def form_of(leaves: list[Any]) -> list[Any]:
    """Return everything but the values of tensors."""
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
        if type(leaf) is Tensor
        else leaf
        for leaf in leaves
    ]


class Draws(Enum):
    """From what a graph draws random numbers."""

    NOTHING = auto()
    #: From the seeds that it gets.
    SEEDS = auto()
    #: From torch's generator, so that clients draw one after another.
    UNKNOWN = auto()


def compiled(
    module: fx.GraphModule, inputs: list[Tensor], cores: int, rewrites: bool
) -> tuple[Callable[..., Any], Draws]:
    """Compile a graph into code that runs without Python's lock.

    Args:
        module: The graph of :func:`seeded_step`.
        inputs: Examples of its inputs.
        cores: Number of cores that the code uses.
        rewrites: Whether to rewrite the graph.

    Returns:
        The code, and from what it draws random numbers.
    """
    # They import torch's compiler.
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    draws: Draws | None = None

    def compile_inner(inner: fx.GraphModule, *args: Any, **how: Any) -> Any:
        nonlocal draws
        draws = use_seeds(inner.graph)
        inner.recompile()
        return compile_fx_inner(inner, *args, **how)

    options: dict[str, Any] = {"cpp_wrapper": True, "cpp.threads": cores}
    known = {**select_decomp_table(), torch.ops.aten.bernoulli.p: bernoulli}
    if rewrites:
        from lightning_fl.runners.rewrites import POOLING, Rewrites

        options["post_grad_custom_post_pass"] = Rewrites()
        known = {operator: known[operator] for operator in known if operator not in POOLING}
    run: Any = compile_fx(module, inputs, compile_inner, options, known)
    if draws is None:
        raise RuntimeError("the code comes from a cache, and may draw random numbers")
    return run, draws


# --- random numbers -------------------------------------------------------------------------------

#: Maximum number of seeds of a graph; each random operation takes one.
MOST_SEEDS = 64


@torch.library.custom_op("lightning_fl::seeds", mutates_args=())
def marked(seeds: Tensor) -> Tensor:
    """Return seeds; :func:`use_seeds` finds them in a graph by this operator."""
    return torch.clone(seeds)


@marked.register_fake
def _(seeds: Tensor) -> Tensor:
    return torch.empty_like(seeds)


def seeded_step(
    local: LocalStep,
    seeds: Tensor,
    groups: list[SGDGroup],
    params: Tensors,
    buffers: Tensors,
    fixed: Tensors,
    batch: Any,
    **how: Any,
) -> tuple[Outcome, Tensor]:
    """Make :func:`sgd_step` of one client with seeds for its random numbers."""
    outcome = sgd_step(local, params, groups, buffers, fixed, batch, None, at_once=False, **how)
    return outcome, marked(seeds)


def bernoulli(like: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Return ones with probability ``p``, and zeros; torch does not compile this for a CPU."""
    if generator is not None:
        return NotImplemented
    return (torch.rand_like(like, dtype=torch.float32) < p).to(like.dtype)


def use_seeds(graph: fx.Graph) -> Draws:
    """Let a graph take its seeds from those of :func:`marked`, instead of torch's generator.

    Args:
        graph: The graph, which is changed in place.
    """
    aten, mark = torch.ops.aten, torch.ops.lightning_fl.seeds.default
    (given,) = graph.find_nodes(op="call_function", target=mark)
    taken = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.prims.inductor_seeds.default):
        count = node.args[0]
        if taken + count > MOST_SEEDS:
            return Draws.UNKNOWN
        with graph.inserting_before(node):
            part = graph.call_function(aten.slice.Tensor, (given.args[0], 0, taken, taken + count))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        taken += count
    tags = (getattr(node.target, "tags", ()) for node in graph.nodes)
    if any(torch.Tag.nondeterministic_seeded in each for each in tags):
        return Draws.UNKNOWN
    return Draws.SEEDS if taken else Draws.NOTHING


# --- threads --------------------------------------------------------------------------------------


class Threads:
    """Run functions in threads that share the cores of the process evenly.

    Args:
        most: Maximum number of threads.
    """

    def __init__(self, most: int) -> None:
        total = torch.get_num_threads()
        self.count = min(total, most)
        #: Number of cores of a thread.
        self.cores = total // self.count
        self._pool = ThreadPoolExecutor(self.count, "client", self._begin)
        self._running: list[Future[Any]] = []
        barrier = Barrier(self.count + 1)
        for _ in range(self.count):
            self._pool.submit(barrier.wait)
        barrier.wait()
        torch.set_num_threads(total)  # each thread has set it for threads that begin later, too

    def _begin(self) -> None:
        torch.set_num_threads(self.cores)
        torch.get_num_threads()  # otherwise, torch would set it anew when it is first needed
        torch.set_grad_enabled(False)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a function in one of the threads."""
        future = self._pool.submit(function, *arguments)
        self._running.append(future)
        return future

    def wait(self) -> None:
        """Wait for all functions, and raise the exception of the first that failed."""
        running, self._running = self._running, []
        wait(running)
        for future in running:
            future.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
