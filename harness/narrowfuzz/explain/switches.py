"""Changes of a case that show what its divergence depends on: removing its conditions one by one,
and choosing alternatives that a user has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from narrowfuzz.case.kind import LAYERS, kind_of
from narrowfuzz.case.layout import fitting
from narrowfuzz.case.spec import Case, DataSpec, Spec, fields_of
from narrowfuzz.draw.specs import fixed
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import FILTERED, Recipe, unconverted
from narrowfuzz.trace.words import plural


@dataclass(frozen=True)
class Switch:
    """A case changed in one respect, and the arm to judge it on if that is another one. The words
    name the condition that the case no longer has, or the alternative that it has instead."""

    words: str
    case: Case
    arm: str = ""


#: Fields of a Spec that state which program is tested, and not what a divergence needs.
_SAME = {"recipe", "model", "compile", "kernels", "backend", "dtype"}
_SIZES = {"m": "row", "k": "feature", "n": "output"}
#: A size that is a multiple of blocks, vectors and tiles.
_PLAIN_SIZE = 64


def conditions(case: Case, recipe: Recipe) -> Iterator[Switch]:
    """The case without each of its conditions: fields that are not at their simplest value, sizes
    that are odd, values that are not normally distributed."""
    spec, data = case.spec, case.data
    for field in fields_of(Spec):
        if field.name in _SAME or field.required:
            continue
        value = getattr(spec, field.name)
        if field.name == "settings":
            yield from _of_settings(case, recipe)
            continue
        if field.name == "events" and kind_of(spec) is LAYERS:
            continue  # layers of a library are trained by events only
        if field.name in _SIZES:
            if value % 32:
                words = f"{plural(value, _SIZES[field.name])}, no multiple of 32"
                yield from _switch(case, recipe, words, {field.name: _PLAIN_SIZE})
        elif value != field.default:
            yield from _switch(case, recipe, _words(field.name, value), _reset(field, spec))
    usual = DataSpec(seed=data.seed)
    if (data.values, data.regime) != (usual.values, usual.regime):
        kind = data.values if data.regime == usual.regime else data.regime
        other = msgspec.structs.replace(data, values=usual.values, regime=usual.regime)
        yield Switch(f"data of kind {kind}", _with(case, other))
    powers = [name for name in DataSpec.__struct_fields__ if name.endswith("_exponent")]
    if any(getattr(data, name) for name in powers):
        about_one = msgspec.structs.replace(data, **dict.fromkeys(powers, 0))
        yield Switch("data that is far from 1", _with(case, about_one))
    if data.spikes:
        words = plural(len(data.spikes), "single large number")
        yield Switch(words, _with(case, msgspec.structs.replace(data, spikes=())))


def _of_settings(case: Case, recipe: Recipe) -> Iterator[Switch]:
    """Each setting of the recipe that is not at its simplest value."""
    own = case.spec.settings
    for field in fields_of(type(own)):
        if (value := getattr(own, field.name)) != field.default:
            other = msgspec.structs.replace(own, **{field.name: field.default})
            words = f"{field.name.replace('_', ' ')} {value}"
            yield from _switch(case, recipe, words, {"settings": other})


def larger(case: Case, recipe: Recipe) -> Iterator[tuple[str, Case]]:
    """The case at a size where more of its data can show the divergence."""
    words = f"the smallest case with {_PLAIN_SIZE} rows, features and outputs"
    for switch in _switch(case, recipe, words, dict.fromkeys(_SIZES, _PLAIN_SIZE)):
        yield switch.words, switch.case


def _reset(field: msgspec.structs.FieldInfo, spec: Spec) -> dict[str, Any]:
    changes = {field.name: field.default}
    if field.name == "checkpoint":
        changes["wraps"] = Spec(recipe=spec.recipe).wraps
    return changes


def _words(name: str, value: Any) -> str:
    """The words for a field of a Spec that is not at its simplest value."""
    if name == "events":
        return "its events"
    if name == "sharding":
        return plural(value.ranks, "rank")
    words = name.replace("_", " ")
    return words if isinstance(value, bool) else f"{words} {value}"


def together(case: Case, recipe: Recipe, switches: Sequence[Switch]) -> Case | None:
    """The case with all these changes at once. If the recipe cannot run it with the changes of the
    Spec, only with those of the data; None if there are none of these."""
    spec, data = case.spec, case.data
    for switch in switches:
        spec = msgspec.structs.replace(spec, **_changed(case.spec, switch.case.spec))
        data = msgspec.structs.replace(data, **_changed(case.data, switch.case.data))
    if spec == case.spec:
        return _with(case, data) if data != case.data else None
    for found in _switch(case, recipe, "", _changed(case.spec, spec)):
        return _with(found.case, data)
    return None


def _changed(one: Any, other: Any) -> dict[str, Any]:
    names = one.__struct_fields__
    return {n: getattr(other, n) for n in names if getattr(other, n) != getattr(one, n)}


def akin_to(name: str, recipes: Mapping[str, Recipe]) -> frozenset[str]:
    """The names of the recipes of the same package, with the same filter of linears."""
    base, at, globs = name.partition(FILTERED)
    return frozenset(
        f"{other}{at}{globs}"
        for other, recipe in recipes.items()
        if other.rpartition(".")[0] == base.rpartition(".")[0]
        and not recipe.process
        and (recipe.filtered or not at)
    )


def alternatives(case: Case, recipe: Recipe, recipes: Mapping[str, Recipe]) -> Iterator[Switch]:
    """The case with each alternative that a user has: documented settings of the library, other
    kernels, other precision, other recipes of the package."""
    spec = case.spec
    if spec.compile == "inductor":
        words = "torch._inductor.config.emulate_precision_casts = True"
        yield Switch(words, case, "inductor_strict")
    if spec.compile != "none":
        yield from _switch(case, recipe, "without torch.compile", {"compile": "none"})
    if spec.checkpoint != "none":
        for other in ("full", "selective"):
            if other != spec.checkpoint:
                words = f"{other} checkpointing in place of {spec.checkpoint}"
                yield from _switch(case, recipe, words, {"checkpoint": other})
    model = MODELS.get(spec.model)
    if model is not None and model.attends and spec.attention == "flash":
        words = "attention of products and a softmax (SDPBackend.MATH)"
        yield from _switch(case, recipe, words, {"attention": "math"})
    if spec.kernels == "default" and spec.compile == "none":
        words = "PyTorch's own kernels (torch.backends.mkldnn.flags(enabled=False))"
        yield from _switch(case, recipe, words, {"kernels": "native"}, "eager_native")
    for dtype in recipe.dtypes:
        if dtype != spec.dtype:
            yield from _switch(case, recipe, f"parameters in {dtype}", {"dtype": dtype})
    for backend in recipe.backends:
        if backend not in (spec.backend or recipe.backends[0], spec.backend):
            what = recipe.backend_words.get(backend, "")
            words = f"backend {backend}" + (f" ({what})" if what else "")
            yield from _switch(case, recipe, words, {"backend": backend})
    for name, akin in sorted(recipes.items()):
        if name != spec.recipe and not unconverted(recipe):
            changes = {
                "recipe": name,
                "backend": spec.backend if spec.backend in akin.backends else "",
                "dtype": spec.dtype if spec.dtype in akin.dtypes else akin.dtypes[0],
            }
            yield from _switch(case, akin, f"recipe {name}", changes)


def _switch(
    case: Case, recipe: Recipe, words: str, changes: Mapping[str, Any], arm: str = ""
) -> Iterator[Switch]:
    """The case with these fields of its Spec; nothing if the recipe cannot run that, or if nothing
    changes."""
    try:
        spec = msgspec.structs.replace(case.spec, **changes)
        if spec.model in MODELS:  # only models of the catalogue fix fields
            spec = fitting(fixed(spec, recipe))
        recipe.check(spec)
    except ValueError:
        return
    if spec != case.spec:
        yield Switch(words, msgspec.structs.replace(case, spec=spec), arm)


def _with(case: Case, data: DataSpec) -> Case:
    return msgspec.structs.replace(case, data=data)
