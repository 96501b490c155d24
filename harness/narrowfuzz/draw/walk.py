"""One training, drawn as a walk from event to event.

At each place the walk draws among the moves to which the rules object nothing, so what comes out is
valid by construction. The first move is always the plainest: a walk of first choices runs one
forward, leaves the region, runs backward and takes the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from narrowfuzz.case.event_rules import Standing
from narrowfuzz.case.events import (
    Algorithm,
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Step,
    Stimulus,
    Switch,
)

#: ``choose(factor, *values)``: a drawn value, or the first where the factor is held still.
Choose = Callable[..., Any]

#: From here on a walk takes the plainest move and goes home: at most 40 events come out.
_LONG = 16
#: So many graphs wait at most.
_LIVE = 3


@dataclass(frozen=True)
class Habits:
    """What one schedule is inclined to. Most have a few oddities, hardly any has all of them."""

    steps: int = 2
    #: Forwards without a graph come in between.
    evaluates: bool = False
    #: Mostly they are the first in their region.
    looks_first: bool = False
    #: Some backwards keep their graph for another.
    retains: bool = False
    #: Regions stand in regions, forwards open their own, some run outside any.
    nests: bool = False
    caches: bool = False
    #: No event differs from the trends.
    calm: bool = True
    special: tuple[Stimulus, ...] = ()
    #: Exponents: in the first step, added with each step.
    input_trend: tuple[int, int] = (0, 0)
    grad_trend: tuple[int, int] = (0, 0)
    #: Events after which a reload and a switch are due; 0 is never.
    reload_at: int = 0
    switch_at: int = 0
    algorithms: tuple[Algorithm, ...] = ()
    #: Where a last forward runs whose graph is never used.
    dropped: str = ""
    #: The model has two branches.
    branches: bool = False


@dataclass
class _Walk:
    choose: Choose
    habits: Habits
    events: list[Event] = field(default_factory=list)
    standing: Standing = field(default_factory=Standing)
    #: Steps taken, and forwards in FP8 still to run before the next.
    steps: int = 0
    todo: int = 1

    @property
    def narrow(self) -> bool:
        """A forward here runs in FP8 without a region of its own."""
        return bool(self.standing.regions) and self.standing.regions[-1]

    @property
    def long(self) -> bool:
        return len(self.events) >= _LONG

    def may(self, event: Event) -> bool:
        return not self.standing.objection(event)

    def take(self, event: Event) -> None:
        assert self.may(event), (self.events, event)
        self.standing.take(event)
        self.events.append(event)


def walk(choose: Choose, habits: Habits) -> tuple[Event, ...]:
    """The events of one training, every step taken and every region left."""
    way = _Walk(choose, habits, todo=_microbatches(choose, habits))
    goal = habits.steps
    due = [(habits.reload_at, "reload"), (habits.switch_at, "switch")]
    while way.steps < goal:
        if way.long:
            goal = min(goal, max(2, way.steps + 1))
            way.todo = min(way.todo, 0 if way.standing.accumulated or way.standing.live else 1)
        due = [d for d in due if not _done(way, *d)]
        moves = _moves(way)
        _go(way, moves[0] if way.long else choose("moves", *moves))
    for _ in tuple(way.standing.regions):
        way.take(Close())
    if habits.dropped and not way.long:
        for move in ("open", "forward", "close") if habits.dropped == "region" else ("inside",):
            _go(way, move)
    return tuple(way.events)


def _microbatches(choose: Choose, habits: Habits) -> int:
    # weights are kept for a microbatch that comes after
    return int(choose("events", *((1, 2, 2, 3) if habits.caches else (1, 1, 1, 1, 2, 2, 3))))


def _done(way: _Walk, after: int, what: str) -> bool:
    """Reload or switch where it is due and may be; True once there is nothing left to do."""
    if not after or way.long:
        return True
    event = Reload() if what == "reload" else Switch()
    # a reload loses what has accumulated: trainings are saved between steps
    if len(way.events) < after or not way.may(event) or way.standing.accumulated:
        return False
    way.take(event if what == "reload" else _switch(way))
    return True


def _switch(way: _Walk) -> Switch:
    what = way.choose("switch", "history", "algorithm", "margin")
    if what == "history":
        return Switch(history=way.choose("switch", 1, 2, 8, 16))
    if what == "algorithm" and way.habits.algorithms:
        return Switch(algorithm=way.choose("switch", *way.habits.algorithms))
    return Switch(margin=way.choose("switch", 1, -1, 3))


#: Each move as the event that the rules may object to; a backward takes any graph.
_MOVES: dict[str, Event] = {
    "open": Open(),
    "nested": Open(),
    "disabled": Open(enabled=False),
    "close": Close(),
    "forward": Forward(),
    "inside": Forward(inside=True),
    "plain": Forward(),
    "eval": Forward(mode="eval"),
    "no_grad": Forward(mode="no_grad"),
    "step": Step(),
}
_NESTING = frozenset({"nested", "disabled", "inside", "plain"})


def _moves(way: _Walk) -> tuple[str, ...]:
    """The moves that are possible here, each as often as it weighs; the plainest is first."""
    found: list[str] = []
    for move, weight in _weights(way):
        if weight > 0:
            event = _MOVES.get(move) or Backward(of=(min(way.standing.live, default=0),))
            if way.may(event):
                found += [move] * weight
    return tuple(found)


def _weights(way: _Walk) -> Iterator[tuple[str, int]]:
    habits, standing = way.habits, way.standing
    live, room = bool(standing.live), len(standing.live) < _LIVE
    todo = way.todo > 0 and room
    nests = habits.nests and not way.long
    if not standing.regions:
        yield "backward", 5
        yield "open", 6 * todo or int(live)  # a backward in a region of no forward of its own
        yield "step", 6 * (way.todo == 0)
        yield "inside", nests * todo
        yield "plain", nests * room
        yield "disabled", nests * todo
    elif way.narrow:
        yield "close", 5 * (live or way.todo == 0)
        yield "forward", 6 * todo
        yield "backward", 2
        yield "step", int(way.todo == 0)
        yield "inside", nests * todo
        yield "nested", nests * todo
        yield "disabled", 2 * nests * room
    else:
        yield "close", 3
        yield "plain", 2 * room
        yield "nested", nests * todo
        yield "inside", nests * todo
    evaluates = int(habits.evaluates and (live or way.steps > 0 or standing.accumulated))
    if habits.looks_first and way.narrow and isinstance(way.events[-1], Open):
        evaluates = 4
    yield "eval", evaluates
    yield "no_grad", evaluates


def _go(way: _Walk, move: str) -> None:
    match move:
        case "backward":
            way.take(_backward(way))
        case "forward" | "inside" | "plain" | "eval" | "no_grad":
            way.take(_forward(way, move))
        case _:
            way.take(_MOVES[move])
    way.todo -= move in ("forward", "inside")
    if move == "step":
        way.steps += 1
        way.todo = _microbatches(way.choose, way.habits)


def _forward(way: _Walk, move: str) -> Forward:
    values, shift = _stimulus(way, way.habits.input_trend)
    other = way.habits.branches and way.choose("layout", False, False, True)
    path: Literal[0, 1] = 1 if other else 0
    if move in ("eval", "no_grad"):
        inside = not way.narrow
        return Forward(mode=move, values=values, shift=shift, inside=inside, path=path)  # type: ignore[arg-type]
    inside = move == "inside"
    first = None
    if way.habits.caches and move != "plain":
        how = way.choose("caching", "usual", "usual", "usual", "anew", "not")
        again = way.may(Forward(first=False, inside=inside, path=path))
        anew = way.may(Forward(first=True, inside=inside, path=path))
        if how != "not" and (again or anew):
            first = not again or (anew and how == "anew")
    return Forward(values=values, shift=shift, inside=inside, first=first, path=path)


def _backward(way: _Walk) -> Backward:
    standing = way.standing
    live = sorted(standing.live)
    # a loss sums forwards that ran under the same settings
    live = [f for f in live if standing.live[f] == standing.live[live[0]]]
    values, shift = _stimulus(way, way.habits.grad_trend)
    how = "oldest"
    if len(live) > 1:
        how = way.choose("events", "oldest", "oldest", "newest", "newest", "both")
    retain = way.habits.retains and way.choose("events", False, False, False, True)
    of = {"newest": live[-1:], "both": live[-2:]}.get(how, live[:1])
    return Backward(of=tuple(of), values=values, shift=shift, retain=retain)


def _stimulus(way: _Walk, trend: tuple[int, int]) -> tuple[Stimulus, int]:
    """Values and exponent: the trend's, unless this event is an exception."""
    shift = trend[0] + trend[1] * way.steps
    if way.habits.calm:
        return "gaussian", shift
    values, jump = way.choose("stimulus", *_pool(way.habits.special, way.steps > 0))
    return values, max(-24, min(24, shift + jump))


@cache
def _pool(special: tuple[Stimulus, ...], late: bool) -> tuple[tuple[Stimulus, int], ...]:
    """Values and what is added to the exponent. In the first step an infinity would reach the
    weights, and from there everything, before any state has moved."""
    usual: tuple[tuple[Stimulus, int], ...] = (("gaussian", 0),) * 6
    jumps: tuple[tuple[Stimulus, int], ...] = (("gaussian", -6), ("gaussian", 5))
    return (*usual, *jumps, *((values, 0) for values in special if late or values != "inf"))
