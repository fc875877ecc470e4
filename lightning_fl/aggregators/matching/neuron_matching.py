"""Base class of rules that merge client networks by matching neurons."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.aggregators.matching.assignments import assignment_table, read_table
from lightning_fl.aggregators.matching.client_networks import ClientNetworks
from lightning_fl.aggregators.matching.layer_stack import Layers, LayerStack
from lightning_fl.aggregators.matching.search import candidates, narrowest
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.networks import MatchedNetwork, MatchingOptions
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.functional.tables import PLACES, with_place
from lightning_fl.options import check_integer, check_number, check_that, is_list


class NeuronMatching(Aggregator):
    r"""Base class of rules that merge independently trained networks by matching their neurons.

    Each client starts from its own network. After a round, the hidden neurons of all clients are
    matched layer by layer and merged. The widths of the merged network are inferred. The module
    holds the merged network for validation, testing and saving, and client networks for training.

    Options that are None are searched. Among all combinations with a merged network within
    ``tolerance`` of the best training accuracy (on the clients of the round), the narrowest network
    is selected.

    The search values and the defaults of ``std``, ``bias_mean`` and ``sweeps`` are from
    the authors' program (IBM/probabilistic-federated-neural-matching). Where the program differs
    from the paper, the default follows the paper: the program uses ``popularity=1``, and the
    paper's equations give 2. There are no limits by default: the program uses ``cap=10`` and
    ``max_width=700``, and selects the best training accuracy of a search (``tolerance=0``).

    Args:
        gamma: Concentration :math:`\gamma_0`. Larger values give wider networks.
        client_variance: Variance :math:`\sigma^2` of client weights around the atom.
        prior_variance: Variance :math:`\sigma_0^2` of atoms around the prior mean.
        widths: Hidden widths of the client networks: client ``i`` has ``widths[i % len(widths)]``
            neurons in each hidden layer, at most as many as the module. None uses the widths of the
            module.
        std: Standard deviation of the initial weights. Initial biases are ``bias_mean``. None uses
            the default initialization of the layers.
        bias_mean: Prior mean of biases.
        sweeps: Number of sweeps over clients in the first round. Later rounds use at most three.
        popularity: Weight of the number of other clients that have an atom; see
            :class:`~lightning_fl.functional.neuron_matching.Process`.
        cap: Upper bound on the counts of an atom. None means no bound.
        max_width: Width of a merged layer from which each client may add only one neuron (or as
            many as it has more than the layer). None means no limit.
        tolerance: Maximum loss of training accuracy in the search for the narrowest network.
        seed: Seed of initial networks and client orders. None uses the seed of the run.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module has
            hidden neurons that cannot be matched.
    """

    #: Buffers with shapes that depend on the matching.
    grown: ClassVar[tuple[str, ...]] = ("starts", "known", "merged", "shapes", "places")
    #: True if later rounds keep the options found by the search of the first round.
    searches_once: ClassVar[bool] = False
    starts: Tensor
    base: Tensor
    merged: Tensor
    shapes: Tensor
    places: Tensor
    known: Tensor
    round: Tensor
    chosen: Tensor

    def __init__(
        self,
        gamma: float | None = None,
        client_variance: float | None = None,
        prior_variance: float | None = None,
        widths: Sequence[int] | None = None,
        std: float | None = 0.1,
        bias_mean: float = 0.1,
        sweeps: int = 5,
        popularity: float = 2.0,
        cap: int | None = None,
        max_width: int | None = None,
        tolerance: float = 0.005,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        is_right = widths is None or (is_list(widths) and len(widths) > 0)
        check_that("widths", widths, is_right, "a non-empty list of numbers")
        for i, width in enumerate(widths or ()):
            check_integer(f"widths[{i}]", width, min=1)
        searched = gamma, client_variance, prior_variance
        self.gamma, self.client_variance, self.prior_variance = searched
        self.widths = widths
        self.std = check_number("std", std, min=0, optional=True)
        self.bias_mean, self.sweeps, self.popularity = bias_mean, sweeps, popularity
        self.cap, self.max_width = cap, max_width
        self.tolerance = check_number("tolerance", tolerance, min=0)
        self.seed = check_integer("seed", seed, min=0, optional=True)
        first, second, third = (1.0 if value is None else value for value in searched)
        self._options(first, second, third)  # checks them
        self.chain: LayerStack | None = None
        self._in_training: ClientNetworks | None = None
        self._returned: tuple[Tensor, list[Layers]] | None = None
        self._merged: tuple[list[int], list[Layers]] = ([], [])

    # --- subclass interface -------------------------------------------------------------------

    @property
    @abstractmethod
    def layer(self) -> int | None:
        """Layer to match in this round, with lower layers frozen; None means all layers."""

    def _first(self, client: int) -> Layers:
        """Return the initial network of a new client."""
        return self._clients.first(client, self.base)

    @abstractmethod
    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: MatchingOptions
    ) -> MatchedNetwork:
        """Merge client networks."""

    @abstractmethod
    def _next(self, ids: Sequence[int], nets: Sequence[Layers], merged: MatchedNetwork) -> None:
        """Set the initial networks of the next round after a merge."""

    # --- the module ---------------------------------------------------------------------------

    def setup(self, federation: Federation) -> None:
        """Raise an error if the run does not allow replacing the network of the module."""
        super().setup(federation)
        name = type(self).__name__
        federation.refuse_stage(self, "it replaces the module's network")
        if federation.shares_samples:
            raise FederationError(
                f"{name} replaces the module's network, which is not supported if processes share"
                " the samples of a client: set strategy='client_parallel'"
            )
        exchanged = federation.num_parameters  # None before the layout is known
        if exchanged and exchanged != sum(p.numel() for p in federation.module.parameters()):
            raise FederationError(
                f"{name} replaces the network by one of another width, which needs updates of all"
                " parameters: remove local_parameters, and train all parameters, or use FedAvg"
            )
        if federation.policy is not None and "contributions" in federation.policy.learns_from:
            raise FederationError(
                f"{type(federation.policy).__name__} learns from the gradient of the global model,"
                f" and {name} replaces its network: use another policy"
            )
        self._check_classes()

    def prepare(self, module: LightningModule, example: Callable[[], Any] | None = None) -> None:
        """Find the layers of a module, and allow it to load networks of other widths.

        Args:
            module: The user's module, with the shapes that clients train.
            example: Function that returns a batch ``(x, ...)`` of training samples. None if nothing
                is trained.
        """
        if self.chain is None or self.chain.module is not module:
            self.chain = LayerStack(module)
            module.register_load_state_dict_pre_hook(self._fit_to)  # type: ignore[no-untyped-call]
        if example is None:
            return
        clients = self._in_training
        if clients is None or clients.chain is not self.chain or not self.server.numel():
            self._in_training = ClientNetworks(self.chain, self)
        else:  # a later fit of a module that has the merged network
            self.load_client_network()
        self._clients.check(example())

    def _check_classes(self) -> None:
        """Raise an error for a class without samples: its output weights would be undefined."""
        if (counts := self.class_counts) is None:
            return
        classes = self._clients.shapes[-1][0]
        if absent := (counts.sum(0) == 0).nonzero()[:, 0].tolist():
            raise FederationError(
                f"no client has a training sample of class {absent[0]}, of {classes}: the weights"
                " of this output would be undefined. Use one output per class"
            )

    @property
    def class_counts(self) -> Tensor | None:
        """Number of training samples per client and class, ``[clients, classes]``, or None."""
        counts = None if self.federation is None else self.federation.class_counts
        if counts is None or self._in_training is None:
            return counts
        missing = max(self._in_training.shapes[-1][0] - counts.shape[1], 0)
        return torch.nn.functional.pad(counts, (0, missing))

    def _fit_to(self, module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.module_chain.fit_to(state_dict, prefix)

    @property
    def module_chain(self) -> LayerStack:
        """Layers of the module."""
        if self.chain is None:
            raise FederationError(
                f"{type(self).__name__} requires the module: use it in a FederatedLoop"
            )
        return self.chain

    @property
    def _clients(self) -> ClientNetworks:
        """Client networks, available during a fit."""
        chain = self.module_chain
        assert self._in_training is not None, f"{type(chain.module).__name__} is not being trained"
        return self._in_training

    def load_client_network(self) -> None:
        """Load the client shapes and the global vector into the module, and freeze layers."""
        chain, clients = self.module_chain, self._clients
        if chain.shapes != clients.shapes:
            is_begun = self.server.numel() > 0
            chain.write(chain.unpack(self.base, clients.shapes) if is_begun else clients.initial)
        if self.layer is not None:
            chain.freeze(self.layer)

    def load_global_network(self, score: Callable[[], float] | None = None) -> None:
        """Merge the client networks, and load the merged network into the module.

        Args:
            score: Function that returns the training accuracy of the module in its current state.
        """
        if self._returned is not None:
            self._merge(score)
        if len(self.merged):
            self.module_chain.write(self.network())
        if self.layer is not None:
            self.module_chain.freeze(0)

    def returned(self) -> tuple[list[int], list[Layers]]:
        """Return and clear the last merged clients and their networks."""
        returned, self._merged = self._merged, ([], [])
        return returned

    def network(self) -> Layers:
        """Return the merged network."""
        return self.module_chain.unpack(self.merged, [(a, b) for a, b in self.shapes.tolist()])

    # --- rounds -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Clear the updates of the round, including those not yet merged."""
        super().reset()
        self._returned = None

    def allocate(self, server: Tensor) -> None:
        """Declare the updates of the round, and the persistent buffers."""
        self.add_lists("ids", "deltas")
        device = server.device
        #: Initial vector of the module, which it holds in training between clients.
        self.register_buffer("base", server.clone())
        #: Initial vector of each client, ``[places, P]``, and a mask of the valid rows.
        self.register_buffer("starts", server.new_zeros(PLACES, len(server)))
        self.register_buffer("known", torch.zeros(PLACES, dtype=torch.bool, device=device))
        #: The merged network as a vector, and the shapes of its layers, ``[layers, 2]``.
        self.register_buffer("merged", server.new_zeros(0))
        self.register_buffer("shapes", torch.zeros(0, 2, dtype=torch.int64))
        #: Assignments of the last round; see :func:`assignment_table`.
        self.register_buffer("places", torch.zeros(0, 0, 0, dtype=torch.int64))
        #: The last round's gamma, client_variance and prior_variance.
        self.register_buffer("chosen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the initial vector of each client, ``[k, P]``."""
        ids = clients.to(self.known.device)
        self.starts = with_place(self.starts, ids)
        self.known = with_place(self.known, ids)
        for client in ids[~self.known[ids]].tolist():
            self._start_with(client, self._first(client))
        return self.starts[ids]

    def _start_with(self, client: int, layers: Layers) -> None:
        """Set the initial network of a client."""
        self.starts[client] = self._clients.vector(layers).to(self.starts)
        self.known[client] = True

    def update(self, clients: ClientUpdate) -> None:
        """Store updates until the end of the round."""
        self.append(ids=clients.clients, deltas=clients.delta)

    def compute(self) -> Tensor:
        """Collect the client networks. :meth:`load_global_network` merges them."""
        if joined := self.gather_by_client("ids", "deltas"):
            ids, deltas = joined
            ends = self.models_for(ids) + deltas
            pairs = zip(ids.tolist(), ends, strict=True)
            self._returned = ids, [self._clients.network(end, client) for client, end in pairs]
        return self.server

    # --- merging ------------------------------------------------------------------------------

    def _merge(self, score: Callable[[], float] | None) -> None:
        """Merge the collected client networks."""
        assert self._returned is not None
        (returned, networks), self._returned = self._returned, None
        layer, usable = self.layer, self.assignments() if self.layer else returned.tolist()
        rows = [row for row, client in enumerate(returned.tolist()) if client in usable]
        if not rows:  # no client was in the rounds of all lower layers: restart with the lowest
            self.round.zero_()
            return
        ids = [returned.tolist()[row] for row in rows]
        nets = [[(w.cpu(), b.cpu()) for w, b in networks[row]] for row in rows]
        self._merged = ids, nets
        merged, options, searched = self._best(ids, nets, score)
        self.merged = self.module_chain.pack(merged.layers).to(self.base)
        shapes = [list(weight.shape[:2]) for weight, _ in merged.layers]
        self.shapes = torch.tensor(shapes, device=self.shapes.device)
        self.places = assignment_table(ids, merged.matchings).to(self.starts.device)
        point = {
            "gamma": options.gamma,
            "client_variance": options.client_variance,
            "prior_variance": options.prior_variance,
        }
        self.chosen = self.chosen.new_tensor(list(point.values()))
        self._next(ids, nets, merged)
        self.round += 1
        matchings = merged.matchings
        self.round_metrics = {
            **{f"width_{i + 1}": float(width) for i, width in enumerate(merged.widths)},
            "neurons": float(sum(len(a) for m in matchings for a in m.assignments)),
            "popularity": float(torch.cat([m.counts for m in matchings]).mean()),
            **point,
            **searched,
            **({} if layer is None else {"layer": layer + 1.0}),
        }

    def _best(
        self, ids: Sequence[int], nets: Sequence[Layers], score: Callable[[], float] | None
    ) -> tuple[MatchedNetwork, MatchingOptions, dict[str, float]]:
        """Merge with the given options, or with those found by the search."""
        given: Sequence[float | None] = (self.gamma, self.client_variance, self.prior_variance)
        if self.searches_once and self.round > 0:
            given = self.chosen.tolist()
        tried = [self._options(*values, int(self.round)) for values in candidates(given)]
        if len(tried) == 1:
            return self._matched(ids, nets, tried[0]), tried[0], {}
        if score is None:
            raise FederationError(
                f"{type(self).__name__} searches options that are None on training samples, and"
                " there are none: set gamma, client_variance and prior_variance"
            )
        training_accuracy = score

        def scored(options: MatchingOptions) -> tuple[float, int]:
            merged = self._matched(ids, nets, options)
            self.module_chain.write(merged.layers)
            return training_accuracy(), sum(merged.widths)

        best, accuracy = narrowest(tried, self.tolerance, scored)
        # Merge again with the same orders: keeping all merged networks takes too much memory.
        return self._matched(ids, nets, best), best, {"train_accuracy": accuracy}

    def _options(
        self, gamma: float, client_variance: float, prior_variance: float, round: int = 0
    ) -> MatchingOptions:
        """Return the options of a matching. Rounds after the first make at most three sweeps."""
        return MatchingOptions(
            client_variance,
            prior_variance,
            gamma,
            bias_mean=self.bias_mean,
            popularity=self.popularity,
            cap=self.cap,
            max_width=self.max_width,
            sweeps=self.sweeps if round == 0 else min(self.sweeps, 3),
        )

    def _orders(self) -> torch.Generator:
        """Return the generator of the client orders of this round."""
        return generator(self.seed_of(self.seed), RandomStream.NEURONS, 0, int(self.round))

    def _counts(self, ids: Sequence[int]) -> Tensor | None:
        """Return samples per client and class, with ones for classes without samples."""
        if self.class_counts is None:
            return None
        counts = self.class_counts[list(ids)]
        return torch.where(counts.sum(0) > 0, counts, 1)

    def assignments(self) -> dict[int, list[list[int]]]:
        """Return the atoms of the last round's neurons, by client and hidden layer."""
        return read_table(self.places)
