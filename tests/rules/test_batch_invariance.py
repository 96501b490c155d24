"""R9 where a library promises batch invariance: a row alone has the bits that it has in a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.rules import BY_NAME
from narrowfuzz.trace.verdict import BAD, Verdict
from samples import recipes


def judged(convert: Any, promised: tuple[str, ...], **spec: Any) -> list[Verdict]:
    """R9 of a linear that this converts."""
    base = recipes()["torch.fp32"]
    promising = replace(base, convert=convert, batch_invariant=promised)
    judge = Judge({base.name: promising}, Ledger([]), arms=frozenset({"eager"}))
    fields = {"m": 24, "k": 64, "n": 32, "dtype": "fp32", **spec}
    case = Case(spec=Spec(recipe=base.name, **fields), data=DataSpec(seed=1))
    return list(judge.judge(case, [BY_NAME["R9"]]).verdicts)


class RowByRow(torch.nn.Linear):
    """Each row is multiplied by itself, and so is its gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).split(1)
        return torch.cat([self.multiply(row, len(rows)) for row in rows]).reshape(*x.shape[:-1], -1)

    def multiply(self, row: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.nn.functional.linear(row, self.weight, self.bias)


class SplitWhereAlone(RowByRow):
    """The usual reason: where there are few rows the sum over the features is split in two."""

    def multiply(self, row: torch.Tensor, rows: int) -> torch.Tensor:
        if rows > 1:
            return super().multiply(row, rows)
        half = row.shape[-1] // 2
        one, other = row.split(half, -1), self.weight.split(half, -1)
        return one[0] @ other[0].t() + one[1] @ other[1].t()


def as_(kind: type[torch.nn.Linear]) -> Any:
    def convert(model: Any, spec: Spec) -> Any:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.__class__ = kind
        return model

    return convert


@pytest.mark.parametrize("rows", [1, 2, 24])
def test_a_promise_that_is_held_passes(rows: int) -> None:
    verdicts = judged(as_(RowByRow), ("native",), m=rows)
    assert not [v.sentence() for v in verdicts if v.status in BAD]
    assert any(v.status == "ok" for v in verdicts)


def test_a_row_that_is_summed_otherwise_alone_breaks_it() -> None:
    bad = [v for v in judged(as_(SplitWhereAlone), ("native",)) if v.status in BAD]
    assert {(v.rule, v.role, v.symptom) for v in bad} == {
        ("R9", "output", "result changes in the first row alone"),
        ("R9", "output", "result changes in the last row alone"),
    }


def test_a_promise_of_no_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_invariant: unknown backend 'nativ'"):
        replace(recipes()["torch.fp32"], batch_invariant=("nativ",))


def test_where_nothing_is_promised_it_is_within_the_bound() -> None:
    assert not [v for v in judged(as_(SplitWhereAlone), ()) if v.status in BAD]
