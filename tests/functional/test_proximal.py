import pytest
import torch

from lightning_fl.functional import proximal_penalty


def test_one_weight_by_hand():
    # 0.5 / 2 * (3 - 1)^2 = 1
    assert proximal_penalty([torch.tensor([3.0])], [torch.tensor([1.0])], mu=0.5).item() == 1.0


def test_distances_of_all_tensors_add_up():
    params = [torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)]
    anchor = [torch.zeros(1, 2), torch.tensor(1.0)]
    # 2 / 2 * (1 + 4 + 4) = 9
    assert proximal_penalty(params, anchor, mu=2.0).item() == 9.0


def test_a_complex_number_is_two_real_ones():
    w = torch.tensor([3 + 1j], dtype=torch.complex128, requires_grad=True)
    penalty = proximal_penalty([w], [torch.tensor([1 + 2j])], mu=0.5)
    penalty.backward()
    assert penalty.item() == 0.5 / 2 * (4 + 1)
    assert w.grad.item() == 0.5 * (2 - 1j)


def test_the_gradient_is_mu_times_the_distance():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (4,), ()]
    params, anchor = (
        [
            torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True)
            for s in shapes
        ]
        for _ in range(2)
    )
    proximal_penalty(params, [w.detach() for w in anchor], mu=0.3).backward()
    for w, w_t in zip(params, anchor, strict=True):
        torch.testing.assert_close(w.grad, 0.3 * (w - w_t).detach(), atol=1e-15, rtol=0)
        assert w_t.grad is None


def test_autograd_agrees_with_finite_differences():
    anchor = [torch.tensor([0.5, -1.0], dtype=torch.float64)]
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: proximal_penalty([w], anchor, 0.7), w)


def test_without_mu_or_distance_there_is_no_penalty():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    assert proximal_penalty([w], [torch.zeros(2)], mu=0.0).item() == 0
    penalty = proximal_penalty([w], [w.detach()], mu=5.0)
    penalty.backward()
    assert penalty.item() == 0
    assert w.grad.tolist() == [0, 0]


def test_another_number_of_tensors_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        proximal_penalty([torch.ones(1)], [torch.ones(1), torch.ones(1)], mu=1.0)
