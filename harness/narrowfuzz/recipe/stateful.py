"""A stateful recipe: a library's layers behind verbs, and what of a training it can play.

Verbs are functions of the recipe's file, or functools.partial of one with keyword-only arguments
that are literals, because scripts are made of their source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from narrowfuzz.case.event_rules import check_schedule
from narrowfuzz.case.events import Settings
from narrowfuzz.case.spec import Dtype, Spec
from narrowfuzz.numerics.delayed import Policy
from narrowfuzz.recipe.carries import Carries, check_carried

if TYPE_CHECKING:
    from torch import nn

#: Hears of every Cast and Product of the player, while they happen: tensors are live.
Listener = Callable[[Any], None]
#: (layer, direction, index), scale and window of one slot; live.
Held = tuple[tuple[str, Any, int], Any, Any]


@dataclass(frozen=True)
class Subject:
    """A library's stateful layers behind a schedule's verbs; settings are the player's."""

    #: delayed keeps a window of maxima; current and mx must keep nothing.
    kind: Literal["delayed", "current", "mx"]
    #: One layer of a Spec under some settings; its parameters are filled in afterwards.
    layer: Callable[..., nn.Module]
    #: A region; None: high precision.
    autocast: Callable[[Any], AbstractContextManager[Any]]
    #: Recompute fn(x) in backward: (fn, x, reentrant).
    checkpoint: Callable[[Callable[[Any], Any], Any, bool], Any]
    #: backward through outputs with these gradients, keeping the graph or not.
    backward: Callable[[list[Any], list[Any], bool], None]
    #: Every slot of the layers that have some, now.
    state: Callable[[Any], Iterable[Held]]
    #: What is set aside for later; everything in it must be 0 between steps.
    pending: Callable[[], dict[str, int]]
    #: Forget everything that outlives a model.
    reset: Callable[[], None]
    #: Report casts and products while entered.
    listen: Callable[[Any, Listener], AbstractContextManager[Any]]
    #: Its rules, under these settings; None for stateless kinds.
    policy: Callable[[Settings], Policy | None]
    #: Load a saved state into fresh layers.
    load: Callable[[nn.Module, Any], None]
    #: Does a layer take ``is_first_microbatch``?
    caching: bool = True
    #: What a script does before anything else: makes the library ready.
    enter: Callable[[], None] | None = None


def _nothing() -> None:
    pass


def _never(spec: Spec, device: str) -> str:
    return ""


def _here(backend: str, device: str) -> str:
    return ""


@dataclass(frozen=True)
class Stateful:
    """One stateful thing under test."""

    name: str
    #: Findings of one family share fingerprints.
    family: str
    title: str
    #: What is under test on a device, as torch calls it.
    subject: Callable[[str], Subject]
    carries: Callable[[], Carries]
    dtypes: tuple[Dtype, ...] = ("bf16",)
    #: (Spec, device) -> why the library may refuse it there, as the rule a clear message should
    #: state.
    refusal: Callable[[Spec, str], str] = _never
    #: Recipes that patch a library run in processes of their own, one per name; "" patches nothing.
    process: str = ""
    #: Called once before processes start: fetch what is needed. Raises ValueError if it cannot.
    provide: Callable[[], None] = _nothing
    #: Called once in each process before anything else.
    prepare: Callable[[], None] = _nothing
    #: As of a Recipe; a library's own layers have one backend, "".
    unavailable: Callable[[str, str], str] = _here
    backends: tuple[str, ...] = ("",)
    backend_words: Mapping[str, str] = field(default_factory=dict, hash=False)
    package: str = ""
    #: Dimensions are drawn as multiples of it.
    alignment: int = 16
    #: As of a Recipe.
    based_on: str = ""

    def backend(self, spec: Spec) -> str:
        """A library's own layers have one."""
        return ""

    def models(self, named: Collection[str]) -> tuple[str, ...]:
        """As of a Recipe: none of those that a user names, for a library has its own models."""
        return () if named else tuple(f"library_{layer}" for layer in self.carries().layers)

    def check(self, spec: Spec) -> None:
        """Raises ValueError naming what of the Spec it cannot play, and why."""
        check_carried(spec, self.carries())
        check_schedule(spec)
