"""repro.py of a stateful case: the minimal schedule as plain library calls, and the one invariant.

Exit code 1: the invariant is broken. 0: it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.case import Case
from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence
from narrowfuzz.stateful import ScheduleScript, Stateful
from narrowfuzz.triage.script_casts import check_casts
from narrowfuzz.triage.script_operands import check_operands
from narrowfuzz.triage.script_parts import GUARD, TORCH_NAME
from narrowfuzz.triage.script_schedule_checks import CHECKS, Check, no_mark
from narrowfuzz.triage.script_state import check_state
from narrowfuzz.triage.script_tensors import build, tensors
from narrowfuzz.triage.script_training import Play, model, training
from narrowfuzz.triage.script_twins import TWINS
from narrowfuzz.verdict import Verdict

#: Standard modules that a script may need, by the text that says so.
_MODULES = ("contextlib", "io", "math", "os", "sys", "warnings", "zlib")


def write_schedule_script(evidence: ScheduleEvidence, verdict: Verdict, recipe: Stateful) -> str:
    """The script's text. Raises ValueError for a finding no script can show by itself."""
    case = evidence.case
    text = recipe.script(case.spec)
    check = _check(evidence, verdict, text)
    play = check.play
    schedule = play.schedule
    preamble = [
        text.imports,
        *(f"import {name}" for name in ("torch.utils.checkpoint",) if "by_torch" in verdict.arm),
        "",
        "torch.set_num_threads(1)",
        f"dtype = {TORCH_NAME[case.spec.dtype]}",
        text.settings,
        f"recipe = {text.recipe(schedule.settings)}",
    ]
    parts = [
        "\n".join(line for i, line in enumerate(preamble) if line or i == 2),
        *_earlier(case, recipe, verdict.arm != "eager"),
        tensors(case, text),
        build(case, text, check.built),
        *dict.fromkeys(getattr(text, name) for name in check.uses),
        check.before,
        model(play),
        training(play, check.mark, check.lead, check.arguments),
        check.after,
    ]
    body = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
    modules = [name for name in _MODULES if name in ("os", "sys") or f"{name}." in body]
    head = (
        f'"""{_quoted(verdict.sentence())}\n\n{case.spec.recipe}, arm {verdict.arm}, rule '
        f"{verdict.oracle}. Exits 1 while this shows, 0 once it is gone, "
        '125 if it cannot tell.\n"""\n'
        f"import {', '.join(modules)}\n{GUARD}\n"
        "import numpy as np\nimport torch\nfrom torch import nn\n"
    )
    return head + body


def _earlier(case: Case, recipe: Stateful, checkpointed: bool) -> Iterator[str]:
    """What was trained before in the same process."""
    for earlier in case.history:
        if earlier.spec.recipe != case.spec.recipe or earlier.spec.schedule is None:
            raise ValueError(f"{earlier.spec.recipe} ran before, and a script has one recipe")
        text = recipe.script(earlier.spec)
        play, settings = Play(earlier.spec, text, checkpointed), earlier.spec.schedule.settings
        yield "\n".join(filter(None, (text.settings, f"recipe = {text.recipe(settings)}")))
        yield f"dtype = {TORCH_NAME[earlier.spec.dtype]}"
        yield tensors(earlier, text)
        yield build(earlier, text, "")
        yield model(play)
        yield f"{training(play, no_mark, no_mark)}\ntrain()"
        spec = case.spec
        assert spec.schedule is not None
        yield f"dtype = {TORCH_NAME[spec.dtype]}\nrecipe = {text.recipe(spec.schedule.settings)}"


def _check(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    if verdict.oracle not in _MAKERS:
        raise ValueError(f"no stand-alone script for {verdict.oracle}")
    return _MAKERS[verdict.oracle](evidence, verdict, text)


_MAKERS = {"O2": check_casts, "O3": check_operands, "O14": check_state, **CHECKS, **TWINS}


def _quoted(sentence: str) -> str:
    """Fit for a docstring, in lines of at most 100."""
    plain = sentence.replace("\\", "/").replace('"""', "'''")
    lines, line = [], ""
    for word in plain.split():
        if len(line) + len(word) > 95:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])
