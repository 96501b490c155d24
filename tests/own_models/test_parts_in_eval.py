"""Parts that are built in eval mode stay in it, also if their ``train`` acts."""

from __future__ import annotations

import pytest
import torch
from narrowfuzz.campaign.check import _TRAINING
from narrowfuzz.own_models import register
from test_own_causes import ROWWISE, judged
from test_own_models import Own, made, own

__all__ = ["own"]  # a fixture

#: As loralib's layers do, it adds its update to the weight when it is to evaluate.
MERGES = """
class Merges(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.merged = nn.Linear(32, 32), False
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
    def train(self, mode=True):
        super().train(mode)
        if mode is self.merged:
            update = self.b.weight.data @ self.a.weight.data
            self.proj.weight.data += -update if mode else update
            self.merged = not mode
        return self
    def forward(self, x):
        return self.proj(x) if self.merged else self.proj(x) + self.b(self.a(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = Merges(), nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.0))
    def forward(self, x):
        return self.head(self.part(x).relu())
def build():
    model = Model()
    model.part.eval()
    model.head[1].eval()
    return model, torch.linspace(-2, 2, 16 * 32).view(16, 32)
"""


@pytest.mark.parametrize("recipe", ["torch.fp32", ROWWISE])
def test_an_evaluation_leaves_a_merged_part_merged(own: Own, recipe: str) -> None:
    found = judged(own(MERGES), recipe, dtype="fp32", events=_TRAINING, known=True)
    assert found.ran and not found.causes, [(v.rule, v.symptom) for v in found.causes]


def test_each_module_returns_to_the_mode_that_it_was_built_in(own: Own) -> None:
    model = made(register(own(MERGES))[0])
    modes = [module.training for module in model.modules()]
    assert True in modes[1:] and False in modes
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert [module.training for module in model.modules()] == modes
    assert model.model.part.merged


class Wrapped(torch.nn.Module):
    """What a conversion may put in a module's place."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_module_that_a_conversion_wraps_keeps_the_modes_inside(own: Own) -> None:
    model = made(register(own(MERGES))[0])
    model.model.head = Wrapped(model.model.head)
    model.eval()
    model.train()
    assert model.model.head.training
    assert [part.training for part in model.model.head.inner] == [True, False]
