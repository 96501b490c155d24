"""O3 of a schedule on hand-made traces: whose casts a product with a kept weight may take."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from narrowfuzz.case.events import Backward, Event, Forward, Layout, Open
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.rules.library.operands import check_operands
from narrowfuzz.rules.library.precision import check_precision
from narrowfuzz.trace.snapshots import (
    CastSeen,
    ExecutionPoint,
    Moment,
    ProductSeen,
    Side,
    SlotName,
)
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

KEPT: tuple[Event, ...] = (
    Open(), Forward(first=True), Forward(first=False), Forward(first=False),
    Backward(of=(2,)), Backward(of=(1,)),
)  # fmt: skip
OWN: tuple[Event, ...] = (
    Open(), Forward(), Forward(), Forward(), Backward(of=(2,)), Backward(of=(1,)),
)  # fmt: skip


def cast(at: ExecutionPoint, code: int) -> CastSeen:
    """One block's cast; its scale byte is its code."""
    codes = np.array([[code, 0]], np.uint8)
    return CastSeen(at, None, "e4m3", None, np.float32(1), codes, None, bytes([code]))


def product(role: Literal["grad_input", "grad_weight"], a: int, b: int) -> ProductSeen:
    sides = [Side("e4m3", np.array([[x, 0]], np.uint8), None, bytes([x])) for x in (a, b)]
    return ProductSeen(ExecutionPoint("backward"), role, *sides)


def evidence_of(
    recipe: str,
    kind: Literal["delayed", "mx", "block", "nvfp4"],
    events: tuple[Event, ...],
    moments: tuple[Moment, ...],
    layout: Layout = "chain",
) -> Evidence:
    """Of one run under a reentrant checkpoint of each layer."""
    spec = Spec(
        recipe=recipe, model="library_linear", events=events, layout=layout,
        checkpoint="reentrant", wraps="each",
    )  # fmt: skip
    return Evidence(
        case=Case(spec=spec, data=DataSpec()),
        traces={"eager": Trace("eager", moments=moments)},
        library=OwnLayers(kind, lambda settings: None),
    )


WEIGHT, INPUT, GRADIENT, ELSE = 7, 8, 9, 10


@pytest.mark.parametrize(
    ("events", "role", "a", "want"),
    [
        (KEPT, "grad_input", WEIGHT, ""),
        (KEPT, "grad_weight", WEIGHT, "operand of another forward"),
        (OWN, "grad_input", WEIGHT, "operand of another forward"),
        (KEPT, "grad_input", ELSE, "operand that no cast made"),
    ],
)
def test_a_kept_weights_copy_for_the_backward_is_shared(
    events: tuple[Event, ...], role: Literal["grad_input", "grad_weight"], a: int, want: str
) -> None:
    """The recompute of y2 makes it; the backward of y1 may take it, as its weight and for no other
    operand."""
    first = (
        cast(ExecutionPoint("recompute", 2, 0), WEIGHT),
        cast(ExecutionPoint("backward"), GRADIENT),
    )
    then = (
        cast(ExecutionPoint("recompute", 1, 0), INPUT),
        cast(ExecutionPoint("backward"), GRADIENT),
    )
    moments = (
        *(Moment(i, (), (), (), {}, {}) for i in range(4)),
        Moment(4, (), first, (product("grad_input", WEIGHT, GRADIENT),), {}, {}),
        Moment(5, (), then, (product(role, a, GRADIENT),), {}, {}),
    )
    evidence = evidence_of("te.mxfp8", "mx", events, moments)
    (verdict,) = check_operands(evidence)
    assert verdict.symptom == want
    assert verdict.status == ("diverged" if want else "ok")


def cast_by_scale(at: ExecutionPoint, slot: int, code: int) -> CastSeen:
    codes = np.array([[code, 0]], np.uint8)
    name = SlotName("0", "forward", slot)
    return CastSeen(at, name, "e4m3", np.float32(1), np.float32(1), codes)


def output(at: ExecutionPoint, a: int, b: int) -> ProductSeen:
    sides = [Side("e4m3", np.array([[x, 0]], np.uint8), np.float32(1)) for x in (a, b)]
    return ProductSeen(at, "output", *sides)


