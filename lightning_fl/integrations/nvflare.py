"""A federation in a job of NVIDIA FLARE.

The server is a ``ModelAggregator`` for NVFlare's ``FedAvgRecipe`` with the rules of this library,
and the training script of a site calls :func:`run_client`, which trains a LightningModule as
``FederatedLoop`` does. Requires nvflare: ``pip install "lightning_fl[nvflare]"``.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_fl.aggregators import Aggregator, Staged
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.exchange import Kept, file_of
from lightning_fl.integrations.messages import Members, Reply, Task, checked
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.options import check_integer

imported("nvflare", "lightning_fl.integrations.nvflare", "nvflare")

from nvflare import client as flare  # noqa: E402  # after the error message
from nvflare.app_common.abstract.fl_model import FLModel  # noqa: E402
from nvflare.app_common.abstract.model import ModelLearnableKey  # noqa: E402
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator  # noqa: E402
from nvflare.app_common.app_constant import AppConstants  # noqa: E402

#: Key of what this library adds to the ``meta`` of NVFlare's models.
KEY = "lightning_fl"


class FederationAggregator(ModelAggregator):
    """Aggregate and plan as ``FederatedLoop`` does, in NVFlare's ``FedAvg`` controller.

    A subclass in a file of the job says which federation it is. In NVFlare's first round the sites
    only say how many samples they have, so that a job of 10 rounds of training has 11 rounds.
    NVFlare loads the initial model, from ``model`` or ``initial_ckpt`` of the recipe.

    Args:
        checkpoint: File on the server with the state after each round. If it exists, the job
            resumes from it. None writes none.

    Raises:
        FederationError: If the rule or the policy needs all clients in one process; if the rule
            starts clients from models of their own, or ``send_frozen`` is False, because NVFlare's
            controller sends one whole model to all.

    Example:
        .. code-block:: python

            class Median(FederationAggregator):
                def server(self) -> RemoteServer:
                    return RemoteServer(Net(), CoordinateMedian(), Schedule(lr=0.1), seed=1)


            recipe = FedAvgRecipe(
                model=Net(), aggregator=Median(), num_rounds=11, min_clients=2,
                train_script="client.py", server_expected_format=ExchangeFormat.PYTORCH,
            )
    """

    def __init__(self, checkpoint: str | None = None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self._server = server = self.server()
        for rule in {*map(type, server.aggregator.modules())} - {Staged}:  # which passes on
            if issubclass(rule, Aggregator) and rule.models_for is not Aggregator.models_for:
                raise FederationError(
                    f"{rule.__name__} starts clients from models of their own, and the FedAvg"
                    " controller of NVFlare sends one model to all: use FederatedLoop or"
                    " lightning_fl.integrations.flower, or another rule"
                )
        if not server.send_frozen:
            raise FederationError(
                "NVFlare keeps and sends the whole model: set send_frozen=True of RemoteServer"
            )
        self._members = Members("site")
        self._replies: dict[int, Reply] = {}
        #: Numbers of NVFlare's rounds that sites have received, and the number of rounds left.
        self._rounds: set[int] = set()
        self._num_rounds, self._sends_arrays = 0, False
        #: Id of the updates of this round.
        self._update = -1

    @abstractmethod
    def server(self) -> RemoteServer:
        """Return the federation; called once, when the aggregator is made."""

    # --- called by NVFlare ------------------------------------------------------------------------

    def reset_stats(self) -> None:
        """Begin a round."""
        self._replies.clear()

    def accept_model(self, model: FLModel) -> None:
        """Keep the reply of a site."""
        site, members = model.meta.get("client_name", "?"), self._members
        message = model.meta.get(KEY)
        about = message if isinstance(message, Mapping) else {}
        try:
            if not members.is_begun:
                self._rounds.add(checked("num_rounds", about.get("num_rounds"), int))
                members.admit(site, about)
                return
            if (client := members.clients.get(site)) is None:
                raise FederationError("it has joined after the first round: raise min_clients")
            if checked("update", about.get("update"), int) == self._update:  # not idle, not late
                self._replies[client] = Reply.unpack(about, model.params)
        except FederationError as error:
            members.refuse(site, error)

    def aggregate_model(self) -> FLModel:
        """Return the new global model, with the plan of the next round."""
        server, metrics = self._server, dict[str, float]()
        if not self._members.is_begun:
            self._begin()
        elif not self._is_done():
            metrics = server.finish(self._replies)
        model: Mapping[str, Any] = server.model()
        others: Mapping[str, Any] = {}
        plan: list[dict[str, Any]] = []
        for task in [] if self._is_done() else server.tasks():
            about, tensors = task.pack()
            plan.append(about)
            model, self._update = task.model, task.update
            others = {n: value for n, value in tensors.items() if not n.startswith("model.")}
        if self._sends_arrays:  # sites cannot read tensors
            model, others = arrays(model), arrays(others)
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        meta = {KEY: {"plan": plan, "tensors": dict(others)}}
        return FLModel(params=dict(model), metrics=known, meta=meta)

    # --- the federation ---------------------------------------------------------------------------

    def _begin(self) -> None:
        members, known = self._members, sorted(self._members.clients.values())
        if members.refused or known != [*range(len(known))] or len(self._rounds) != 1:
            raise FederationError(
                f"the sites are clients {known}: give run_client the numbers from 0 to the number"
                f" of sites - 1{members.refusals()}"
            )
        initial = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        self._sends_arrays = not any(isinstance(value, Tensor) for value in initial.values())
        weights = {name: torch.as_tensor(value) for name, value in initial.items()}
        (rounds,), server = self._rounds, self._server
        self._num_rounds = rounds - 1  # without this one
        server.begin(*members.work(), self._num_rounds, weights or None, self.checkpoint)
        if server.round:
            rank_zero_info(f"resuming after round {server.round} from {self.checkpoint}")

    def _is_done(self) -> bool:
        """Return whether all rounds of training have ended."""
        return self._server.round >= self._num_rounds


# --- messages -------------------------------------------------------------------------------------


def arrays(found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return tensors as arrays."""
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}


