"""What tests/test_replayed.py judges again: every case of the tests with an outcome, by name.

Left out are what Inductor compiles, which takes minutes, and the ledger's scripts, which import
nothing of ours: tests/ledger/test_known.py runs them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import te_neighbours_checks as of_te
import te_ranks_checks as te_ranks
from context_bridge import bridged
from msgspec.structs import replace
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.plants.hopper import PLANTS as OF_HOPPER
from narrowfuzz.plants.registry import planted
from narrowfuzz.play.processes import around
from neighbours import NEIGHBOURS, Plantable
from power import test_controls as controls
from rules import test_classes as classes
from rules import test_context as context
from rules import test_rules_catch_faults as rules
from rules import test_sharded as ranks
from te_on_cpu.environment import DEFAULT
from triage import test_schedule_triage as schedules

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Replay:
    """Cases to judge one after another until one shows something, and what is planted meanwhile."""

    id: str
    cases: tuple[Case, ...]
    plant: Plantable = nullcontext
    #: Is what the ledger knows held against it?
    ledger: bool = True
    #: The rule that judges alone; "": all that apply.
    rule: str = ""
    #: The arms that are run; None: all that the case asks for.
    arms: frozenset[str] | None = None
    #: The process that it needs: "", "simulated" or a version of TransformerEngine.
    where: str = ""
    #: Files that define recipes besides the shipped ones.
    recipe_files: tuple[Path, ...] = ()

    @property
    def quick(self) -> bool:
        """Is it judged in `make test`?"""
        compiled = any(case.spec.compile != "none" for case in self.cases)
        clean = self.kind == "state" and self.id.endswith(", clean")
        return self.kind in _QUICK and not (self.where or compiled or clean)

    @property
    def inductor(self) -> bool:
        return any(case.spec.compile == "inductor" for case in self.cases)

    @property
    def kind(self) -> str:
        """Where it is from: the word that its id begins with."""
        return self.id.partition(":")[0]


_QUICK = ("fault", "state", "alarm", "schedule")


#: What memory holds that nobody wrote is another thing each time.
_UNSTEADY = {"fault: empty-gemm-unwritten", "fault: rows-unwritten"}


def replays() -> dict[str, Replay]:
    """All of them by id."""
    sources = (
        *(
            _faults,
            _state_faults,
            _schedules,
            _rules,
            _ranks,
            _context,
            _classes,
            _hopper,
            _te_ranks,
        ),
        *(_alarms, _controls, _entries, _te_entries),
    )
    found = [replay for source in sources for replay in source() if not replay.inductor]
    found = [replay for replay in found if replay.id not in _UNSTEADY]
    by_id = {replay.id: replay for replay in found}
    assert len(by_id) == len(found), "two replays have one id"
    return by_id


def _stored(file: str) -> Any:
    return json.loads((HERE / file).read_text())


def _case(stored: Any) -> Case:
    return load_case(json.dumps(stored).encode())


def _fault(id: str, *cases: Case, plant: str | Plantable, **fields: Any) -> Iterator[Replay]:
    """Cases with a fault, by its name or as it is planted, and the first of them without."""
    planting = partial(planted, "", plant) if isinstance(plant, str) else plant
    yield Replay(id, cases, planting, **fields)
    yield Replay(f"{id}, clean", cases[:1], **fields)


# faults


def _faults() -> Iterator[Replay]:
    for fault, stored in _stored("fault_cases.json").items():
        yield from _fault(f"fault: {fault}", _case(stored), plant=fault)


def _state_faults() -> Iterator[Replay]:
    """On the first of tests/plants/test_state_faults.py's schedules that shows it."""
    for fault, stored in _stored("state_cases.json").items():
        yield from _fault(f"state: {fault}", _case(stored), plant=fault, ledger=False)


def _schedules() -> Iterator[Replay]:
    case = schedules.case_of(schedules.LARGE)
    for fault in schedules.SHOWN_BY:
        planting = partial(planted, schedules.FAULTS, fault)
        yield Replay(f"schedule: {fault}", (case,), planting, ledger=False)
    yield Replay("schedule: clean", (case,), ledger=False)


def _rules() -> Iterator[Replay]:
    met: Counter[str] = Counter()
    for hunt in rules.HUNTS:
        alone = {"ledger": False, "rule": hunt.rule, "arms": hunt.arms}
        name = f"{hunt.rule} {hunt.fault} {hunt.recipe}"
        met[name] += 1
        id = f"rule: {name}{f' {met[name]}' if met[name] > 1 else ''}"
        yield from _fault(id, *rules.cases(hunt), plant=hunt.fault, **alone)


