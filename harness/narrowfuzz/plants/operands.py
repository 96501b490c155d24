"""Float8 operands that do not match their scale, their tensor or the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, float8_casts, float8_forward, in_backward
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_TENSORWISE = ("torchao.float8.tensorwise",)
_ROWWISE = ("torchao.float8.rowwise*",)


@contextmanager
def _scale_rounded_after_cast() -> Iterator[None]:
    """The scale is rounded to a power of two after the codes were made with the exact one."""
    import torch
    from torchao.float8 import float8_scaling_utils

    def make(cast: Any) -> Any:
        def rounded(*args: Any) -> Any:
            tensor = cast(*args)
            tensor._scale = torch.exp2(torch.floor(torch.log2(tensor._scale)))
            return tensor

        return rounded

    with attribute_replaced(float8_scaling_utils, "hp_tensor_and_scale_to_float8", make):
        yield


@contextmanager
def _no_eps() -> Iterator[None]:
    """amax has no lower bound, so a granule of zeros has an infinite scale."""
    from torchao.float8 import float8_utils

    with attribute_replaced(float8_utils, "EPS", lambda original: 0.0):
        yield


@contextmanager
def _amax_of_last_call() -> Iterator[None]:
    """The scale is computed from the amax of the previous tensor of the same shape."""
    import torch
    from torchao.float8 import float8_utils

    last_amax: dict[Any, Any] = {}

    def make(to_amax: Any) -> Any:
        def stale(x: Any, *args: Any, **kwargs: Any) -> Any:
            amax = to_amax(x, *args, **kwargs)
            if torch.compiler.is_compiling():
                return amax  # a graph stores nothing between calls
            key = (x.shape, amax.shape, x.dtype)
            before = last_amax.get(key, amax)
            last_amax[key] = amax.clone()
            return before

        return stale

    with attribute_replaced(float8_utils, "tensor_to_amax", make):
        yield


@contextmanager
def _inputs_amax_for_weight() -> Iterator[None]:
    """The weight's scale is computed from the amax of the input that was cast before it."""
    from torchao.float8 import float8_utils

    running: list[Any] = []

    def cast(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_backward() and kwargs["gemm_input_role"].value == "input":
            running[:] = [x]
        elif in_backward() or kwargs["gemm_input_role"].value != "weight":
            running.clear()
        return original(x, *args, **kwargs)

    def make(to_amax: Any) -> Any:
        return lambda x, *args: to_amax(running[0] if running else x, *args)

    with ExitStack() as stack:
        stack.enter_context(float8_casts(cast))
        stack.enter_context(attribute_replaced(float8_utils, "tensor_to_amax", make))
        yield


def _other_axis(cast: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """In backward, the weight is transposed but the axis of its scales is not."""
    if in_backward() and kwargs["gemm_input_role"].value == "weight":
        axis = kwargs["axiswise_dim"]
        kwargs["axiswise_dim"] = None if axis is None else -1 - axis
    return cast(x, *args, **kwargs)


@contextmanager
def _narrow_gradients() -> Iterator[None]:
    """Every operand is E4M3, including gradients."""
    import torch
    from torchao.float8 import Float8LinearConfig

    def make(from_recipe: Any) -> Any:
        def configured(*args: Any) -> Any:
            config = from_recipe(*args)
            cast = config.cast_config_grad_output
            narrow = dataclasses.replace(cast, target_dtype=torch.float8_e4m3fn)
            return dataclasses.replace(
                config,
                cast_config_grad_output=narrow,
                cast_config_grad_output_for_grad_weight=narrow,
            )

        return configured

    with attribute_replaced(Float8LinearConfig, "from_recipe_name", make):
        yield


@contextmanager
def _dtype_lost_in_transpose() -> Iterator[None]:
    """A transposed tensor loses the dtype that it was quantised from, so results are bf16."""
    import torch
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    op = torch.ops.aten.t.default
    original = FLOAT8_OPS_TABLE[op]

    def transpose(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
        t = original(aten_op, args, kwargs)
        return Float8TrainingTensor(
            t._data,
            t._scale,
            torch.bfloat16,
            t._linear_mm_config,
            t._gemm_input_role,
            t._axiswise_dim,
        )

    FLOAT8_OPS_TABLE[op] = transpose
    try:
        yield
    finally:
        FLOAT8_OPS_TABLE[op] = original


def _unquantised_without_gradients(forward: Any, layer: Any, input: Any) -> Any:
    """A forward without a graph runs the plain linear in high precision."""
    import torch
    import torch.nn.functional as F

    if torch.is_grad_enabled():
        return forward(layer, input)
    return F.linear(input, layer.weight, layer.bias)


PLANTS = [
    Plant("scale-rounded-after-cast", "scale", "codes of one scale, multiplied with another",
          "https://github.com/sgl-project/sglang/pull/28418", _TENSORWISE,
          _scale_rounded_after_cast),
    Plant("eps-missing", "scale", "a granule of zeros becomes NaN",
          "https://github.com/pytorch/ao/issues/3356", _FLOAT8, _no_eps),
    Plant("amax-of-last-call", "amax", "the scale belongs to the tensor before",
          "https://github.com/NVIDIA/TransformerEngine/pull/2119", _FLOAT8, _amax_of_last_call),
    Plant("inputs-amax-for-weight", "amax", "the weight is scaled by the input's maximum",
          "https://github.com/NVIDIA/TransformerEngine/pull/2355", _TENSORWISE,
          _inputs_amax_for_weight),
    Plant("scale-axis-not-turned", "granule", "grad_input's weight is scaled along the wrong axis",
          "https://github.com/pytorch/ao/pull/4038", ("torchao.float8.rowwise",),
          lambda: float8_casts(_other_axis)),
    Plant("gradient-e4m3", "format", "output gradients are quantised to E4M3",
          "https://github.com/NVIDIA/TransformerEngine/issues/3342", _TENSORWISE,
          _narrow_gradients),
    Plant("dtype-lost-in-transpose", "conversion", "an fp32 layer's grad_weight is rounded to bf16",
          "https://github.com/pytorch/ao/pull/2451", _FLOAT8, _dtype_lost_in_transpose),
    Plant("no-grad-unquantised", "conversion", "without a graph the layer runs in high precision",
          "https://github.com/pytorch/ao/pull/659", _FLOAT8,
          lambda: float8_forward(_unquantised_without_gradients)),
]  # fmt: skip
