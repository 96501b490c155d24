"""One training, drawn as a walk from event to event.

At each place the walk draws among the moves that are valid there, so the result is valid by
construction. The first move is always the plainest: a walk of first choices runs one forward,
leaves the region, runs backward and takes the step.
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

#: ``choose(factor, *values)``: a drawn value, or the first if the factor may not vary.
Choose = Callable[..., Any]

#: From this number of events on, a walk takes the plainest moves to its end: at most 40 events.
_LONG = 16
#: Largest number of graphs that wait for their backwards.
_LIVE = 3


@dataclass(frozen=True)
class Habits:
    """Properties that one schedule may have. Most have a few of them, hardly any has all."""

    steps: int = 2
    #: There are forwards without a graph in between.
    evaluates: bool = False
    #: These forwards are mostly the first in their region.
    looks_first: bool = False
    #: Some backwards retain their graph for a second one.
    retains: bool = False
    #: Regions are nested, forwards open their own, and some run outside any region.
    nests: bool = False
    #: Weights are cached for later microbatches.
    caches: bool = False
    #: Every event follows the trends; ``special`` and jumps of the exponent do not occur.
    calm: bool = True
    special: tuple[Stimulus, ...] = ()
    #: (exponent in the first step, increment per step) of inputs and of output gradients.
    input_trend: tuple[int, int] = (0, 0)
    grad_trend: tuple[int, int] = (0, 0)
    #: Number of events after which a reload, or a switch, is due; 0: never.
    reload_at: int = 0
    switch_at: int = 0
    #: Algorithms that a switch may select.
    algorithms: tuple[Algorithm, ...] = ()
    #: A last forward runs whose graph is never used: in a "region", or with its own ("inside"); "":
    #: there is none.
    dropped: str = ""
    #: The model has two branches.
    branches: bool = False


@dataclass
class _Walk:
    choose: Choose
    habits: Habits
    events: list[Event] = field(default_factory=list)
    standing: Standing = field(default_factory=Standing)
    #: Number of steps taken.
    steps: int = 0
    #: Number of narrow forwards that must still run before the next step.
    todo: int = 1

    @property
    def narrow(self) -> bool:
        """True if a forward here runs in narrow precision without a region of its own."""
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
    """The events of one training: all steps are taken and all regions closed."""
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
    # cached weights are of use only if another microbatch follows
    return int(choose("events", *((1, 2, 2, 3) if habits.caches else (1, 1, 1, 1, 2, 2, 3))))


def _done(way: _Walk, after: int, what: str) -> bool:
    """Add the reload or switch ``what`` if it is due and valid here. True if it need not be tried
    again."""
    if not after or way.long:
        return True
    event = Reload() if what == "reload" else Switch()
    # a reload would lose accumulated gradients: trainings are saved between steps
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


#: Move -> the event whose validity decides whether it is possible. "backward" is not listed: it is
#: checked for the oldest graph.
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


def _moves(way: _Walk) -> tuple[str, ...]:
    """The moves that are possible here, repeated by their weights; the plainest is first."""
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
        yield "open", 6 * todo or int(live)  # for a backward in a region without its forward
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
    # a backward may only sum forwards that ran under the same settings
    live = [f for f in live if standing.live[f] == standing.live[live[0]]]
    values, shift = _stimulus(way, way.habits.grad_trend)
    how = "oldest"
    if len(live) > 1:
        how = way.choose("events", "oldest", "oldest", "newest", "newest", "both")
    retain = way.habits.retains and way.choose("events", False, False, True)
    of = {"newest": live[-1:], "both": live[-2:]}.get(how, live[:1])
    return Backward(of=tuple(of), values=values, shift=shift, retain=retain)


def _stimulus(way: _Walk, trend: tuple[int, int]) -> tuple[Stimulus, int]:
    """Values and exponent of an event: those of the trend, unless the event is an exception."""
    shift = trend[0] + trend[1] * way.steps
    if way.habits.calm:
        return "gaussian", shift
    values, jump = way.choose("stimulus", *_pool(way.habits.special, way.steps > 0))
    return values, max(-24, min(24, shift + jump))


@cache
def _pool(special: tuple[Stimulus, ...], late: bool) -> tuple[tuple[Stimulus, int], ...]:
    """(values, increment of the exponent) to draw from. There is no infinity in the first step
    (unless ``late``): it would reach the weights, and from there everything, before any state has
    changed."""
    usual: tuple[tuple[Stimulus, int], ...] = (("gaussian", 0),) * 6
    jumps: tuple[tuple[Stimulus, int], ...] = (("gaussian", -6), ("gaussian", 5))
    return (*usual, *jumps, *((values, 0) for values in special if late or values != "inf"))
