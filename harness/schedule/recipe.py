"""A stateful recipe: a library's layers behind a schedule's verbs, and what it can do of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.case import Dtype, Spec
from harness.schedule.carries import Carries
from harness.schedule.events import Settings
from harness.schedule.subject import Subject


def _nothing() -> None:
    pass


def _never(spec: Spec) -> str:
    return ""


def _here(device: str) -> str:
    return ""


@dataclass(frozen=True)
class ScheduleScript:
    """Source text with which a stand-alone script plays a schedule on this recipe.

    ``layers`` is the model's nn.ModuleList; ``recipe`` is what ``recipe`` makes.
    """

    #: Import lines, and what makes the library usable.
    imports: str
    #: Expression that makes one layer; ``dtype`` is its parameters'.
    layer: str
    #: Expression of the library's recipe under these settings.
    recipe: Callable[[Settings], str]
    #: Context managers: in FP8 under ``recipe``, and in high precision inside of that.
    region: str
    off: str
    #: Names of the library's functions.
    checkpoint: str
    backward: str
    #: Defines ``scales(layers)``: name, scale and window of every slot, live; names are a
    #: SlotName's text.
    scales: str
    #: Defines ``listening``, ``Cast``, ``Product``, ``slot_of(cast)`` and ``sides(product)``:
    #: codes, 1 / scale and format of both operands. "" where a script cannot listen.
    listen: str
    #: Defines ``pending()``: what is set aside for later.
    pending: str
    #: Forgets everything that outlives a model.
    reset: str
    #: Moves a tensor to where the layers are.
    move: str = ""
    #: Lines that set what else the settings say.
    settings: str = ""
    #: Lines that load ``state`` into fresh ``layers``.
    load: str = "layers.load_state_dict(state)"


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
