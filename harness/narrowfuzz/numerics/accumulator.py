"""How a multiply adds: accumulators of CPUs and tensor cores, and how far each may be from the sum.

A tensor core adds a step of products and the sum so far at once: it aligns them to the largest of
their exponents, cuts what lies below so many fraction bits, adds what is left exactly and cuts the
result. How products are shared out among steps, in which order steps come, and whether K is split
is the kernel's choice, so no bound here rests on it. Where it is known, ``outcomes`` says to the
bit what may come out.

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
    #: Products that are added to the sum at once.
    step: int = 1
    #: Bits that are kept behind the leading one: of a step's largest term, and of its sum.
    fraction_bits: int = 23
    rounding: Literal["nearest", "truncate"] = "nearest"
    #: After so many products the sum goes to one in fp32; 0: it never does.
    promotes: int = 0
    #: K may be split after every so many products, the parts' sums added in fp32; 0: it is not.
    splits: int = 0
    #: Steps, runs between promotions and tiles are neighbouring products, and nothing else is cut:
    #: what it returns is known to the bit (``outcomes``), not only how far off it may be.
    to_the_bit: bool = False

    def __post_init__(self) -> None:
        assert self.step >= 1
        assert self.ieee or self.rounding == "truncate"
        assert not self.promotes or self.promotes % self.step == 0
        assert not self.splits or self.splits % self.step == 0
        assert not self.promotes or self.splits % self.promotes == 0

    @property
    def ieee(self) -> bool:
        """Every addition is fp32's."""
        return (self.step, self.fraction_bits, self.rounding) == (1, 23, "nearest")

    @property
    def known(self) -> bool:
        """Something can be said of its sums."""
        return self.fraction_bits > 0

    @property
    def exact_below(self) -> float:
        """Sums of multiples of a unit are exact while all stay below so many units."""
        return 2.0 ** (self.fraction_bits + 1) if self.known else 0.0


FP32 = Accumulator("fp32")
#: Nothing is claimed of what it adds: every radius is infinite, no sum is exact.
UNKNOWN = Accumulator("unknown", fraction_bits=-1, rounding="truncate")
#: FP8 on Hopper's tensor cores: https://github.com/pytorch/pytorch/issues/147971.
HOPPER_FP8_FAST = Accumulator("hopper fp8, fast", 32, 13, "truncate", splits=128, to_the_bit=True)
HOPPER_FP8 = Accumulator(
    "hopper fp8", 32, 13, "truncate", promotes=128, splits=128, to_the_bit=True
)
#: bf16 and fp16 on tensor cores: aligned with more bits than fp32 has, then cut to fp32.
TENSOR_CORE_16 = Accumulator("tensor core, 16 bits", 16, 23, "truncate", splits=16)

#: What a device multiplies -> how it adds. "fp8 fast": fast accumulation is asked for.
Accumulators = Mapping[str, Accumulator]
_EVERY = ("fp32", "bf16", "fp16", "fp8", "fp8 fast", "mxfp8", "fp4")
CPU: Accumulators = dict.fromkeys((*_EVERY, *(f"attention {n}" for n in _EVERY[:3])), FP32)
HOPPER: Accumulators = {
    "fp32": FP32,
    "bf16": TENSOR_CORE_16,
    "fp16": TENSOR_CORE_16,
    "fp8": HOPPER_FP8,
    "fp8 fast": HOPPER_FP8_FAST,
    # of fp32 attention it is not known what multiplies
    "attention bf16": TENSOR_CORE_16,
    "attention fp16": TENSOR_CORE_16,
}
#: Of any other GPU it is known that fp32 is fp32's, where TF32 is off.
UNKNOWN_DEVICE: Accumulators = {"fp32": FP32}


