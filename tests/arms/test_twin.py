"""The float64 twin of a model."""

from __future__ import annotations

import json

import pytest
from narrowfuzz.arms.twin import twin_outputs
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from samples import every_recipe

#: Eager skips the first step, which overflows in fp32 alone; then a model is made anew.
SKIPPED = {
    "spec": {
        "recipe": "torch.fp32", "model": "step_adamw_fp8", "dtype": "fp32",
        "optimizer": "adamw_fp8", "loss_scaling": "grad_scaler", "m": 85, "k": 200, "n": 42,
        "events": [
            {"type": "forward"}, {"of": [0], "type": "backward"}, {"type": "step"},
            {"type": "reload"}, {"type": "forward"}, {"of": [1], "type": "backward"},
            {"type": "step"},
        ],
    },
    "data": {"seed": 9999999, "values": "near_max"},
    "schema": 6,
}  # fmt: skip


def test_what_a_library_lacks_is_met_by_the_twin_alone_where_eager_skips_a_step() -> None:
    case = load_case(json.dumps(SKIPPED).encode())
    judge = Judge(every_recipe(), Ledger([]), frozenset({"eager"}))
    evidence = judge.observe(case, repeat=False)
    assert evidence.traces["eager"].error is None
    assert evidence.exact == {}
    assert not judge.judge(case).causes


def test_an_error_of_ours_is_not_swallowed() -> None:
    case = Case(spec=Spec(recipe="torch.fp32", model="mlp_gelu"), data=DataSpec())
    with pytest.raises(KeyError):
        twin_outputs(case.spec, {})
