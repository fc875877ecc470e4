"""Networks used in the papers, and adapters for networks of other libraries."""

from lightning_fl.models.cnn import CifarCNN, FashionCNN, FemnistCNN, KeywordCNN, LeNet
from lightning_fl.models.lora import LoRA
from lightning_fl.models.lstm import CharLSTM
from lightning_fl.models.mlp import MLPClassifier
from lightning_fl.models.text import TextTransformer
from lightning_fl.models.timm_model import TimmModel

__all__ = [
    "CharLSTM",
    "CifarCNN",
    "FashionCNN",
    "FemnistCNN",
    "KeywordCNN",
    "LeNet",
    "LoRA",
    "MLPClassifier",
    "TextTransformer",
    "TimmModel",
]
