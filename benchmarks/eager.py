"""The eager rung: one linear up to 64 wide, drawn, run twice, and judged by O1-O7 and O15."""

from __future__ import annotations

import statistics
import time
from typing import Any

from hypothesis import strategies as st
from narrowfuzz.arm import EAGER
from narrowfuzz.arms.program import Program
from narrowfuzz.case import Case
from narrowfuzz.catalog import MODELS
from narrowfuzz.data import make_tensors
from narrowfuzz.device import Device
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import load_ledger
from narrowfuzz.models.zoo import gradient_names
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.oracles import BY_NAME
from narrowfuzz.oracles.evidence import Evidence
from narrowfuzz.recipe import load_recipes, runnable
from narrowfuzz.specs import DIRECT, specs
from narrowfuzz.strategies import data_specs
from plain_hypothesis import generate, raw_torch

HEADLINE = "torchao.float8.rowwise"
#: O1-O7 and O15, and the rule that notices a crash.
CORE = ("contract", "O1", "O2", "O3", "O4", "O5", "O6", "O7", "O15")
SPECS, DRAWS = 40, 16
_CORE = [BY_NAME[name] for name in CORE]


def eager_part(seconds: float, device: Device) -> dict[str, Any]:
    """Cases a second of the headline recipe, beside raw PyTorch, and where the time goes."""
    recipes = load_recipes()
    found: dict[str, Any] = {"rate": [], "raw": [], "raw_once": [], "ms": [], "cases": 0}
    _round(recipes, HEADLINE, 0, device)  # warm up
    until = time.perf_counter() + seconds
    while len(found["rate"]) < 3 or time.perf_counter() < until:
        number = len(found["rate"]) + 1
        spent, batches = _round(recipes, HEADLINE, number, device)
        cases = sum(len(b) for b in batches)
        built = [b[0].spec for b in batches]
        found["cases"] += cases
        found["rate"].append(cases / spent)
        found["raw"].append(raw_torch(recipes, built, DRAWS, device.torch, build_each=True))
        found["raw_once"].append(raw_torch(recipes, built, DRAWS, device.torch, build_each=False))
        found["ms"].append(_stages(recipes, batches, number, spent, device))
    stages = found.pop("ms")
    found["ms"] = {name: statistics.median(s[name] for s in stages) for name in stages[0]}
    return found


def recipes_part(seconds: float, device: Device) -> dict[str, Any]:
    """The same for every shipped recipe that runs here, for comparison: three rounds each."""
    recipes = {n: able for n, r in load_recipes().items() if (able := runnable(r, device.torch))}
    rates: dict[str, list[float]] = {}
    for name in recipes:
        _round(recipes, name, 0, device)
        rounds = [_round(recipes, name, number, device) for number in (1, 2, 3)]
        rates[name] = [sum(len(b) for b in batches) / spent for spent, batches in rounds]
    return {"rates": rates}


def _linears(recipe: Any) -> Any:
    data = st.lists(data_specs(), min_size=DRAWS, max_size=DRAWS)
    linears = specs([recipe], largest=64, wild_shapes=False, vary=DIRECT)
    return st.tuples(linears, data)


def _round(recipes: Any, name: str, number: int, device: Device) -> tuple[float, list[list[Any]]]:
    """Draw and judge SPECS * DRAWS cases on the eager rung; seconds, and the cases by Spec."""
    judge = Judge(recipes, load_ledger(), frozenset({"eager"}), _CORE, device)
    batches: list[list[Any]] = []

    def test(drawn: Any) -> None:
        batches.append([Case(spec=drawn[0], data=data) for data in drawn[1]])
        for case in batches[-1]:
            judge.judge(case)

    start = time.perf_counter()
    generate(_linears(recipes[name]), test, number=number, examples=SPECS)
    return time.perf_counter() - start, batches


def _stages(
    recipes: Any, batches: Any, number: int, whole: float, device: Device
) -> dict[str, float]:
    """Milliseconds a case of each stage, called one by one in the order ``judge`` does."""
    ledger, clock = load_ledger(), time.perf_counter
    stages = ("draw", "data", "build", "run tapped", "run untapped", "reference")
    spent = dict.fromkeys((*stages, *(f"rule {name}" for name in CORE)), 0.0)
    start = clock()

    def took(stage: str) -> None:
        nonlocal start
        now = clock()
        spent[stage] += now - start
        start = now

    generate(_linears(recipes[HEADLINE]), lambda drawn: None, number=number, examples=SPECS)
    took("draw")
    for batch in batches:
        spec, recipe = batch[0].spec, recipes[HEADLINE]
        plan = recipe.plan(spec).added_by(device.accumulators, spec.dtype)
        start = clock()
        program = Program(spec, recipe, EAGER, device=device.torch)
        took("build")
        for case in batch:
            start = clock()
            tensors = make_tensors(case, plan)
            took("data")
            traces = {"eager": program.run(tensors, tap=True)}
            took("run tapped")
            repeats = {"eager": program.run(tensors, tap=False)}
            took("run untapped")
            evidence = Evidence(
                case=case, plan=plan, accumulators=device.accumulators, tensors=tensors,
                traces=traces, repeats=repeats,
                elides=frozenset(), deviations=ledger.deviations(case),
                refusal=recipe.refusal(spec, device.torch), gradients=gradient_names(spec),
                pointwise=MODELS[spec.model].pointwise,
            )  # fmt: skip
            for role in ROLES:
                evidence.reference.layer(role)
                evidence.reference.may_overflow(role)
            took("reference")
            for oracle in _CORE:
                list(oracle.check(evidence))
                took(f"rule {oracle.name}")
    cases = sum(len(b) for b in batches)
    spent["rest"] = whole - sum(spent.values())
    return {stage: value / cases * 1e3 for stage, value in spent.items()}
