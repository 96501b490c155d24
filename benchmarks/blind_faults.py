"""Ten planted faults for a blind trial, each from a public bug thread.

They were written without reading the rules and the generator that must find them, and before
anything was run on them. A rule that is added for one of them makes the trial worthless. Mechanism
and magnitude are those of the thread, planted at the corresponding place here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from narrowfuzz import Plant
from narrowfuzz.plants.patching import attribute_replaced, delayed_calls

_EVERY_TE = ("te.delayed", "te.current", "te.mxfp8")
#: The maximum of E5M2 if its highest exponent, which means Inf and NaN, is taken for a normal one.
_E5M2_WITHOUT_INF = 98304.0
_BLOCKS_EPSILON = 1e-4
_ROWS_OF_A_BLOCK = 16
#: Below 1 the partitioner may recompute activations that it would otherwise save.
_MEMORY_BUDGET = 0.5


@contextmanager
def _e5m2_has_no_infinity() -> Iterator[None]:
    """Scale and clamp use the wrong maximum, so values above the real one become Inf."""
    import torch
    from torchao.float8 import float8_training_tensor, float8_utils

    def to_scale(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(amax: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            if dtype is not torch.float8_e5m2:
                return original(amax, dtype, *args, **kwargs)
            return (_E5M2_WITHOUT_INF / amax.double().clamp(min=float8_utils.EPS)).float()

        return scale

    def to_fp8(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast(x: Any, dtype: Any) -> Any:
            if dtype is not torch.float8_e5m2:
                return original(x, dtype)
            return x.clamp(-_E5M2_WITHOUT_INF, _E5M2_WITHOUT_INF).to(dtype)

        return cast

    with (
        attribute_replaced(float8_utils, "amax_to_scale", to_scale),
        attribute_replaced(float8_training_tensor, "to_fp8_saturated", to_fp8),
    ):
        yield


@contextmanager
def _scales_of_the_forward_grid() -> Iterator[None]:
    """In backward, codes of a square weight are multiplied with the scales of its other axis, whose
    shape fits too."""
    from torchao.float8 import float8_linear
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
    from torchao.float8.float8_utils import tensor_to_scale

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            codes = original(x, dtype, *args, **kwargs)
            backward = kwargs["axiswise_dim"] == -1
            if kwargs["gemm_input_role"] is not GemmInputRole.WEIGHT or not backward:
                return codes
            if x.shape[0] != x.shape[1]:
                return codes
            forward = tensor_to_scale(
                x,
                dtype,
                scaling_granularity=ScalingGranularity.AXISWISE,
                axiswise_dim=0,
                round_scales_to_power_of_2=kwargs["round_scales_to_power_of_2"],
            )
            return Float8TrainingTensor(
                codes._data,
                forward.reshape(codes._scale.shape),
                codes._orig_dtype,
                codes._linear_mm_config,
                codes._gemm_input_role,
                codes._axiswise_dim,
            )

        return cast

    with attribute_replaced(float8_linear, "hp_tensor_to_float8_dynamic", make):
        yield


@contextmanager
def _nan_is_128() -> Iterator[None]:
    """E8M0's NaN is detected by value, not by byte: 2**7 becomes NaN, and byte 255 Inf."""
    import torch
    from torchao.prototype.mx_formats import mx_tensor

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decode(scale: Any) -> Any:
            exponent = scale.view(torch.uint8).to(torch.int16) - mx_tensor.E8M0_EXPONENT_BIAS
            value = torch.pow(torch.full_like(exponent, 2.0, dtype=torch.float32), exponent)
            return torch.where(value != 128.0, value, float("nan"))

        return decode

    with attribute_replaced(mx_tensor, "get_fp_scale", make):
        yield


@contextmanager
def _norm_weight_gradient_in_bf16() -> Iterator[None]:
    """RMSNorm's weight gradient is summed in bf16 inside blocks of rows, and in fp32 over
    blocks."""
    import torch
    import torch.nn.functional as F

    class Weighted(torch.autograd.Function):
        """Returns ``out``, and computes the gradient of ``weight`` in backward."""

        @staticmethod
        def forward(ctx: Any, out: Any, normal: Any, weight: Any) -> Any:
            ctx.save_for_backward(normal)
            ctx.dtype = weight.dtype
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            (normal,) = ctx.saved_tensors
            rows = (grad * normal).reshape(-1, grad.shape[-1])
            missing = -rows.shape[0] % _ROWS_OF_A_BLOCK
            rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
            blocks = rows.reshape(-1, _ROWS_OF_A_BLOCK, rows.shape[1])
            while blocks.shape[1] > 1:
                half = blocks.shape[1] // 2
                blocks = blocks[:, :half] + blocks[:, half:]
            return grad, None, blocks[:, 0].float().sum(0).to(ctx.dtype)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
            if weight is None or x.dtype is not torch.bfloat16 or len(shape) != 1:
                return original(x, shape, weight, eps)
            normal = original(x.detach(), shape, None, eps)
            return Weighted.apply(original(x, shape, weight.detach(), eps), normal, weight)

        return norm

    with attribute_replaced(F, "rms_norm", make):
        yield


