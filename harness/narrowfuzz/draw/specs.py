"""Hypothesis strategies for Specs: the model that is built, and maybe compiled.

Sizes are a multiple of q plus a remainder, so both aligned and misaligned dimensions occur.
Deliberately awkward shapes (misaligned, empty dimensions) are drawn in a branch of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.altered import outside_autocast
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.events import Backward, Event
from narrowfuzz.case.spec import (
    Clipping,
    Dtype,
    Kernels,
    LossScaling,
    ModelName,
    Optimizer,
    Spec,
)
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.draw.choices import between, sampled
from narrowfuzz.draw.trainings import drawn_events
from narrowfuzz.machine.machine import machine, onednn_stays
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe


@st.composite
def sizes(draw: st.DrawFn, alignment: int, *, aligned: bool, largest: int) -> int:
    """A dimension: q * multiple, plus a remainder unless ``aligned``."""
    grids = [q for q in (32, 128) if q % alignment == 0 and q <= largest]
    q = draw(sampled(alignment, *grids))
    # a wide alignment may exceed ``largest``, but some dimensions must have several multiples of it
    multiple = draw(between(1, max(3 if alignment > 64 else 1, largest // q)))
    if aligned:
        return q * multiple
    remainder = draw(sampled(1, 0, 2, 7, 8, 15, 17, 31))
    return q * draw(sampled(0, 1, multiple)) + remainder


@cache
def _sizes(alignment: int, aligned: bool, largest: int) -> st.SearchStrategy[int]:
    return sizes(alignment, aligned=aligned, largest=largest)


#: Factors that a slice of a campaign may vary; others keep their simplest value.
FACTORS = frozenset(
    {
        "attention",
        "autocast",
        "backend",
        "batch",
        "bias",
        "checkpoint",
        "compiler",
        "dims",
        "dtype",
        "grad_mode",
        "kernels",
        "layout",
        "lifecycle",
        "model",
        "schedule",
        "shape",
        "threads",
    }
)

#: Factors that may vary for a single linear that runs once, to which every relation may apply.
DIRECT = FACTORS - {"autocast", "grad_mode", "lifecycle", "model", "schedule"}

#: Names of all models except the linear and single operators, repeated by the weight with which
#: they are drawn; and the same for models that are compiled with partial recompute.
WIDE = tuple(
    name
    for times in (0, 1)
    for name, model in MODELS.items()
    if model.kind not in ("linear", "operator") and model.draw_weight > times
)
FRAGILE = tuple(name for times in (0, 1) for name, model in MODELS.items() if model.fragile > times)

#: Models whose forward takes about ten times as long as that of others.
_LONG = frozenset(name for name, model in MODELS.items() if model.fragile)

#: (steps, microbatches).
_SCHEDULES = ((2, 1), (1, 2), (3, 1), (1, 3), (5, 1), (2, 2), (3, 2), (2, 3))


class _Choices:
    """Draws values of a Spec's factors; a factor that may not vary has its first value."""

    def __init__(self, draw: st.DrawFn, vary: frozenset[str]) -> None:
        self.draw, self.vary = draw, vary

    def __call__(self, factor: str, *values: Any) -> Any:
        return self.draw(sampled(*values)) if factor in self.vary else values[0]


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
    linears: bool = True,
) -> Spec:
    """A Spec of one of ``recipes``, differing from the simplest one in the factors of ``vary``.

    ``wild_shapes`` allows misaligned and empty dimensions, which compiled Specs rarely have.
    ``models`` are drawn besides the linear, or in place of it unless ``linears``.
    """
    choose = _Choices(draw, vary)
    if compile != "none":
        wild_shapes = draw(sampled(False, False, True)) and wild_shapes
    able = [r for r in recipes if (linears and r.takes("linear")) or any(map(r.takes, models))]
    recipe = draw(sampled(*(able or recipes)))
    linears = linears and recipe.takes("linear")
    models = tuple(name for name in models if recipe.takes(name)) or models
    backends = [b for b in recipe.backends if compile == "none" or b not in recipe.eager]
    # half of all Specs are a single linear, because most rules apply to it
    wide = not linears or choose("model", False, True)
    model: ModelName = draw(sampled(*models)) if wide else "linear"
    fields = _shape(choose, recipe, wide, wild_shapes, largest)
    fields |= _training(choose, recipe, model)
    if compile != "none":
        fields["dynamic"] = choose("compiler", False, False, True)
        fields["fullgraph"] = choose("compiler", False, True)
        if compile != "aot_eager":
            fields["memory_budget"] = choose("compiler", 100, 100, 50, 0)
    spec = Spec(
        recipe=recipe.name,
        backend=choose("backend", *backends),
        model=model,
        bias=choose("bias", False, True),
        input_layout=choose("layout", "contiguous", "contiguous", "transposed", "strided"),
        grad_layout=choose("layout", "contiguous", "contiguous", "transposed", "expanded"),
        weight_layout=choose("layout", *["contiguous"] * 10, "transposed", "strided"),
        lifecycle=choose("lifecycle", *["none"] * 6, "deepcopy", "reload"),
        compile=compile,
        **fields,
    )
    spec = _on_grid(fixed(spec, recipe), recipe)
    # more events where there may be autocast regions, and fewer for slow models
    rarely = 20 if model in _LONG else 3 if recipe.autocasts and spec.dtype == "fp32" else 5
    if spec.trains and not spec.scheduled and choose("schedule", *[False] * rarely, True):
        spec = draw(trained(spec, recipe))
    if compile == "none":
        spec = msgspec.structs.replace(spec, threads=choose("threads", *[1] * 22, 2, 4))
    if compile == "none" and "kernels" in vary and not onednn_stays():
        crawls = _crawls(recipe, spec)
        kernels: Kernels = draw(sampled(*_SLOW if crawls else _USUAL))
        if crawls and spec.events:
            kernels = "native"  # a training has about a hundred GEMMs
        return msgspec.structs.replace(spec, kernels=kernels)
    return spec


