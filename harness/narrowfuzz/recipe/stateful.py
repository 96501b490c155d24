"""The adapter of a library's own layers: what a recipe gives that converts no model.

Its callables are functions of the recipe's file, or functools.partial of one with keyword-only
arguments that are literals, because scripts are made of their source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from narrowfuzz.case.events import Settings
from narrowfuzz.numerics.delayed import Policy

if TYPE_CHECKING:
    from torch import nn

#: Hears of every Cast and Product of the player, while they happen: tensors are live.
Listener = Callable[[Any], None]
#: (layer, direction, index), scale and window of one slot; live.
Held = tuple[tuple[str, Any, int], Any, Any]


@dataclass(frozen=True)
class Subject:
    """How the player makes and drives a library's stateful layers; settings are the player's."""

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
    #: Modules that resize windows of maxima: what fails in them once the length of the history has
    #: changed has another cause than what fails in them before.
    resizing: frozenset[str] = frozenset()
    #: Where its layers are, as torch calls it. Who asks a recipe for its subject writes it down.
    device: str = "cpu"


def no_subject(device: str) -> Subject:
    """For recipes that convert models."""
    raise AssertionError("this recipe converts models: it brings no layers of its own")


def __getattr__(name: str) -> Any:
    if name != "Stateful":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import narrowfuzz

    return narrowfuzz.Stateful  # deprecated, which is said there
