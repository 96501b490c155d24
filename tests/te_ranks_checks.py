"""Run by test_te_ranks.py in a process of its own: prints what the rules say of TransformerEngine's
delayed scaling on ranks, a line of JSON for each case, or each that is named."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from narrowfuzz.case.events import Backward, Close, Event, Forward, Open, Settings, Step
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import AnyCheckpoint, Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.registry import planted
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.layers import of_layers
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.verify import run_script
from te_on_cpu.environment import enter

#: Name -> ranks, what is shared, checkpoint, whether the update is the bulk kernel's.
CLEAN: dict[str, tuple[int, Settings, AnyCheckpoint]] = {
    "two share": (2, Settings(), "none"),
    "three share, recomputed": (3, Settings(), "reentrant"),
    "two share, tensor by tensor": (2, Settings(fused=False), "none"),
    "a group of its own": (2, Settings(reduces="own"), "none"),
    "nothing reduced": (2, Settings(reduces="none"), "full"),
    "a world of one": (1, Settings(), "none"),
}
#: Fault -> what shows it.
FAULTS: dict[str, Settings] = {
    "te-amax-not-reduced": Settings(),
    "te-amax-added": Settings(),
    "te-amax-of-first-rank": Settings(),
    "te-amax-forward-only": Settings(),
    "te-amax-of-all-ranks": Settings(reduces="own"),
}
#: Its script is run, with the fault and without.
SCRIPT_OF = "te-amax-forward-only"


def case(ranks: int, settings: Settings, checkpoint: AnyCheckpoint = "none") -> Case:
    """Three steps of a linear."""
    events: list[Event] = []
    for step in range(3):
        events += [Open(), Forward(), Close(), Backward(of=(step,)), Step()]
    spec = Spec(
        recipe="te.delayed", model="library_linear", events=tuple(events), settings=settings,
        checkpoint=checkpoint, sharding=Sharding(data=ranks), m=16,
    )  # fmt: skip
    return Case(spec=spec, data=DataSpec(seed=3))


def shown_by(judge: Judge, faulty: Case, cause: Verdict, fault: str) -> list[bool]:
    """Does its script show it, with the fault and without?"""
    with planted("", fault):
        evidence = judge.observe(faulty)
    text = write_played_script(of_layers(evidence, cause, load_every()["te.delayed"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repro.py"
        path.write_text(text)
        runs = [run_script(path, plant=plant) for plant in (("", fault), None)]
    return [run.shown for run in runs]


def main(named: list[str]) -> None:
    prepare()
    enter()
    settle()
    judge = Judge(load_every(), load_ledger())
    for name, (ranks, settings, checkpoint) in CLEAN.items():
        if named and name not in named:
            continue
        found = judge.judge(case(ranks, settings, checkpoint))
        ok = sorted({v.rule for v in found.verdicts if v.status == "ok" and v.rule[0] == "S"})
        print(json.dumps(["CLEAN", name, len(found.causes), ok]), flush=True)
    for fault, settings in FAULTS.items():
        if named and fault not in named:
            continue
        faulty = case(2, settings)
        with planted("", fault):
            causes = judge.judge(faulty).causes
        shown = shown_by(judge, faulty, causes[0], fault) if fault == SCRIPT_OF else []
        told = sorted({(v.rule, v.role) for v in causes})
        print(json.dumps(["FAULT", fault, told, shown]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
