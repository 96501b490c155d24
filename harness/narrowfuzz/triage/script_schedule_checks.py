"""The other rules of schedules in a script: what surrounds the training, and what is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from narrowfuzz.expect import Present
from narrowfuzz.oracles.own_backward import allowed, largest
from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence, steps_of
from narrowfuzz.oracles.schedule_own_backward import LAST, first_step
from narrowfuzz.schedule.events import Backward, Event, Forward, Step
from narrowfuzz.schedule.text import sentence
from narrowfuzz.stateful import ScheduleScript
from narrowfuzz.triage.script_training import (
    Mark,
    Play,
    checkpoint_call,
    gradient_name,
    quoted,
)
from narrowfuzz.verdict import Verdict


def no_mark(i: int, event: Event, made: list[str]) -> str:
    """Nothing between the events."""
    return ""


@dataclass(frozen=True)
class Check:
    """What one rule adds to the training."""

    play: Play
    #: Fields of ScheduleScript whose definitions it calls.
    uses: tuple[str, ...]
    #: Definitions before the training.
    before: str
    mark: Mark
    #: Runs it, looks, exits.
    after: str
    #: Parameters of ``train``.
    arguments: str = ""
    #: A line for every fresh ``layers``.
    built: str = ""
    #: The line before an event.
    lead: Mark = no_mark


Maker = Callable[[ScheduleEvidence, Verdict, ScheduleScript], Check]
#: The last lines of a script that kept ``broken``.
EXIT = '\nprint("BROKEN" if broken else "holds")\nsys.exit(1 if broken else 0)'
#: Runs it while ``hear`` listens.
RUN = "with listening(hear):\n    train()"


def _play(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Play:
    return Play(evidence.case.spec, text, verdict.arm != "eager")


_MISSING = """\
broken = False
def check():
    '''Every parameter that trains has a gradient.'''
    global broken
    trained = [(name, p) for name, p in layers.named_parameters() if p.requires_grad]
    missing = [name for name, p in trained if p.grad is None]
    print("no gradient of:", ", ".join(missing) or "nothing")
    broken = broken or bool(missing)"""


def _at(step: int) -> Mark:
    """Checks before this event."""
    return lambda i, event, made: "check()" if i == step else ""


def _contract(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    trace, play = evidence.traces.get(verdict.arm), _play(evidence, verdict, text)
    if trace is None or trace.error is None:  # it ended or stalled the process
        return Check(play, (), "", no_mark, "train()\nsys.exit(0)")
    after = (
        "try:\n    train()\nexcept Exception as error:\n"
        '    print(f"{type(error).__name__}: {error}")\n'
        f'    sys.exit(1 if type(error).__name__ == "{trace.error.type}" else 125)\n'
        'print("no error")\nsys.exit(0)'
    )
    return Check(play, (), "", no_mark, after)


_RECOMPUTE = '''\
checkpoints, running = [], []
def hear(seen):
    """The products of every run of what is checkpointed."""
    if isinstance(seen, Product):
        told = [(None, None, form) if s is None else (c.view(torch.uint8).clone(), s.clone(), form)
                for c, s, form in sides(seen)]
        for products in running:
            products.append(told)
def checkpoint(function, x):
    runs = []
    checkpoints.append(runs)
    def run(x):
        runs.append([])
        running.append(runs[-1])
        try:
            return function(x)
        finally:
            running.pop()
    return CHECKPOINT'''

_RECOMPUTED = """
def same(a, b):
    return a is b or (a is not None and b is not None and torch.equal(a, b))
