"""Summarises a finding's guilty tensor for a report page: where it is wrong, by how much, and the
codes and scales around the first bad element."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowfuzz.numerics.formats import F64, Format, decode
from narrowfuzz.numerics.plan import OperandPlan, Role
from narrowfuzz.numerics.reference import Undivided, broadcast_granules, canonical_operands
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.quantiser import expected_codes, expected_scale
from narrowfuzz.trace.expect import number
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.compared import compared, guilty
from narrowfuzz.triage.finding import Bins, Element, View
from narrowfuzz.triage.pair import Compared
from narrowfuzz.triage.pair_operands import format_of, recomputed, seen_operand

#: Cells of a heat map along each side, shades of it, and the factor from one to the next.
CELLS, SHADES, SHADE = 48, 8, 4.0
#: Bars of a histogram, and the number of elements that are listed one by one.
BARS, ELEMENTS = 12, 16


def view_of(evidence: Evidence, verdict: Verdict) -> View | None:
    """The view of a divergence's guilty tensor in the run that is its evidence; None if it is about
    no tensor, or if this run does not show it."""
    try:
        with np.errstate(all="ignore"):
            pair = compared(evidence, verdict)
            if pair is None or not np.size(pair.got):
                return None
            return _view(pair, verdict, _elements(evidence, verdict))
    except Undivided:  # the library ran a shape that the plan's blocks do not divide
        return None


def _view(pair: Compared, verdict: Verdict, elements: tuple[Element, ...]) -> View | None:
    shape = np.shape(pair.got)
    error, share = far(pair)
    wrong = error > 0 if pair.exact else share > 1
    if not wrong.any():
        return None
    index = verdict.at.index
    if len(index) != len(shape) or any(i >= n for i, n in zip(index, shape, strict=True)):
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
    finite = error[np.isfinite(error)]
    rows, cell = heat(error, index)
    return View(
        tensor=pair.tensor,
        against=pair.against,
        shape=shape,
        at=index,
        wrong=int(wrong.sum()),
        largest=float(finite.max(initial=0.0)),
        rows=rows,
        cell=cell,
        unit=pair.named,
        exact=pair.exact,
        bins=binned(share),
        elements=elements,
    )


def far(pair: Compared) -> tuple[F64, F64]:
    """The absolute error of each element, and the same in units of ``pair.unit``. Infinite where
    only one of the two values is finite, NaN where nothing is expected of the element."""
    with np.errstate(all="ignore"):
        got, expected = (np.asarray(x, np.float64) for x in (pair.got, pair.expected))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        error = np.where(same, 0.0, np.abs(got - expected))
        error = np.where(np.isfinite(error), error, np.inf)
        share = np.where(error == 0.0, 0.0, error / pair.unit)
    return np.where(pair.skip, np.nan, error), np.where(pair.skip, np.nan, share)


def heat(error: F64, index: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[int, int]]:
    """The rows of a heat map, a character for each cell, and the cell of the element at ``index``.

    A cell shows its largest error: 8 is within a factor SHADE of the largest finite error, each
    shade below is one such factor less, 0 is no error, x is an infinite error, and a blank is a
    cell of which nothing is expected."""
    across = error.shape[-1] if error.ndim else 1
    flat = error.reshape(-1, across)
    place = int(np.ravel_multi_index(index, error.shape)) if index else 0
    cells = np.where(np.isnan(flat), -1.0, flat)
    starts = [np.arange(min(CELLS, n)) * n // min(CELLS, n) for n in flat.shape]
    for axis, edges in enumerate(starts):
        cells = np.maximum.reduceat(cells, edges, axis=axis)
    largest = float(np.max(cells, initial=0.0, where=np.isfinite(cells)))
    with np.errstate(all="ignore"):
        below = np.floor(np.log(largest / cells) / np.log(SHADE))
    shades = np.clip(SHADES - np.nan_to_num(below), 1, SHADES).astype(int)
    rows = tuple(
        "".join(
            "x" if np.isinf(far) else " " if far < 0 else "0" if far == 0 else str(shade)
            for far, shade in zip(line, tones, strict=True)
        )
        for line, tones in zip(cells, shades, strict=True)
    )
    row, column = divmod(place, across)
    at = [
        int(np.searchsorted(edges, i, "right")) - 1
        for edges, i in zip(starts, (row, column), strict=True)
    ]
    return rows, (at[0], at[1])


def binned(share: F64) -> Bins:
    """A histogram of errors in units, by powers of two. An error of exactly one unit is in the last
    bin below 1."""
    known = share[~np.isnan(share)]
    some = known[np.isfinite(known) & (known > 0)]
    powers = np.clip(np.ceil(np.log2(some)).astype(int) - 1, -60, 200)
    low, high = (int(powers.min()), int(powers.max())) if some.size else (-1, 0)
    low, high = min(low, -1), max(high, 0)  # the boundary at one unit is always shown
    step = 1
    while high // step - low // step >= BARS:
        step *= 2
    counts = np.bincount(powers // step - low // step, minlength=high // step - low // step + 1)
    return Bins(
        none=int((known == 0).sum()),
        first=low // step * step,
        step=step,
        counts=tuple(int(n) for n in counts),
        infinite=int(np.isinf(known).sum()),
    )


def _elements(evidence: Evidence, verdict: Verdict) -> tuple[Element, ...]:
    """The elements around the first bad element of a cast; none if its codes were not seen."""
    found = guilty(evidence, verdict)
    if found is None or not verdict.at.side or verdict.at.what == "source":
        return ()
    return (_recast if verdict.rule == "O13" else _cast)(*found, verdict)


def _cast(evidence: Evidence, trace: Trace, verdict: Verdict) -> tuple[Element, ...]:
    at, seen = verdict.at, seen_operand(trace, verdict)
    if seen is None or seen.codes is None:
        return ()
    role: Role = at.name  # type: ignore[assignment]
    operand = evidence.reference.operand(role, at.side)
    scale = evidence.seen_scale(role, at.side, seen)
    if operand.quantised is None or operand.plan.format is None:
        return ()
    wanted = operand.quantised.codes
    if at.what == "codes" and scale is not None:
        wanted = expected_codes(scale, operand)
    scales = seen.scale, None if seen.scale is None else expected_scale(seen, operand)
    return side_by_side(
        operand.x, (seen.codes, wanted), scales, operand.plan, operand.plan.format, verdict
    )


def _recast(evidence: Evidence, trace: Trace, verdict: Verdict) -> tuple[Element, ...]:
    pair, side = recomputed(evidence, trace, verdict), verdict.at.side
    if pair is None or pair.before.codes is None or pair.after.codes is None:
        return ()
    gemm = evidence.plan.gemms["output"]
    fmt = format_of(evidence, pair.before, side)
    if fmt is None or not {"input", "weight"} <= pair.tensors.keys():
        return ()
    x = canonical_operands("output", pair.tensors)[side == "b"]
    codes, scales = (
        (getattr(pair.after, what), getattr(pair.before, what)) for what in ("codes", "scale")
    )
    return side_by_side(x, codes, scales, gemm.a if side == "a" else gemm.b, fmt, verdict)


def side_by_side(
    x: Any,
    codes: tuple[Any, Any],
    scales: tuple[Any, Any],
    plan: OperandPlan,
    fmt: Format,
    verdict: Verdict,
) -> tuple[Element, ...]:
    """Up to ELEMENTS elements of the row around the first bad element; ``codes`` and ``scales`` are
    pairs of those that came and those expected."""
    at = verdict.at
    if any(part.shape != x.shape for part in codes) or not x.size:
        return ()
    index = at.index
    if at.what in ("scale", "amax"):
        granules = next((s for s in scales if s is not None), None)
        index = (0, 0) if granules is None else _first_of(at.index, granules, plan, x.shape)
    row, column = index
    first = max(0, min(column - ELEMENTS // 4, x.shape[1] - ELEMENTS))
    known = [_spread(s, plan, x.shape) for s in scales]
    return tuple(
        Element(
            index=(row, c),
            x=number(x[row, c]),
            code=_code(codes[0][row, c], fmt),
            wanted=_code(codes[1][row, c], fmt),
            scale="" if known[0] is None else _scale(known[0][row, c]),
            wanted_scale="" if known[1] is None else _scale(known[1][row, c]),
        )
        for c in range(first, min(first + ELEMENTS, x.shape[1]))
    )


def _spread(per_granule: Any, plan: OperandPlan, shape: tuple[int, ...]) -> Any:
    """The value of its granule for each element; None if there are no values, or if their shape
    does not fit ``shape``."""
    if per_granule is None:
        return None
    there = broadcast_granules(np.asarray(per_granule), plan)
    fits = all(n in (1, size) for n, size in zip(there.shape[::-1], shape[::-1], strict=False))
    return np.broadcast_to(there, shape) if fits else None


def _first_of(
    index: tuple[int, ...], granules: Any, plan: OperandPlan, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Index of the first element of the granule at ``index``."""
    names = np.arange(np.size(granules)).reshape(np.shape(granules))
    owner = _spread(names, plan, shape)
    if owner is None:
        return (0, 0)
    return tuple(int(i) for i in np.argwhere(owner == names[index])[0])


def _code(code: Any, fmt: Format) -> str:
    return f"0x{int(code):0{-(-fmt.bits // 4)}x} = {number(float(decode(np.asarray(code), fmt)))}"


def _scale(scale: Any) -> str:
    if scale.dtype.names:
        return f"byte {int(scale['block'])}"
    return f"byte {int(scale)}" if scale.dtype == np.uint8 else number(scale)
