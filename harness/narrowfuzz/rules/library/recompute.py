"""O13 of a library's layers: a recompute multiplies the same as its forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from narrowfuzz.case.events import Forward
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import address_of
from narrowfuzz.rules.rule import diverged, number, plain
from narrowfuzz.rules.state.symptoms import circumstances
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.snapshots import ProductSeen, Side
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict


def check_recompute(evidence: Evidence) -> Iterator[Verdict]:
    """O13: a recompute quantises and multiplies the same as its forward."""
    for arm, trace in evidence.in_one_process.items():
        if not BY_NAME[arm].recomputes:
            continue
        yield replace(_recomputed(evidence, trace), arm=arm)


def _recomputed(evidence: Evidence, trace: Trace) -> Verdict:
    judged = False
    forwards = [e for e in evidence.spec.events if isinstance(e, Forward)]
    with_cached_weight = frozenset(i for i, event in enumerate(forwards) if event.first is False)
    first: dict[tuple[int, int], list[ProductSeen]] = {}
    layers: dict[tuple[int, int], str] = {}
    for moment in trace.moments:
        layers |= {(call.at.forward, call.at.call): call.layer for call in moment.calls}
        again: dict[tuple[int, int], list[ProductSeen]] = {}
        for product in moment.products:
            key = (product.at.forward, product.at.call)
            if product.at.phase == "forward":
                first.setdefault(key, []).append(product)
            elif product.at.phase == "recompute":
                again.setdefault(key, []).append(product)
        for key, products in again.items():
            judged = True
            wanted = first.get(key, [])
            for i, product in enumerate(products):
                want = wanted[i % len(wanted)] if wanted else None
                symptom = _differs(product, want)
                if (
                    symptom == _OTHER_SCALE
                    and want is not None
                    and _of_another(product, want, key, i, first, layers, with_cached_weight)
                ):
                    symptom = "recomputed with the scales of another call"
                if symptom:
                    symptom += circumstances(evidence.spec, trace.arm)
                    place = address_of(At(what="product", name="output"), moment.event, product.at)
                    first_run = msgspec.structs.replace(place, event=-1, phase="forward")
                    expect = Same(first_run, sides_of(want) if want else "no product")
                    actual = sides_of(product)
                    return diverged("O13", "", "output", symptom, place, actual, expect)
    return plain("O13", "", "output", "ok" if judged else "not_applicable")


def _of_another(
    product: ProductSeen,
    want: ProductSeen,
    key: tuple[int, int],
    i: int,
    first: Mapping[tuple[int, int], list[ProductSeen]],
    layers: Mapping[tuple[int, int], str],
    with_cached_weight: Collection[int],
) -> bool:
    """True if another call of the same layer ran the same product with these scales. A forward in
    ``with_cached_weight`` multiplied a cached weight with its earlier scale: if the other call is
    one, the scale of the other operand, on either side, is enough. A recompute of such a forward
    multiplies that weight again: then only operands whose scale differs from its forward's are
    compared."""
    sides = ((product.a, want.a), (product.b, want.b))
    moved = [side.inverse != wanted.inverse for side, wanted in sides]
    for other in (k for k in first if k != key and layers.get(k) == layers.get(key)):
        ran = first[other][i % len(first[other])]
        same = (ran.a.inverse == product.a.inverse, ran.b.inverse == product.b.inverse)
        if all(same) or (other[0] in with_cached_weight and any(same)):
            return True
        if key[0] in with_cached_weight and all(s for s, m in zip(same, moved, strict=True) if m):
            return True
    return False


_OTHER_SCALE = "recomputed with another scale"


def _differs(product: ProductSeen, want: ProductSeen | None) -> str:
    if want is None:
        return "recomputed what the forward did not do"
    for got, side in ((product.a, want.a), (product.b, want.b)):
        if got.format != side.format:
            return "recomputed in another precision"
    for got, side in ((product.a, want.a), (product.b, want.b)):
        if got.inverse != side.inverse:
            return _OTHER_SCALE
    for got, side in ((product.a, want.a), (product.b, want.b)):
        if got.codes is not None and not np.array_equal(got.codes, side.codes):  # type: ignore[arg-type]
            return "recomputed other codes"
    return ""


def sides_of(product: ProductSeen) -> str:
    """Both operands of a product, in words."""
    return " times ".join(_side(side) for side in (product.a, product.b))


def _side(side: Side) -> str:
    scale = "" if side.scale_inv is None else f" (1/scale {number(float(side.scale_inv))})"
    return f"{side.format}{scale}"
