"""Hooks of register_backward_hook, which torch applies to the last function of a module."""

from __future__ import annotations

import pytest
from narrowfuzz.own_models import register
from test_own_causes import judged
from test_own_models import Own, own

__all__ = ["own"]  # a fixture

HOOKED = """
class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        {}.register_backward_hook(lambda m, gi, go: {})
    def forward(self, x):
        return self.b(self.a(x).relu())
def build(): return Hooked(), torch.linspace(-2, 2, 16 * 32).view(16, 32)
"""
HALVES = "tuple(g / 2 for g in gi)"


@pytest.mark.parametrize(("module", "name"), [("self.b", "b"), ("self", "the model")])
def test_one_that_changes_gradients_is_refused(own: Own, module: str, name: str) -> None:
    text = own(HOOKED.format(module, HALVES))
    with pytest.raises(ValueError, match=f"changes gradients of {name}: torch applies it to"):
        register(text)


@pytest.mark.parametrize("module", ["self.b", "self"])
def test_one_that_only_looks_is_judged(own: Own, module: str) -> None:
    text = own(HOOKED.format(module, "print(end='')"))
    found = judged(text, "torch.fp32", dtype="fp32")
    assert found.ran and not found.causes
