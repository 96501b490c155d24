"""The last lines of a played script: where it looks, and what must be there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from narrowfuzz.address import At
from narrowfuzz.arms.ladder import BY_NAME
from narrowfuzz.case import Spec
from narrowfuzz.expect import (
    Is,
    Near,
    Ordered,
    Own,
    Present,
    Refuses,
    Runs,
    Same,
    Sum,
    Typed,
    Within,
    read,
)
from narrowfuzz.models.zoo import MODELS
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.numerics.plan import ROLES, Fp32Scale, MxScale, Plan
from narrowfuzz.numerics.reference import granule
from narrowfuzz.oracles import own_backward
from narrowfuzz.oracles.repeat import AGAIN
from narrowfuzz.oracles.whole import SMALL, SMALL_RATIO, ratio_limit
from narrowfuzz.triage.script_checks import ACCEPTED, check_raises
from narrowfuzz.triage.script_parts import SLOT, TORCH_NAME
from narrowfuzz.verdict import Verdict


@dataclass(frozen=True)
class Look:
    """Text that looks and exits, and what the player must keep for it."""

    check: str
    #: Linears whose calls it looks at.
    watch: tuple[str, ...] = ()
    #: True: at what they multiply, too.
    tapped: bool = False

    @property
    def kernels(self) -> bool:
        """True where it looks at what kernels were handed."""
        return "watch." in self.check


def look_at(spec: Spec, verdict: Verdict, plan: Plan, runs: Mapping[str, str]) -> Look:
    """What shows the verdict; ``runs`` are the script's variables by the name of the run they hold.
    Raises ValueError for an address or expectation that no run of a player shows."""
    expect = verdict.expect
    if isinstance(expect, Runs | Refuses):
        accepted = isinstance(expect, Refuses) and not expect.raised
        if accepted:
            return Look(ACCEPTED.format(call="run()", rule=expect))
        return Look(check_raises(verdict, "run()", "trace.phase"))
    if isinstance(expect, Typed):
        got = f"{_call(verdict.at, runs)}.outputs[{verdict.at.name!r}].dtype"
        check = (
            f"got, want = {got}, {TORCH_NAME[expect.dtype]}\n"
            f'print(f"{verdict.at}: {{got}}, must be {{want}}")\nsys.exit(0 if got == want else 1)'
        )
        return Look(check, (verdict.at.layer,))
    told = _whole(spec, verdict, runs)
    if told:
        return Look(f"told, shows = {told}\nprint(told)\nsys.exit(int(shows))")
    return _element_look(verdict, plan, runs)


def _whole(spec: Spec, verdict: Verdict, runs: Mapping[str, str]) -> str:
    """A call of one of the player's checks; "" where an element is looked at."""
    at, expect = verdict.at, verdict.expect
    if isinstance(expect, Present):
        return f"missing(trace.results, {expect.names!r})"
    if isinstance(expect, Same) and expect.at.run in BY_NAME:
        return "different(base.results, trace.results)"
    if isinstance(expect, Same) and expect.at.run == AGAIN:
        return "different(trace.results, *(other.results for other in again))"
    if isinstance(expect, Sum):
        parts = ", ".join(f"{variable}.results" for name, variable in runs.items() if name)
        return f"not_the_sum(trace.results, {parts})"
    if isinstance(expect, Near):
        return _beyond(spec, verdict)
    if at.what == "attention":
        # where q, k or v moved, the sums may well have stayed
        limit = expect.limit if isinstance(expect, Own) else ""
        return f"statistics(watch.attention, {repr(read(limit)) if limit else 'math.inf'})"
    if at.what == "product":
        phase = "forward" if verdict.oracle == "O5" else "backward"
        return f"wrong_products([p for p in watch.products if p.phase == {phase!r}])"
    if verdict.oracle == "O13" and BY_NAME[verdict.arm].compiler:
        return "recomputed_otherwise(watch.products)"
    if isinstance(expect, Own) and verdict.oracle == "O22":
        allowed = own_backward.allowed(spec.dtype, autocast=spec.autocast)
        largest = own_backward.largest(spec.dtype)
        told = (MODELS[spec.model].last, allowed, largest, FORMATS[spec.dtype].min_normal)
        return f"own_backward(trace.results, tensors, {', '.join(map(repr, told))})"
    return ""


