"""Networks of the papers."""

from lightning_fl.models.cnn import CifarCNN, FashionCNN, KeywordCNN
from lightning_fl.models.mlp import MLPClassifier

__all__ = ["CifarCNN", "FashionCNN", "KeywordCNN", "MLPClassifier"]
