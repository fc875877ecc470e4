"""What happens to an update between client and server, one kind a file."""

from lightning_fl.transforms.base import Message, UpdateTransform
from lightning_fl.transforms.compression import Compression, Quantize, TopK

__all__ = ["Compression", "Message", "Quantize", "TopK", "UpdateTransform"]
