"""O3 of a library's layers: products multiply the right operands, at the scale of their cast.

A forward multiplies its own casts; a backward those of the forwards it goes through, and the
gradients it quantises itself. Cached weights are the casts of the forward that cached them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.case.events import Backward, Forward
from narrowfuzz.case.spec import Spec
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import address_of
from narrowfuzz.rules.rule import diverged, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import MadeBy
from narrowfuzz.trace.snapshots import CastSeen, ExecutionPoint, ProductSeen, Side
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict


def check_operands(evidence: Evidence) -> Iterator[Verdict]:
    """O3: operands are codes that one of their own casts made, with the inverse of its scale."""
    for arm, trace in evidence.in_one_process.items():
        yield replace(_operands(evidence, trace), arm=arm)


@dataclass(frozen=True)
class _Made:
    """A cast as a possible origin of codes."""

    at: ExecutionPoint
    event: int
    #: 1 / scale, or block scales.
    inverse: bytes
    #: A tensor of the forward that was quantised in a backward.
    late: bool
    #: Cast block by block, separately for each direction.
    blocks: bool
    #: A weight whose scale is state.
    weight: bool


@dataclass
class _Casts:
    """The casts seen so far, by their codes."""

    made: dict[bytes, list[_Made]] = field(default_factory=dict)

    def take(self, cast: CastSeen, event: int) -> None:
        if not cast.inverse:
            return
        forward = cast.slot is not None and cast.slot.direction == "forward"
        late = forward and cast.at.phase == "backward"
        # each product has three slots: input, weight, output
        weight = forward and cast.slot is not None and cast.slot.index % 3 == 1
        made = _Made(cast.at, event, cast.inverse, late, bool(cast.blocks), weight)
        for key in _keys(cast.codes):
            self.made.setdefault(key, []).append(made)

    def seen(self) -> Iterator[_Made]:
        """All casts."""
        return (made for same in self.made.values() for made in same)


def _keys(codes: NDArray[np.uint8]) -> set[bytes]:
    """The bytes of the codes as laid out, and transposed: libraries keep both copies."""
    return {codes.tobytes(), np.ascontiguousarray(codes.T).tobytes()}


def _operands(evidence: Evidence, trace: Trace) -> Verdict:
    casts = _Casts()
    sources = sources_of(evidence.spec)
    judged = False
    for moment in trace.moments:
        i, event = moment.event, evidence.spec.events[moment.event]
        for cast in moment.casts:
            casts.take(cast, i)
        through = event.of if isinstance(event, Backward) else ()
        for product in moment.products:
            for name, side in (("a", product.a), ("b", product.b)):
                if side.codes is None or not side.inverse:
                    continue
                found = casts.made.get(side.codes.tobytes(), [])

                def may(
                    made: _Made, product: ProductSeen = product, name: str = name, event: int = i
                ) -> bool:
                    is_copy = _copies(made, product, through, sources)
                    is_copy = is_copy or _recast(made, product, through, sources)
                    own = _belongs(made, product, event, through, sources)
                    return own or (name == "a" and is_copy)

                own = [made for made in found if may(made)]
                if evidence.spec.quantized_init and (not own or _uniform(side.codes)):
                    continue  # the parameter itself: made before the schedule began
                judged = True
                wrong = _wrong(side, found, own)
                if wrong is not None:
                    symptom, got, right = wrong
                    operand = At(what="scale", name=product.role, side=name)  # type: ignore[arg-type]
                    places = {(i, product.at): None}  # a correct library may cast here
                    places |= dict.fromkeys((m.event, m.at) for m in casts.seen() if may(m))
                    makers = tuple(address_of(At(what="cast"), *place) for place in places)
                    place, actual = address_of(operand, i, product.at), got or "codes of no cast"
                    expect = MadeBy(makers, right)
                    return diverged("O3", "", product.role, symptom, place, actual, expect)
    return plain("O3", "", "operand", "ok" if judged else "not_applicable")


def _uniform(codes: NDArray[np.uint8]) -> bool:
    """True if all codes are the same, such as zeros or NaN: they do not identify their cast."""
    return not codes.size or bool((codes == codes.flat[0]).all())


def sources_of(spec: Spec) -> list[set[int]]:
    """For each forward: itself, and the forward whose cached weights it reuses."""
    sources: list[set[int]] = []
    last_cast: dict[int, int] = {}
    for event in spec.events:
        if isinstance(event, Forward):
            sources.append({len(sources)})
            if event.first:
                last_cast[event.path] = len(sources) - 1
            elif event.first is False:
                sources[-1].add(last_cast[event.path])
    return sources


def _belongs(
    made: _Made, product: ProductSeen, event: int, through: tuple[int, ...], sources: list[set[int]]
) -> bool:
    """May the product multiply the codes of this cast?"""
    at = product.at
    if at.phase != "backward":
        return made.at == at or made.at.forward in sources[at.forward] - {at.forward}
    if made.at.phase == "backward":
        return made.event == event and not made.late
    return any(made.at.forward in sources[f] for f in through)


def _copies(
    made: _Made, product: ProductSeen, through: tuple[int, ...], sources: list[set[int]]
) -> bool:
    """Is it a cached weight's copy for the backward? With block scales that is another cast than
    the forward's: made when a backward first needs it, and cached for the backwards of all forwards
    that share the weight."""
    if not (made.blocks and made.at.phase == "recompute" and product.role == "grad_input"):
        return False
    made_from = sources[made.at.forward] if made.at.forward >= 0 else set()
    return any(made_from & sources[f] for f in through)


def _recast(
    made: _Made, product: ProductSeen, through: tuple[int, ...], sources: list[set[int]]
) -> bool:
    """Is it a cached weight that a recompute cast anew? A weight that was cached by a forward
    without a graph has no copy for the backward: the first recompute that needs one casts the
    weight again, and that cast is cached for all forwards that share it. Its other scale is judged
    by O13."""
    if not (made.weight and made.at.phase == "recompute" and made.at.forward >= 0):
        return False
    again = product.at.phase == "recompute"
    users = (product.at.forward,) if again else through
    made_from = sources[made.at.forward] - {made.at.forward}
    role = "output" if again else "grad_input"
    return product.role == role and any(made_from & sources[f] for f in users)


def _wrong(side: Side, found: list[_Made], own: list[_Made]) -> tuple[str, str, str] | None:
    """Symptom, observed value and right value (if it is a number); None if nothing is wrong."""
    if not found:
        return "operand that no cast made", "", ""
    if not own:
        if any(made.late for made in found):
            return "input quantised again in backward", "", ""
        return "operand of another forward", "", ""
    if side.inverse not in {made.inverse for made in own}:
        return "scale and inverse out of step", *_apart(side.inverse, own[0].inverse)
    return None


def _apart(got: bytes, right: bytes) -> tuple[str, str]:
    """Two different inverses, in words."""
    kind = np.float32 if len(right) == 4 == len(got) else np.uint8
    one, other = np.frombuffer(got, kind), np.frombuffer(right, kind)
    if kind is np.float32 or len(one) != len(other):
        return number(float(one[0])), number(float(other[0]))
    wrong = np.flatnonzero(one != other)
    at = int(wrong[0])
    return f"byte {one[at]} for block {at} ({len(wrong)} bytes differ)", f"byte {other[at]}"
