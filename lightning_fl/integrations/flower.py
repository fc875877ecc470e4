"""A federation on the machines of a Flower deployment, or in Flower's simulation engine.

The server is a Flower ``Strategy`` with the rules of this library, and a client is a ``ClientApp``
that trains a LightningModule as ``FederatedLoop`` does. Requires flwr:
``pip install "lightning_fl[flower]"``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.aggregators import Aggregator
from lightning_fl.extras import imported
from lightning_fl.files import write_atomically
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.exchange import NUMBERS, Kept, Reply, Task
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.options import check_integer
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.samplers import ClientSampler
from lightning_fl.types import FederationError

imported("flwr", "lightning_fl.integrations.flower", "flower")

from flwr.app import (  # noqa: E402  # after the error message
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.serverapp.strategy import Result, Strategy  # noqa: E402

#: Seconds between two looks for clients.
PAUSE = 1.0


def strategy(
    aggregator: Aggregator | None = None,
    policy: HyperparameterPolicy | None = None,
    sampler: ClientSampler | None = None,
    *,
    module: LightningModule,
    num_clients: int,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> FederationStrategy:
    """Return a Flower strategy that plans and aggregates as ``FederatedLoop`` does.

    Args:
        aggregator: Aggregation rule; None means :class:`~lightning_fl.aggregators.FedAvg`.
        policy: Hyperparameters of each round and client; None means one local epoch.
        sampler: Samples the clients of each round; None samples uniformly.
        module: The LightningModule, with the initial global model. Afterwards it holds the last.
        num_clients: Number of clients. The first round begins when they are connected.
        checkpoint: File with the state after each round. If it exists, the run resumes from it.
        options: Options of :class:`~lightning_fl.integrations.server.RemoteServer`.

    Raises:
        FederationError: If the rule or the policy needs all clients in one process.
    """
    server = RemoteServer(module, aggregator, policy, sampler, **options)
    return FederationStrategy(server, num_clients, checkpoint)


class FederationStrategy(Strategy):
    """Flower strategy around a :class:`~lightning_fl.integrations.server.RemoteServer`.

    Args:
        server: The server.
        num_clients: Number of clients.
        checkpoint: File with the state after each round, or None.
    """

    def __init__(
        self, server: RemoteServer, num_clients: int, checkpoint: str | Path | None = None
    ) -> None:
        self.server = server
        self.num_clients = check_integer("num_clients", num_clients, min=1)
        for name, tensor in server.module.state_dict().items():
            if tensor.dtype == torch.bfloat16:  # Flower's arrays are those of numpy
                raise FederationError(
                    f"{name} is in bfloat16, which Flower cannot send: keep the parameters in"
                    " float32, for example with precision: bf16-mixed"
                )
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        #: Client of each node.
        self.clients: dict[int, int] = {}
        self._work: dict[int, tuple[int, int]] = {}

    def summary(self) -> None:
        """Log the rules."""
        rule, policy = type(self.server.rule).__name__, type(self.server.policy).__name__
        rank_zero_info(f"lightning_fl: {rule}, {policy}, {self.num_clients} clients")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that are left; see Flower's ``Strategy.start``.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: Initial global model; None is that of the module.
            num_rounds: Number of rounds of the whole run.
            timeout: Seconds after which a client that has not replied is dropped.
            train_config: Not used: the policy sets what clients get.
            evaluate_config: Not used.
            evaluate_fn: Function that evaluates the global model on the server.
        """
        if initial_arrays is not None:
            self.server.module.load_state_dict(initial_arrays.to_torch_state_dict())
        self._meet(grid, timeout)
        self.server.begin(*zip(*(self._work[i] for i in range(self.num_clients)), strict=True))
        if self.checkpoint is not None and self.checkpoint.exists():
            self.server.load_state_dict(torch.load(self.checkpoint, weights_only=True))
            rank_zero_info(f"resuming after round {self.server.round} from {self.checkpoint}")
        done = self.server.round
        if done >= num_rounds:
            rank_zero_warn(
                f"{self.checkpoint} has all {num_rounds} rounds, and nothing is trained: raise"
                " num_rounds, or delete the file to begin anew"
            )
        evaluate = evaluate_fn and (lambda round, arrays: evaluate_fn(round + done, arrays))
        left = max(num_rounds - done, 0)
        try:
            result = super().start(
                grid, self.arrays(), left, timeout, train_config, evaluate_config, evaluate
            )
            result.arrays = self.arrays()
            return result
        finally:
            self.server.close()

    def arrays(self) -> ArrayRecord:
        """Return the global model."""
        return ArrayRecord(self.server.module.state_dict())

    # --- nodes ------------------------------------------------------------------------------------

    def _meet(self, grid: Grid, timeout: float) -> None:
        """Wait for all clients, and ask how many samples they have."""
        end = time.monotonic() + timeout
        while len(self._work) < self.num_clients:
            self._ask(grid, timeout)
            if time.monotonic() > end:
                raise FederationError(
                    f"{len(self._work)} of {self.num_clients} clients have connected within"
                    f" {timeout:g} seconds: start the others, or lower num_clients"
                )
            if len(self._work) < self.num_clients:
                time.sleep(PAUSE)

    def _ask(self, grid: Grid, timeout: float) -> None:
        """Ask new nodes which client they are."""
        nodes = sorted(grid.get_node_ids())
        self.clients = {node: client for node, client in self.clients.items() if node in nodes}
        new = [node for node in nodes if node not in self.clients]
        if not new:
            return
        messages = [Message(RecordDict(), node, MessageType.QUERY) for node in new]
        for reply in grid.send_and_receive(messages, timeout=timeout):
            if reply.has_error():
                continue
            found = reply.content["client"]
            client = int(found["client"])
            if not 0 <= client < self.num_clients:
                raise FederationError(
                    f"a node is client {client}, but there are {self.num_clients} clients: set"
                    " partition-id of each SuperNode to a number from 0, or raise num_clients"
                )
            if client in self.clients.values():
                raise FederationError(
                    f"two nodes are client {client}: set partition-id of each SuperNode to another"
                    " number"
                )
            self.clients[reply.metadata.src_node_id] = client
            self._work[client] = int(found["num_samples"]), int(found["batches_per_epoch"])

    # --- rounds -----------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each client of the round."""
        self._ask(grid, PAUSE)
        node_of = {client: node for node, client in self.clients.items()}
        return [
            Message(packed(task), node_of[task.client], MessageType.TRAIN)
            for task in self.server.tasks()
            if task.client in node_of
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies and write the checkpoint.

        Raises:
            FederationError: If all clients have failed.
        """
        found, failure = {}, None
        for message in replies:
            if message.has_error():
                node = message.metadata.src_node_id
                failure = (
                    f"round {self.server.round + 1}: client {self.clients.get(node, node)} has"
                    f" failed and is dropped: {message.error.reason}"
                )
                rank_zero_warn(failure)
                continue
            client, reply = unpacked(message.content)
            found[client] = reply
        if failure is not None and not found:
            raise FederationError(f"all clients have failed. {failure}")
        metrics = self.server.finish(found)
        if self.checkpoint is not None:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.checkpoint, partial(torch.save, self.server.state_dict()))
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return self.arrays(), MetricRecord(known)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no message: ``evaluate_fn`` evaluates on the server."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None: clients do not evaluate."""
        return None


# --- messages -------------------------------------------------------------------------------------


def packed(task: Task) -> RecordDict:
    """Return the content of a message with a task."""
    return RecordDict(
        {
            "task": ConfigRecord({name: getattr(task, name) for name in NUMBERS}),
            "values": MetricRecord(dict(task.values)),
            "model": ArrayRecord(dict(task.model)),
            "broadcast": ArrayRecord(dict(task.broadcast)),
        }
    )


def task_of(content: RecordDict) -> Task:
    """Return the task in the content of a message."""
    return Task(
        **dict(content["task"]),
        values=dict(content["values"]),
        model=content["model"].to_torch_state_dict(),
        broadcast=content["broadcast"].to_torch_state_dict(),
    )


def answer(client: int, reply: Reply) -> RecordDict:
    """Return the content of a message with a reply."""
    tensors = {"delta": reply.delta, "counters": reply.counters}
    return RecordDict(
        {
            "reply": ConfigRecord({"client": client, "dropped": reply.dropped or ""}),
            "numbers": MetricRecord(
                {"num_samples": reply.num_samples, "lr": reply.lr, "loss": reply.loss}
            ),
            "tensors": ArrayRecord(tensors),
            "extras": ArrayRecord(dict(reply.extras)),
        }
    )


def unpacked(content: RecordDict) -> tuple[int, Reply]:
    """Return the client and the reply in the content of a message."""
    about, numbers = content["reply"], content["numbers"]
    tensors = content["tensors"].to_torch_state_dict()
    reply = Reply(
        tensors["delta"],
        tensors["counters"],
        content["extras"].to_torch_state_dict(),
        int(numbers["num_samples"]),
        float(numbers["lr"]),
        float(numbers["loss"]),
        about["dropped"] or None,
    )
    return int(about["client"]), reply


#: Beginning of the names of a client's states, which end in the round.
STATE = "lightning_fl.round."


def read_kept(record: RecordDict, file: Path | None) -> Kept:
    """Return what a client has kept, in its context or in a file."""
    if file is not None:
        return Kept.read(file)
    found = {name: value for name, value in record.items() if name.startswith(STATE)}
    return Kept(
        {int(name.removeprefix(STATE)): v.to_torch_state_dict() for name, v in found.items()}
    )


def write_kept(kept: Kept, record: RecordDict, file: Path | None) -> None:
    """Put what a client keeps into its context, or into a file."""
    if file is not None:
        kept.write(file)
        return
    for name in [name for name in record if name.startswith(STATE)]:
        del record[name]
    for round, state in kept.states.items():
        record[f"{STATE}{round}"] = ArrayRecord(dict(state))


# --- clients --------------------------------------------------------------------------------------


def client_app(
    module: Callable[[], LightningModule],
    data: Callable[[Context], Any],
    aggregator: Callable[[], Aggregator] | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> ClientApp:
    """Return a Flower ``ClientApp`` that trains a LightningModule.

    The node's ``partition-id`` is the id of the client. What the client keeps between rounds
    (optimizer, local parameters, control variates, error feedback) is in ``Context.state``, which
    ends with Flower's run, or in a folder.

    Args:
        module: Function that returns the LightningModule.
        data: Function of the context that returns the client's data set, or a
            ``FederatedDataModule`` with all clients of a simulation.
        aggregator: Function that returns the rule of the server, if it has client-side work (such
            as :class:`~lightning_fl.aggregators.Scaffold`).
        folder: Folder on the node for what the client keeps, so that a run of a server that resumes
            finds it. None keeps it in ``Context.state``.
        options: Options of :class:`~lightning_fl.integrations.client.RemoteClient`.
    """

    def remote(context: Context) -> RemoteClient:
        rule = None if aggregator is None else aggregator()
        return RemoteClient(module(), data(context), rule, **options)

    return app_of(remote, folder)


def app_of(
    remote: Callable[[Context], RemoteClient], folder: str | Path | None = None
) -> ClientApp:
    """Return a Flower ``ClientApp``, as :func:`client_app` does.

    Args:
        remote: Function of the context that returns the client.
        folder: Folder on the node for what the client keeps; None keeps it in ``Context.state``.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        num_samples, batches = remote(context).work(client)
        about = {"client": client, "num_samples": num_samples, "batches_per_epoch": batches}
        return Message(RecordDict({"client": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        file = None if folder is None else Path(folder, f"client-{client}.pt")
        task, kept = task_of(message.content), read_kept(context.state, file)
        reply, state = remote(context).train(task, kept.at(task.last))
        if reply.dropped is None:
            write_kept(kept.after(task.round, state), context.state, file)
        return Message(answer(client, reply), reply_to=message)

    return app
