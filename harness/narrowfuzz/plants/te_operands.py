"""TransformerEngine with wrong operands: another scale, another microbatch's codes, a stale cached
weight.

Each fault has the mechanism of a real bug, planted in ``transformer_engine.pytorch`` where it stood
or would stand today.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant

_Context = AbstractContextManager[None]


def _live_scale(restore: Any, held: Any, tensors: list[Any]) -> Any:
    """Codes saved for backward are read with the current scale of their quantizer."""
    rest = restore(held, tensors)
    scale = getattr(held._quantizer, "scale", None)
    if scale is not None and held._scale_inv is not None:
        held._scale_inv = scale.reciprocal().reshape(held._scale_inv.shape)
    return rest


def _one_scale_inverse(quantize: Any, quantizer: Any, tensor: Any) -> Any:
    """All tensors of one quantizer share one 1/scale, which each cast overwrites."""
    out = quantize(quantizer, tensor)
    shared = quantizer.__dict__.setdefault("shared_scale_inv", out._scale_inv)
    shared.data.copy_(out._scale_inv)  # as a kernel does, unseen by autograd
    out._scale_inv = shared
    return out


def _saves_the_original(forward: Any, args: Any) -> Any:
    """A linear saves its unquantised input and quantises it again in backward."""
    out, workspace, saved, attributes = forward(args)
    if saved is not None and args.fp8 and saved[0] is not None:
        saved = (None, *saved[1:])
        aliases = attributes["saved_tensor_aliases"]
        attributes["saved_tensor_aliases"] = ("inp", *aliases[1:])
    return out, workspace, saved, attributes


def _with_newer_scale(quantize: Any, **options: Any) -> Any:
    """Cached codes of a weight are read with the current scale of their quantizer."""
    out = quantize(**options)
    workspace, quantizer = options.get("workspace"), options["quantizer"]
    if out[0] is workspace and not options["update_workspace"]:
        workspace._scale_inv = quantizer.scale.reciprocal().reshape(workspace._scale_inv.shape)
    return out


def _never_recast(quantize: Any, **options: Any) -> Any:
    """A cached weight is never quantised again."""
    return quantize(**{**options, "update_workspace": False})


def _unfilled(quantize: Any, **options: Any) -> Any:
    """Without a graph, the cached weight is not the cast one but a copy with zero codes."""
    import torch

    weight, workspace = quantize(**options)
    if workspace is not None and not torch.is_grad_enabled():
        workspace = workspace.clone()
        for name in ("_data", "_transpose", "_rowwise_data", "_columnwise_data"):
            if getattr(workspace, name, None) is not None:
                setattr(workspace, name, torch.zeros_like(getattr(workspace, name)))
    return weight, workspace


def _always_valid(valid: Any, workspace: Any, quantizer: Any) -> bool:
    """A cached weight counts as valid even if it lacks a copy that the quantizer now needs."""
    return True


def _stale_copy(update: Any, quantizer: Any, source: Any, copy: Any, **options: Any) -> Any:
    """Casting into an existing tensor updates only its row-wise copy."""
    names = ("_transpose", "_columnwise_data", "_columnwise_scale_inv")
    held = {name: getattr(copy, name, None) for name in names}
    before = {name: t.clone() for name, t in held.items() if t is not None}
    out = update(quantizer, source, copy, **options)
    for name, old in before.items():
        getattr(copy, name).copy_(old)
    return out


def _first_scale_inverse(multiply: Any, A: Any, *args: Any, **options: Any) -> Any:
    """Every product of a group divides by the first weight's scale."""
    if options.get("layout", "TN") == "TN" and hasattr(A[0], "_scale_inv"):
        A = [A[0], *(_rescaled(a, A[0]._scale_inv) for a in A[1:])]
    return multiply(A, *args, **options)


def _rescaled(tensor: Any, scale_inv: Any) -> Any:
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return Float8TensorStorage(**{**tensor.get_metadata(), "fp8_scale_inv": scale_inv})


