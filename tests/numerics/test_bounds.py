"""Each proven bound has a test that tries to break it and one that shows it says something."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowfuzz.numerics import bounds, reference
from narrowfuzz.numerics.formats import E4M3FN, E5M2, F32, F64, Format
from narrowfuzz.numerics.plan import (
    HIGH_PRECISION,
    Fp32InverseScale,
    Fp32Scale,
    GemmPlan,
    MxScale,
    OperandPlan,
    Rounding,
)
from numpy.typing import NDArray

EXAMPLES = settings(max_examples=150, deadline=None, database=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
BF16 = ml_dtypes.bfloat16

PLANS = {
    "tensor": OperandPlan(E4M3FN, "tensor", 0, Fp32Scale(1e-12, False)),
    "tensor e5m2": OperandPlan(E5M2, "tensor", 0, Fp32Scale(1e-12, False)),
    "row": OperandPlan(E4M3FN, "row", 0, Fp32Scale(1e-12, True)),
    "row not pow2": OperandPlan(E4M3FN, "row", 0, Fp32Scale(1e-12, False)),
    "block fp32": OperandPlan(E4M3FN, "block", 32, Fp32Scale(1e-12, False)),
    "tile": OperandPlan(E4M3FN, "tile", 4, Fp32Scale(1e-12, False)),
    "tile inverse": OperandPlan(E4M3FN, "tile", 4, Fp32InverseScale(1e-12, False)),
    "block floor": OperandPlan(E4M3FN, "block", 32, MxScale("floor", 247)),
    "block rceil": OperandPlan(E4M3FN, "block", 32, MxScale("rceil", 254)),
    "block even e5m2": OperandPlan(E5M2, "block", 32, MxScale("even", 254)),
}


def gemm(
    c: int = 0, *, rounding: tuple[Rounding, ...] = ("out",), kernel_rounds: bool = True
) -> GemmPlan:
    return GemmPlan(
        HIGH_PRECISION,
        HIGH_PRECISION,
        scale_roundings=c,
        rounding=rounding,
        kernel_rounds=kernel_rounds,
    )


# --- 3.1: one quantisation ------------------------------------------------------------------------


def midpoints(fmt: Format) -> F64:
    grid = np.unique(fmt.table[np.isfinite(fmt.table)])
    return (grid[:-1] + grid[1:]) / 2


def hostile(rng: np.random.Generator, kind: str, rows: int, plan: OperandPlan) -> F32:
    """Data that sits where a quantiser errs most."""
    shape = (rows, 64)
    assert plan.format is not None
    if kind == "ties":  # multiples of the format's midpoints, a few fp32 ulps off
        x = rng.choice(midpoints(plan.format), size=shape) * 2.0 ** rng.integers(-20, 20)
        x[:, ::32] = plan.format.max * 2.0 ** rng.integers(-20, 20)
    elif kind == "unaligned ties":  # the scale itself has 24 bits: ties after the product
        amax = np.float32(rng.uniform(1, 2))
        s = np.float32(plan.format.max / float(amax))
        x = rng.choice(midpoints(plan.format), size=shape) / s
        x[:, ::32] = amax
    elif kind == "tiny":
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-149, -30, size=(rows, 1))
    elif kind == "huge":
        x = rng.uniform(-1, 1, size=shape) * 3.4e38
    else:
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-30, 8, size=shape)
    bits = x.astype(np.float32).view(np.int32)
    moved = (bits + rng.integers(-2, 3, size=shape, dtype=np.int32)).view(np.float32)
    return np.where(np.isfinite(moved), moved, np.float32(1.0)).astype(np.float32)


KINDS = st.sampled_from(["ties", "unaligned ties", "tiny", "huge", "wide"])


@EXAMPLES
@given(st.sampled_from(sorted(PLANS)), KINDS, SEEDS)
def test_no_quantisation_errs_by_more_than_bound_3_1(name: str, kind: str, seed: int) -> None:
    plan = PLANS[name]
    x = hostile(np.random.default_rng(seed), kind, 4, plan)
    q = reference.quantise(x, plan)
    assert q is not None
    bound = bounds.quantise_bound(x, q.scale, plan)
    over = np.abs(q.values - x.astype(np.float64)) > bound
    assert not over.any(), (x[over][0], q.values[over][0], bound[over][0])


@EXAMPLES
@given(st.floats(2.0**-100, 2.0**100, width=32), KINDS, SEEDS)
def test_bound_3_1_holds_for_any_observed_scale(factor: float, kind: str, seed: int) -> None:
    # a stale or wrong scale saturates or underflows; the bound must know by how much
    plan = PLANS["row not pow2"]
    x = hostile(np.random.default_rng(seed), kind, 4, plan)
    scale = np.full((4, 1), factor, dtype=np.float32)
    values = reference.values(reference.codes(x, scale, plan), scale, plan)
    bound = bounds.quantise_bound(x, scale, plan)
    assert (np.abs(values - x.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("name", PLANS)
def test_bound_3_1_is_nearly_reached(name: str) -> None:
    plan, best = PLANS[name], 0.0
    for seed in range(20):
        for kind in ("ties", "unaligned ties", "wide"):
            x = hostile(np.random.default_rng(seed), kind, 4, plan)
            q = reference.quantise(x, plan)
            assert q is not None
            bound = bounds.quantise_bound(x, q.scale, plan)
            error = np.abs(q.values - x.astype(np.float64))
            best = max(best, float((error[bound > 0] / bound[bound > 0]).max()))
    assert 0.99 < best <= 1.0


def test_an_error_of_three_times_bound_3_1_is_rejected() -> None:
    plan = PLANS["row"]
    x = hostile(np.random.default_rng(0), "wide", 4, plan)
    q = reference.quantise(x, plan)
    assert q is not None
    bound, wide = bounds.quantise_bound(x, q.scale, plan), x.astype(np.float64)
    assert bounds.contains(wide - bound, wide + bound, q.values).all()
    assert not bounds.contains(wide - bound, wide + bound, wide + 3 * bound).any()


# --- 3.2: accumulation ----------------------------------------------------------------------------


def sequential(p: F32) -> F32:
    total = np.zeros(p.shape[:-1], dtype=np.float32)
    for j in range(p.shape[-1]):
        total = total + p[..., j]
    return total


def pairwise(p: F32) -> F32:
    while p.shape[-1] > 1:
        if p.shape[-1] % 2:
            p = np.concatenate([p, np.zeros_like(p[..., :1])], axis=-1)
        p = p[..., ::2] + p[..., 1::2]
    return p[..., 0]


def blocked(p: F32) -> F32:
    parts = [sequential(p[..., j : j + 8]) for j in range(0, p.shape[-1], 8)]
    return sequential(np.stack(parts, axis=-1))


def flushing(p: F32) -> F32:
    """As GPUs and VDPBF16PS may: no subnormal product and no subnormal sum survives."""

    def flush(x: F32) -> F32:
        return np.where(np.abs(x) < 2.0**-126, np.float32(0), x).astype(np.float32)

    total = np.zeros(p.shape[:-1], dtype=np.float32)
    for j in range(p.shape[-1]):
        total = flush(total + flush(p[..., j]))
    return total


ORDERS = {
    "sequential": sequential,
    "reversed": lambda p: sequential(p[..., ::-1]),
    "by magnitude": lambda p: sequential(np.sort(p, axis=-1)),
    "pairwise": pairwise,
    "blocked": blocked,
    "flushing": flushing,
}


def codes_like(rng: np.random.Generator, kind: str, rows: int, k: int, fmt: Format) -> F64:
    """Elements as a kernel sees them: values of ``fmt``."""
    positive = fmt.table[: 1 << (fmt.bits - 1)]
    grid = positive[np.isfinite(positive)]
    if kind == "maxima":
        return np.full((rows, k), fmt.max)
    if kind == "growing":  # every addition rounds, all in one direction
        return np.broadcast_to(np.sort(rng.choice(grid, size=k)), (rows, k)).copy()
    x = rng.choice(grid, size=(rows, k))
    if kind == "cancelling":  # the sum is far smaller than what was added up
        x[:, k // 2 :] = -x[:, : k - k // 2][:, ::-1]
        return x
    return x * rng.choice([-1.0, 1.0], size=x.shape)


SHAPES = st.sampled_from([1, 2, 3, 8, 31, 64, 160])
CODES = st.sampled_from(["random", "maxima", "growing", "cancelling"])
FORMATS8 = st.sampled_from([E4M3FN, E5M2])


@EXAMPLES
@given(CODES, SHAPES, FORMATS8, st.sampled_from([0, -40, -70, 40]), SEEDS)
def test_no_order_of_fp32_additions_leaves_bound_3_2(
    kind: str, k: int, fmt: Format, exponent: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scale = 2.0**exponent  # -70 twice puts products among and below fp32's subnormals
    a = codes_like(rng, kind, 3, k, fmt) * scale
    b = codes_like(rng, "random" if kind == "cancelling" else kind, 2, k, E4M3FN) * scale
    centre, radius = a @ b.T, bounds.gemm_radius(a, b, gemm())
    with np.errstate(under="ignore"):
        products = (a[:, None, :] * b[None, :, :]).astype(np.float32)
        for order, add in ORDERS.items():
            got = add(products)
            ok = bounds.contains(centre - radius, centre + radius, got.astype(np.float64))
            assert ok.all(), order


def unit_scaled(qa: F64, qb: F64, sa: np.float32, sb: np.float32) -> F32:
    """As torch._scaled_mm: codes are multiplied, fp32 reciprocals applied to the sum (c = 4)."""
    acc = sequential((qa[:, None, :] * qb[None, :, :]).astype(np.float32))
    return (acc * (np.float32(1) / sa)) * (np.float32(1) / sb)


def dequantised(qa: F64, qb: F64, sa: np.float32, sb: np.float32) -> F32:
    """As torchao's emulation: fp32 quotients, fp32 products (c = 3)."""
    a, b = qa.astype(np.float32) / sa, qb.astype(np.float32) / sb
    return sequential(a[:, None, :] * b[None, :, :])


