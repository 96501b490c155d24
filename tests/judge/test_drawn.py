"""Draws of one Spec that are made together are what they are alone."""

from __future__ import annotations

import numpy as np
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.batch import drawn_together
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.operators.linear import single_reference
from narrowfuzz.rules.rule import same_bits
from samples import recipes

DATA = (
    DataSpec(regime="lattice", seed=1),
    DataSpec(values="heavy_tail", seed=2),
    DataSpec(values="inf_nan", seed=3),
    DataSpec(values="near_max", seed=4),
    DataSpec(values="subnormal", seed=5),
)
SPECS = (
    Spec(recipe="torch.bf16", m=16, k=24, n=8, bias=True),
    Spec(recipe="torchao.float8.tensorwise", backend="emulated", m=16, k=24, n=8, dtype="fp32"),
    Spec(recipe="torchao.float8.rowwise", backend="emulated", m=16, k=24, n=8, bias=True),
    Spec(recipe="torchao.mxfp8.rceil", backend="linear", m=32, k=64, n=96),
)


def cases(spec: Spec) -> list[Case]:
    return [Case(spec=spec, data=data) for data in DATA]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.recipe)
def test_references_made_together_are_those_made_alone(spec: Spec) -> None:
    recipe = recipes()[spec.recipe]
    plan = recipe.plan(spec)
    drawn = drawn_together(cases(spec), plan, lambda case: tensors_of(case, recipe))
    for case in cases(spec):
        tensors, together = drawn[case]
        own = single_reference(plan, spec.dtype, tensors)
        assert together is not None and together.of(plan, tensors)
        for role in ROLES:
            assert np.array_equal(together.may_overflow(role), own.may_overflow(role))
            for ours, theirs in zip(
                (*together.gemm(role), *together.layer(role)),
                (*own.gemm(role), *own.layer(role)),
                strict=True,
            ):
                assert same_bits(ours, theirs).all()
            for side in ("a", "b"):
                some, other = (one.operand(role, side).quantised for one in (together, own))
                assert (some is None) == (other is None)
                if some is not None and other is not None:
                    assert np.array_equal(some.codes, other.codes)
                    assert same_bits(some.scale, other.scale).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.recipe)
def test_a_case_is_judged_as_if_it_had_been_drawn_alone(spec: Spec) -> None:
    judge = Judge(recipes(), Ledger([]), frozenset({"eager"}))
    judge.draw(cases(spec))
    together = [judge.judge(case).verdicts for case in cases(spec)]
    assert together == [judge.judge(case).verdicts for case in cases(spec)]
