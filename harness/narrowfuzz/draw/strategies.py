"""Hypothesis strategies for cases: a Spec with its data, or with a schedule. ``case/data.py`` makes
the tensors of a DataSpec.

A Spec is drawn rarely, because it must be built and maybe compiled; its DataSpecs are drawn often.
Spikes are drawn in a branch of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast, get_args

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.arm import Compile
from narrowfuzz.case.data import TAME
from narrowfuzz.case.spec import Case, DataSpec, Gemm, Regime, Spec, Spike, ValueClass
from narrowfuzz.draw.choices import between, sampled
from narrowfuzz.draw.library_specs import FACTORS as SCHEDULE_FACTORS
from narrowfuzz.draw.library_specs import RARELY as RARELY_ON_RANKS
from narrowfuzz.draw.library_specs import schedules
from narrowfuzz.draw.specs import DIRECT, FACTORS, of_rung
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import heads_of
from narrowfuzz.recipe.recipe import Recipe

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

#: Value classes of a single operator: also equal numbers, at which sums stall, and rows for which
#: softmax selects one key. Repeated by weight.
OF_OPERATORS: tuple[ValueClass, ...] = (*WILD, "equal", "equal", "outlier_rows", "aligned")

#: The class for which steps are skipped, with the weight of all classes together.
_INFINITE = len(WILD) * cast("tuple[ValueClass, ...]", ("inf_nan",))

#: Regimes whose sums are judged to the bit; only a single linear that runs once has them.
EXACT: tuple[Regime, ...] = ("lattice", "ladder")

#: Percentage of the Specs of a single linear that get ladder data: if the device accumulates in
#: fp32, and if it does not. Such a Spec has fewer draws than others, so the share of cases is
#: smaller still.
RARELY, OFTEN = 8, 75
#: Number of draws of data for an eager Spec with ladder data: every element is a rung, so few are
#: enough, and another shape, which splits K differently, shows more than another draw.
_LADDER_DRAWS = 2
#: Number of draws of data for an eager Spec with events: one takes as long as many single runs.
_TRAINING_DRAWS = 2
#: Numbers of products in a sum of ladder data, repeated by weight: up to four runs between
#: promotions.
_LENGTHS = (32, 64, 128, 160, 256, 256, 384, 384, 384, 512, 512, 512)
#: Size to which the other two dimensions are reduced, up to alignment: more rungs are not needed.
_LADDER_ROWS = 64

#: fp32 patterns worth planting: Inf, NaN, extremes, and neighbours of 448 and of powers of two,
#: torchao's EPS and far below it, and 2^80 (two of them overflow as a product).
SPIKES = (
    "0x7f800000",
    "0xff800000",
    "0x7fc00000",
    "0x7f7fffff",
    "0x7f7f0000",
    "0xff7f0000",
    "0x00000001",
    "0x00800000",
    "0x80000000",
    "0x43e00000",
    "0x43e00001",
    "0x43e80000",
    "0x43f00000",
    "0x3f7fffff",
    "0x3f800001",
    "0x2b8cbccc",
    "0x1e3ce508",
    "0x67800000",
    "0xe7000000",
)


#: Inf and NaN; and the same with numbers so large that their products with a factor above one
#: overflow.
SPECIAL, OVERFLOWING = SPIKES[:3], SPIKES[:6]
NAN = "0x7fc00000"


@st.composite
def _spikes(draw: st.DrawFn, patterns: Sequence[str] = SPIKES) -> Spike:
    return Spike(
        draw(sampled("input", "weight", "grad_output", "bias")),
        draw(between(0, 255)),
        draw(between(0, 255)),
        draw(sampled(*patterns)),
    )


_UP_TO_TWO_SPIKES = st.lists(_spikes(), max_size=2)
_SPIKES = st.lists(_spikes(), min_size=1, max_size=3)


@st.composite
def _exponents(draw: st.DrawFn) -> dict[str, Any]:
    """Exponents that are small enough that products neither over- nor underflow."""
    return {
        f"{name}_exponent": draw(sampled(0, 0, 1, -3, 7, -9))
        for name in ("input", "weight", "grad")
    }


@st.composite
def _lattice(draw: st.DrawFn) -> DataSpec:
    return DataSpec(regime="lattice", seed=draw(between(0, 2**32 - 1)), **draw(_exponents()))


@st.composite
def _of_class(draw: st.DrawFn, values: ValueClass, special: tuple[str, ...]) -> DataSpec:
    """Wild data of a value class; ``special`` are the patterns of the first spike of inf_nan."""
    exponents = {} if values in TAME else draw(_exponents())
    spikes: tuple[Spike, ...] = ()
    if values == "inf_nan":
        spikes = (draw(_spikes(special)), *draw(_UP_TO_TWO_SPIKES))
    elif draw(sampled(False, False, False, False, True)):
        spikes = tuple(draw(_SPIKES))
    seed = draw(between(0, 2**32 - 1))
    return DataSpec(regime="wild", values=values, seed=seed, spikes=spikes, **exponents)


_of_this_class = cache(_of_class)


@st.composite
def data_specs(
    draw: st.DrawFn,
    *,
    lattice: bool = True,
    classes: tuple[ValueClass, ...] = WILD,
    special: tuple[str, ...] = SPECIAL,
) -> DataSpec:
    """Half lattice (if ``lattice``), half wild data of these value classes; ``special`` are the
    patterns of the first spike of inf_nan."""
    if lattice and draw(sampled(False, True)):
        return draw(_lattice())
    return draw(_of_this_class(draw(sampled(*classes)), special))


@st.composite
def ladder_specs(draw: st.DrawFn, gemm: Gemm) -> DataSpec:
    """Ladder data for one GEMM. The exponents keep every product and its last bits in range."""
    return DataSpec(
        regime="ladder",
        gemm=gemm,
        seed=draw(between(0, 2**32 - 1)),
        input_exponent=draw(_LADDER_EXPONENT),
        weight_exponent=draw(_LADDER_EXPONENT),
        grad_exponent=draw(_LADDER_EXPONENT),
    )


_LADDER_EXPONENT = sampled(0, 0, 1, -3)


@cache
def _ladders(gemm: Gemm) -> st.SearchStrategy[DataSpec]:
    return ladder_specs(gemm)


@cache
def _ladder_lists(draws: int, gemm: Gemm) -> st.SearchStrategy[list[DataSpec]]:
    return st.lists(_ladders(gemm), min_size=draws, max_size=draws)


def ladder_percent_low(spec: Spec) -> int:
    """Percentage of ladder data for a device that accumulates in fp32, or in an unknown way."""
    return RARELY


def ladder_percent_high(spec: Spec) -> int:
    """Percentage of ladder data for a device that is known not to accumulate in fp32."""
    return OFTEN


@st.composite
def _grounds(
    draw: st.DrawFn, specs: st.SearchStrategy[Spec], ladders: Callable[[Spec], int]
) -> tuple[Spec, Gemm | None]:
    """A Spec and None; or, for ladder data, a Spec resized so that the sums of one GEMM have about
    a drawn length, and that GEMM."""
    spec = draw(specs)
    if not spec.direct or spec.sharded or draw(between(0, 99)) < 100 - ladders(spec):
        return spec, None
    gemm: Gemm = draw(sampled(*get_args(Gemm))) if spec.trains else "output"
    return resized_for_ladder(spec, gemm, draw(sampled(*_LENGTHS))), gemm


def resized_for_ladder(spec: Spec, gemm: Gemm, length: int) -> Spec:
    """The Spec with about ``length`` products in each sum of this GEMM, and few rows.

    Alignment is kept: a size that is a multiple of 16, 32 or 128 stays one, and one that is not
    stays misaligned.
    """
    contracted = {"output": "k", "grad_input": "n", "grad_weight": "m"}[gemm]
    sizes = {name: _few(getattr(spec, name)) for name in ("m", "k", "n")}
    sizes[contracted] = _long(getattr(spec, contracted), length)
    changes: dict[str, Any] = {**sizes}
    if gemm == "grad_weight":
        changes["batch"] = 0
    if spec.grad_layout == "expanded":  # equal rows would be the same rungs
        changes["grad_layout"] = "contiguous"
    return msgspec.structs.replace(spec, **changes)


def _few(size: int) -> int:
    if size % 128 == 0 or size <= _LADDER_ROWS:
        return size
    return _LADDER_ROWS + size % 32


def _long(size: int, length: int) -> int:
    return -(-length // 128) * 128 if size % 128 == 0 else length + size % 32


def _data(spec: Spec) -> st.SearchStrategy[DataSpec]:
    return _wild_data(spec.direct, classes_of(spec), special_of(spec))


def special_of(spec: Spec) -> tuple[str, ...]:
    """Patterns of the special values of inf_nan: if the loss is scaled, also finite numbers whose
    sums overflow, perhaps on only one rank."""
    return SPECIAL if spec.loss_scaling == "none" else OVERFLOWING


def classes_of(spec: Spec) -> tuple[ValueClass, ...]:
    """Value classes, repeated by the weight with which they are drawn."""
    if spec.loss_scaling != "none":  # a step whose gradients are not finite is skipped
        return WILD + _INFINITE
    if not spec.single_operator:
        return WILD
    own = cast("tuple[ValueClass, ...]", MODELS[spec.model].values)
    return OF_OPERATORS + own * (len(OF_OPERATORS) // max(1, len(own)))


def _with_scores(spec: Spec, data: DataSpec) -> DataSpec:
    """The data; in every second draw of an attention, with learned keys and values as large as its
    queries. If they were scaled down like other weights, every score would be near 0 and every key
    equally likely."""
    scaled_down = data.values not in (*TAME, "equal", "aligned")
    if MODELS[spec.model].columns != "keys" or data.seed % 2 == 0 or not scaled_down:
        return data
    larger = data.weight_exponent + (spec.n * spec.k // heads_of(spec)).bit_length() // 2
    return msgspec.structs.replace(data, weight_exponent=larger)


@cache
def _wild_data(
    lattice: bool, classes: tuple[ValueClass, ...], special: tuple[str, ...]
) -> st.SearchStrategy[DataSpec]:
    return data_specs(lattice=lattice, classes=classes, special=special)


@cache
def _kinds(
    lattice: bool, classes: tuple[ValueClass, ...], special: tuple[str, ...]
) -> tuple[st.SearchStrategy[DataSpec], ...]:
    """A strategy for each kind of data, repeated by weight: these value classes, and (if
    ``lattice``) as often lattice data."""
    wild = [_of_this_class(values, special) for values in classes]
    return (*wild, *(len(wild) * [_lattice()] if lattice else []))


@st.composite
def _data_lists(
    draw: st.DrawFn,
    draws: int,
    lattice: bool,
    classes: tuple[ValueClass, ...],
    special: tuple[str, ...],
) -> list[DataSpec]:
    """``draws`` DataSpecs. Kinds of data are drawn without replacement; of as many draws as there
    are value classes, one has NaN. Drawn one by one, two thirds of all compiled linears would never
    meet NaN."""
    order = draw(st.permutations(_kinds(lattice, classes, special)))
    if draws >= len(classes):
        order.insert(draw(between(1, draws - 1)), _of_this_class("inf_nan", (NAN,)))
    return [draw(order[i % len(order)]) for i in range(draws)]


_lists_of_data = cache(_data_lists)


@st.composite
def cases(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    compile: Compile = "none",
    largest: int = 64,
    vary: frozenset[str] = FACTORS,
    ladders: Callable[[Spec], int] = ladder_percent_low,
) -> Case:
    """One Spec with one DataSpec, for property tests (campaigns draw ``batches``). ``ladders``
    returns the percentage of the Specs of a single linear that get ladder data."""
    some = of_rung(recipes, compile, largest=largest, vary=vary)
    spec, gemm = draw(_grounds(some, ladders))
    return Case(spec=spec, data=_with_scores(spec, draw(_ladders(gemm) if gemm else _data(spec))))


def direct_cases(recipes: Sequence[Recipe], *, largest: int = 64) -> st.SearchStrategy[Case]:
    """Cases of a single linear that runs once."""
    return cases(recipes, largest=largest, vary=DIRECT)


@st.composite
def batches(
    draw: st.DrawFn,
    specs: st.SearchStrategy[Spec],
    *,
    draws: int = 16,
    ladders: Callable[[Spec], int] = ladder_percent_low,
) -> tuple[Case, ...]:
    """One Spec with several DataSpecs; a dynamic Spec with several numbers of rows. ``ladders``
    returns the percentage of the Specs of a single linear that get ladder data."""
    spec, gemm = draw(_grounds(specs, ladders))
    if gemm and spec.compile == "none":
        draws = min(draws, _LADDER_DRAWS)
    if spec.events and spec.compile == "none":
        draws = min(draws, _TRAINING_DRAWS)
    drawn = []
    plain = _lists_of_data(draws, spec.direct, classes_of(spec), special_of(spec))
    some = _ladder_lists(draws, gemm) if gemm else plain
    for i, data in enumerate(draw(some)):
        turned = msgspec.structs.replace(spec, m=spec.m * (1 + i % 3)) if spec.dynamic else spec
        drawn.append(Case(spec=turned, data=_with_scores(spec, data)))
    return tuple(drawn)


@st.composite
def schedule_cases(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    vary: frozenset[str] = SCHEDULE_FACTORS,
    ranks: tuple[int, ...] = RARELY_ON_RANKS,
) -> Case:
    """One case of a library's own layers: a schedule that its recipe supports, on a small model."""
    recipe = draw(sampled(*recipes))
    carries = recipe.carries()
    spec = draw(schedules(recipe.name, carries=carries, vary=vary, ranks=ranks))
    size, rows = draw(sampled(*carries.features)), draw(sampled(*carries.rows))
    spec = msgspec.structs.replace(
        spec,
        m=max(rows, recipe.alignment),
        k=max(size, recipe.alignment),
        dtype=draw(sampled(*recipe.dtypes)),
        bias=draw(sampled(False, True)),
    )
    return Case(spec=spec, data=DataSpec(seed=draw(st.integers(0, 2**32 - 1))))