@EXAMPLES
@given(CODES, SHAPES, st.sampled_from([3, 4]), SEEDS)
def test_rounded_scales_stay_within_bound_3_2(kind: str, k: int, c: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    qa, qb = codes_like(rng, kind, 3, k, E5M2), codes_like(rng, "random", 2, k, E4M3FN)
    sa, sb = rng.uniform(1e-3, 1e3, size=2).astype(np.float32)
    a, b = qa / np.float64(sa), qb / np.float64(sb)
    centre, radius = a @ b.T, bounds.gemm_radius(a, b, gemm(c))
    got = (unit_scaled if c == 4 else dequantised)(qa, qb, sa, sb)
    assert bounds.contains(centre - radius, centre + radius, got.astype(np.float64)).all()


def block_scaled(qa: F64, qb: F64, ia: F32, ib: F32, *, merged: bool) -> F32:
    """As blockwise kernels: each block's sum of codes is scaled, then added (ia, ib: fp32 1/s)."""
    total = np.zeros((len(qa), len(qb)), dtype=np.float32)
    for j in range(ia.shape[1]):
        run = slice(16 * j, 16 * j + 16)
        part = sequential((qa[:, None, run] * qb[None, :, run]).astype(np.float32))
        x, y = ia[:, None, j], ib[None, :, j]
        total = total + (part * (x * y) if merged else (part * x) * y)
    return total


def block_scaled_case(kind: str, exponent: int, seed: int, merged: bool) -> tuple[F64, F64, F32]:
    """(exact, bound 3.2, kernel's result) of 4 blocks of 16 whose fp32 scales have 24 bits."""
    rng = np.random.default_rng(seed)
    qa, qb = codes_like(rng, kind, 3, 64, E4M3FN), codes_like(rng, "random", 2, 64, E4M3FN)
    sa, sb = (
        (rng.uniform(1, 2, size=(n, 4)) * 2.0 ** (exponent + rng.integers(-9, 9, size=(n, 4))))
        for n in (3, 2)
    )
    ia, ib = (np.float32(1) / s.astype(np.float32) for s in (sa, sb))
    a = qa / np.repeat(sa.astype(np.float32).astype(np.float64), 16, axis=1)
    b = qb / np.repeat(sb.astype(np.float32).astype(np.float64), 16, axis=1)
    return a @ b.T, bounds.gemm_radius(a, b, gemm(4)), block_scaled(qa, qb, ia, ib, merged=merged)


@EXAMPLES
@given(CODES, st.sampled_from([0, 40, 70, 76, -20]), SEEDS, st.booleans())
def test_block_scales_stay_within_bound_3_2(
    kind: str, exponent: int, seed: int, merged: bool
) -> None:
    exact, radius, got = block_scaled_case(kind, exponent, seed, merged)
    assert bounds.contains(exact - radius, exact + radius, got.astype(np.float64)).all()


def test_bound_3_2_is_used_by_block_scales() -> None:
    used = []
    for seed in range(20):
        exact, radius, got = block_scaled_case("growing", 0, seed, True)
        used.append(float((np.abs(got - exact) / radius).max()))
    assert 1e-2 < max(used) <= 1.0


def test_bound_3_2_is_nearly_reached_by_one_tie() -> None:
    a, b = np.array([[1.0, 1.0]]), np.array([[1.0, 2.0**-24]])
    error = abs(float(np.float32(1) + np.float32(2.0**-24)) - (a @ b.T)[0, 0])
    assert 0.99 < error / bounds.gemm_radius(a, b, gemm())[0, 0] <= 1.0


def test_bound_3_2_is_used_by_ordinary_sums() -> None:
    rng = np.random.default_rng(0)
    a, b = codes_like(rng, "random", 8, 64, E4M3FN), codes_like(rng, "random", 8, 64, E4M3FN)
    a, b = np.abs(a) * 1.1, np.abs(b) / 1.1  # off the grid, so that additions round
    a, b = a.astype(BF16).astype(np.float64), b.astype(BF16).astype(np.float64)
    got = sequential((a[:, None, :] * b[None, :, :]).astype(np.float32))
    used = np.abs(got - a @ b.T) / bounds.gemm_radius(a, b, gemm())
    assert 1e-3 < used.max() <= 1.0


def test_an_error_of_three_times_bound_3_2_is_rejected() -> None:
    rng = np.random.default_rng(1)
    a, b = codes_like(rng, "random", 8, 64, E4M3FN), codes_like(rng, "random", 8, 64, E4M3FN)
    centre, radius = a @ b.T, bounds.gemm_radius(a, b, gemm())
    assert not bounds.contains(centre - radius, centre + radius, centre + 3 * radius).any()
    # and in absolute terms: losing one product of ordinary size is seen in every element
    a[:, 0] = b[:, 0] = 16.0
    centre, radius = a @ b.T, bounds.gemm_radius(a, b, gemm())
    assert not bounds.contains(centre - radius, centre + radius, centre - 256.0).any()


def test_bound_3_2_of_an_empty_contraction_is_zero() -> None:
    radius = bounds.gemm_radius(np.zeros((2, 0)), np.zeros((3, 0)), gemm())
    assert radius.shape == (2, 3) and (radius == 0).all()


def test_gamma_grows_from_zero_and_refuses_where_it_says_nothing() -> None:
    u = 2.0**-24
    assert bounds.gamma(-1) == bounds.gamma(0) == 0.0
    assert bounds.gamma(1) == u / (1 - u)
    with pytest.raises(ValueError, match="split the contraction"):
        bounds.gamma(1 << 24)


# --- 3.3: the whole layer -------------------------------------------------------------------------


def layer(name: str, kind: str, seed: int) -> tuple[F64, F64, F32]:
    """(exact product, bound 3.3, what a quantised fp32 layer returns) for one hostile pair."""
    plan, rng = PLANS[name], np.random.default_rng(seed)
    a, b = hostile(rng, kind, 4, plan), hostile(rng, "wide", 4, plan)
    qa, qb = reference.quantise(a, plan), reference.quantise(b, plan)
    assert qa is not None and qb is not None
    bound_a = bounds.quantise_bound(a, qa.scale, plan)
    bound_b = bounds.quantise_bound(b, qb.scale, plan)
    radius = bounds.layer_radius(a, b, bound_a, bound_b, gemm(3))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    with np.errstate(over="ignore"):
        wide_a, wide_b = qa.values.astype(np.float32), qb.values.astype(np.float32)
        got = sequential(wide_a[:, None, :] * wide_b[None, :, :])
    return exact, radius, got


@EXAMPLES
@given(
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(["ties", "unaligned ties", "tiny", "wide"]),  # "huge" overflows fp32 sums
    SEEDS,
)
def test_no_layer_leaves_bound_3_3(name: str, kind: str, seed: int) -> None:
    exact, radius, got = layer(name, kind, seed)
    assert bounds.contains(exact - radius, exact + radius, got.astype(np.float64)).all()


@pytest.mark.parametrize("name", PLANS)
def test_bound_3_3_is_used_and_rejects_three_times_itself(name: str) -> None:
    used = []
    for seed in range(10):
        exact, radius, got = layer(name, "ties", seed)
        used.append(float((np.abs(got - exact) / radius).max()))
        assert not bounds.contains(exact - radius, exact + radius, exact + 3 * radius).any()
    assert 1e-2 < max(used) <= 1.0


# --- interval: from the accumulator to what the layer returns -------------------------------------


def out(x: NDArray[np.float32], dtype: str) -> F32:
    return x.astype(BF16).astype(np.float32) if dtype == "bf16" else x


def rounding_chain(acc: F32, steps: tuple[Rounding, ...], dtype: str) -> F32:
    for step in steps:
        acc = out(acc, "bf16" if step == "bf16" else dtype)
    return acc


ROUNDINGS: tuple[tuple[Rounding, ...], ...] = ((), ("out",), ("bf16", "out"))
DTYPES = st.sampled_from(["bf16", "fp32"])


def near_bf16_ties(rng: np.random.Generator, size: int) -> F32:
    """fp32 values on, and a few ulps off, the midpoints of bf16, over a few binades."""
    bits = (rng.integers(0x3F00, 0x4180, size=size) << 16) | 0x8000
    x = (bits + rng.integers(-2, 3, size=size)).astype(np.uint32).view(np.float32)
    return x * rng.choice(np.float32([-1, 1]), size=size)


def near_accumulators(seed: int, ulps: int) -> tuple[F32, F64, F64]:
    """(accumulator, centre, radius) with the accumulator inside centre +- radius."""
    rng = np.random.default_rng(seed)
    acc = near_bf16_ties(rng, 256)
    radius = ulps * np.abs(acc.astype(np.float64)) * 2.0**-23
    return acc, acc + rng.uniform(-0.99, 0.99, size=256) * radius, radius


@EXAMPLES
@given(SEEDS, st.sampled_from([0, 1, 3, 1000]), st.sampled_from(ROUNDINGS), DTYPES)
def test_interval_contains_every_rounding_chain(
    seed: int, ulps: int, steps: tuple[Rounding, ...], dtype: str
) -> None:
    acc, centre, radius = near_accumulators(seed, ulps)
    lo, hi = bounds.interval(centre, radius, gemm(rounding=steps), dtype)
    got = out(rounding_chain(acc, steps, dtype), dtype)
    assert bounds.contains(lo, hi, got).all()


@EXAMPLES
@given(SEEDS, st.sampled_from([0, 1, 3]), DTYPES)
def test_interval_contains_a_bias_added_after_the_rounding(
    seed: int, ulps: int, dtype: str
) -> None:
    acc, centre, radius = near_accumulators(seed, ulps)
    bias = out(near_bf16_ties(np.random.default_rng(seed + 1), 256), dtype)
    lo, hi = bounds.interval(centre, radius, gemm(), dtype, bias=bias)
    assert bounds.contains(lo, hi, out(out(acc, dtype) + bias, dtype)).all()


@EXAMPLES
@given(SEEDS, st.sampled_from([0, 1, 3]), DTYPES)
def test_interval_contains_a_bias_added_in_the_epilogue(seed: int, ulps: int, dtype: str) -> None:
    # the epilogue's addition is fp32: it rounds before the output does, which shows on a bf16 tie
    acc, centre, radius = near_accumulators(seed, ulps)
    bias = out(near_bf16_ties(np.random.default_rng(seed + 1), 256), dtype)
    lo, hi = bounds.interval(centre, radius, bounds.unrounded(gemm()), dtype, bias=bias)
    got = out(acc + bias, dtype)
    bad = ~bounds.contains(lo, hi, got)
    assert not bad.any(), (acc[bad][0], bias[bad][0], got[bad][0], lo[bad][0], hi[bad][0])


def test_a_fused_bias_on_a_bf16_tie_is_allowed_as_torch_computes_it() -> None:
    # measured: torch 2.13 CPU, F.linear in bf16 with these numbers returns 2.0
    a, b = np.array([[7.0, 2.0**-10]]), np.array([[37 / 256, 2.0**-13]])
    bias = np.float32([255 / 256])
    acc = np.float32(7 * 37 / 256) + np.float32(2.0**-23)
    got = out(np.float32([[acc]]) + bias, "bf16")
    assert got[0, 0] == 2.0
    centre, radius = a @ b.T, bounds.gemm_radius(a, b, gemm())
    separate = bounds.interval(centre, radius, gemm(), "bf16", bias=bias)
    fused = bounds.interval(centre, radius, bounds.unrounded(gemm()), "bf16", bias=bias)
    lo, hi = np.minimum(separate[0], fused[0]), np.maximum(separate[1], fused[1])
    assert bounds.contains(lo, hi, got).all(), (lo, hi)


@pytest.mark.parametrize("order", ["sequential", "reversed", "blocked"])
def test_a_bias_inside_the_accumulation_is_one_more_contracted_column(order: str) -> None:
    # beta = 1 kernels start from the bias, and split-K ones add it between two panels
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 160)), rng.normal(size=(8, 160))
    a, b = a.astype(BF16).astype(np.float64), b.astype(BF16).astype(np.float64)
    bias = (rng.normal(size=8) * 1e6).astype(np.float32).astype(np.float64)
    wide_a, wide_b = np.c_[np.ones(8), a], np.c_[bias, b]
    centre, radius = wide_a @ wide_b.T, bounds.gemm_radius(wide_a, wide_b, gemm())
    products = (wide_a[:, None, :] * wide_b[None, :, :]).astype(np.float32)
    got = ORDERS[order](products).astype(np.float64)
    assert bounds.contains(centre - radius, centre + radius, got).all()


