"""Models of others that are compiled or recomputed: products that look like recomputes, blocks that
share tensors or are called by keyword, and parts that do something when they begin to train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.case.events import Backward, Forward, Step
from narrowfuzz.own_models import register
from narrowfuzz.play.layers import in_backward
from narrowfuzz.rules.contract import _NO_KEYWORDS
from narrowfuzz.rules.recompute import _within
from test_own_causes import ROWWISE, judged
from test_own_models import RECIPES, Own, own
from torch import nn

__all__ = ["own"]  # a fixture

FP32 = {"recipe": "torch.fp32", "dtype": "fp32"}
REENTRANT = FP32 | {"checkpoint": "reentrant"}

UNROLLED = """
class Iterate(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(64, 64)
    def forward(self, x, D, y):
        return F.softshrink(self.mix(x - 0.1 * ((x @ D.t() - y) @ D)), 0.01)
class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.D = nn.Parameter(torch.randn(32, 64) * 0.1)
        self.steps = nn.ModuleList([Iterate(), Iterate()])
    def forward(self, x):
        y = x[:, :32]
        for step in self.steps:
            x = step(x, self.D, y)
        return x
def build():
    return Unrolled(), torch.randn(48, 64)
"""
PENALTY = """
class Penalty(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 32, bias=False)
    def forward(self, x):
        w = self.a.weight
        return self.a(x), (w @ w.t() - torch.eye(32)).square().sum()
def build():
    return Penalty(), torch.randn(32, 64)
"""
BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x, memory=0, state=None):
        y = x + self.k(memory + x).sigmoid() * self.v(memory + x)
        return y if state is None else (y, [state[0] + y.mean()])
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shift = nn.Linear(32, 32), nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
    def forward(self, x):
        memory, state, y = self.first(x), [self.shift * 2], x
        for block in self.blocks:
            {}
        return y
def build():
    return Model(), torch.randn(16, 32)
"""


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_a_gradients_product_is_no_recompute(own: Own, checkpoint: str) -> None:
    """Its forward multiplies by D and by its transpose, as gradients do."""
    found = judged(own(UNROLLED), **FP32, compile="aot_eager", checkpoint=checkpoint)
    assert found.ran and not found.causes


def test_a_weight_that_is_used_unquantised_is_no_wrong_copy(own: Own) -> None:
    found = judged(own(PENALTY), ROWWISE, dtype="fp32", compile="aot_eager")
    assert found.ran and not found.causes


def test_blocks_that_share_a_tensor_may_add_its_gradients_in_another_order(own: Own) -> None:
    found = judged(own(BLOCKS.format("y = block(y, memory)")), **REENTRANT)
    assert found.ran and not found.causes


def test_what_a_reentrant_checkpoint_does_not_take_is_no_finding(own: Own) -> None:
    found = judged(own(BLOCKS.format("y = block(y, memory=memory)")), **REENTRANT)
    assert not found.causes
    assert _NO_KEYWORDS in {v.why for v in found.verdicts if v.rule == "contract"}
    listed = BLOCKS.format("y, state = block(y, memory, state)")
    found = judged(own(listed.replace("return y\ndef", "return y + state[0]\ndef")), **REENTRANT)
    assert found.ran and not found.causes


def test_a_gradient_that_only_a_recompute_loses_is_found(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's, in a block: no documented limit explains it."""
    text = own(BLOCKS.format("y = block(y, memory)"))
    plain = RECIPES["torch.fp32"]

    def converted(model: nn.Module, spec: object) -> nn.Module:
        linear = model.get_submodule("model.blocks.1.v")
        forward = linear.forward

        def losing(x: torch.Tensor) -> torch.Tensor:
            if in_backward():
                return F.linear(x, linear.weight, linear.bias.detach())
            return forward(x)

        linear.forward = losing
        return model

    monkeypatch.setitem(RECIPES, "torch.fp32", replace(plain, convert=converted))
    causes = judged(text, **REENTRANT).causes
    assert "no grad_parameter" in {v.symptom for v in causes if v.rule == "contract"}


@pytest.mark.parametrize(
    ("x", "near"),
    [([8.0, 1.0, np.inf], True), ([8.0, 1.0 + 2**-16, np.inf], True), ([8.0, 1.001, np.inf], False),
     ([8.0, np.nan, np.inf], False), ([8.0, 1.0, 3.0], False)],
)  # fmt: skip
def test_only_roundings_pass_for_another_order_of_sums(x: list[float], near: bool) -> None:
    plain = np.array([8.0, 1.0, np.inf], dtype=np.float32)
    assert _within(2**-18, np.array(x, dtype=np.float32), plain) == near


def test_a_part_that_acts_when_it_trains_again_gets_to_do_so(own: Own) -> None:
    text = own("""
class Merged(nn.Linear):
    shift = 0.0
    def train(self, mode=True):
        self.shift = 0.0 if mode else 1.0
        return super().train(mode)
    def forward(self, x):
        return super().forward(x) + self.shift
def build():
    return nn.Sequential(Merged(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.ones(16, 32)
""")
    events = (Forward(), Backward(of=(0,)), Step(), Forward(mode="eval"), Forward(),
              Backward(of=(2,)), Step())  # fmt: skip
    found = judged(text, **FP32, events=events)
    assert found.ran and not found.causes


def test_a_scale_that_is_used_several_times_may_be_added_in_another_order(own: Own) -> None:
    text = own("""
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        for linear in (self.a, self.b, self.c):
            x = x + self.scale * linear(x)
        return x
def build():
    return Shared(), torch.randn(16, 32)
""")
    assert register(text)[0].gradients.reused
    events = Forward(), Forward(), Backward(of=(0, 1)), Step()
    found = judged(text, **FP32, events=events)
    assert found.ran and not found.causes
    assert ("R26", "not_applicable") in {(v.rule, v.status) for v in found.verdicts}


def test_gradients_of_gradients_may_be_added_in_another_order(own: Own) -> None:
    """A forward that differentiates uses a parameter of one product in several."""
    text = own("""
class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.w = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32))
    def forward(self, x):
        slopes = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(row @ self.w)))
        return slopes(self.a(x).tanh()).square().mean((1, 2))
def build():
    return Penalised(), torch.randn(16, 32)
""")
    events = Forward(), Forward(), Backward(of=(0, 1)), Step()
    found = judged(text, **FP32, events=events)
    assert found.ran and not found.causes
    assert ("R26", "not_applicable") in {(v.rule, v.status) for v in found.verdicts}


def test_gradients_are_added_up_in_their_own_dtypes(own: Own) -> None:
    text = own("""
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inside = nn.Linear(32, 32), nn.Linear(32, 32).bfloat16()
    def forward(self, x):
        return self.inside(self.first(x).bfloat16()).float()
def build():
    return Mixed(), torch.randn(16, 32)
""")
    found = judged(text, **FP32, microbatches=3)
    assert found.ran and not found.causes
    assert ("R23", "ok") in {(v.rule, v.status) for v in found.verdicts}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            "torch.func.vmap(self.a)(x)",
            "build: it calls a linear inside of a transform of torch.func, such as vmap",
        ),
        (
            "self.a(torch.nested.nested_tensor([x, x])).to_padded_tensor(0.0)",
            "it calls a linear with a nested tensor",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_reason(own: Own, call: str, why: str) -> None:
    text = own(f"""
class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
    def forward(self, x):
        return {call}
def build():
    return Mapped(), torch.randn(16, 32)
""")
    with pytest.raises(ValueError, match=why):
        register(text)


def test_a_weight_that_draws_random_numbers_is_refused(own: Own) -> None:
    text = own("""
from torch.nn.utils import parametrize
def build():
    model = nn.Sequential(nn.Linear(32, 32))
    parametrize.register_parametrization(model[0], "weight", nn.Dropout(0.25))
    return model, torch.randn(16, 32)
""")
    with pytest.raises(ValueError, match="each time that the weight of 0 is read, random numbers"):
        register(text)


def test_what_autocast_composes_in_inference_mode_is_the_same_when_it_is_recorded(
    own: Own,
) -> None:
    text = own("""
class Averages(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32, 32))
    def forward(self, x):
        h = x + self.a(x).float()
        if self.training:
            self.mean.data.lerp_(torch.einsum("bnd,bne->de", h, h).float(), 0.1)
        return h
def build():
    return Averages(), torch.randn(2, 32, 32)
""")
    found = judged(text, **FP32, grad_mode="inference", autocast=True)
    assert found.ran and not found.causes


def test_what_torch_composes_in_inference_mode_is_the_same_when_it_is_recorded(own: Own) -> None:
    text = own("""
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 32)
    def forward(self, x):
        return self.head(self.cell(x)[0])
def build():
    return Recurrent(), torch.randn(2, 16, 32)
""")
    found = judged(text, **FP32, grad_mode="inference")
    assert found.ran and not found.causes


SCRIPTED = """
@torch.jit.script
def softclamp(t: torch.Tensor, value: float):
    return (t / value).tanh() * value
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return self.down(softclamp(self.up(x), 5.0))
class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
def build():
    torch.manual_seed(0)
    return Clamped(), torch.randn(64, 32)
"""


def test_a_scripted_function_has_one_derivative(own: Own) -> None:
    """Optimised, TorchScript would differentiate it by formulas of its own from the second call on:
    no other run has their bits."""
    text = own(SCRIPTED, name="scripted.py")  # the compiler asks for the module of this name
    for how in ({"compile": "aot_eager"}, {"checkpoint": "full"}, {"steps": 3}):
        found = judged(text, **(FP32 | how))
        assert not found.causes, [v.sentence() for v in found.causes]
        assert {v.rule for v in found.verdicts if v.status == "ok"} >= {"O1"}
    assert torch._C._get_graph_executor_optimize() is False
