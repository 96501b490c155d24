"""What a minimal case needs, besides what every case has: the words by which causes are told apart.

The minimiser has reset whatever the divergence does not need, so what is left is what it takes.
Two findings of one recipe whose minimal cases need the same, and more than nothing, are sightings
of one cause: a state machine that went wrong once breaks many rules. So is one that breaks a rule
which another breaks with less.
"""

from __future__ import annotations

import msgspec

from narrowfuzz.arm import BY_NAME
from narrowfuzz.case import Case, Spec
from narrowfuzz.schedule.events import Reload, Schedule, Settings, Step, Switch
from narrowfuzz.schedule.of_models import features
from narrowfuzz.schedule.story import FEATURES, story
from narrowfuzz.verdict import Verdict

#: How large a case is, what it runs on, and what its rung says already: no conditions of a cause.
_SIZES = frozenset(
    {
        "recipe", "backend", "m", "k", "n", "batch", "dtype", "schedule", "events", "compile",
        "checkpoint", "kernels",
    }
)  # fmt: skip
#: Features that speak of data.
_DATA = frozenset({"zero", "spike", "inf", "decaying"})
#: What the default schedule has, too.
_SHAPES = frozenset({"events", "settings", "layer", "depth"})


def needs_of(case: Case, verdict: Verdict) -> list[str]:
    """The conditions in words, sorted; none for a plain case."""
    schedule = case.spec.schedule
    found = {f"{name}={value}" for name, value in _changed(case.spec, Spec, _SIZES)}
    found |= features(case.spec.events) - _DATA
    if schedule is not None:
        found |= set(_of_schedule(schedule))
        if not BY_NAME[verdict.arm].recomputes:  # the plain run shows it: no recompute is needed
            found -= {need for need in found if need.startswith(("checkpoint", "reentrant"))}
            found -= {"nested checkpoints"}
    return sorted(found)


def _of_schedule(schedule: Schedule) -> list[str]:
    told = story(schedule)
    features = [name for name, asks in FEATURES.items() if name not in _DATA and asks(told)]
    kinds = {Reload: "reload", Switch: "switch", Step: "step"}
    events = {kinds[type(event)] for event in schedule.events if type(event) in kinds}
    settings = [f"{name}={value}" for name, value in _changed(schedule.settings, Settings, ())]
    shape = [f"{name}={value}" for name, value in _changed(schedule, Schedule, _SHAPES)]
    return [*features, *events, *settings, *shape]


def _changed(
    struct: msgspec.Struct, kind: type[msgspec.Struct], leave: frozenset[str] | tuple[str, ...]
) -> list[tuple[str, object]]:
    """Fields that are not at their defaults."""
    return [
        (field.name, getattr(struct, field.name))
        for field in msgspec.structs.fields(kind)
        if field.name not in leave and getattr(struct, field.name) != field.default
    ]
