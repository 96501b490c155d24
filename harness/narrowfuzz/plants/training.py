"""Faults that show only after some event in a training: an evaluation, a loaded state, several
graphs before one backward, a second backward of a graph, a skipped or clipped step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced
from narrowfuzz.plants.patching import (
    attribute_replaced,
    float8_casts,
    float8_forward,
    in_backward,
    mx_quantiser,
)
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_MX = ("torchao.mxfp8.*",)
_PLAIN = ("torch.fp32", "torch.bf16")
_FUSED = tuple(f"step_{name}_fused" for name in ("sgd", "adam", "adamw", "adagrad"))


def _storage(x: Any) -> Any:
    """A key that identifies a living parameter, the same for all of its views."""
    return x.untyped_storage().data_ptr()


def _eagerly(change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(cast, role, x, *args, **kwargs)`` replaces every eager cast of a float8 linear."""

    def eager(cast: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():
            return cast(x, *args, **kwargs)
        return change(cast, kwargs["gemm_input_role"].value, x, *args, **kwargs)

    return float8_casts(eager)


@contextmanager
def _after_loads(then: Callable[[], None]) -> Iterator[None]:
    """``then`` is called after a state is loaded into a model."""
    from torch import nn

    def make(load: Any) -> Any:
        def loaded(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            then()
            return result

        return loaded

    with attribute_replaced(nn.Module, "load_state_dict", make):
        yield


class _CastCache:
    """Cached casts of weights. A cast is fresh until its weight is written; ``refresh`` makes all
    of them fresh again."""

    def __init__(self) -> None:
        #: Storage, layout and cast of a weight -> [its version, the weight, the cast].
        self.casts: dict[Any, list[Any]] = {}

    def refresh(self) -> None:
        for entry in self.casts.values():
            entry[0] = entry[1]._version

    def get(self, x: Any, how: Mapping[str, Any]) -> Any:
        """The cached cast of ``x``, or None if there is no fresh one."""
        entry = self.casts.get(self._key(x, how))
        return entry[2] if entry is not None and entry[0] == x._version else None

    def put(self, x: Any, how: Mapping[str, Any], cast: Any) -> None:
        self.casts[self._key(x, how)] = [x._version, x, cast]

    @staticmethod
    def _key(x: Any, how: Mapping[str, Any]) -> Any:
        return _storage(x), x.shape, x.stride(), x.dtype, str(how)


@contextmanager
def _looking() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True if the module that started last builds no graph. Grad
    mode itself does not show this: operands are cast inside an autograd function, where it is
    off."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    looks = [False]

    def note(module: Any, args: Any) -> None:
        looks[0] = not torch.is_grad_enabled()

    hook = register_module_forward_pre_hook(note)
    try:
        yield lambda: looks[0]
    finally:
        hook.remove()


@contextmanager
def _cast_outlives_load() -> Iterator[None]:
    """A weight's cast is reused until the optimizer writes the weight, even if another state is
    loaded in between."""
    casts = _CastCache()

    def change(cast: Any, role: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        if role != "weight" or x.is_inference():
            return cast(x, *args, **kwargs)
        found = casts.get(x, kwargs)
        if found is None:
            casts.put(x, kwargs, found := cast(x, *args, **kwargs))
        return found

    with _after_loads(casts.refresh), _eagerly(change):
        yield


@contextmanager
def _evaluations_amax() -> Iterator[None]:
    """The next training forward uses the amax of an evaluation."""
    import torch
    from torchao.float8 import float8_utils

    seen: dict[Any, Any] = {}
    with _looking() as looks:

        def make(to_amax: Any) -> Any:
            def amax(x: Any, *args: Any, **kwargs: Any) -> Any:
                found = to_amax(x, *args, **kwargs)
                if torch.compiler.is_compiling() or in_backward():
                    return found
                key = (x.shape, found.shape, x.dtype)
                if not looks():
                    return seen.pop(key, found)
                seen[key] = found.clone()
                return found

            return amax

        with attribute_replaced(float8_utils, "tensor_to_amax", make):
            yield


@contextmanager
def _recompute_keeps_cast() -> Iterator[None]:
    """A forward casts its weight anew, but backward uses the cached cast: the first one since the
    optimizer wrote the weight, even if another state has been loaded."""
    casts = _CastCache()

    def change(cast: Any, role: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        if role != "weight" or x.is_inference():
            return cast(x, *args, **kwargs)
        found = casts.get(x, kwargs)
        if in_backward() and found is not None:
            return found
        made = cast(x, *args, **kwargs)
        if found is None and not in_backward():
            casts.put(x, kwargs, made)
        return made

    with _after_loads(casts.refresh), _eagerly(change):
        yield


@contextmanager
def _newest_input() -> Iterator[None]:
    """The weight gradient uses the newest input of its layer, not that of its own forward."""
    newest: dict[Any, Any] = {}
    running: list[Any] = [None, None]
    #: The role that was cast last. Backward casts the input after the output gradient; a recompute
    #: casts the input first.
    last = [""]

    def change(cast: Any, role: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        if role == "input" and not in_backward():
            running[0] = x
        if role == "weight":
            running[1] = _storage(x)
            if not in_backward():
                newest[running[1]] = running[0]
        if role == "input" and last[0] == "grad_output":
            other = newest.get(running[1])
            x = x if other is None or other.shape != x.shape else other
        last[0] = role
        return cast(x, *args, **kwargs)

    with _eagerly(change):
        yield


@contextmanager
def _backward_adds_up() -> Iterator[None]:
    """A second backward through a graph adds its input gradient to that of the first and returns
    the sum."""
    import torch
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as layer

    def make(backward: Any) -> Any:
        def added(ctx: Any, grad_output: Any) -> Any:
            grad_input, *others = backward(ctx, grad_output)
            if torch.compiler.is_compiling() or grad_input is None:
                return (grad_input, *others)
            before = getattr(ctx, "buffer", None)
            ctx.buffer = grad_input if before is None else before + grad_input
            return (ctx.buffer, *others)

        return staticmethod(added)

    with attribute_replaced(layer, "backward", make):
        yield


@contextmanager
def _evaluation_sticks() -> Iterator[None]:
    """``eval()`` switches quantisation off, and ``train()`` does not switch it on again."""
    import torch.nn.functional as F

    def forward(original: Any, layer: Any, input: Any) -> Any:
        layer.evaluated = getattr(layer, "evaluated", False) or not layer.training
        if layer.evaluated and layer.training:
            return F.linear(input, layer.weight, layer.bias)
        return original(layer, input)

    with float8_forward(forward):
        yield


@contextmanager
def _mx_scales_of_evaluation() -> Iterator[None]:
    """The block scales of an evaluation's tensor are used again for the next training tensor of its
    shape."""
    import torch

    seen: dict[Any, Any] = {}
    with _looking() as looks:

        def change(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            scale, codes = to_mx(data, *args, **kwargs)
            if torch.compiler.is_compiling() or in_backward():
                return scale, codes
            key = (tuple(data.shape), data.dtype)
            if not looks():
                return seen.pop(key, scale), codes
            seen[key] = scale
            return scale, codes

        with mx_quantiser(change):
            yield


@contextmanager
def _region_keeps_graphless_cast() -> Iterator[None]:
    """An autocast region caches the cast of a weight even if its first forward builds no graph, so
    later forwards of the region give the weight no gradient."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    casts: dict[Any, Any] = {}

    def make(forward: Any) -> Any:
        def cast_once(layer: Any, x: Any) -> Any:
            narrow = torch.is_autocast_enabled(x.device.type) and type(layer) is nn.Linear
            if not narrow or torch.compiler.is_compiling() or in_backward():
                return forward(layer, x)
            key = layer.weight.data_ptr(), layer.weight._version
            if key not in casts:
                casts[key] = layer.weight.to(torch.get_autocast_dtype(x.device.type))
            return F.linear(x, casts[key], layer.bias)

        return cast_once

    def leaving(leave: Any) -> Any:
        def leave_and_clear(region: Any, *args: Any) -> Any:
            result = leave(region, *args)
            if not torch.is_autocast_enabled(region.device):
                casts.clear()
            return result

        return leave_and_clear

    with (
        attribute_replaced(nn.Linear, "forward", make),
        attribute_replaced(torch.autocast, "__exit__", leaving),
    ):
        yield


def _scaler(name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """``make(method)`` replaces the method ``name`` of torch's GradScaler."""
    import torch

    return attribute_replaced(torch.amp.GradScaler, name, make)


def _steps_anyway() -> AbstractContextManager[None]:
    return _scaler("_maybe_opt_step", lambda step: lambda self, optimizer, *_: optimizer.step())


def _grows_anyway() -> AbstractContextManager[None]:
    """A step that is skipped doubles the scale like any other."""

    def make(update: Any) -> Any:
        def grown(self: Any, new_scale: Any = None) -> Any:
            before = self.get_scale()
            update(self, new_scale)
            self._scale.fill_(before * self.get_growth_factor())

        return grown

    return _scaler("update", make)


@contextmanager
def _clips_what_is_scaled() -> Iterator[None]:
    """``unscale_`` does nothing when the user calls it, so scaled gradients are clipped; the step
    unscales them later."""
    import torch

    def make(unscale: Any) -> Any:
        def later(self: Any, optimizer: Any) -> None:
            if sys._getframe(1).f_code is torch.amp.GradScaler.step.__code__:
                unscale(self, optimizer)

        return later

    with _scaler("unscale_", make):
        yield


@contextmanager
def _clipping_grows() -> Iterator[None]:
    """Clipping scales gradients up to the limit if their norm is below it."""
    import torch

    def make(clamp: Any) -> Any:
        def clamped(x: Any, *args: Any, **kwargs: Any) -> Any:
            clips = sys._getframe(1).f_code.co_name == "_clip_grads_with_norm_"
            return x if clips else clamp(x, *args, **kwargs)

        return clamped

    with attribute_replaced(torch, "clamp", make):
        yield


@contextmanager
def _norm_without_last() -> Iterator[None]:
    """The last of several gradients is left out of the norm for clipping."""
    from torch.nn.utils import clip_grad

    def make(total_norm: Any) -> Any:
        return lambda grads, *args, **kwargs: total_norm(grads[:-1] or grads, *args, **kwargs)

    with attribute_replaced(clip_grad, "_get_total_norm", make):
        yield


@contextmanager
def _fused_without(argument: str) -> Iterator[None]:
    """The kernels of fused optimizers do not get this argument of the gradient scaler."""

    def make(run: Any) -> Any:
        return lambda *args, **kwargs: run(*args, **{**kwargs, argument: None})

    with ExitStack() as stack:
        for name in ("sgd", "adam", "adamw", "adagrad"):
            stack.enter_context(kernel_replaced(f"_fused_{name}_", make))
        yield


_RELOADS = "https://github.com/sgl-project/sglang/pull/30749"
_EVALUATES = "https://github.com/NVIDIA/TransformerEngine/pull/59"

PLANTS = [
    Plant("cast-outlives-load", "state",
          "after a rollback a weight multiplies the codes that were made before it",
          _RELOADS, _FLOAT8, _cast_outlives_load),
    Plant("evaluations-amax", "state", "an evaluation's maximum scales the next training forward",
          _EVALUATES, _FLOAT8, _evaluations_amax),
    Plant("recompute-keeps-cast", "recompute",
          "a recompute multiplies the codes of the last step's weights, whatever was loaded",
          _RELOADS, _FLOAT8, _recompute_keeps_cast),
    Plant("newest-input-kept", "state",
          "of graphs that wait, every weight gradient is made with the newest input",
          "https://github.com/NVIDIA-NeMo/Automodel/pull/3530", _FLOAT8, _newest_input),
    Plant("backward-adds-up", "state", "a kept graph adds its second gradient to its first",
          "https://github.com/axolotl-ai-cloud/axolotl/pull/3892", _FLOAT8, _backward_adds_up),
    Plant("evaluation-sticks", "conversion", "after an evaluation layers train unquantised",
          "https://github.com/pytorch/ao/pull/198", _FLOAT8, _evaluation_sticks),
    Plant("mx-scales-of-evaluation", "state",
          "block scales of an evaluation are used once more in training",
          _EVALUATES, _MX, _mx_scales_of_evaluation),
    Plant("region-keeps-graphless-cast", "state",
          "a weight that an evaluation has cast gets no gradient in the rest of an autocast region",
          "https://github.com/pytorch/pytorch/issues/112583", ("torch.fp32",),
          _region_keeps_graphless_cast),
    Plant("scaler-steps-anyway", "optimizer",
          "GradScaler lets the optimizer step with gradients that are not finite",
          "https://github.com/pytorch/pytorch/pull/95847", _PLAIN, _steps_anyway),
    Plant("scaler-grows-anyway", "optimizer", "GradScaler doubles its scale after a skipped step",
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5591", _PLAIN, _grows_anyway),
    Plant("fused-step-ignores-infinity", "optimizer",
          "fused optimizers step with gradients that their scaler found not finite",
          "https://github.com/pytorch/pytorch/pull/95847", _PLAIN,
          lambda: _fused_without("found_inf"), models=_FUSED),
    Plant("fused-step-ignores-scale", "optimizer",
          "fused optimizers do not divide gradients by their scaler's scale",
          "https://github.com/pytorch/pytorch/pull/186360", _PLAIN,
          lambda: _fused_without("grad_scale"), models=_FUSED),
    Plant("clips-what-is-scaled", "optimizer",
          "gradients are clipped before they are divided by the scale of the loss",
          "https://github.com/Lightning-AI/pytorch-lightning/pull/9606", _PLAIN,
          _clips_what_is_scaled),
    Plant("clipping-grows-gradients", "optimizer",
          "clipping multiplies gradients whose norm is small by more than 1",
          "https://github.com/pytorch/pytorch/issues/151554", _PLAIN, _clipping_grows),
    Plant("clipped-by-part-of-the-norm", "optimizer",
          "the last gradient has no part in the norm that all are clipped by",
          "https://github.com/pytorch/pytorch/issues/170862", _PLAIN, _norm_without_last),
]  # fmt: skip
