"""What is one finding and what is one more sighting of it, where known issues are findings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from narrowfuzz.campaign import messages
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.supervisor import Supervisor
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.report.store import Store, same_cause
from narrowfuzz.report.tally import Tally
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.finding import Finding, Triaged
from narrowfuzz.triage.session import SessionOptions, open_session
from narrowfuzz.triage.triage import unconfirmed


def seen(arm: str, issue: str | None, symptom: str = "wrong value") -> Triaged:
    judge = open_session(SessionOptions()).judge
    case = Case(spec=Spec(recipe="torch.bf16"), data=DataSpec())
    found = unconfirmed(judge, case, Verdict("O5", arm, "output", "diverged", symptom))
    finding = msgspec.structs.replace(found.finding, known_issue=issue, needs=[])
    return Triaged(finding, "")


def confirmed(found: Triaged) -> Finding:
    return msgspec.structs.replace(found.finding, why_suspected="")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("a", "a", True), ("a", "b", False), ("a", "", False), ("", "", False), (None, None, False)],
)
def test_the_same_known_issue_is_one_cause(one: str | None, other: str | None, same: bool) -> None:
    a, b = seen("eager", one).finding, seen("inductor", other).finding
    assert same_cause(a, b) == same_cause(b, a) == same


def test_findings_of_one_known_issue_are_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.add(confirmed(seen("eager", "a")), "#") == "new"
    assert store.add(confirmed(seen("inductor", "a")), "#") == "sighting"
    assert store.add(confirmed(seen("inductor", "b", "NaN")), "#") == "new"
    (first,) = [one for one in store.findings() if one.known_issue == "a"]
    assert [one.arm for one in store.sightings(first.id)] == ["inductor"]


def supervised(tmp_path: Path, *told: messages.Message) -> Store:
    store = Store(tmp_path)
    supervisor = Supervisor(Config(out=tmp_path, workers=1), store, Tally())
    for message in told:
        supervisor.take(message, supervisor.handles[0])
    supervisor.keep_claimed()
    return store


def test_what_a_worker_sighted_counts_once_its_issue_is_shown(tmp_path: Path) -> None:
    shown = Triaged(confirmed(seen("eager", "a")), "#")
    store = supervised(tmp_path, messages.Sighted(seen("inductor", "a")), messages.Finished(shown))
    (finding,) = store.findings()
    assert [one.arm for one in store.sightings(finding.id)] == ["inductor"]
    assert not store.suspected()


def test_what_nothing_has_shown_stays_suspected(tmp_path: Path) -> None:
    store = supervised(tmp_path, messages.Sighted(seen("inductor", "a")))
    (one,) = store.suspected()
    assert "ended before" in one.why_suspected
    assert not store.findings()
