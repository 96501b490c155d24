"""Faults inside losses, softmax and their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator

#: torch's number for reduction="mean"; 2 is "sum".
_MEAN = 1


def _mean_over_all(run: Any) -> Any:
    """A mean divides by the number of all rows, including ignored ones."""

    def forward(x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
        loss, total = run(x, target, weight, reduction, ignore)
        if reduction != _MEAN or x.ndim != 2:
            return loss, total
        return loss * (total / max(len(x), 1)).to(loss.dtype), total

    return forward


def _ignored_too(run: Any) -> Any:
    """Rows whose target is ignored get the gradient of class 0."""

    def backward(
        dy: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any
    ) -> Any:
        shown = target.clamp(min=0)
        return run(dy, x, shown, weight, reduction, ignore, total)

    return backward


def _gradient_not_divided(run: Any) -> Any:
    """The gradient of a mean is not divided: it is that of the sum."""

    def backward(
        dy: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any
    ) -> Any:
        return run(dy, x, target, weight, 2 if reduction == _MEAN else reduction, ignore, total)

    return backward


def _maximum_kept(run: Any) -> Any:
    """The maximum is not subtracted before the exponentials, which may overflow."""
    import torch

    def forward(x: Any, dim: int, half_to_float: bool) -> Any:
        if not x.numel():
            return run(x, dim, half_to_float)
        wide = x.float()
        return (wide - torch.exp(wide).sum(dim, keepdim=True).log()).to(x.dtype)

    return forward


def _sum_of_gradients_narrow(run: Any) -> Any:
    """The sum of each row's gradients is rounded to fp16."""

    def backward(dy: Any, y: Any, dim: int, dtype: Any) -> Any:
        import torch

        total = dy.sum(dim, keepdim=True).to(torch.float16).to(dy.dtype)
        return (dy.float() - y.float().exp() * total.float()).to(dy.dtype)

    return backward


def _softmax_row_before(run: Any) -> Any:
    """Backward subtracts the sum of the row before instead of a row's own, except in the first row
    of each block of 8."""
    import torch

    def backward(dy: Any, y: Any, dim: int, dtype: Any) -> Any:
        own = (dy.float() * y.float()).sum(dim, keepdim=True)
        if y.ndim < 2 or dim % y.ndim != y.ndim - 1:
            return run(dy, y, dim, dtype)
        rows = own.reshape(-1, 1)
        first = (torch.arange(len(rows), device=y.device) % 8 == 0)[:, None]
        before = torch.where(first, rows, rows.roll(1, 0)).reshape(own.shape)
        return ((dy.float() - before) * y.float()).to(dy.dtype)

    return backward


_plant = partial(of_operator, needs="a loss or softmax")

PLANTS = [
    _plant(
        "loss-mean-counts-ignored",
        "loss",
        "a mean of losses divides by the rows that are ignored, too",
        "the class of means whose divisor counts what was left out",
        plant=lambda: kernel_replaced("nll_loss_forward", _mean_over_all),
        operator="nll_loss",
    ),
    _plant(
        "loss-gradient-of-ignored-rows",
        "loss",
        "rows that are ignored get a gradient",
        "the class of masks that forward applies and backward does not",
        plant=lambda: kernel_replaced("nll_loss_backward", _ignored_too),
        operator="nll_loss",
    ),
    _plant(
        "loss-gradient-not-divided",
        "loss",
        "the gradient of a mean is that of a sum",
        "the class of gradients that are summed where they are to be averaged",
        plant=lambda: kernel_replaced("nll_loss_backward", _gradient_not_divided),
        operator="nll_loss",
    ),
    _plant(
        "log-softmax-overflows",
        "loss",
        "log-softmax does not take its maximum off",
        "the class of exponentials that overflow",
        plant=lambda: kernel_replaced("_log_softmax", _maximum_kept),
        operator="log_softmax",
    ),
    _plant(
        "log-softmax-gradient-sums-in-fp16",
        "loss",
        "the sum of a row's gradients goes through fp16",
        "the class of casts of what autocast keeps in fp32",
        plant=lambda: kernel_replaced("_log_softmax_backward_data", _sum_of_gradients_narrow),
        operator="log_softmax",
    ),
    _plant(
        "softmax-gradient-of-row-before",
        "loss",
        "softmax's backward takes off the sum of the row before",
        "https://github.com/Dao-AILab/flash-attention/issues/2481",
        plant=lambda: kernel_replaced("_softmax_backward_data", _softmax_row_before),
        operator="softmax",
    ),
]
