"""A worker claims divergences, and triages them at once or once there is time."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from narrowfuzz.campaign import messages, triaging
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.triaging import Triaging
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict, fingerprint

CASE = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
FAMILY = "torch"
A, B = (
    Verdict(rule, "eager", "output", "diverged", "differs", at=At(name="output"))
    for rule in ("O1", "O2")
)
JUDGE: Any = SimpleNamespace(
    family=lambda spec: FAMILY,
    programs=SimpleNamespace(compile_seconds=0.0),
    device=SimpleNamespace(name="cpu"),
)


@dataclasses.dataclass
class _Confirmed:
    finding: Any
    confirmed: bool = True


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is told and done, in order; triage is replaced, and confirms all but B."""
    found: list[Any] = []

    def triage(judge: Any, case: Case, verdict: Verdict, **how: Any) -> _Confirmed:
        found.append((verdict.rule, how["past"]))
        finding = SimpleNamespace(fingerprint=fingerprint(verdict, FAMILY))
        return _Confirmed(finding, confirmed=verdict is A)

    monkeypatch.setattr(triaging, "triage", triage)
    monkeypatch.setattr(triaging, "with_first_bad", lambda result, **how: result)
    monkeypatch.setattr(triaging, "unconfirmed", lambda judge, case, verdict: verdict.rule)
    return found


def of(out: Path, said: list[Any]) -> Triaging:
    def tell(message: messages.Message) -> None:
        said.append(type(message).__name__)

    return Triaging(
        Config(out=out), JUDGE, None, lambda *_: None, math.inf,  # type: ignore[arg-type,return-value]
        tell, lambda: said.append("flushed"),
    )  # fmt: skip


def judged(*causes: Verdict) -> Any:
    return SimpleNamespace(causes=causes, family=FAMILY)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    return tmp_path


def test_a_divergence_is_triaged_at_once_and_by_one_worker(out: Path, said: list[Any]) -> None:
    one, other = of(out, said), of(out, said)
    one.claim(CASE, judged(A), [CASE])
    assert said == ["Claimed", "flushed", "Confirming", ("O1", (CASE,)), "Finished", "Settled"]
    other.claim(CASE, judged(A), [])
    one.claim(CASE, judged(A), [])
    assert len(said) == 6


@pytest.mark.parametrize("cases", [0, 7])
def test_one_that_no_script_shows_pauses_as_long_as_its_triage_took(
    out: Path, said: list[Any], monkeypatch: pytest.MonkeyPatch, cases: int
) -> None:
    """Unless the number of cases is given: then no clock decides."""
    now, triage = [100.0], triaging.triage

    def takes_nine_seconds(*args: Any, **how: Any) -> Any:
        now[0] += 9.0
        return triage(*args, **how)

    monkeypatch.setattr(triaging, "triage", takes_nine_seconds)
    monkeypatch.setattr(triaging.time, "monotonic", lambda: now[0])
    one = of(out, said)
    one.config = dataclasses.replace(one.config, cases=cases)
    for seconds, times in ((0.0, 1), (8.0, 1), (2.0, 2)):
        now[0] += seconds
        one.claim(CASE, judged(B), [])
        if not cases:
            assert said.count(("O2", ())) == times
    assert not cases or said.count(("O2", ())) == 3


def test_it_waits_while_something_more_urgent_runs(out: Path, said: list[Any]) -> None:
    one = of(out, said)
    one.holding, one.seconds = True, one.at_once
    one.claim(CASE, judged(A, B), [CASE])
    assert said == ["Claimed", "Claimed"] and len(one.waiting) == 2
    one.work_off()
    assert len(said) == 2
    one.holding = False
    one.claim(CASE, judged(), [])  # a case without a divergence comes next
    assert [x for x in said if isinstance(x, tuple)] == [("O1", (CASE,)), ("O2", (CASE,))]
    assert said[2:4] == ["flushed", "Confirming"] and not one.waiting


def test_while_it_holds_some_time_may_go_to_triage(out: Path, said: list[Any]) -> None:
    one = of(out, said)
    one.holding, began = True, time.monotonic()
    one.claim(CASE, judged(A), [])
    assert ("O1", ()) in said and 0.0 < one.seconds <= time.monotonic() - began
