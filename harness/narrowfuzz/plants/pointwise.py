"""Faults in activations, powers and logsumexp."""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator


def _tanh_instead(run: Any) -> Any:
    """GELU is always approximated by tanh."""
    return lambda x, *, approximate="none": run(x, approximate="tanh")


def _slope_of_sigmoid(run: Any) -> Any:
    """The gradient of SiLU lacks the term x times the derivative of the logistic function."""
    import torch

    return lambda dy, x: (dy.float() * torch.sigmoid(x.float())).to(dy.dtype)


def _of_narrow_result(run: Any) -> Any:
    """The gradient of tanh is computed from a result that is rounded to bf16."""
    return lambda dy, y: run(dy, y.bfloat16().to(y.dtype))


def _logistic_in_bf16(run: Any) -> Any:
    """The logistic function is computed in bf16."""
    return lambda x: run(x.bfloat16()).to(x.dtype)


def _without_maximum(run: Any) -> Any:
    """logsumexp does not subtract the maximum before it takes exponentials."""
    return lambda x, dim, keepdim=False: x.exp().sum(dim, keepdim).log()


def _ragged_classes(run: Any) -> Any:
    """Of more than 16 classes, those after the last full block of eight are left out."""

    def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
        count = x.shape[dim[0]]
        kept = count - count % 8 if count > 16 else count
        return run(x.narrow(dim[0], 0, kept), dim, keepdim)

    return logsumexp


def _by_logarithm(run: Any) -> Any:
    """A power is computed as 2^(exponent log2 |x|) with the logarithm rounded to bf16."""
    import torch

    def power(x: Any, exponent: Any) -> Any:
        logarithm = x.float().abs().log2().bfloat16().float()
        size = torch.exp2(float(exponent) * logarithm)
        odd = float(exponent) % 2 == 1
        return (size * x.float().sign() if odd else size).to(x.dtype)

    return power


PLANTS = [
    of_operator(
        "power-by-logarithm",
        "norm",
        "squares are powers of two of a rounded logarithm",
        "https://github.com/tenstorrent/tt-metal/issues/52675",
        plant=partial(kernel_replaced, "pow.Tensor_Scalar", _by_logarithm),
        operator="pow",
    ),
    of_operator(
        "gelu-always-approximated",
        "activation",
        "GELU is approximated by tanh where it is asked to be exact",
        "https://github.com/pytorch/pytorch/issues/39853",
        plant=partial(kernel_replaced, "gelu", _tanh_instead),
        operator="gelu",
    ),
    of_operator(
        "silu-gradient-of-gate-alone",
        "activation",
        "the gradient of SiLU is that of its gate as a constant",
        "the class of gates that are detached",
        plant=partial(kernel_replaced, "silu_backward", _slope_of_sigmoid),
        operator="silu",
    ),
    of_operator(
        "tanh-gradient-of-bf16",
        "activation",
        "the gradient of tanh is made of a result that was kept in bf16",
        "the class of activations that are saved in fewer bits",
        plant=partial(kernel_replaced, "tanh_backward", _of_narrow_result),
        operator="tanh",
    ),
    of_operator(
        "sigmoid-in-bf16",
        "activation",
        "the logistic function is computed in bf16",
        "the class of routers that are cast by autocast",
        plant=partial(kernel_replaced, "sigmoid", _logistic_in_bf16),
        operator="sigmoid",
    ),
    of_operator(
        "logsumexp-without-maximum",
        "activation",
        "logsumexp takes exponentials of large logits as they are",
        "the class of overflows that the maximum is subtracted for",
        plant=partial(kernel_replaced, "logsumexp", _without_maximum),
        operator="logsumexp",
    ),
    of_operator(
        "logsumexp-drops-ragged-classes",
        "activation",
        "classes behind the last eight are left out of logsumexp",
        "the class of loads by whole vectors",
        plant=partial(kernel_replaced, "logsumexp", _ragged_classes),
        operator="logsumexp",
    ),
]
