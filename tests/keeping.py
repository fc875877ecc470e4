"""Options of fits that are interrupted and resumed."""

from lightning_fl.callbacks import RoundCheckpoint


def keep(folder, *callbacks):
    """Options of a fit that leaves a checkpoint of its last round in a folder."""
    return {"callbacks": [RoundCheckpoint(str(folder)), *callbacks], "enable_checkpointing": True}


def resume(folder, *callbacks):
    """Options of a fit that goes on with it."""
    return keep(folder, *callbacks) | {"ckpt_path": folder / "last.ckpt"}
