"""A result that a selective checkpoint saves is changed in place: PyTorch documents a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from narrowfuzz.arm import EAGER, with_checkpoint
from narrowfuzz.campaign.check import _specs
from narrowfuzz.campaign.judged import hindered
from narrowfuzz.case import Case, DataSpec
from narrowfuzz.environment import prepare, settle
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import load_ledger
from narrowfuzz.oracles.contract import CHANGED_IN_PLACE
from narrowfuzz.own_models import register
from narrowfuzz.recipe import Recipe, load_recipes
from narrowfuzz.verdict import Verdict
from torch import nn

prepare()
settle()
PAGES = Path(__file__).resolve().parent / "own_models"
RECIPES = load_recipes()
ARM = with_checkpoint(EAGER, "selective").name


def contract(page: str, recipe: Any) -> tuple[Verdict, tuple[Verdict, ...]]:
    """What the contract says of the page's selective checkpoint, and what is reported."""
    model = register(f"{PAGES / page}")[0]
    spec = _specs(model, [recipe], "none", "selective")[0]
    judge = Judge({recipe.name: recipe}, load_ledger())
    judgement = judge.judge(Case(spec=spec, data=DataSpec()))
    (said,) = (v for v in judgement.verdicts if v.oracle == "contract" and v.arm == ARM)
    return said, tuple(judgement.causes)


def test_a_model_that_does_so_is_refused_and_the_reason_is_said() -> None:
    said, causes = contract("inplace_relu.py:build", RECIPES["torch.fp32"])
    assert not causes
    assert (said.status, said.why) == ("not_applicable", CHANGED_IN_PLACE)
    assert hindered([said], "torch.fp32", "m") == {
        ("hindered", "torch.fp32", ARM, "m", CHANGED_IN_PLACE)
    }


def test_a_conversion_that_does_so_is_reported() -> None:
    plain = RECIPES["torch.fp32"]
    assert isinstance(plain, Recipe)

    def converted(model: nn.Module, spec: Any) -> nn.Module:
        def changed(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
            return output.mul_(2)

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(changed)
        return model

    said, causes = contract("gradient_reversal.py:build", replace(plain, convert=converted))
    assert said.status == "crashed"
    assert said in causes