@EXAMPLES
@given(SEEDS, st.sampled_from([0, 3]), st.booleans(), st.booleans())
def test_interval_contains_both_outcomes_where_a_rounding_may_be_elided(
    seed: int, ulps: int, kernel_rounds: bool, with_bias: bool
) -> None:
    acc, centre, radius = near_accumulators(seed, ulps)
    steps: tuple[Rounding, ...] = ("bf16", "out")
    bias = out(near_bf16_ties(np.random.default_rng(seed + 1), 256), "bf16") if with_bias else None
    plan = gemm(rounding=steps, kernel_rounds=kernel_rounds)
    kept = steps[:1] if kernel_rounds else ()
    lo, hi = bounds.interval(centre, radius, plan, "bf16", bias=bias, may_elide=True)
    for done in (steps, kept):
        got = rounding_chain(acc, done, "bf16")
        got = out(got if bias is None else got + bias, "bf16")
        assert bounds.contains(lo, hi, got).all(), done


def test_a_rounding_that_may_not_be_elided_is_demanded() -> None:
    # fp32 layer behind a bf16 kernel: 1 + 2^-9 must come out as 1
    centre, plan = np.array([[1 + 2.0**-9]]), gemm(rounding=("bf16", "out"), kernel_rounds=False)
    strict = bounds.interval(centre, 0.0, plan, "fp32")
    loose = bounds.interval(centre, 0.0, plan, "fp32", may_elide=True)
    assert not bounds.contains(*strict, centre).any()
    assert bounds.contains(*loose, centre).all()
    assert bounds.contains(*loose, np.array([[1.0]])).all()
    # and a kernel's own rounding stays demanded even then
    own = bounds.interval(centre, 0.0, gemm(rounding=("bf16", "out")), "fp32", may_elide=True)
    assert not bounds.contains(*own, centre).any()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_with_radius_zero_the_interval_is_one_value(dtype: str) -> None:
    acc = near_bf16_ties(np.random.default_rng(0), 256)
    lo, hi = bounds.interval(acc.astype(np.float64), 0.0, gemm(), dtype)
    assert np.array_equal(lo, hi) and np.array_equal(lo, out(acc, dtype))
    step = 2.0**-8 if dtype == "bf16" else 2.0**-24  # at most half a step of the output format
    assert not bounds.contains(lo, hi, lo + np.abs(lo) * step).any()


