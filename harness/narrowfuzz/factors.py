"""``narrowfuzz list coverage``: of each factor of a Spec and its data, what is drawn and how often.

Counted in draws of the strategies that campaigns use, not read off their code: a value that the
vocabulary has and no draw of a recipe brings is a hole, and is listed as *not yet*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

from hypothesis import HealthCheck, Phase, given, seed, settings

from narrowfuzz.case import Case, Spec, ValueClass
from narrowfuzz.recipe import Recipe
from narrowfuzz.strategies import cases

#: Eager cases, and cases of each compiled rung, that are drawn of a recipe.
EAGER_DRAWS, COMPILED_DRAWS = 400, 80
_RUNGS = ("none", "aot_eager", "aot_eager_decomp_partition", "inductor")
_COMPILER = ("dynamic", "fullgraph", "memory_budget")
#: Fields of a Spec with a few values, and what they are called where that says more.
_FIELDS = (
    "model", "dtype", "autocast", "grad_mode", "checkpoint", "compile", "steps", "microbatches",
    "optimizer", "lifecycle", "bias", "input_layout", "grad_layout", "heads", "attention",
    "kernels",
    *_COMPILER,
)  # fmt: skip
#: Numbers of which any is as good as another above one.
_NUMBERS = {"steps": (1, 2, 3, 5), "microbatches": (1, 2, 3)}


def rows(recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, str, str, str]]:
    """(recipe, factor, values with their share of the draws, values that are not drawn yet). Dtypes
    that a recipe is not made for are left out."""
    for recipe in recipes.values():
        found = list(_drawn(recipe))
        for factor, of, vocabulary in _factors(recipe):
            counts = Counter(of(case) for case in found if _speaks(factor, case))
            total = sum(counts.values())
            shares = [f"{value} {100 * n / total:.0f}%" for value, n in counts.most_common()]
            lacking = [value for value in vocabulary if value not in counts]
            if factor == "dtype" and recipe.name == f"torch.{recipe.dtypes[0]}":
                lacking = []  # the others have recipes of their own, or none
            yield recipe.name, factor, ", ".join(shares), ", ".join(lacking)


def _speaks(factor: str, case: Case) -> bool:
    """Is this factor's value of any consequence in the case?"""
    return factor not in _COMPILER or case.spec.compile != "none"


def _factors(recipe: Recipe) -> Iterator[tuple[str, Callable[[Case], str], tuple[str, ...]]]:
    hints = get_type_hints(Spec)
    yield "backend", lambda case: case.spec.backend or recipe.backends[0], recipe.backends
    for name in _FIELDS:
        yield name, _of(name), tuple(map(str, _values(name, hints[name])))
    yield "data", _data, ("lattice", *get_args(ValueClass))


def _of(name: str) -> Callable[[Case], str]:
    return lambda case: str(getattr(case.spec, name))


def _data(case: Case) -> str:
    return "lattice" if case.data.regime == "lattice" else case.data.values


def _values(name: str, hint: Any) -> tuple[Any, ...]:
    """All values that a Spec's field may have."""
    if name in _NUMBERS:
        return _NUMBERS[name]
    return (False, True) if hint is bool else get_args(hint)


def _drawn(recipe: Recipe) -> Iterator[Case]:
    found: list[Case] = []
    for rung in _RUNGS:
        draws = EAGER_DRAWS if rung == "none" else COMPILED_DRAWS

        @seed(0)
        @settings(
            max_examples=draws, phases=[Phase.generate], database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(cases([recipe], compile=rung))  # type: ignore[arg-type]
        def collect(case: Case) -> None:
            found.append(case)

        collect()
    yield from found
