"""Whatever watches kernels lets a model do what it does: operators that take functions, as flex
attention does, and parts that the model compiles itself run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrowfuzz.arms.operators import FunctionWatch, OperatorWatch
from narrowfuzz.own_models.calls import Functions, Kernels
from narrowfuzz.own_models.ids import lookups
from narrowfuzz.play.kernels import eagerly
from narrowfuzz.play.watches import AttentionWatch, KernelWatch
from torch.nn.attention.flex_attention import flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def causal(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return torch.where(query >= key, score, -float("inf"))


def attended() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16, generator=generator) for _ in "qkv")
    with torch.no_grad(), eagerly():
        attended: torch.Tensor = flex_attention(q, k, v, score_mod=causal)
    return attended


WATCHES = [AttentionWatch, KernelWatch, OperatorWatch, Kernels, lookups]


@pytest.mark.parametrize("watch", WATCHES)
def test_flex_attention_runs_as_without(watch: Callable[[], Any]) -> None:
    plain = attended()
    with watch():
        assert torch.equal(attended(), plain)


def test_what_torch_hides_is_said_not_to_be_judged() -> None:
    with OperatorWatch() as watch:
        attended()
    assert watch.unjudged["flex_attention"] == "torch hides what it calls"


@pytest.mark.parametrize("watch", [*WATCHES, lambda: FunctionWatch(OperatorWatch()), Functions])
def test_what_a_model_compiles_runs_eagerly(watch: Callable[[], Any]) -> None:
    """Dynamo skips what runs in a mode, and ``fullgraph`` makes that an error."""
    part = torch.compile(lambda x: torch.nn.functional.silu(x) * x, backend="eager", fullgraph=True)
    x = torch.linspace(-2.0, 2.0, 8, requires_grad=True)
    with eagerly(), watch():
        part(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