@contextmanager
def _recompute_draws_anew() -> Iterator[None]:
    """Checkpoints neither save nor restore the state of the random number generator."""
    from torch.utils import checkpoint

    def unpreserved(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, preserve, *args, **kwargs: original(
            function, False, *args, **kwargs
        )

    with (
        attribute_replaced(checkpoint, "_checkpoint_without_reentrant_generator", unpreserved),
        attribute_replaced(checkpoint.CheckpointFunction, "apply", unpreserved),
    ):
        yield


@contextmanager
def _budget_recomputes_random() -> Iterator[None]:
    """With a smaller memory budget the partitioner recomputes dropout with other random numbers."""
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    torch._dynamo.reset()
    try:
        with (
            inductor.patch(force_disable_caches=True),
            functorch.patch(enable_autograd_cache=False, activation_memory_budget=_MEMORY_BUDGET),
        ):
            yield
    finally:
        torch._dynamo.reset()


@contextmanager
def _second_bias_unused() -> Iterator[None]:
    """LayerNormMLP does not add its bias after the second product."""
    from transformer_engine.pytorch import LayerNormMLP

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            applies, self.apply_bias = self.apply_bias, False
            try:
                return original(self, *args, **kwargs)
            finally:
                self.apply_bias = applies

        return forward

    with attribute_replaced(LayerNormMLP, "forward", make):
        yield


@contextmanager
def _loads_rows_only() -> Iterator[None]:
    """Loading writes only the row-wise half of an MXFP8 parameter, not the column-wise half that
    backward reads."""
    import torch
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

    halves = ("_columnwise_data", "_columnwise_scale_inv")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(self: Any, *args: Any, **kwargs: Any) -> None:
            saved = [
                (half, half.clone())
                for parameter in self.parameters(recurse=False)
                if isinstance(parameter, MXFP8Tensor)
                for half in (getattr(parameter, name) for name in halves)
                if half is not None
            ]
            original(self, *args, **kwargs)
            with torch.no_grad():
                for half, before in saved:
                    half.copy_(before)

        return load

    with attribute_replaced(TransformerEngineBaseModule, "_load_from_state_dict", make):
        yield


@contextmanager
def _epsilon_of_blocks() -> Iterator[None]:
    """The lower bound on amax that blockwise scaling needs is applied to current scaling too."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    def read(self: Any) -> float:
        return max(vars(self)["amax_epsilon"], _BLOCKS_EPSILON)

    def write(self: Any, value: float) -> None:
        vars(self)["amax_epsilon"] = value

    Float8CurrentScalingQuantizer.amax_epsilon = property(read, write)
    try:
        yield
    finally:
        del Float8CurrentScalingQuantizer.amax_epsilon


def _initialise(layer: Any, direction: str, slot: int, x: Any, recipe: Any) -> None:
    """Set the slot's scale from its history including the current maximum."""
    import torch
    from narrowfuzz.recipe.delayed import FMAX

    window, scale = getattr(layer, f"{direction}_window"), getattr(layer, f"{direction}_scale")
    amax = torch.maximum(window[0, slot], x.detach().abs().amax().float())
    if recipe.algorithm == "max":
        amax = torch.maximum(amax, window[:, slot].amax())
    if amax.isfinite() and amax > 0:
        scale[slot] = FMAX[getattr(recipe, direction)] / amax / 2.0**recipe.margin


def _initialised_forward(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    from narrowfuzz.recipe.delayed import INPUT, WEIGHT, _state

    if _state.recipe is not None and not _state.replaying:
        layer.resize(_state.recipe.history)
        if is_first_microbatch is not False:
            _initialise(layer, "forward", WEIGHT, layer.weight, _state.recipe)
        _initialise(layer, "forward", INPUT, x, _state.recipe)
    return forward(layer, x, is_first_microbatch)


def _initialised_backward(backward: Any, ctx: Any, grad: Any) -> Any:
    _initialise(ctx.layer, "backward", 0, grad, ctx.recipe)
    return backward(ctx, grad)


_initialised_always = partial(
    delayed_calls,
    {"DelayedLinear.forward": _initialised_forward, "_Product.backward": _initialised_backward},
)

PLANTS = [
    Plant("e5m2-maximum-too-large", "format", "E5M2's maximum is taken for 98304",
          "https://github.com/kohya-ss/musubi-tuner/issues/192",
          ("torchao.float8.tensorwise",), _e5m2_has_no_infinity),
    Plant("square-weight-other-grid", "layout", "square weights take forward's scales in backward",
          "https://github.com/unslothai/unsloth/pull/8953",
          ("torchao.float8.rowwise",), _scales_of_the_forward_grid),
    Plant("e8m0-nan-by-value", "scale", "an E8M0 scale of 128 is read as NaN",
          "https://github.com/sgl-project/sglang/pull/25519",
          ("torchao.mxfp8.*",), _nan_is_128),
    Plant("norm-gradient-in-bf16", "accumulator", "RMSNorm's weight gradient is summed in bf16",
          "https://github.com/linkedin/Liger-Kernel/pull/950",
          ("torch.bf16",), _norm_weight_gradient_in_bf16),
    Plant("recompute-draws-anew", "recompute", "recompute draws another dropout mask",
          "https://github.com/allenai/OLMo-core/pull/828",
          ("torch.*", "torchao.*"), _recompute_draws_anew),
    Plant("budget-recomputes-random", "recompute", "a memory budget recomputes dropout masks",
          "https://github.com/pytorch/pytorch/issues/190758",
          ("torch.*",), _budget_recomputes_random),
    Plant("second-bias-unused", "gemm", "LayerNormMLP does not add its second bias",
          "https://github.com/NVIDIA/TransformerEngine/issues/26",
          _EVERY_TE, _second_bias_unused),
    Plant("loads-rows-only", "state", "loading leaves an MXFP8 parameter's columns as they were",
          "https://github.com/modelscope/mcore-bridge/issues/125",
          ("te.mxfp8",), _loads_rows_only),
    Plant("epsilon-of-blocks", "scale", "no maximum counts as less than 1e-4",
          "https://github.com/ROCm/TransformerEngine/pull/737",
          ("te.current",), _epsilon_of_blocks),
    Plant("initialised-every-step", "delayed state", "every step sets its scales as the first does",
          "https://github.com/pytorch/torchtitan/pull/698",
          ("reference.delayed",), _initialised_always),
]  # fmt: skip
