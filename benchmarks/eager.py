"""The eager arm: one linear up to 64 wide, drawn, run twice, and judged by O1-O7 and O15.

Speeds of machines differ by more than ten times, so the target is a share of raw PyTorch's speed,
measured in the same process, alternating Spec by Spec.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st
from narrowfuzz.arms.memory import poisoned
from narrowfuzz.arms.model_names import gradient_names
from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.spec import Case
from narrowfuzz.draw.specs import DIRECT, specs
from narrowfuzz.draw.strategies import data_specs
from narrowfuzz.judge.batch import drawn_together
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.device import Device
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.recipe.recipe import load_recipes, runnable
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.evidence import Evidence
from plain_hypothesis import generate, raw_torch

#: (recipe, backend) -> target for the share of raw PyTorch's cases per second.
LEAST = {
    ("torchao.float8.rowwise", "emulated"): 0.5,
    ("torchao.mxfp8.rceil", "linear"): 0.5,
    ("torch.bf16", ""): 0.5,
}
HEADLINE = next(iter(LEAST))
#: If raw PyTorch takes at least this many milliseconds per case, the target is the second number.
SLOW_MS, LEAST_IF_SLOW = 20.0, 0.8
#: O1-O7 and O15, and the rule that detects a crash.
CORE = ("contract", "O1", "O2", "O3", "O4", "O5", "O6", "O7", "O15")
SPECS, DRAWS = 40, 16
_CORE = [BY_NAME[name] for name in CORE]


def eager_part(seconds: float, device: Device) -> dict[str, Any]:
    """Rounds of the recipes that have a target, and for the first one the time of each stage."""
    recipes = load_recipes()
    found: dict[str, dict[str, Any]] = {}
    for name, backend in LEAST:
        recipe = replace(recipes[name], backends=(backend,))
        stages = []
        rounds: list[dict[str, float]] = []
        _round(recipes, recipe, 0, device)  # warm up
        until = time.perf_counter() + seconds / len(LEAST)
        while len(rounds) < 3 or time.perf_counter() < until:
            number = len(rounds) + 1
            spent, batches = _round(recipes, recipe, number, device)
            rounds.append(spent)
            if (name, backend) == HEADLINE:
                built = [batch[0].spec for batch in batches]
                each = raw_torch(recipes, built, DRAWS, device.torch, build_each=True)
                rounds[-1]["raw, built for each"] = 1e3 / each
                stages.append(_stages(recipes, recipe, batches, number, spent["judged"], device))
        found[f"{name} {backend}".strip()] = {"ms": rounds}
        if stages:
            middle = {k: statistics.median(s[k] for s in stages) for k in stages[0]}
            found[f"{name} {backend}".strip()]["stages"] = middle
    return found


def recipes_part(seconds: float, device: Device) -> dict[str, Any]:
    """Three rounds of every built-in recipe that runs here, on all of its backends that run."""
    every = load_recipes()
    recipes = {n: able for n, r in every.items() if (able := runnable(r, device.torch))}
    found = {}
    for name, recipe in recipes.items():
        _round(recipes, recipe, 0, device)
        found[name] = {"ms": [_round(recipes, recipe, n, device)[0] for n in (1, 2, 3)]}
    return found


def share(rounds: Sequence[Mapping[str, float]]) -> list[float]:
    """The share of raw PyTorch's speed that each round reached."""
    return [spent["raw"] / spent["judged"] for spent in rounds]


def _linears(recipe: Any) -> Any:
    data = st.lists(data_specs(), min_size=DRAWS, max_size=DRAWS)
    linears = specs([recipe], largest=64, wild_shapes=False, vary=DIRECT)
    return st.tuples(linears, data)


def _round(
    recipes: Any, recipe: Any, number: int, device: Device
) -> tuple[dict[str, float], list[list[Any]]]:
    """Draw and judge SPECS * DRAWS cases in the eager arm, as a campaign does.

    Returns milliseconds per case, ``judged`` including the drawing, and ``raw`` for building each
    Spec's layer once and running it twice per case; and the cases, grouped by Spec.
    """
    judge = Judge(recipes, load_ledger(), frozenset({"eager"}), device, rules=_CORE)
    batches: list[list[Any]] = []
    raw = 0.0

    def test(drawn: Any) -> None:
        nonlocal raw
        batches.append([Case(spec=drawn[0], data=data) for data in drawn[1]])
        judge.draw(batches[-1])
        for case in batches[-1]:
            judge.judge(case)
        start = time.perf_counter()
        raw_torch(recipes, [drawn[0]], DRAWS, device.torch, build_each=False)
        raw += time.perf_counter() - start

    start = time.perf_counter()
    generate(_linears(recipe), test, number=number, examples=SPECS)
    whole, cases = time.perf_counter() - start, sum(map(len, batches))
    return {"judged": (whole - raw) / cases * 1e3, "raw": raw / cases * 1e3}, batches


def _stages(
    recipes: Any, recipe: Any, batches: Any, number: int, whole: float, device: Device
) -> dict[str, float]:
    """Milliseconds per case of each stage, called one by one in ``judge``'s order; ``rest`` is the
    difference of their sum to ``whole``."""
    ledger, clock = load_ledger(), time.perf_counter
    stages = ("draw", "data", "build", "run tapped", "run untapped", "evidence", "reference")
    spent = dict.fromkeys((*stages, *(f"rule {name}" for name in CORE)), 0.0)
    start = clock()

    def took(stage: str) -> None:
        nonlocal start
        now = clock()
        spent[stage] += now - start
        start = now

    generate(_linears(recipe), lambda drawn: None, number=number, examples=SPECS)
    took("draw")
    for batch in batches:
        spec = batch[0].spec
        plan = recipe.plan(spec).added_by(device.accumulators, spec.dtype)
        start = clock()
        program = Program(spec, recipe, EAGER, device=device.torch)
        took("build")
        drawn = drawn_together(batch, plan, partial(tensors_of, recipe=recipe))
        took("data")
        for case in batch:
            start = clock()
            tensors, reference = drawn[case]
            traces = {"eager": program.run(tensors, tap=True)}
            took("run tapped")
            sizes = {result.size for result in traces["eager"].outputs.values()}
            with poisoned(sizes, device.torch):
                repeats = {"eager": program.run(tensors, tap=False)}
            took("run untapped")
            evidence = Evidence(
                case=case, plan=plan, accumulators=device.accumulators, tensors=tensors,
                traces=traces, repeats=repeats, prepared=reference,
                elides=frozenset(), deviations=ledger.deviations(case),
                refusal=recipe.refusal(spec, device.torch), gradients=gradient_names(spec),
                pointwise=MODELS[spec.model].pointwise,
            )  # fmt: skip
            took("evidence")
            for role in ROLES:
                evidence.reference.layer(role)
                evidence.reference.gemm(role)
                evidence.reference.may_overflow(role)
            took("reference")
            for rule in _CORE:
                list(rule.check(evidence))
                took(f"rule {rule.name}")
    cases = sum(len(b) for b in batches)
    per_case = {stage: value / cases * 1e3 for stage, value in spent.items()}
    return per_case | {"rest": whole - sum(per_case.values())}
