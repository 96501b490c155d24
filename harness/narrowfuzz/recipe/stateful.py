"""Subject, the adapter to a library's own layers, which a recipe gives instead of a conversion.

Its callables are functions of the recipe's file, or functools.partial of one with keyword-only
arguments that are literals, because scripts contain their source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from narrowfuzz.case.events import Settings
from narrowfuzz.numerics.delayed import Policy
from narrowfuzz.numerics.formats import CastRounding

if TYPE_CHECKING:
    from torch import nn

#: Called with every Cast and Product of ``play.library`` when it happens; the tensors are live.
Listener = Callable[[Any], None]
#: (layer, direction, index), scale and window of one slot; the tensors are live.
Held = tuple[tuple[str, Any, int], Any, Any]


@dataclass(frozen=True)
class Subject:
    """The functions with which the player creates and runs a library's stateful layers. Settings
    are those of ``play.library``."""

    #: "delayed" keeps a window of maxima; the others must keep no state: "current" has a scale for
    #: each tensor, "block" for each 1 x 128 or 128 x 128 elements, "mx" for each 32, "nvfp4" for
    #: each 16 or 16 x 16 and for the tensor.
    kind: Literal["delayed", "current", "block", "mx", "nvfp4"]
    #: (Spec, settings) -> one layer; its parameters are filled in afterwards.
    layer: Callable[..., nn.Module]
    #: Settings -> the context of a region; None: a region in high precision.
    autocast: Callable[[Any], AbstractContextManager[Any]]
    #: (fn, x, reentrant) -> fn(x), recomputed in backward.
    checkpoint: Callable[[Callable[[Any], Any], Any, bool], Any]
    #: (outputs, gradients, retain_graph): runs backward.
    backward: Callable[[list[Any], list[Any], bool], None]
    #: Layers -> the present state of every slot.
    state: Callable[[Any], Iterable[Held]]
    #: Name -> number of things set aside for later; all must be 0 between steps.
    pending: Callable[[], dict[str, int]]
    #: Clears everything that outlives a model.
    reset: Callable[[], None]
    #: (layers, listener) -> a context that reports casts and products.
    listen: Callable[[Any, Listener], AbstractContextManager[Any]]
    #: Settings -> the rules of the scaling state; None for kinds without state.
    policy: Callable[[Settings], Policy | None]
    #: (layers, saved state): loads the state into new layers.
    load: Callable[[nn.Module, Any], None]
    #: Whether a layer takes ``is_first_microbatch``.
    caching: bool = True
    #: Called first by a script, to initialise the library.
    enter: Callable[[], None] | None = None
    #: Modules that resize windows of maxima: an error in them after the length of the history has
    #: changed has another cause than an error in them before.
    resizing: frozenset[str] = frozenset()
    #: The device of its layers, as torch calls it; set by the code that calls ``Recipe.subject``.
    device: str = "cpu"
    #: How casts in a backward round, recomputes excluded: "stochastic" to either of two neighbours,
    #: with torch's default generator of the device. Of "nvfp4" alone.
    gradient_rounding: CastRounding = "nearest"


def no_subject(device: str) -> Subject:
    """``subject`` for recipes that convert models."""
    raise AssertionError("this recipe converts models: it brings no layers of its own")


def __getattr__(name: str) -> Any:
    if name != "Stateful":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import narrowfuzz

    return narrowfuzz.Stateful  # this warns that the name is deprecated
