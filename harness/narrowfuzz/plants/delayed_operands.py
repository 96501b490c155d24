"""Delayed scaling with wrong operands: those of another microbatch, or a stale cached weight.

Each fault has the mechanism of a real bug, planted in ``narrowfuzz.recipe.delayed``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, delayed_calls
from narrowfuzz.plants.plant import Plant

_Context = AbstractContextManager[None]


def _state() -> Any:
    from narrowfuzz.recipe import delayed

    return delayed._state


def _second_operand(
    role: str,
    choose: Callable[[Any, Any, Any], tuple[Any, Any]],
    remember: Callable[..., None] | None = None,
) -> _Context:
    """``choose(ctx, codes, scale)`` replaces a gradient product's second operand; ``remember(ctx,
    x)`` is called at the end of its forward."""
    running: list[Any] = []

    def forward(original: Any, ctx: Any, x: Any, *args: Any) -> Any:
        out = original(ctx, x, *args)
        if remember is not None:
            remember(ctx, x)
        return out

    def backward(original: Any, ctx: Any, grad: Any) -> Any:
        running.append(ctx)
        try:
            return original(ctx, grad)
        finally:
            running.pop()

    def product(original: Any, which: str, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
        if running and which == role:
            b, b_scale = choose(running[-1], b, b_scale)
        return original(which, a, a_scale, b, b_scale)

    return delayed_calls(
        {"_Product.forward": forward, "_Product.backward": backward, "_product": product}
    )


def _remember_newest(ctx: Any, x: Any) -> None:
    ctx.layer.newest = ctx.to_save[:2]


def _remember_input(ctx: Any, x: Any) -> None:
    ctx.original = x


def _cast_again(ctx: Any, codes: Any, scale: Any) -> tuple[Any, Any]:
    """The saved input is quantised again in backward, and its maximum is staged again."""
    layer, recipe = ctx.layer, ctx.recipe
    scales = layer.forward_scale.clone()
    layer.stage("forward", 0, ctx.original)
    _state().staged[layer] = recipe
    return layer.cast("forward", 0, ctx.original, scales, recipe), scales[0]


def _first_copy(ctx: Any, codes: Any, scale: Any) -> tuple[Any, Any]:
    """The weight's column-wise copy is made once and never again."""
    if not hasattr(ctx.layer, "column_wise"):
        ctx.layer.column_wise = codes, scale
    pair: tuple[Any, Any] = ctx.layer.column_wise
    return pair


def _never_recast(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    from narrowfuzz.recipe import delayed

    is_cached = is_first_microbatch and layer.cached is not None
    if delayed._state.replaying:  # do as the first pass did
        tape = delayed._state.replaying[-1]
        is_cached = is_first_microbatch and tape.position in tape.kept
    return forward(layer, x, False if is_cached else is_first_microbatch)


def _never_refilled(original: Any, ctx: Any, *args: Any) -> Any:
    """The weight is quantised, but the product uses the codes of its first quantisation."""
    x, weight, bias, layer, scale, cast, recipe = args
    if not hasattr(layer, "workspace"):
        layer.workspace = cast
    return original(ctx, x, weight, bias, layer, scale, layer.workspace, recipe)


def _kept_with_newer_scale(
    forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None
) -> Any:
    if is_first_microbatch is False:
        layer.cached = layer.cached[0], layer.forward_scale[1].clone()
    return forward(layer, x, is_first_microbatch)


def _never_filled(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    """Without a graph, the weight is cast into another tensor than the cached one, which stays
    zero."""
    import torch

    out = forward(layer, x, is_first_microbatch)
    if is_first_microbatch and not torch.is_grad_enabled():
        layer.cached = torch.zeros_like(layer.cached[0]), layer.cached[1]
    return out


def _unsaturated(cast: Any, *args: Any) -> Any:
    from narrowfuzz.recipe import delayed

    with attribute_replaced(
        delayed, "FMAX", lambda original: dict.fromkeys(original, float("inf"))
    ):
        return cast(*args)


def _bias_again(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    """Outside a region the bias is added twice: by the product and by its caller."""
    from narrowfuzz.recipe.delayed import _state

    out = forward(layer, x, is_first_microbatch)
    if _state.recipe is None and layer.bias is not None:
        return out + layer.bias.detach()
    return out


def _bias_left_out(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    """The product runs as if the layer had no bias."""
    bias, layer.bias = layer.bias, None
    try:
        return forward(layer, x, is_first_microbatch)
    finally:
        layer.bias = bias


_TE = "https://github.com/NVIDIA/TransformerEngine"


def _fault(id: str, title: str, link: str, plant: Callable[[], _Context]) -> Plant:
    return Plant(id, "delayed operands", title, link, ("reference.delayed",), plant)


def _calls(name: str, change: Callable[..., Any]) -> Callable[[], _Context]:
    return lambda: delayed_calls({name: change})


PLANTS = [
    _fault("backward-reads-live-scale", "saved codes are multiplied by the input's present scale",
           f"{_TE}/issues/657",
           lambda: _second_operand("grad_weight", lambda ctx, codes, scale:
                                   (codes, ctx.layer.forward_scale[0].clone()))),
    _fault("microbatches-mix-scales", "saved codes are multiplied by the newest forward's scale",
           f"{_TE}/pull/1597",
           lambda: _second_operand("grad_weight", lambda ctx, codes, scale:
                                   (codes, ctx.layer.newest[1]), _remember_newest)),
    _fault("microbatches-mix-codes", "backward multiplies the newest forward's input",
           f"{_TE}/pull/659",
           lambda: _second_operand("grad_weight", lambda ctx, codes, scale:
                                   ctx.layer.newest, _remember_newest)),
    _fault("input-cast-again", "backward quantises the saved input again",
           "https://github.com/NVIDIA/Megatron-LM/pull/1860",
           lambda: _second_operand("grad_weight", _cast_again, _remember_input)),
    _fault("column-copy-stale", "the weight's column-wise copy is never made anew",
           f"{_TE}/pull/1832", lambda: _second_operand("grad_input", _first_copy)),
    _fault("weight-workspace-stale", "a step multiplies the weight as it was quantised first",
           f"{_TE}/pull/1972", _calls("_Product.forward", _never_refilled)),
    _fault("weight-cache-stale", "the first microbatch uses the weight of the step before",
           f"{_TE}/pull/1593", _calls("DelayedLinear.forward", _never_recast)),
    _fault("kept-weight-newer-scale", "kept codes of the weight are multiplied by its new scale",
           f"{_TE}/issues/1047", _calls("DelayedLinear.forward", _kept_with_newer_scale)),
    _fault("weight-cache-unfilled", "a checkpoint's first pass leaves the kept weight empty",
           f"{_TE}/issues/539", _calls("DelayedLinear.forward", _never_filled)),
    _fault("bias-added-twice", "in high precision the bias is added twice",
           f"{_TE}/issues/26", _calls("DelayedLinear.forward", _bias_again)),
    _fault("bias-never-added", "no product adds its bias, which gets no gradient",
           f"{_TE}/issues/26", _calls("DelayedLinear.forward", _bias_left_out)),
    _fault("cast-unsaturated", "a tensor that outgrows its scale becomes NaN",
           "https://github.com/meta-pytorch/float8_experimental/pull/33",
           _calls("DelayedLinear.cast", _unsaturated)),
]  # fmt: skip
