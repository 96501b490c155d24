"""Whether a schedule can reveal a fault in the backward's state, and which features it exercises.

A state that has changed only once has not been used: the first gradient is cast with the initial
scale. To reveal a fault takes a finite nonzero gradient, an optimizer step, and then another
gradient that reaches the same layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from narrowfuzz.case.event_rules import Standing, repaired
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Step,
)
from narrowfuzz.case.features import FEATURES, features
from narrowfuzz.case.spec import Spec
from narrowfuzz.recipe.carries import Carries

#: A repair cuts a schedule to this number of events, so that with the events it appends there are
#: at most 64.
_ROOM = 40


def census(spec: Spec) -> frozenset[str]:
    """The features of a schedule, and ``weak`` if ``weakness`` finds any."""
    return features(spec) | ({"weak"} if weakness(spec) else set())


def possible(carries: Carries) -> frozenset[str]:
    """The features that schedules of a recipe with these capabilities may have."""
    lacking = {
        "checkpoint": not carries.checkpoints,
        "nested checkpoints": not carries.checkpoints,
        "reload": not carries.reload,
        "switch": not carries.switch,
        "cached weights": not carries.caching,
        "idle layer": "branch" not in carries.layouts,
        "quantized init": not carries.quantized_init,
        "short history": not carries.settings,
        "margin": not carries.settings,
        "unfused": not carries.unfused,
    }
    return frozenset(name for name in FEATURES if not lacking.get(name))


def histogram(schedules: Iterable[Spec]) -> dict[str, float]:
    """The share of the schedules that have each feature, including ``weak``."""
    found = [census(spec) for spec in schedules]
    seen = Counter(name for features in found for name in features)
    return {name: seen[name] / max(len(found), 1) for name in (*FEATURES, "weak")}


def weakness(spec: Spec) -> str:
    """Why the state of the backward is never used after it changed; "" if it is."""
    standing = Standing()
    narrow: dict[int, Forward] = {}
    inf = False
    moved: set[int] = set()  # branches whose backward state changes at the next step
    ready: set[int] = set()  # branches whose backward state has changed
    seen = Counter[str]()
    for event in spec.events:
        match event:
            case Forward():
                inside = event.inside or (bool(standing.regions) and standing.regions[-1])
                if inside and event.mode == "train":
                    narrow[standing.forwards] = event
            case Backward(of=of, values=values):
                forwards = [narrow[f] for f in of if f in narrow]
                inf = inf or values == "inf" or any(f.values == "inf" for f in forwards)
                seen["backward"] += bool(forwards)
                paths = {f.path for f in forwards if f.values != "zero" and values != "zero"}
                if paths & ready:
                    return ""
                seen["nonzero"] += bool(paths)
                if not inf:
                    moved |= paths
            case Step() if inf:  # the weights are not finite from here on
                break
            case Step():
                ready |= moved
        standing.take(event)
    if not narrow:
        return "no training forward runs in FP8"
    if not seen["backward"]:
        return "no backward goes through an FP8 forward"
    if not seen["nonzero"]:
        return "all FP8 gradients, or the inputs they belong to, are zero"
    if inf:
        return "an infinity reaches the weights before a second gradient"
    if not ready:
        return "no optimizer step follows an FP8 backward"
    return "no second FP8 backward on the same layers after an optimizer step"


def repair(spec: Spec) -> Spec:
    """The schedule with one event changed, or if that is not enough some appended, so that
    ``weakness`` is ""."""
    if not weakness(spec):
        return spec
    for candidate in _candidates(spec.events):
        changed = msgspec.structs.replace(spec, events=candidate)
        if not weakness(changed):
            return changed
    raise AssertionError(f"not to be repaired: {spec}")


def _candidates(events: tuple[Event, ...]) -> Iterator[tuple[Event, ...]]:
    """The events with one of them changed; then with one step appended, or two; then the same
    without infinities."""
    for i in range(len(events)):
        for other in _stronger(events[i]):
            yield repaired((*events[:i], other, *events[i + 1 :]))
    short = repaired(events[:_ROOM])
    for base in (short, tuple(_finite(event) for event in short)):
        for path in _paths(base):
            yield _with_step(base, path)
        yield _with_step(_with_step(base, 0), 0)


def _stronger(event: Event) -> Iterator[Event]:
    """The event with gaussian values, or on the first branch."""
    if isinstance(event, Forward | Backward) and event.values in ("zero", "inf"):
        yield msgspec.structs.replace(event, values="gaussian")
    if isinstance(event, Forward) and event.path:
        yield msgspec.structs.replace(event, path=0)


def _finite(event: Event) -> Event:
    if isinstance(event, Forward | Backward) and event.values == "inf":
        return msgspec.structs.replace(event, values="gaussian")
    return event


def _paths(events: Sequence[Event]) -> tuple[int, ...]:
    """The branches that run; the first one always counts."""
    return tuple(sorted({0} | {e.path for e in events if isinstance(e, Forward)}))


def _with_step(events: tuple[Event, ...], path: int) -> tuple[Event, ...]:
    """The events, followed by backwards for all graphs that wait, a step, a gaussian forward in an
    enabled region and its backward."""
    standing = Standing()
    for event in events:
        standing.take(event)
    added: list[Event] = []

    def add(*more: Event) -> None:
        for event in more:
            standing.take(event)
            added.append(event)

    while standing.live:
        oldest = min(standing.live)
        alike = [f for f in standing.live if standing.live[f] == standing.live[oldest]]
        add(Backward(of=tuple(sorted(alike)[:4])))
    if standing.accumulated:
        add(Step())
    while standing.regions and not standing.regions[-1]:
        add(Close())
    number = standing.forwards
    forward = Forward(path=path)  # type: ignore[arg-type]
    if standing.regions:
        add(forward, Backward(of=(number,)))
    else:
        add(Open(), forward, Close(), Backward(of=(number,)))
    return (*events, *added)
