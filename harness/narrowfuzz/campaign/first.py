"""How the cases that a run begins with are dealt to its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from narrowfuzz.case.spec import Case, compile_key


def dealt(cases: Sequence[Case], number: int, workers: int) -> Iterator[tuple[Case, bool]]:
    """This worker's part of the cases, each with a flag that is True until the last case of the
    part's first compiled Spec comes: triage should wait until then. One compilation serves all
    cases of a Spec, so one worker gets them all."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(compile_key(case.spec) if compiled(case) else case.id, []).append(case)
    mine = [*groups.values()][number::workers]
    urgent = next((i for i, group in enumerate(mine) if compiled(group[0])), -1)
    for i, group in enumerate(mine):
        yield from ((c, i < urgent or (i == urgent and c is not group[-1])) for c in group)


def compiled(case: Case) -> bool:
    """True if the case is compiled."""
    return case.spec.compile != "none"
