"""Hypothesis strategies for Specs and DataSpecs.

A Spec is drawn rarely (it is built, maybe compiled), its DataSpecs often. Sizes are "multiple of q
plus remainder", so aligned and misaligned dimensions both occur; deliberate nastiness
(misalignment, empty dimensions, spikes) sits behind a branch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@st.composite
def sizes(draw: st.DrawFn, alignment: int, *, aligned: bool, largest: int) -> int:
    """A dimension: q * multiple (+ remainder where ``aligned`` is False)."""
    q = draw(st.sampled_from([alignment, 32, 128] if largest >= 128 else [alignment, 32]))
    multiple = draw(st.integers(1, max(1, largest // q)))
    if aligned:
        return q * multiple
    remainder = draw(st.sampled_from([1, 0, 2, 7, 8, 15, 17, 31]))
    return q * draw(st.sampled_from([0, 1, multiple])) + remainder


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
    recipe = draw(st.sampled_from(list(recipes)))
    misalign = wild_shapes and draw(st.sampled_from([False, False, True]))
    dims: dict[str, Any] = {}
    for name in ("m", "k", "n"):
        off = misalign and draw(st.booleans())
        dims[name] = draw(sizes(recipe.alignment, aligned=not off, largest=largest))
    if misalign and draw(st.sampled_from([False, False, True])):
        dims[draw(st.sampled_from(["m", "m", "k", "n"]))] = draw(st.sampled_from([1, 0, 1]))
    batch = draw(st.sampled_from([0, 0, 2, 3]))
    if batch and recipe.alignment == 32 and not misalign and dims["m"] > 32:
        dims["m"] //= 2
        dims["m"] -= dims["m"] % (16 if batch == 2 else 32)
    return Spec(
        recipe=recipe.name,
        backend=draw(st.sampled_from(recipe.backends)),
        **dims,
        batch=batch,
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(recipe.dtypes)),
        input_layout=draw(st.sampled_from(["contiguous", "contiguous", "transposed", "strided"])),
        grad_layout=draw(st.sampled_from(["contiguous", "contiguous", "transposed", "expanded"])),
        checkpoint=draw(st.sampled_from(["none", "none", "full", "reentrant"])),
        compile=compile,
    )


@st.composite
def data_specs(draw: st.DrawFn) -> DataSpec:
    """Half lattice, half wild. Exponent windows stay where products neither over- nor underflow."""
    seed = draw(st.integers(0, 2**32 - 1))
    exponents: dict[str, Any] = {
        f"{name}_exponent": draw(st.sampled_from([0, 0, 1, -3, 7, -9]))
        for name in ("input", "weight", "grad")
    }
    if draw(st.booleans()):
        return DataSpec(regime="lattice", seed=seed, **exponents)
    values = draw(st.sampled_from(WILD))
    if values in ("near_max", "subnormal"):
        exponents = {}
    spikes: tuple[Spike, ...] = ()
    if values == "inf_nan":
        spikes = (draw(_spikes(SPECIAL)), *draw(st.lists(_spikes(), max_size=2)))
    elif draw(st.sampled_from([False] * 4 + [True])):
        spikes = tuple(draw(st.lists(_spikes(), min_size=1, max_size=3)))
    return DataSpec(regime="wild", values=values, seed=seed, spikes=spikes, **exponents)


@st.composite
def _spikes(draw: st.DrawFn, patterns: Sequence[str] = SPIKES) -> Spike:
    return Spike(
        draw(st.sampled_from(["input", "weight", "grad_output", "bias"])),
        draw(st.integers(0, 255)),
        draw(st.integers(0, 255)),
        draw(st.sampled_from(patterns)),
    )


@st.composite
def cases(
    draw: st.DrawFn, recipes: Sequence[Recipe], *, compile: Compile = "none", largest: int = 64
) -> Case:
    """One Spec with one DataSpec, for property tests."""
    return Case(
        spec=draw(specs(recipes, compile=compile, largest=largest)), data=draw(data_specs())
    )


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
    wild_shapes = compile == "none" or draw(st.sampled_from([False, False, True]))
    spec = draw(specs(recipes, compile=compile, largest=largest, wild_shapes=wild_shapes))
    data = draw(st.lists(data_specs(), min_size=draws, max_size=draws))
    return tuple(Case(spec=spec, data=d) for d in data)