@dataclass(frozen=True)
class Found:
    """What one kind of multiply showed. ``problem``: why it showed nothing."""

    #: Bits kept behind the leading one, and what becomes of those behind them.
    fraction_bits: int = 0
    nearest: bool = False
    #: The first distance along K, a multiple of 16, at which a sum no longer meets the first one in
    #: the accumulator; 0: it does up to 4096; None: results have no room to show it.
    apart: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"not measured: {self.problem}"
        cut = "rounded" if self.nearest else "cut"
        apart = f", in fp32 after {self.apart}" if self.apart else ""
        return f"{self.fraction_bits} fraction bits, {cut}{apart}"


def disagrees(expected: Accumulator, seen: Found) -> str:
    """How a device that was seen to add like this leaves what is expected of it, "" if it does
    not."""
    if seen.problem or not expected.known:
        return ""
    if seen.fraction_bits < expected.fraction_bits:
        return f"{seen.fraction_bits} fraction bits, {expected.fraction_bits} expected"
    if expected.rounding == "nearest" and not seen.nearest:
        return "cuts, rounding to nearest expected"
    if expected.promotes and seen.apart is not None and not _promotes(expected, seen):
        return f"meets fp32 after {seen.apart or 'more than 4096'}, {expected.promotes} expected"
    return ""


def _promotes(expected: Accumulator, seen: Found) -> bool:
    return seen.apart is not None and 0 < seen.apart <= expected.promotes


def wider(expected: Accumulator, seen: Found) -> Accumulator:
    """``expected``, or where a device leaves that, what holds both: a bound, and no more. Nor is
    more known of what could not be measured."""
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


def reconciled(table: Accumulators, seen: Mapping[str, Found]) -> Accumulators:
    """The table's accumulators, each widened by what was seen of it; what has one scale a row may
    be another kernel's."""
    found = dict(table)
    for kind, one in seen.items():
        name = kind.replace(" rowwise", "")
        if name in found and not (one.problem and name != kind):  # then there are no such kernels
            found[name] = wider(found[name], one)
    return found


def gamma(n: int) -> float:
    """gamma_n = n u / (1 - n u); raises ValueError where n u >= 1 and the bound says nothing."""
    n = max(n, 0)
    if n * U32 >= 1.0:
        raise ValueError(f"{n} additions in fp32: the bound is void, split the contraction")
    return n * U32 / (1.0 - n * U32)


def sum_radius(
    a: F64,
    b: F64,
    accumulator: Accumulator,
    roundings: int,
    least: tuple[F64 | float, F64 | float],
    total: F64 | None = None,
) -> F64:
    """How far the accumulator may be from A @ B^T, [..., rows of a, rows of b]; ``roundings`` are
    those of scales, operands and products to fp32, ``least`` each row's smallest normal number,
    ``total`` |A||B|^T for who has it.

    Proof, with products p of one element, S = sum |p| and T = (S + |sum p|) / 2, which no partial
    sum of any of them exceeds. Numbers are cut towards zero, so that computed partial sums do not
    exceed T either (induction over steps). IEEE fp32: gamma_{K-1} S (Higham 3.1).

    Else a step cuts at the unit 2^(e - F), e the largest exponent of its terms. A product's
    exponent is the sum of its factors', a subnormal factor's that of the smallest normal: the unit
    is at most U = 2^-F max(M, T) with M the product of both rows' largest numbers, normal ones at
    least. A product loses less than the unit, and no more than itself; the sum so far loses a unit,
    and so does what the step leaves: min(K U, S) + 2 U ceil(K / step) in all.

    Where sums are promoted after L products, T of such a run is at most L M, and the runs' T add up
    to at most S: with J = ceil(K / L) runs (L + 2 L / step) 2^-F min(J max(M, min(T, L M)),
    J M + S). Sums of runs and of splits are added in fp32, gamma of their number times S.
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
    """Of each row the largest magnitude, at least the row's smallest normal number."""
    return np.asarray(np.maximum(np.max(size, axis=-1, initial=0.0), least))
