"""The rules of schedules that compare two runs, in a script: O12, O1 and R20."""

from __future__ import annotations

from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence, order_lost
from narrowfuzz.oracles.schedule_rules import AFTER_OTHERS
from narrowfuzz.schedule.events import Backward, Close, Event, Forward, Open, Reload, Step, Switch
from narrowfuzz.schedule.text import sentence
from narrowfuzz.stateful import ScheduleScript
from narrowfuzz.triage.script_schedule_checks import EXIT, Check, Maker
from narrowfuzz.triage.script_training import Mark, Play, checkpoint_call, quoted
from narrowfuzz.verdict import Verdict

_COMPARE = '''\
log = []
def after(event, *results):
    """Notes results, gradients and the state of every slot."""
    tensors = {f"result {i}": x.detach().clone() for i, x in enumerate(results) if x is not None}
    for name, scale, window in scales(layers):
        tensors |= {f"scale of {name}": scale.clone(), f"window of {name}": window.clone()}
    log.append((event, tensors))
def logged(**how):
    global log
    log = []
    reset()
    train(**how)
    return log'''

_COMPARED = """
broken = False
for (event, first), (other, second) in zip(BASE, OTHER):
    if event != other:
        print(f"{event}\\n    OTHERS {other}")
        broken = True
    for name in [name for name in first if name in second]:
        x, y = first[name], second[name]
        if x.shape != y.shape or not torch.allclose(x, y, rtol=0, atol=0, equal_nan=True):
            print(f"{event}: {name} {tuple(x.shape)} differs")
            print("    NAMED", x.flatten()[:4].tolist())
            print("    OTHERS", y.flatten()[:4].tolist())
            broken = True
    if broken:
        break"""


def _comparing(evidence: ScheduleEvidence, until: int) -> Mark:
    """Notes what each event before ``until`` made."""
    numbers = iter(range(64))
    frozen = evidence.schedule.layout == "frozen_first"

    def mark(i: int, event: Event, made: list[str]) -> str:
        number = next(numbers) if isinstance(event, Forward) else 0
        if i >= until or isinstance(event, Switch | Open | Reload):
            return ""
        results = [] if frozen and isinstance(event, Backward) else made
        told = "leave the region" if isinstance(event, Close) else sentence(event, number)
        if isinstance(event, Backward):
            clear = "".join(f"; {x} = None" for x in results)
            return f"after({', '.join([quoted(told), *results])}){clear}"
        if isinstance(event, Step):
            results = ["*[p.grad for p in layers.parameters()]"]
        return f"after({', '.join([quoted(told), *results])})"

    return mark


def _compared(base: str, other: str, named: str, others: str) -> str:
    text = _COMPARED.replace("BASE", base).replace("OTHERS", others).replace("OTHER", other)
    return text.replace("NAMED", named) + EXIT


def _twin(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    spec, schedule = evidence.case.spec, evidence.schedule
    until = order_lost(schedule) if schedule.reentrant else len(schedule.events)
    again = checkpoint_call(spec, text, "function", "x")
    before = (
        (
            "def checkpoint(function, x):\n"
            f"    return {again} if checkpointed else function(x)\n{_COMPARE}"
        )
        .replace("train(**how)", "train()")
        .replace("logged(**how)", "logged(how)")
    )
    before = before.replace(
        "global log\n    log = []", "global checkpointed, log\n    checkpointed, log = how, []"
    )
    after = "plain, recomputed = logged(False), logged(True)"
    after += _compared("plain", "recomputed", "plain       ", "checkpointed")
    play = Play(spec, text, True, own_checkpoint=True)
    return Check(play, ("scales", "reset"), before, _comparing(evidence, until), after)


def _company(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    play = Play(evidence.case.spec, text, verdict.arm != "eager")
    before = _COMPARE.replace("    reset()\n", "").replace("**how", "")
    # as a model that is gone, not one that is still there
    before = before.replace("global log\n", "global log, layers\n")
    before = before.replace("    return log", "    layers = nn.ModuleList()\n    return log")
    if verdict.at.run == AFTER_OTHERS:
        before = before.replace("    train()\n", _RAISES)
    after = "alone, later = logged(), logged()"
    after += _compared("alone", "later", "alone             ", "after other models")
    mark = _comparing(evidence, len(evidence.schedule.events))
    return Check(play, ("scales",), before, mark, after)


_RAISES = """\
    try:
        train()
    except Exception as error:
        log.append((f"{type(error).__name__}: {error}", {}))
"""


def _reload(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    play = Play(evidence.case.spec, text, False, optional_reload=True)
    after = "through, reloaded = logged(reloads=False), logged(reloads=True)"
    after += _compared("through", "reloaded", "uninterrupted", "reloaded     ")
    mark = _comparing(evidence, len(evidence.schedule.events))
    return Check(play, ("scales", "reset"), _COMPARE, mark, after, arguments="reloads")


TWINS: dict[str, Maker] = {"O12": _twin, "O1": _company, "R20": _reload}