@pytest.mark.parametrize(
    ("events", "slot", "a", "b", "want"),
    [
        (KEPT, 1, WEIGHT, INPUT, ""),
        (OWN, 1, WEIGHT, INPUT, "operand of another forward"),
        (KEPT, 0, WEIGHT, INPUT, "operand of another forward"),
        (KEPT, 1, WEIGHT, WEIGHT, "operand of another forward"),
        (KEPT, 1, ELSE, INPUT, "operand that no cast made"),
    ],
)
def test_a_kept_weight_that_a_recompute_casts_anew_is_shared(
    events: tuple[Event, ...], slot: int, a: int, b: int, want: str
) -> None:
    """The recompute of y2's second call casts it; that of its first, and of y1, may take it."""
    later, sooner, other = (
        ExecutionPoint("recompute", 2, 1),
        ExecutionPoint("recompute", 2, 0),
        ExecutionPoint("recompute", 1, 0),
    )
    first = (
        cast_by_scale(later, slot, WEIGHT),
        cast_by_scale(later, 0, ELSE + 1),
        cast_by_scale(sooner, 0, INPUT),
    )
    for at, casts in ((sooner, first), (other, (*first, cast_by_scale(other, 0, INPUT)))):
        moments = (
            *(Moment(i, (), (), (), {}, {}) for i in range(4)),
            Moment(4, (), casts, (output(at, a, b),), {}, {}),
        )
        evidence = evidence_of("te.delayed", "delayed", events, moments, layout="twice")
        (verdict,) = check_operands(evidence)
        assert verdict.symptom == want


def in_blocks(shape: tuple[int, int], scales: tuple[int, int], form: str = "e4m3") -> Side:
    return Side(form, np.zeros(shape, np.uint8), blocks=b"scales", scales=scales)


def precision_of(kind: Literal["block", "nvfp4"], product: ProductSeen) -> Verdict:
    events = (Open(), Forward(), Backward(of=(0,)))
    last = product.role != "output"
    moments = tuple(
        Moment(i, (), (), (product,) if i == 1 + last else (), {}, {}) for i in range(3)
    )
    (verdict,) = check_precision(evidence_of(f"te.{kind}", kind, events, moments))
    return verdict


@pytest.mark.parametrize(
    ("role", "a", "b", "side"),
    [
        ("output", (2, 2), (130, 2), ""),
        ("grad_input", (2, 2), (130, 2), ""),
        ("grad_weight", (2, 144), (2, 144), ""),
        ("output", (130, 2), (130, 2), "a"),  # a weight by lines
        ("grad_input", (2, 144), (130, 2), "a"),
        ("output", (2, 2), (2, 2), "b"),  # an input by squares
        ("grad_weight", (2, 144), (130, 2), "b"),  # along the dimension that is not summed over
    ],
)
def test_scales_of_operands_are_for_the_recipes_blocks(
    role: Literal["output", "grad_input", "grad_weight"],
    a: tuple[int, int],
    b: tuple[int, int],
    side: str,
) -> None:
    at = ExecutionPoint("forward", 0, 0) if role == "output" else ExecutionPoint("backward")
    product = ProductSeen(at, role, in_blocks((130, 144), a), in_blocks((130, 144), b))
    verdict = precision_of("block", product)
    assert (verdict.status == "diverged") is bool(side) and verdict.at.side == side


@pytest.mark.parametrize(
    ("a", "form", "symptom"),
    [
        ((2, 4), "e2m1", ""),
        ((32, 4), "e2m1", "scales of other blocks (forward)"),
        ((2, 4), "e4m3", "product in other FP4 formats (forward)"),
        ((2, 4), "bf16", "product in high precision (forward)"),
    ],
)
def test_products_of_nvfp4_are_of_e2m1_in_blocks_of_16(
    a: tuple[int, int], form: str, symptom: str
) -> None:
    sides = in_blocks((32, 64), a, form), in_blocks((32, 64), (32, 4), form)
    verdict = precision_of("nvfp4", ProductSeen(ExecutionPoint("forward", 0, 0), "output", *sides))
    assert verdict.symptom == symptom