# --- sites ----------------------------------------------------------------------------------------


def run_client(
    remote: RemoteClient, client: int | None = None, folder: str | Path | None = None
) -> None:
    """Train at a site of an NVFlare job until the job ends; call it in the training script.

    Args:
        remote: The client.
        client: Its number from 0. None takes it from the name of the site, of which NVFlare numbers
            the first ``site-1``.
        folder: Folder for what the client keeps between rounds (optimizer, local parameters,
            control variates, error feedback), so that a job that resumes finds it. None keeps it in
            memory.

    Raises:
        FederationError: If ``client`` is None and the name of the site does not end in a number.
    """
    flare.init()
    own = number_of(flare.get_site_name()) if client is None else client
    own = check_integer("client", own, min=0)
    file = None if folder is None else file_of(own, folder)
    kept, nothing = Kept(), {"delta": torch.zeros(0)}  # NVFlare ignores messages without tensors
    while flare.is_running() and (received := flare.receive()) is not None:
        asked = received.meta.get(KEY)
        if asked is None:  # the first round
            about = {**remote.about(own), "num_rounds": received.total_rounds}
            flare.send(FLModel(params=nothing, meta={KEY: about}))
            continue
        plan = [each for each in asked["plan"] if each["client"] == own]
        if not plan:
            flare.send(FLModel(params=nothing, meta={KEY: {"update": 0}}))
            continue
        model = {f"model.{name}": value for name, value in received.params.items()}
        task = Task.unpack(plan[0], model | asked["tensors"])
        kept = kept if file is None else Kept.read(file)
        reply, kept = remote.train(task, kept)
        if file is not None:
            kept.write(file)
        about, params = reply.pack()
        metrics = {"train_loss": reply.loss} if math.isfinite(reply.loss) else {}
        flare.send(FLModel(params=params, metrics=metrics, meta={KEY: about}))


def number_of(site: str) -> int:
    """Return the number of a client from the name of its site.

    Example:
        >>> number_of("site-1")
        0
    """
    found = re.search(r"(\d+)$", site)
    if found is None or int(found[1]) < 1:
        raise FederationError(
            f"the site {site!r} has no number from 1 at the end of its name: give run_client the"
            " number of the client, from 0"
        )
    return int(found[1]) - 1