def _one_bit(restore: Any, held: Any, tensors: list[Any]) -> Any:
    """One bit of the first code that was saved for backward is flipped when it is read."""
    rest = restore(held, tensors)
    for name in ("_transpose", "_columnwise_data"):
        codes = getattr(held, name, None)
        if codes is not None and codes.numel():
            codes = codes.clone()
            codes.view(-1)[0] ^= 1
            setattr(held, name, codes)
    return rest


_TE = "https://github.com/NVIDIA/TransformerEngine"
_DELAYED, _CURRENT, _MX = "te.delayed", "te.current", "te.mxfp8"
_FLOAT8 = "tensor.storage.float8_tensor_storage:Float8TensorStorage"
_MXFP8 = "tensor.storage.mxfp8_tensor_storage:MXFP8TensorStorage"
_MODULES = ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")


def _fault(
    id: str,
    title: str,
    link: str,
    places: tuple[str, ...],
    change: Callable[..., Any],
    *recipes: str,
) -> Plant:
    def plant() -> _Context:
        return te_calls(dict.fromkeys(places, change))

    return Plant(id, "delayed operands", title, link, recipes, plant)


_quantize_weight = tuple(f"module.{name}:quantize_weight" for name in _MODULES)
_update = (
    "tensor.float8_tensor:Float8Quantizer.update_quantized",
    "tensor.float8_tensor:Float8CurrentScalingQuantizer.update_quantized",
    "tensor.mxfp8_tensor:MXFP8Quantizer.update_quantized",
)

PLANTS = [
    _fault("te-backward-reads-live-scale", "saved codes are read with their tensor's present scale",
           f"{_TE}/issues/657", (f"{_FLOAT8}.restore_from_saved",), _live_scale, _DELAYED),
    _fault("te-scale-inverse-shared", "a cast overwrites 1/scale of earlier tensors",
           f"{_TE}/pull/1597", ("tensor.float8_tensor:Float8Quantizer.quantize_impl",),
           _one_scale_inverse, _DELAYED),
    _fault("te-input-cast-again", "backward quantises the saved input again",
           "https://github.com/NVIDIA/Megatron-LM/pull/1860",
           ("module.linear:_linear_forward_impl",), _saves_the_original, _DELAYED),
    _fault("te-kept-weight-newer-scale", "kept codes of a weight are read with its new scale",
           f"{_TE}/issues/1047", _quantize_weight, _with_newer_scale, _DELAYED),
    _fault("te-weight-cache-stale", "the first microbatch uses the weight of the step before",
           f"{_TE}/pull/1593", _quantize_weight, _never_recast, _DELAYED, _CURRENT, _MX),
    _fault("te-weight-cache-unfilled", "a forward without a graph leaves the kept weight empty",
           f"{_TE}/issues/539", _quantize_weight, _unfilled, _DELAYED, _CURRENT, _MX),
    _fault("te-weight-cache-taken-as-is", "training takes a weight that an evaluation kept without "
           "its column-wise copy", f"{_TE}/pull/1596",
           ("module.base:_is_weight_workspace_valid",), _always_valid, _MX),
    _fault("te-column-copy-stale", "a weight's column-wise copy is never made anew",
           f"{_TE}/pull/1832", _update, _stale_copy, _DELAYED, _CURRENT, _MX),
    _fault("te-group-shares-scale-inverse", "a group's products divide by its first weight's scale",
           f"{_TE}/pull/1128", ("module.grouped_linear:general_grouped_gemm",),
           _first_scale_inverse, _DELAYED, _CURRENT),
    _fault("te-saved-code-bit", "one bit of one saved code flips before it is read",
           "https://github.com/pytorch/torchtitan/issues/951",
           (f"{_FLOAT8}.restore_from_saved", f"{_MXFP8}.restore_from_saved"), _one_bit,
           _DELAYED, _CURRENT, _MX),
]  # fmt: skip
