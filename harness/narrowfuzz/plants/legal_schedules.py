"""Schedules on correct scaling: narrowfuzz's own delayed scaling, unchanged and computed in other
legal ways, and the library recipes whose scaling has no state."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from narrowfuzz.plants import sums
from narrowfuzz.plants.patching import delayed_calls
from narrowfuzz.plants.plant import Plant
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.delayed_subject import carries, subject
from narrowfuzz.recipe.recipe import Recipe

_DELAYED = ("reference.delayed",)
#: This file also defines recipes: narrowfuzz's delayed scaling with one kind of schedule favoured.
_SUBJECTS = (Path(__file__),)


def _summed(product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The products of the dequantised codes, summed by ``product``."""

    def change(original: Any, role: str, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
        original(role, a, a_scale, b, b_scale)  # it calls the listeners
        return product(a.float() / a_scale, b.float() / b_scale)

    return change


def _staged_in_parts(stage: Any, layer: Any, direction: str, slot: int, x: Any) -> None:
    for part in x.reshape(-1).split(1 + x.numel() // 7):
        stage(layer, direction, slot, part)


def _slot_by_slot(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    """The same update spelled out: one slot after the other, cells moved one by one."""
    import numpy as np

    if not recipe.fused:
        commit(layer, direction, recipe)
        return
    windows, scales = (getattr(layer, f"{direction}_{x}").numpy() for x in ("window", "scale"))
    largest = np.float32(57344.0 if getattr(recipe, direction) == "e5m2" else 448.0)
    for slot in range(len(scales)):
        layer.waiting.discard((direction, slot))
        cells = list(windows[:, slot])
        if cells[0] == 0:
            continue
        amax = max(cells) if recipe.algorithm == "max" else cells[0]
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                quotient = np.ldexp(largest / amax, -recipe.margin)
            scales[slot] = min(quotient, np.finfo(np.float32).max)
        windows[:, slot] = [np.float32(0), *cells[2:], cells[0]][: len(cells)]


def _cast_twice(cast: Any, *args: Any) -> Any:
    from narrowfuzz.recipe.delayed import _state

    listeners, _state.listeners = _state.listeners, []
    try:
        cast(*args)
    finally:
        _state.listeners = listeners
    return cast(*args)


def _saved(commit: Any) -> None:
    """After every backward's update all scaling state is saved to a file and loaded again."""
    import torch

    from narrowfuzz.recipe.delayed import _state

    layers = list(_state.staged_backward)
    commit()
    for layer in layers:
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        held = torch.load(file)
        with torch.no_grad():
            for name, buffer in layer.named_buffers():
                buffer.copy_(held[name])


def _kept_graph(checkpoint: Any, function: Any, x: Any, *, use_reentrant: bool) -> Any:
    """A checkpoint that saves everything and recomputes nothing."""
    return function(x)


def _calls(**changes: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    return lambda: delayed_calls({name.replace("__", "."): f for name, f in changes.items()})


def _inclined(name: str, title: str, **to: object) -> Recipe:
    def inclined() -> Carries:
        return replace(carries(), **to)  # type: ignore[arg-type]

    return Recipe(
        name=f"control.delayed.{name}",
        family="reference.delayed",
        title=title,
        subject=subject,
        carries=inclined,
        dtypes=("bf16", "fp32"),
    )


RECIPES = [
    _inclined("reentrant", "reentrant checkpoints", checkpoints=("reentrant",)),
    _inclined("non_reentrant", "checkpoints that are not", checkpoints=("full",)),
    _inclined("most_recent", "the newest maximum", algorithms=("max", *["most_recent"] * 5)),
    _inclined("unfused", "tensor by tensor updates", unfused=True),
]

_RULES = (
    "the definition of delayed scaling: harness/narrowfuzz/numerics/delayed.py; docs/schedules.md"
)
_CURRENT = (
    "scales of current and of block scaling come from the tensor itself, so no schedule moves "
    "them: docs/schedules.md; known deviations are in reports/known"
)

_legal = partial(Plant, legal=True)

PLANTS = [
    _legal("delayed", "as it is", "our delayed scaling", _RULES, _DELAYED),
    _legal("delayed-reentrant", "as it is", "its reentrant checkpoints", _RULES,
           ("control.delayed.reentrant",), recipe_files=_SUBJECTS),
    _legal("delayed-non-reentrant", "as it is", "its checkpoints that are not reentrant", _RULES,
           ("control.delayed.non_reentrant",), recipe_files=_SUBJECTS),
    _legal("delayed-most-recent", "as it is", "its newest maximum instead of the largest", _RULES,
           ("control.delayed.most_recent",), recipe_files=_SUBJECTS),
    _legal("delayed-unfused", "as it is", "its update of one tensor after the other", _RULES,
           ("control.delayed.unfused",), recipe_files=_SUBJECTS),
    _legal("delayed-amax-in-parts", "amax", "maxima staged part by part",
           "staging takes the maximum with what is there: harness/narrowfuzz/numerics/delayed.py",
           _DELAYED, _calls(DelayedLinear__stage=_staged_in_parts)),
    _legal("delayed-slot-by-slot", "scale", "the update spelled out, slot by slot", _RULES,
           _DELAYED, _calls(DelayedLinear__commit=_slot_by_slot),
           device="cpu"),  # it writes into NumPy arrays that share the tensors' memory
    _legal("delayed-reversed-sums", "sums", "products summed from the last to the first",
           sums.ANY_ORDER, _DELAYED,
           _calls(_product=_summed(sums.reversed_sum))),
    _legal("delayed-float64-sums", "sums", "products summed in fp64",
           sums.WIDER, _DELAYED, _calls(_product=_summed(sums.wide))),
    _legal("delayed-cast-twice", "repeats", "every tensor is cast twice",
           "the same data and scale give the same codes: docs/rules.md, O1", _DELAYED,
           _calls(DelayedLinear__cast=_cast_twice)),
    _legal("delayed-saved-after-updates", "state",
           "state saved and loaded after every backward's update",
           "save, load and go on is going on: docs/rules.md, R20", _DELAYED,
           _calls(commit_backward=_saved)),
    _legal("delayed-checkpoints-keep", "recompute", "checkpoints that recompute nothing",
           "with and without a checkpoint everything is equal: docs/rules.md, O12", _DELAYED,
           _calls(checkpoint=_kept_graph)),
    _legal("te-current", "as it is", "TransformerEngine's current scaling", _CURRENT,
           ("te.current",)),
    _legal("te-blockwise", "as it is", "TransformerEngine's FP8 block scaling", _CURRENT,
           ("te.blockwise",)),
    _legal("te-mxfp8", "as it is", "TransformerEngine's MXFP8", _CURRENT, ("te.mxfp8",)),
    _legal("te-nvfp4", "as it is", "TransformerEngine's NVFP4", _CURRENT, ("te.nvfp4",)),
    _legal("te-nvfp4-stochastic", "as it is", "TransformerEngine's NVFP4, rounded stochastically",
           _CURRENT, ("te.nvfp4.stochastic",)),
]  # fmt: skip
