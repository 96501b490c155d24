"""TransformerEngine's delayed scaling on ranks: what a group shares of the maxima, and what a rank
keeps to itself; faults in either are found, and clean cases left alone."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from fresh import on_transformer_engine
from narrowfuzz.case.events import Close, Forward, Open, Settings
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.numerics.delayed import Policy, Slot
from narrowfuzz.numerics.follow import with_group_maxima
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.rules import rules_of
from narrowfuzz.rules.causes import root_of
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.rules.library.ranks import as_shared, check_shared
from narrowfuzz.trace.snapshots import CastSeen, ExecutionPoint, Moment, SlotName
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

ARM = "sharded_processes"
SLOT = SlotName("0", "forward", 0)
pytestmark = pytest.mark.xdist_group("te ranks")


#: Tried each time; all of them take a minute.
QUICK = ("two share", "te-amax-forward-only")


def outcome(kind: str, name: str) -> list[Any]:
    """What came out of a clean case, or of one with a fault."""
    return outcomes(*(QUICK if name in QUICK else ()))[kind, name]


@functools.cache
def outcomes(*named: str) -> dict[tuple[str, str], list[Any]]:
    """(kind, name) -> what came out, of these or of all."""
    said = on_transformer_engine("te_ranks_checks.py", *named)
    lines = [json.loads(line) for line in said if line.startswith("[")]
    return {(what, name): rest for what, name, *rest in lines}


@pytest.mark.heavy
@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "judges"),
    [
        ("two share", ["S13"]),
        ("three share, recomputed", ["S13"]),
        ("two share, tensor by tensor", ["S13"]),
        ("a group of its own", ["S1", "S13"]),
        ("nothing reduced", ["S1", "S13"]),
        ("a world of one", ["S1", "S13"]),
    ],
)
def test_clean_cases_are_judged_and_left_alone(name: str, judges: list[str]) -> None:
    assert outcome("CLEAN", name) == [0, judges]


@pytest.mark.heavy
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("te-amax-forward-only", [["S13", "backward"]]),
        ("te-amax-not-reduced", [["S13", "backward"], ["S13", "forward"]]),
        ("te-amax-added", [["S13", "backward"], ["S13", "forward"]]),
        ("te-amax-of-first-rank", [["S13", "backward"], ["S13", "forward"]]),
        ("te-amax-of-all-ranks", [["S1", "state"]]),
    ],
)
def test_a_fault_is_found_by_its_rule_alone(fault: str, shown: list[list[str]]) -> None:
    assert outcome("FAULT", fault)[0] == shown


@pytest.mark.heavy
def test_a_script_shows_a_fault_and_nothing_without_it() -> None:
    assert outcome("FAULT", "te-amax-forward-only")[1] == [True, False]


def spec(ranks: int = 2, **settings: Any) -> Spec:
    return Spec(
        recipe="te.delayed", model="library_linear", events=(Open(), Forward(), Close()),
        sharding=Sharding(data=ranks), settings=Settings(history=2, **settings),
    )  # fmt: skip


def evidence(updated: tuple[float, float], of: Spec | None = None) -> Evidence:
    """Two ranks that stage 2 and 8, and go on from these maxima."""

    def rank(amax: float, taken: float) -> Trace:
        at = ExecutionPoint("forward", 0, 0)
        cast = CastSeen(at, SLOT, "e4m3", np.float32(1), np.float32(amax), np.zeros(1, np.uint8))
        new = {SLOT: Slot(np.float32(1), np.array([amax, 0], np.float32))}
        scale = np.float32(448) / np.float32(taken)
        then = {SLOT: Slot(scale, np.array([0, taken], np.float32))}
        moments = [
            Moment(0, (), (), (), {}, {}),
            Moment(1, (), (cast,), (), new, {}),
            Moment(2, (), (), (), then, {}),
        ]
        return Trace(ARM, moments=tuple(moments))

    ranks = rank(2.0, updated[0]), rank(8.0, updated[1])
    policy = Policy(2, "max", 0, "e4m3", "e5m2")
    return Evidence(
        case=Case(spec=of or spec(), data=DataSpec()),
        traces={ARM: Trace(ARM, ranks=ranks)},
        library=OwnLayers("delayed", lambda settings: policy),
    )


@pytest.mark.parametrize(
    ("updated", "reduces", "wrong"),
    [
        ((8.0, 8.0), "all", []),
        ((2.0, 8.0), "all", [0]),
        ((10.0, 10.0), "all", [0]),
        ((2.0, 2.0), "all", [0]),  # of a class of divergences the first rank tells
        ((2.0, 8.0), "none", []),
        ((2.0, 8.0), "own", []),
        ((8.0, 8.0), "none", [0]),
    ],
)
def test_an_update_takes_what_its_group_has_staged(
    updated: tuple[float, float], reduces: Any, wrong: list[int]
) -> None:
    said = [*check_shared(evidence(updated, spec(reduces=reduces)))]
    assert [v.at.rank for v in said if v.status == "diverged"] == wrong
    assert wrong or [v.status for v in said] == ["ok"]


def test_ranks_that_quantise_other_tensors_are_not_judged() -> None:
    seen = evidence((8.0, 8.0))
    first, last = seen.on_ranks[ARM].ranks
    bare = Trace(ARM, moments=tuple(Moment(m.event, (), (), (), m.state, {}) for m in last.moments))
    found = [*check_shared(replace(seen, traces={ARM: Trace(ARM, ranks=(first, bare))}))]
    assert [v.status for v in found] == ["inconclusive"]


def test_what_is_staged_is_the_largest_of_all_ranks_and_scales_stay_their_own() -> None:
    moments = as_shared(evidence((8.0, 8.0)), ARM)[0].moments
    assert moments[1].casts[0].amax == 8 and moments[1].state[SLOT].window.tolist() == [8, 0]
    held = [[Slot(np.float32(s), np.array([s, 0], np.float32))] for s in (2, 8)]
    slots, maxima = with_group_maxima(held, [[[(2.0, 0.5)]], [[(8.0, 4.0)]]], 0)
    assert slots[0] is not None and slots[0].window.tolist() == [8, 0] and slots[0].scale == 2
    assert maxima == [[(8.0, 0.5)]]


def test_what_one_process_shows_explains_what_ranks_show() -> None:
    rules, ranks = rules_of(spec()), Verdict("S13", f"{ARM}+checkpoint", "backward", "diverged")
    alone = Verdict("O20", "eager+checkpoint", "output", "diverged")
    assert root_of(ranks, [alone], rules) == alone
    assert root_of(replace(alone, arm="eager"), [replace(ranks, role="output")], rules) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recipe": "te.current"}, "ranks"),
        ({"sharding": Sharding(tensor=2)}, "ranks"),
        ({"sharding": Sharding(), "settings": Settings(reduces="none")}, "in one process"),
    ],
)
def test_what_is_not_carried_is_refused(changes: dict[str, Any], why: str) -> None:
    of = msgspec.structs.replace(spec(), **{"settings": Settings(), **changes})
    with pytest.raises(ValueError, match=why):
        load_every()[of.recipe].check(of)