def _ranks() -> Iterator[Replay]:
    for fault, recipe, sharding, fields, _ in ranks.FAULTS:
        id = f"ranks: {fault} {recipe} {sharding} {fields}"
        case = ranks.case(recipe, sharding, **fields)
        yield from _fault(id, case, plant=fault, ledger=False)
    layouts = [
        *((recipe, layout, {}) for recipe in _LAID_OUT for layout in ranks.LAYOUTS),
        *(("torch.bf16", layout, {"compile": "aot_eager", **f}) for layout, f in ranks.GRAPHS),
        *((recipe, layout, _RESUMED) for recipe, layout in ranks.RESUMED),
    ]
    for recipe, sharding, fields in layouts:
        case = ranks.case(recipe, sharding, **fields)
        yield Replay(f"ranks: {recipe} {sharding} {fields}", (case,), ledger=False)


_LAID_OUT = ("torch.bf16", ranks.TENSORWISE, "torchao.float8.rowwise")
_RESUMED = {"steps": 2, "optimizer": "adamw", "n": 60, "k": 48}


def _context() -> Iterator[Replay]:
    for fault, _ in context.FAULTS:
        planting = _bridged(partial(planted, "", fault))
        yield Replay(f"context: {fault}", (context.case({"context": 2}),), planting, ledger=False)
    for sharding, fields, _ in context.CLEAN:
        id = f"context: {sharding} {fields}"
        yield Replay(id, (context.case(sharding, **fields),), _bridged(nullcontext), ledger=False)


def _classes() -> Iterator[Replay]:
    for fault, fields in classes.FAULTS:
        case = classes.case({"classes": 3}, **fields)
        yield from _fault(f"classes: {fault}", case, plant=fault, ledger=False)


def _bridged(plant: Plantable) -> Plantable:
    """The same where context parallelism knows a CPU's attention, as its ranks do."""

    @contextmanager
    def entered() -> Iterator[None]:
        around.append(bridged)
        with bridged(), plant():
            yield
        around.remove(bridged)

    return entered


def _hopper() -> Iterator[Replay]:
    """As tests/simulated_checks.py, on a case that splits K and one that does not."""
    otherwise = {
        "hopper-product-lost": ("torchao.float8.tensorwise", "wild", "O15"),
        "hopper-scales-exchanged": ("torchao.float8.rowwise", "wild", "O5"),
    }
    for fault in OF_HOPPER:
        recipe, regime, rule = otherwise.get(
            fault.id, ("torchao.float8.tensorwise", "ladder", "O23")
        )
        cases = [
            Case(
                spec=Spec(recipe=recipe, backend="real", m=m, k=32, n=512, dtype="fp32"),
                data=DataSpec(regime=regime, gemm="grad_input"),
            )
            for m in (16, 32)
        ]
        alone = {"ledger": False, "rule": rule, "where": "simulated", "arms": frozenset({"eager"})}
        yield from _fault(f"hopper: {fault.id}", *cases, plant=fault.id, **alone)


def _te_ranks() -> Iterator[Replay]:
    for name, (number, settings, checkpoint) in te_ranks.CLEAN.items():
        case = te_ranks.case(number, settings, checkpoint)
        yield Replay(f"te ranks: {name}", (case,), where=DEFAULT)
    for fault, settings in te_ranks.FAULTS.items():
        case = te_ranks.case(2, settings)
        yield Replay(f"te ranks: {fault}", (case,), partial(planted, "", fault), where=DEFAULT)


# what is no fault


def _alarms() -> Iterator[Replay]:
    for alarm in _stored("false_alarms.json"):
        case = _case(alarm["case"])
        where = DEFAULT if case.spec.recipe.startswith("te.") else ""
        yield Replay(f"alarm: {alarm['why']}", (case,), where=where)


def _controls() -> Iterator[Replay]:
    for id, control in controls.CONTROLS.items():
        case = controls.case_of(control)
        if id == "delayed-reentrant":  # it carries no other
            case = replace(case, spec=replace(case.spec, checkpoint="reentrant"))
        te = any(recipe.startswith("te.") for recipe in control.recipes)
        yield Replay(
            f"control: {id}",
            (case,),
            control.plant,
            where="simulated" if control.device == "simulated" else DEFAULT if te else "",
            recipe_files=control.recipe_files,
        )


# the ledger


def _entries() -> Iterator[Replay]:
    """The case that an entry explains, and the same with another failure."""
    for name, neighbour in NEIGHBOURS.items():
        if neighbour.compiled:
            continue
        yield Replay(f"entry: {name}", (neighbour.case,))
        yield Replay(f"entry: {name}, beside", (neighbour.case,), neighbour.beside)


def _te_entries() -> Iterator[Replay]:
    for row in of_te.ROWS:
        fields = {"where": row["version"], "rule": row.get("rule", "")}
        id, case = f"entry: {row['entry']}", _case(row["case"])
        yield Replay(id, (case,), **fields)
        yield Replay(f"{id}, beside", (case,), lambda f=row["beside"]: of_te.beside(f)(), **fields)
