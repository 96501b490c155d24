"""The cases that a run begins with: which worker judges which, and which others wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from narrowfuzz.case.spec import Case, compile_key


def dealt(cases: Sequence[Case], number: int, workers: int) -> Iterator[tuple[Case, bool]]:
    """This worker's part of the cases, and for each whether the first that is compiled is still to
    come. What is compiled once serves all cases of its Spec, so one worker has them all."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(compile_key(case.spec) if compiled(case) else case.id, []).append(case)
    mine = [*groups.values()][number::workers]
    urgent = next((i for i, group in enumerate(mine) if compiled(group[0])), -1)
    for i, group in enumerate(mine):
        yield from ((c, i < urgent or (i == urgent and c is not group[-1])) for c in group)


def compiled(case: Case) -> bool:
    """True where a compiler makes its code."""
    return case.spec.compile != "none"
