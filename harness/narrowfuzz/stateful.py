"""A stateful recipe: a library's layers behind a schedule's verbs, and what it can do of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from narrowfuzz.case import Dtype, Spec
from narrowfuzz.numerics.delayed import Policy, Slot
from narrowfuzz.schedule.carries import Carries
from narrowfuzz.schedule.events import Settings
from narrowfuzz.schedule.trace import SlotName

if TYPE_CHECKING:
    import torch
    from torch import nn

Role = Literal["output", "grad_input", "grad_weight", "gradient"]


@dataclass(frozen=True)
class RawCast:
    """A cast as it happens; tensors are live."""

    slot: SlotName | None
    input: torch.Tensor
    codes: torch.Tensor
    #: One element, or E8M0 bytes.
    scale: torch.Tensor
    format: str


@dataclass(frozen=True)
class RawSide:
    """An operand as it is multiplied; live."""

    data: torch.Tensor
    scale_inv: torch.Tensor | None
    format: str


@dataclass(frozen=True)
class RawProduct:
    """A product as it happens."""

    role: Role
    a: RawSide
    b: RawSide


Listener = Callable[[RawCast | RawProduct], None]


@dataclass(frozen=True)
class Subject:
    """A library's stateful layers behind the few verbs a schedule has."""

    #: delayed keeps a window of maxima; current and mx must keep nothing.
    kind: Literal["delayed", "current", "mx"]
    #: One layer; its parameters are filled in afterwards.
    layer: Callable[[Spec], nn.Module]
    #: A region; None: high precision.
    autocast: Callable[[Settings | None], AbstractContextManager[Any]]
    #: Recompute fn(x) in backward: (fn, x, reentrant).
    checkpoint: Callable[[Callable[[Any], Any], Any, bool], Any]
    #: backward through outputs with these gradients, keeping the graph or not.
    backward: Callable[[list[Any], list[Any], bool], None]
    #: State of every layer that has some, by slot.
    state: Callable[[Mapping[str, nn.Module]], dict[SlotName, Slot]]
    #: What is set aside for later; everything in it must be 0 between steps.
    pending: Callable[[], dict[str, int]]
    #: Forget everything that outlives a model.
    reset: Callable[[], None]
    #: Report casts and products while entered.
    listen: Callable[[Mapping[str, nn.Module], Listener], AbstractContextManager[Any]]
    #: Its rules, under these settings; None for stateless kinds.
    policy: Callable[[Settings], Policy | None]
    #: Load a saved state into fresh layers.
    load: Callable[[nn.Module, Any], None]
    #: Does a layer take ``is_first_microbatch``?
    caching: bool = True


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
    refusal: Callable[[Spec], str] = _never
    #: Recipes that patch a library run in processes of their own, one per name; "" patches nothing.
    process: str = ""
    #: Called once before processes start: fetch what is needed. Raises ValueError if it cannot.
    provide: Callable[[], None] = _nothing
    #: Called once in each process before anything else.
    prepare: Callable[[], None] = _nothing
    #: Why this machine cannot run it on a device, "" if it can.
    unavailable: Callable[[str], str] = _here
    #: Dimensions are drawn as multiples of it.
    alignment: int = 16


def process_of(recipe: object) -> str:
    """Which kind of process a recipe runs in."""
    return recipe.process if isinstance(recipe, Stateful) else ""


def processes(recipes: Iterable[object]) -> list[str]:
    """The kinds of process that these recipes need."""
    return sorted({process_of(recipe) for recipe in recipes})
