"""O14 in a script: one slot's state after every event, as the recipe's rules make it."""

from __future__ import annotations

from collections.abc import Set
from itertools import groupby

from narrowfuzz.numerics.delayed import FMAX, Policy
from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence
from narrowfuzz.oracles.schedule_machine import Move, moves
from narrowfuzz.schedule.events import Backward, Close, Event, Forward, Open, Reload, Switch
from narrowfuzz.schedule.text import sentence
from narrowfuzz.schedule.trace import SlotName
from narrowfuzz.stateful import ScheduleScript
from narrowfuzz.triage.script_schedule_checks import Check
from narrowfuzz.triage.script_training import Play, quoted
from narrowfuzz.triage.story import told_slot
from narrowfuzz.verdict import Verdict

_LISTEN = '''\
heard = []
def hear(seen):
    """max|x| of what is quantised with the slot's scale; a recompute stages nothing."""
    if isinstance(seen, Cast) and slot_of(seen) == SLOT{first_run}:
{used}        heard.append({largest})'''
_USED = """\
        global broken
        if seen.scale != scale:
            print(f"quantised with scale {seen.scale.item():.8g}, the slot's is {scale:.8g}")
            broken = True
"""
_HOOK = '''\
heard = []
def hear(x):
    """max|x| of what is quantised with the slot's scale; a recompute stages nothing."""
    if {when}:
        heard.append({largest})
def watch(layer):
    {hook}'''
_HOOKS = {
    "forward": "layer.register_forward_pre_hook(lambda layer, args: hear({tensor}))",
    "backward": """\
def attach(layer, args, y):
        if y.requires_grad:
            y.register_hook(hear)
    layer.register_forward_hook(attach)""",
}
_MACHINE = '''\
SLOT, scale, window, broken = "{slot}", torch.ones(()), torch.zeros({history}), False
def stage():
    window[0] = max([window[0], *heard[:1]])
    del heard[:1]
def commit({parameters}):
    """An update: the next scale from the window, which moves on by one cell."""
    global scale, window
{amax}    window = window.roll(-1)
    window[0] = 0
    if 0 < amax < torch.inf:
        scale = ({quotient}{margin}).clamp(max=torch.finfo(torch.float32).max)
{extras}def told(scale, window):
    return f"scale {{scale:.8g}} window {{' '.join(f'{{x:.4g}}' for x in window.tolist())}}"
def after(event, *moves):
    """What the slot owes to an event; then it must hold what the library holds."""
    global scale, window, broken
    for move in moves:
        move()
    heard.clear()
    got = [(s.detach().cpu(), w.detach().cpu()) for n, s, w in scales(layers) if n == SLOT]
    if not got:  # as if never seen: not run yet, or lost
        got = [(torch.ones(()), torch.zeros_like(window))]
{fresh}    same = torch.equal(got[0][0], scale) and torch.equal(got[0][1], window)
    print(f"{{event}}\\n    expected {{told(scale, window)}}\\n    got      {{told(*got[0])}}")
    if not same:
        broken, scale, window = True, got[0][0].clone(), got[0][1].clone()'''


