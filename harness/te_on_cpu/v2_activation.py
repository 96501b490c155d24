"""The activations of the 2.x extension: forward, backward, and backward with a bias gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_on_cpu.kernels import NAN_CODE, column_sums
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_output import rounded_or_quantised
from te_on_cpu.v2_releases import (
    ACTIVATIONS_FIND_AMAX,
    EVERY_QUANTIZER_HAS_A_PATH,
    GATED_TRANSPOSE_IS_WRITTEN,
    MX_ACTIVATIONS_ARE_ROUNDED,
    installed_release,
)
from te_on_cpu.v2_types import flat_shape, kind

Elementwise = Callable[[Tensor], Tensor]


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x) by its tanh approximation; fp32. Source: ``gelu`` in ``common/util/math.h``."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of ``gelu``. Source: ``dgelu`` in ``common/util/math.h``."""
    square = x * x
    bend = torch.tanh(0.79788456 * x * (1 + 0.044715 * square))
    inner = 0.79788456 + 0.1070322243 * square
    return 0.5 * x * ((1 - bend * bend) * inner) + 0.5 * (1 + bend)


@dataclass(frozen=True)
class Activation:
    """A function of fp32 numbers and its derivative, as ``common/util/math.h`` defines them."""

    value: Elementwise
    slope: Elementwise


def _sigmoid_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 - sigmoid)


def _swish(alpha: float) -> Activation:
    """x * sigmoid(alpha x): SiLU with 1, the quick GELU with 1.702."""

    def slope(x: Tensor) -> Tensor:
        return alpha * x * _sigmoid_slope(alpha * x) + torch.sigmoid(alpha * x)

    return Activation(lambda x: x * torch.sigmoid(alpha * x), slope)


# Comparisons with NaN are false and fmaxf drops it: the ReLU family turns NaN into 0.
ACTIVATIONS = {
    "gelu": Activation(gelu, gelu_slope),
    "qgelu": _swish(1.702),
    "silu": _swish(1.0),
    "relu": Activation(lambda x: torch.where(x > 0, x, 0.0), lambda x: (x > 0).float()),
    "srelu": Activation(
        lambda x: torch.where(x > 0, x * x, 0.0), lambda x: torch.where(x > 0, 2 * x, 0.0)
    ),
}
_SIGMOID = Activation(torch.sigmoid, _sigmoid_slope)
GATED = {
    "geglu": ACTIVATIONS["gelu"],
    "qgeglu": ACTIVATIONS["qgelu"],
    "swiglu": ACTIVATIONS["silu"],
    "reglu": ACTIVATIONS["relu"],
    "sreglu": ACTIVATIONS["srelu"],
    "glu": _SIGMOID,
}


def forward(activation: Activation) -> Callable[..., Any]:
    """``f(input, quantizer)``: the activation of every element, in the input's type or quantised.

    Real contract: ``activation_helper`` in ``pytorch/csrc/extensions/activation.cpp``.
    """

    def call(input: Tensor, quantizer: Any) -> Any:
        _check_path(quantizer)
        return _returned(activation.value(input.float()), input.dtype, quantizer)

    return call


def backward(activation: Activation) -> Callable[..., Any]:
    """``f(grad, fwd_input, quantizer)``: the gradient of the input, in its type or quantised.

    Real contract: ``dactivation_helper`` in ``pytorch/csrc/extensions/activation.cpp``.
    """

    def call(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        _check_path(quantizer, gradient=True)
        values = activation.slope(fwd_input.float()) * grad.float()
        return _returned(values, fwd_input.dtype, quantizer)

    return call


def backward_with_bias(activation: Activation) -> Callable[..., list[Any]]:
    """``f(grad, fwd_input, quantizer)``: [bias gradient, quantised gradient of the input].

    Real contract (``dact_dbias`` in ``pytorch/csrc/extensions/bias.cpp``): current scaling sums the
    rounded gradient; delayed and block scaling sum the unrounded fp32 gradient.
    """

    def call(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        if quantizer is None:
            raise RuntimeError("the fused bias gradient needs a quantizer, got None")
        _check_path(quantizer, gradient=True)
        values = activation.slope(fwd_input.float()) * grad.float()
        summed = values.to(grad.dtype) if kind(quantizer) == "current" else values
        bias = column_sums(summed.view(flat_shape(summed.shape)), grad.dtype)
        return [bias, _returned(values, grad.dtype, quantizer)]

    return call


def gated_forward(activation: Activation) -> Callable[..., Any]:
    """``f(input, quantizer)``: activation of the first half of a row times its second half.

    Real contract: ``gated_act_kernel`` in ``common/util/vectorized_pointwise.h``.
    """

    def call(input: Tensor, quantizer: Any) -> Any:
        _check_path(quantizer)
        acted, gate = input.float().chunk(2, -1)
        values = activation.value(acted) * gate
        return _without_transpose(_returned(values, input.dtype, quantizer), quantizer)

    return call


def gated_backward(activation: Activation) -> Callable[..., Any]:
    """``f(grad, fwd_input, quantizer)``: gradients of both halves, side by side.

    Real contract: ``dgated_act_kernel`` in ``common/util/vectorized_pointwise.h``.
    """

    def call(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        _check_path(quantizer, gradient=True)
        acted, gate = fwd_input.float().chunk(2, -1)
        upstream = grad.float()
        halves = (
            activation.slope(acted) * upstream * gate,
            upstream * activation.value(acted),
        )
        both = _returned(torch.cat(halves, -1), fwd_input.dtype, quantizer)
        return _without_transpose(both, quantizer)

    return call


def _returned(values: Tensor, dtype: torch.dtype, quantizer: Any) -> Any:
    since = installed_release() >= MX_ACTIVATIONS_ARE_ROUNDED
    unrounded = ("delayed",) if since else ("delayed", "mx")
    before = installed_release() >= ACTIVATIONS_FIND_AMAX
    return rounded_or_quantised(
        values, dtype, quantizer, unrounded=unrounded, amax_of_unrounded=before
    )


def _check_path(quantizer: Any, *, gradient: bool = False) -> None:
    """Until 2.6 activations cannot quantise for every quantizer. Real contract:
    ``activation_helper`` and ``dactivation_helper`` in ``pytorch/csrc/extensions/activation.cpp``.
    """
    if installed_release() >= EVERY_QUANTIZER_HAS_A_PATH:
        return
    if kind(quantizer) == "block":
        raise RuntimeError("Activation fusion is not supported for blockwise quantization yet.")
    if gradient and kind(quantizer) == "current":
        refuse("an activation's gradient with a scale that is left from an earlier cast")


def _without_transpose(result: Any, quantizer: Any) -> Any:
    """``result``, whose transpose the fused kernels of older releases leave unwritten."""
    if installed_release() >= GATED_TRANSPOSE_IS_WRITTEN or kind(quantizer) != "delayed":
        return result
    if result._transpose is not None:
        result._transpose.fill_(NAN_CODE)
    return result


def functions() -> dict[str, Callable[..., Any]]:
    """All these functions by the extension's names."""
    return {
        **{name: forward(act) for name, act in ACTIVATIONS.items()},
        **{f"d{name}": backward(act) for name, act in ACTIVATIONS.items()},
        **{f"dbias_d{name}": backward_with_bias(act) for name, act in ACTIVATIONS.items()},
        **{name: gated_forward(act) for name, act in GATED.items()},
        **{f"d{name}": gated_backward(act) for name, act in GATED.items()},
    }
