"""The check at the end of a script of a library's own layers: source text chosen by what the
verdict expects and where, and what the player must record for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowfuzz.case.events import Backward
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.models.catalog import LAYERS
from narrowfuzz.numerics.delayed import FMAX
from narrowfuzz.play.job import Taps
from narrowfuzz.play.library import Where
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.equal_runs import ALONE, PLAIN, THROUGH
from narrowfuzz.rules.library.own_backward import first_step
from narrowfuzz.rules.library.ranks import BY_ITSELF, as_shared, shares
from narrowfuzz.rules.own_backward import allowed, largest
from narrowfuzz.rules.state.machine import moves
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Blocks, Formats, MadeBy, Own, Present, Runs, Same
from narrowfuzz.trace.snapshots import SlotName
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.short_check import check_raises
from narrowfuzz.triage.story import slot_of_verdict

_NOTHING = Taps(keeps=False)
_LISTENS = Taps(keeps=False, listens=True)
_STATES = Taps(keeps=False, states=True)


@dataclass(frozen=True)
class Check:
    """Source text that checks ``run``, and ``other`` if there is one, and what the player must
    record for it (``taps``)."""

    text: str
    #: Further constants that are put into the pasted source.
    constants: Mapping[str, str] = field(default_factory=dict)
    taps: Taps = _NOTHING
    #: True: only inputs, weights and gradients of linears are recorded, nothing inside the library.
    linears_only: bool = False
    #: The run to compare with. "": none; plain: without recompute; through: without reloads;
    #: before: an earlier model in the same process; alone: a rank's rows in one process.
    other: str = ""
    #: True: the check runs the schedule itself, by calling ``again``.
    runs: bool = False


def check_of(evidence: Evidence, verdict: Verdict) -> Check:
    """The check that shows the verdict. Raises ValueError for a verdict that no script shows."""
    expect, at = verdict.expect, verdict.at
    if isinstance(expect, Runs):
        other = "before" if at.run else ""
        return Check(check_raises(verdict, "again()", "'the training'"), other=other, runs=True)
    if isinstance(expect, Same) and at.what == "product":
        again, first = _products(at, role=False), repr(_where(expect.at))
        places = f"{{(e, at) for e, at, _ in run.recorded if at == {first}}}"
        check = f"recomputed_with({again}, seen_at(run, Product, {places}))"
        return _recorded(check)
    if isinstance(expect, Same):
        return _compared(at, expect)
    if slot_of_verdict(verdict) is not None:
        return _state(evidence, verdict)
    if isinstance(expect, MadeBy):
        return _operand(evidence, at, expect)
    if isinstance(expect, Formats):
        check = f"other_formats({_products(at)}, {expect.names!r})"
        # a library that is right multiplies in high precision here, and nothing is recorded
        return _recorded(check) if expect.names else _check(check, _LISTENS)
    if isinstance(expect, Blocks):
        block = (expect.rows, expect.columns)
        return _recorded(f"other_blocks({_products(at)}, {at.side!r}, {block})")
    if isinstance(expect, Present) and at.what == "cast":
        return _recorded(f"weight_not_cast(run, {at.event})")
    if isinstance(expect, Present):
        names = [f"{name}@{at.event}" for name in expect.names]
        return _check(f"missing(run.results, {names!r})", Taps())
    if at.what in ("codes", "scale"):
        own = evidence.own_layers
        rounding = own.gradient_rounding if at.phase == "backward" else "nearest"
        kind = {"kind": repr(own.kind), "rounding": repr(rounding)}
        casts = f"seen_at(run, Cast, {{{_place(at)}}})"
        return _recorded(f"wrong_casts({casts})", constants=kind)
    if at.what == "pending":
        return _check(f"left_over(run.pending[{at.event}])", Taps(keeps=False, pending=True))
    if isinstance(expect, Own):
        return _own_backward(evidence)
    raise ValueError(f"no stand-alone script for {at}, {type(expect).__name__}")


_UNRECORDED = """\
if not run.recorded:
    print("cannot tell: what passes inside the library is not seen here")
    sys.exit(125)
"""


def _check(check: str, taps: Taps = _NOTHING, **more: Any) -> Check:
    text = f"sentence, shows = {check}\nprint(sentence)\nsys.exit(int(shows))"
    return Check(text, taps=taps, **more)


def _recorded(check: str, **more: Any) -> Check:
    """A check that exits with "cannot tell" if nothing was recorded."""
    one = _check(check, _LISTENS, **more)
    return replace(one, text=_UNRECORDED + one.text)


def _where(at: At) -> Where:
    return Where(at.phase, at.of, at.call if at.of >= 0 else -1)


def _place(at: At) -> str:
    return repr((at.event, _where(at)))


def _products(at: At, *, role: bool = True) -> str:
    """An expression for the products at an address, of its role only if ``role``: some libraries
    give all products of a backward the same role."""
    products = f"seen_at(run, Product, {{{_place(at)}}})"
    named = "output" if at.name == "gradient" else at.name
    return f"[p for p in {products} if p.role == {named!r}]" if role else products


def _operand(evidence: Evidence, at: At, expect: MadeBy) -> Check:
    places = "{" + ", ".join(map(_place, expect.casts)) + "}" if expect.casts else "set()"
    casts = f"in_time(run, {places})"
    own = not evidence.spec.quantized_init
    check = f"not_made({_products(at)}, {at.side!r}, {casts})"
    return _recorded(check, constants={"own": repr(own)})


#: A verdict's name of the run that it compares with -> ``Check.other``.
_OTHERS: dict[str, str] = {
    PLAIN: "plain",
    THROUGH: "through",
    ALONE: "before",
    BY_ITSELF: "alone",
}


def _compared(at: At, expect: Same) -> Check:
    """The check of a result, or of a slot's state, that must be the same in two runs."""
    if expect.at.run not in _OTHERS:
        raise ValueError(f"a script does not play {expect.at.run!r}")
    other = _OTHERS[expect.at.run]
    if at.what != "state":
        got, want = (f"{run}.results.get({at.name!r})" for run in ("run", "other"))
        return _check(f"other_bits({got}, {want})", Taps(), other=other)
    slot = (at.layer, at.name, at.index[0])
    got, want = (f"{run}.states[{at.event}][{slot!r}]" for run in ("run", "other"))
    return _check(f"other_bits({got}, {want})", _STATES, other=other)


