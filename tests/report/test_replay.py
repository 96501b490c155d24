"""What ``replay`` says is known of a divergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.fold import Judgement, fold
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.report.replay import _diverged
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict
from samples import recipes

CASE = Case(spec=Spec(recipe="torch.bf16", model="mlp_gelu"), data=DataSpec())
ONE, OTHER = (
    Verdict("O5", "eager", "output", "diverged", "wrong value", At(layer=layer))
    for layer in ("up", "down")
)


def judged(*verdicts: Verdict) -> Judgement:
    return fold(CASE, "torch", verdicts, True, known_as=lambda verdict: "")


@pytest.mark.parametrize(
    ("with_ledger", "entry"),
    [
        # nothing is left of it: the case's known issues explain it together
        (lambda: judged(OTHER.known("an-entry")), "an-entry"),
        # it is still there: what is known of another layer says nothing of it
        (lambda: judged(ONE, OTHER.known("an-entry")), ""),
        (lambda: judged(ONE), ""),
    ],
)
def test_a_known_issue_is_named_where_it_explains_the_divergence(
    with_ledger: Callable[[], Judgement], entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(self: Judge, case: Case, **_: Any) -> Judgement:
        return with_ledger()

    monkeypatch.setattr(Judge, "judge", judge)
    found = judged(ONE)
    assert _diverged(Judge(recipes(), Ledger([])), found, "").entry == entry
