"""Hypothesis strategies for Specs and DataSpecs.

A Spec is drawn rarely (it is built, maybe compiled), its DataSpecs often. Sizes are "multiple of q
plus remainder", so aligned and misaligned dimensions both occur; deliberate nastiness
(misalignment, empty dimensions, spikes) sits behind a branch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from harness.case import Case, Compile, DataSpec, ModelName, Spec, Spike, ValueClass
from harness.choices import between, one_of
from harness.recipe import Recipe
from harness.schedule.draw import FACTORS as SCHEDULE_FACTORS
from harness.schedule.draw import schedules
from harness.stateful import Stateful

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
    q = draw(one_of(alignment, 32, *([128] if largest >= 128 else [])))
    multiple = draw(between(1, max(1, largest // q)))
    if aligned:
        return q * multiple
    remainder = draw(one_of(1, 0, 2, 7, 8, 15, 17, 31))
    return q * draw(one_of(0, 1, multiple)) + remainder


@cache
def _sizes(alignment: int, aligned: bool, largest: int) -> st.SearchStrategy[int]:
    return sizes(alignment, aligned=aligned, largest=largest)


#: What a slice of a campaign may vary; the rest keeps its simplest value.
FACTORS = frozenset(
    {
        "attention", "autocast", "backend", "batch", "bias", "checkpoint", "compiler", "dims",
        "dtype", "grad_mode", "layout", "lifecycle", "model", "schedule", "shape",
    }
)  # fmt: skip

#: What may vary of a single linear, trained once: there every relation may apply.
DIRECT = FACTORS - {"autocast", "grad_mode", "lifecycle", "model", "schedule"}

WIDE: tuple[ModelName, ...] = tuple(name for name in get_args(ModelName) if name != "linear")

#: Where partial recompute of a fused chain is compiled, code may differ from itself.
FRAGILE: tuple[ModelName, ...] = ("llama_block", "two_blocks", "joined_blocks")

#: Steps, and microbatches of each.
_SCHEDULES = ((2, 1), (1, 2), (3, 1), (1, 3), (5, 1), (2, 2), (3, 2), (2, 3))


@st.composite
def specs(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    compile: Compile = "none",
    largest: int = 128,
    wild_shapes: bool = True,
    vary: frozenset[str] = FACTORS,
    models: tuple[ModelName, ...] = WIDE,
    fragile: tuple[ModelName, ...] = FRAGILE,
    linears: bool = True,
    recomputed: bool = False,
) -> Spec:
    """A Spec of one of ``recipes``, differing from the simplest one in the factors it may vary.

    ``wild_shapes`` allows misaligned and empty dimensions. ``models`` are those besides the linear,
    ``fragile`` those that compiled code meets partly recomputed, always if ``recomputed``. Without
    ``linears`` it is one of ``models``.
    """

    def choose(factor: str, *values: Any) -> Any:
        return draw(one_of(*values)) if factor in vary else values[0]

    recipe = draw(one_of(*recipes))
    # half of all Specs are a single linear: it is judged by the most rules
    wider = not linears or choose("model", False, True)
    model: ModelName = draw(one_of(*models)) if wider else "linear"
    breaks = recomputed
    if compile == "inductor" and model != "linear" and fragile and not recomputed:
        breaks = choose("checkpoint", False, True)
    if breaks:
        model = draw(one_of(*fragile))
    wide = model != "linear"
    off = wild_shapes and choose("shape", False, False, True)
    dims = dict.fromkeys(("m", "k", "n"), 32)  # every recipe runs it
    if off or "dims" in vary:
        dims = _dims(draw, recipe, off, min(largest, 64) if wide else largest)
    if wide:
        dims = {name: max(size, 1) for name, size in dims.items()}
    batch = choose("batch", 0, 0, 2, 3)
    if batch and recipe.alignment == 32 and not off and dims["m"] > 32:
        dims["m"] //= 2
        dims["m"] -= dims["m"] % (16 if batch == 2 else 32)
    dtype = choose("dtype", *recipe.dtypes)
    grad_mode = choose("grad_mode", *["train"] * 9, "no_grad", "inference")
    checkpoint = choose("checkpoint", "none", "none", "full", "reentrant", "selective")
    if breaks:
        checkpoint, grad_mode = "selective", "train"
    if recomputed:  # fp32 is rounded nowhere, and only the flash kernel keeps statistics
        dtype = next((d for d in recipe.dtypes if d != "fp32"), dtype)
    fields: dict[str, Any] = {}
    if checkpoint == "reentrant" and model == "tied_embedding":
        checkpoint = "full"  # token ids carry no gradient, and it needs an input that does
    if wide:
        fields["heads"] = choose("attention", 1, 2, 4)
        fields["attention"] = choose("attention", "flash", "flash", "math")
        if recomputed:
            fields["attention"] = "flash"
    if grad_mode == "train" and choose("schedule", False, False, False, True):
        fields["steps"], fields["microbatches"] = draw(one_of(*_SCHEDULES))
        fields["optimizer"] = draw(one_of("sgd", "adamw"))
    if dtype == "fp32" and recipe.autocasts:
        fields["autocast"] = choose("autocast", False, False, False, True)
        if fields["autocast"] and checkpoint == "reentrant":
            checkpoint = "full"  # its detached inputs are leaves, whose casts autocast keeps
    if compile != "none":
        fields["dynamic"] = choose("compiler", False, False, True)
        fields["fullgraph"] = choose("compiler", False, True)
        if compile != "aot_eager":
            fields["memory_budget"] = choose("compiler", 100, 100, 50, 0)
    return Spec(
        recipe=recipe.name,
        backend=choose("backend", *recipe.backends),
        model=model,
        m=dims["m"],
        k=dims["k"],
        n=dims["n"],
        batch=batch,
        bias=choose("bias", False, True),
        dtype=dtype,
        input_layout=choose("layout", "contiguous", "contiguous", "transposed", "strided"),
        grad_layout=choose("layout", "contiguous", "contiguous", "transposed", "expanded"),
        grad_mode=grad_mode,
        lifecycle=choose("lifecycle", *["none"] * 6, "deepcopy", "reload"),
        checkpoint=checkpoint,
        compile=compile,
        **fields,
    )


def _dims(draw: st.DrawFn, recipe: Recipe, misaligned: bool, largest: int) -> dict[str, int]:
    """m, k and n; where ``misaligned``, some of them off the grid, rarely one of them 0 or 1."""
    dims: dict[str, int] = {}
    for name in ("m", "k", "n"):
        off = misaligned and draw(one_of(False, True))
        dims[name] = draw(_sizes(recipe.alignment, not off, largest))
    if misaligned and draw(one_of(False, False, True)):
        dims[draw(one_of("m", "m", "k", "n"))] = draw(one_of(1, 0, 1))
    return dims


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
    if values in ("near_max", "subnormal"):
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
    spec = draw(specs(recipes, compile=compile, largest=largest, vary=vary))
    return Case(spec=spec, data=draw(_data(spec.direct)))


def direct_cases(recipes: Sequence[Recipe], *, largest: int = 64) -> st.SearchStrategy[Case]:
    """Cases of one linear, trained once."""
    return cases(recipes, largest=largest, vary=DIRECT)


@st.composite
def batches(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    compile: Compile = "none",
    draws: int = 16,
    largest: int = 128,
    vary: frozenset[str] = FACTORS,
    models: tuple[ModelName, ...] = WIDE,
    fragile: tuple[ModelName, ...] = FRAGILE,
    linears: bool = True,
    recomputed: bool = False,
) -> tuple[Case, ...]:
    """One Spec with several DataSpecs, for campaigns; a dynamic Spec with several row counts."""
    wild_shapes = compile == "none" or draw(one_of(False, False, True))
    spec = draw(
        specs(
            recipes,
            compile=compile,
            largest=largest,
            wild_shapes=wild_shapes,
            vary=vary,
            models=models,
            fragile=fragile,
            linears=linears,
            recomputed=recomputed,
        )
    )
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
