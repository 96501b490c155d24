"""The error budget: each step's part of an error is found where it is made, and the parts add up;
and what a change of the case costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.explain.budget import budget, exact_results
from narrowfuzz.explain.cost import Prices
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.report.explanation import Budget, Part
from narrowfuzz.report.explanation import budget_lines as lines_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.session import SessionOptions, open_session

_QUANTISING, _SCALES, _OPERANDS, _ADDING = (
    "quantising the operands, with exact scales",
    "the recipe's scales in place of exact ones",
    "operands that differ from the recipe's",
    "adding up the products and rounding the result",
)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return open_session(SessionOptions(ledger="none")).new_judge(Ledger([]))


def linear(recipe: str, **changes: Any) -> Case:
    return Case(spec=Spec(recipe=recipe, m=32, k=64, n=32, **changes), data=DataSpec(seed=1))


def about(result: str, **at: Any) -> Verdict:
    return Verdict("O6", "eager", result, "ok", at=At(name=result, **at))


def parts(found: Budget | None) -> dict[str, float]:
    """The share of the bound that each part takes, in the direction of the error."""
    assert found is not None and found.bound
    sign = 1 if sum(part.added for part in found.parts) > 0 else -1
    return {part.words: sign * part.added / found.bound for part in found.parts}


@contextmanager
def linears_that(change: Any) -> Iterator[None]:
    multiply = torch.nn.functional.linear

    def other(x: Any, weight: Any, bias: Any = None) -> Any:
        return change(multiply(x, weight, bias))

    with patch.object(torch.nn.functional, "linear", other):
        yield


@pytest.mark.parametrize("result", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("recipe", ["torch.bf16", "torchao.float8.rowwise", "torchao.mxfp8.rceil"])
def test_the_parts_add_up_to_the_error(judge: Judge, recipe: str, result: str) -> None:
    case = linear(recipe, bias=True)
    found = budget(judge, case, about(result), "eager")
    assert found is not None and found.bound and found.result == result
    evidence = judge.observe(case, frozenset({"eager"}), repeat=False)
    got = evidence.traces["eager"].outputs[result].astype(np.float64)
    exact = exact_results(evidence)[result]
    error = abs(got - exact)[found.index]
    assert sum(parts(found).values()) == pytest.approx(error / found.bound, rel=1e-6)
    assert 0 < error <= found.bound * (1 + 1e-9) and found.exact == exact[found.index]


def test_power_of_two_scales_have_a_part_of_their_own(judge: Judge) -> None:
    found = budget(judge, linear("torchao.mxfp8.rceil"), about("output"), "eager")
    shares = {name: part.size for part in found.parts for name in [part.words]} if found else {}
    assert shares[_SCALES] > 0.005 and shares[_QUANTISING] > 0.005
    assert shares[_OPERANDS] == 0 and shares[_ADDING] < shares[_QUANTISING]


def test_a_product_that_is_wrong_is_wrong_where_it_is_added_up(judge: Judge) -> None:
    with linears_that(lambda y: y * 2):
        found = budget(judge, linear("torch.bf16"), about("output"), "eager")
    assert parts(found)[_ADDING] > 10


def test_a_cast_that_is_wrong_is_wrong_in_the_operands(judge: Judge) -> None:
    import torchao.float8.float8_scaling_utils as scaling

    cast = scaling.hp_tensor_and_scale_to_float8

    def shrunk(x: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(x * 0.75, *args, **kwargs)

    with patch.object(scaling, "hp_tensor_and_scale_to_float8", shrunk):
        found = budget(judge, linear("torchao.float8.rowwise"), about("output"), "eager")
    assert parts(found)[_OPERANDS] > 1
    assert abs(parts(found)[_ADDING]) < 0.1


def test_a_models_result_is_compared_with_its_float64_run(judge: Judge) -> None:
    spec = Spec(recipe="torch.bf16", model="mlp_swiglu", m=8, k=32, n=32, checkpoint="full")
    case = Case(spec=spec, data=DataSpec())
    found = budget(judge, case, about("output"), "eager+checkpoint")
    assert found is not None and found.bound is None
    eager, arm = found.parts
    assert 1e-4 < eager.size < 0.1
    assert (arm.words, arm.size) == ("what eager+checkpoint does differently", 0.0)


def test_a_call_inside_a_model_is_a_linear(judge: Judge) -> None:
    spec = Spec(recipe="torchao.float8.rowwise", model="mlp_swiglu", m=16, k=32, n=32)
    case = Case(spec=spec, data=DataSpec())
    found = budget(judge, case, about("grad_weight", layer="w2"), "eager")
    assert found is not None and (found.layer, found.result) == ("w2", "grad_weight")
    assert 0 < sum(parts(found).values()) <= 1


def test_nothing_is_said_where_nothing_is_exact(judge: Judge) -> None:
    with linears_that(lambda y: y * float("nan")):
        assert budget(judge, linear("torch.bf16"), about("output"), "eager") is None
    ranks = linear("torch.bf16", model="mlp_gelu", sharding=Sharding(data=2))
    assert budget(judge, ranks, about("output"), "sharded") is None
    dropped = linear("torch.bf16", model="dropout")
    assert budget(judge, dropped, about("output"), "eager") is None


def test_a_call_without_a_backward_has_the_budget_of_its_output(judge: Judge) -> None:
    case = linear("torchao.mxfp8.rceil", model="mlp_gelu", grad_mode="no_grad")
    found = budget(judge, case, about("output", layer="up"), "eager")
    assert found is not None and (found.layer, found.result) == ("up", "output")
    assert budget(judge, case, about("grad_input", layer="up"), "eager") is None


def test_a_bias_gradient_is_no_product(judge: Judge) -> None:
    assert budget(judge, linear("torch.bf16", bias=True), about("grad_bias"), "eager") is None


def test_granules_of_zeros_have_parts(judge: Judge) -> None:
    case = linear("torchao.mxfp8.rceil")
    case = msgspec.structs.replace(case, data=DataSpec(values="zero_rows"))
    evidence = judge.observe(case, frozenset({"eager"}), repeat=False)
    assert any((x == 0).all(axis=1).any() for x in evidence.tensors.values())
    assert parts(budget(judge, case, about("output"), "eager"))[_OPERANDS] == 0


def test_an_error_where_none_is_allowed_is_the_worst(judge: Judge) -> None:
    """A product of two small integers is exact in bf16, so its bound is 0."""
    case = Case(spec=Spec(recipe="torch.bf16", m=8, k=1, n=32), data=DataSpec(regime="lattice"))
    with linears_that(lambda y: y + (torch.arange(y.numel()).view_as(y) == 37)):
        found = budget(judge, case, about("output"), "eager")
    assert found is not None and (found.index, found.bound) == ((1, 5), 0.0)
    assert [part.added for part in found.parts] == [pytest.approx(1.0)]


def test_a_recompute_may_spoil_any_result(judge: Judge) -> None:
    verdict = about("output", phase="recompute")
    found = budget(judge, linear("torchao.float8.rowwise"), verdict, "eager")
    assert found is not None
    every = [
        budget(judge, linear("torchao.float8.rowwise"), about(role), "eager")
        for role in ("output", "grad_input", "grad_weight")
    ]
    assert found.parts[-1].size == max(one.parts[-1].size for one in every if one is not None)


def test_a_shape_that_the_plan_does_not_define_has_no_budget(judge: Judge) -> None:
    spec = Spec(recipe="torchao.mxfp8.rceil", m=32, k=33, n=32)
    case = Case(spec=spec, data=DataSpec())
    assert budget(judge, case, about("output"), "eager") is None


def test_what_a_gradient_in_high_precision_costs(judge: Judge) -> None:
    before, after = linear("torchao.float8.rowwise"), linear("torchao.float8.rowwise_gw_hp")
    found = Prices(judge, before, "eager", "grad_weight").of(after, "eager")
    assert found is not None and found.result == "grad_weight"
    assert found.error < 0.2 * found.error_before and 0.1 < found.times < 10


def test_prices_of_what_cannot_be_compared_are_not_named(judge: Judge) -> None:
    own = Prices(judge, linear("torch.bf16"), "eager", "output")
    assert own.of(linear("torch.fp32", dtype="fp32"), "eager") is None  # of other parameters
    assert own.of(linear("torch.bf16", model="mlp_gelu"), "eager") is None
    dropout = linear("torch.bf16", model="dropout")
    assert Prices(judge, dropout, "eager", "output").of(dropout, "eager") is None
    with linears_that(lambda y: y * float("nan")):
        assert own.of(linear("torch.bf16"), "eager") is None


def test_shares_are_words() -> None:
    found = Budget("output", "eager", (0, 3), 1.0, 0.5, (Part("a", 0.1, 0.02), Part("b", 8.0, 1.0)))
    line, *shares = lines_of(found)
    assert (
        "output at [0, 3] on eager, where the exact result is 1 and a correct one at most" in line
    )
    assert [share.split(": ")[1].split(";")[0] for share in shares] == [
        "20.0% of the bound", "16 times the bound", "16 times the bound",
    ]  # fmt: skip
    assert "exactly that" in next(iter(lines_of(replace(found, bound=0.0))))
