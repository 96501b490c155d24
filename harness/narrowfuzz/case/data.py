"""Makes the tensors of a DataSpec: float32 arrays whose values the Spec's dtype can represent.

Every element is a pure function of (seed, tensor, row, column): a 64-bit counter-based hash and
integer arithmetic, no libm, so tensors are equal on every machine and an element keeps its value
when a dimension shrinks. Two regimes are exceptions: the pinned maxima of a lattice move below 32
rows or columns, where fewer diagonals must still reach every granule, and the rungs of a ladder
move because they are spread over all steps. A stream generator such as Philox has this property
only for a fixed row stride; hashing the counter costs less than skipping through the stream.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.case import ladder_data
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike, ValueClass
from narrowfuzz.models.model import heads_of
from narrowfuzz.numerics.formats import E4M3FN, E5M2, F32, F64, FORMATS, Format, round_to
from narrowfuzz.numerics.plan import OPERANDS, Plan

U64 = NDArray[np.uint64]
#: Value classes that push the input to the ends of its range. The weights of a model other than a
#: single linear are gaussian then: with weights as extreme, no result would be worth comparing.
TAME: tuple[ValueClass, ...] = ("near_max", "scale_ends", "subnormal")
_TENSOR_KEYS = {"input": 1, "weight": 2, "grad_output": 3, "bias": 4}
#: Format -> (largest lattice integer, exponent of the unit): 448 = 14 * 2^5 and 57344 = 7 * 2^13
#: are the largest values of the two formats.
_LATTICE = {"e4m3fn": (14, 5), "e5m2": (7, 13)}


def make_tensors(case: Case, plan: Plan) -> dict[str, F32]:
    """The 2-D tensors of a case: input [M, K], weight [N, K], grad_output [M, N], bias [N]."""
    spec, data = case.spec, case.data
    shapes = {
        "input": (spec.tokens, spec.k),
        "weight": (spec.n, spec.k),
        "grad_output": (spec.tokens, spec.n),
    }
    exponents = {
        "input": data.input_exponent,
        "weight": data.weight_exponent,
        "grad_output": data.grad_exponent,
    }
    tensors: dict[str, F32] = {}
    for name, (rows, cols) in shapes.items():
        if data.regime == "lattice":
            values = _lattice(name, rows, cols, data, plan)
        elif data.regime == "ladder":
            values = _ladder(name, rows, cols, data, spec, plan)
        else:
            values = _wild(name, rows, cols, data, spec)
        if exponents[name]:
            values = np.ldexp(values, exponents[name])
        tensors[name] = _to_dtype(values, spec)
    if spec.bias:
        tensors["bias"] = _bias(spec, data, exponents)
    for spike in data.spikes:
        _plant(tensors.get(spike.tensor), spike, spec)
    _expand_gradient(tensors, spec)
    return tensors


def make_model_tensors(
    case: Case, shapes: Mapping[str, tuple[int, ...]], *, ids: bool
) -> dict[str, F32]:
    """The tensors of a model wider than one linear: input, grad_output and every parameter by name.

    Input is [tokens, K], or [tokens, 1] of token ids below N; grad_output is [tokens, width].
    Weights follow the case's value class, scaled by about 1 / sqrt(fan-in); norms stay near 1.
    """
    spec, data = case.spec, case.data
    tensors: dict[str, F32] = {}
    if ids:
        h = hash_bits(data.seed, "input", spec.tokens, 1)
        tensors["input"] = ((h >> np.uint64(33)) % np.uint64(max(spec.n, 1))).astype(np.float32)
    else:
        tensors["input"] = _exponent(
            _wild("input", spec.tokens, spec.k, data, spec), data.input_exponent, spec
        )
    tensors["grad_output"] = _exponent(
        _wild("grad_output", spec.tokens, spec.width, data, spec), data.grad_exponent, spec
    )
    first_weight = None
    for name, shape in shapes.items():
        tensors[name] = _parameter(name, shape, case)
        if first_weight is None and len(shape) == 2:
            first_weight = name
    targets = {"weight": first_weight or "", "bias": next((n for n in shapes if "bias" in n), "")}
    for spike in data.spikes:
        if not (ids and spike.tensor == "input"):
            _plant(tensors.get(targets.get(spike.tensor, spike.tensor)), spike, spec)
    _expand_gradient(tensors, spec)
    return tensors


def _parameter(name: str, shape: tuple[int, ...], case: Case) -> F32:
    rows, cols = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    if len(shape) < 2:
        x = gaussian(hash_bits(case.data.seed, name, rows, cols))
        x = 0.25 * x if name.endswith("bias") else 1.0 + 0.125 * x
        return _to_dtype(x, case.spec).reshape(shape)  # of shape (), too: arithmetic loses that
    tame = case.data.values in TAME
    kind = DataSpec(values="gaussian", seed=case.data.seed) if tame else case.data
    # equal and aligned values test what they are made for only at their own magnitude
    shrink = 0 if kind.values in ("equal", "aligned") else -(cols.bit_length() // 2)
    return _exponent(
        _wild(name, rows, cols, kind, case.spec), shrink + case.data.weight_exponent, case.spec
    ).reshape(shape)


def _exponent(values: F64, exponent: int, spec: Spec) -> F32:
    return _to_dtype(np.ldexp(values, exponent) if exponent else values, spec)


def _expand_gradient(tensors: dict[str, F32], spec: Spec) -> None:
    """For an expanded gradient, set every row to row 0: the stride-0 gradient that ``y.sum(0)``
    produces."""
    if spec.grad_layout == "expanded" and spec.tokens:
        first = tensors["grad_output"][:1]
        tensors["grad_output"] = np.repeat(first, spec.tokens, axis=0)


def hash_bits(seed: int, tensor: str, rows: int, cols: int) -> U64:
    """64 uniform bits for each (row, col): two rounds of the murmur3 finaliser over the counter."""
    of_tensor = _TENSOR_KEYS.get(tensor) or 16 + zlib.crc32(tensor.encode())
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + of_tensor * 0xD1B54A32D192ED03) % 2**64)
    h = _counters(rows, cols) + key
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h ^= h >> np.uint64(33)
        h *= np.uint64(multiplier)
    h ^= h >> np.uint64(29)
    return h


@lru_cache(32)  # one for each shape of a few Specs
def _counters(rows: int, cols: int) -> U64:
    """A distinct number for each (row, col), spread over the 64 bits."""
    row = np.arange(rows, dtype=np.uint64)[:, None]
    col = np.arange(cols, dtype=np.uint64)[None, :]
    return ((row << np.uint64(32)) | col) * np.uint64(0x9E3779B97F4A7C15)


@lru_cache(32)
def _diagonals(rows: int, cols: int, period: int) -> NDArray[np.bool_]:
    """True where row + column is a multiple of ``period``."""
    return np.asarray((np.arange(rows)[:, None] + np.arange(cols)[None, :]) % period == 0)


def gaussian(h: U64) -> F64:
    """Sum of four 16-bit uniforms, centred, unit variance: exact in float64, no libm."""
    total = (h & np.uint64(0xFFFF)).astype(np.float64)
    for shift in (16, 32, 48):
        total += ((h >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64)
    return (total - 131070.0) * (1.0 / 37837.0)


def _wild(name: str, rows: int, cols: int, data: DataSpec, spec: Spec) -> F64:
    h = hash_bits(data.seed, name, rows, cols)
    x = gaussian(h)
    if name == "weight":
        x *= 0.25
    fresh = (h * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)  # bits the gaussian did not use
    kind = data.values
    if kind in ("gaussian", "inf_nan"):
        return x  # inf_nan: the special values are planted as spikes
    if kind == "outlier":
        return np.where(fresh % np.uint64(61) == 0, x * 4096.0, x)
    if kind == "heavy_tail":
        return np.ldexp(x, ((fresh & np.uint64(0x1F)).astype(np.int64) - 16))
    if kind == "zero_rows":
        return _zero_rows(x, data.seed)
    if kind == "near_max":
        return np.ldexp(
            np.sign(x) * (1.0 + np.abs(x) % 1.0),
            _range(spec).top + (fresh % np.uint64(8)).astype(int),
        )
    if kind == "subnormal":
        return _small(x, fresh, data.seed, _range(spec))
    if kind in ("mined", "scale_ends"):
        return _mined(x, h, fresh, spec, ends=kind == "scale_ends")
    if kind == "binade_edges":
        return _edges(h, fresh, spec)
    if kind == "equal":
        return np.ones((rows, cols))
    if kind == "outlier_rows":
        return np.where(h[:, :1] % np.uint64(16) == 0, x * 256.0, x)
    if kind == "aligned":
        return _aligned(name, h, data, spec)
    raise ValueError(f"unknown value class {kind!r}: known are {', '.join(get_args(ValueClass))}")


#: Significands in [1, 2) of maxima at which some scale rule changes its result: 1.75 * 2^k (E4M3's
#: 448 and E5M2's 57344), the next codes below them and the ties above them, 1.5 * 2^k (E2M1's 6),
#: and values whose reciprocal is inexact.
_MINED = np.array([1.75, 1.75, 1.0, 1.5, 1.875, 1.625, 1.8125, 1.0625])


@dataclass(frozen=True)
class _Range:
    """The ends of a dtype's range, as exponents of two."""

    #: The smallest of the eight exponents that ``near_max`` uses.
    top: int
    #: The exponent of the largest tiny granule, and the difference to that of the next one.
    small: int
    step: int
    #: Exponents of the maxima that ``scale_ends`` uses.
    ends: NDArray[np.int64]


