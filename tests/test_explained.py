"""``make explained`` calls an answer right only if it is what is known of the cause."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from explained import BEGIN, END, PAGE, Expected, Row, merged, rows
from narrowfuzz.ledger.ledger import load_entries
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.report.explanation import Answer, Count, Explained, Role


def answer(words: str, role: Role) -> Answer:
    return Answer(words, Count(0, 20), role)


SAID = Explained(
    id="", sentence="", asked_of="", shows=Count(20, 20),
    needs=(answer("bias", "needed"), answer("3 rows, no multiple of 32", "not needed")),
    needs_one_of=(),
    switches=(answer("without torch.compile", "needed"), answer("recipe other", "cannot say")),
    first_bad=(), nearest="", untried=(), compiler="inductor, at lowering 3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        ({}, []),
        ({"without": ["3 rows"], "compiler": "lowering"}, []),
        ({"compiler": "pass"}, ["no 'pass'"]),
        ({"needs": []}, ["also said: needs bias"]),
        ({"needs": ["bias", "batch"]}, ["not said: needs batch"]),
        ({"without": ["bias"]}, ["not said: does not need bias"]),
        ({"cured": []}, ["also said: goes away with without torch.compile"]),
        ({"cured": ["without", "recipe"]}, ["not said: goes away with recipe"]),
        ({"stays": ["without torch"]}, ["not said: stays with without torch"]),
    ],
)
def test_an_answer_is_right_if_it_is_what_is_known(
    expected: dict[str, object], wrong: list[str]
) -> None:
    right = {"needs": ["bias"], "cured": ["without torch.compile"]}
    row = Row(msgspec.convert({"name": "", "search": [], **right, **expected}, Expected), 1.0, SAID)
    assert row.wrong == wrong
    assert row.outcome == ("; ".join(wrong) or "right")


def test_rows_that_are_not_asked_again_stay() -> None:
    page = f"before\n{BEGIN}\n\n| `a` | old |\n| `b` | old |\n\n{END}\nafter"
    new = merged(page, [Row(Expected(name="b", search=[]), missing="not found")], ["b", "a"])
    assert [one for one in new.splitlines() if one.startswith("| `")] == [
        "| `b` | known issue |  |  |  |  | not found |", "| `a` | old |",
    ]  # fmt: skip
    assert new.startswith("before\n") and new.endswith("\nafter")


def test_every_row_is_a_fault_or_a_known_issue_and_stands_on_the_page() -> None:
    every = rows(())
    faults = set(builtin_faults())
    known = {one.id for one in load_entries()}
    assert all(row.name in (faults if row.planted else known) for row in every)
    there = PAGE.read_text()
    assert [row.name for row in every if f"| `{row.name}` |" not in there] == []
    with pytest.raises(ValueError, match=r"no row of explained.toml: nothing"):
        rows(["nothing"])
