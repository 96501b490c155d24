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


@pytest.mark.parametrize("does", ["[g.mul_(0.5) for g in gi] and None", "(go[0].mul_(2), None)[1]"])
def test_one_that_writes_into_gradients_is_refused(own: Own, does: str) -> None:
    with pytest.raises(ValueError, match="changes gradients of b: torch applies it to"):
        register(own(HOOKED.format("self.b", does)))


def test_one_that_a_forward_adds_is_refused(own: Own) -> None:
    adds = f"self.b.register_backward_hook(lambda m, gi, go: {HALVES}); return self.b("
    text = HOOKED.format("self.a", "None").replace("return self.b(", adds)
    with pytest.raises(ValueError, match="changes gradients of b: torch applies it to"):
        register(own(text))


@pytest.mark.parametrize("returns", ["print(end='')", "gi"])
@pytest.mark.parametrize("module", ["self.b", "self"])
def test_one_that_only_looks_is_judged(own: Own, module: str, returns: str) -> None:
    text = own(HOOKED.format(module, returns))
    found = judged(text, "torch.fp32", dtype="fp32")
    assert found.ran and not found.causes
