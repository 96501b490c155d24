"""Draws state.svg: a slot's scale and newest maximum over the events of a schedule, per arm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from narrowfuzz.triage.finding import State, Story

_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 180, 90, 60
#: Pixels between the two graphs, and of each text line.
_GAP, _LINE = 50, 14
_COLOURS = ("#1f77b4", "#d62728")
Points = Sequence[tuple[int, float]]


def draw_state(story: Story, path: Path) -> None:
    """Write the picture. A number that is not finite leaves a gap in its line."""
    lines = [story.slot, story.broke]
    height = _TOP + 2 * (_HEIGHT + _GAP) + _LINE * len(story.lines)
    scales = {arm: [(s.event, _finite(s.scale)) for s in states] for arm, states in _arms(story)}
    maxima = {arm: [(s.event, _newest(s.window)) for s in states] for arm, states in _arms(story)}
    parts = [
        *(_text(_LEFT, 20 + _LINE * i, line) for i, line in enumerate(lines)),
        *_graph("log2 of the scale", _TOP, story.event, {a: _logs(p) for a, p in scales.items()}),
        *_graph("newest maximum", _TOP + _HEIGHT + _GAP, story.event, maxima),
        *(
            _text(_LEFT, _TOP + 2 * (_HEIGHT + _GAP) + _LINE * i, line)
            for i, line in enumerate(story.lines)
        ),
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="state" width="{_WIDTH}" '
        f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f"aria-label={quoteattr(f'{story.slot} over the events. {story.broke}')} "
        f'font-family="monospace" font-size="11">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n{chr(10).join(parts)}\n</svg>\n'
    )


def _arms(story: Story) -> Iterator[tuple[str, list[State]]]:
    """The first arms, as many as there are colours, with their states."""
    yield from list(story.states.items())[: len(_COLOURS)]


def _graph(name: str, top: int, guilty: int, lines: Mapping[str, Points]) -> Iterator[str]:
    """One pair of axes with one line for each arm and a dashed line at the guilty event."""
    found = [p for points in lines.values() for p in points if math.isfinite(p[1])]
    events = [x for points in lines.values() for x, _ in points] or [0]
    first, last = min(events), max(max(events), min(events) + 1)
    low, high = min((y for _, y in found), default=0.0), max((y for _, y in found), default=1.0)
    high = high if high > low else low + 1.0

    def across(x: int) -> float:
        return _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 30)

    def up(y: float) -> float:
        return top + _HEIGHT - (y - low) / (high - low) * _HEIGHT

    width = _WIDTH - _LEFT - 30
    yield _shape("rect", "#999", x=_LEFT, y=top, width=width, height=_HEIGHT)
    yield _text(5, top + 10, f"{high:.4g}")
    yield _text(5, top + _HEIGHT, f"{low:.4g}")
    yield _text(_LEFT, top - 5, name)
    for x in sorted(set(events)):
        yield _text(across(x) - 3, top + _HEIGHT + 14, str(x))
    if guilty >= 0:
        at = across(guilty)
        yield _shape("line", _COLOURS[1], x1=at, y1=top, x2=at, y2=top + _HEIGHT, dashes=4)
    for i, (arm, points) in enumerate(lines.items()):
        colour = _COLOURS[i]
        yield _text(_LEFT + 200 + 250 * i, top - 5, arm, colour)
        for run in _runs(points):
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in run)
            yield _shape("polyline", colour, points=path, thick=4 - 2 * i)  # the first is beneath
            yield from (_shape("circle", colour, cx=across(x), cy=up(y), r=3) for x, y in run)


def _runs(points: Points) -> Iterator[Points]:
    """The parts of a line between its gaps."""
    run: list[tuple[int, float]] = []
    for x, y in points:
        if math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _logs(points: Points) -> Points:
    return [(x, math.log2(y) if y > 0 else math.nan) for x, y in points]


def _shape(kind: str, colour: str, *, dashes: int = 0, thick: int = 1, **where: float | str) -> str:
    placed = {name: f"{v:.1f}" if isinstance(v, float) else v for name, v in where.items()}
    given = {**placed, "fill": "none", "stroke": colour, "stroke-width": thick}
    if dashes:
        given["stroke-dasharray"] = dashes
    return f"<{kind} {' '.join(f'{name}={str(value)!r}' for name, value in given.items())}/>"


def _text(x: float, y: float, text: str, colour: str = "black") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
    )


def _finite(x: float | str) -> float:
    return math.nan if isinstance(x, str) else x


def _newest(window: list[float | str]) -> float:
    """The staged maximum, or the one committed last if none is staged; 0 before the first."""
    staged, committed = _finite(window[0]), _finite(window[-1])
    return staged if staged else committed
