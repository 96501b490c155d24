"""How long a case of a large model takes is measured, and said before it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.campaign.pace import said_of_pace, seconds_of_cases
from narrowfuzz.case.spec import Spec
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import Recipe, load_recipes
from torch import nn

RECIPES = {name: one for name, one in load_recipes().items() if isinstance(one, Recipe)}
PLAIN = Spec(recipe="torch.fp32", dtype="fp32")
REAL = Spec(recipe="torchao.float8.rowwise", backend="real")
EMULATED = Spec(recipe="torchao.float8.rowwise", backend="emulated")

TWICE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.idle = nn.Linear(16, 8), nn.Linear(16, 16)
        self.back = nn.Linear(8, 16)

    def forward(self, x):
        return self.up(self.back(self.up(x)))

def build():
    return Model(), torch.randn(4, 16)
"""


def test_what_the_linears_of_a_forward_multiply_is_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TWICE)
    assert register(f"{tmp_path / 'mine.py'}:build")[0].multiplications == 3 * 4 * 16 * 8


def test_a_recipe_whose_kernels_are_slow_takes_longer() -> None:
    plain = RECIPES["torch.fp32"]

    def slow(model: nn.Module, spec: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *given: time.sleep(0.2))
        return model

    (quick,) = seconds_of_cases([PLAIN], 10**9, RECIPES, "cpu").values()
    recipes = {"torch.fp32": replace(plain, convert=slow)}
    (longer,) = seconds_of_cases([PLAIN], 10**9, recipes, "cpu").values()
    assert 0 < quick < longer
    (twice,) = seconds_of_cases([PLAIN], 2 * 10**9, recipes, "cpu").values()
    assert twice == pytest.approx(2 * longer, rel=0.3)


@pytest.mark.parametrize(
    ("pace", "minutes", "says", "never"),
    [
        ({REAL: 200.0, EMULATED: 7.0}, None, "7 seconds with torchao.float8.rowwise (emulated), "
         "3 minutes with torchao.float8.rowwise (real)", "--minutes"),
        ({PLAIN: 3.0}, 2.0, "3 seconds with torch.fp32", "--minutes"),
        ({PLAIN: 9.0}, 2.0, "take about 3 minutes: give it --minutes 4, or build", "hour"),
        ({PLAIN: 900.0}, 2.0, "take about 5 hours: build the model with fewer tokens", "--minutes"),
    ],
)  # fmt: skip
def test_it_is_said_whether_the_first_cases_fit(
    pace: dict[Spec, float], minutes: float | None, says: str, never: str
) -> None:
    said = said_of_pace(pace, 20, minutes)
    assert says in said and never not in said
