"""Run by test_te_faults.py in a process of its own: prints what each fault did, one line each."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, seed, settings
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.strategies import schedule_cases
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import builtin_faults, builtin_plants
from samples import every_recipe
from te_on_cpu.environment import enter

#: Fault -> its recipe, and how many schedules are drawn.
HUNTED = {
    "te-update-lost-at-evaluation": ("te.delayed", 20),
    "te-current-power-of-two": ("te.current", 6),
    "te-mx-one-code": ("te.mxfp8", 6),
    "te-block-any-scale": ("te.blockwise", 6),
    "te-block-lines-of-weights": ("te.blockwise", 6),
    "te-block-tail-scale": ("te.blockwise", 6),
    "te-fp4-lines-of-weights": ("te.nvfp4", 6),
    "te-fp4-amax-untransformed": ("te.nvfp4", 6),
    "te-fp4-without-signs": ("te.nvfp4", 6),
    "te-fp4-forward-by-chance": ("te.nvfp4.stochastic", 6),
    "te-fp4-gradient-to-nearest": ("te.nvfp4.stochastic", 6),
    "te-fp4-noise-then-nearest": ("te.nvfp4.stochastic", 6),
    "te-fp4-one-number": ("te.nvfp4.stochastic", 6),
}


def attributes() -> dict[tuple[str, ...], int]:
    """Everything TransformerEngine's modules and their classes hold, by identity."""
    return {path: id(value) for path, value in _held()}


def _held() -> Iterator[tuple[tuple[str, ...], object]]:
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformer_engine") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            yield (name, attribute), value
            if isinstance(value, type) and value.__module__ == name:
                for inner, held in list(vars(value).items()):
                    yield (name, attribute, inner), held


def planted_and_lifted(fault: Plant) -> str:
    """What went wrong, or "ok"."""
    with fault.plant():  # the modules that it needs are imported from here on
        pass
    before = attributes()
    with fault.plant():
        during = attributes()
    after = attributes()
    if during == before:
        return "changed nothing"
    left = sorted(".".join(path) for path in before if after.get(path) != before[path])
    return f"left {left}" if left or after.keys() != before.keys() else "ok"


def hunted(fault: Plant, name: str, cases: int) -> str:
    """The rules that showed the fault in so many schedules, "" if none did."""
    recipe = every_recipe()[name]
    judge = Judge(every_recipe(), load_ledger())
    shown: set[str] = set()

    @seed(4)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule_cases([recipe], ranks=(0,)))  # they show in one process
    def hunt(case: Case) -> None:
        if not shown:
            with fault.plant():
                shown.update(verdict.rule for verdict in judge.judge(case).causes)

    hunt()
    return " ".join(sorted(shown))


def judged(control: Plant) -> str:
    """The sentences about a case of the control, or "ok" if it ran and there are none."""
    spec = Spec(recipe="te.experts", model=control.models[0], m=24, k=20, n=24, steps=2)
    judge = Judge(every_recipe(), load_ledger())
    with control.plant():
        judgement = judge.judge(Case(spec=spec, data=DataSpec(values="equal")))
    said = "; ".join(verdict.sentence() for verdict in judgement.causes)
    return said or ("ok" if judgement.ran else "nothing ran")


def main() -> None:
    prepare()
    settle()
    enter()
    faults = builtin_faults()
    for fault in faults.values():
        if fault.id.startswith("te-"):
            print("PLANTED", fault.id, planted_and_lifted(fault), flush=True)
    for control in builtin_plants().values():
        if control.legal and control.recipes == ("te.experts",):
            print("JUDGED", control.id, judged(control), flush=True)
    for id, (name, cases) in HUNTED.items():
        print("HUNTED", id, hunted(faults[id], name, cases), flush=True)


if __name__ == "__main__":
    main()
