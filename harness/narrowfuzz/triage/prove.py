"""The scripts that may show a divergence, simplest first, each run in a fresh process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from narrowfuzz.case.arm import BY_NAME as ARMS
from narrowfuzz.case.arm import EAGER, EAGER_NATIVE
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.rule import by_events
from narrowfuzz.trace.expect import Refuses
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.layer import first_of, linear_of
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.script.layers import of_layers
from narrowfuzz.triage.script.model import of_model
from narrowfuzz.triage.script.operator import call_of, of_operator
from narrowfuzz.triage.script.parts import Tensors
from narrowfuzz.triage.script.played import Played, write_played_script
from narrowfuzz.triage.script.ranks import of_ranks
from narrowfuzz.triage.script.short import write_short_script
from narrowfuzz.triage.verify import GONE, RunScript, ScriptRun

#: Why a divergence is not the doing of what is planted.
_ANYWAY = "its script fails without the injected fault, too"


@dataclass(frozen=True)
class Proof:
    """A script, what it prints, and why it does not show the divergence, "" if it does."""

    script: str
    output: str
    why: str


def unseen(why: str) -> bool:
    """True if no fresh process showed it, neither with what is planted nor without."""
    return why not in ("", _ANYWAY)


def proven(
    judge: Judge, case: Case, verdict: Verdict, plant: tuple[str, str] | None, scripts: RunScript
) -> Proof:
    """The first script that shows it, or the last that was tried."""
    tried: list[Proof] = []
    for write in _scripts(judge, case, verdict):
        try:
            script = write()
        except ValueError as error:
            tried.append(Proof(f"# no stand-alone script: {error}\n", "", str(error)))
            continue
        tried.append(Proof(script, *_confirm(script, plant, scripts)))
        if not tried[-1].why:
            return tried[-1]
    # what ran says more than what was not written
    return next((one for one in tried if one.output), tried[0])


def _scripts(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Callable[[], str]]:
    """Writers of scripts that may show it, the simplest first; each raises ValueError where it has
    none."""
    device = judge.device.torch
    at, recipe = verdict.at, judge.recipe(case.spec)
    if by_events(case.spec) or case.spec.sharded:
        yield lambda: write_played_script(_played(judge, case, verdict))
        return
    if at.what == "operator":
        call = call_of(judge, case, verdict)
        yield lambda: write_short_script(of_operator(call, verdict, device))
        return
    # what was handed another tensor was not the layer's doing
    own = at.layer and at.what != "function" and (at.phase != "recompute" or at.side)
    plain = EAGER_NATIVE if ARMS[verdict.arm].native else EAGER
    layer = linear_of(judge, case, at.layer, at.call, plain) if own else None
    if layer is not None:
        alone = msgspec.structs.replace(case, spec=layer[0])
        yield partial(script_of, alone, verdict.of_linear(), recipe, layer[1], device=device)
    first, values = first_of(judge, case, verdict), _values(case, verdict, recipe)
    yield partial(script_of, case, first, recipe, values, device=device)
    if case.spec.direct:  # the player may see what the short form does not
        yield lambda: write_played_script(_played(judge, case, verdict))


def _played(judge: Judge, case: Case, verdict: Verdict) -> Played:
    """What a script plays to show it. Raises ValueError as those who say so."""
    recipe, device = judge.recipe(case.spec), judge.device.torch
    if by_events(case.spec):
        return of_layers(judge.observe(case), verdict, recipe, device=device)
    of = of_ranks if case.spec.sharded else of_model
    return of(case, verdict, recipe, tensors_of(case, recipe), device)


def _values(case: Case, verdict: Verdict, recipe: Recipe) -> Tensors | None:
    """Zeros but for the input where sizes are refused, whatever the values, and a package's model
    has millions of these; None: the case's own."""
    if not (isinstance(verdict.expect, Refuses) and MODELS[case.spec.model].package):
        return None
    given = tensors_of(case, recipe).items()
    return {name: t if name.startswith("input") else np.zeros_like(t) for name, t in given}


def _confirm(script: str, plant: tuple[str, str] | None, scripts: RunScript) -> tuple[str, str]:
    """What the script prints in a fresh process, and why it does not show the divergence, "" if it
    does. With a fault planted it must not show it without."""
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
        path = Path(folder) / "repro.py"
        path.write_text(script)
        with ThreadPoolExecutor(2) as pool:
            clean = pool.submit(scripts, path) if plant else None
            run = scripts(path, plant=plant)
            if not (run.shown or run.crashed):
                return run.output, _why_not(run)
            if clean is not None and clean.result().code != GONE:
                output = f"{run.output}\nwithout the fault: {clean.result().output}"
                return output, _ANYWAY
    return run.output, ""


def _why_not(run: ScriptRun) -> str:
    last = (run.output.strip().splitlines() or ["it printed nothing"])[-1][:200]
    if run.code == GONE:
        return f"its script passes in a fresh process: {last}"
    if run.code is None:
        return last
    return f"its script cannot tell (exit code {run.code}): {last}"
