"""How the device adds, measured: sums of 1, small powers of two and -1, which count its bits.

A product of 1 and one of 2^-k leave 2^-k when the 1 is taken away again, as long as k is no more
than the bits that the accumulator keeps. Further along K the same tells sums that meet in fp32 (in
a promotion, or where K is split) from those that meet in the accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from narrowfuzz.numerics.accumulator import Found
from narrowfuzz.play.dtypes import DTYPES

#: What is measured, by the names of accumulators. No machine here multiplies MXFP8 or FP4 natively.
KINDS = ("fp32", "bf16", "fp16", "fp8", "fp8 fast", "fp8 rowwise", "fp8 rowwise fast")
#: The largest product, and more bits than any accumulator keeps: 2^-13 is left for the smallest.
_ONE, _BITS = 2.0**14, 26
#: Where the other two products stand.
_PLACES = ((1, 2), (1, 31), (16, 31))
#: The last K, and the steps in which it is walked.
_LONGEST, _STRIDE = 4096, 16
Matrix: TypeAlias = torch.Tensor


def measure(device: str) -> dict[str, Found]:
    """What each kind of multiply shows on a device."""
    results = {}
    for kind in KINDS:
        try:
            results[kind] = measured(partial(_multiply, kind, device))
        except (RuntimeError, ValueError) as error:  # torch refuses by either
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            results[kind] = Found(problem=said.split(". ")[0])
    return results


def measured(multiply: Callable[[Matrix, Matrix], Matrix]) -> Found:
    """The profile of ``multiply``: a [m, K] times b [n, K] transposed, whose sizes are multiples of
    16 and whose values e4m3 has."""
    # two placements may meet in another order: the fewest bits are those of the right one
    bits, nearest = min(_bits(multiply, *places) for places in _PLACES)
    return Found(bits, nearest, _apart(multiply, bits + 2))


def _bits(
    multiply: Callable[[Matrix, Matrix], Matrix], second: int, third: int
) -> tuple[int, bool]:
    """Bits kept of _ONE + _ONE 2^-k - _ONE, where the second and third products stand along K, and
    whether the next bit is rounded."""
    kept = _left(multiply, second, third, 1.0)
    bits = max((k for k in range(1, _BITS) if kept[k] == _ONE * 2.0**-k), default=0)
    beyond = _left(multiply, second, third, 1.5)[bits + 1].item()
    return bits, beyond == _ONE * 2.0**-bits


def _left(
    multiply: Callable[[Matrix, Matrix], Matrix], second: int, third: int, factor: float
) -> Matrix:
    """[k]: what is left of _ONE + factor _ONE 2^-k - _ONE."""
    size, half = 32, math.sqrt(_ONE)
    a, b = torch.zeros(size, size), torch.zeros(size, size)
    a[:, 0], a[:, third], b[:, 0], b[:, third] = half, -half, half, half
    for k in range(_BITS + 1):
        a[k, second] = half * 2.0 ** -(k // 2)
        b[k, second] = half * 2.0 ** -(k - k // 2) * factor
    return multiply(a, b).float().diagonal().clone()


def _apart(multiply: Callable[[Matrix, Matrix], Matrix], k: int) -> int | None:
    """The first distance at which _ONE 2^-k outlives a _ONE; None where results have no room."""
    if k > 23:
        return None
    half, places = math.sqrt(_ONE), range(_STRIDE, _LONGEST, _STRIDE)
    a, b = torch.zeros(len(places) + 1, _LONGEST), torch.zeros(16, _LONGEST)
    a[:, 0], b[0] = half, half * 2.0 ** -(k - k // 2)
    b[0, 0] = half
    for row, place in enumerate(places):
        a[row, place] = half * 2.0 ** -(k // 2)
    result = multiply(a, b)[:-1, 0]
    if result.dtype != torch.float32:
        return None
    alive = result > _ONE
    return places[int(alive.int().argmax())] if bool(alive.any()) else 0


def _multiply(kind: str, device: str, a: Matrix, b: Matrix) -> Matrix:
    if kind in DTYPES:
        x, y = (t.to(device, DTYPES[kind]) for t in (a, b))
        return (x @ y.t()).cpu()
    x, y = (t.to(device, torch.float8_e4m3fn) for t in (a, b))
    rowwise, fast = "rowwise" in kind, kind.endswith("fast")
    sizes = ((len(x), 1), (1, len(y))) if rowwise else ((), ())
    scales = [torch.ones(size, device=device) for size in sizes]
    how = {"use_fast_accum": fast}
    try:
        return torch._scaled_mm(x, y.t(), *scales, out_dtype=torch.float32, **how).cpu()
    except (RuntimeError, ValueError):  # before CUDA 12.9 rows have bf16 results only
        if not rowwise:
            raise
        return torch._scaled_mm(x, y.t(), *scales, out_dtype=torch.bfloat16, **how).cpu()