def _beyond(spec: Spec, verdict: Verdict) -> str:
    """O9's own limit: the same multiple of eager's error, the same floor."""
    at, (large, floor) = verdict.at, ratio_limit(spec)
    row = list(at.index[:1])
    results = f"[t.results[{at.name!r}]{row or ''} for t in (exact, eager, trace)]"
    exact = f"exact.results[{at.name!r}]"
    ratio = f"{large} if {exact}.numel() >= {SMALL} and not {bool(row)} else {SMALL_RATIO}"
    least = f"{floor!r} * {exact}.square().mean().sqrt().item()"
    return f"beyond(*{results}, ratio={ratio}, floor={least})"


def _element_look(verdict: Verdict, plan: Plan, runs: Mapping[str, str]) -> Look:
    """The number at an address, held to what is expected there."""
    at, expect = verdict.at, verdict.expect
    compiled = bool(BY_NAME[verdict.arm].compiler)
    inside = compiled and at.what in _TAPPED
    got = _of_operand(at, plan, _product(at)) if inside else _element(at, plan, runs)
    addresses, told = [at], str(expect)
    lines: list[str] = []
    if isinstance(expect, Same | Ordered):
        other = expect.at if isinstance(expect, Same) else expect.than
        times = f" * {expect.times!r}" if isinstance(expect, Same) and expect.times != 1 else ""
        lines.append(f"want = {_element(other, plan, runs)}{times}")
        addresses.append(other)
        told = "{want}" if isinstance(expect, Same) else "at least {want}"
        holds = "got == want or (got != got and want != want)"
        if isinstance(expect, Ordered):
            holds = "got >= want"
    elif isinstance(expect, Within):
        lo, hi = (_literal(read(end)) for end in (expect.lo, expect.hi))
        holds = f"{lo} <= got <= {hi}"
    elif isinstance(expect, Is) and math.isnan(read(expect.value)):
        holds = "got != got"
    elif isinstance(expect, Is):
        lines.append(f"want = float.fromhex({expect.value!r})")
        holds = "got == want"
        if expect.signed:
            holds += " and math.copysign(1, got) == math.copysign(1, want)"
    else:
        raise ValueError(f"a player cannot check {type(expect).__name__}")
    resting = _rests_on(verdict, plan, runs)
    addresses += [g.at for g in verdict.given if g.at.what == "tensor" or g.at.run in runs]
    layers = tuple(dict.fromkeys(a.layer for a in addresses if a.layer))
    told = f'print(f"{at}: {{got}}, must be {told}")\nsys.exit(0 if {holds} else 1)'
    check = "\n".join((*resting, f"got = {got}", *lines, told))
    if compiled:  # it calls no layer
        return Look(check)
    return Look(check, layers, any(a.what in _TAPPED for a in addresses))


#: What only a tap shows.
_TAPPED = ("codes", "scale", "amax", "values", "significand")


def _literal(x: float) -> str:
    return f"{'-' * (x < 0)}math.inf" if math.isinf(x) else repr(x)


_MOVED = """
moved = sorted({{name for name, is_so in given if not is_so}})
if moved:
    print("cannot tell: the expectation rests on another", " and another ".join(moved))
    sys.exit(125)"""


def _rests_on(verdict: Verdict, plan: Plan, runs: Mapping[str, str]) -> list[str]:
    """Text that ends the script with 125 where something upstream is other than it was."""
    lines = []
    for given in verdict.given:
        at, value = given.at, read(given.value)
        if at.what == "tensor":
            held = f"{_call(at, runs)}.held({at.name!r})"
            lines.append(f"    ({f'{at.layer} {at.name}'!r}, crc({held}) == {int(value)}),")
        elif at.run and at.run in runs:
            lines.append(f"    ({given.name!r}, {_element(at, plan, runs)} == {value!r}),")
    return ["given = [", *lines, "]" + _MOVED.format()] if lines else []


