"""Networks used in the papers."""

from lightning_fl.models.cnn import CifarCNN, FashionCNN, KeywordCNN, LeNet
from lightning_fl.models.mlp import MLPClassifier

__all__ = ["CifarCNN", "FashionCNN", "KeywordCNN", "LeNet", "MLPClassifier"]
