"""Hypothesis strategies for cases: a Spec with its data, or with a schedule.

A Spec is drawn rarely (it is built, maybe compiled), its DataSpecs often. Spikes sit behind a
branch of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case import Case, Compile, DataSpec, Spec, Spike, ValueClass
from narrowfuzz.choices import between, one_of
from narrowfuzz.recipe import Recipe
from narrowfuzz.schedule.draw import FACTORS as SCHEDULE_FACTORS
from narrowfuzz.schedule.draw import schedules
from narrowfuzz.specs import DIRECT, FACTORS, of_rung
from narrowfuzz.stateful import Stateful

WILD: tuple[ValueClass, ...] = (
    "gaussian",
    "outlier",
    "heavy_tail",
    "zero_rows",
    "binade_edges",
    "mined",
    "near_max",
    "scale_ends",
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
def data_specs(draw: st.DrawFn, *, lattice: bool = True) -> DataSpec:
    """Half lattice (where the model allows it), half wild. Exponent windows stay where products
    neither over- nor underflow."""
    seed = draw(between(0, 2**32 - 1))
    exponents: dict[str, Any] = {
        f"{name}_exponent": draw(one_of(0, 0, 1, -3, 7, -9)) for name in ("input", "weight", "grad")
    }
    if lattice and draw(one_of(False, True)):
        return DataSpec(regime="lattice", seed=seed, **exponents)
    values = draw(one_of(*WILD))
    if values in ("near_max", "scale_ends", "subnormal"):
        exponents = {}
    spikes: tuple[Spike, ...] = ()
    if values == "inf_nan":
        spikes = (draw(_SPECIAL_SPIKE), *draw(_UP_TO_TWO_SPIKES))
    elif draw(one_of(False, False, False, False, True)):
        spikes = tuple(draw(_SPIKES))
    return DataSpec(regime="wild", values=values, seed=seed, spikes=spikes, **exponents)


@cache
def _data(lattice: bool) -> st.SearchStrategy[DataSpec]:
    return data_specs(lattice=lattice)


@cache
def _data_lists(draws: int, lattice: bool) -> st.SearchStrategy[list[DataSpec]]:
    return st.lists(_data(lattice), min_size=draws, max_size=draws)


@st.composite
def cases(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    compile: Compile = "none",
    largest: int = 64,
    vary: frozenset[str] = FACTORS,
) -> Case:
    """One Spec with one DataSpec, for property tests."""
    spec = draw(of_rung(recipes, compile, largest=largest, vary=vary))
    return Case(spec=spec, data=draw(_data(spec.direct)))


def direct_cases(recipes: Sequence[Recipe], *, largest: int = 64) -> st.SearchStrategy[Case]:
    """Cases of one linear, trained once."""
    return cases(recipes, largest=largest, vary=DIRECT)


@st.composite
def batches(
    draw: st.DrawFn, specs: st.SearchStrategy[Spec], *, draws: int = 16
) -> tuple[Case, ...]:
    """One Spec with several DataSpecs; a dynamic one with several row counts."""
    spec = draw(specs)
    drawn = []
    for i, data in enumerate(draw(_data_lists(draws, spec.direct))):
        turned = msgspec.structs.replace(spec, m=spec.m * (1 + i % 3)) if spec.dynamic else spec
        drawn.append(Case(spec=turned, data=data))
    return tuple(drawn)


@st.composite
def schedule_cases(
    draw: st.DrawFn,
    recipes: Sequence[Stateful],
    *,
    vary: frozenset[str] = SCHEDULE_FACTORS,
) -> Case:
    """One stateful case: a schedule of what its recipe carries, on a small model."""
    recipe = draw(one_of(*recipes))
    schedule = draw(schedules(carries=recipe.carries(), vary=vary))
    # a state's rules do not depend on how large the tensors are; time does
    size = draw(one_of(32, 32, 32, 16, 64))
    rows = draw(one_of(32, 32, 16))
    spec = Spec(
        recipe=recipe.name,
        schedule=schedule,
        m=max(rows, recipe.alignment),
        k=max(size, recipe.alignment),
        dtype=draw(one_of(*recipe.dtypes)),
        bias=draw(one_of(False, True)),
    )
    return Case(spec=spec, data=DataSpec(seed=draw(st.integers(0, 2**32 - 1))))
