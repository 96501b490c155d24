"""The first lines of a check: what they say of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrowfuzz.campaign.check_head import Configuration, head
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.spec import Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import load_recipes

MX = "torchao.mxfp8.rceil"
SOURCE = """
import torch
from torch import nn
def build(rows={rows}, out={out}):
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, out)), torch.ones(rows, 48)
"""
IN = "0 (in_features must be a multiple of 32, the MX block, got 48)"


@pytest.mark.parametrize(
    ("rows", "out", "only", "note"),
    [
        (32, 64, (), f"refuses 1 of 2 linears that it converts: {IN}; --filter '!0' leaves it as"),
        (32, 10, (), f"refuses 2 of 2 linears that it converts: {IN}, 2 (out_features must"),
        (31, 64, ("!0",), "refuses 1 of 1 linear that it converts: 2 (tokens must be a"),
        (32, 64, ("!0",), ""),
    ],
)
def test_linears_that_a_recipe_refuses_are_named(
    tmp_path: Path, rows: int, out: int, only: tuple[str, ...], note: str
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(rows=rows, out=out))
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    recipe = load_recipes()[MX]
    options = RunOptions(models=(model.name,), recipes=(MX,))
    one = Configuration(options, model, (), "none", "none", only, (MX,), [recipe])
    specs = [
        fixed(Spec(recipe=MX, backend=backend, model=model.name), recipe)
        for backend in ("linear", "wrapper")
    ]
    notes = [line for line in head(one, 10, specs).splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(note)
    for line in notes:
        assert line.startswith(f"note: {MX} {note}"), line


def test_a_model_that_is_a_linear_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(48, 64), torch.ones(32, 48)\n"
    )
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    assert {product.layer for product in model.products} == set(model.linears) == {"model"}


def test_parameters_without_a_gradient_may_be_read_through_detach(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import torch
class Shifted(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.shift = torch.nn.Parameter(torch.ones(8))
    def forward(self, x): return super().forward(x) + self.shift.detach()
def build(): return Shifted(), torch.ones(4, 8)
"""
    )
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    recipe = load_recipes()["torch.fp32"]
    options = RunOptions(models=(model.name,), recipes=(recipe.name,))
    one = Configuration(options, model, (), "none", "none", (), (recipe.name,), [recipe])
    (note,) = (line for line in head(one, 10, []).splitlines() if line.startswith("note: "))
    assert note == (
        "note: no gradient reaches shift in one call with what it is built with: nothing that it "
        "returns depends on that, or only through detach() or .data"
    )


ATTENDS = """
import torch, torch.nn.functional as F
from torch import nn
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.unused = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(128, 64)
    def forward(self, x):
        return self.out(F.linear(x, torch.cat([self.q.weight, self.k.weight])))
def build():
    return Attends(), torch.ones(32, 64)
"""


@pytest.mark.parametrize(
    ("recipe", "only", "names"),
    [(MX, (), "q, k"), (MX, ("!q",), "k"), (MX, ("out",), ""), ("torch.fp32", (), "q, k")],
)
def test_linears_whose_weights_are_only_read_are_named(
    tmp_path: Path, recipe: str, only: tuple[str, ...], names: str
) -> None:
    (tmp_path / "mine.py").write_text(ATTENDS)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    options = RunOptions(models=(model.name,), recipes=(recipe,))
    chosen = [load_recipes()[recipe]]
    one = Configuration(options, model, (), "none", "none", only, (recipe,), chosen)
    said = head(one, 10, [])
    assert (f"note: {names}: never called, other functions read" in said) is bool(names)
    assert ("never called" in said) is bool(names)
    assert ("is checked call by call" in said) is (recipe == "torch.fp32")
    assert ("does not quantise these products" in said) is (bool(names) and recipe == MX)
