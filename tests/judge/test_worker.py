"""Which rungs a worker looks at a Spec on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from narrowfuzz.arms.available import unavailable
from narrowfuzz.campaign.worker import Worker
from narrowfuzz.case.arm import INDUCTOR
from narrowfuzz.case.spec import Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger


def arms_of(times: int, arms: frozenset[str] | None = None, **fields: Any) -> list[list[str]]:
    """The names of the arms that so many Specs like this one are looked at on."""
    worker = object.__new__(Worker)
    worker.judge, worker.inductors = Judge({}, Ledger([]), arms), itertools.count()
    spec = Spec(recipe="torch.bf16", **fields)
    return [[arm.name for arm in worker._arms(spec)] for _ in range(times)]


@pytest.mark.skipif(bool(unavailable(INDUCTOR)), reason=unavailable(INDUCTOR))
class TestOfTwoThatGenerateCodeOneRuns:
    def test_in_turn(self) -> None:
        found = arms_of(4, compile="inductor")
        assert found == [["eager", "inductor_strict"], ["eager", "inductor"]] * 2

    def test_as_users_have_it_where_recompute_is_partial(self) -> None:
        found = arms_of(2, compile="inductor", checkpoint="selective")
        (names,) = {tuple(names) for names in found}
        assert names == (
            "eager", "eager+checkpoint_selective", "inductor+checkpoint_selective"
        )  # fmt: skip

    def test_the_one_that_was_asked_for(self) -> None:
        found = arms_of(2, frozenset({"inductor_strict"}), compile="inductor")
        assert found == [["eager", "inductor_strict"]] * 2


def test_cheap_rungs_all_run() -> None:
    assert arms_of(1) == [["eager"]]
    assert arms_of(1, compile="aot_eager", checkpoint="full") == [
        ["eager", "eager+checkpoint", "aot_eager+checkpoint"]
    ]
