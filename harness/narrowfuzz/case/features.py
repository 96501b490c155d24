"""Features that a training exercises, each a predicate on its forwards and backwards.

The place of an event is its index in the Spec's events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Step,
    Switch,
    narrows,
    with_regions,
)
from narrowfuzz.case.spec import Spec


@dataclass
class Run:
    """One forward with its place and the places of its backwards."""

    at: int
    event: Forward
    #: Place of each Open around it, outermost first -> whether that region is enabled.
    regions: dict[int, bool]
    #: It runs in narrow precision.
    narrow: bool
    backwards: list[int] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """True for a training forward in narrow precision."""
        return self.narrow and self.event.mode == "train"


@dataclass
class TrainingTrace:
    """A Spec's forwards, and the ends of its regions."""

    spec: Spec
    runs: list[Run] = field(default_factory=list)
    #: Place of an Open -> place of its Close; the number of events if it is never closed.
    close_of: dict[int, int] = field(default_factory=dict)
    #: Places of the Backwards through a narrow training forward.
    backwards: list[int] = field(default_factory=list)

    @property
    def events(self) -> tuple[Event, ...]:
        """The Spec's events; () if it has plain steps instead."""
        return self.spec.events

    def at(self, kind: type[Event]) -> list[int]:
        """The places of all events of this type."""
        return [i for i, event in enumerate(self.events) if isinstance(event, kind)]

    @property
    def trained(self) -> list[Run]:
        """The narrow training forwards that have a backward."""
        return [run for run in self.runs if run.trains and run.backwards]

    @property
    def pairs(self) -> Iterator[tuple[Run, int]]:
        """Each narrow training forward with the place of each of its backwards."""
        return ((run, at) for run in self.runs if run.trains for at in run.backwards)


def trace_training(spec: Spec) -> TrainingTrace:
    """Collect the forwards and regions of a Spec with valid events. A library's layers quantise
    only inside regions, a converted model everywhere."""
    training = TrainingTrace(spec)
    for i, (event, regions) in enumerate(with_regions(training.events)):
        match event:
            case Open():
                training.close_of[i] = len(training.events)
            case Close():
                training.close_of[regions[-1][0]] = i
            case Forward():
                narrow = narrows(event, regions) or not spec.layer
                training.runs.append(Run(i, event, dict(regions), narrow))
            case Backward(of=of):
                for f in of:
                    training.runs[f].backwards.append(i)
                if any(training.runs[f].trains for f in of):
                    training.backwards.append(i)
    return training


def _interleaved(training: TrainingTrace) -> bool:
    return any(
        run.at < other.at < at
        for run, at in training.pairs
        for other in training.runs
        if other.trains
    )


def _evaluates(training: TrainingTrace) -> bool:
    trained = training.trained
    return bool(trained) and any(
        trained[0].at < run.at < training.backwards[-1]
        for run in training.runs
        if run.narrow and not run.trains
    )


def _left_early(training: TrainingTrace) -> bool:
    return any(training.close_of[i] < at for run, at in training.pairs for i in run.regions)


def _inside(training: TrainingTrace) -> bool:
    return any(
        enabled and training.close_of[i] > at
        for run, at in training.pairs
        for i, enabled in run.regions.items()
    )


def _elsewhere(training: TrainingTrace) -> bool:
    return any(
        run.at < i < at < end for run, at in training.pairs for i, end in training.close_of.items()
    )


def _accumulated(training: TrainingTrace) -> bool:
    ends = [*training.at(Step), len(training.events)]
    first = [run.backwards[0] for run in training.trained]
    return any(
        len({at for at in first if start < at < end}) > 1
        for start, end in zip([-1, *ends], ends, strict=False)
    )


def _around(training: TrainingTrace, kind: type[Event]) -> bool:
    backwards = training.backwards
    return (
        any(min(backwards) < i < max(backwards) for i in training.at(kind)) if backwards else False
    )


