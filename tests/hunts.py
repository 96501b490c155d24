"""What tests/test_replayed.py judges again: every stored case with an outcome, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowfuzz.case.spec import Case, load_case
from narrowfuzz.plants.registry import planted
from oracles import test_rules_catch_faults as rules

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Replay:
    """Cases to judge one after another until one shows something, and what is planted meanwhile."""

    id: str
    cases: tuple[Case, ...]
    plant: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Is what the ledger knows held against it?
    ledger: bool = True
    #: The rule that judges alone; "": all that apply.
    rule: str = ""
    #: The arms that are run; None: all that the case asks for.
    arms: frozenset[str] | None = None
    #: The process that it needs: "" or a version of TransformerEngine.
    where: str = ""

    @property
    def quick(self) -> bool:
        """Is it judged in `make test`?"""
        return (
            not self.where and self.id.partition(":")[0] in ("fault", "alarm") and not self.compiles
        )

    @property
    def compiles(self) -> bool:
        """Does it need a compiler of C++, which takes minutes?"""
        return any(case.spec.compile == "inductor" for case in self.cases)


def replays() -> dict[str, Replay]:
    """All of them by id."""
    found = [*_faults(), *_alarms(), *_rules()]
    by_id = {replay.id: replay for replay in found}
    assert len(by_id) == len(found), "two replays have one id"
    return by_id


def _stored(file: str) -> Any:
    return json.loads((HERE / file).read_text())


def _case(stored: Any) -> Case:
    return load_case(json.dumps(stored).encode())


def _both(id: str, case: Case, fault: str, **fields: Any) -> Iterator[Replay]:
    """A case with a fault and without."""
    yield Replay(id, (case,), lambda: planted("", fault), **fields)
    yield Replay(f"{id}, clean", (case,), **fields)


def _faults() -> Iterator[Replay]:
    for fault, stored in _stored("fault_cases.json").items():
        yield from _both(f"fault: {fault}", _case(stored), fault)


def _alarms() -> Iterator[Replay]:
    for alarm in _stored("false_alarms.json"):
        yield Replay(f"alarm: {alarm['why']}", (_case(alarm["case"]),))


def _rules() -> Iterator[Replay]:
    for hunt in rules.HUNTS:
        alone = {"ledger": False, "rule": hunt.oracle, "arms": hunt.arms}
        cases = tuple(rules.cases(hunt))
        yield Replay(f"rule: {hunt}", cases, lambda f=hunt.fault: planted("", f), **alone)
        yield Replay(f"rule: {hunt}, clean", cases[:1], **alone)
