"""Data modules that split a data set over clients; one file per data set."""

from lightning_fl.datamodules.audio import AudioDataModule, Augment, Clip, LogMel
from lightning_fl.datamodules.batches import Draws
from lightning_fl.datamodules.cifar10 import CIFAR10
from lightning_fl.datamodules.digits import Digits
from lightning_fl.datamodules.fashion_mnist import FashionMNIST
from lightning_fl.datamodules.federated import FederatedDataModule
from lightning_fl.datamodules.from_clients import FromClients
from lightning_fl.datamodules.from_datamodule import FromDataModule
from lightning_fl.datamodules.from_hf import FromHuggingFace
from lightning_fl.datamodules.images import ImageDataModule, TorchvisionDataModule
from lightning_fl.datamodules.inputs import Characters, Relabel, Resized, Words
from lightning_fl.datamodules.mnist import MNIST
from lightning_fl.datamodules.newsgroups import Newsgroups
from lightning_fl.datamodules.speech_commands import SpeechCommands
from lightning_fl.datamodules.split_datamodule import SplitDataModule
from lightning_fl.datamodules.spoken_digits import SpokenDigits
from lightning_fl.datamodules.storage import InMemory
from lightning_fl.datamodules.topic_text import TopicText

__all__ = [
    "CIFAR10",
    "MNIST",
    "AudioDataModule",
    "Augment",
    "Characters",
    "Clip",
    "Digits",
    "Draws",
    "FashionMNIST",
    "FederatedDataModule",
    "FromClients",
    "FromDataModule",
    "FromHuggingFace",
    "ImageDataModule",
    "InMemory",
    "LogMel",
    "Newsgroups",
    "Relabel",
    "Resized",
    "SpeechCommands",
    "SplitDataModule",
    "SpokenDigits",
    "TopicText",
    "TorchvisionDataModule",
    "Words",
]
