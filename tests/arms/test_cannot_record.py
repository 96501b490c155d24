"""A mistake in reading what a library does is ours, and never a finding about the library."""

from __future__ import annotations

from dataclasses import replace

import pytest
from narrowfuzz.arms.lost import CannotRecord
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.operators import BY_KERNEL, BY_NAME
from samples import recipes

CASE = Case(spec=Spec(recipe="torch.fp32", dtype="fp32", model="layernorm_linear"), data=DataSpec())
KERNELS = ("aten::native_layer_norm", "aten::native_layer_norm_backward")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_call_that_cannot_be_read_ends_the_run(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward it passes autograd."""
    judge = Judge(recipes(), Ledger([]), frozenset({"eager"}))
    assert not judge.judge(CASE).causes
    broken = replace(BY_KERNEL[kernel], read=lambda named, result: named["an argument of 2030"])
    monkeypatch.setitem(BY_KERNEL, kernel, broken)  # type: ignore[arg-type]
    with pytest.raises(CannotRecord, match=r"layer_norm.*cannot be read: KeyError.*2030"):
        judge.judge(CASE)


@pytest.mark.parametrize("error", [Unjudged, ValueError])
def test_a_call_that_is_refused_with_a_reason_is_not_judged(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error is a fault of ours."""

    def refuse(named: object, result: object) -> None:
        raise error("for a reason")

    judge = Judge(recipes(), Ledger([]), frozenset({"eager"}))
    broken = replace(BY_KERNEL[KERNELS[0]], read=refuse)
    monkeypatch.setitem(BY_KERNEL, KERNELS[0], broken)  # type: ignore[arg-type]
    if error is Unjudged:
        assert not judge.judge(CASE).causes
    else:
        with pytest.raises(CannotRecord, match="for a reason"):
            judge.judge(CASE)


def test_our_own_mistake_is_no_reason_not_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(_: object) -> None:
        raise ValueError("of our own")

    operator = replace(BY_KERNEL[KERNELS[0]], expected=mistake)  # type: ignore[arg-type]
    monkeypatch.setitem(BY_NAME, operator.name, operator)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of our own"):
        Judge(recipes(), Ledger([]), frozenset({"eager"})).judge(CASE)


def test_a_step_that_cannot_be_read_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise KeyError("state of 2030")

    spec = Spec(recipe="torch.fp32", dtype="fp32", model="mlp_gelu", steps=2)
    judge = Judge(recipes(), Ledger([]), frozenset({"eager"}))
    assert not judge.judge(Case(spec=spec, data=DataSpec())).causes
    monkeypatch.setattr("narrowfuzz.arms.operators.read_step", absent)
    with pytest.raises(CannotRecord, match=r"a step of SGD cannot be read: KeyError.*2030"):
        judge.judge(Case(spec=spec, data=DataSpec()))