#: For maxima with these exponents a power-of-two scale byte is 0, 1, 253, 254 or close to one of
#: them.
_ENDS = np.array([-120, -119, -118, -113, -112, -111, -126, -125, 117, 118, 119, 124, 125, 126])
_FP32_RANGE = _Range(120, -36, 8, _ENDS)
#: Exponents near those of the smallest normal, the smallest subnormal and the largest number.
_FP16_ENDS = np.array([-13, -14, -15, -16, -20, -23, -24, 13, 14, 15])
_FP16_RANGE = _Range(8, -10, 1, _FP16_ENDS)


def _range(spec: Spec) -> _Range:
    return _FP16_RANGE if spec.dtype == "fp16" else _FP32_RANGE


def _mined(x: F64, h: U64, fresh: U64, spec: Spec, *, ends: bool) -> F64:
    """Mined values and their neighbours are the maxima of every row and column of eight or more
    elements, and of every block. The other elements are smaller: ties of the formats, negative
    zeros and ordinary numbers. ``ends`` uses exponents at the ends of the dtype's range."""
    rows, cols = x.shape
    # the same period for all sizes: an element keeps its value when dimensions shrink
    diagonal = _diagonals(rows, cols, 8)
    spacing = 2.0 ** -FORMATS[spec.dtype].mantissa_bits
    pick = _MINED[(h & np.uint64(7)).astype(np.int64)]
    step = (fresh % np.uint64(3)).astype(np.int64) - 1
    ulp = np.where((pick == 1.0) & (step < 0), spacing / 2, spacing)
    sign = np.where((h >> np.uint64(16)) & np.uint64(1), -1.0, 1.0)
    # one exponent per row, so that the maximum of a row is a mined value
    row = h[:, :1] >> np.uint64(8)
    there = _range(spec).ends
    exponent = (
        there[(row % np.uint64(len(there))).astype(np.int64)]
        if ends
        else ((row % np.uint64(12)).astype(np.int64) - 8)
    )
    ties = sign * (1.0 + (2.0 * ((fresh >> np.uint64(8)) % np.uint64(8)) + 1.0) / 16.0) / 8.0
    small = np.where(fresh % np.uint64(4) == 0, ties, np.clip(x, -4.0, 4.0) / 8.0)
    small = np.where(fresh % np.uint64(29) == 0, -0.0, small)
    return np.ldexp(np.where(diagonal, sign * (pick + step * ulp), small), exponent)


