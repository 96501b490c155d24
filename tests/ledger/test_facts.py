"""Facts and the predicates over them: each condition can hold and can fail."""

from __future__ import annotations

from typing import Any

import pytest
from narrowfuzz.case.events import Backward, Close, Forward, Open, Settings
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike, ValueClass
from narrowfuzz.ledger.facts import Context, check_predicate, holds
from narrowfuzz.machine.machine import Machine
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict

MACHINE = Machine(("amx_bf16", "avx2"), "3.12.0", {"bf16": "brg_matmul:avx10_1_512_amx"}, {})
VERDICT = Verdict("contract", "inductor", "forward", "crashed", got="ValueError: 'k' is 7")
CASE = Case(spec=Spec(recipe="torch.bf16", m=32, k=7, bias=True), data=DataSpec(values="inf_nan"))
PLAYED = Spec(
    recipe="te.delayed",
    model="library_linear",
    events=(Open(), Forward(), Close(), Open(enabled=False), Backward(of=(0,)), Close()),
    checkpoint="reentrant",
    settings=Settings(history=2, fused=False),
)
OF_LIBRARY = Case(spec=PLAYED, data=DataSpec())


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ({}, True),
        ({"k": 7}, True),
        ({"k": 8}, False),
        ({"k": "odd"}, True),
        ({"k": "even"}, False),
        ({"m": "even"}, True),
        ({"k": "not multiple of 32"}, True),
        ({"m": "not multiple of 32"}, False),
        ({"k": "<8"}, True),
        ({"k": "<7"}, False),
        ({"k": "<=7"}, True),
        ({"k": ">6"}, True),
        ({"k": ">=8"}, False),
        ({"k": [5, 7]}, True),
        ({"k": [5, "even"]}, False),
        ({"bias": True}, True),
        ({"bias": False}, False),
        ({"recipe": "torch.*"}, True),
        ({"recipe": "!=torch.bf16"}, False),
        ({"checkpoint": ["full", "none"]}, True),
        ({"values": "inf_nan", "k": 7}, True),
        ({"non_finite": True}, True),
        ({"non_finite": False}, False),
        ({"values": "inf_nan", "k": 8}, False),
        ({"message": "*'k' is*"}, True),
        ({"message": "*RuntimeError*"}, False),
        ({"arm": "inductor*"}, True),
        ({"arm": "!=inductor*"}, False),
        ({"arm": "!=eager_native*"}, True),
        ({"kernels": "default"}, True),
        ({"cpu": "amx_*"}, True),
        ({"cpu": "!amx_*"}, False),
        ({"cpu": ["avx2", "!avx512_fp16"]}, True),
        ({"cpu": ["avx2", "avx512_fp16"]}, False),
        ({"bf16_kernel": "*amx"}, True),
        ({"fp8_kernel": "ref:*"}, False),
        ({"onednn": "3.12*"}, True),
        ({"device": "cuda"}, False),
        ({"history": 4}, False),  # of a library's own layers
        ({"layout": "chain"}, False),
        ({"depth": 1}, False),
        ({"quantized_init": False}, False),
        ({"checkpoint_by": "library"}, False),
        ({"layer": "*"}, False),
        ({"reentrant": False, "region": "none"}, True),
        ({"features": "reload"}, False),
        ({"fsdp_ranks": 0}, False),  # of a case on ranks
        ({"uneven": False}, False),
    ],
    ids=str,
)
def test_a_predicate_of_a_model(predicate: dict[str, Any], expected: bool) -> None:
    check_predicate(predicate)
    assert holds(predicate, Context(CASE, MACHINE, verdict=VERDICT)) is expected


@pytest.mark.parametrize(
    ("model", "values", "expected"),
    [
        ("linear", "gaussian", False),
        ("linear", "outlier", False),
        ("linear", "near_max", True),
        ("attention", "gaussian", False),
        ("attention", "outlier", True),
        ("two_blocks", "heavy_tail", True),
    ],
)
def test_what_may_hold_an_infinity(model: str, values: ValueClass, expected: bool) -> None:
    case = Case(spec=Spec(recipe="torch.bf16", model=model), data=DataSpec(values=values))
    assert holds({"non_finite": True}, Context(case, MACHINE)) is expected


@pytest.mark.parametrize(
    ("bits", "expected"),
    [("0x7fc00000", True), ("0xff800000", True), ("0xff7fffff", True), ("0x7f7f8000", True),
     ("0x7f7f7fff", False), ("0x3f800000", False)],
)  # fmt: skip
def test_a_spike_that_bf16_rounds_to_infinity_may_be_one(bits: str, expected: bool) -> None:
    data = DataSpec(spikes=(Spike(tensor="input", row=0, col=0, bits=bits),))
    case = Case(spec=Spec(recipe="torch.fp32", autocast=True), data=data)
    assert holds({"non_finite": True}, Context(case, MACHINE)) is expected


