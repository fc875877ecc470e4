"""What remote clients say is checked in one place, and never ends a run."""

import pytest

from lightning_fl import __version__
from lightning_fl.errors import FederationError
from lightning_fl.integrations.messages import Members, Reply

HELLO = {"client": 0, "num_samples": 12, "batches_per_epoch": 3, "version": __version__}


def refusal(members, sender, message):
    """Return why a sender is not used."""
    with pytest.warns(UserWarning, match=f"node {sender} is not used: "):
        members.admit(sender, message)
    assert sender not in members.clients
    return members.refused[sender]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"client": 2}, "it is client 2, and there are 2 clients: number them from 0"),
        ({"client": True}, "its client is not the int that lightning_fl sends"),
        ({"num_samples": 0}, "client 0 has 0 samples in 3 batches"),
        ({"num_samples": 2**62}, "samples in 3 batches"),
        ({"num_samples": 10**5000}, "its num_samples is not the int"),
        ({"batches_per_epoch": 0}, "client 0 has 12 samples in 0 batches"),
        ({"batches_per_epoch": 13}, "client 0 has 12 samples in 13 batches"),
        ({"version": "0.0.1"}, "client 0 has version 0.0.1 of lightning_fl, and the server"),
        ({"version": "\x1b[2J\n" + "x" * 9999}, "client 0 has version  [2J xxx"),
    ],
)
def test_first_message_that_cannot_be_true_admits_nobody(changed, why):
    refused = refusal(Members("node", 2), 70, HELLO | changed)
    assert why in refused
    assert refused.isprintable()
    assert len(refused) <= 500


@pytest.mark.parametrize("message", [None, 3, ["client"], {}, {"client": 0}])
def test_first_message_of_another_program_admits_nobody(message):
    assert "is not the int that lightning_fl sends" in refusal(Members("node", 2), 70, message)


def test_number_belongs_to_the_node_that_came_first_until_it_is_gone():
    members = Members("node", 2)
    members.admit(70, HELLO)
    why = refusal(members, 71, HELLO)
    assert why == "client 0 is node 70, which came first: give each node another number"
    assert "came first" in refusal(members, 72, HELLO | {"num_samples": 13})
    members.keep([71, 72])
    members.admit(71, HELLO)
    assert members.clients == {71: 0}


def test_node_keeps_its_number():
    members = Members("node", 2)
    members.admit(70, HELLO)
    with pytest.warns(UserWarning, match="is not used"):
        members.admit(70, HELLO | {"client": 1})
    assert members.clients == {70: 0}


def test_declared_samples_hold_for_the_run():
    members = Members("node", 1)
    members.admit(70, HELLO)
    members.keep([])
    members.admit(71, HELLO | {"num_samples": 15})
    assert members.work() == ([15], [3])
    members.keep([])
    assert "has come back with other samples: to use them" in refusal(members, 72, HELLO)


ABOUT = {"client": 0, "update": 7, "num_samples": 12, "lr": 0.1, "loss": 0.5, "dropped": ""}
TENSORS = {"delta": [1.0], "counters": [0]}


@pytest.mark.parametrize(
    ("about", "tensors"),
    [
        (None, TENSORS),
        ({**ABOUT, "update": "7"}, TENSORS),
        (ABOUT, {"delta": [1.0]}),
        (ABOUT, {**TENSORS, "delta": ["x"]}),
        (ABOUT, {**TENSORS, "counters": [[1], [2, 3]]}),
        (ABOUT, {**TENSORS, "extras.loss": object()}),
    ],
)
def test_reply_of_another_program_is_an_error_of_the_federation(about, tensors):
    with pytest.raises(FederationError, match=r"^its message is not a reply|^its \w+ is not the "):
        Reply.unpack(about, tensors)
    assert Reply.unpack(ABOUT, TENSORS).update == 7
