"""The check at the end of a model's played script: source text chosen by what the verdict expects
and where, and what the player must record for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.rules import own_backward
from narrowfuzz.rules.repeat import AGAIN
from narrowfuzz.rules.whole import SMALL, SMALL_RATIO, ratio_limit
from narrowfuzz.trace.expect import (
    Is,
    Near,
    OneOf,
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
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.element import TAPPED, Places
from narrowfuzz.triage.script.parts import TORCH_NAME
from narrowfuzz.triage.script.short_check import accepted, check_raises


@dataclass(frozen=True)
class Check:
    """Source text that checks the runs and exits, and what the player must record for it."""

    text: str
    #: Linears whose calls it checks.
    watch: tuple[str, ...] = ()
    #: True: it also checks the operands that they multiply.
    tapped: bool = False

    @property
    def kernels(self) -> bool:
        """True if it checks arguments of kernels."""
        return "watch." in self.text

    @property
    def results(self) -> bool:
        """True if it checks results."""
        return ".results" in self.text


def check_of(spec: Spec, verdict: Verdict, plan: Plan, runs: Mapping[str, str]) -> Check:
    """The check that shows the verdict; ``runs`` are the script's variables by the names of the
    runs that they hold. Raises ValueError for an address or an expectation that no run of the
    player shows."""
    expect, places = verdict.expect, Places(spec, plan, runs, bool(BY_NAME[verdict.arm].compiler))
    if isinstance(expect, Runs | Refuses):
        if isinstance(expect, Refuses) and not expect.raised:
            return Check(accepted("run()", expect))
        return Check(check_raises(verdict, "run()", "trace.phase", "trace.doing or trace.phase"))
    if isinstance(expect, Typed):
        got = f"{places.call(verdict.at)}.outputs[{verdict.at.name!r}].dtype"
        check = (
            f"got, want = {got}, {TORCH_NAME[expect.dtype]}\n"
            f'print(f"{verdict.located}: expected {{want}}, got {{got}}")\n'
            "sys.exit(0 if got == want else 1)"
        )
        return Check(check, (verdict.at.layer,))
    check = _whole(spec, verdict, runs)
    if check:
        return Check(f"sentence, shows = {check}\nprint(sentence)\nsys.exit(int(shows))")
    return _element_check(verdict, places)


def _whole(spec: Spec, verdict: Verdict, runs: Mapping[str, str]) -> str:
    """A call of one of the player's checks; "" if a single element is to be checked instead."""
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
        return beyond_text(spec, verdict)
    if at.what == "attention":
        # q, k or v may have changed while the sums stayed the same
        limit = expect.limit if isinstance(expect, Own) else ""
        return f"statistics(watch.attention, {repr(read(limit)) if limit else 'math.inf'})"
    if at.what == "product":
        return f"wrong_products([p for p in watch.products if p.phase == {at.phase!r}])"
    if at.phase == "recompute" and BY_NAME[verdict.arm].compiler:
        return "recomputed_otherwise(watch.products)"
    if isinstance(expect, Own) and at.what == "result":  # sums over the last weight's rows
        allowed = own_backward.allowed(spec.dtype, autocast=bool(spec.narrowed))
        largest = own_backward.largest(spec.dtype)
        limits = (MODELS[spec.model].last, allowed, largest, FORMATS[spec.dtype].min_normal)
        return f"own_backward(trace.results, tensors, {', '.join(map(repr, limits))})"
    return ""


def beyond_text(spec: Spec, verdict: Verdict) -> str:
    """A call of ``beyond`` with O9's limit: the same multiple of eager's error, or of the usual
    error if that is larger, and the same floor."""
    assert isinstance(verdict.expect, Near)
    at, (large, floor) = verdict.at, ratio_limit(spec)
    usual = float(read(verdict.expect.usual or verdict.expect.eager))
    row = list(at.index)
    results = f"[t.results[{at.name!r}]{row or ''} for t in (exact, eager, trace)]"
    exact = f"exact.results[{at.name!r}]"
    ratio = f"{large} if {exact}.numel() >= {SMALL} and not {bool(row)} else {SMALL_RATIO}"
    size = f"{exact}.square().mean()"
    if row:  # a row's roundings scale with the row's own size
        size = f"max({size}, {exact}{row}.square().mean())"
    least = f"{floor!r} * {size}.sqrt().item()"
    return f"beyond(*{results}, usual={usual!r}, ratio={ratio}, floor={least})"


def _element_check(verdict: Verdict, places: Places) -> Check:
    """The check of the number at an address."""
    at, expect = verdict.at, verdict.expect
    got = places.element(at)
    addresses, wanted = [at], str(expect)
    lines: list[str] = []
    if isinstance(expect, Same | Ordered):
        other = expect.at if isinstance(expect, Same) else expect.than
        times = f" * {expect.times!r}" if isinstance(expect, Same) and expect.times != 1 else ""
        lines.append(f"want = {places.element(other)}{times}")
        addresses.append(other)
        wanted = "{want}" if isinstance(expect, Same) else "at least {want}"
        holds = "got == want or (got != got and want != want)"
        if isinstance(expect, Ordered):
            holds = "got >= want"
    elif isinstance(expect, Within | OneOf):
        ranges = (expect,) if isinstance(expect, Within) else expect.ranges
        holds = " or ".join(
            f"{_literal(read(one.lo))} <= got <= {_literal(read(one.hi))}" for one in ranges
        )
    elif isinstance(expect, Is) and math.isnan(read(expect.value)):
        holds = "got != got"
    elif isinstance(expect, Is):
        lines.append(f"want = float.fromhex({expect.value!r})")
        holds = "got == want"
        if expect.signed:
            holds += " and math.copysign(1, got) == math.copysign(1, want)"
    else:
        raise ValueError(f"a player cannot check {type(expect).__name__}")
    resting = _rests_on(verdict, places)
    addresses += [g.at for g in verdict.given if g.at.what == "tensor" or g.at.run in places.runs]
    layers = tuple(dict.fromkeys(a.layer for a in addresses if a.layer))
    lines.append(f'print(f"{verdict.located}: expected {wanted}, got {{got}}")')
    check = "\n".join((*resting, f"got = {got}", *lines, f"sys.exit(0 if {holds} else 1)"))
    if places.compiled:  # compiled code calls no layer
        return Check(check)
    return Check(check, layers, any(a.what in TAPPED for a in addresses))


def _literal(x: float) -> str:
    return f"{'-' * (x < 0)}math.inf" if math.isinf(x) else repr(x)


_MOVED = """
moved = sorted({{name for name, is_so in given if not is_so}})
if moved:
    print("cannot tell: the expectation rests on another", " and another ".join(moved))
    sys.exit(125)"""


def _rests_on(verdict: Verdict, places: Places) -> list[str]:
    """Lines that end the script with 125 if a value that the expectation rests on has changed."""
    lines = []
    for given in verdict.given:
        at, value = given.at, read(given.value)
        if at.what == "tensor":
            held = f"{places.call(at)}.held({at.name!r})"
            lines.append(f"    ({f'{at.layer} {at.name}'!r}, crc({held}) == {int(value)}),")
        elif at.run and at.run in places.runs:
            lines.append(f"    ({given.name!r}, {places.element(at)} == {value!r}),")
    return ["given = [", *lines, "]" + _MOVED.format()] if lines else []
