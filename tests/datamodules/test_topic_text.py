"""Generated texts: their lengths, words and topics."""

import pytest
import torch

from lightning_fl.datamodules import TopicText

OPTIONS = {"num_classes": 3, "vocabulary": 41, "length": 10, "train_size": 3000, "val_size": 0}


def texts(train=True, **options):
    return TopicText(num_clients=2, **OPTIONS | options).load(train).tensors


def test_tokens_come_first_and_zeros_follow():
    tokens, topics = texts()
    lengths = (tokens > 0).sum(1)
    assert torch.equal(tokens > 0, torch.arange(10) < lengths[:, None])
    assert sorted(set(lengths.tolist())) == list(range(3, 11))
    assert sorted(set(tokens.flatten().tolist())) == list(range(41))
    assert sorted(set(topics.tolist())) == [0, 1, 2]


def test_a_topic_has_words_of_its_own_as_often_as_it_is_clear():
    """With clarity 1 a text of topic k has only its 4 words, by Zipf's law in the same order."""
    tokens, topics = texts(clarity=1.0)
    orders = []
    for topic in range(3):
        words, counts = tokens[topics == topic].unique(return_counts=True)
        words, counts = words[1:], counts[1:]  # without padding
        order = counts.argsort(descending=True)
        expected = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12)
        torch.testing.assert_close(counts[order] / counts.sum(), expected, rtol=0, atol=0.02)
        orders.append(words[order].tolist())
    assert len(set(map(tuple, orders))) == 3
    tokens, topics = texts(clarity=0.25)
    ranks = 1 / torch.arange(1, 41)
    for topic, words in enumerate(orders):
        drawn = tokens[topics == topic]
        share = torch.isin(drawn[drawn > 0], torch.tensor(words)).float().mean()
        others = (ranks / ranks.sum())[torch.tensor(words) - 1].sum()
        assert float(share) == pytest.approx(0.25 + 0.75 * float(others), abs=0.02)


def test_texts_depend_on_their_options_alone():
    assert torch.equal(texts()[0], texts(seed=7)[0])
    assert not torch.equal(texts()[0], texts(text_seed=1)[0])
    assert not torch.equal(texts()[1][:1000], texts(train=False)[1])
    made = [TopicText(num_clients=2, **OPTIONS, clarity=c) for c in (0.3, 0.4)]
    for data in made:
        data.setup("fit")
    assert made[0].checksum != made[1].checksum
