"""What tests need of the CPU."""

from __future__ import annotations

import pytest
from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import climb
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.machine import machine
from narrowfuzz.recipe.recipe import obstacles
from samples import recipes

_LACKS = machine().without("fp8")
_RECIPES = recipes()
#: Of a test that is about the real FP8 multiply.
needs_fp8 = pytest.mark.skipif(bool(_LACKS), reason=_LACKS)


def needs(recipe: str, backend: str) -> pytest.MarkDecorator:
    """Of a test that is about one backend of a recipe."""
    reason = obstacles(_RECIPES[recipe], "cpu").get(backend, "")
    return pytest.mark.skipif(bool(reason), reason=reason)


def skip_without_backend(spec: Spec) -> None:
    """Skip where the Spec's backend cannot run; where it names none most recipes take what can."""
    recipe, backend = _RECIPES.get(spec.recipe), spec.backend
    if spec.recipe == "torch.scaled_mm":
        backend = backend or "tensorwise"
    if recipe and (reason := obstacles(recipe, "cpu").get(backend, "")):
        pytest.skip(reason)


def skip_without_kernel(case: Case) -> None:
    """Skip where no kernel of this CPU runs the case, which is then no subject of any rule."""
    skip_without_backend(case.spec)
    if machine().lacks and (
        void := Judge(recipes(), Ledger([])).observe(case, repeat=False).unusable_because
    ):
        pytest.skip(next(iter(void.values())))


def skip_unless_every_arm_runs(case: Case) -> None:
    """Skip where this machine lacks an arm that the case asks for, or every kernel of it."""
    missing = [arm.name for arm in climb(case.spec) if arm is not EAGER and unavailable(arm)]
    if missing:
        pytest.skip(f"cannot run {missing[0]} here")
    skip_without_kernel(case)
