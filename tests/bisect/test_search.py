"""Where along a line of versions an answer changes: on every line of up to seven answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from narrowfuzz.bisect.search import Answer, Line, VersionAnswer, change, oldest

ANSWERS: dict[str, Answer] = {"s": "shows", "g": "gone", "?": "cannot tell"}


def line(answers: str) -> Line:
    """One version for each letter, called by its place."""

    def ask(version: str) -> VersionAnswer:
        return VersionAnswer(version, ANSWERS[answers[int(version)]])

    return Line([*map(str, range(len(answers)))], ask)


def lines(length: int) -> Sequence[str]:
    return ["".join(one) for one in itertools.product("sg?", repeat=length)]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7])
def test_what_is_named_differs_and_nothing_between_can_tell(length: int) -> None:
    for answers in lines(length):
        if {answers[0], answers[-1]} != {"s", "g"}:
            continue
        found = change(line(answers), 0, length - 1)
        before, after = int(found.before.version), int(found.after.version)
        assert {answers[before], answers[after]} == {"s", "g"}, answers
        assert before < after and {*answers[before + 1 : after]} <= {"?"}, answers
        assert len(found.between) == after - before - 1
        assert found.appears == (answers[after] == "s")


def test_each_version_is_asked_once_and_few_of_them() -> None:
    counted: list[str] = []
    answers = "g" * 37 + "s" * 91

    def ask(version: str) -> VersionAnswer:
        counted.append(version)
        return VersionAnswer(version, ANSWERS[answers[int(version)]])

    found = change(Line([*map(str, range(len(answers)))], ask), 0, len(answers) - 1)
    assert (found.before.version, found.after.version) == ("36", "37")
    assert len(counted) == len({*counted}) <= 2 + 7


@pytest.mark.parametrize(
    ("answers", "place"),
    [
        ("gggsss", 2),
        ("ssssss", None),
        ("??ssss", None),
        ("??ggss", 3),
        ("g?ssss", 0),
        ("ggg?ss", 2),
        ("g???ss", 0),
        ("???????s", None),
    ],
)
def test_an_older_one_without_it_is_found_though_some_cannot_tell(
    answers: str, place: int | None
) -> None:
    found = oldest(line(answers), len(answers) - 1)
    assert found == place or (found is not None and answers[found] == "g" and place is not None)
