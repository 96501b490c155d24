"""A model with a block that it compiles itself: its linears are judged like all others."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.own_models import register
from samples import of_operators, recipes

MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()
        self.two.compile(backend="eager", fullgraph={full})

    def forward(self, x):
        return self.two(self.one(x))


def build():
    return Model(), (torch.randn(16, 32),)
"""


@pytest.mark.parametrize("full", [False, True])
def test_every_linear_is_judged(tmp_path: Path, full: bool) -> None:
    file = tmp_path / f"parts_{full}.py"
    file.write_text(MODEL.format(full=full))
    (model,) = register(f"{file}:build")
    recipe = recipes()["torchao.float8.rowwise"]
    spec = fixed(Spec(recipe=recipe.name, model=model.name, m=16, k=32, dtype="fp32"), recipe)
    judge = Judge(recipes(), of_operators(), arms=frozenset({"eager"}))
    judgement = judge.judge(Case(spec=spec, data=DataSpec()))
    assert judgement.ran and not judgement.causes
    layers = {v.at.layer for v in judgement.verdicts if (v.rule, v.status) == ("O5", "ok")}
    assert layers == {
        f"model.{block}.{name}" for block in ("one", "two") for name in ("up", "down")
    }
