"""A plan that leaves one GEMM in high precision: its sites, its rules, and a fault in that GEMM."""

from __future__ import annotations

from typing import Any

import pytest
from kernels import needs, needs_fp8
from narrowfuzz.arms.program import Program
from narrowfuzz.case.data import make_tensors
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.recipe.recipe import obstacles
from narrowfuzz.rules import BY_NAME as RULES
from narrowfuzz.trace.verdict import BAD
from samples import recipes

RECIPES = recipes()
MIXED = ("torchao.float8.rowwise_gw_hp", "torchao.mxfp8.rceil_wgrad_with_hp")


def spec(recipe: str, backend: str, **fields: Any) -> Spec:
    return Spec(recipe=recipe, backend=backend, **({"m": 32, "k": 64, "n": 32} | fields))


def sites(spec: Spec, arm: str) -> tuple[list[str], str]:
    recipe = RECIPES[spec.recipe]
    tensors = make_tensors(Case(spec=spec, data=DataSpec()), recipe.plan(spec))
    trace = Program(spec, recipe, BY_NAME[arm]).run(tensors, tap=True)
    assert trace.error is None
    return [str(record.site) for record in trace.sites], trace.unobserved


@pytest.mark.parametrize("recipe", MIXED)
def test_only_quantised_gemms_have_sites(recipe: str) -> None:
    lacking = obstacles(RECIPES[recipe], "cpu")
    for backend in ("", *(b for b in RECIPES[recipe].backends[1:2] if b not in lacking)):
        found = sites(spec(recipe, backend), "eager")
        assert found == (["proj.output/forward", "proj.grad_input/backward"], "")
        checkpoint = sites(spec(recipe, backend, checkpoint="full"), "eager+checkpoint")
        assert checkpoint[0][1] == "proj.output/recompute" and len(checkpoint[0]) == 3


@needs_fp8
@needs("torchao.float8.rowwise", "real")
def test_exposure_tells_the_backward_gemms_apart_where_shapes_cannot() -> None:
    """tokens == n: rowwise cannot name its gradients, with grad_weight in high precision we can."""
    square = {"m": 32, "k": 64, "n": 32, "compile": "aot_eager"}
    mixed = sites(spec("torchao.float8.rowwise_gw_hp", "real", **square), "aot_eager")
    assert mixed == (["proj.output/forward", "proj.grad_input/backward"], "")
    assert sites(spec("torchao.float8.rowwise", "real", **square), "aot_eager")[0] == []


@pytest.mark.parametrize("recipe", MIXED)
def test_a_wrong_high_precision_gemm_is_caught_and_a_right_one_is_judged(recipe: str) -> None:
    from torchao.float8 import float8_linear
    from torchao.prototype.moe_training import mxfp8_linear

    case = Case(spec=spec(recipe, ""), data=DataSpec(values="outlier"))

    def statuses() -> list[str]:
        verdicts = Judge(RECIPES, Ledger([])).judge(case, [RULES["O15"]]).verdicts
        return [v.status for v in verdicts if v.role == "grad_weight"]

    assert statuses() == ["ok"]
    owner = mxfp8_linear.mx_mm if "mxfp8" in recipe else float8_linear.matmul_with_hp_or_float8_args

    def halved(backward: Any) -> Any:
        def run(ctx: Any, grad_output: Any) -> Any:
            grad_input, grad_weight, *rest = backward(ctx, grad_output)
            rounded = (grad_weight.float() * (1 + 2.0**-6)).to(grad_weight.dtype)
            return grad_input, rounded, *rest

        return staticmethod(run)

    with attribute_replaced(owner, "backward", halved):
        assert set(statuses()) <= BAD


@pytest.mark.parametrize(
    "backend",
    [pytest.param(b, marks=needs("torch.scaled_mm", b)) for b in ("tensorwise", "rowwise")],
)
def test_a_wrong_scaled_mm_is_caught_by_its_gemm_rules(backend: str) -> None:
    """torch.scaled_mm has no library whose functions the built-in faults could replace."""
    from torch.nn import functional

    case = Case(spec=spec("torch.scaled_mm", backend, bias=True), data=DataSpec(values="outlier"))
    judge = Judge(RECIPES, Ledger([]))
    rules = [RULES["O5"], RULES["O15"]]
    assert {v.status for v in judge.judge(case, rules).verdicts} == {"ok"}

    def tilted(original: Any) -> Any:
        return lambda *args, **kw: original(*args, **kw) * (1 + 2.0**-5)

    with attribute_replaced(functional, "scaled_mm", tilted):
        found = judge.judge(case, rules).verdicts
    assert {v.status for v in found} <= BAD and {v.role for v in found} == set(ROLES)
