"""Where clients train: in the user's module itself, or many at once in lanes."""

from lightning_fl.lanes.host import BufferPolicy, LaneHost, TensorList, flat
from lightning_fl.lanes.module import Lanes, lane_host
from lightning_fl.lanes.optimizer_values import optimizers_in
from lightning_fl.lanes.plain import ModuleLane

__all__ = [
    "BufferPolicy",
    "LaneHost",
    "Lanes",
    "ModuleLane",
    "TensorList",
    "flat",
    "lane_host",
    "optimizers_in",
]
