"""O3 of a schedule in a script: what products multiply was cast for them, with their scale."""

from __future__ import annotations

from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence
from narrowfuzz.oracles.schedule_operands import sources_of
from narrowfuzz.schedule.events import Backward, Event, Forward
from narrowfuzz.stateful import ScheduleScript
from narrowfuzz.triage.script_schedule_checks import EXIT, RUN, Check, no_mark
from narrowfuzz.triage.script_training import Play
from narrowfuzz.verdict import Verdict

_OPERANDS = '''\
made, running, now, broken = {}, [], None, False
def during(*forwards, kept=(), backward=False):
    """An event begins: whose casts it may multiply, and whose kept weights in a recompute."""
    global now
    now = forwards, kept, backward
def watch(layer):
    layer.register_forward_pre_hook(lambda *_: running.append(layer))
    layer.register_forward_hook(lambda *_: running.clear(), always_call=True)
def rows(codes):
    return codes.view(torch.uint8).reshape(-1, codes.shape[-1])
def key(codes):
    return bytes(codes.contiguous().cpu().numpy())
def told(scale, inverse):
    """1/scale as a number, block scales as their bytes."""
    return inverse.item() if scale.dtype == torch.float32 else key(scale)
def hear(seen):
    """Operands are codes of casts of their own, with the scale that the product divides by."""
    global broken
    forwards, kept, backward = now or ((-1,), (), False)
    phase = "forward" if not backward else "recompute" if running else "backward"
    if isinstance(seen, Cast):
        owner = now if backward else forwards[0]
        late = phase == "backward" and " forward " in slot_of(seen)
        for codes in (rows(seen.codes), rows(seen.codes).t()):
            record = (phase, owner, late, told(seen.scale, 1 / seen.scale))
            made.setdefault(key(codes), []).append(record)
    elif isinstance(seen, Product):
        for place, (codes, inverse, _) in enumerate(sides(seen)):
            if inverse is None:
                continue
            found = made.get(key(rows(codes)), [])
            own = [cast[3] for cast in found if mine(cast, phase){copies}]
            if told(inverse, inverse) not in own{unless}:
                print(f"{phase} product has 1/scale {told(inverse, inverse)}, its codes were cast "
                      f"with {own or 'another forward, or never'}")
                broken = True
def mine(cast, phase):
    """May a product of this phase multiply what this cast made?"""
    forwards, kept, _ = now
    if cast[0] == "forward":
        return cast[1] in (kept if phase == "recompute" else forwards)
    return cast[1] is now and not cast[2] and (cast[0] == phase or phase == "backward")'''

_COPIES = '''
def copy(cast, place, seen):
    """Is it the kept weight, cast for the backward of another forward that multiplies it?"""
    weight = place == 0 and seen.layout == "NN"
    return weight and cast[0] == "recompute" and set(cast[1][0]) & set(now[0])'''


def check_operands(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    """Every product of the schedule."""
    sources = sources_of(evidence.schedule)
    numbers = iter(range(len(sources)))

    def lead(i: int, event: Event, made: list[str]) -> str:
        if isinstance(event, Forward):
            number = next(numbers)
            return f"during({_listed([number, *sorted(sources[number] - {number})])})"
        if isinstance(event, Backward):
            through = set().union(*(sources[f] for f in event.of))
            kept = sorted(set().union(*(sources[f] - {f} for f in event.of)))
            also = f", kept=({_listed(kept)},)" if kept else ""
            return f"during({_listed(sorted(through))}{also}, backward=True)"
        return ""

    blocks = evidence.kind == "mx"
    # a parameter that is FP8 itself was cast before the schedule began
    unless = " and own" if evidence.schedule.quantized_init else ""
    copies = " or copy(cast, place, seen)" if blocks else ""
    return Check(
        play=Play(evidence.case.spec, text, verdict.arm != "eager"),
        uses=("scales", "listen"),
        before=_OPERANDS.replace("{unless}", unless).replace("{copies}", copies)
        + (_COPIES if blocks else ""),
        mark=no_mark,
        after=f"{RUN}{EXIT}",
        built="for layer in layers:\n        watch(layer)",
        lead=lead,
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