def _call(at: At, runs: Mapping[str, str]) -> str:
    """The call of a linear; its gradients belong to its forward."""
    phase = "recompute" if at.phase == "recompute" else "forward"
    return f"{_run(at.run, runs)}.call({at.layer!r}, {at.call}, {phase!r})"


def _run(name: str, runs: Mapping[str, str]) -> str:
    if name not in runs:
        raise ValueError(f"a player does not play {name!r}")
    return runs[name]


def _element(at: At, plan: Plan, runs: Mapping[str, str]) -> str:
    """The number at an address, as an expression; in a sum of runs the sum of their numbers."""
    if " + " in at.run:
        parts = (msgspec.structs.replace(at, run=name) for name in at.run.split(" + "))
        return " + ".join(_element(part, plan, runs) for part in parts)
    index = list(at.index)
    if at.what == "result" and not at.layer:
        return f"{_rows(f'{_run(at.run, runs)}.results[{at.name!r}]')}{index}.item()"
    if at.what in _TAPPED and not at.layer:
        return _of_operand(at, plan, _last_gemm(at, plan, _run(at.run, runs)))
    if not at.layer:
        raise ValueError(f"a player has no eyes for {at}")
    call = _call(at, runs)
    if at.what == "result":
        return f"{_rows(f'{call}.outputs[{at.name!r}]')}{index}.item()"
    if at.what == "source" and not at.side:  # what the layer was handed
        return f"{_rows(f'{call}.held({at.name!r})')}{index}.item()"
    return _of_operand(at, plan, _gemm(at, plan, call))


def _gemm(at: At, plan: Plan, call: str) -> str:
    """What a tap saw of a GEMM of the call."""
    shown = [str(role) for role in ROLES[1:] if plan.gemms[role].quantised]
    if at.name in shown:
        return f"{call}.backward_gemms[{shown.index(at.name)}]"
    if at.name != "output" or not at.side:
        raise ValueError(f"a player has no eyes for {at}")
    return f"{call}.forward_gemms[0]"


def _last_gemm(at: At, plan: Plan, run: str) -> str:
    """What a tap saw of a GEMM of a single linear that nothing recomputes, run last."""
    shown = [str(role) for role in ROLES if plan.gemms[role].quantised]
    if at.name not in shown or not at.side:
        raise ValueError(f"a player has no eyes for {at}")
    return f"{run}.gemms[{shown.index(at.name) - len(shown)}]"


def _product(at: At) -> str:
    """Codes and scales of a GEMM of a compiled single linear, counted from the end past any
    recompute."""
    index = ROLES.index(at.name)  # type: ignore[arg-type]
    product = f"watch.products[{index - len(ROLES) if index else 0}]"
    return f"[{', '.join(f'{product}.{name}' for name in ('a', 'scale_a', 'b', 'scale_b'))}]"


def _of_operand(at: At, plan: Plan, gemm: str) -> str:
    """What was seen of an operand of the GEMM."""
    named = plan.gemms[at.name]  # type: ignore[index]
    operand, index = named.a if at.side == "a" else named.b, list(at.index)
    code = f"{gemm}[{SLOT[at.side]}].float(){index}.item()"
    if at.what == "codes":
        return code
    if at.what == "significand":
        return f"math.frexp({code})[0]"
    if at.what == "scale":
        return _scale(gemm, at.side, at.index)
    if at.what == "amax":
        return f"{gemm}[{4 + (at.side == 'b')}].float(){index or ''}.item()"
    if at.what == "values" and isinstance(operand.scale, MxScale | Fp32Scale):
        scale = _scale(gemm, at.side, granule(at.index, operand))
        byte = isinstance(operand.scale, MxScale)
        return f"{code} * 2.0 ** ({scale} - 127)" if byte else f"{code} / {scale}"
    raise ValueError(f"a player has no eyes for {at}")


def _scale(gemm: str, side: str, index: tuple[int, ...]) -> str:
    got = f"{gemm}[{SLOT[side] + 1}]"
    byte = f"({got}.view(torch.uint8) if {got}.element_size() == 1 else {got})"
    return f"{byte}{list(index) or ''}.item()"


def _rows(got: str) -> str:
    return f'getattr({got}, "_data", {got}).flatten(0, -2).float()'
