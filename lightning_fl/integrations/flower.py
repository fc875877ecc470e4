"""A federation on the machines of a Flower deployment, or in Flower's simulation engine.

The server is a Flower ``Strategy`` with the rules of this library, and a client is a ``ClientApp``
that trains a LightningModule as ``FederatedLoop`` does. Requires flwr:
``pip install "lightning_fl[flower]"``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.files import error_context, one_line
from lightning_fl.integrations import messages
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.exchange import Kept, file_of
from lightning_fl.integrations.messages import Members, Reply, Task
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.options import check_integer

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

_M = TypeVar("_M", bound=messages.Packable)
#: Seconds between two looks for clients, and between two messages that clients are missing.
PAUSE, NOTICE = 1.0, 30.0
#: Flower's log, of which ``flwr run --stream`` shows each line.
#:
#: :meta hide-value:
LOG = logging.getLogger("flwr")


class FederationStrategy(Strategy):
    """Flower strategy that plans and aggregates as ``FederatedLoop`` does.

    Args:
        server: The server. Its module has the initial global model, and afterwards the last.
        num_clients: Number of clients. The first round begins when they are connected.
        checkpoint: Checkpoint to write after each round. If it exists, the run resumes from it.
    """

    def __init__(
        self, server: RemoteServer, num_clients: int, checkpoint: str | Path | None = None
    ) -> None:
        self.server = server
        self.num_clients = check_integer("num_clients", num_clients, min=1)
        self.checkpoint = checkpoint
        self.members = Members("node", num_clients)
        #: The node of each query without an answer.
        self._asked: dict[str, int] = {}
        #: Client of each node that trains in this round, and seconds that it has for it.
        self._training: dict[int, int] = {}
        self._timeout = 3600.0
        #: Whether a client has ever replied.
        self._is_proven = False

    def summary(self) -> None:
        """Do nothing: the log of Flower has the rounds."""

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
            train_config: Must be empty: the policy sets what clients get.
            evaluate_config: Must be empty: clients do not evaluate.
            evaluate_fn: Function that evaluates the global model on the server.

        Raises:
            FederationError: If clients are missing after ``timeout``, or all clients of a round
                fail.
        """
        if train_config or evaluate_config:
            raise FederationError(
                "train_config and evaluate_config do not reach clients: let the policy set"
                " hyperparameters, and pass evaluate_fn"
            )
        self._timeout = timeout
        self._meet(grid, timeout)
        initial = initial_arrays and initial_arrays.to_torch_state_dict()
        try:
            self.server.begin(*self.members.work(), num_rounds, initial, self.checkpoint)
            if done := self.server.round:
                LOG.info("resuming after round %d of %d: %s", done, num_rounds, self.checkpoint)
            evaluate = evaluate_fn and (lambda round, arrays: evaluate_fn(round + done, arrays))
            left = max(num_rounds - done, 0)
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
        members = self.members
        begun = said = time.monotonic()
        self._ask(grid)
        while missing := sorted({*range(self.num_clients)} - {*members.clients.values()}):
            now, refused = time.monotonic(), members.refusals()
            state = f"clients {missing} of {self.num_clients} have not connected{refused}"
            if now - begun > timeout:
                raise FederationError(
                    f"{state} within {timeout:g} seconds: start the others, or lower num_clients"
                )
            if now - said > NOTICE:
                said = now
                LOG.info("lightning_fl: %s. Waiting for them", state)
                members.refused.clear()  # they are asked again
            time.sleep(PAUSE)
            self._ask(grid)

    def _ask(self, grid: Grid) -> None:
        """Ask new nodes which client they are, and read the answers that have come."""
        members, nodes = self.members, set(grid.get_node_ids())
        members.keep(nodes)
        known = {*members.clients, *members.refused, *self._asked.values()}
        for node in sorted(nodes - known):
            for id in grid.push_messages([Message(RecordDict(), node, MessageType.QUERY)]):
                self._asked[id] = node
        for answer in grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(answer.metadata.reply_to_message_id)
            try:
                members.admit(node, content_of(answer).get("about"))
            except FederationError as error:
                members.refuse(node, error)

    # --- rounds -----------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each client of the round.

        Raises:
            FederationError: If none of them has a node any more.
        """
        self.members.refused.clear()  # they are asked again
        self._ask(grid)
        node_of = {client: node for node, client in self.members.clients.items()}
        tasks = self.server.tasks()
        if gone := [task.client for task in tasks if task.client not in node_of]:
            why = f"round {self.server.round + 1}: clients {gone} are not connected"
            if len(gone) == len(tasks):
                raise FederationError(f"{why}, and no other takes part: start their SuperNodes")
            rank_zero_warn(f"{why} and are dropped")
        present = [task for task in tasks if task.client in node_of]
        self._training = {node_of[task.client]: task.client for task in present}
        return [Message(packed(task), node_of[task.client], MessageType.TRAIN) for task in present]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies and write the checkpoint.

        Raises:
            FederationError: If no client has replied, or all clients have failed and never worked.
        """
        late, found, failure = dict(self._training), dict[int, Reply](), ""
        this = f"round {self.server.round + 1}"
        for message in replies:
            node = message.metadata.src_node_id
            client = late.pop(node, None)
            try:
                if client is None:
                    raise FederationError("it does not train in this round")
                found[client] = unpacked(Reply, content_of(message))
            except FederationError as error:
                name = f"node {node}" if client is None else f"client {client}"
                failure = f"{this}: {name} has failed and is dropped: {error}"
                rank_zero_warn(failure)
        if late:
            failure = (
                f"{this}: clients {sorted(late.values())} have not replied within"
                f" {self._timeout:g} seconds and are dropped. If they train longer, raise timeout"
            )
            rank_zero_warn(failure)
        self._is_proven |= bool(found)
        if self._training and not found and (not self._is_proven or late == self._training):
            raise FederationError(f"all clients have failed. {failure}")
        metrics = self.server.finish(found)
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


