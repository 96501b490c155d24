"""Hypothesis strategies for Specs and DataSpecs.

A Spec is drawn rarely (it is built, maybe compiled), its DataSpecs often. Sizes are "multiple of q
plus remainder", so aligned and misaligned dimensions both occur; deliberate nastiness
(misalignment, empty dimensions, spikes) sits behind a branch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from hypothesis import strategies as st

from harness.case import Case, Compile, DataSpec, Spec, Spike, ValueClass
from harness.recipe import Recipe

WILD: tuple[ValueClass, ...] = (
    "gaussian",
    "outlier",
    "heavy_tail",
    "zero_rows",
    "binade_edges",
    "near_max",
    "subnormal",
    "inf_nan",
)

#: fp32 patterns worth planting: Inf, NaN, extremes, and neighbours of 448 and of powers of two,
#: torchao's EPS and far below it, and 2^80 (two of them overflow as a product).
SPIKES = (
    "0x7f800000", "0xff800000", "0x7fc00000",
    "0x7f7fffff", "0x7f7f0000", "0xff7f0000", "0x00000001", "0x00800000", "0x80000000",
    "0x43e00000", "0x43e00001", "0x43e80000", "0x43f00000", "0x3f7fffff", "0x3f800001",
    "0x2b8cbccc", "0x1e3ce508", "0x67800000", "0xe7000000",
)  # fmt: skip


SPECIAL = SPIKES[:3]


@lru_cache(maxsize=None, typed=True)  # 0 and False are different choices
def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """sampled_from, built once: building strategies costs more than drawing from them."""
    return st.sampled_from(values)


@cache
def between(low: int, high: int) -> st.SearchStrategy[int]:
    """integers, built once."""
    return st.integers(low, high)


@st.composite
def sizes(draw: st.DrawFn, alignment: int, *, aligned: bool, largest: int) -> int:
    """A dimension: q * multiple (+ remainder where ``aligned`` is False)."""
    q = draw(one_of(alignment, 32, *([128] if largest >= 128 else [])))
    multiple = draw(between(1, max(1, largest // q)))
    if aligned:
        return q * multiple
    remainder = draw(one_of(1, 0, 2, 7, 8, 15, 17, 31))
    return q * draw(one_of(0, 1, multiple)) + remainder


@cache
def _sizes(alignment: int, aligned: bool, largest: int) -> st.SearchStrategy[int]:
    return sizes(alignment, aligned=aligned, largest=largest)


@st.composite
def specs(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    compile: Compile = "none",
    largest: int = 128,
    wild_shapes: bool = True,
) -> Spec:
    """A Spec of one of ``recipes``. ``wild_shapes`` allows misaligned and empty dimensions."""
    recipe = draw(one_of(*recipes))
    misalign = wild_shapes and draw(one_of(False, False, True))
    dims: dict[str, Any] = {}
    for name in ("m", "k", "n"):
        off = misalign and draw(one_of(False, True))
        dims[name] = draw(_sizes(recipe.alignment, not off, largest))
    if misalign and draw(one_of(False, False, True)):
        dims[draw(one_of("m", "m", "k", "n"))] = draw(one_of(1, 0, 1))
    batch = draw(one_of(0, 0, 2, 3))
    if batch and recipe.alignment == 32 and not misalign and dims["m"] > 32:
        dims["m"] //= 2
        dims["m"] -= dims["m"] % (16 if batch == 2 else 32)
    return Spec(
        recipe=recipe.name,
        backend=draw(one_of(*recipe.backends)),
        **dims,
        batch=batch,
        bias=draw(one_of(False, True)),
        dtype=draw(one_of(*recipe.dtypes)),
        input_layout=draw(one_of("contiguous", "contiguous", "transposed", "strided")),
        grad_layout=draw(one_of("contiguous", "contiguous", "transposed", "expanded")),
        checkpoint=draw(one_of("none", "none", "full", "reentrant")),
        compile=compile,
    )


@st.composite
def _spikes(draw: st.DrawFn, patterns: Sequence[str] = SPIKES) -> Spike:
    return Spike(
        draw(one_of("input", "weight", "grad_output", "bias")),
        draw(between(0, 255)),
        draw(between(0, 255)),
        draw(one_of(*patterns)),
    )


_UP_TO_TWO_SPIKES = st.lists(_spikes(), max_size=2)
_SPIKES = st.lists(_spikes(), min_size=1, max_size=3)
_SPECIAL_SPIKE = _spikes(SPECIAL)


@st.composite
def data_specs(draw: st.DrawFn) -> DataSpec:
    """Half lattice, half wild. Exponent windows stay where products neither over- nor underflow."""
    seed = draw(between(0, 2**32 - 1))
    exponents: dict[str, Any] = {
        f"{name}_exponent": draw(one_of(0, 0, 1, -3, 7, -9)) for name in ("input", "weight", "grad")
    }
    if draw(one_of(False, True)):
        return DataSpec(regime="lattice", seed=seed, **exponents)
    values = draw(one_of(*WILD))
    if values in ("near_max", "subnormal"):
        exponents = {}
    spikes: tuple[Spike, ...] = ()
    if values == "inf_nan":
        spikes = (draw(_SPECIAL_SPIKE), *draw(_UP_TO_TWO_SPIKES))
    elif draw(one_of(False, False, False, False, True)):
        spikes = tuple(draw(_SPIKES))
    return DataSpec(regime="wild", values=values, seed=seed, spikes=spikes, **exponents)


_DATA = data_specs()


@cache
def _data_lists(draws: int) -> st.SearchStrategy[list[DataSpec]]:
    return st.lists(_DATA, min_size=draws, max_size=draws)


@st.composite
def cases(
    draw: st.DrawFn, recipes: Sequence[Recipe], *, compile: Compile = "none", largest: int = 64
) -> Case:
    """One Spec with one DataSpec, for property tests."""
    return Case(spec=draw(specs(recipes, compile=compile, largest=largest)), data=draw(_DATA))


@st.composite
def batches(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    compile: Compile = "none",
    draws: int = 16,
    largest: int = 128,
) -> tuple[Case, ...]:
    """One Spec with several DataSpecs, for campaigns."""
    wild_shapes = compile == "none" or draw(one_of(False, False, True))
    spec = draw(specs(recipes, compile=compile, largest=largest, wild_shapes=wild_shapes))
    data = draw(_data_lists(draws))
    return tuple(Case(spec=spec, data=d) for d in data)
