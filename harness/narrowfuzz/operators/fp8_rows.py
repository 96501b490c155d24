"""Rows in FP8 with one scale each, as torchao's kernels for experts quantise them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import E4M3FN, F32, F64, decode
from narrowfuzz.numerics.plan import Fp32Scale, OperandPlan


def row_plan(*, power_of_two: bool) -> OperandPlan:
    return OperandPlan(E4M3FN, "row", 0, Fp32Scale(eps=1e-12, power_of_two=power_of_two))


@dataclass(frozen=True)
class Rows:
    """Rows that are quantised independently of one another.

    ``codes``: the codes as numbers; ``values``: the dequantised values, both [rows, K] in float64.
    For each row: ``scale``; ``unit``, the value that a code of 1 represents; ``nan``, whether the
    row contains NaN; ``scale_uncertain``, whether its scale may be another one.
    """

    codes: F64
    values: F64
    scale: F64
    unit: F64
    nan: NDArray[np.bool_]
    scale_uncertain: NDArray[np.bool_]


def quantised(x: F32, plan: OperandPlan) -> Rows:
    """Rows quantised by the plan, which preserves NaN, as torchao's references in torch do. The
    scale is uncertain for a row with an infinity, whose scale is 0, and just below a power of two,
    because the kernels round it by a logarithm."""
    found = reference.quantise(x, plan)
    assert found is not None
    scale = found.scale.astype(np.float64)
    other = reference.scale_as_built(found.amax, plan, "pow2_floor_by_log2")
    uncertain = np.asarray(np.isinf(x).any(1))
    if other is not None:
        uncertain |= (np.nan_to_num(other) != np.nan_to_num(scale))[:, 0]
    with np.errstate(all="ignore"):
        unit = 1.0 / scale[:, 0]
    nan = np.asarray(np.isnan(x).any(1))
    return Rows(decode(found.codes, E4M3FN), found.values, scale[:, 0], unit, nan, uncertain)


def without_nan(x: F32, plan: OperandPlan) -> Rows:
    """Rows quantised as the kernels do it: the amax ignores NaN. NaN times the scale is a GPU's own
    NaN, which is positive and which a clamp turns into the largest number."""
    hidden = np.isnan(x)
    rows = quantised(np.where(hidden, np.float32(0.0), x), plan)
    codes = np.where(hidden, E4M3FN.max, rows.codes)
    with np.errstate(all="ignore"):
        return replace(rows, codes=codes, values=codes * rows.unit[:, None])
