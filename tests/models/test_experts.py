"""Mixtures of experts: both kinds are the same function, every row reaches its experts, and one
without rows gets zeros as its gradient."""

from __future__ import annotations

import pytest
import torch
from narrowfuzz.play.models import (
    CapacityExperts,
    GroupedExperts,
    LoopedExperts,
    Router,
    expert_products,
)


def weighed(model: LoopedExperts, x: torch.Tensor) -> torch.Tensor:
    """Every expert of every row, and the weights of those that it chose."""
    weights, chosen = model.router(x)
    each = torch.stack([expert(x) for expert in model.experts], 1)
    picked = each.gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))
    return (picked * weights[..., None]).sum(1)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_each_row_has_the_sum_of_its_experts(rows: int) -> None:
    torch.manual_seed(rows)
    model, x = LoopedExperts(16, 24, 4, 2, 32).double(), torch.randn(rows, 16).double()
    assert torch.allclose(model(x), weighed(model, x))
    assert torch.equal(model(x.reshape(1, rows, 16))[0], model(x))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("dim", "hidden"), [(16, 24), (5, 7)])
def test_groups_are_the_loop(dim: int, hidden: int, before: bool) -> None:
    """With one expert for each row the weight is 1, wherever it is multiplied."""
    torch.manual_seed(0)
    groups, loop = GroupedExperts(dim, hidden, 3, 1, before), LoopedExperts(dim, hidden, 3, 1, 32)
    with torch.no_grad():
        for parameter in groups.parameters():
            parameter.normal_()
        loop.router.weight.copy_(groups.router.weight)
        for number, expert in enumerate(loop.experts):
            for name in ("w1", "w2", "w3"):
                getattr(expert, name).weight.copy_(getattr(groups.experts, name)[number])
    x = torch.randn(40, dim)
    expected = loop(x) + groups.shared(x)
    assert torch.allclose(groups(x), expected, rtol=1e-3, atol=1e-3)
    assert torch.allclose(groups.double()(x.double()).float(), expected, rtol=1e-3, atol=1e-3)


def test_weights_add_up_to_one_and_experts_differ() -> None:
    weights, chosen = Router(8, 4, 2)(torch.randn(50, 8))
    assert torch.allclose(weights.sum(-1), torch.ones(50))
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_an_expert_without_rows_gets_zeros() -> None:
    model = GroupedExperts(8, 16, 3, 1, True)
    y = model(torch.randn(1, 8))
    y.backward(torch.ones_like(y))
    gradients = [p.grad for p in model.experts.parameters()]
    without = [n for n in range(3) if not gradients[0][n].any()]
    assert len(without) == 2
    assert not any(gradient[n].any() for gradient in gradients for n in without)


def test_padding_reaches_no_result() -> None:
    rows, offs = torch.randn(6, 5), torch.tensor([2, 2, 6], dtype=torch.int32)
    weights = torch.randn(3, 7, 5)
    found = expert_products(rows, weights, offs)
    assert found.shape == (6, 7)
    assert torch.allclose(found[:2], rows[:2] @ weights[0].t(), atol=1e-5)
    assert torch.allclose(found[2:], rows[2:] @ weights[2].t(), atol=1e-5)


def test_rows_beyond_an_experts_capacity_have_the_shared_expert_alone() -> None:
    torch.manual_seed(1)
    model, x = CapacityExperts(16, 24, 4), torch.randn(40, 16)
    with torch.no_grad():
        for parameter in model.experts.parameters():
            parameter.normal_()
        model.router.weight[0] = 8.0 * x.mean(0)
    _, chosen = model.router(x)
    routed = model(x) - model.shared(x)
    place = torch.stack([(chosen[:i, 0] == chosen[i, 0]).sum() for i in range(40)])
    kept = place < 16  # 5/4 of 10 rows, in eights
    assert not kept.all() and kept.any()
    assert routed[~kept].abs().max() < 1e-5
    w1, w2, w3 = (w[chosen[:, 0]] for w in model.experts.parameters())
    h = torch.nn.functional.silu((w1 @ x[..., None])[..., 0]) * (w3 @ x[..., None])[..., 0]
    assert torch.allclose(routed[kept], (w2 @ h[..., None])[kept][..., 0], rtol=1e-3, atol=1e-2)
    exact = model.double()(x.double())
    assert torch.allclose((exact - model.shared(x.double())).float(), routed, rtol=1e-3, atol=1e-2)
