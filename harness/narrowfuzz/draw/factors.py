"""``narrowfuzz list coverage``: which values of each factor of a Spec and its data are drawn, and
how often.

They are counted in draws of the strategies that campaigns use, not derived from the code. A valid
value that no draw of a recipe has is *not applicable* if a reason is known, else a hole, listed as
*not yet*. Combinations in which many bugs were found are counted, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from narrowfuzz.case.arm import Compile
from narrowfuzz.case.features import OF_AUTOCAST, OF_CONVERTED, features
from narrowfuzz.case.spec import Case, Checkpoint, Spec
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.strategies import EXACT, WILD, cases
from narrowfuzz.models.catalog import COMPOSED, MODELS
from narrowfuzz.recipe.recipe import Recipe

#: Number of eager cases, and of cases of each compiled rung, that are drawn for a recipe.
EAGER_DRAWS, COMPILED_DRAWS = 600, 240
_LOT = 10
_COMPILER = ("dynamic", "fullgraph", "memory_budget")
#: Fields of a Spec that have few values.
_FIELDS = (
    "model",
    "dtype",
    "autocast",
    "grad_mode",
    "checkpoint",
    "wraps",
    "compile",
    "steps",
    "microbatches",
    "optimizer",
    "clipping",
    "lifecycle",
    "bias",
    "input_layout",
    "grad_layout",
    "weight_layout",
    "heads",
    "attention",
    "kernels",
    "threads",
    *_COMPILER,
)
#: Values of numeric fields. Any number above one tests the same as another, so not all are listed.
_NUMBERS = {"steps": (1, 2, 3, 5), "microbatches": (1, 2, 3)}
#: (model, field): the values of this field are also counted for this model by itself.
_PAIRS = tuple(
    (name, field)
    for name, model in MODELS.items()
    if model.draw_weight > 1
    for field in ("checkpoint", "compile")
)


@dataclass(frozen=True)
class _Factor:
    """A factor that is counted in a recipe's draws."""

    name: str
    #: The value of the factor in a case.
    of: Callable[[Case], str]
    #: All values that it may have.
    vocabulary: tuple[str, ...]
    #: True for the cases in which the factor has an effect; only these are counted.
    speaks: Callable[[Case], bool] = lambda case: True
    #: Why a value is not applicable; "" if it is.
    why_not: Callable[[str], str] = lambda value: ""


def rows(recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, str, str, str, str]]:
    """(recipe, factor, values with their share of the draws, values that do not apply and why,
    values that are not drawn yet)."""
    for recipe in recipes.values():
        found = list(_drawn(recipe))
        for factor in _factors(recipe):
            counts = Counter(factor.of(case) for case in found if factor.speaks(case))
            total = sum(counts.values())
            shares = [f"{value} {100 * n / total:.0f}%" for value, n in counts.most_common()]
            lacking = [value for value in factor.vocabulary if value not in counts]
            reasons = [f"{value}: {why}" for value in lacking if (why := factor.why_not(value))]
            possible = [value for value in lacking if not factor.why_not(value)]
            yield (
                recipe.name,
                factor.name,
                ", ".join(shares),
                "; ".join(reasons),
                ", ".join(possible),
            )


def _factors(recipe: Recipe) -> Iterator[_Factor]:
    # a library's own layers have more values than are drawn for converted models
    fewer = {
        "optimizer": Literal["sgd", "adamw"],
        "model": Literal[COMPOSED],
        "checkpoint": Checkpoint,
        "wraps": Literal["whole", "nested"],
    }
    hints = get_type_hints(Spec) | fewer
    yield _Factor("backend", lambda case: case.spec.backend or recipe.backends[0], recipe.backends)
    for name in _FIELDS:
        values = tuple(map(str, _values(name, hints[name])))
        yield _Factor(name, _of(name), values, _speaks(name), _left_out(recipe, name))
    yield _Factor("data", _data, (*EXACT, *WILD))
    for feature in sorted(OF_CONVERTED):
        yield _Factor(
            f"events: {feature}", _happens(feature), ("yes",), why_not=_never(recipe, feature)
        )
    for model, name in _PAIRS:
        values = get_args(hints[name])
        yield _Factor(f"{name} of {model}", _of(name), values, _is(model), _unfit(model))


def _happens(feature: str) -> Callable[[Case], str]:
    return lambda case: "yes" if feature in features(case.spec) else "no"


def _never(recipe: Recipe, feature: str) -> Callable[[str], str]:
    """Why events of this recipe's models do not have the feature."""
    why = {"inf": "the data's own spikes are infinite"}
    if not recipe.autocasts:
        why |= dict.fromkeys(OF_AUTOCAST, "it is not drawn under autocast")
    return lambda value: why.get(feature, "")


def _speaks(name: str) -> Callable[[Case], bool]:
    """Whether this field has an effect in a case."""
    return lambda case: name not in _COMPILER or case.spec.compile != "none"


def _is(model: str) -> Callable[[Case], bool]:
    return lambda case: case.spec.model == model


def _left_out(recipe: Recipe, name: str) -> Callable[[str], str]:
    """Why a value is not drawn: the reason that the recipe gives, or that autocast needs fp32."""

    def why(value: str) -> str:
        if (name, value) == ("autocast", "True") and "fp32" not in recipe.dtypes:
            return "it takes no fp32, which autocast narrows"
        return recipe.leaves_out.get(f"{name}={value}", "")

    return why


def _unfit(model: str) -> Callable[[str], str]:
    return lambda value: not_reentrant(model, autocast=False) if value == "reentrant" else ""


def _of(name: str) -> Callable[[Case], str]:
    return lambda case: str(getattr(case.spec, name))


def _data(case: Case) -> str:
    return case.data.values if case.data.regime == "wild" else case.data.regime


def _values(name: str, hint: Any) -> tuple[Any, ...]:
    """The values of a Spec's field that should be drawn."""
    if name in _NUMBERS:
        return _NUMBERS[name]
    return (False, True) if hint is bool else get_args(hint)


def _drawn(recipe: Recipe) -> Iterator[Case]:
    """Draws of a recipe on every rung on which it runs, in independent lots, because within one
    Hypothesis also draws variants of its earlier draws."""
    for rung in get_args(Compile) if recipe.compiles else ("none",):
        draws = EAGER_DRAWS if rung == "none" else COMPILED_DRAWS
        for lot in range(draws // _LOT):
            yield from examples(cases([recipe], compile=rung), _LOT, lot)
