"""A stateful recipe: a library's layers behind a schedule's verbs, and what it can do of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.case import Dtype, Spec
from harness.schedule.carries import Carries
from harness.schedule.subject import Subject


def _nothing() -> None:
    pass


def _never(spec: Spec) -> str:
    return ""


def _here(device: str) -> str:
    return ""


@dataclass(frozen=True)
class ScheduleScript:
    """Source lines with which a stand-alone script plays a schedule on this recipe."""

    #: Import lines, and what makes the library usable.
    imports: str
    #: Lines that define ``layer(i)``, ``autocast(settings)``, ``checkpoint(fn, x, reentrant)``,
    #: ``backward(ys, gs, retain)``, ``slots(layers)`` and ``casts()``.
    verbs: str


@dataclass(frozen=True)
class Stateful:
    """One stateful thing under test."""

    name: str
    #: Findings of one family share fingerprints.
    family: str
    title: str
    subject: Callable[[], Subject]
    carries: Callable[[], Carries]
    script: Callable[[Spec], ScheduleScript]
    dtypes: tuple[Dtype, ...] = ("bf16",)
    #: Why the library may refuse this Spec, as the rule a clear message should state.
    may_refuse: Callable[[Spec], str] = _never
    #: Recipes that patch a library run in processes of their own, one per name; "" patches nothing.
    process: str = ""
    #: Called once in each process before anything else.
    prepare: Callable[[], None] = _nothing
    #: Why this machine cannot run it on a device, "" if it can.
    unavailable: Callable[[str], str] = _here
    #: Dimensions are drawn as multiples of it.
    alignment: int = 16
