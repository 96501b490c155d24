"""What must hold of every case: a property a row, judged by its rules on the cases it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from narrowfuzz.case.arm import COMPILERS, Compile
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec
from narrowfuzz.draw.operator_specs import operator_specs
from narrowfuzz.draw.specs import DIRECT, FRAGILE, specs, trainings
from narrowfuzz.draw.strategies import cases, data_specs, direct_cases
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register
from narrowfuzz.plugin import Harness

#: Recipes to cases; None: no chosen recipe has any.
Draws = Callable[[Sequence[Any]], st.SearchStrategy[Case] | None]


@dataclass(frozen=True)
class Property:
    """One promise, and the rules that judge it."""

    name: str
    says: str
    rules: tuple[str, ...]
    #: What eager rungs are judged on; None: it is about compiled ones.
    draws: Draws | None = cases
    #: Those of the rules that judge compiled rungs.
    compiled: tuple[str, ...] = ()
    #: Compiled Specs that can show something.
    needs: Callable[[Spec], bool] | None = None
    #: The models of such compiled Specs.
    models: tuple[ModelName, ...] = ("linear",)


def _called_twice(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    """Most cases call a layer once, and then there is no sum of gradients."""

    def twice(case: Case) -> Case:
        spec = case.spec
        if spec.scheduled or not spec.trains:
            return case
        return msgspec.structs.replace(case, spec=msgspec.structs.replace(spec, microbatches=2))

    return cases(recipes).map(twice)


def _models(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    """A linear alone is judged as such."""
    drawn = specs(recipes, linears=False)
    return st.builds(lambda spec, data: Case(spec=spec, data=data), drawn, data_specs())


def _operators(recipes: Sequence[Any]) -> st.SearchStrategy[Case] | None:
    """Models that are one operator, whose operands may be changed."""
    plain = [r for r in recipes if not r.plan(Spec(recipe=r.name)).quantised]
    related = tuple(name for name, model in MODELS.items() if model.relations)
    if not plain:
        return None
    drawn = operator_specs(plain, related)
    return st.builds(lambda spec, data: Case(spec=spec, data=data), drawn, data_specs())


def _with_a_bias(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    def biased(case: Case) -> Case:
        return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, bias=True))

    return cases(recipes, vary=DIRECT).map(biased)


def _ended_by_a_linear(recipes: Sequence[Any]) -> st.SearchStrategy[Case] | None:
    """Unquantised models whose output one linear makes."""
    plain = [r for r in recipes if not r.plan(Spec(recipe=r.name)).quantised]
    last = tuple(name for name, model in MODELS.items() if model.last)
    if not plain:
        return None
    drawn = specs(plain, models=last, linears=False)
    return st.builds(lambda spec, data: Case(spec=spec, data=data), drawn,
                     data_specs(lattice=False))  # fmt: skip


def _with_functions(recipes: Sequence[Any]) -> st.SearchStrategy[Case] | None:
    """Cases of a model that has an ``autograd.Function`` of its own: the one beside this file."""
    file = Path(__file__).with_name("own_function.py")
    (model,) = register(f"{file}:build")
    able = [r for r in recipes if model.fixed["dtype"] in r.dtypes]
    if not able:
        return None
    drawn = specs(able, models=(model.name,), linears=False)
    return st.builds(lambda spec, data: Case(spec=spec, data=data), drawn, data_specs())


def _lattices(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    """Linears whose sums are exact."""

    def exact(case: Case) -> Case:
        data = DataSpec(regime="lattice", seed=case.data.seed)
        return msgspec.structs.replace(case, data=data)

    return cases(recipes, vary=DIRECT).map(exact)


def _ladders(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    return cases(recipes, vary=DIRECT, ladders=lambda spec: 100)


def _trainings(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    data = data_specs(lattice=False)
    return st.builds(lambda spec, data: Case(spec=spec, data=data), trainings(recipes), data)


def _scaled(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    """Of any training, with a GradScaler."""
    return _trainings([r for r in recipes if r.dtypes != ("fp16",)]).map(_with_a_scaler)


def _with_a_scaler(case: Case) -> Case:
    spec = msgspec.structs.replace(case.spec, loss_scaling="grad_scaler")
    return msgspec.structs.replace(case, spec=spec if spec.dtype != "fp16" else case.spec)


def _clipped(recipes: Sequence[Any]) -> st.SearchStrategy[Case]:
    """Of any training, with gradients clipped by their norm."""
    return _trainings(recipes).map(_with_clipping)


def _with_clipping(case: Case) -> Case:
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, clipping="norm"))


#: They quantise nothing.
_BASELINES = ("torch.fp32", "torch.bf16")
PROPERTIES = (
    Property("contract", "what conversion accepts runs forward and backward, or is refused clearly",
             ("contract", "census"), compiled=("contract", "census")),
    Property("determinism", "the same layer on the same data gives the same bits, tapped or not",
             ("O1",), compiled=("O1",)),
    Property("quantiser", "amax, scale and codes are what the recipe's rules say, bit for bit",
             ("O4", "O3", "O2"), compiled=("O4", "O3", "O2"),
             needs=lambda spec: spec.recipe not in _BASELINES),
    Property("gemm", "every result lies in the interval that its operands allow", ("O5", "O15"),
             compiled=("O5", "O15")),
    Property("ladder", "sums that tell accumulators apart come out as the plan's may", ("O23",),
             _ladders),
    Property("layer", "every result lies within the proven distance of the unquantised product",
             ("O6",), compiled=("O6",)),
    Property("lattice", "where every sum is exact, every arm returns the one exact result",
             ("O7",), _lattices, compiled=("O7",), needs=lambda spec: spec.k > 0),
    Property("compile", "compiled code is eager code: to the bit, or no worse against float64",
             ("O8", "O9"), None, ("O8", "O9")),
    Property("special values", "Inf and NaN come out where the plan says so, and nowhere else",
             ("O10", "O11"), compiled=("O10", "O11")),
    Property("checkpoint", "recomputation changes nothing, attention's statistics included",
             ("O12", "O13", "O18"), compiled=("O13", "O18"), models=FRAGILE,
             needs=lambda spec: spec.checkpoint != "none" and spec.trains),
    Property("bias gradient", "a bias gradient is the sum of the output gradients", ("O16",),
             _with_a_bias, compiled=("O16",), needs=lambda spec: spec.bias),
    Property("gradient sum", "a parameter's gradient is the sum over the calls of its layer",
             ("O21",), _called_twice),
    Property("operators", "a call of an operator returns what float64 does, within its bound",
             ("O25",), _models),
    Property("operands", "scaled, negated and hidden operands leave what they must of an operator",
             ("R28",), _operators),
    Property("microbatches", "gradients of several microbatches are added, one by one", ("R23",),
             _called_twice),
    Property("training", "evaluations, reloads, waiting and kept graphs change nothing",
             ("R24", "R25", "R26", "R27"), _trainings),
    Property("loss scaling", "GradScaler divides, skips, doubles and halves as its definition says",
             ("R29",), _scaled, needs=lambda spec: spec.optimizes),
    Property("clipping", "gradients are clipped by the norm of all of them, or each by itself",
             ("O26",), _clipped, needs=lambda spec: spec.optimizes),
    Property("own backward", "backward belongs to the forward that was run, random numbers too",
             ("O22",), _ended_by_a_linear),
    Property("own functions", "the backward of a user's own Function is its forward's derivative",
             ("O24",), _with_functions),
    Property("scaling", "powers of two and signs pass through a quantised layer exactly",
             ("R1", "R2", "R3", "R4"), direct_cases),
    Property("permutation", "tokens, features and K in another order: the results in that order",
             ("R5", "R6", "R7"), direct_cases),
    Property("padding", "appended zeros change nothing", ("R8",), direct_cases),
    Property("batching", "a batch padded, or in two parts: the same rows, gradients that add up",
             ("R9", "R10"), direct_cases),
    Property("swapped roles", "linear(w, x) is linear(x, w) transposed", ("R11",), direct_cases),
    Property("granules", "a granule's codes depend on its own data alone, monotonically",
             ("R12", "R13", "R14", "R15"), direct_cases),
    Property("memory layout", "strided, transposed and expanded tensors give what copies give",
             ("R16",), direct_cases),
    Property("shapes", "batched and flattened inputs give the same bits", ("R17",), direct_cases),
    Property("steps", "steps of an optimiser with lr = 0 change nothing", ("R18",), direct_cases),
    Property("bias", "a layer with a bias is the layer without it, plus the bias", ("R19",),
             direct_cases),
    Property("state round trip", "a fresh layer that loads the saved state gives the same bits",
             ("R20",), direct_cases),
    Property("recipes agree", "power-of-two recipes, and both copies of a tensor, agree",
             ("R21", "R22"), direct_cases),
)  # fmt: skip


@pytest.fixture(autouse=True)
def forgets_own_models() -> Iterator[None]:
    """A user's model that a property draws is none of what the next one draws."""
    before = set(MODELS)
    yield
    if added := MODELS.keys() - before:
        for name in added:
            del MODELS[name]
        register.cache_clear()


@pytest.mark.parametrize("promise", [p for p in PROPERTIES if p.draws], ids=lambda p: p.name)
def test_rules(harness: Harness, promise: Property) -> None:
    assert promise.draws is not None
    drawn = promise.draws(harness.recipes)
    if drawn is None:
        pytest.skip(f"{promise.name}: no selected recipe has such cases")
    harness.check(drawn, promise.rules)


@pytest.mark.parametrize("rung", COMPILERS)
@pytest.mark.parametrize("promise", [p for p in PROPERTIES if p.compiled], ids=lambda p: p.name)
def test_compiled_rules(harness: Harness, promise: Property, rung: Compile) -> None:
    harness.check_compiled(promise.compiled, rung, promise.needs, promise.models)
