"""Faults in functions that torch composes from several kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.plants.operators import COMPOSED, kernel_replaced, of_operator
from narrowfuzz.plants.patching import attribute_replaced


def _rms_norm(change: Callable[[Any, Any, float], Any]) -> AbstractContextManager[None]:
    """``change(x, dims, eps)`` replaces the normalising factor of each row; x is fp32."""

    def make(run: Any) -> Any:
        def norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
            if eps is None:
                return run(x, shape, weight, eps)
            wide = x.float()
            y = wide * change(wide, tuple(range(-len(shape), 0)), eps)
            return (y if weight is None else y * weight).to(x.dtype)

        return norm

    return kernel_replaced("rms_norm", make, COMPOSED)


def _epsilon_outside(x: Any, dims: Any, eps: float) -> Any:
    return 1.0 / (x.square().mean(dims, keepdim=True).sqrt() + eps)


def _of_padded_width(x: Any, dims: Any, eps: float) -> Any:
    """The mean is taken over the columns padded to a power of two."""
    count = x[(0,) * (x.ndim - len(dims))].numel()
    padded = 1 << (count - 1).bit_length()
    return (x.square().sum(dims, keepdim=True) / padded + eps).rsqrt()


def _constant_in_backward(x: Any, dims: Any, eps: float) -> Any:
    return (x.square().mean(dims, keepdim=True) + eps).rsqrt().detach()


def _smoothed(change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(loss, x, target, ignored, smoothing)`` replaces torch's mean ``loss`` where labels
    are smoothed."""

    def make(run: Any) -> Any:
        def loss(
            x: Any,
            target: Any,
            weight: Any = None,
            reduction: int = 1,
            ignored: int = -100,
            smoothing: float = 0.0,
        ) -> Any:
            right = run(x, target, weight, reduction, ignored, smoothing)
            if not smoothing or weight is not None or reduction != 1 or x.ndim != 2:
                return right
            return change(right, x, target, ignored, smoothing)

        return loss

    return kernel_replaced("cross_entropy_loss", make, COMPOSED)


def _spread_over_others(loss: Any, x: Any, target: Any, ignored: int, smoothing: float) -> Any:
    """The smoothing is spread over the other classes only, not over all classes."""
    logs, counts = x.float().log_softmax(1), target != ignored
    own = logs.gather(1, target.clamp(min=0)[:, None]).squeeze(1)
    classes = x.shape[1]
    less = smoothing / max(classes - 1, 1) - smoothing / classes
    terms = less * (logs.sum(1) - own) - smoothing / classes * -own
    return loss - (terms * counts).sum().to(loss.dtype) / counts.sum()


def _ignored_are_smoothed(loss: Any, x: Any, target: Any, ignored: int, smoothing: float) -> Any:
    """Ignored rows are left out of the target's term but not of the smoothing term."""
    logs, counts = x.float().log_softmax(1), target != ignored
    rows = logs.sum(1) * ~counts
    return loss - (smoothing / x.shape[1] * rows.sum() / counts.sum()).to(loss.dtype)


def _chunks(change: Callable[[Any], Any], name: str) -> Any:
    """``change(own)`` replaces this method of torch's class that computes the loss in chunks."""
    from torch.nn.modules.linear_cross_entropy import _ChunkContext

    return attribute_replaced(_ChunkContext, name, change)


def _last_left_out(own: Any) -> Any:
    """The last chunk is left out if it is smaller than the others."""

    def chunks(self: Any) -> Any:
        every = list(own(self))
        ragged = len(every) > 1 and every[-1].bchunk_size < every[0].bchunk_size
        return iter(every[:-1] if ragged else every)

    return chunks


def _maximum_of_chunk(own: Any) -> Any:
    """The maximum of a whole chunk is subtracted from each of its rows, so that rows far below it
    underflow."""

    def amax(self: Any, x: Any) -> Any:
        return own(self, x).amax().expand(x.shape[0], 1)

    return amax


PLANTS = [
    *(
        of_operator(
            f"rms-norm-{id}",
            "norm",
            title,
            source,
            plant=partial(_rms_norm, change),
            operator="rms_norm",
        )
        for id, title, source, change in (
            (
                "epsilon-outside-root",
                "epsilon is added to the root, not under it",
                "the class of norms that differ in where epsilon stands",
                _epsilon_outside,
            ),
            (
                "mean-of-padding",
                "the mean counts columns of padding",
                "the class of blocks that are a power of two wide",
                _of_padded_width,
            ),
            (
                "factor-constant-in-backward",
                "backward takes the factor of a row for a constant",
                "the class of statistics that are detached",
                _constant_in_backward,
            ),
        )
    ),
    *(
        of_operator(
            f"smoothing-{id}",
            "loss",
            title,
            source,
            plant=partial(_smoothed, change),
            operator="smoothed_cross_entropy",
        )
        for id, title, source, change in (
            (
                "spread-over-others",
                "smoothing leaves the target's class out",
                "the class of smoothings that divide by one class less",
                _spread_over_others,
            ),
            (
                "counts-ignored-rows",
                "rows that are ignored are smoothed all the same",
                "the class of masks that one of two terms applies",
                _ignored_are_smoothed,
            ),
        )
    ),
    *(
        of_operator(
            f"chunked-loss-{id}",
            "loss",
            title,
            source,
            plant=partial(_chunks, change, name),
            operator="linear_cross_entropy",
        )
        for id, title, source, change, name in (
            (
                "drops-last-chunk",
                "a last chunk that is not whole is left out",
                "the class of loops over whole chunks",
                _last_left_out,
                "chunks",
            ),
            (
                "maximum-of-chunk",
                "the maximum of a chunk is taken off every row",
                "the class of exponentials that underflow",
                _maximum_of_chunk,
                "amax",
            ),
        )
        if "linear_cross_entropy" in MODELS  # a release without it has nothing to change
    ),
]
