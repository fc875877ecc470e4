"""Networks used in the papers, and adapters for networks of other libraries."""

from lightning_fl.models.cnn import CifarCNN, FashionCNN, KeywordCNN, LeNet
from lightning_fl.models.lora import LoRA
from lightning_fl.models.mlp import MLPClassifier
from lightning_fl.models.text import TextTransformer
from lightning_fl.models.timm_model import TimmModel

__all__ = [
    "CifarCNN",
    "FashionCNN",
    "KeywordCNN",
    "LeNet",
    "LoRA",
    "MLPClassifier",
    "TextTransformer",
    "TimmModel",
]
