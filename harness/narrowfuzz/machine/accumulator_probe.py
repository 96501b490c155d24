"""Measures how the device adds, by sums of 1, small powers of two and -1, which count the bits of
its accumulator.

If products of 1, 2^-k and -1 are added, 2^-k remains as long as k is no more than the number of
bits that the accumulator keeps. At greater distances along K the same sum distinguishes partial
sums that are added in fp32 (in a promotion, or because K is split) from those that are added in the
accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from narrowfuzz.numerics.accumulator import MeasuredAccumulator
from narrowfuzz.play.dtypes import DTYPES

#: The kinds of multiply that are measured, by the names of accumulators. MXFP8 and FP4 are missing,
#: as no supported machine multiplies them natively.
KINDS = ("fp32", "bf16", "fp16", "fp8", "fp8 fast", "fp8 rowwise", "fp8 rowwise fast")
#: The largest product, and a number of bits greater than any accumulator keeps. The smallest
#: product is about 2^-13.
_ONE, _BITS = 2.0**14, 26
#: Places along K of the second and third product; the first is at 0.
_PLACES = ((1, 2), (1, 31), (16, 31))
#: The greatest K, and the step between the distances that are tried.
_LONGEST, _STRIDE = 4096, 16
Matrix: TypeAlias = torch.Tensor


def measure(device: str) -> dict[str, MeasuredAccumulator]:
    """Kind of multiply -> how it adds on a device, or why it could not be measured."""
    results = {}
    for kind in KINDS:
        try:
            results[kind] = measured(partial(_multiply, kind, device))
        except (RuntimeError, ValueError) as error:  # torch refuses with either type
            message = (str(error).strip().splitlines() or [type(error).__name__])[0]
            results[kind] = MeasuredAccumulator(problem=message.split(". ")[0])
    return results


def measured(multiply: Callable[[Matrix, Matrix], Matrix]) -> MeasuredAccumulator:
    """How ``multiply`` adds. It must multiply a [m, K] by b [n, K] transposed; it is called with
    sizes that are multiples of 16 and values that e4m3 can represent."""
    # at some places the products are added in another order, which shows too many bits
    bits, nearest = min(_bits(multiply, *places) for places in _PLACES)
    return MeasuredAccumulator(bits, nearest, _apart(multiply, bits + 2))


def _bits(
    multiply: Callable[[Matrix, Matrix], Matrix], second: int, third: int
) -> tuple[int, bool]:
    """The greatest k for which _ONE + _ONE 2^-k - _ONE is exact, with the second and third products
    at these places along K, and whether the bit after it is rounded."""
    results = _left(multiply, second, third, 1.0)
    bits = max((k for k in range(1, _BITS) if results[k] == _ONE * 2.0**-k), default=0)
    beyond = _left(multiply, second, third, 1.5)[bits + 1].item()
    return bits, beyond == _ONE * 2.0**-bits


def _left(
    multiply: Callable[[Matrix, Matrix], Matrix], second: int, third: int, factor: float
) -> Matrix:
    """[k]: the result of _ONE + factor _ONE 2^-k - _ONE, with the second and third products at
    these places along K."""
    size, half = 32, math.sqrt(_ONE)
    a, b = torch.zeros(size, size), torch.zeros(size, size)
    a[:, 0], a[:, third], b[:, 0], b[:, third] = half, -half, half, half
    for k in range(_BITS + 1):
        a[k, second] = half * 2.0 ** -(k // 2)
        b[k, second] = half * 2.0 ** -(k - k // 2) * factor
    return multiply(a, b).float().diagonal().clone()


def _apart(multiply: Callable[[Matrix, Matrix], Matrix], k: int) -> int | None:
    """The first distance along K at which _ONE + _ONE 2^-k is greater than _ONE, so that the two
    are not added in the accumulator; 0 if there is none, None if results have too few bits to show
    it."""
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
    except (RuntimeError, ValueError):  # before CUDA 12.9, rowwise scales allow bf16 results only
        if not rowwise:
            raise
        return torch._scaled_mm(x, y.t(), *scales, out_dtype=torch.bfloat16, **how).cpu()
