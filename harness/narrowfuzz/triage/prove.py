"""Runs the scripts that may show a divergence, simplest first, each in a fresh process."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.forms import form_of
from narrowfuzz.triage.verify import GONE, RunScript, ScriptRun

#: The reason why a divergence is not caused by the planted fault.
_ANYWAY = "its script fails without the injected fault, too"
#: The line of a traceback that names the exception; its message may go on for several lines.
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


@dataclass(frozen=True)
class Proof:
    """A script, what it prints, and why it does not show the divergence, "" if it does."""

    script: str
    output: str
    why: str
    #: False if it ended without telling whether the divergence shows, or could not be written.
    answered: bool = True


def never_shown(why: str) -> bool:
    """True for the ``why`` of a Proof whose script never showed the divergence, neither with the
    planted fault nor without."""
    return why not in ("", _ANYWAY)


def proven(
    judge: Judge, case: Case, verdict: Verdict, plant: tuple[str, str] | None, scripts: RunScript
) -> Proof:
    """The first script that shows the divergence. If none does, the first that ran and printed
    something; if none ran, the first that was tried."""
    tried: list[Proof] = []
    for write in form_of(case.spec).scripts(judge, case, verdict):
        try:
            script = write()
        except ValueError as error:
            none = f"# no stand-alone script: {error}\n"
            tried.append(Proof(none, "", str(error), answered=False))
            continue
        tried.append(_confirm(script, plant, scripts))
        if not tried[-1].why:
            return tried[-1]
    # the output of a script that ran tells more than the reason why one could not be written
    return next((one for one in tried if one.output), tried[0])


def _confirm(script: str, plant: tuple[str, str] | None, scripts: RunScript) -> Proof:
    """What the script shows in a fresh process. If a fault is planted, the script must not show the
    divergence without it."""
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
        path = Path(folder) / "repro.py"
        path.write_text(script)
        with ThreadPoolExecutor(2) as pool:
            clean = pool.submit(scripts, path) if plant else None
            run = scripts(path, plant=plant)
            if not (run.shown or run.crashed):
                return Proof(script, run.output, _why_not(run), run.code == GONE)
            if clean is not None and clean.result().code != GONE:
                output = f"{run.output}\nwithout the fault: {clean.result().output}"
                return Proof(script, output, _ANYWAY)
    return Proof(script, run.output, "")


def _why_not(run: ScriptRun) -> str:
    lines = run.output.strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if _EXCEPTION.match(line)] if run.raised else []
    last = (errors or lines)[-1][:200]
    if run.code == GONE:
        return f"its script passes in a fresh process: {last}"
    if run.code is None:
        return last
    return f"its script cannot tell (exit code {run.code}): {last}"