def _own_backward(evidence: Evidence) -> Check:
    """The check of the first step's gradients against the outputs and the gradients sent into
    them."""
    spec, dtype = evidence.spec, evidence.case.spec.dtype
    step = first_step(spec)
    assert step is not None
    backwards = [i for i, event in enumerate(spec.events) if isinstance(event, Backward)]
    sent = [f"tensors['grad_output@{backwards.index(i)}/{f}']" for i, f in step.passes]
    ys = [f"run.results['y{f}']" for _, f in step.passes]
    layer, (weight, bias) = spec.layers - 1, LAYERS[spec.model].last
    names = {"weight": f"{layer}.{weight}", "bias": f"{layer}.{bias}"}
    limits = (allowed(dtype, autocast=False), largest(dtype), 0.0)
    check = (
        f"results = {{'output': torch.cat([{', '.join(ys)}]).flatten(0, -2)}}\n"
        f"began = {{'grad_output': torch.cat([{', '.join(sent)}]).flatten(0, -2)}}\n"
        f"for ours, theirs in {names!r}.items():\n"
        f"    grad = run.results.get(f'{{theirs}}.grad@{step.event}')\n"
        "    if grad is not None:\n"
        "        results[f'last.{ours}.grad'] = grad\n"
        f"        began['last.' + ours] = run.began[theirs]\n"
    )
    one = _check(f"own_backward(results, began, 'last', {', '.join(map(repr, limits))})")
    return Check(check + one.text, taps=Taps(begins=True))


def _state(evidence: Evidence, verdict: Verdict) -> Check:
    """The check of the guilty slot's state: follows through all events how each must change it."""
    slot, at = slot_of_verdict(verdict), verdict.at
    assert slot is not None
    name = (slot.layer, slot.direction, slot.index)
    if isinstance(verdict.expect, Own):  # the recipe must not have such a slot
        shows = f"{name!r} in run.states[{at.event}]"
        return Check(f"shows = {shows}\nprint({name!r}, shows)\nsys.exit(int(shows))", taps=_STATES)
    trace = _trace(evidence, verdict)
    owed = moves(evidence, trace, slot)
    usual = evidence.own_layers.policy(evidence.spec.settings)
    assert usual is not None
    kind = usual.forward if slot.direction == "forward" else usual.backward
    held, scales = _held(evidence, verdict), at.what == "cast"
    linears_only = _linears_suffice(evidence, slot, cast=scales, moves=bool(owed))
    # a schedule that runs in high precision records nothing, and that is right
    unheard = _UNRECORDED if any(m.casts or m.products for m in trace.moments) else ""
    check = unheard + (
        f"slot = {name!r}\n{_HELD}"
        f"moves = {owed!r}\n"
        f"sentence, shows = compare_states({held}, moves, np.float32({FMAX[kind]}))\n"
        "print(sentence)\nsys.exit(int(shows))"
    )
    kinds = sorted({kind for some in owed.values() for kind, *_ in some})
    constants = {"kinds": repr(tuple(kinds)), "scales": repr(scales)}
    constants["history"] = repr(usual.history)
    return Check(
        check, constants, Taps(keeps=False, listens=True, states=True), linears_only=linears_only
    )


_HELD = (
    "states = lambda run: (s.get(slot) for s in run.states)\n"
    "held = lambda run: [h and Slot(*(t.cpu().numpy() for t in h)) for h in states(run)]\n"
)


def _held(evidence: Evidence, verdict: Verdict) -> str:
    """Source text of the slot's states and of the maxima that were recorded for it; on ranks that
    share maxima, as the guilty rank's group shares them."""
    if not (BY_NAME[verdict.arm].sharded and shares(evidence)):
        return "held(run), maxima(run, slot)"
    every = "[held(one) for one in ranks], [maxima(one, slot) for one in ranks]"
    return f"*with_group_maxima({every}, {verdict.at.rank})"


def _trace(evidence: Evidence, verdict: Verdict) -> Trace:
    """The trace that the verdict is about; on ranks, the guilty rank's with the maxima that its
    group shares."""
    if BY_NAME[verdict.arm].sharded:
        return as_shared(evidence, verdict.arm)[verdict.at.rank]
    return evidence.traces[verdict.arm]


def _linears_suffice(evidence: Evidence, slot: SlotName, *, cast: bool, moves: bool) -> bool:
    """True if the inputs, weights and gradients of linears are the tensors that the slot's casts
    quantise, so that nothing inside the library need be recorded."""
    spec = evidence.spec
    if cast or not LAYERS[spec.model].bare:
        return False
    if slot.direction == "forward":
        return slot.index <= 1 and not (slot.index == 1 and spec.quantized_init)
    # a backward through forwards of both kinds quantises some of its gradients
    ran: Sequence[int] = [len(e.of) for e in spec.events if isinstance(e, Backward)]
    return moves and all(n == 1 for n in ran)