def check_state(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    """The guilty slot's state, followed."""
    slot = told_slot(verdict)
    assert slot is not None
    play = Play(evidence.case.spec, text, verdict.arm != "eager")
    trace = evidence.traces[verdict.arm]
    own = [move for move in moves(evidence, trace) if move.slot == slot]
    by_event = {i: list(group) for i, group in groupby(own, lambda move: move.event)}
    policy = evidence.policy(evidence.schedule.settings)
    assert policy is not None
    numbers = iter(range(64))

    def mark(i: int, event: Event, made: list[str]) -> str:
        number = next(numbers) if isinstance(event, Forward) else 0
        if isinstance(event, Open | Switch) and i != verdict.at.event:
            return ""
        told = "leave the region" if isinstance(event, Close) else sentence(event, number)
        args = [quoted(told), *(_move(m, policy) for m in by_event.get(i, []))]
        return f"after({', '.join(args)})"

    hooked = _hooked(evidence, verdict, slot, by_event)
    uses = ("scales",) if hooked else ("scales", "listen")
    kind = policy.forward if slot.direction == "forward" else policy.backward
    kinds = {move.kind for move in own}
    before = [_machine(evidence, slot, policy, str(FMAX[kind]), kinds)]
    before.append(_hook(evidence, slot) if hooked else _listen(evidence, verdict, slot))
    run = "train()" if hooked else "with listening(hear):\n    train()"
    if not hooked and not text.listen:
        raise ValueError("a script cannot listen to this recipe's casts")
    return Check(
        play=play,
        uses=uses,
        before="\n".join(before),
        mark=mark,
        after=f'{run}\nprint("BROKEN" if broken else "holds")\nsys.exit(1 if broken else 0)',
        built=f"watch(layers[{slot.layer}])" if hooked else "",
    )


def _move(move: Move, usual: Policy) -> str:
    if move.history:
        return f"lambda: {move.kind}({move.history})"
    if move.policy is not None and _told(move.policy, usual):
        return f"lambda: commit({_told(move.policy, usual)})"
    return move.kind


def _told(policy: Policy, usual: Policy) -> str:
    """The settings that a switch changed."""
    changed = []
    if policy.margin != usual.margin:
        changed.append(f"margin={policy.margin}")
    if policy.algorithm != usual.algorithm:
        changed.append(f"newest={policy.algorithm == 'most_recent'}")
    return ", ".join(changed)


def _machine(
    evidence: ScheduleEvidence, slot: SlotName, policy: Policy, largest: str, kinds: Set[str]
) -> str:
    switches = [e for e in evidence.schedule.events if isinstance(e, Switch)]
    margins = any(e.margin is not None for e in switches)
    newest = policy.algorithm == "most_recent"
    parameters = [f"margin={policy.margin}"] if margins else []
    amax = "    amax = window[0].clone()\n" if newest else "    amax = window.max()\n"
    if any(e.algorithm is not None for e in switches):
        parameters.append(f"newest={newest}")
        amax = "    amax = window[0].clone() if newest else window.max()\n"
    if not policy.rolls_on_zero:
        amax = "    if window[0] == 0:\n        return\n" + amax
    resizes = any(e.history is not None for e in switches)
    reloads = any(isinstance(e, Reload) for e in evidence.schedule.events)
    margin = " / 2.0**margin" if margins else f" / 2.0**{policy.margin}" if policy.margin else ""
    return _MACHINE.format(
        slot=slot,
        history=policy.history,
        parameters=", ".join(parameters),
        amax=amax,
        margin=margin,
        # in torch a number divided by a tensor is rounded twice
        quotient=f"{largest} * (1 / amax)"
        if policy.reciprocal
        else f"torch.tensor({largest}) / amax",
        extras="".join(_EXTRAS[kind] for kind in sorted(kinds & _EXTRAS.keys())),
        fresh=_FRESH if resizes or reloads else "",
    )


_EXTRAS = {
    "resize": """\
def resize(history):
    global window
    kept = min(history, len(window)) - 1
    empty = torch.zeros(history - 1 - kept)
    window = torch.cat([window[:1], empty, window[len(window) - kept :]])
""",
    "cut": """\
def cut(history):
    global window
    window = torch.cat([window, torch.zeros(history)])[:history]
""",
    "lose": """\
def lose():
    global scale, window
    scale, window = torch.ones(()), torch.zeros(len(window))
""",
}
_FRESH = """\
    if scale == 1 and not window.any():
        window = torch.zeros(len(got[0][1]))
"""


def _hooked(
    evidence: ScheduleEvidence, verdict: Verdict, slot: SlotName, moves: dict[int, list[Move]]
) -> bool:
    """True where hooks see what is quantised: a linear's input, weight and gradient."""
    schedule = evidence.schedule
    if schedule.layer != "linear" or verdict.at.what == "cast":
        return False
    if slot.direction == "forward":
        weight = slot.index == 1
        return slot.index <= 1 and not (weight and schedule.quantized_init)
    # a backward through forwards of both kinds quantises some of its gradients
    ran = [len(e.of) for e in schedule.events if isinstance(e, Backward)]
    return all(n == 1 for n in ran) and bool(moves)


def _largest(evidence: ScheduleEvidence, x: str) -> str:
    values = {e.values for e in evidence.schedule.events if isinstance(e, Forward | Backward)}
    absolute = f"{x}.detach().float().abs()"
    if "inf" in values:
        absolute += ".nan_to_num(0.0, torch.inf)"
    return f"{absolute}.max().cpu()"


def _hook(evidence: ScheduleEvidence, slot: SlotName) -> str:
    when = "True" if slot.direction == "backward" else "torch._C._current_graph_task_id() == -1"
    hook = _HOOKS[slot.direction].format(tensor=("args[0]", "layer.weight")[slot.index])
    text = _HOOK.format(when=when, largest=_largest(evidence, "x"), hook=hook)
    if slot.direction == "backward":
        text = text.replace("    if True:\n        heard", "    heard")
    return text


def _listen(evidence: ScheduleEvidence, verdict: Verdict, slot: SlotName) -> str:
    forward = slot.direction == "forward"
    return _LISTEN.format(
        first_run=" and torch._C._current_graph_task_id() == -1" if forward else "",
        used=_USED if verdict.at.what == "cast" else "",
        largest=_largest(evidence, "seen.input"),
    )
