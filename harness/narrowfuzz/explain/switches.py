"""Changes of a case that show what its divergence depends on: removing its conditions one by one,
and choosing alternatives that a user has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec

from narrowfuzz.case.events import Open
from narrowfuzz.case.features import features
from narrowfuzz.case.kind import LAYERS, kind_of
from narrowfuzz.case.layout import fitting
from narrowfuzz.case.spec import Case, DataSpec, Spec, ValueClass, fields_of
from narrowfuzz.draw.specs import fixed
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import FILTERED, UNCONVERTED, Recipe, unconverted, with_filter
from narrowfuzz.trace.words import plural


@dataclass(frozen=True)
class Switch:
    """A case changed in one respect, and the arm to judge it on if that is another one. The words
    name the condition that the case no longer has, or the alternative that it has instead."""

    words: str
    case: Case
    arm: str = ""
    #: Opens a context that holds while the case is judged: a switch of PyTorch's own.
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Words for other data -> the changed case with it. A size may matter only because of the
    #: values: larger granules of the same data seldom have an amax as small, or as large.
    other_data: Mapping[str, Case] = field(default_factory=dict)


#: Fields of a Spec that state which program is tested, and not what a divergence needs.
_SAME = {"recipe", "model", "compile", "kernels", "backend", "dtype"}
_SIZES = {"m": "row", "k": "feature", "n": "output"}
#: A size that is a multiple of blocks, vectors and tiles.
_PLAIN_SIZE = 64


_EXPONENTS = [name for name in DataSpec.__struct_fields__ if name.endswith("_exponent")]
#: By which powers of two data is multiplied, to see whether its size matters.
_POWERS = (-8, 8)
_LARGEST_POWER = 60


def conditions(case: Case, recipe: Recipe) -> Iterator[Switch]:
    """The case without each of its conditions: fields that are not at their simplest value, sizes
    that are odd, values that are not normally distributed."""
    spec, data = case.spec, case.data
    for one in fields_of(Spec):
        if one.name in _SAME or one.required:
            continue
        value = getattr(spec, one.name)
        if one.name == "settings":
            yield from _of_settings(case, recipe)
            continue
        if one.name == "events" and kind_of(spec) is LAYERS:
            continue  # layers of a library are trained by events only
        if one.name in _SIZES:
            if value % 32:
                words = f"{plural(value, _SIZES[one.name])}, no multiple of 32"
                for switch in _switch(case, recipe, words, {one.name: _PLAIN_SIZE}):
                    yield replace(switch, other_data=other_data(switch.case))
        elif value != one.default:
            words = _of_events(spec) if one.name == "events" else _words(one.name, value)
            yield from _switch(case, recipe, words, _reset(one, spec))
    usual = DataSpec(seed=data.seed)
    if (data.values, data.regime) != (usual.values, usual.regime):
        kind = data.values if data.regime == usual.regime else data.regime
        other = msgspec.structs.replace(data, values=usual.values, regime=usual.regime)
        yield Switch(f"data of kind {kind}", _with(case, other))
    if any(getattr(data, name) for name in _EXPONENTS):
        about_one = msgspec.structs.replace(data, **dict.fromkeys(_EXPONENTS, 0))
        yield Switch("data that is far from 1", _with(case, about_one))
    if data.spikes:
        words = plural(len(data.spikes), "single large number")
        yield Switch(words, _with(case, msgspec.structs.replace(data, spikes=())))


def other_data(case: Case) -> dict[str, Case]:
    """Words -> the case with other data: each kind of it, and values 256 times as large and as
    small."""
    data, found = case.data, {}
    for power in _POWERS:
        shifted = {name: getattr(data, name) + power for name in _EXPONENTS}
        if max(map(abs, shifted.values())) <= _LARGEST_POWER:
            other = msgspec.structs.replace(data, **shifted)
            found[f"multiplied by 2^{power}"] = _with(case, other)
    for kind in get_args(ValueClass):
        words = "normally distributed" if kind == DataSpec().values else f"of kind {kind}"
        other = msgspec.structs.replace(data, values=kind, regime=DataSpec().regime, spikes=())
        found[words] = _with(case, other)
    return {words: one for words, one in found.items() if one != case}


def _of_settings(case: Case, recipe: Recipe) -> Iterator[Switch]:
    """Each setting of the recipe that is not at its simplest value."""
    own = case.spec.settings
    for one in fields_of(type(own)):
        if (value := getattr(own, one.name)) != one.default:
            other = msgspec.structs.replace(own, **{one.name: one.default})
            words = f"{one.name.replace('_', ' ')} {value}"
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
    if name == "sharding":
        return plural(value.ranks, "rank")
    words = name.replace("_", " ")
    return words if isinstance(value, bool) else f"{words} {value}"


def _of_events(spec: Spec) -> str:
    regions = ["a region of autocast"] * any(isinstance(event, Open) for event in spec.events)
    return f"its events ({', '.join([*regions, *sorted(features(spec))]) or 'one after another'})"


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


def each_left_out(recipe: Recipe, layers: Collection[str]) -> dict[str, Recipe]:
    """Layer -> the recipe that does not convert this one. Nothing if the recipe takes no filter."""
    if not recipe.filtered:
        return {}
    name, filtered, globs = recipe.name.partition(FILTERED)
    base = replace(recipe, name=name)
    others = f"{globs}," if filtered else ""
    return {layer: with_filter(base, f"{others}!{layer}") for layer in layers}


def compiled_otherwise(case: Case, recipe: Recipe) -> Iterator[Switch]:
    """The case with each alternative to the way in which it is compiled."""
    spec = case.spec
    if spec.compile == "inductor":
        words = "torch._inductor.config.emulate_precision_casts = True"
        yield Switch(words, case, "inductor_strict")
    if spec.compile != "none":
        yield from _switch(case, recipe, "without torch.compile", {"compile": "none"})


def alternatives(
    case: Case,
    recipe: Recipe,
    recipes: Mapping[str, Recipe],
    left_out: Mapping[str, Recipe],
) -> Iterator[Switch]:
    """The case with each alternative that a user has: documented settings of the library, other
    kernels, other precision, other recipes of the package, a layer that is not converted
    (``each_left_out``)."""
    spec = case.spec
    if spec.checkpoint != "none":
        for other in ("full", "selective"):
            if other != spec.checkpoint:
                words = f"{other} checkpointing in place of {spec.checkpoint}"
                yield from _switch(case, recipe, words, {"checkpoint": other})
    model = MODELS.get(spec.model)
    if model is not None and model.attends and spec.attention == "flash":
        words = "attention of products and a softmax (SDPBackend.MATH)"
        if spec.single_operator and spec.compile == "none":
            yield Switch(words, case, around=_attention_by_products)
        else:
            yield from _switch(case, recipe, words, {"attention": "math"})
    if spec.kernels == "default" and spec.compile == "none":
        words = "PyTorch's own kernels (torch.backends.mkldnn.flags(enabled=False))"
        yield from _switch(case, recipe, words, {"kernels": "native"}, "eager_native")
    for dtype in recipe.dtypes:
        if dtype != spec.dtype:
            yield from _switch(case, recipe, f"parameters in {dtype}", {"dtype": dtype})
    exact = recipes.get("torch.fp32")
    if recipe.name in UNCONVERTED and exact is not None and exact.name != recipe.name:
        changes = {"recipe": exact.name, "dtype": "fp32", "backend": ""}
        yield from _switch(case, exact, "everything in fp32", changes)
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
    for layer, filtered in left_out.items():
        words = f"{layer} not converted (--filter '!{layer}')"
        yield from _switch(case, filtered, words, {"recipe": filtered.name})


def _attention_by_products() -> AbstractContextManager[object]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


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
