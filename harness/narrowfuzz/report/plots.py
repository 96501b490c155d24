"""Plots of the errors in a finding's tensor, as SVG for a page whose style sheet has the colours.

They are 360 units wide, the width of a phone, so that text is not scaled down there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from narrowfuzz.triage.finding import View
from narrowfuzz.triage.view import SHADE, SHADES

_WIDTH, _EDGE = 360.0, 4.0
#: Heat map: its largest width and height, and the largest width and height of a cell.
_ACROSS, _DOWN, _WIDEST, _TALLEST = _WIDTH - 2 * _EDGE, 240.0, 44.0, 24.0
#: Histogram: the height of the tallest bar, the space above and below, and the widest bar.
_TALL, _ABOVE, _BELOW, _BAR = 110.0, 26.0, 22.0, 40.0
#: About how many ticks have room for their labels.
_TICKS = 6


def heat_map(view: View) -> Markup:
    """Heat map of where the errors are: shade 8 is the largest error, a cross marks values that are
    not finite, grey those not judged, and a frame the first bad element."""
    rows, columns = len(view.rows), len(view.rows[0])
    wide, tall = min(_WIDEST, _ACROSS / columns), min(_TALLEST, _DOWN / rows)
    bottom = _EDGE + rows * tall
    parts = [_rect("frame", _EDGE, _EDGE, columns * wide, rows * tall)]
    for mark in sorted({mark for line in view.rows for mark in line} - {"0"}):
        kind = {" ": "unjudged", "x": "cross"}.get(mark, f"s{mark}")
        draw = _cross if mark == "x" else _box
        path = "".join(
            draw(_EDGE + x * wide, _EDGE + y * tall, n * wide / (n if mark == "x" else 1), tall)
            for x, y, n in _runs(view.rows, mark)
        )
        parts.append(Markup('<path class="{}" d="{}"/>').format(kind, path))
    x, y = _EDGE + view.cell[1] * wide, _EDGE + view.cell[0] * tall
    parts += [_rect(kind, x - 1.5, y - 1.5, wide + 3, tall + 3) for kind in ("halo", "first")]
    parts += _legend(view, bottom + 10)
    return _svg(heat_text(view), bottom + 44, parts)


def heat_text(view: View) -> str:
    """The heat map in words."""
    whole = math.prod(view.shape)
    shape = " x ".join(map(str, view.shape)) or "one number"
    infinite = f", and {view.bins.infinite} are not finite" if view.bins.infinite else ""
    within = "" if view.exact else " Errors within the tolerance are drawn, too."
    place = f" The frame marks the first wrong one, {list(view.at)}." if view.at else ""
    return (
        f"Where: {view.tensor} ({shape}), compared with {view.against}. The darker, the larger the "
        f"error; without colour there is none.{within} {view.wrong} of {whole} elements are wrong, "
        f"the largest finite error is {view.largest:.4g}{infinite}.{place}"
    )


def histogram(view: View) -> Markup:
    """Histogram of the errors' sizes: bins by powers of two, logarithmic heights, and a line at one
    unit."""
    bins, bottom = view.bins, _ABOVE + _TALL
    bars = [("none", bins.none), *((_kind(view, i), n) for i, n in enumerate(bins.counts))]
    bars += [("over", bins.infinite)] if bins.infinite else []
    wide = min(_BAR, (_WIDTH - 4 * _EDGE) / len(bars))  # the last name is centred below the edge
    most = math.log2(1 + max(n for _, n in bars))
    parts = [_text("name", _EDGE + wide / 2, bottom + 16, "0")]
    for i, (kind, n) in enumerate(bars):
        x, tall = _EDGE + i * wide, _TALL * math.log2(1 + n) / most
        if n:
            parts.append(_rect(kind, x + 1, bottom - tall, wide - 2, tall))
            parts.append(_text("count", x + wide / 2, bottom - tall - 4, _short(n)))
    one = -bins.first // bins.step
    every = -(-len(bins.counts) // _TICKS)
    for i in range(len(bins.counts) + 1):
        if i % every == one % every:
            power, x = bins.first + i * bins.step, _EDGE + (i + 1) * wide
            parts.append(_power(x, bottom + 16, power))
    if bins.infinite:
        parts.append(_text("name", _EDGE + (len(bars) - 0.5) * wide, bottom + 16, "inf"))
    parts.append(_line("axis", _EDGE, bottom, _EDGE + len(bars) * wide, bottom))
    parts.append(_line("one", _EDGE + (one + 1) * wide, 4, _EDGE + (one + 1) * wide, bottom))
    return _svg(histogram_text(view), bottom + _BELOW, parts)


def histogram_text(view: View) -> str:
    """The histogram in words."""
    bins = view.bins
    off = sum(bins.counts) + bins.infinite
    good = "in bar 0, as no error is allowed" if view.exact else "left of the dashed line at 1"
    return (
        f"How far: each bar counts the elements whose error is of that size, from left to right in "
        f"{view.unit}; heights are logarithmic. Without any error (bar 0): {bins.none} elements; "
        f"with one: {off}. In a correct run all bars are {good}."
    )


def _kind(view: View, i: int) -> str:
    """Class of bar i: "over" for errors that are too large, else "within"."""
    return "over" if view.exact or view.bins.first + i * view.bins.step >= 0 else "within"


def _runs(rows: Sequence[str], mark: str) -> Iterator[tuple[int, int, int]]:
    """Column, row and length of each horizontal run of cells with this mark; for crosses each cell
    is a run of its own."""
    for y, line in enumerate(rows):
        x = 0
        while x < len(line):
            n = 1
            if line[x] == mark:
                while mark != "x" and line[x : x + n + 1] == mark * (n + 1):
                    n += 1
                yield x, y, n
            x += n


def _box(x: float, y: float, wide: float, tall: float) -> str:
    return f"M{x:.1f},{y:.1f}h{wide:.1f}v{tall:.1f}h{-wide:.1f}z"


def _cross(x: float, y: float, wide: float, tall: float) -> str:
    x, y, wide, tall = x + 1, y + 1, wide - 2, tall - 2
    return f"M{x:.1f},{y:.1f}l{wide:.1f},{tall:.1f}m{-wide:.1f},0l{wide:.1f},{-tall:.1f}"


def _legend(view: View, top: float) -> Iterator[Markup]:
    """The shades from no error to the largest, and the meaning of the marks that occur."""
    size = 18.0
    yield _rect("frame", _EDGE, top, size * (SHADES + 1), 10)
    for i in range(1, SHADES + 1):
        yield _rect(f"s{i}", _EDGE + i * size, top, size, 10)
    yield _text("start", _EDGE, top + 25, "0")
    yield _text("end", _EDGE + size * (SHADES + 1), top + 25, f"{view.largest:.3g}")
    x = _EDGE + size * (SHADES + 1) + 14
    yield _text("start", x, top + 9, f"each a factor {SHADE:.0f}")
    marks = {mark for line in view.rows for mark in line}
    if "x" in marks:
        path = _cross(x, top + 15, 12, 12)
        yield Markup('<path class="cross" d="{}"/>').format(path)
        yield _text("start", x + 16, top + 25, "not finite")
    if " " in marks:
        x += 84 if "x" in marks else 0
        yield _rect("unjudged", x, top + 15, 12, 11)
        yield _text("start", x + 16, top + 25, "not judged")


def _short(n: int) -> str:
    return str(n) if n < 1000 else f"{n / 1000:.3g}k" if n < 10**6 else f"{n / 1e6:.3g}M"


def _power(x: float, y: float, power: int) -> Markup:
    """The label of a power of two under an axis; 2^0 is written as 1."""
    if power == 0:
        return _text("name", x, y, "1")
    return Markup(
        '<text class="name" x="{:.1f}" y="{:.1f}">2<tspan dy="-5" class="power">{}</tspan></text>'
    ).format(x, y, power)


def _rect(kind: str, x: float, y: float, wide: float, tall: float) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
        kind, x, y, wide, tall
    )


def _line(kind: str, x: float, y: float, to_x: float, to_y: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
        kind, x, y, to_x, to_y
    )


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, text)


def _svg(alternative: str, height: float, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="plot" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>'
    ).format(_WIDTH, height, alternative, Markup("").join(parts))
