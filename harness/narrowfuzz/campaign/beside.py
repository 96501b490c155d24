"""A run beside another one of the same cases, in the process of a worker.

What every case gave is written down, so that the two can be compared case by case. What a case
shows is looked into after the last one, and only if the other side does not show it as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from narrowfuzz.campaign.config import Place
from narrowfuzz.case.spec import Case, dump_case
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.report.judged import JUDGED, LOOKING
from narrowfuzz.trace.hashes import Hashes, hashes_of
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict, fingerprint

#: Below a run's folder: what its cases gave, line by line, and that a process has judged its last.
_FOLDER, _LINES, _END = "beside", ".jsonl", ".end"
#: Cases of one divergence that are kept until it is looked into: one may show it where another
#: cannot.
_TRIES = 3
_POLL_SECONDS = 0.2
#: What such a run says of itself.
NOTE = "one side of a comparison: what the other side shows, too, is not among these findings"


class Shown(msgspec.Struct, frozen=True):
    """One first cause of one case, as its rule says it."""

    sentence: str
    rule: str
    arm: str


class CaseSeen(msgspec.Struct, frozen=True):
    """What one case gave on one side."""

    case: str
    recipe: str
    model: str
    #: Arm -> the rules that judged there.
    rules: dict[str, list[str]]
    #: Of them, the arms where one judged that looks at a cast, a multiply or ranks.
    arms: list[str]
    #: Entries of the ledger that explain something of it.
    known: list[str]
    #: Fingerprint -> what no entry explains.
    causes: dict[str, Shown]
    results: dict[str, Hashes]


@dataclass(frozen=True)
class Later:
    """A divergence that is still to be looked into: its case, and what ran before that."""

    case: Case
    verdict: Verdict
    past: tuple[Case, ...]


@dataclass
class Beside:
    """What one worker's process saw, for the other side to read."""

    own: Path
    other: Path
    place: Place
    later: dict[str, list[Later]] = field(default_factory=dict)
    #: The case that is judged now, and the hashes of its first runs, arm by arm.
    _current: str = ""
    _results: dict[str, Hashes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.own / _FOLDER / "cases").mkdir(parents=True, exist_ok=True)
        name = f"{self.place.number}.{self.place.generation}"
        self._lines = self.own / _FOLDER / f"{name}{_LINES}"
        self._end = self.own / _FOLDER / f"{name}{_END}"

    def begin(self, case: Case) -> None:
        self._current, self._results = case.id, {}

    def observed(self, case: Case, traces: Mapping[str, Trace]) -> None:
        """What the arms left of a case; rules may run others in between."""
        if case.id == self._current:
            self._results = hashes_of(traces) | self._results

    def judged(self, case: Case, judgement: Judgement, past: Sequence[Case]) -> None:
        """Write down what the case gave, and keep what it shows for later."""
        named = {fingerprint(v, judgement.family): v for v in judgement.causes}
        for name, verdict in named.items():
            kept = self.later.setdefault(name, [])
            if len(kept) < _TRIES:
                kept.append(Later(case, verdict, tuple(past)))
        if named:
            file = self.own / _FOLDER / "cases" / f"{case.id}.json"
            file.write_bytes(dump_case(case))
        line = msgspec.json.encode(_seen(case, judgement, named, self._results))
        with self._lines.open("ab") as lines:
            lines.write(line + b"\n")

    def differing(
        self, deadline: float, alive: Callable[[], None]
    ) -> list[tuple[str, list[Later]]]:
        """The fingerprints that this process has seen and the other side has not, and the cases
        that show them; waits, saying that it is ``alive``, until the other has judged as far."""
        self._end.touch()
        while not self._met() and time.monotonic() < deadline:
            alive()
            time.sleep(_POLL_SECONDS)
        alone = shown_alone(read_seen(self.own), read_seen(self.other))
        return [(name, kept) for name, kept in self.later.items() if name in alone]

    def _met(self) -> bool:
        """Is the same worker of the other side as far, or that side over?"""
        ended = (self.other / _FOLDER).glob(f"{self.place.number}.*{_END}")
        reached = (int(path.name.split(".")[1]) for path in ended)
        return any(there >= self.place.generation for there in reached) or is_over(self.other)


def read_seen(run: Path) -> list[CaseSeen]:
    """What the cases of a run gave so far, worker by worker. A last line may be half written."""
    files = sorted((run / _FOLDER).glob(f"*{_LINES}"), key=_number)
    return [
        msgspec.json.decode(line, type=CaseSeen)
        for file in files
        for line in file.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def count_seen(run: Path) -> int:
    """How many cases a run has judged so far."""
    return sum(file.read_bytes().count(b"\n") for file in (run / _FOLDER).glob(f"*{_LINES}"))


def case_file(run: Path, case: str) -> Path:
    """Where a case that showed something is kept."""
    return run / _FOLDER / "cases" / f"{case}.json"


def is_over(run: Path) -> bool:
    """Has a run written what it ends with?"""
    return (run / "summary.json").is_file()


def _number(file: Path) -> tuple[int, ...]:
    return tuple(map(int, file.name.removesuffix(_LINES).split(".")))


def _seen(
    case: Case, judgement: Judgement, named: Mapping[str, Verdict], results: dict[str, Hashes]
) -> CaseSeen:
    rules: dict[str, set[str]] = {}
    for verdict in judgement.verdicts:
        if verdict.status in JUDGED:
            rules.setdefault(verdict.arm, set()).add(verdict.rule)
    return CaseSeen(
        case=case.id,
        recipe=case.spec.recipe,
        model=case.spec.model,
        rules={arm: sorted(names) for arm, names in rules.items()},
        arms=sorted(arm for arm, names in rules.items() if names & LOOKING),
        known=sorted({verdict.explained_by for verdict in judgement.known}),
        causes={
            name: Shown(verdict.sentence(), verdict.rule, verdict.arm)
            for name, verdict in named.items()
        },
        results=results,
    )


def numbered(seen: Iterable[CaseSeen]) -> dict[tuple[str, int], CaseSeen]:
    """By case and its how many-th turn: one may be drawn twice, and meet other rules then."""
    turns: Counter[str] = Counter()
    found: dict[tuple[str, int], CaseSeen] = {}
    for one in seen:
        found[one.case, turns[one.case]] = one
        turns[one.case] += 1
    return found


def known_there(one: CaseSeen, name: str, twin: CaseSeen | None) -> frozenset[str]:
    """The entries that explain on the other side what a case shows on this one, where both gave
    the same bits: the ledger differs, for an entry's script may not show it in a changed library,
    and the libraries do not."""
    arm = one.causes[name].arm
    if twin is None or not one.results.get(arm) or one.results[arm] != twin.results.get(arm):
        return frozenset()
    return frozenset(twin.known) - frozenset(one.known)


def shown_alone(mine: Iterable[CaseSeen], other: Iterable[CaseSeen]) -> set[str]:
    """Fingerprints that one side shows and the other does not."""
    twins = numbered(other)
    there = {name for seen in twins.values() for name in seen.causes}
    return {
        name
        for key, one in numbered(mine).items()
        for name in one.causes
        if name not in there and not known_there(one, name, twins.get(key))
    }
