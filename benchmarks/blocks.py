"""The cost of judging compared with running, in the eager arm: for a linear, for whole models, and
for models that consist of one other operator."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.draw.strategies import data_specs
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.device import Device
from narrowfuzz.models.catalog import MODELS as ALL
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.rules import RULES
from plain_hypothesis import generate

MODELS: tuple[ModelName, ...] = ("linear", "mlp_swiglu", "attention", "llama_block", "two_blocks")
RECIPES = ("torch.bf16", "torchao.float8.rowwise", "torchao.mxfp8.rceil")
CASES, ROUNDS = 40, 3
#: Draws of one Spec that a campaign judges together.
DRAWS = 16
#: Milliseconds by which judging a linear, or another operator, may exceed running it.
LINEAR_MS = OPERATOR_MS = 4.0
_CORE = [rule for rule in RULES if not rule.reruns]


def blocks_part(seconds: float, device: Device) -> dict[str, Any]:
    """Milliseconds per case by recipe and model, medians of the rounds: for the subject's own runs
    (``subject``) and for the whole judgement (``judge``)."""
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        for model in MODELS:
            spec = Spec(recipe=recipe, model=model, m=32, k=64, n=64, batch=2, heads=2)
            rounds = _rounds(spec, device)
            found[f"{recipe} {model}"] = {
                name: statistics.median(r[name] for r in rounds) for name in rounds[0]
            }
    return found


def operators_part(seconds: float, device: Device) -> dict[str, Any]:
    """The same for each model that is one operator, with 128 rows of 64 features and 128 keys, or
    four experts. Models that raise, for example for lack of Triton or by a known issue, are printed
    and skipped."""
    recipe = load_recipes()["torch.fp32"]
    found: dict[str, Any] = {}
    for model in ALL.values():
        if model.kind != "operator" or model.forbidden or model.device not in ("", device.torch):
            continue
        n = 4 if model.columns == "experts" else 128
        spec = Spec(recipe=recipe.name, model=model.name, m=128, k=64, n=n, heads=1, dtype="fp32")
        spec = fixed(spec, recipe)
        if why := _raises(spec, device):
            print(f"not measured: {model.name} raises: {why}", file=sys.stderr)
            continue
        rounds = _rounds(spec, device)
        found[model.name] = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return found


def _raises(spec: Spec, device: Device) -> str:
    """The message of the error that the model raises; "" if it runs."""
    recipe, case = load_recipes()[spec.recipe], Case(spec=spec, data=DataSpec())
    program = Program(spec, recipe, EAGER, device=device.torch)
    error = program.run(tensors_of(case, recipe), tap=False, spec=spec).error
    return "" if error is None else error.message


def _rounds(spec: Spec, device: Device) -> list[dict[str, float]]:
    """Milliseconds per case of each round. Running and judging alternate case by case, so that load
    on the machine slows down both."""
    recipes, clock = load_recipes(), time.perf_counter
    judge = Judge(recipes, load_ledger(), frozenset({EAGER.name}), device=device)
    program = Program(spec, recipes[spec.recipe], EAGER, device=device.torch)
    data: list[DataSpec] = []
    generate(data_specs(lattice=spec.direct), data.append, number=1, examples=CASES * ROUNDS)
    judge.judge(Case(spec=spec, data=data[0]), _CORE)  # the first draw of a Spec takes longer
    rounds = []
    for number in range(ROUNDS):
        spent = {"subject": 0.0, "judge": 0.0}
        cases = [Case(spec=spec, data=drawn) for drawn in data[number::ROUNDS]]
        for i, case in enumerate(cases):
            if i % DRAWS == 0:
                start = clock()
                judge.draw(cases[i : i + DRAWS])
                spent["judge"] += clock() - start
            tensors = tensors_of(case, recipes[spec.recipe])
            start = clock()
            for _ in range(2 if spec.direct else 1):
                assert program.run(tensors, tap=False, spec=spec).error is None
            middle = clock()
            assert judge.judge(case, _CORE, focus=0, repeat=False).ran
            spent["subject"] += middle - start
            spent["judge"] += clock() - middle
        rounds.append({name: value / CASES * 1e3 for name, value in spent.items()})
    return rounds
