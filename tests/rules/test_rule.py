"""Every rule is explained, in one place, and the pages say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from narrowfuzz.case.kind import CONVERTED, LAYERS
from narrowfuzz.cli import main
from narrowfuzz.plants.registry import builtin_plants
from narrowfuzz.rules import BY_NAME, RULES
from narrowfuzz.rules.texts import explained, pages, rows_of, with_tables

ROOT = Path(__file__).resolve().parents[2]
#: Hunts of tests/rules/test_rules_catch_faults.py, which must find what they look for.
HUNTS = {tuple(name.split()[:2]) for name in json.loads(
    (ROOT / "tests" / "rules" / "fingerprints.json").read_text()
)}  # fmt: skip


def told(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["rule", *([name] if name else [])])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_fits_a_screen_and_says_all_of_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(name, capsys)
    row = rows_of(name)[0]
    assert row.why and row.blind and (row.caught or {})[name]
    heads = ("What it says", "Why", "What it cannot see", "A bug that it catches", "More")
    assert all(f"{head}\n" in said for head in heads)
    assert len(said.splitlines()) <= 40


@pytest.mark.parametrize(("page", "which"), list(pages()))
def test_the_pages_say_what_the_command_says(page: str, which: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert with_tables(page, text) == text, "python -m narrowfuzz.rules.texts docs"  # type: ignore[arg-type]


def test_only_rules_that_exist_are_explained_and_each_kind_of_case_has_its_row() -> None:
    pages_of = {LAYERS: {"sharding", "schedules"}} | {kind: {"rules"} for kind in CONVERTED}
    assert {name for row in explained() for name in row.names} == set(BY_NAME)
    for rule in RULES:
        pages = {row.page for row in rows_of(rule.name)}
        for kind in rule.cases:
            assert pages & pages_of.get(kind, {"sharding"}), (rule.name, kind)


def test_what_a_rule_is_said_to_catch_is_an_injected_bug() -> None:
    plants = builtin_plants()
    for row in explained():
        for name, id in (row.caught or {}).items():
            if name == "O24":  # of a user's file: tests/own_models/test_own_functions.py
                continue
            assert name in row.names and not plants[id].legal
            if row.page == "rules":  # the others: test_sharded, test_state_faults, test_te_ranks
                assert (name, id) in HUNTS, (name, id)


def test_every_section_is_there() -> None:
    for row in explained():
        text = (ROOT / "docs" / f"{row.page}.md").read_text()
        assert not row.section or f"## {row.section}\n" in text, row


def test_rules_are_listed_and_a_wrong_name_gets_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = told("", capsys).splitlines()
    assert len([line for line in lines if line.split(" ")[0] in BY_NAME]) == len(BY_NAME)
    with pytest.raises(SystemExit) as ended:
        main(["rule", "O99"])
    assert ended.value.code == 2 and "unknown rule 'O99'" in capsys.readouterr().err