@pytest.mark.parametrize(
    ("bits", "expected"), [("0xff7f0000", True), ("0x5f800000", True), ("0x5f7fffff", False)]
)
def test_a_spike_whose_square_overflows_may_become_one_in_a_model(
    bits: str, expected: bool
) -> None:
    """Attention multiplies two results: a weight of -3.4e38 brought an infinity, and then the row
    before it NaN on a CPU with AMX."""
    data = DataSpec(spikes=(Spike(tensor="weight", row=0, col=0, bits=bits),))
    case = Case(spec=Spec(recipe="torch.bf16", model="attention"), data=data)
    assert holds({"non_finite": True}, Context(case, MACHINE)) is expected


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ({"history": "<=2", "fused": False}, True),
        ({"algorithm": "most_recent"}, False),
        ({"reentrant": True, "region": "whole"}, True),
        ({"checkpoint": "reentrant", "checkpoint_by": "library"}, True),
        ({"region": "none"}, False),
        ({"layer": "linear", "model": "library_*", "depth": 1}, True),
        ({"features": "left early"}, True),
        ({"features": ["left early", "short history"]}, True),
        ({"features": ["left early", "reload"]}, False),
        ({"features": ["left early", "!reload"]}, True),
        ({"features": "!left early"}, False),
        ({"events": "backward"}, True),
        ({"events": "switch"}, False),
        ({"events": ["open", "!reload"]}, True),
    ],
    ids=str,
)
def test_a_predicate_of_a_schedule(predicate: dict[str, Any], expected: bool) -> None:
    check_predicate(predicate)
    assert holds(predicate, Context(OF_LIBRARY, MACHINE)) is expected


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ({"fsdp_ranks": 2, "tensor_ranks": ">=2"}, True),
        ({"fsdp_ranks": 0}, False),
        ({"gathers": ["codes", "precomputed"]}, True),
        ({"gathers": "values"}, False),
        ({"narrow_styles": False}, True),
        ({"uneven": True}, True),
    ],
    ids=str,
)
def test_a_predicate_of_a_case_on_ranks(predicate: dict[str, Any], expected: bool) -> None:
    check_predicate(predicate)
    sharding = Sharding(data=2, tensor=2, gathers="codes")
    case = Case(spec=Spec(recipe="torch.bf16", k=64, n=66, sharding=sharding), data=DataSpec())
    assert holds(predicate, Context(case, MACHINE)) is expected


def _on_ranks(sharding: Sharding, **fields: Any) -> Context:
    spec = Spec(**({"recipe": "torch.bf16", "sharding": sharding} | fields))
    return Context(Case(spec=spec, data=DataSpec()), MACHINE)


@pytest.mark.parametrize(
    ("sharding", "fields", "uneven", "empty"),
    [
        (Sharding(data=2), {"n": 64}, False, False),
        (Sharding(data=2), {"n": 33}, True, False),
        (Sharding(data=2), {"n": 64, "k": 33}, False, False),  # columns are not cut
        (Sharding(data=2), {"n": 64, "k": 33, "model": "mlp_gelu"}, True, False),
        (Sharding(data=3), {"n": 64}, True, False),
        (Sharding(data=3), {"n": 48}, False, False),
        (Sharding(data=1), {"n": 33}, False, False),
        (Sharding(data=3), {"n": 2}, True, True),
        (Sharding(data=3), {"n": 4}, True, True),  # 2, 2, 0
        (Sharding(data=3), {"n": 5}, True, False),
        (Sharding(data=2), {"n": 0}, False, True),
        (Sharding(data=2, tensor=2), {"n": 66}, True, False),
        (Sharding(data=2, tensor=2, style="rowwise"), {"n": 66}, False, False),
        (Sharding(data=4, resumes="fewer"), {"n": 64}, True, False),
        (Sharding(data=4, resumes="same"), {"n": 64}, False, False),
        (Sharding(data=1, tensor=3, resumes="swapped"), {"n": 64}, True, False),
        (Sharding(data=3, resumes="fewer"), {"n": 2}, True, True),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_ranks_do_not_share_evenly(
    sharding: Sharding, fields: dict[str, Any], uneven: bool, empty: bool
) -> None:
    context = _on_ranks(sharding, **fields)
    assert holds({"uneven": True}, context) is uneven
    assert holds({"empty_shard": True}, context) is empty


def test_a_librarys_own_layers_share_no_rows() -> None:
    context = _on_ranks(Sharding(data=2), recipe="te.delayed", model="library_linear", n=33)
    assert holds({"uneven": False, "empty_shard": False}, context)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ({"tensor_ranks": 0}, True),
        ({"tensor_ranks": 2}, True),
        ({"fsdp_ranks": 2, "tensor_ranks": 0}, True),
        ({"fsdp_ranks": 2, "tensor_ranks": 2}, False),  # of one layout
        ({"fsdp_ranks": ">=3"}, False),
    ],
    ids=str,
)
def test_a_predicate_holds_of_either_layout_of_a_case_that_resumes(
    predicate: dict[str, Any], expected: bool
) -> None:
    assert holds(predicate, _on_ranks(Sharding(data=2, resumes="swapped"))) is expected


@pytest.mark.parametrize(("name", "expected"), [("w.grad", True), ("w.grad@1", True), ("w", False)])
def test_the_result_that_a_verdict_is_about(name: str, expected: bool) -> None:
    verdict = Verdict("S2", "sharded", "grad_parameter", "diverged", at=At(name=name))
    assert holds({"result": "w.grad*"}, Context(CASE, MACHINE, verdict=verdict)) is expected


def test_a_fact_of_the_verdict_never_holds_where_there_is_none() -> None:
    assert not holds({"message": "*"}, Context(CASE, MACHINE))


@pytest.mark.parametrize(
    ("predicate", "says"),
    [
        ({"kk": 1}, "unknown fact 'kk'"),
        ({"features": "!teleport"}, "unknown feature '!teleport'"),
        ({"events": "swich"}, "unknown event 'swich'"),
    ],
)
def test_what_does_not_exist_is_refused(predicate: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_predicate(predicate)