def _on_grid(spec: Spec, recipe: Recipe) -> Spec:
    """The Spec with every dimension that has the recipe's alignment enlarged to a multiple that its
    backend requires; misaligned dimensions stay."""
    grid = recipe.multiples.get(spec.backend, recipe.alignment)
    if grid == recipe.alignment:
        return spec
    rows = {"m": spec.tokens, "k": spec.k, "n": spec.n}
    fits = [name for name, size in rows.items() if not size % recipe.alignment]
    # doubled: otherwise even the largest size that is drawn may be a single multiple of the grid
    wider = {name: -(-2 * getattr(spec, name) // grid) * grid for name in fits}
    return msgspec.structs.replace(spec, **wider)


def fixed(spec: Spec, recipe: Recipe) -> Spec:
    """The Spec with the fields that its model prescribes (``Model.fixed``)."""
    given = MODELS[spec.model].fixed
    if not given:
        return spec
    if "dtype" in given and given["dtype"] not in recipe.dtypes:
        given = {name: value for name, value in given.items() if name != "dtype"}
    spec = msgspec.structs.replace(spec, **given)
    narrow = spec.autocast and spec.dtype != "fp32"
    return msgspec.structs.replace(spec, autocast=False) if narrow else spec


@st.composite
def trained(draw: st.DrawFn, spec: Spec, recipe: Recipe) -> Spec:
    """The Spec with a training of drawn events."""

    def choose(factor: str, *values: Any) -> Any:
        return draw(sampled(*values)) if len(values) > 1 else values[0]

    events = drawn_events(choose, spec, autocasts=recipe.autocasts)
    optimizer, scaling = draw(optimizers(spec.model, spec.dtype)), draw(scaled(spec.dtype))
    if scaling != "none":
        events = draw(overflowing(events))
    return msgspec.structs.replace(
        spec,
        events=events,
        optimizer=optimizer,
        loss_scaling=scaling,
        clipping=draw(clipped(spec.model)),
    )


def optimizers(model: ModelName, dtype: Dtype) -> st.SearchStrategy[Optimizer]:
    """Mostly plain SGD and AdamW; for shipped models also others. Fused SGD is drawn only in fp32,
    because in 16 bits the known issue fused-sgd-skips-blocks hides other faults."""
    found: list[Optimizer] = ["sgd", "adamw"] * 3
    if model not in MODELS or not MODELS[model].own:
        found += ["sgd_momentum", "adam_foreach", "adam_fused", "adamw_fused"]
        found += ["sgd_momentum_fused"] * (dtype == "fp32")
    return sampled(*found)


def scaled(dtype: Dtype, often: int = 1) -> st.SearchStrategy[LossScaling]:
    """How the loss is scaled: in ``often`` of four draws by GradScaler; not in fp16, because
    GradScaler refuses fp16 gradients."""
    how: LossScaling = "none" if dtype == "fp16" else "grad_scaler"
    return sampled(*["none"] * (4 - often), *[how] * often)


def clipped(model: ModelName) -> st.SearchStrategy[Clipping]:
    """How gradients are clipped: in three of five trainings of a shipped model, never for a user's
    own."""
    shipped = model not in MODELS or not MODELS[model].own
    return sampled("none", *("norm", "none", "norm_inf", "value") * shipped)


@st.composite
def overflowing(draw: st.DrawFn, events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events; in half of the draws one backward has an infinite output gradient, so that its
    step is skipped and others are not. It is mostly the first, because scales start too large."""
    backwards = [i for i, event in enumerate(events) if isinstance(event, Backward)]
    if not backwards or draw(sampled(False, True)):
        return events
    at = draw(sampled(backwards[0], draw(sampled(*backwards))))
    infinite = msgspec.structs.replace(events[at], values="inf")
    return (*events[:at], infinite, *events[at + 1 :])


@st.composite
def trainings(draw: st.DrawFn, recipes: Sequence[Recipe]) -> Spec:
    """An eager Spec with drawn events."""
    spec = draw(specs(recipes, vary=FACTORS - {"schedule", "grad_mode"}))
    return draw(trained(spec, next(r for r in recipes if r.name == spec.recipe)))


#: Values of ``Spec.kernels``, repeated by a weight that depends on their cost. With "both",
#: relations run only on oneDNN's kernels, so "native" is drawn, too.
_USUAL: tuple[Kernels, ...] = (*("default",) * 4, "both", "native")
_SLOW: tuple[Kernels, ...] = (*("native",) * 6, "both", "default")


def _crawls(recipe: Recipe, spec: Spec) -> bool:
    """True if oneDNN on this machine is so slow for GEMMs of these codes that many more cases can
    be run on PyTorch's own kernels."""
    gemms = recipe.plan(spec).gemms.values()
    taken = [gemm for gemm in gemms if gemm.quantised and not gemm.dequantise_to]
    by_tensor = any(gemm.a.granularity == gemm.b.granularity == "tensor" for gemm in taken)
    return by_tensor and machine().crawls("fp8")


@st.composite
def partly_recomputed(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    *,
    largest: int = 64,
    vary: frozenset[str] = FACTORS,
    blocks: tuple[ModelName, ...] = FRAGILE,
) -> Spec:
    """A Spec of a block that Inductor compiles with a selective checkpoint, which recomputes all
    but attention and some matmuls. What Inductor fuses differently in the recompute gets other
    values than in the forward."""
    some = specs(
        recipes, compile="inductor", largest=largest, vary=vary, models=blocks, linears=False
    )
    spec = draw(some)
    recipe = next(r for r in recipes if r.name == spec.recipe)
    # in fp32, fusing omits no rounding; and only the flash kernel saves statistics
    dtype = next((d for d in recipe.dtypes if d != "fp32"), spec.dtype)
    return msgspec.structs.replace(
        spec,
        events=spec.events if dtype == "fp32" else outside_autocast(spec.events),
        checkpoint="selective",
        wraps="whole",
        attention="flash",
        grad_mode="train",
        dtype=dtype,
        autocast=spec.autocast and dtype == "fp32",
    )


@st.composite
def of_rung(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    compile: Compile,
    *,
    largest: int = 64,
    vary: frozenset[str] = FACTORS,
) -> Spec:
    """A Spec for a rung. On Inductor, one in four is a block that is partly recomputed."""
    if compile == "inductor" and "model" in vary and draw(sampled(False, False, False, True)):
        return draw(partly_recomputed(recipes, largest=largest, vary=vary))
    return draw(specs(recipes, compile=compile, largest=largest, vary=vary))


def _shape(
    choose: _Choices, recipe: Recipe, wide: bool, wild_shapes: bool, largest: int
) -> dict[str, Any]:
    """Rows, features and batch."""
    off = wild_shapes and choose("shape", False, False, True)
    dims = dict.fromkeys(("m", "k", "n"), max(32, recipe.alignment))
    if off or "dims" in choose.vary:
        dims = _dims(choose.draw, recipe, off, min(largest, 64) if wide else largest)
    if wide:
        dims = {name: max(size, 1) for name, size in dims.items()}
        if choose("dims", False, False, True):
            dims["n"] = dims["k"]  # tensors of one shape can be mistaken for each other
    batch = choose("batch", 0, 0, 2, 3)
    if batch and recipe.alignment == 32 and not off and dims["m"] > 32:
        dims["m"] //= 2
        dims["m"] -= dims["m"] % (16 if batch == 2 else 32)
    return {**dims, "batch": batch}


def _training(choose: _Choices, recipe: Recipe, model: ModelName) -> dict[str, Any]:
    """Precision, mode, checkpoint, attention, and the number of steps with their optimizer."""
    dtype = choose("dtype", *recipe.dtypes)
    grad_mode = choose("grad_mode", *["train"] * 9, "no_grad", "inference")
    checkpoint = choose("checkpoint", "none", "none", "full", "reentrant", "selective")
    fields: dict[str, Any] = {}
    if model in MODELS and MODELS[model].parts and checkpoint in ("full", "reentrant"):
        fields["wraps"] = choose("checkpoint", "whole", "whole", "nested")
    if model != "linear":
        fields["heads"] = choose("attention", 1, 2, 4)
        fields["attention"] = choose("attention", "flash", "flash", "math")
    if grad_mode == "train" and choose("schedule", False, False, False, True):
        fields["steps"], fields["microbatches"] = choose.draw(sampled(*_SCHEDULES))
        fields["optimizer"] = choose.draw(optimizers(model, dtype))
        fields["loss_scaling"] = choose.draw(scaled(dtype))
        fields["clipping"] = choose.draw(clipped(model))
    if dtype == "fp32" and recipe.autocasts:
        fields["autocast"] = choose("autocast", False, False, False, True)
    if checkpoint == "reentrant" and not_reentrant(model, autocast=fields.get("autocast", False)):
        checkpoint = "full"
    return {**fields, "dtype": dtype, "grad_mode": grad_mode, "checkpoint": checkpoint}


def _dims(draw: st.DrawFn, recipe: Recipe, misaligned: bool, largest: int) -> dict[str, int]:
    """m, k and n. If ``misaligned``, either exactly one of them has no alignment, since a library
    that refuses one size never gets to the others; or some have none, and often one is 0 or 1."""
    dims: dict[str, int] = {}
    alone = draw(sampled("", "", "", "m", "k", "n")) if misaligned else ""
    for name in ("m", "k", "n"):
        off = misaligned and (name == alone if alone else draw(sampled(False, True)))
        dims[name] = draw(_sizes(recipe.alignment, not off, largest))
    if misaligned and not alone and draw(sampled(False, True)):
        dims[draw(sampled("m", "m", "k", "n"))] = draw(sampled(1, 0))
    return dims
