"""Finds the earlier cases that a divergence depends on.

A divergence that a worker sees and no fresh process shows may depend on what that worker ran
before: state that outlives a model, ids of freed objects that are used again, caches. So a fresh
process runs the worker's last cases and then this one, again and again with fewer earlier cases.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from narrowfuzz.case.ladder import BY_NAME, LADDER
from narrowfuzz.case.spec import Case, dump_case, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.rules import rules_of
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.session import SessionOptions, open_session
from narrowfuzz.triage.verify import GONE, GUARD, SHOWN, RunScript

#: The number of its latest cases that a worker remembers.
REMEMBERED = 40
#: The search for a history that shows the divergence may take this many times the seconds that are
#: given for shortening one.
_TO_FIND = 2.0

#: The script of a fresh process. The case is a file beside it, not a literal in it, because a
#: traceback quotes the line that raised.
_SCRIPT = f"""\
import os, sys
{GUARD}
from pathlib import Path
from narrowfuzz.triage.history import show
if __name__ == "__main__":  # processes that are ranks import it, too
    sys.exit(show(Path(__file__).parent, **{{asked!r}}))
"""
#: Files beside that script: the case, and the verdict that the process saw.
_CASE, _SEEN = "case.json", "seen"


def histories(
    judge: Judge,
    case: Case,
    verdict: Verdict,
    past: Sequence[Case],
    scripts: RunScript,
    *,
    rules: Sequence[str],
    plant: tuple[str, str] | None = None,
    files: Sequence[Path] = (),
    models: Sequence[str] = (),
    seconds: float = 60.0,
) -> Iterator[tuple[Case, Verdict]]:
    """The case with as few earlier cases as show the divergence in a fresh process, each with the
    verdict that this process saw.

    Where the case shows it without earlier cases, one of its rungs may leave behind a state that
    breaks a later rung. A script plays only one rung, so there the same case with other data serves
    as the earlier case. ``rules`` are the names of the rules to apply; ``files`` are recipe files
    and ``models`` a user's own models, as on the command line. Shortening stops after ``seconds``.
    """
    wanted = fingerprint(verdict, judge.family(case.spec))
    arms = sorted(arm.name for arm in LADDER if not arm.compiler or arm.name == verdict.arm)

    def seen(history: Sequence[Case], limit: float) -> Verdict | None:
        request = {
            "wanted": wanted,
            "rules": list(rules),
            "arms": arms,
            "device": judge.device.name,
            "files": [str(file) for file in files],
            "models": list(models),
        }
        with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as name:
            folder = Path(name)
            path, found = folder / "history.py", folder / _SEEN
            path.write_text(_SCRIPT.format(asked=request))
            longer = msgspec.structs.replace(case, history=tuple(history))
            (folder / _CASE).write_bytes(dump_case(longer))
            if not (scripts(path, timeout=limit, plant=plant).shown and found.is_file()):
                return None
            verdict: Verdict = pickle.loads(found.read_bytes())
            return verdict

    began = time.monotonic()
    until = began + seconds
    if BY_NAME[verdict.arm].compiled:  # compiled code stays behind, whatever data it ran on
        past = list({c.spec: c for c in past if c.spec.compile != "none"}.values())
    shows_alone = seen((), _TO_FIND * seconds) is not None

    def shows(history: Sequence[Case]) -> bool:
        return seen(history, max(1.0, until - time.monotonic())) is not None

    for start in [[case.reseeded(1)]] if shows_alone else _starts(judge, case, past):
        seconds_more = began + _TO_FIND * seconds - time.monotonic()
        if seconds_more < 1.0 or seen(start, seconds_more) is None:
            continue
        fewer = fewest(start, shows, until)
        # to exclude chance: without the earlier cases it must not show, with them it must again
        again = max(_TO_FIND * seconds, 10.0)
        if (shows_alone or seen((), again) is None) and (there := seen(fewer, again)) is not None:
            yield msgspec.structs.replace(case, history=tuple(fewer)), there


def _starts(judge: Judge, case: Case, past: Sequence[Case]) -> Iterator[list[Case]]:
    """Histories to try, first those that a script can play, as a script has only one recipe."""
    yield [case.reseeded(1)]
    same = [c for c in past if c.spec.recipe == case.spec.recipe]
    family = judge.family(case.spec)
    related = [c for c in past if judge.family(c.spec) == family]
    of_one = [
        msgspec.structs.replace(
            earlier,
            spec=msgspec.structs.replace(
                earlier.spec, recipe=case.spec.recipe, backend=case.spec.backend
            ),
        )
        for earlier in related
    ]
    of_model = [c for c in same if c.spec.model == case.spec.model]
    tried: list[list[Case]] = []
    for some in (of_model, same, of_one, list(past)):
        if some and some not in tried:
            tried.append(some)
            yield some


def fewest(
    cases: Sequence[Case], shows: Callable[[Sequence[Case]], bool], until: float
) -> list[Case]:
    """A subset of ``cases``, in their order, that still ``shows`` the divergence and from which no
    case can be dropped; a larger one if time ran out."""
    remaining, size = list(cases), max(1, len(cases) // 2)
    while True:
        start, dropped = 0, False
        while start < len(remaining) and time.monotonic() < until:
            rest = remaining[:start] + remaining[start + size :]
            if rest and shows(rest):
                remaining, dropped = rest, True
            else:
                start += size
        if time.monotonic() >= until or (size == 1 and not dropped):
            return remaining
        size = max(1, size // 2)


def show(
    folder: Path,
    *,
    wanted: str,
    rules: Sequence[str],
    arms: Sequence[str],
    files: Sequence[str],
    models: Sequence[str],
    device: str,
) -> int:
    """The body of the fresh process's script: judges the case that is stored in ``folder``. Returns
    1 if the fingerprint ``wanted`` is among its causes, and stores that verdict in ``folder``;
    otherwise 0."""
    case = load_case((folder / _CASE).read_bytes())
    options = SessionOptions(
        device=device,
        worker=None,
        recipes=case.recipes,
        recipe_files=[Path(file) for file in files],
        models=models,
        arms=frozenset(arms),
        ledger="none",
    )
    judge = open_session(options).judge
    verdict = judge.judge(case, [rules_of(case.spec)[name] for name in rules]).cause(wanted)
    if verdict is None:
        return GONE
    (folder / _SEEN).write_bytes(pickle.dumps(verdict))
    return SHOWN
