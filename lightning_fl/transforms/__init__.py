"""Transforms of client updates, such as compression."""

from lightning_fl.transforms.base import Message, UpdateTransform
from lightning_fl.transforms.compression import Compression, Quantize, TopK

__all__ = ["Compression", "Message", "Quantize", "TopK", "UpdateTransform"]
