"""One side of a comparison: what a worker of a run beside another run of the same cases does.

It writes the result of every case to a file, so that the two runs can be compared case by case.
Divergences are triaged after the last case, and only those that the other side does not show.
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
from narrowfuzz.report.judged import COUNTING_RULES, JUDGED
from narrowfuzz.trace.hashes import Hashes, hashes_of
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict, fingerprint

#: Folder below a run's folder, suffix of the files with the results of its cases, one a line, and
#: suffix of the files that mark that a process has judged its last case.
_FOLDER, _LINES, _END = "beside", ".jsonl", ".end"
#: Number of cases of one divergence that are stored for triage: one may show it where another
#: cannot.
_TRIES = 3
_POLL_SECONDS = 0.2
#: The note in the summary of such a run.
NOTE = "one side of a comparison: what the other side shows, too, is not among these findings"


class CauseSeen(msgspec.Struct, frozen=True):
    """One first cause of one case, with the sentence of its rule."""

    sentence: str
    rule: str
    arm: str


class CaseSeen(msgspec.Struct, frozen=True):
    """The result of one case on one side."""

    case: str
    recipe: str
    model: str
    #: Arm -> the rules that judged there.
    rules: dict[str, list[str]]
    #: The arms where one of these rules checks a cast, a multiply or ranks.
    arms: list[str]
    #: Ids of the entries of the ledger that explain a divergence of the case.
    known: list[str]
    #: Fingerprint -> first cause that no entry explains.
    causes: dict[str, CauseSeen]
    #: Arm -> hashes of the results of its first run.
    results: dict[str, Hashes]


@dataclass(frozen=True)
class PendingTriage:
    """A divergence that is still to be triaged: its case, and the cases that ran before it."""

    case: Case
    verdict: Verdict
    past: tuple[Case, ...]


@dataclass
class SideRecorder:
    """Writes the results of one worker's process, for the other side to read."""

    own: Path
    other: Path
    place: Place
    pending: dict[str, list[PendingTriage]] = field(default_factory=dict)
    #: Id of the case that is judged now, and arm -> hashes of its first run.
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
        """Store the hashes of a case's traces. Cases that rules run in between are ignored."""
        if case.id == self._current:
            self._results = hashes_of(traces) | self._results

    def judged(self, case: Case, judgement: Judgement, past: Sequence[Case]) -> None:
        """Write the result of the case to the file, and store its first causes for triage."""
        named = {fingerprint(v, judgement.family): v for v in judgement.causes}
        for name, verdict in named.items():
            waiting = self.pending.setdefault(name, [])
            if len(waiting) < _TRIES:
                waiting.append(PendingTriage(case, verdict, tuple(past)))
        if named:
            file = self.own / _FOLDER / "cases" / f"{case.id}.json"
            file.write_bytes(dump_case(case))
        line = msgspec.json.encode(_seen(case, judgement, named, self._results))
        with self._lines.open("ab") as lines:
            lines.write(line + b"\n")

    def differing(
        self, deadline: float, alive: Callable[[], None]
    ) -> list[tuple[str, list[PendingTriage]]]:
        """The fingerprints that this process has seen and the other side has not, with the cases
        that show them. Waits until the other side has judged as far, or until the ``deadline``, and
        calls ``alive`` meanwhile."""
        self._end.touch()
        while not self._other_side_caught_up() and time.monotonic() < deadline:
            alive()
            time.sleep(_POLL_SECONDS)
        one_sided = shown_alone(read_seen(self.own), read_seen(self.other))
        return [(name, waiting) for name, waiting in self.pending.items() if name in one_sided]

    def _other_side_caught_up(self) -> bool:
        """Has the same worker of the other side judged as far, or has that side's run ended?"""
        ended = (self.other / _FOLDER).glob(f"{self.place.number}.*{_END}")
        reached = (int(path.name.split(".")[1]) for path in ended)
        return any(there >= self.place.generation for there in reached) or is_over(self.other)


def read_seen(run: Path) -> list[CaseSeen]:
    """The results of a run's cases so far, worker by worker. Half-written last lines are
    skipped."""
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
    """The file of a case that showed a divergence."""
    return run / _FOLDER / "cases" / f"{case}.json"


def is_over(run: Path) -> bool:
    """Has a run written its summary, with which it ends?"""
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
        arms=sorted(arm for arm, names in rules.items() if names & COUNTING_RULES),
        known=sorted({verdict.explained_by for verdict in judgement.known}),
        causes={
            name: CauseSeen(verdict.sentence(), verdict.rule, verdict.arm)
            for name, verdict in named.items()
        },
        results=results,
    )


def numbered(seen: Iterable[CaseSeen]) -> dict[tuple[str, int], CaseSeen]:
    """The results by case id and number of the draw, from 0: a case may be drawn twice, and other
    rules may judge it the second time."""
    draws: Counter[str] = Counter()
    found: dict[tuple[str, int], CaseSeen] = {}
    for one in seen:
        found[one.case, draws[one.case]] = one
        draws[one.case] += 1
    return found


def known_there(one: CaseSeen, name: str, twin: CaseSeen | None) -> frozenset[str]:
    """Ids of the entries that explain the first cause ``name`` of the case on the other side only
    (``twin``), although both sides gave the same bits. Then the ledgers differ, since an entry's
    script may not show its issue in a changed library, and the results do not."""
    arm = one.causes[name].arm
    if twin is None or not one.results.get(arm) or one.results[arm] != twin.results.get(arm):
        return frozenset()
    return frozenset(twin.known) - frozenset(one.known)


def shown_alone(mine: Iterable[CaseSeen], other: Iterable[CaseSeen]) -> set[str]:
    """Fingerprints that only ``mine`` shows, without those that the other side's ledger explains on
    the same bits."""
    twins = numbered(other)
    there = {name for seen in twins.values() for name in seen.causes}
    return {
        name
        for key, one in numbered(mine).items()
        for name in one.causes
        if name not in there and not known_there(one, name, twins.get(key))
    }
