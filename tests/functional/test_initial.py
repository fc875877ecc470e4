"""Other initial parameters of a network."""

import torch

from lightning_fl.functional.initial import draw_parameters


def test_frozen_layers_keep_their_parameters():
    frozen, head = torch.nn.Linear(3, 2).requires_grad_(False), torch.nn.Linear(2, 1)
    head.bias.requires_grad_(False)
    before = frozen.weight.clone(), head.weight.detach().clone(), head.bias.clone()
    draw_parameters(torch.nn.Sequential(frozen, torch.nn.ReLU(), head), seed=1)
    assert all(map(torch.equal, (frozen.weight, head.bias), before[::2]))
    assert not torch.equal(head.weight, before[1])