broken = False
for first, *others in filter(None, checkpoints):
    for products in others:
        for i, again in enumerate(products):
            for name, a, b in zip("ab", again, first[i] if i < len(first) else ((), ())):
                different = [w for w, x, y in zip(("codes", "1/scale"), a, b) if not same(x, y)]
                if not b or a[2] != b[2] or different:
                    print(f"product {i}, operand {name}: recomputed with {a[1:]}, first {b[1:]}; "
                          f"different: {', '.join(different) or 'format'}")
                    broken = True"""


def _recompute(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    play = Play(evidence.case.spec, text, True, own_checkpoint=True)
    before = _RECOMPUTE.replace("CHECKPOINT", checkpoint_call(evidence.case.spec, text, "run", "x"))
    after = f"{RUN}{_RECOMPUTED}{EXIT}"
    return Check(play, ("scales", "listen"), before, no_mark, after)


_PRECISION = '''\
products, weights, broken = [], 0, False
def hear(seen):
    global weights
    if isinstance(seen, Product):
        products.append([form for _, _, form in sides(seen)])
    elif isinstance(seen, Cast) and slot_of(seen).endswith("forward slot 1"):
        weights += 1
def after(event, fp8, weight=False, gradients=False):
    """Inside a region every product is in FP8, outside none; weights are cast when asked for, and
    one operand of a gradient's products may be in E5M2."""
    global weights, broken
    wrong = [p for p in products if {"e4m3" in x or "e5m2" in x for x in p} != {fp8}]
    told = "the weight was not cast" if weight and not weights else ""
    wide = {sum("e5m2" in x for x in p) for p in products}
    if fp8 and wide and max(wide) != gradients:
        told = told or f"{max(wide)} operands of a product in E5M2, not {int(gradients)}"
    if wrong or told:
        print(f"{event}: {told or wrong}, expected {'FP8' if fp8 else 'high precision'}")
        broken = True
    products.clear()
    weights = 0'''


def _precision(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    narrow = _narrow(evidence)
    weights = verdict.at.what == "cast"
    wide = evidence.kind != "mx" and evidence.schedule.settings.format == "hybrid"
    numbers = iter(range(64))

    def mark(i: int, event: Event, made: list[str]) -> str:
        number = next(numbers) if isinstance(event, Forward) else 0
        if not isinstance(event, Forward | Backward):
            return ""
        told = quoted(sentence(event, number))
        if narrow.get(i) is None:
            return "products.clear()"
        asks = weights and isinstance(event, Forward) and narrow[i] and event.first is not False
        more = ", weight=True" if asks else ""
        if isinstance(event, Backward) and narrow[i] and wide:
            more += ", gradients=True"
        return f"after({told}, fp8={narrow[i]}{more})"

    after = f"{RUN}{EXIT}"
    return Check(_play(evidence, verdict, text), ("scales", "listen"), _PRECISION, mark, after)


def _narrow(evidence: ScheduleEvidence) -> dict[int, bool]:
    """Event -> whether its products run in FP8; left out where they are of both kinds."""
    found: dict[int, bool] = {}
    for i, event, progress in steps_of(evidence.schedule):
        if isinstance(event, Forward):
            found[i] = progress.inner(event) is not None
        elif isinstance(event, Backward):
            under = {f in progress.ran for f in event.of}
            if len(under) == 1:
                found[i] = under.pop()
    return found


_BALANCE = '''\
broken = False
def after(event):
    """Between steps nothing is set aside for later."""
    global broken
    left = {name: n for name, n in pending().items() if n}
    print(f"{event}: {left or 'nothing'} left over")
    broken = broken or bool(left)'''


def _balance(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    outside = {i for i, _, progress in steps_of(evidence.schedule) if not progress.open}

    def mark(i: int, event: Event, made: list[str]) -> str:
        return f'after("step, event {i}")' if isinstance(event, Step) and i in outside else ""

    after = f"train(){EXIT}"
    return Check(_play(evidence, verdict, text), ("pending",), _BALANCE, mark, after)


_OWN = """\
broken, passes = False, []
def after(layer):
    '''Output times gradient, and the last parameters times theirs, have the same sums.'''
    global broken
    y, g = (torch.cat([t.detach().double().flatten(0, -2) for t in each]) for each in zip(*passes))
    pairs = [(p.detach().double(), p.grad.double()) for p in (layer.{weight}, layer.{bias})
             if p is not None and p.numel() and p.grad is not None]
    shares = [(p * grad).reshape(y.shape[1], -1) for p, grad in pairs]
    left, right = (g * y).sum(0), sum(share.sum(1) for share in shares)
    size = (g * y).abs().sum(0) + sum(share.abs().sum(1) for share in shares)
    far = (left - right).abs() / ({allowed!r} * size)
    far = far[size.isfinite() & (size < {largest!r}) & (size > 2.0**-60)]
    worst = far.nan_to_num(nan=math.inf).max().item() if far.numel() else 0.0
    print(f"sums differ by {{worst:.3g}} of what rounding allows")
    broken = broken or worst > 1.0"""


def _own_backward(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    play = _play(evidence, verdict, text)
    if isinstance(verdict.expect, Present):
        return Check(play, (), _MISSING, no_mark, f"train(){EXIT}", lead=_at(verdict.at.event))
    step, dtype = first_step(evidence.schedule), evidence.case.spec.dtype
    assert step is not None
    weight, bias = LAST[evidence.schedule.layer]
    before = _OWN.format(
        weight=weight, bias=bias, allowed=allowed(dtype, autocast=False), largest=largest(dtype)
    )
    numbers = itertools.count()

    def lead(i: int, event: Event, made: list[str]) -> str:
        if isinstance(event, Backward) and i < step.event:
            number = next(numbers)
            pairs = [f"(y{f}, {gradient_name(number, f, event)})" for f in event.of]
            return f"passes.extend([{', '.join(pairs)}])"
        if i != step.event:
            return ""
        return f"after(layers[{evidence.schedule.layers - 1}])"

    return Check(play, (), before, no_mark, f"train(){EXIT}", lead=lead)


CHECKS: dict[str, Maker] = {
    "O22": _own_backward,
    "contract": _contract,
    "O13": _recompute,
    "O20": _precision,
    "O19": _balance,
}
