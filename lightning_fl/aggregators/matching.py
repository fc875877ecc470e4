"""What rules share that merge networks by matching their neurons."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.chain import Chain, Layers
from lightning_fl.federation.context import Federation
from lightning_fl.functional.networks import MatchedNetwork
from lightning_fl.functional.randomness import (
    Purpose,
    derive_seed,
    generator,
    run_seed,
    seeded_rng,
)
from lightning_fl.functional.tables import PLACES, with_place
from lightning_fl.types import ClientUpdate, FederationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NeuronMatching(Aggregator):
    r"""Networks that were trained apart, merged by matching their neurons; what such rules share.

    Clients start from networks of their own. After a round their hidden neurons are matched, layer
    by layer, and merged. The module has the merged network, of the widths that were inferred, when
    it is validated, tested and saved, and the clients' own in training.

    Options that are None are searched: of all combinations whose merged network is within
    ``tolerance`` of the best training accuracy (of the round's clients) the narrowest is taken.

    Defaults are those of the authors' program (IBM/probabilistic-federated-neural-matching) for
    what is searched, ``std``, ``bias_mean``, ``sweeps`` and ``accept``. Where the program departs
    from the paper the default is the paper's: the program has ``popularity=1``, the paper's
    equations give 2. Limits are left out: the program has ``cap=10`` and ``max_width=700``, and
    takes the best training accuracy of a search (``tolerance=0``).

    Args:
        gamma: :math:`\gamma_0`: the larger, the wider.
        sigma2: :math:`\sigma^2`, the variance of a client's weights around the atom's.
        sigma02: :math:`\sigma_0^2`, the variance of atoms around the prior's mean.
        widths: Hidden neurons of client ``i`` are ``widths[i % len(widths)]`` in each layer, at
            most as many as the module's; None is the module's.
        start: Where clients start from in their first round: ``own`` draws each client's network
            anew, ``server`` is the module's, the same for all.
        std: Standard deviation of weights that are drawn, with biases of ``bias_mean``; None lets
            the layers draw both themselves, as torch does.
        bias_mean: Mean of biases in the prior.
        sweeps: Over clients, in the first round; three at most in later ones.
        popularity: How much it counts who else has an atom; see
            :class:`~lightning_fl.functional.matching.Process`.
        cap: Counts of an atom above it count as this.
        max_width: Neurons of a merged layer from which on each client may add only one (or as many
            as it has more than the layer). None is no limit.
        tolerance: See above.
        seed: Of starts and orders; None is that of ``seed_everything``, else 0.
        accept: ``always`` keeps the assignment that a sweep finds for a client, ``improvement``
            only where it raises the objective; see
            :func:`~lightning_fl.functional.matching.match`.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module has
            hidden neurons that cannot be matched.
    """

    #: What is tried where an option is None (the authors' program).
    searched: ClassVar[dict[str, tuple[float, ...]]] = {
        "gamma": (1.0, 1e-3, 50.0),
        "sigma2": (1.0, 0.1, 0.5),
        "sigma02": (1.0, 10.0),
    }
    #: Buffers whose shapes depend on what was matched.
    grown: tuple[str, ...] = ("starts", "known", "merged", "shapes", "places")
    starts: Tensor
    base: Tensor
    merged: Tensor
    shapes: Tensor
    places: Tensor
    known: Tensor
    round: Tensor
    ids: list[Tensor] | Tensor
    deltas: list[Tensor] | Tensor

    def __init__(
        self,
        gamma: float | None = None,
        sigma2: float | None = None,
        sigma02: float | None = None,
        widths: Sequence[int] | None = None,
        start: Literal["own", "server"] = "own",
        std: float | None = 0.1,
        bias_mean: float = 0.1,
        sweeps: int = 5,
        popularity: float = 2.0,
        cap: int | None = None,
        max_width: int | None = None,
        tolerance: float = 0.005,
        seed: int | None = None,
        accept: Literal["always", "improvement"] = "always",
    ) -> None:
        super().__init__()
        given = {"gamma": gamma, "sigma2": sigma2, "sigma02": sigma02}
        for name, value in given.items():
            is_number = isinstance(value, int | float)
            if value is not None and not (is_number and 0 < value < float("inf")):
                raise FederationError(f"{name} must be positive and finite, or null, got {value!r}")
        if widths is not None and not (isinstance(widths, list | tuple) and widths):
            raise FederationError(f"widths must be a list of one number or more, got {widths!r}")
        if not math.isfinite(bias_mean):
            raise FederationError(f"bias_mean must be finite, got {bias_mean}")
        whole = {"sweeps": sweeps, "cap": cap, "max_width": max_width}
        whole |= {f"widths[{i}]": width for i, width in enumerate(widths or ())}
        for name, count in whole.items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
                raise FederationError(f"{name} must be a whole number, got {count!r}")
        if start not in ("own", "server"):
            raise FederationError(f"start must be own or server, got {start!r}")
        if accept not in ("always", "improvement"):
            raise FederationError(f"accept must be always or improvement, got {accept!r}")
        for name, least, number in (
            ("std", 0, 0 if std is None else std),
            ("sweeps", 0, sweeps),
            ("popularity", 0, popularity),
            ("tolerance", 0, tolerance),
            ("cap", 1, 1 if cap is None else cap),
            ("max_width", 1, 1 if max_width is None else max_width),
            ("widths", 1, min(widths) if widths else 1),
        ):
            if not least <= number < float("inf"):
                raise FederationError(f"{name} must be at least {least}, got {number}")
        self.gamma, self.sigma2, self.sigma02 = gamma, sigma2, sigma02
        self.widths = None if widths is None else list(widths)
        self.start_from, self.std, self.bias_mean = start, std, bias_mean
        self.sweeps, self.popularity, self.cap = sweeps, popularity, cap
        self.max_width, self.tolerance, self.seed = max_width, tolerance, seed
        self.accept = accept
        self.chain: Chain | None = None
        self._own = list[tuple[int, int]]()
        self._at_start: Layers = []
        self._returned: tuple[Tensor, list[Layers]] | None = None
        self._merged: tuple[list[int], list[Layers]] = ([], [])
        self._figures: dict[str, float] = {}

    # --- the module ---------------------------------------------------------------------------

    def setup(self, federation: Federation) -> None:
        """Refuse a run in which the module cannot have another network."""
        super().setup(federation)
        name = type(self).__name__
        if not federation.is_rule(self):
            raise FederationError(
                f"{name} replaces the module's network and cannot be a stage of"
                f" {type(federation.aggregator).__name__}: use it alone"
            )
        if federation.shares_samples:
            raise FederationError(
                f"{name} replaces the module's network, which processes that share the samples of a"
                " client have to know beforehand: choose strategy='client_parallel'"
            )
        if federation.policy is not None and "contributions" in federation.policy.learns_from:
            raise FederationError(
                f"{type(federation.policy).__name__} learns from the gradient of the global model,"
                f" and {name} replaces its network: choose another policy"
            )
        self._check_classes()

    def prepare(self, module: LightningModule, example: Callable[[], Any] | None = None) -> None:
        """Find the layers of a module, and let it load networks of other widths.

        Args:
            module: The user's, with the shapes that clients train.
            example: Returns a batch ``(x, ...)`` of training samples; None where nothing is
                trained.
        """
        if self.chain is None or self.chain.module is not module:
            self.chain = Chain(module)
            module.register_load_state_dict_pre_hook(self._fit_to)  # type: ignore[no-untyped-call]
        if example is None:
            return
        #: The shapes that clients train, and what the module came with.
        self._own, self._at_start = self.module_chain.shapes, self.module_chain.read()
        inert = self._check_order(example())
        narrow = min(width for width, _ in self._own[:-1])
        if self.widths is not None and max(self.widths) > narrow:
            raise FederationError(
                f"widths has {max(self.widths)} neurons, the module's network {narrow}: give the"
                " module the width of the widest client"
            )
        if self.widths is not None and not inert:
            raise FederationError(
                "widths gives clients networks of different widths, and the module's activation"
                " does not map 0 to 0: use ReLU or tanh, or leave widths out"
            )

    def _check_order(self, example: Any) -> bool:
        """Check the module on samples; see :meth:`Chain.check_order`."""
        is_pair = isinstance(example, list | tuple) and isinstance(example[0], Tensor)
        if not is_pair:
            raise FederationError(
                f"{type(self).__name__} looks at what the module makes of x in a batch (x, ...),"
                f" and a batch is a {type(example).__name__}: let the data be such tuples"
            )
        try:
            return self.module_chain.check_order(example[0])
        except NotImplementedError as error:
            raise FederationError(
                f"{type(self).__name__} looks at what the module makes of x, and"
                f" {type(self.module_chain.module).__name__} has no forward(x): write one"
            ) from error

    def _check_classes(self) -> None:
        """Refuse a class that nobody has: nobody would know its weights."""
        if (counts := self.class_counts) is None:
            return
        classes = self._own[-1][0]
        if counts.shape[1] > classes:
            raise FederationError(
                f"labels go up to {counts.shape[1] - 1}, the network has {classes}"
                " outputs: give it one for each class"
            )
        if absent := (counts.sum(0) == 0).nonzero()[:, 0].tolist():
            raise FederationError(
                f"no client has a training sample of class {absent[0]}, of {classes}: nobody could"
                " know its weights. Give the network as many outputs as there are classes"
            )

    @property
    def class_counts(self) -> Tensor | None:
        """Training samples of each client and class, ``[clients, classes]``; None if unknown."""
        counts = None if self.federation is None else self.federation.class_counts
        if counts is None or not self._own:
            return counts
        missing = max(self._own[-1][0] - counts.shape[1], 0)
        return torch.nn.functional.pad(counts, (0, missing))

    def _fit_to(self, module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.module_chain.fit_to(state_dict, prefix)

    @property
    def module_chain(self) -> Chain:
        """The layers of the module."""
        if self.chain is None:
            raise FederationError(
                f"{type(self).__name__} has to know the module: use it in a FederatedLoop"
            )
        return self.chain

    def withdraw(self) -> None:
        """Give the module the shapes that clients train, and the server's vector."""
        chain = self.module_chain
        if chain.shapes != self._own:
            is_begun = self.server.numel() > 0
            chain.write(chain.unpack(self.base, self._own) if is_begun else self._at_start)

    def publish(self, score: Callable[[], float] | None = None) -> None:
        """Merge what clients returned, and give the module the network.

        Args:
            score: Returns the training accuracy of the module as it is.
        """
        if self._returned is not None:
            self._merge(score)
        if len(self.merged):
            self.module_chain.write(self.network())

    def returned(self) -> tuple[list[int], list[Layers]]:
        """Return the clients that were merged last, and their networks; once."""
        found, self._merged = self._merged, ([], [])
        return found

    def network(self) -> Layers:
        """Return the merged network."""
        return self.module_chain.unpack(self.merged, [(a, b) for a, b in self.shapes.tolist()])

    # --- rounds -------------------------------------------------------------------------------

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round."""
        super().start(server, trained)
        self._figures = {}

    def reset(self) -> None:
        """Forget the updates of the round, also those that are still to be merged."""
        super().reset()
        self._returned = None

    def allocate(self, server: Tensor) -> None:
        """Declare the updates of the round, and what outlives it."""
        for name in ("ids", "deltas"):
            self.add_state(name, [], dist_reduce_fx="cat")
        device = server.device
        #: What the module holds in training between clients: its own start.
        self.register_buffer("base", server.clone())
        #: What each client starts from, ``[places, P]``, and whether it is known.
        self.register_buffer("starts", server.new_zeros(PLACES, len(server)))
        self.register_buffer("known", torch.zeros(PLACES, dtype=torch.bool, device=device))
        #: The merged network as a vector, and the shapes of its layers, ``[layers, 2]``.
        self.register_buffer("merged", server.new_zeros(0))
        self.register_buffer("shapes", torch.zeros(0, 2, dtype=torch.int64))
        #: Atoms of each client's neurons of the last round, ``[clients, layers, neurons]``, -1
        #: where there is none; after the client's number.
        self.register_buffer("places", torch.zeros(0, 0, 0, dtype=torch.int64))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    def server_for(self, clients: Tensor) -> Tensor:
        """Return what each client starts from, ``[k, P]``."""
        ids = clients.to(self.known.device)
        self.starts = with_place(self.starts, ids)
        self.known = with_place(self.known, ids)
        for client in ids[~self.known[ids]].tolist():
            layers = self._wide(self._narrow(self._first(client), client))
            self.starts[client] = self.module_chain.pack(layers).to(self.starts)
            self.known[client] = True
        return self.starts[ids]

    def _first(self, client: int) -> Layers:
        """Return a client's first network."""
        chain, key = self.module_chain, (run_seed(self.seed), Purpose.NEURONS, client)
        if self.start_from == "server":
            return chain.unpack(self.base.clone(), self._own)
        if self.std is None:
            with seeded_rng(derive_seed(*key), self.base.device):
                return chain.drawn()
        random, std = generator(*key), self.std
        return [
            (std * torch.randn(w.shape, generator=random), torch.full(b.shape, self.bias_mean))
            for w, b in chain.unpack(self.base, self._own)
        ]

    def _client_widths(self, client: int) -> list[int]:
        """Return a client's hidden widths."""
        if self.widths is None:
            return [width for width, _ in self._own[:-1]]
        return [self.widths[client % len(self.widths)]] * (len(self._own) - 1)

    def _narrow(self, layers: Layers, client: int) -> Layers:
        """Leave out the neurons that a client does not have."""
        widths = self._client_widths(client)
        outs, ins = [*widths, None], [None, *widths]
        return [
            (w[:out, :into], b[:out]) for (w, b), out, into in zip(layers, outs, ins, strict=True)
        ]

    def _wide(self, layers: Layers) -> Layers:
        """Undo :meth:`_narrow`."""
        found = []
        for (w, b), shape in zip(layers, self._own, strict=True):
            weight, bias = w.new_zeros(*shape, *w.shape[2:]), b.new_zeros(shape[0])
            weight[: w.shape[0], : w.shape[1]] = w
            bias[: len(b)] = b
            found.append((weight, bias))
        return found

    def update(self, clients: ClientUpdate) -> None:
        """Keep updates until all are there."""
        self.ids.append(clients.clients.to(self.starts.device))  # type: ignore[union-attr]
        self.deltas.append(clients.delta.clone())  # type: ignore[union-attr]

    def compute(self) -> Tensor:
        """Take the clients' networks; they are merged by :meth:`publish`."""
        if not (found := self.joined("ids", "deltas")):
            return self.server
        ids, deltas = found
        ends = self.server_for(ids) + deltas
        nets = [
            self._narrow(self.module_chain.unpack(end, self._own), client)
            for client, end in zip(ids.tolist(), ends, strict=True)
        ]
        self._returned = ids, nets
        return self.server

    # --- merging ------------------------------------------------------------------------------

    def _merge(self, score: Callable[[], float] | None) -> None:
        assert self._returned is not None
        (ids, nets), self._returned = self._returned, None
        rows = self._usable(ids.tolist())
        if not rows:
            return
        ids = ids.cpu()[rows]
        nets = [[(w.cpu(), b.cpu()) for w, b in nets[row]] for row in rows]
        self._merged = ids.tolist(), nets
        found, options = self._best(ids.tolist(), nets, score)
        self.merged = self.module_chain.pack(found.layers).to(self.base)
        shapes = [list(weight.shape[:2]) for weight, _ in found.layers]
        self.shapes = torch.tensor(shapes, device=self.shapes.device)
        self._note(ids, found)
        self._next(ids.tolist(), nets, found, options)
        self.round += 1
        matching = found.matchings
        self._figures = {
            **{f"width_{i + 1}": float(width) for i, width in enumerate(found.widths)},
            "neurons": float(sum(len(a) for m in matching for a in m.assignments)),
            "popularity": float(torch.cat([m.counts for m in matching]).mean()),
            "objective": float(sum(m.objective[-1] for m in matching)),
            **options,
        }

    def _usable(self, ids: Sequence[int]) -> list[int]:
        """Return the positions of clients whose networks can be merged with each other."""
        return list(range(len(ids)))

    @abstractmethod
    def _matched(
        self, ids: Sequence[int], nets: Sequence[Layers], options: dict[str, Any]
    ) -> MatchedNetwork:
        """Merge the networks of clients."""

    def _next(
        self,
        ids: Sequence[int],
        nets: Sequence[Layers],
        found: MatchedNetwork,
        options: dict[str, float],
    ) -> None:
        """Give clients what they start the next round from: their part of the network."""
        for row, client in enumerate(ids):
            self._start_with(client, found.of_client(row))

    def _start_with(self, client: int, layers: Layers) -> None:
        self.starts[client] = self.module_chain.pack(self._wide(layers)).to(self.starts)

    def _counts(self, ids: Sequence[int]) -> Tensor | None:
        """Return samples of each client and class; of a class that nobody has, one each."""
        if self.class_counts is None:
            return None
        counts = self.class_counts[list(ids)]
        return torch.where(counts.sum(0) > 0, counts, 1)

    def _options(self) -> dict[str, Any]:
        """Return what is the same in all of a search."""
        return {
            "bias_mean": self.bias_mean,
            "popularity": self.popularity,
            "cap": self.cap,
            "max_width": self.max_width,
            "accept": self.accept,
            "sweeps": self.sweeps if self.round == 0 else min(self.sweeps, 3),
            "generator": generator(run_seed(self.seed), Purpose.NEURONS, 0, int(self.round)),
        }

    def _given(self, name: str) -> float | None:
        """Return the value of an option, None if it is to be searched."""
        value: float | None = getattr(self, name)
        return value

    def _best(
        self, ids: Sequence[int], nets: Sequence[Layers], score: Callable[[], float] | None
    ) -> tuple[MatchedNetwork, dict[str, float]]:
        """Merge with the options that were given, or those that the search finds."""
        axes = {
            name: values if (given := self._given(name)) is None else (given,)
            for name, values in self.searched.items()
        }
        tried = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        if len(tried) > 1 and score is None:
            raise FederationError(
                f"{type(self).__name__} searches its options on training samples: give them all"
            )
        if len(tried) == 1:
            return self._matched(ids, nets, {**self._options(), **tried[0]}), tried[0]
        assert score is not None
        seen = []
        for options in tried:
            found = self._matched(ids, nets, {**self._options(), **options})
            self.module_chain.write(found.layers)
            seen.append((score(), sum(found.widths), options))
        least = max(accuracy for accuracy, *_ in seen) - self.tolerance
        good = (each for each in seen if each[0] >= least)
        accuracy, _, best = min(good, key=lambda each: (each[1], -each[0]))
        # Again, with the same orders: to keep all of them would take much memory.
        found = self._matched(ids, nets, {**self._options(), **best})
        return found, {**best, "train_accuracy": accuracy}

    def _note(self, ids: Tensor, found: MatchedNetwork) -> None:
        """Keep which neuron went where."""
        most = max(len(a) for m in found.matchings for a in m.assignments)
        places = torch.full((len(ids), len(found.matchings), most + 1), -1)
        for layer, matching in enumerate(found.matchings):
            for row, atoms in enumerate(matching.assignments):
                places[row, layer, 0] = ids[row]
                places[row, layer, 1 : len(atoms) + 1] = atoms
        self.places = places.to(self.starts.device)

    def assignments(self) -> dict[int, list[list[int]]]:
        """Return the atoms of the last round's neurons, by client and hidden layer."""
        found: dict[int, list[list[int]]] = {}
        for rows in self.places.tolist():
            found[rows[0][0]] = [[atom for atom in row[1:] if atom >= 0] for row in rows]
        return found

    def figures(self) -> dict[str, float]:
        """Return widths, neurons that went into them, clients of an atom, objective, options."""
        return self._figures

    def figure(self) -> Figure | None:
        """Draw which atoms each client's neurons became, a panel a hidden layer."""
        from matplotlib.figure import Figure

        found = self.assignments()
        if not found:
            return None
        depth = len(next(iter(found.values())))
        figure = Figure(figsize=(9, 0.8 + 2.2 * depth), layout="constrained")
        for layer, axes in enumerate(figure.subplots(depth, 1, squeeze=False)[:, 0]):
            width = int(self.shapes[layer, 0])
            has = torch.zeros(len(found), width)
            for row, layers in enumerate(found.values()):
                has[row, layers[layer]] = 1
            order = has.sum(0).argsort(descending=True, stable=True)
            axes.imshow(has[:, order].numpy(), aspect="auto", cmap="Greys", interpolation="nearest")
            axes.set(
                xlabel=f"{width} neurons, those of most clients first",
                ylabel=f"client, layer {layer + 1}",
                yticks=range(len(found)),
                yticklabels=list(found),
            )
        return figure

    # --- checkpoints --------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make place for as many neurons and clients as a checkpoint has."""
        for name in self.grown:
            saved = state_dict.get(prefix + name)
            if saved is not None and hasattr(self, name):
                setattr(self, name, getattr(self, name).new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if hasattr(self, "merged"):
            self._check_loaded()

    def _check_loaded(self) -> None:
        """Refuse networks that are of other shapes than they say."""
        fits = self.starts.shape == (len(self.known), len(self.base))
        try:
            widths = [len(bias) for _, bias in self.network()] if len(self.merged) else []
        except (RuntimeError, ValueError):  # of other sizes, or of another number of layers
            fits, widths = False, []
        if not (fits and self._places_fit(widths[:-1])):
            raise FederationError(
                f"the checkpoint has a network of {len(self.merged)} numbers in layers of"
                f" {self.shapes.tolist()}, those of clients {list(self.starts.shape)}, and"
                f" assignments of their neurons {list(self.places.shape)}: they do not fit"
            )

    def _places_fit(self, widths: Sequence[int]) -> bool:
        """Say whether neurons were matched to atoms that there are, each to one of its own.

        Args:
            widths: Atoms of each hidden layer.
        """
        rows = self.places.tolist()
        if self.places.ndim != 3 or (rows and self.places.shape[1] != len(widths)):
            return False
        clients = [layers[0][0] for layers in rows]
        if len({*clients}) < len(clients):
            return False
        for client, layers in zip(clients, rows, strict=True):
            # The widths of clients are not known where nothing is trained.
            neurons = self._client_widths(client) if self._own else [None] * len(widths)
            if not 0 <= client < len(self.known) or any(layer[0] != client for layer in layers):
                return False
            for layer, width, count in zip(layers, widths, neurons, strict=True):
                if not _is_assignment([a for a in layer[1:] if a != -1], width, count):
                    return False
        return True


def _is_assignment(atoms: Sequence[int], width: int, neurons: int | None) -> bool:
    """Say whether these are different atoms of a layer, as many as there are neurons."""
    return (
        len({*atoms}) == len(atoms)
        and all(0 <= atom < width for atom in atoms)
        and neurons in (None, len(atoms))
    )
