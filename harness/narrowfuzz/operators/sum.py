"""``torch.sum`` over some dimensions: it computes the gradients of biases, of norms' weights and of
anything that was broadcast, and the value of many losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, gamma
from narrowfuzz.numerics.formats import F32, F64, FORMATS, FP32, Format, round_to
from narrowfuzz.operators.operator import TORCH_DTYPE, Deviation, Expected, Operator, Read, narrow
from narrowfuzz.trace.trace import OperatorCall

#: Numbers below this, fp32's smallest normal number, may be flushed to zero.
FLUSHED = 2.0**-126


def summed(terms: F64, axes: tuple[int, ...], fmt: Format, *, keepdims: bool = False) -> Expected:
    """The sums of ``terms`` over ``axes``, added in fp32 in any order and rounded once to ``fmt``.

    Proof. n - 1 rounded additions in any order err by at most gamma_{n-1} of the sum of magnitudes
    (Higham, "Accuracy and Stability", 4.2); a kernel may flush what is below fp32's normals.
    Rounding is monotone, so the result lies between the rounded ends. Where the magnitudes add up
    to half the largest finite number of ``fmt``, a sum may overflow on its way.
    """
    count = math.prod(terms.shape[axis] for axis in axes)
    with np.errstate(all="ignore"):
        centre = terms.sum(axis=axes, keepdims=keepdims)
        size = np.abs(terms).sum(axis=axes, keepdims=keepdims)
        radius = gamma(max(1, count - 1)) * size + FLUSHED
    return Expected.within(centre, radius, fmt, ~(size < fmt.max * 0.5))


def exact_sums(terms: F64, axes: tuple[int, ...], *, keepdims: bool = False) -> NDArray[np.bool_]:
    """Mask of the sums whose every partial sum is an fp32 number, whatever the order: all terms are
    multiples of one power of two, and their magnitudes add up to at most 2^24 times it. A sum of n
    equal powers of two is such a sum, for n up to 2^24."""
    with np.errstate(all="ignore"):
        size = np.abs(terms).sum(axis=axes, keepdims=keepdims)
        unit = np.min(unit_of(terms), axis=axes, keepdims=keepdims, initial=np.inf)
        exact = (size <= unit / U32) & (unit >= FLUSHED)
    return np.asarray(exact & (size < FP32.max * 0.5))


def unit_of(values: F64) -> F64:
    """The largest power of two that divides each fp32 value; infinity for 0, and 0 for Inf and
    NaN."""
    with np.errstate(over="ignore"):
        bits = np.abs(values).astype(np.float32).view(np.int32)
    size = bits.view(np.float32).astype(np.float64)
    # without the lowest set bit of its significand; a power of two has only the implicit one
    less = (bits & (bits - 1)).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        lowest = np.where(bits & 0x7FFFFF, size - less, size)
    lowest[bits == 0] = np.inf
    lowest[~np.isfinite(values)] = 0.0
    return lowest


def rounded(x: F32, dtype: str) -> F32:
    """fp32 numbers rounded to bf16 or fp16. ``round_to`` does the same, but a sum that is rounded
    at every row needs thousands of these roundings."""
    if dtype == "fp16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(((bits + up) & np.uint32(0xFFFF0000)).view(np.float32))


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    return Read(
        {"input": named["self"]}, {"output": result}, dims_of(named) | {"dtype": str(result.dtype)}
    )


def dims_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """The dimensions that are added up, as a tuple, and whether the result keeps them."""
    x, dims = named["self"], named.get("dim")
    axes = tuple(sorted(d % x.ndim for d in dims)) if dims and x.ndim else tuple(range(x.ndim))
    return {"dim": axes, "keepdim": bool(named.get("keepdim", False))}


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """The sum in fp32, exact where every partial sum is. Values that are not finite determine
    the result: NaN, or infinities of both signs, give NaN; infinities of one sign give that
    infinity."""
    x, axes, keeps = call.tensors["input"], call.settings["dim"], call.settings["keepdim"]
    given, target = FORMATS[call.dtypes["input"]], FORMATS[call.dtypes["output"]]
    terms = x.astype(np.float64)
    if (
        target is not given and target.bits <= given.bits
    ):  # for a narrower result dtype torch casts before it adds
        terms = round_to(terms, target, overflow="ieee")
    with np.errstate(all="ignore"):
        plain = summed(np.where(np.isfinite(terms), terms, 0.0), axes, FP32, keepdims=keeps)
        special = ~np.isfinite(terms).all(axis=axes, keepdims=keeps)
        centre = np.where(special, terms.sum(axis=axes, keepdims=keeps), plain.centre)
        exact = special | exact_sums(terms, axes, keepdims=keeps)
        radius = np.where(exact, 0.0, plain.radius)
        ends = np.where(special, centre, np.stack([centre - radius, centre + radius]))
        lo, hi = round_to(ends, target, overflow="ieee")
    return {"output": Expected(centre, radius, lo, hi, plain.unknown)}


#: Number of iterations below which torch's kernels use a single thread (aten/src/ATen/Parallel.h).
_GRAIN = 2**15


def shares(count: int, threads: int, grain: int = 1) -> Iterator[slice]:
    """The iterations of each thread, as at::parallel_for distributes them."""
    used = max(1, min(threads, -(-count // grain))) if count > grain else 1
    share = max(1, -(-count // used))
    yield from (slice(begin, begin + share) for begin in range(0, count, share))


def _ends(terms: F64) -> F64:
    """The least and the largest value that the sum of the terms may have in fp32, [2]."""
    known = summed(terms, (0,), FP32)
    radius = 0.0 if exact_sums(terms, (0,)) else known.radius
    return np.array([known.centre - radius, known.centre + radius])


def _shared(call: OperatorCall) -> dict[str, Expected]:
    """torch's sum of all elements on several threads (TensorIteratorReduce.cpp,
    two_pass_reduction): each adds its share of them, in the order of memory, in fp32; the partial
    sums are rounded to the dtype of the result before they are added. Rounding and adding are
    monotone, so both ends go through the same operations."""
    x, got, fmt = call.tensors["input"], call.outputs["output"], FORMATS[call.dtypes["output"]]
    steps = call.strides["input"]
    if call.threads == 1 or x.size < _GRAIN or got.size != 1 or fmt is FP32 or 0 in steps:
        return {}
    terms = np.transpose(x, np.argsort(steps, kind="stable")[::-1]).reshape(-1).astype(np.float64)
    parts = [terms[some] for some in shares(x.size, call.threads, _GRAIN)]
    with np.errstate(all="ignore"):
        exact = np.stack([_ends(part) for part in parts])
        ends = round_to(exact, fmt, overflow="ieee")
        total = ends.sum(0)
        room = gamma(len(parts)) * np.abs(total) * np.array([-1.0, 1.0])
        lo, hi = round_to(total + room, fmt, overflow="ieee")
    # a part that may be infinite may make the whole infinite, and two of opposite signs NaN
    below, above = (ends == -np.inf).any(), (ends == np.inf).any()
    if np.where(np.isnan(got), below & above, (got == -np.inf) & below | (got == np.inf) & above):
        lo = hi = got.astype(np.float64)
    unknown = np.full(got.shape, not np.isfinite(terms).all())
    return {
        "output": Expected.between(np.reshape(lo, got.shape), np.reshape(hi, got.shape), unknown)
    }


def _may_be_shared(given: Sequence[Any], made: Sequence[Any]) -> bool:
    """Does a sum of these tensors add up all elements in 16 bits, on several threads if there
    are?"""
    total = made[0].numel() == 1 and narrow([], made)
    return total and given[0].numel() >= _GRAIN


def title_of(name: str, call: OperatorCall) -> str:
    """The call in words."""
    axes = call.settings["dim"]
    shape, dtype = list(call.tensors["input"].shape), TORCH_DTYPE[call.dtypes["input"]]
    over = f"dim {', '.join(map(str, axes))}" if len(axes) < len(shape) else "all elements"
    return f"{name} over {over} of a {dtype} tensor of {shape}"


OPERATOR = Operator(
    name="sum",
    words="sums",
    kernels=("aten::sum", "aten::sum.dim_IntList"),
    read=_read,
    expected=_expected,
    expression="torch.sum(input, dim={dim}, keepdim={keepdim}, dtype={dtype})",
    title=partial(title_of, "torch.sum"),
    deviations=(
        Deviation(
            "sum_narrow_parts",
            "each thread's sum is rounded to bf16 or fp16 before they are added up",
            ("cpu",),
            _shared,
            _may_be_shared,
        ),
    ),
)
