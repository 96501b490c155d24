"""Slopes of a user's ``torch.autograd.Function`` along a direction, in float64.

For a gradient g sent into the results, a direction d of one argument x and a step h,

    s(h) = <g, F(x + h d) - F(x - h d)> / 2h  ->  <backward(g), d>   as h -> 0.

Two neighbouring steps give a slope (by Richardson extrapolation) and how much it changed between
them; at a kink of F the two one-sided slopes differ as well. The error is the sum of both.

A stand-alone script is written from this source.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from narrowfuzz.play.functions import FunctionCall, backward_of, called_with, needing

#: The slope along one direction. ``size``: the typical magnitude of such a sum of products.
#: ``leap``: the steepest finite step, as a multiple of the slope over the smallest step.
Slope = namedtuple("Slope", "slope error backward size leap constant")
#: Steps as shares of an argument's root mean square: from large enough to cross the grid of an
#: 8-bit format to where a Function that computes in fp32 still distinguishes two points.
STEPS = tuple(2.0**-k for k in range(2, 21, 2))


def nonzero(t: torch.Tensor | None) -> bool:
    return t is not None and bool(t.count_nonzero())


def drawn(like: torch.Tensor) -> torch.Tensor:
    """Normal random numbers in the shape and dtype of a tensor, drawn on the CPU."""
    wide = torch.complex128 if like.is_complex() else torch.float64
    return torch.randn(like.shape, dtype=wide).to(like.device, like.dtype)


def size_of(x: torch.Tensor) -> float:
    """The root mean square, or 1 if that is zero or not finite."""
    size = x.detach().abs().square().mean().sqrt().item() if x.numel() else 0.0
    return size if size and math.isfinite(size) else 1.0


def way_from(x: torch.Tensor, *, relative: bool = False) -> torch.Tensor:
    """A random direction for x with the root mean square of x or, if ``relative``, a quarter of
    each element's size. Zeros, a triangle and symmetry are preserved: the backward may rely on
    them."""
    way = drawn(x) * (x.detach().abs() / 4 if relative else size_of(x))
    if nonzero(x):
        way = way * (x != 0)
    if x.dim() > 1 and x.shape[-1] == x.shape[-2] and torch.allclose(x, x.mT, rtol=1e-5):
        way = (way + way.mT) / 2
    return way


def vector(tensors: Sequence[Any]) -> torch.Tensor:
    """All numbers of the floating-point and complex tensors, in one float64 vector."""
    real = [
        (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().double()
        for t in tensors
        if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
    ]
    return torch.cat([t.reshape(-1) for t in real]) if real else torch.zeros(0)


def slope_along(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> Slope:
    """The slope along a random direction of argument i, for a random gradient of the results."""
    sent = {j: drawn(g) for j, g in live.items()}
    direction = way_from(values[i])
    ends = [moved(call, values, sent, i, STEPS[0] * step * direction) for step in (1, -1)]
    if not all(bool(end.isfinite().all()) for end in ends):  # it may need positive numbers
        direction = way_from(values[i], relative=True)
    gradient = backward_of(call, values, sent)[list(values).index(i)]
    along = 0.0 if gradient is None else vector([gradient]).dot(vector([direction])).item()
    slope = differences(call, values, sent, i, direction)
    return slope._replace(backward=along, size=max(slope.size, abs(along)))


def differences(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    sent: Mapping[int, torch.Tensor],
    i: int,
    direction: torch.Tensor,
) -> Slope:
    """The slope by finite differences over all steps; its ``backward`` is NaN."""
    g, parts = vector([*sent.values()]), [vector([t]).numel() for t in sent.values()]
    here = moved(call, values, sent, i, 0.0 * direction)
    slopes, gaps, sizes, steeps = [], [], [], []
    for h in STEPS:
        up, down = (moved(call, values, sent, i, step * direction) for step in (h, -h))
        central = (up - down) / (2 * h)
        slopes.append(g.dot(central).item())
        gaps.append(g.dot(up - 2 * here + down).item() / h)
        sizes.append((g * central).norm().item())
        far = torch.maximum((up - here).abs(), (here - down).abs()) / h
        steeps.append([part.max().item() for part in far.split(parts)])
    errors = [
        abs(slopes[k + 1] - slopes[k]) + abs(4 * gaps[k + 1] - gaps[k]) / 3
        for k in range(len(STEPS) - 1)
    ]
    k = min(range(len(errors)), key=lambda k: errors[k] if errors[k] == errors[k] else math.inf)
    slope = slopes[k + 1] + (slopes[k + 1] - slopes[k]) / 15
    leap = max(leap_of([step[j] for step in steeps]) for j in range(len(parts)))
    size = max(abs(slope), sizes[k + 1])
    return Slope(slope, errors[k], math.nan, size, leap, not any(steeps[-1]))


def leap_of(steeps: Sequence[float]) -> float:
    """The largest slope that exceeds 1.5 times that over the four times longer step before, divided
    by the last slope: a jump gets steeper with each shorter step, a smooth bend hardly does."""
    most = max((s for before, s in pairwise(steeps) if s > 1.5 * before), default=0.0)
    return most / steeps[-1] if steeps[-1] else math.inf if most else 1.0


def moved(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
    by: torch.Tensor,
) -> torch.Tensor:
    """The live results, in one vector, with argument i moved by ``by``."""
    if i in values:
        values = {**values, i: values[i] + by}
    else:  # it needs no gradient
        call = with_argument(call, i, call.args[i] + by)
    y = called_with(call, needing(values))
    return vector([y[j] for j in live])


def with_argument(call: FunctionCall, i: int, value: torch.Tensor) -> FunctionCall:
    """The same call with another argument in this place."""
    args = (*call.args[:i], value, *call.args[i + 1 :])
    return FunctionCall(call.function, call.module, args, call.kwargs, call.needs)
