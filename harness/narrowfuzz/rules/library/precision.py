"""O20 of a library's layers: products have the recipe's formats and blocks; weights are cast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from narrowfuzz.case.events import Backward, Forward
from narrowfuzz.numerics.scales import FP4_BLOCK, FP8_BLOCK
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import address_of, steps_of
from narrowfuzz.rules.library.recompute import sides_of
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.state.symptoms import circumstances
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Blocks, Formats, Present
from narrowfuzz.trace.snapshots import CastSeen, ProductSeen, Side
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict


def check_precision(evidence: Evidence) -> Iterator[Verdict]:
    """O20: inside a region every product runs in the recipe's formats, with scales for its blocks,
    outside none does, and a forward that must cast its weights does so."""
    for arm, trace in evidence.in_one_process.items():
        yield replace(_precision(evidence, trace), arm=arm)


_NARROW = frozenset({"e4m3", "e5m2", "e2m1"})
#: Elements along a block of a kind that has one.
_BLOCK = {"block": FP8_BLOCK, "nvfp4": FP4_BLOCK}


def _precision(evidence: Evidence, trace: Trace) -> Verdict:
    judged = False
    for (i, event, progress), moment in zip(steps_of(evidence.spec), trace.moments, strict=False):
        if isinstance(event, Forward):
            narrow = progress.inner(event) is not None
        elif isinstance(event, Backward):
            under = {f in progress.ran for f in event.of}
            if len(under) > 1:
                continue  # a sum over both kinds: which product belongs to which is not known
            narrow = under.pop()
        else:
            continue
        for product in moment.products:
            judged = True
            formats = {product.a.format, product.b.format}
            wrong = bool(formats - _NARROW) if narrow else bool(formats & _NARROW)
            form = "FP4" if evidence.own_layers.kind == "nvfp4" else "FP8"
            symptom = "product in high precision" if narrow else f"product in {form}"
            due = _formats(evidence, product) if narrow else set()
            if narrow and not wrong:
                symptom, wrong = f"product in other {form} formats", formats != due
            if wrong:
                symptom += f" ({product.at.phase}){circumstances(evidence.spec, trace.arm)}"
                at = address_of(At(what="product", name=product.role), i, product.at)
                actual, expect = sides_of(product), Formats(tuple(sorted(due)))
                return diverged("O20", "", product.role, symptom, at, actual, expect)
            if (other := _other_blocks(evidence, i, product)) is not None:
                return other
        missing = _weight_cast_missing(evidence, event, moment.casts) if narrow else ""
        if missing:
            at = At(what="cast", event=i, name="output", side="b")
            cast, actual = (
                Present(("a fresh cast of the weight",)),
                "none in the window the layer has",
            )
            return diverged("O20", "", "output", missing, at, actual, cast)
    return plain("O20", "", "output", "ok" if judged else "not_applicable")


def _other_blocks(evidence: Evidence, event: int, product: ProductSeen) -> Verdict | None:
    """The verdict on the first operand whose scales are for other blocks than those of FP8 block
    scaling and NVFP4: squares of a weight, else lines along the dimension that is summed over."""
    size = _BLOCK.get(evidence.own_layers.kind)
    if size is None:
        return None
    sides: tuple[tuple[Literal["a", "b"], Side], ...] = (("a", product.a), ("b", product.b))
    for name, side in sides:
        if side.codes is None or not side.scales:
            continue
        due = Blocks(1, size)
        if product.role == "grad_weight":
            due = Blocks(size, 1)
        elif name == "a":
            due = Blocks(size, size)
        rows, columns = side.codes.shape
        if side.scales != (-(-rows // due.rows), -(-columns // due.columns)):
            symptom = f"scales of other blocks ({product.at.phase})"
            at = address_of(At(what="scale", name=product.role, side=name), event, product.at)
            actual = f"{' x '.join(map(str, side.scales))} scales for {rows} x {columns} elements"
            return diverged("O20", "", product.role, symptom, at, actual, due)
    return None


def _formats(evidence: Evidence, product: ProductSeen) -> set[str]:
    """The formats that a product must have: in a backward one of its operands is a gradient."""
    if evidence.own_layers.kind == "nvfp4":
        return {"e2m1"}
    blocks = evidence.own_layers.kind in ("mx", "block")
    wide = not blocks and evidence.spec.settings.format == "hybrid"
    return {"e5m2", "e4m3"} if wide and product.at.phase == "backward" else {"e4m3"}


def _weight_cast_missing(evidence: Evidence, event: object, casts: tuple[CastSeen, ...]) -> str:
    known = any(c.slot is not None for c in casts)
    if not isinstance(event, Forward) or event.first is False or not known:
        return ""
    if evidence.spec.quantized_init:
        return ""
    forward = [c.slot for c in casts if c.at.phase == "forward"]
    if any(slot is not None and slot.index == 1 for slot in forward):
        return ""
    # all scales are state here, so the state of a cast that belongs to no slot no longer exists
    return "weight cast into a window that is gone" if None in forward else "weight not cast"
