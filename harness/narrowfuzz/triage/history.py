"""What a case needs of the cases before it: state that outlives a model, ids of dead ones, caches.

A divergence that a worker sees and no fresh process shows may hang on what that worker ran before.
So a fresh process runs the worker's last cases and then this one, and with ever fewer of them.
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

#: Cases that a worker remembers.
REMEMBERED = 40
#: Of the seconds for making it shorter, so many times more are there to find one that shows it.
_TO_FIND = 2.0

#: The case lies beside it: a traceback quotes the line that raised.
_SCRIPT = f"""\
import os, sys
{GUARD}
from pathlib import Path
from narrowfuzz.triage.history import show
if __name__ == "__main__":  # processes that are ranks import it, too
    sys.exit(show(Path(__file__).parent, **{{asked!r}}))
"""
#: Beside it: the case, and what was seen of it.
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
    """The case with as few earlier ones as show it in a fresh process, and what is seen there.

    Where the case shows it alone, one of its rungs may leave what another meets: other data of the
    case do so for a script, which plays one. ``rules`` are asked, ``files`` are recipe files and
    ``models`` a user's own, as the command line names them; after ``seconds`` no fewer are looked
    for."""
    wanted = fingerprint(verdict, judge.family(case.spec))
    arms = sorted(arm.name for arm in LADDER if not arm.compiler or arm.name == verdict.arm)

    def seen(history: Sequence[Case], limit: float) -> Verdict | None:
        asked = {
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
            path.write_text(_SCRIPT.format(asked=asked))
            longer = msgspec.structs.replace(case, history=tuple(history))
            (folder / _CASE).write_bytes(dump_case(longer))
            if not (scripts(path, timeout=limit, plant=plant).shown and found.is_file()):
                return None
            verdict: Verdict = pickle.loads(found.read_bytes())
            return verdict

    began = time.monotonic()
    until = began + seconds
    if BY_NAME[verdict.arm].compiled:  # what is left behind is code, and has no data
        past = list({c.spec: c for c in past if c.spec.compile != "none"}.values())
    alone = seen((), _TO_FIND * seconds) is not None

    def shows(history: Sequence[Case]) -> bool:
        return seen(history, max(1.0, until - time.monotonic())) is not None

    for start in [[_other_data(case)]] if alone else _starts(judge, case, past):
        seconds_more = began + _TO_FIND * seconds - time.monotonic()
        if seconds_more < 1.0 or seen(start, seconds_more) is None:
            continue
        kept = fewest(start, shows, until)
        # luck would have it either way: without them never, with them each time
        again = max(_TO_FIND * seconds, 10.0)
        if (alone or seen((), again) is None) and (there := seen(kept, again)) is not None:
            yield msgspec.structs.replace(case, history=tuple(kept)), there


def _starts(judge: Judge, case: Case, past: Sequence[Case]) -> Iterator[list[Case]]:
    """What may have run before, those first that a script can play: it has one recipe."""
    yield [_other_data(case)]
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


def _other_data(case: Case) -> Case:
    data = msgspec.structs.replace(case.data, seed=(case.data.seed + 1) % 2**32)
    return msgspec.structs.replace(case, data=data)


def fewest(
    cases: Sequence[Case], shows: Callable[[Sequence[Case]], bool], until: float
) -> list[Case]:
    """A part of ``cases`` that still ``shows`` and of which none can be left out, in their order;
    a larger one where time ran out."""
    kept, size = list(cases), max(1, len(cases) // 2)
    while True:
        start, dropped = 0, False
        while start < len(kept) and time.monotonic() < until:
            rest = kept[:start] + kept[start + size :]
            if rest and shows(rest):
                kept, dropped = rest, True
            else:
                start += size
        if time.monotonic() >= until or (size == 1 and not dropped):
            return kept
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
    """1 if this process sees ``wanted`` on the case that lies in the ``folder``, where it leaves
    what it saw, else 0: what a fresh process runs."""
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