def _zero_rows(x: F64, seed: int) -> F64:
    """Set whole rows and columns to zero, for granules without any nonzero element."""
    rows, cols = x.shape
    keep_row = (np.arange(rows) * 7 + seed) % 3 != 0
    keep_col = (np.arange(cols) * 5 + seed) % 4 != 0
    return x * keep_row[:, None] * keep_col[None, :]


def _aligned(name: str, h: U64, data: DataSpec, spec: Spec) -> F64:
    """Small integers. Weights have 2u added, where u is a fixed vector of signs. One row in 16 of
    the input is a multiple of -u instead, so large that its scores against such weights lie between
    -200 and -490, before the case's exponents. Source: the data of cudnn-frontend#743."""
    rows, cols = h.shape
    values = ((h >> np.uint64(40)) % np.uint64(5)).astype(np.float64) - 2.0
    if name == "grad_output":
        return values
    signs = hash_bits(data.seed, "direction", 1, cols) >> np.uint64(20)
    u = np.where(signs & np.uint64(1), 1.0, -1.0)
    if name != "input":
        return values + 2.0 * u
    width = max(1, cols // heads_of(spec))
    times = 2.0 ** math.floor(math.log2(245.0 / math.sqrt(width)))
    return np.where(np.arange(rows)[:, None] % 16 == 0, -times * u, values)


def _small(x: F64, fresh: U64, seed: int, within: _Range) -> F64:
    """Rows of tiny values, down to the dtype's subnormals; for dtypes with fp32's range they begin
    at about torchao's EPS (1e-12 = 2^-40)."""
    base = within.small - within.step * ((np.arange(x.shape[0]) + seed) % 13)
    wobble = (fresh & np.uint64(3)).astype(np.int64)
    return np.ldexp(x, base[:, None] - wobble)


def _edges(h: U64, fresh: U64, spec: Spec) -> F64:
    """Values at which a rounding or scale rule changes its result, and their two neighbours."""
    anchors = np.array([1.0, 1.75, 1.5, 1.875, 1.8125, 1.0625, 1.1875, 1.3125])
    pick = anchors[(h & np.uint64(7)).astype(np.int64)]
    step = (fresh % np.uint64(3)).astype(np.int64) - 1
    spacing = 2.0 ** -FORMATS[spec.dtype].mantissa_bits
    # below a power of two the numbers lie twice as close
    ulp = np.where((pick == 1.0) & (step < 0), spacing / 2, spacing)
    exponent = ((h >> np.uint64(8)) % np.uint64(12)).astype(np.int64) - 8
    sign = np.where((h >> np.uint64(16)) & np.uint64(1), -1.0, 1.0)
    return sign * np.ldexp(pick + step * ulp, exponent)


def lattice_format(tensor: str, plan: Plan) -> Format:
    """The format whose grid the lattice of ``tensor`` uses: E5M2 if any GEMM quantises it to that,
    else E4M3FN, also if it is never quantised."""
    operands = [
        operand
        for role, gemm in plan.gemms.items()
        for operand, (name, _) in zip((gemm.a, gemm.b), OPERANDS[role], strict=True)
        if name == tensor and operand.format is not None
    ]
    return E5M2 if any(o.format == E5M2 for o in operands) else E4M3FN


def _lattice(name: str, rows: int, cols: int, data: DataSpec, plan: Plan) -> F64:
    """Small integers times a power of two, with one element of every granule pinned to the maximum.

    Pins on the diagonals of period min(32, rows, cols) put one into each row, column and block of
    32 along either, so every scale is the same power of two under every recipe.
    """
    largest, shift = _LATTICE[lattice_format(name, plan).name]
    h = hash_bits(data.seed, name, rows, cols)
    units = ((h >> np.uint64(20)) % np.uint64(2 * largest + 1)).astype(np.float64) - largest
    period = max(1, min(32, rows, cols))
    pins = np.where(h & np.uint64(1), float(largest), -float(largest))
    units = np.where(_diagonals(rows, cols, period), pins, units)
    # units of the format's own grid, scaled to order one; the case's exponents scale from there
    return np.ldexp(units, 0 if shift == 5 else 1)


def _ladder(name: str, rows: int, cols: int, data: DataSpec, spec: Spec, plan: Plan) -> F64:
    """Ladder data for the two operands of the GEMM ``data.gemm``. The third tensor has the case's
    value class."""
    for lay, (tensor, turned) in zip(
        (ladder_data.placed, ladder_data.sized), OPERANDS[data.gemm], strict=True
    ):
        if tensor == name:
            height, contracted = (cols, rows) if turned else (rows, cols)
            h = hash_bits(data.seed, name, height, 1)[:, 0]
            x = lay(h, contracted, lattice_format(name, plan).max)
            return x.T if turned else x
    return _wild(name, rows, cols, data, spec)


def _bias(spec: Spec, data: DataSpec, exponents: dict[str, int]) -> F32:
    h = hash_bits(data.seed, "bias", spec.n, 1)
    if data.regime == "lattice":
        values = ((h & np.uint64(0x7F)).astype(np.float64) - 64.0)[:, 0]
    elif data.regime == "ladder":  # another addend would change where the sums are truncated
        values = np.zeros(spec.n)
    else:
        values = gaussian(h)[:, 0]
    return _to_dtype(np.ldexp(values, exponents["input"] + exponents["weight"]), spec)


def _to_dtype(values: F64, spec: Spec) -> F32:
    fmt = FORMATS[spec.dtype]
    with np.errstate(over="ignore"):
        return round_to(values, fmt, overflow="saturate").astype(np.float32)


def _plant(target: F32 | None, spike: Spike, spec: Spec) -> None:
    """Overwrite one element with the spike. A finite value saturates in the Spec's dtype; Inf and
    NaN stay."""
    if target is None or target.size == 0:
        return
    value = np.array([int(spike.bits, 16)], dtype=np.uint32).view(np.float32)
    if np.isfinite(value[0]):
        value = _to_dtype(value.astype(np.float64), spec)
    rows, cols = target.shape[:-1][:1], target.shape[-1:]  # a 0-d tensor has neither
    target[(*(spike.row % n for n in rows), *(spike.col % n for n in cols))] = value[0]