def test_an_error_of_a_few_radii_leaves_the_interval() -> None:
    rng = np.random.default_rng(2)
    centre = rng.normal(size=(16, 16))
    radius = np.full(centre.shape, 2.0**-12)
    lo, hi = bounds.interval(centre, radius, gemm(), "fp32")
    assert bounds.contains(lo, hi, (centre + 0.9 * radius).astype(np.float32)).all()
    assert not bounds.contains(lo, hi, (centre + 3 * radius).astype(np.float32)).any()
    assert not bounds.contains(lo, hi, (centre - 3 * radius).astype(np.float32)).any()


def test_bf16_before_scaling_neither_overflows_nor_goes_subnormal() -> None:
    # its exponent range is not bf16's: what scales bring back in range must not be lost before
    centre = np.array([[(1 + 2.0**-9) * 2.0**-140, (1 + 2.0**-9) * 2.0**130]])
    lo, hi = bounds.interval(centre, 0.0, gemm(rounding=("bf16",)), "fp32")
    assert lo.tolist() == hi.tolist() == [[2.0**-140, np.inf]]


def test_a_nan_is_never_contained() -> None:
    one, nan = np.array([1.0]), np.array([np.nan])
    for triple in ((nan, one, one), (one, nan, one), (one, one, nan)):
        assert not bounds.contains(*triple).any()


def test_results_past_the_maximum_may_be_infinite_and_nothing_less() -> None:
    centre = np.array([[3.5e38, -3.5e38]])
    lo, hi = bounds.interval(centre, 0.0, gemm(), "bf16")
    assert bounds.contains(lo, hi, np.array([[np.inf, -np.inf]])).all()
    assert not bounds.contains(lo, hi, np.array([[3.38e38, -3.38e38]])).any()