def _holds(training: TrainingTrace, values: str) -> bool:
    backwards = (training.events[i] for i in training.backwards)
    return any(run.event.values == values for run in training.runs if run.narrow) or any(
        isinstance(event, Backward) and event.values == values for event in backwards
    )


def _decaying(training: TrainingTrace) -> bool:
    """True if inputs or output gradients never grow and end at 2^-3 of their first size or less."""
    backwards = [training.events[i] for i in training.backwards]
    inputs = [run.event.shift for run in training.trained]
    gradients = [event.shift for event in backwards if isinstance(event, Backward)]
    return any(
        len(shifts) > 1 and shifts == sorted(shifts, reverse=True) and shifts[-1] <= shifts[0] - 3
        for shifts in (inputs, gradients)
    )


def _nested(training: TrainingTrace) -> bool:
    return any(sum(run.regions.values()) + run.event.inside > 1 for run in training.runs)


def _shared(training: TrainingTrace) -> bool:
    """True if two forwards run in narrow precision inside the same outermost region."""
    outermost = [
        next(iter(run.regions))
        for run in training.runs
        if run.regions and narrows(run.event, tuple(run.regions.items()))
    ]
    return len(set(outermost)) < len(outermost)


def _disabled(training: TrainingTrace) -> bool:
    return any(tuple(run.regions.values())[-2:] == (True, False) for run in training.runs)


#: Name of a feature -> whether a schedule has it.
FEATURES: dict[str, Callable[[TrainingTrace], bool]] = {
    "checkpoint": lambda s: s.spec.region != "none" and bool(s.trained),
    # in high precision, too: a library saves its state for recomputes there as well
    "nested checkpoints": lambda s: (
        s.spec.region == "nested"
        and any(isinstance(event, Forward) and event.mode == "train" for event in s.events)
    ),
    "interleaved": _interleaved,
    "eval between": _evaluates,
    "left early": _left_early,
    "backward inside": _inside,
    "backward in another region": _elsewhere,
    "nested": _nested,
    "disabled inside": _disabled,
    "shared region": _shared,
    "inside autocast": lambda s: any(run.event.inside for run in s.trained),
    "high precision": lambda s: any(not run.narrow for run in s.runs),
    "accumulated": _accumulated,
    "sum of forwards": lambda s: any(
        len(event.of) > 1 for event in s.events if isinstance(event, Backward)
    ),
    "second backward": lambda s: any(len(run.backwards) > 1 for run in s.runs),
    "forward dropped": lambda s: any(run.trains and not run.backwards for run in s.runs),
    "reload": lambda s: _around(s, Reload),
    "switch": lambda s: _around(s, Switch),
    "cached weights": lambda s: any(run.event.first is False for run in s.runs),
    "idle layer": lambda s: s.spec.layout == "branch",
    "zero": lambda s: _holds(s, "zero"),
    "spike": lambda s: _holds(s, "spike"),
    "inf": lambda s: _holds(s, "inf"),
    "decaying": _decaying,
    "quantized init": lambda s: s.spec.quantized_init,
    "short history": lambda s: s.spec.settings.history <= 2,
    "margin": lambda s: s.spec.settings.margin != 0,
    "unfused": lambda s: not s.spec.settings.fused,
}
#: Features that need regions. For a converted model these are autocast regions.
OF_AUTOCAST = frozenset(
    {"inside autocast", "left early", "nested", "disabled inside", "shared region"}
)
#: Features that the events of a converted model may have. Its checkpointing is not among them: that
#: is counted separately.
OF_CONVERTED = frozenset(
    {
        "interleaved",
        "eval between",
        "accumulated",
        "sum of forwards",
        "second backward",
        "forward dropped",
        "reload",
        "zero",
        "spike",
        "inf",
        "decaying",
        *OF_AUTOCAST,
    }
)


def features(spec: Spec) -> frozenset[str]:
    """The features that the training of this Spec has."""
    training = trace_training(spec)
    found = frozenset(name for name, has in FEATURES.items() if has(training))
    return found if spec.layer else found & OF_CONVERTED
