"""Networks of the papers: their sizes, by hand, and the order of their layers."""

import pytest
import torch

from lightning_fl.models import (
    CharLSTM,
    CifarCNN,
    FashionCNN,
    FemnistCNN,
    KeywordCNN,
    MLPClassifier,
)
from lightning_fl.types import FederationError


def size(net):
    return sum(p.numel() for p in net.parameters())


def kinds(net):
    return [type(layer).__name__ for layer in net]


def test_mostafas_mlp_has_89610_parameters():
    net = MLPClassifier([784, 100, 100, 10])
    assert size(net) == (784 * 100 + 100) + (100 * 100 + 100) + (100 * 10 + 10) == 89_610
    assert kinds(net) == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_mostafas_cnn_has_4259274_parameters():
    net = CifarCNN()
    convs = (3 * 32 * 25 + 32) + (32 * 64 * 25 + 64)
    assert size(net) == convs + (64 * 8 * 8 * 1024 + 1024) + (1024 * 10 + 10) == 4_259_274
    layers = ["Conv2d", "MaxPool2d", "ReLU"]
    assert kinds(net) == layers * 2 + ["Flatten", "Linear", "ReLU", "Linear"]


def test_the_keyword_cnn_pools_after_each_pair():
    net = KeywordCNN()
    convs = (9 * 64 + 64) + 3 * (64 * 64 * 9 + 64)
    assert size(net) == convs + (64 * 8 * 8 * 1024 + 1024) + (1024 * 10 + 10) == 4_317_002
    pair = ["Conv2d", "ReLU", "Conv2d", "MaxPool2d", "ReLU"]
    assert kinds(net) == pair * 2 + ["Flatten", "Linear", "ReLU", "Linear"]


def test_the_fashion_cnn_hands_1600_features_to_the_classes():
    net = FashionCNN()
    assert net[-1].in_features == 64 * 5 * 5 == 1600
    assert size(net) == (1 * 32 * 9 + 32) + (32 * 64 * 9 + 64) + (1600 * 10 + 10) == 34_826
    assert kinds(net) == ["Conv2d", "MaxPool2d", "ReLU"] * 2 + ["Flatten", "Linear"]


def test_leafs_networks_have_the_published_sizes():
    convs = (1 * 32 * 25 + 32) + (32 * 64 * 25 + 64)
    head = (64 * 7 * 7 * 2048 + 2048) + (2048 * 62 + 62)
    assert size(FemnistCNN()) == convs + head == 6_603_710
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert size(CharLSTM(80)) == 80 * 8 + lstm + (256 * 80 + 80) == 819_920


def test_the_lstm_reads_the_whole_text():
    net = CharLSTM(vocabulary=5, hidden=6)
    text = torch.tensor([[1, 2, 3, 4]])
    changed = torch.tensor([[4, 2, 3, 4]])
    assert net(text).shape == (1, 5)
    assert not torch.allclose(net(text), net(changed))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (MLPClassifier([784, 10]), (1, 28, 28)),
        (MLPClassifier([12, 5, 10]), (12,)),
        (CifarCNN(width=2, hidden=4), (3, 32, 32)),
        (CifarCNN(width=2, hidden=4, in_channels=1), (1, 32, 32)),
        (KeywordCNN(width=2, hidden=4), (1, 32, 32)),
        (FashionCNN(width=2), (1, 28, 28)),
        (FashionCNN(width=2, hidden=6), (1, 28, 28)),
    ],
)
def test_images_become_ten_logits(net, shape):
    x = torch.randn(3, *shape)
    logits = net(x)
    assert logits.shape == (3, 10)
    assert (logits < 0).any()  # no ReLU at the end
    # One sample does not know of the others.
    torch.testing.assert_close(net(x[1:2]), logits[1:2])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([784], r"two or more widths.* got \[784\]"),
        ([784, 0, 10], r"sizes\[1\] must be an integer of at least 1, got 0"),
        ([], r"got \[\]"),
    ],
)
def test_sizes_of_no_network_are_refused(sizes, words):
    with pytest.raises(FederationError, match=words):
        MLPClassifier(sizes)
