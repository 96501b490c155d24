"""TransformerEngine's delayed scaling whose state is wrong: staged maxima, saved and loaded state.

Each fault has the mechanism of a real bug, planted in ``transformer_engine.pytorch`` where it stood
or would stand today; where no report of one is known, its link is the definition that it breaks.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant


def _positive_only(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """The staged maximum is that of the signed values."""
    before = quantizer.amax.clone()
    out = quantize(quantizer, tensor)
    if tensor.numel():
        signed = tensor.detach().float().nan_to_num(nan=0.0, posinf=float("inf"))
        quantizer.amax.copy_(before.maximum(signed.clamp(min=0).amax()))
    return out


def _weights_use_the_inputs_cell(make: Any, state: Any) -> Any:
    """The maximum of a weight is staged in the slot before its own."""
    quantizers = make(state)
    if state.mode == "forward":
        for i in range(1, len(quantizers), 3):
            quantizers[i].amax = quantizers[i - 1].amax
    return quantizers


def _fused_norm_stages_nothing(apply: Any, *args: Any) -> Any:
    """A fused norm quantises its output but does not stage its maximum."""
    amax = getattr(args[5], "amax", None)
    before = None if amax is None else amax.clone()
    out = apply(*args)
    if amax is not None:
        amax.copy_(before)
    return out


def _under(**settings: Any) -> Callable[..., None]:
    """Updates use the recipe with some settings changed."""

    def enter(original: Any, *args: Any, **kwargs: Any) -> None:
        from transformer_engine.common.recipe import DelayedScaling
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        original(*args, **kwargs)
        arguments = FP8GlobalStateManager.quantization_state.autocast_arguments
        for key, (recipe, group) in arguments.items():
            if isinstance(recipe, DelayedScaling):
                arguments[key] = dataclasses.replace(recipe, **settings), group

    return enter


def _saves_as_new(kind: str, value: float) -> Callable[..., Any]:
    """In the saved state, one kind of tensor has a fresh layer's values."""

    def saves(save: Any, layer: Any) -> Any:
        import torch

        state = save(layer)
        if not state.numel():
            return state
        held = pickle.loads(state.numpy().tobytes())
        for name in [name for name in held if name.startswith(kind)]:
            held[name] = torch.full_like(held[name], value)
        return torch.frombuffer(bytearray(pickle.dumps(held)), dtype=torch.uint8)

    return saves


def _scale_inverse_of_one(reduce: Any, tensor: Any, protocol: int) -> Any:
    """A saved FP8 parameter comes back with the right codes and 1/scale 1."""
    import torch

    make, (data, dtype, scale_inv, *rest) = reduce(tensor, protocol)
    return make, (data, dtype, torch.ones_like(scale_inv), *rest)


def _loads_inside_regions_only(load: Any, layer: Any, state: Any) -> None:
    """Outside a region, FP8 state is not loaded."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if FP8GlobalStateManager.is_fp8_enabled():
        load(layer, state)


_TE = "https://github.com/NVIDIA/TransformerEngine"
_UPDATE = f"{_TE}/blob/main/transformer_engine/common/recipe/delayed_scaling.cu"
_CELLS = f"{_TE}/blob/main/transformer_engine/pytorch/quantization.py"
_BASE = "module.base:TransformerEngineBaseModule"
_ENTER = "quantization:FP8GlobalStateManager.autocast_enter"


def _fault(
    id: str, title: str, link: str, changes: dict[str, Callable[..., Any]], *others: str
) -> Plant:
    recipes = ("te.delayed", *others)
    return Plant(id, "delayed state", title, link, recipes, partial(te_calls, changes))


PLANTS = [
    _fault(
        "te-amax-of-positives",
        "the maximum of a tensor leaves out its negative values",
        _UPDATE,
        {"tensor.float8_tensor:Float8Quantizer.quantize_impl": _positive_only},
    ),
    _fault(
        "te-weight-amax-in-inputs-cell",
        "a weight's maximum is staged in its input's cell",
        _CELLS,
        {"quantization:DelayedScalingRecipeState.make_quantizers": _weights_use_the_inputs_cell},
    ),
    _fault(
        "te-fused-norm-stages-nothing",
        "a fused normalisation stages no maximum",
        f"{_TE}/pull/2061",
        {
            f"module.{module}:apply_normalization": _fused_norm_stages_nothing
            for module in ("layernorm_linear", "layernorm_mlp")
        },
    ),
    _fault(
        "te-margin-ignored", "an update leaves out the margin", _UPDATE, {_ENTER: _under(margin=0)}
    ),
    _fault(
        "te-newest-taken-for-largest",
        "an update goes by the newest maximum alone",
        _UPDATE,
        {_ENTER: _under(amax_compute_algo="most_recent")},
    ),
    _fault(
        "te-saved-without-history",
        "a saved model's history comes back empty",
        f"{_TE}/pull/323",
        {f"{_BASE}.get_extra_state": _saves_as_new("amax_history", 0.0)},
    ),
    _fault(
        "te-saved-without-scale",
        "a saved model's scales come back as 1",
        f"{_TE}/pull/323",
        {f"{_BASE}.get_extra_state": _saves_as_new("scale", 1.0)},
    ),
    _fault(
        "te-saved-without-scale-inverse",
        "a saved FP8 parameter comes back with 1/scale 1",
        f"{_TE}/pull/123",
        {"tensor.float8_tensor:Float8Tensor.__reduce_ex__": _scale_inverse_of_one},
        "te.current",
    ),
    _fault(
        "te-loads-inside-regions-only",
        "state that is loaded outside a region is dropped",
        "https://github.com/NVIDIA/Megatron-LM/commit/6eb0bcf2b6",
        {f"{_BASE}.set_extra_state": _loads_inside_regions_only},
    ),
]
