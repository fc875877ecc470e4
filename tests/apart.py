"""Clients of a server that share no object with it."""

from lightning_fl.integrations.exchange import Kept


def replies_of(clients, tasks, kept):
    """Let clients train, each with what it keeps."""
    replies = {}
    for task in tasks:
        before = kept.get(task.client, Kept())
        replies[task.client], state = clients[task.client].train(
            task, before.at(task.run, task.last)
        )
        kept[task.client] = before.after(task.run, task.last, task.round, state)
    return replies
