"""Every stored case is judged again: what the rules say of it is what tests/replayed.json holds.

As a command it prints each difference and exits with 1 if there is one:

    python tests/test_replayed.py [--quick] [--only GLOB] [--processes N] [--write]

Numbers in sentences, and what can run at all, are this machine's: the record ``machine`` says on
which one the others were written. On another, write them before a change and compare after it.

Each case is judged in a copy of this process, so its record does not depend on what ran before it,
and what is planted stays there.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from fresh import python

if TYPE_CHECKING:
    from hunts import Replay
    from narrowfuzz.case.spec import Case
    from narrowfuzz.judge.judge import Judgement
    from narrowfuzz.ledger.ledger import Ledger
    from narrowfuzz.machine.device import Device
    from narrowfuzz.trace.verdict import Verdict

HERE = Path(__file__).parent
FILE = HERE / "replayed.json"
#: What was found of a case and what the other rules said, or why it cannot run.
Record = dict[str, Any]


# a record


def record_of(replay: Replay, device: Device) -> Record:
    """Judge the cases of a replay until one shows something."""
    from narrowfuzz.judge.judge import Judge
    from narrowfuzz.ledger.ledger import Ledger
    from narrowfuzz.rules import rules_of

    ledger = loaded_ledger() if replay.ledger else Ledger([])
    judge = Judge(loaded_recipes(replay.recipe_files), ledger, arms=replay.arms, device=device)
    record: Record = {}
    try:
        with replay.plant():
            for number, case in enumerate(replay.cases, 1):
                if why := _missing(case, device):
                    return {"unavailable": why}
                rules = [rules_of(case.spec)[replay.rule]] if replay.rule else None
                record = _told(judge.judge(case, rules))
                if len(replay.cases) > 1:
                    record = {"case": number, **record}
                if record.get("found"):
                    break
    except ValueError as error:  # what a recipe, a device or a version cannot do
        return {"unavailable": str(error)}
    return record


@cache
def loaded_ledger() -> Ledger:
    from narrowfuzz.ledger.ledger import load_ledger

    return load_ledger()


@cache
def loaded_recipes(files: tuple[Path, ...] = ()) -> Mapping[str, Any]:
    from narrowfuzz.recipe.recipe import load_every

    return load_every(files)


def _missing(case: Case, device: Device) -> str:
    """Why this machine cannot run an arm that the case asks for, "" if it can."""
    from narrowfuzz.arms.available import unavailable
    from narrowfuzz.case.ladder import climb

    return next(filter(None, (unavailable(arm, device.torch) for arm in climb(case.spec))), "")


def _told(judged: Judgement) -> Record:
    """First causes and what is known with their sentences; of other rules the statuses alone. Says
    ``unavailable`` where no rule could judge anything."""
    from narrowfuzz.trace.verdict import fingerprint

    shown = [*judged.causes, *judged.known]
    found = sorted(
        [
            v.rule,
            v.arm,
            f"known: {v.explained_by}" if v.status == "known" else v.status,
            fingerprint(v, judged.family),
            _sentence(v),
        ]
        for v in shown
    )
    rest: dict[str, dict[str, set[str]]] = {}
    for v in judged.verdicts:
        if v not in shown and v.status != "not_applicable":
            rest.setdefault(v.arm, {}).setdefault(v.status, set()).add(v.rule)
    if not found and not any("ok" in statuses for statuses in rest.values()):
        reasons = sorted({v.why for v in judged.verdicts if v.why})
        return {"unavailable": "; ".join(reasons) or "no rule applies"}
    said = {
        arm: {status: " ".join(sorted(rules)) for status, rules in sorted(statuses.items())}
        for arm, statuses in sorted(rest.items())
    }
    return {"found": found, "rest": said}


def _sentence(verdict: Verdict) -> str:
    """Without what is another each time: what was in memory that nobody wrote, and which of
    several ranks raised first."""
    said = verdict.sentence()
    if verdict.rule == "contract" and verdict.arm.startswith("sharded"):
        said = said.partition(" on rank ")[0].partition(": ")[0]
    return said.partition(":")[0] if verdict.symptom.endswith("nobody wrote") else said


def this_machine() -> Record:
    """What numbers, and what can run, depend on."""
    from narrowfuzz.machine.environment import versions
    from narrowfuzz.machine.machine import machine

    installed = versions()
    found = {**machine().describe(), **{name: installed[name] for name in ("torch", "torchao")}}
    return json.loads(json.dumps(found))


# judging


def judged(replays: Sequence[Replay], processes: int) -> dict[str, Record]:
    """The record of each, so many at a time, each in a copy of a process as it needs it."""
    records: dict[str, Record] = {}
    for where in sorted({replay.where for replay in replays}):
        here = [replay for replay in replays if replay.where == where]
        (told,) = copies([partial(_judged_at, where, here, processes)], 1)
        # no outcome differs from every record, and is not written
        records |= told if isinstance(told, dict) else {r.id: {"ended": told} for r in here}
    return records


def _judged_at(where: str, replays: Sequence[Replay], processes: int) -> dict[str, Record]:
    try:
        device = _enter(where)
    except ValueError as error:
        return {replay.id: {"unavailable": str(error)} for replay in replays}
    told = copies([partial(record_of, replay, device) for replay in replays], processes)
    return {
        replay.id: one if isinstance(one, dict) else {"ended": one}
        for replay, one in zip(replays, told, strict=True)
    }


def _enter(where: str) -> Device:
    """Make this process what its copies are to be, with all imported and loaded that most need."""
    from narrowfuzz.machine import device
    from narrowfuzz.machine.environment import settle
    from te_on_cpu import environment

    if where not in ("", "simulated"):
        os.environ[environment.VERSION_VARIABLE] = where
        environment.enter()
    import torchao.float8
    import torchao.prototype.moe_training.config
    import torchao.prototype.mx_formats  # noqa: F401

    loaded_ledger()
    loaded_recipes()
    settle()
    return device.enter("simulated") if where == "simulated" else device.Device()


def copies(calls: Sequence[Callable[[], Any]], processes: int) -> list[Any]:
    """What each call returns in a copy of this process, or the code that the copy ended with; so
    many at a time."""
    told: list[Any] = [None] * len(calls)
    waiting, running = list(enumerate(calls)), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < processes:
                number, call = waiting.pop(0)
                sys.stdout.flush()
                sys.stderr.flush()
                if (child := os.fork()) == 0:
                    _call(call, Path(folder) / f"{number}.json")
                running[child] = number
            child, status = os.wait()
            if child not in running:  # whoever asks for copies may have children of its own
                continue
            number, code = running.pop(child), os.waitstatus_to_exitcode(status)
            file = Path(folder) / f"{number}.json"
            told[number] = json.loads(file.read_text()) if code == 0 else code
    return told


def _call(call: Callable[[], Any], file: Path) -> NoReturn:
    """Write down what it returns and end this process."""
    from narrowfuzz.arms import processes

    os.dup2(2, 1)  # what libraries print is no difference
    # a compiler's caches know of no fault
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(file.with_suffix(".compiled"))
    code = 1
    try:
        file.write_text(json.dumps(call()))
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        processes.end()
        sys.stderr.flush()
        os._exit(code)


# comparing


def differences(expected: Mapping[str, Record], got: Mapping[str, Record]) -> Iterator[str]:
    """Lines to print, of records that are in one alone or not the same in both."""
    for id in sorted(expected.keys() | got.keys()):
        before, after = (_lines(id, records.get(id)) for records in (expected, got))
        if before != after:
            yield id
            changed = difflib.ndiff(before, after)
            for line in changed:
                if line[0] in "-+":
                    yield f"  {'expected' if line[0] == '-' else 'got     '} {line[2:]}"


#: Replays that read memory that nobody wrote: what rules say of it beside what is found, and the
#: numbers in its sentence, are others each time.
UNWRITTEN = ("entry: scaled-mm-empty-drops-bias, beside", "ranks: collective-not-waited-for")


def _lines(id: str, record: Record | None) -> list[str]:
    if record is None:
        return ["no record"]
    if id.startswith(UNWRITTEN):
        return [" | ".join(one[:-1]) for one in record.get("found", ())] or ["nothing found"]
    found = [" | ".join(one) for one in record.get("found", ())]
    rest = [
        f"{arm} {status}: {rules}"
        for arm, statuses in record.get("rest", {}).items()
        for status, rules in statuses.items()
    ]
    others = [f"{key}: {value}" for key, value in record.items() if key not in ("found", "rest")]
    return [*others, *(found or ["nothing found"] * ("found" in record)), *rest]


def load(file: Path = FILE) -> dict[str, Record]:
    return json.loads(file.read_text()) if file.exists() else {}


def dumped(records: Mapping[str, Record]) -> str:
    """A line for each record, so that a change is a line of a diff."""
    lines = [f"{json.dumps(id)}: {json.dumps(records[id])}" for id in sorted(records)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


# the command


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute or two of them")
    parser.add_argument("--only", default="*", metavar="GLOB", help="those whose id it matches")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--write", action="store_true", help="write what comes as what is expected")
    asked = parser.parse_args(arguments)
    from narrowfuzz.machine.environment import prepare

    prepare()
    from hunts import replays

    every = replays()
    chosen = {
        id: replay
        for id, replay in every.items()
        if fnmatch.fnmatchcase(id, asked.only) and (replay.quick or not asked.quick)
    }
    if not chosen:
        parser.error(f"no id matches {asked.only!r}")
    before = load()
    if new := chosen.keys() - before.keys() if not asked.write else set():
        print(f"{len(new)} have no record to compare with: --write makes one")
        chosen = {id: replay for id, replay in chosen.items() if id not in new}
        if not chosen:
            return 1
    got = judged(list(chosen.values()), asked.processes)
    got["machine"] = this_machine()
    # what is no longer replayed differs, too
    kept = {id: record for id, record in before.items() if id in got or id not in every}
    told = list(differences(kept, got))
    print(*told, sep="\n") if told else print(f"{len(chosen)} replayed, no difference")
    if not asked.write:
        return bool(told)
    others = {id: record for id, record in before.items() if id in every}
    outcomes = {id: record for id, record in got.items() if "ended" not in record}
    FILE.write_text(dumped({**others, **outcomes}))
    if ended := sorted(got.keys() - outcomes.keys()):
        print("not written, for these ended without an outcome:", *ended, sep="\n  ")
    return bool(ended)


# tests


def run(*options: str) -> None:
    """In a process of its own: it is what the command is."""
    if (here := this_machine()) != (there := load()["machine"]):
        pytest.skip(f"written on another machine: {there}, this is {here}")
    python(__file__, *options)


@pytest.mark.heavy
def test_the_quick_replays_are_as_recorded() -> None:
    run("--quick")


@pytest.mark.heavy
def test_all_replays_are_as_recorded() -> None:
    run()


@pytest.mark.heavy
def test_every_record_is_replayed_and_the_quick_ones_are_recorded() -> None:
    """How many of the others are not, the whole run says."""
    from hunts import replays

    every = replays()
    quick = {id for id, replay in every.items() if replay.quick}
    assert len(quick) >= 150
    assert quick <= load().keys() <= {*every, "machine"}


def test_what_never_ran_is_not_recorded_as_nothing_found() -> None:
    for id, record in load().items():
        silent = record.get("found") == []
        passed = any("ok" in statuses for statuses in record.get("rest", {}).values())
        assert passed or not silent, id


Change = Callable[[Record], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["found"][0].__setitem__(0, "O99"),
        lambda record: record["found"][0].__setitem__(3, "O1--another--fingerprint"),
        lambda record: record["found"][0].__setitem__(4, "another sentence"),
        lambda record: record["found"].clear(),
        lambda record: record["rest"].clear(),
        lambda record: record.update(unavailable="for a reason"),
    ],
)
def test_a_changed_record_is_reported(change: Change) -> None:
    records, changed = load(), load()
    id = next(id for id, record in records.items() if record.get("found") and record["rest"])
    change(changed[id])
    told = "\n".join(differences(records, changed))
    assert told.startswith(id) and ("expected" in told or "got" in told)
    assert not list(differences(records, load()))


@pytest.mark.parametrize("start", UNWRITTEN)
def test_of_what_reads_unwritten_memory_what_is_found_is_compared(start: str) -> None:
    records, changed = load(), load()
    id = next(id for id, record in records.items() if id.startswith(start) and record.get("found"))
    changed[id]["rest"].clear()
    changed[id]["found"][0][-1] = "other numbers"
    assert not list(differences(records, changed))
    changed[id]["found"][0][3] = "O1--another--fingerprint"
    assert next(differences(records, changed)) == id


def test_a_record_too_many_or_too_few_is_reported() -> None:
    records = load()
    (id, *_) = fewer = {**records}
    del fewer[id]
    assert next(differences(records, fewer)) == next(differences(fewer, records)) == id


@pytest.mark.heavy
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("call", "told"),
    [("lambda: {'found': []}", "{'found': []}"), ("lambda: 1 / 0", "1"), ("os.abort", "-6")],
)
def test_a_copy_that_fails_has_no_outcome(call: str, told: str) -> None:
    """In a process of its own: a copy of one that has threads may never begin."""
    code = f"import os; from test_replayed import copies; print(copies([{call}, lambda: 3], 2))"
    done = python("-c", code, cwd=HERE, code=None)
    assert done.stdout == f"[{told}, 3]\n", done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
