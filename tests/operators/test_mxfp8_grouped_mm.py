"""torchao's MXFP8 products of groups: all three results have the values that the plan says, in
every mode, also where groups share blocks; and what a model's weight wrappers call is seen."""

from __future__ import annotations

from dataclasses import replace

import fresh
import numpy as np
import pytest
import torch

pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm")

from narrowfuzz.arms.operators import EagerWatch, operators_of
from narrowfuzz.operators import BY_NAME
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.play.group_models import QuantisedGroups
from narrowfuzz.play.groups import mxfp8_grouped
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from samples import every_recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WHOLE, SHARED = (32, 0, 64), (1, 0, 16, 40, 33)
OPERATOR = BY_NAME["mxfp8_grouped_mm"]


def calls_of(
    dtype: str,
    mode: str,
    sizes: tuple[int, ...] = SHARED,
    *,
    hp: bool = False,
    scale: float = 1.0,
    padded: bool = False,
) -> list[OperatorCall]:
    torch.manual_seed(0)
    model = QuantisedGroups(40, 4, sizes, 32, "mxfp8", mode, hp, padded).to(DTYPES[dtype])
    rows = torch.randn(90, 40) * 2.0 ** (torch.arange(90)[:, None] % 9)  # blocks differ in scale
    x = (rows * scale).to(DTYPES[dtype]).requires_grad_()
    with EagerWatch() as watch:
        y = model(x)
        y.backward(torch.randn(y.shape).to(y.dtype))
    return [c for c in operators_of(watch.operators) if c.operator == "mxfp8_grouped_mm"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize(
    ("sizes", "padded"),
    [(WHOLE, False), (SHARED, False), (SHARED, True)],
    ids=["whole", "shared", "padded"],
)
@pytest.mark.one_in(9)
def test_every_result_has_the_plans_values(
    dtype: str, mode: str, sizes: tuple[int, ...], padded: bool
) -> None:
    for scale in (1.0, 2.0**-40, 2.0**40):
        calls = calls_of(dtype, mode, sizes, scale=scale, padded=padded)
        assert len(calls) == 2
        for call in calls:
            verdicts = list(judge_call("eager", call))
            assert [v.role.rpartition(".")[2] for v in verdicts] == list(OPERATOR.results)
            assert all(v.status == "ok" for v in verdicts), [(v.status, v.got) for v in verdicts]


def test_a_gradient_in_high_precision_is_that_of_the_operands() -> None:
    for call in calls_of("bf16", "rceil", hp=True):
        assert call.settings == {"mode": "rceil", "wgrad_with_hp": True, "padded": False}
        assert all(v.status == "ok" for v in judge_call("eager", call))
        other = replace(call, settings={**call.settings, "wgrad_with_hp": False})
        (wrong,) = (v for v in judge_call("eager", other) if v.status != "ok")
        assert wrong.role == "mxfp8_grouped_mm.grad_weight"


@pytest.mark.parametrize("result", OPERATOR.results)
def test_another_modes_results_are_seen(result: str) -> None:
    """Of data that fills the formats: floor's scale may be half of rceil's."""
    call, other = (calls_of("bf16", mode)[0] for mode in ("rceil", "floor"))
    mixed = replace(call, outputs={**call.outputs, result: other.outputs[result]})
    (wrong,) = (v for v in judge_call("eager", mixed) if v.status != "ok")
    assert wrong.role.endswith(result) and wrong.status == "diverged"
    assert "MXFP8 product of groups (rceil) of bfloat16" in wrong.remark


def test_blocks_whose_scale_is_not_to_be_told_are_left_open() -> None:
    (call, _) = calls_of("bf16", "floor")
    tensors = dict(call.tensors)
    tensors["input"] = tensors["input"].copy()
    tensors["input"][0] = 2.0**-125
    may = OPERATOR.expected(replace(call, tensors=tensors))
    assert may["output"].unknown[0].all() and not may["output"].unknown[20:40].any()


def test_weight_wrappers_call_it_too() -> None:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
    from torchao.quantization.quantize_.common import KernelPreference

    config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
    plain = torch.randn(2, 64, 32).bfloat16()
    weight = torch.nn.Parameter(MXFP8TrainingWeightWrapperTensor(plain, config))
    x = torch.randn(96, 32).bfloat16()
    with EagerWatch() as watch:
        offs = torch.tensor([32, 96], dtype=torch.int32)
        y = torch._grouped_mm(x, weight.transpose(-2, -1), offs=offs)
        y.backward(torch.ones_like(y))
    (call,) = (c for c in operators_of(watch.operators) if c.operator == "mxfp8_grouped_mm")
    assert set(call.outputs) == {"output", "grad_weight"}
    assert all(v.status == "ok" for v in judge_call("eager", call))


def test_what_scripts_call_gives_the_same() -> None:
    (call, _) = calls_of("bf16", "rceil")
    given = [torch.from_numpy(call.tensors[n].copy()) for n in ("input", "mat2", "grad_output")]
    rows, weights, grad = (t.bfloat16() for t in given)
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    offs = torch.from_numpy(call.tensors["offs"])
    found = mxfp8_grouped(rows, weights, offs, grad, "rceil", False, False)
    for name, result in zip(OPERATOR.results, found, strict=True):
        known = slice(int(offs[-1])) if name != "grad_weight" else slice(None)
        assert np.array_equal(result.float().numpy()[known], call.outputs[name][known])


def test_padded_groups_begin_blocks_of_their_own() -> None:
    for call in calls_of("bf16", "rceil"):
        other = replace(call, settings={**call.settings, "padded": True})
        (wrong,) = (v for v in judge_call("eager", other) if v.status != "ok")
        assert wrong.role == "mxfp8_grouped_mm.grad_weight"


def test_rows_of_other_groups_in_place_of_padded_ones_are_wrong() -> None:
    with builtin_faults()["mx-groups-padding-returned"].plant():
        calls = calls_of("bf16", "rceil", padded=True)
    for call in calls:
        wrong = {v.role.rpartition(".")[2] for v in judge_call("eager", call) if v.status != "ok"}
        assert "output" in wrong


def test_experts_that_a_recipe_converts_are_judged_in_a_model() -> None:
    from narrowfuzz.case.spec import Case, DataSpec, Spec
    from narrowfuzz.judge.judge import Judge
    from narrowfuzz.ledger.ledger import Ledger

    spec = Spec(recipe="torchao.mxfp8.rceil", backend="wrapper", model="grouped_experts", m=64)
    case = Case(spec=spec, data=DataSpec(seed=3))
    judge = Judge(every_recipe(), Ledger([]), arms=frozenset({"eager"}))
    called = [c.operator for c in judge.observe(case).traces["eager"].operators]
    assert called.count("mxfp8_grouped_mm") == 3
    assert not judge.judge(case).causes
    with builtin_faults()["mx-groups-scales-of-first-expert"].plant():
        causes = Judge(every_recipe(), Ledger([]), arms=frozenset({"eager"})).judge(case).causes
    assert {(v.rule, v.role) for v in causes} == {("O25", "mxfp8_grouped_mm.output")}


FRESH = """
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.recipe.recipe import load_recipes

case = Case(spec=Spec(recipe="torch.bf16", model="mxfp8_grouped_rceil", n=4), data=DataSpec())
traces = Judge(load_recipes(), Ledger([]), arms=frozenset({"eager"})).observe(case).traces
print(sum(call.operator == "mxfp8_grouped_mm" for call in traces["eager"].operators))
"""


@pytest.mark.heavy
def test_its_first_call_in_a_process_is_seen() -> None:
    """A watch stands in front of what has been imported, and plain torch imports no torchao."""
    assert fresh.python("-c", FRESH).stdout.split()[-1] == "2"
