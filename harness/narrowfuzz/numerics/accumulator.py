"""How a matrix multiply adds its products: the accumulators of CPUs and tensor cores, and bounds of
their error.

A tensor core adds one step of products and the running sum at once: it aligns all terms to the
largest of their exponents, truncates them below a fixed number of fraction bits, adds the truncated
terms exactly and truncates the result. How products are divided among steps, in which order the
steps are added, and whether K is split is the kernel's choice, so no bound in this module depends
on it. Where steps and splits are known, ``outcomes`` lists the possible results bit for bit.

Sources: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004);
DeepSeek-V3 (arXiv 2412.19437), section 3.5.2, on promotion; Higham, "Accuracy and Stability", 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from narrowfuzz.numerics.formats import F64

#: Unit roundoff of fp32.
U32 = 2.0**-24


@dataclass(frozen=True)
class Accumulator:
    """How the products of one element of a result are added."""

    name: str
    #: Number of products that are added to the sum at once.
    step: int = 1
    #: Number of bits kept after the leading one, both of a step's largest term and of its sum; -1:
    #: unknown.
    fraction_bits: int = 23
    rounding: Literal["nearest", "truncate"] = "nearest"
    #: Number of products after which the sum is added to a separate sum in fp32 (promotion); 0:
    #: never.
    promotes: int = 0
    #: K may be split after every multiple of this many products, and the sums of the parts are
    #: added in fp32; 0: K is never split.
    splits: int = 0
    #: True: steps, runs between promotions and tiles are neighbouring products, and nothing else is
    #: truncated. The possible results are then known bit for bit (``outcomes``), not only a bound
    #: of their error.
    to_the_bit: bool = False

    def __post_init__(self) -> None:
        assert self.step >= 1
        assert self.ieee or self.rounding == "truncate"
        assert not self.promotes or self.promotes % self.step == 0
        assert not self.splits or self.splits % self.step == 0
        assert not self.promotes or self.splits % self.promotes == 0

    @property
    def ieee(self) -> bool:
        """True: every addition is an IEEE fp32 addition."""
        return (self.step, self.fraction_bits, self.rounding) == (1, 23, "nearest")

    @property
    def known(self) -> bool:
        """True: the error of its sums has a bound."""
        return self.fraction_bits > 0

    @property
    def exact_below(self) -> float:
        """Sums of multiples of a unit are exact while their magnitudes stay below this many units;
        0 for an unknown accumulator."""
        return 2.0 ** (self.fraction_bits + 1) if self.known else 0.0


FP32 = Accumulator("fp32")
#: An accumulator of which nothing is assumed: every radius is infinite, and no sum counts as exact.
UNKNOWN = Accumulator("unknown", fraction_bits=-1, rounding="truncate")
#: FP8 on Hopper's tensor cores: https://github.com/pytorch/pytorch/issues/147971.
HOPPER_FP8_FAST = Accumulator("hopper fp8, fast", 32, 13, "truncate", splits=128, to_the_bit=True)
HOPPER_FP8 = Accumulator(
    "hopper fp8", 32, 13, "truncate", promotes=128, splits=128, to_the_bit=True
)
#: bf16 and fp16 on tensor cores: aligned with more bits than fp32 has, then truncated to fp32.
TENSOR_CORE_16 = Accumulator("tensor core, 16 bits", 16, 23, "truncate", splits=16)

#: The type of a multiply -> how its products are added. "fp8 fast": with fast accumulation
#: requested.
Accumulators = Mapping[str, Accumulator]
_EVERY = ("fp32", "bf16", "fp16", "fp8", "fp8 fast", "mxfp8", "fp4")
CPU: Accumulators = dict.fromkeys((*_EVERY, *(f"attention {n}" for n in _EVERY[:3])), FP32)
HOPPER: Accumulators = {
    "fp32": FP32,
    "bf16": TENSOR_CORE_16,
    "fp16": TENSOR_CORE_16,
    "fp8": HOPPER_FP8,
    "fp8 fast": HOPPER_FP8_FAST,
    # no entry for fp32 attention: which unit multiplies there is not known
    "attention bf16": TENSOR_CORE_16,
    "attention fp16": TENSOR_CORE_16,
}
#: For any other GPU only this is known: fp32 products are added in fp32 while TF32 is off.
UNKNOWN_DEVICE: Accumulators = {"fp32": FP32}


@dataclass(frozen=True)
class MeasuredAccumulator:
    """The measured accumulator of one kind of multiply. ``problem``: why it could not be
    measured."""

    #: Number of bits kept after the leading one, and whether the sum is rounded to nearest at the
    #: last of them (else truncated).
    fraction_bits: int = 0
    nearest: bool = False
    #: The smallest distance along K, a multiple of 16, at which a product no longer meets the first
    #: one in the accumulator, but in fp32; 0: there is none below 4096; None: results have too few
    #: bits to show it.
    apart: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"not measured: {self.problem}"
        cut = "rounded" if self.nearest else "cut"
        apart = f", in fp32 after {self.apart}" if self.apart else ""
        return f"{self.fraction_bits} fraction bits, {cut}{apart}"


def disagrees(expected: Accumulator, seen: MeasuredAccumulator) -> str:
    """How the measured accumulator is less accurate than the expected one, in words; "" if it is
    not, if nothing was measured, or if nothing is expected."""
    if seen.problem or not expected.known:
        return ""
    if seen.fraction_bits < expected.fraction_bits:
        return f"{seen.fraction_bits} fraction bits, {expected.fraction_bits} expected"
    if expected.rounding == "nearest" and not seen.nearest:
        return "cuts, rounding to nearest expected"
    if expected.promotes and seen.apart is not None and not _promotes(expected, seen):
        return f"meets fp32 after {seen.apart or 'more than 4096'}, {expected.promotes} expected"
    return ""


def _promotes(expected: Accumulator, seen: MeasuredAccumulator) -> bool:
    return seen.apart is not None and 0 < seen.apart <= expected.promotes


def wider(expected: Accumulator, seen: MeasuredAccumulator) -> Accumulator:
    """``expected`` if the measurement agrees with it; otherwise an accumulator whose bounds hold
    for both the expected and the measured one, without ``to_the_bit``. Where nothing could be
    measured, ``expected`` without ``to_the_bit``."""
    if seen.problem:
        return replace(expected, to_the_bit=False)
    if not disagrees(expected, seen):
        return expected
    bits = min(expected.fraction_bits, seen.fraction_bits)
    promotes = expected.promotes if _promotes(expected, seen) else 0
    return replace(
        expected,
        name=f"{expected.name}, widened",
        fraction_bits=bits,
        rounding="truncate",
        promotes=promotes,
        to_the_bit=False,
    )


def reconciled(table: Accumulators, seen: Mapping[str, MeasuredAccumulator]) -> Accumulators:
    """The table, with each accumulator widened by the measurements of its kind. Measurements with
    one scale per row ("fp8 rowwise") count for the same entry ("fp8"), because another kernel may
    run."""
    found = dict(table)
    for kind, one in seen.items():
        name = kind.replace(" rowwise", "")
        # a problem with one scale per row means that the device has no such kernels
        if name in found and not (one.problem and name != kind):
            found[name] = wider(found[name], one)
    return found


class Unjudged(ValueError):
    """Why a result is not judged: no bound holds, or computing it would take too long."""


def gamma(n: int) -> float:
    """gamma_n = n u / (1 - n u). Raises Unjudged if n u >= 1, where the bound is void."""
    n = max(n, 0)
    if n * U32 >= 1.0:
        raise Unjudged(f"{n} additions in fp32: the bound is void, split the contraction")
    return n * U32 / (1.0 - n * U32)


def sum_radius(
    a: F64,
    b: F64,
    accumulator: Accumulator,
    roundings: int,
    least: tuple[F64 | float, F64 | float],
    total: F64 | None = None,
) -> F64:
    """The largest possible distance of the accumulated sum from A @ B^T, [..., rows of a, rows of
    b].

    ``roundings``: the number of roundings of scales, operands and products to fp32; ``least``: the
    smallest normal number of each row of a and of b; ``total``: |A||B|^T, if the caller has it
    already.

    Proof, with the products p of one element, S = sum |p| and T = (S + |sum p|) / 2, which no
    partial sum of any of them exceeds in magnitude. Numbers are truncated towards zero, so computed
    partial sums do not exceed T either (induction over steps). IEEE fp32: gamma_{K-1} S (Higham
    3.1).

    Otherwise a step truncates at the unit 2^(e - F), with e the largest exponent of its terms and F
    the number of fraction bits. The exponent of a product is the sum of its factors' exponents,
    where a subnormal factor has that of the smallest normal number: the unit is at most U = 2^-F
    max(M, T), with M the product of the largest magnitudes of both rows, each at least the row's
    smallest normal number. A product loses less than the unit, and no more than its own magnitude;
    the running sum loses a unit, and so does the result of the step: min(K U, S) + 2 U ceil(K /
    step) in all.

    Where sums are promoted after L products, T of such a run is at most L M, and the T of all runs
    add up to at most S: with J = ceil(K / L) runs, (L + 2 L / step) 2^-F min(J max(M, min(T, L M)),
    J M + S). The sums of runs and of splits are added in fp32: gamma of their number times S.
    """
    contracted = a.shape[-1]
    if total is None:
        total = np.abs(a) @ np.abs(b).swapaxes(-1, -2)
    slack = 1.0 + 2.0**-20  # float64's own error, 2^-53 K, is far below
    if accumulator.ieee:
        return np.asarray(gamma(contracted - 1 + roundings) * slack * total)
    if not accumulator.known:
        return np.full(total.shape, np.inf)
    cut = 2.0**-accumulator.fraction_bits
    largest_a, largest_b = _largest(np.abs(a), least[0]), _largest(np.abs(b), least[1])
    largest = largest_a[..., :, None] * largest_b[..., None, :]
    reach = (total + np.abs(a @ b.swapaxes(-1, -2))) / 2.0
    unit = cut * np.maximum(largest, reach)
    steps = math.ceil(contracted / accumulator.step)
    radius = np.minimum(contracted * unit, total) + 2 * steps * unit
    sums = math.ceil(contracted / accumulator.splits) if accumulator.splits else 0
    if accumulator.promotes:
        run = accumulator.promotes
        runs = math.ceil(contracted / run)
        each = np.maximum(largest, np.minimum(reach, run * largest))
        all_runs = np.minimum(runs * each, runs * largest + total)
        radius = np.minimum(radius, (run + 2 * run // accumulator.step) * cut * all_runs)
        sums += runs
    return np.asarray((radius + gamma(sums + roundings) * (total + radius)) * slack)


def _largest(size: F64, least: F64 | float) -> F64:
    """The largest magnitude of each row, but at least the row's smallest normal number."""
    return np.asarray(np.maximum(np.max(size, axis=-1, initial=0.0), least))