def packed(message: messages.Packable) -> RecordDict:
    """Return the content of a message."""
    about, tensors = message.pack()
    return RecordDict({"about": ConfigRecord(about), "tensors": ArrayRecord(tensors)})


def unpacked(kind: type[_M], content: RecordDict) -> _M:
    """Return the message in a content.

    Raises:
        FederationError: If it is another one.
    """
    with error_context(f"its message is not a {kind.__name__.lower()}", Exception):
        tensors = content["tensors"].to_torch_state_dict()
    return kind.unpack(content.get("about"), tensors)


def content_of(message: Message) -> RecordDict:
    """Return the content of a message.

    Raises:
        FederationError: If the node has failed.
    """
    if message.has_error():
        raise FederationError(one_line(message.error.reason, 500))
    return message.content


#: Beginning of the names of a client's states in its context, before the id of an update.
STATE = "lightning_fl."


def read_kept(record: RecordDict, file: Path | None) -> Kept:
    """Return what a client has kept, in its context or in a file."""
    if file is not None:
        return Kept.read(file)
    names = [name for name in record if name.startswith(STATE)]
    return Kept({int(n.removeprefix(STATE)): record[n].to_torch_state_dict() for n in names})


def write_kept(kept: Kept, record: RecordDict, file: Path | None) -> None:
    """Put what a client keeps into its context, or into a file."""
    if file is not None:
        kept.write(file)
        return
    for name in [name for name in record if name.startswith(STATE)]:
        del record[name]
    for update, state in kept.states.items():
        record[f"{STATE}{update}"] = ArrayRecord(dict(state))


# --- clients --------------------------------------------------------------------------------------


def client_app(
    remote: Callable[[Context], RemoteClient], folder: str | Path | None = None
) -> ClientApp:
    """Return a Flower ``ClientApp`` that trains a LightningModule.

    The node's ``partition-id`` is the id of the client. What the client keeps between rounds
    (optimizer, local parameters, control variates, error feedback) is in ``Context.state``, which
    ends with Flower's run, or in a folder.

    Args:
        remote: Function of the context that returns the client. It is called for each message.
        folder: Folder on the node for what the client keeps, so that a run of a server that resumes
            finds it. None keeps it in ``Context.state``.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if folder is not None:
            file_of(client, folder)
        about = ConfigRecord(remote(context).about(client))
        return Message(RecordDict({"about": about}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        file = None if folder is None else file_of(client, folder)
        task = unpacked(Task, message.content)
        reply, kept = remote(context).train(task, read_kept(context.state, file))
        write_kept(kept, context.state, file)
        return Message(packed(reply), reply_to=message)

    return app
