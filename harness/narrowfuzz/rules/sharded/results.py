"""S1 (one process's bits), S2 (gradient sums), S4 (ranks agree), S6 (norm), S8 to S10 (bits of
precomputed scales, of graphs and of processes), S12 (of the stages of a pipeline)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.layout import layout_of
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format, round_to
from narrowfuzz.numerics.reduction import sum_interval
from narrowfuzz.operators.operator import Expected
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.clipping import NORM, NOT_THE_NORM, norm_between
from narrowfuzz.rules.evidence import Evidence, identical, same_bits
from narrowfuzz.rules.expected import outside, passed
from narrowfuzz.rules.gemm import sum_of_codes
from narrowfuzz.rules.layers import layer_evidence
from narrowfuzz.rules.rule import diverged, diverged_from, first, plain
from narrowfuzz.rules.sharded.evidence import (
    arm_of,
    before_steps,
    by_part,
    compiled_of,
    copies,
    first_step,
    groups,
    holders,
    joined,
    origin,
    part_of,
    processes_of,
    run_of,
    stacked,
    whole_of,
)
from narrowfuzz.rules.whole import role_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same, between, number
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

#: The lower and upper ends of intervals.
_Ends = tuple[F64, F64]
#: Symptoms of results that cannot be compared element by element.
OTHER_SHAPE, NO_WHOLE = "other shape", "pieces make up no whole"
#: The end of the kind of a bias' gradient.
_BIAS = ".bias.grad"
#: The name of the run whose gathers compute scales themselves.
ON_THE_FLY = "on the fly"


def check_equal(evidence: Evidence) -> Iterator[Verdict]:
    """S1: a rank that shares no linear returns the outputs and input gradients, to the bit, of its
    piece of the rows in one process. In a world of one rank all results have these bits."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    if layout_of(evidence.spec).cuts_sums(evidence.spec.sharding):
        yield plain("S1", arm, "output", "not_applicable", "sums are cut over ranks")
        return
    forwards, backwards = first_step(evidence)
    entry = evidence.deviations.get("bias_gradient_of_codes", "")
    # a step with another gradient of a bias changes all later results
    parted = entry and evidence.spec.sharding.narrow_styles and evidence.spec.optimizes
    for rank, single, trace in _each_rank(evidence):
        names = [*before_steps(single, "output", forwards)]
        names += before_steps(single, "grad_input", backwards)
        # one rank adds up the norm in another order, so clipped steps give other parameters
        alike = evidence.spec.clipping == "none" and not _unrounded_uses(evidence, run)
        if evidence.spec.sharding.ranks == 1 and alike:
            every = [name for name in single.outputs if name_of(name).kind != NORM]
            kinds = sorted({name_of(name).kind for name in every})
            of_step = (before_steps(single, kind, 1) for kind in kinds if kind.endswith(".grad"))
            names = [*names, *chain.from_iterable(of_step)] if parted else every
        for name in names:
            want = single.outputs[name]
            there = At(name=name, run=EAGER.name, rank=rank)
            found = differs("S1", arm, "differs from one process", there, want, trace, rank)
            if found is not None and entry and name_of(name).kind.endswith(_BIAS):
                found = found.known(entry)  # S2 and O16 judge that sum
            status = "ok" if want.any() else "inconclusive"
            why = "" if want.any() else "zeros in both runs"
            yield found or plain("S1", arm, role_of(name), status, why)


def _each_rank(evidence: Evidence) -> Iterator[tuple[int, Trace, Trace]]:
    """Yields each rank, the trace of its piece of the rows in one process, and its own trace."""
    for first_rank, single, group in groups(evidence):
        for inside, trace in enumerate(group):
            yield first_rank + inside, single, trace


def differs(
    rule: str, arm: str, symptom: str, there: At, want: F32, trace: Trace, rank: int, name: str = ""
) -> Verdict | None:
    """The divergence of this rank's result from ``want``, at the address ``there``, whose bits it
    must have; None if it has them. The result has the same name, unless ``name`` is given."""
    at = At(name=name or there.name, rank=rank)
    role, got = role_of(at.name), trace.outputs.get(at.name)
    if got is None or got.shape != want.shape:
        actual = "nothing" if got is None else f"shape {list(got.shape)}"
        return diverged(rule, arm, role, OTHER_SHAPE, at, actual, Same(there))
    if identical(got, want) or np.all(same_bits(got, want)):
        return None
    return diverged_from(rule, arm, role, symptom, at, there, got, want)


def check_gradients(evidence: Evidence) -> Iterator[Verdict]:
    """S2: a parameter's gradient is the sum, or the mean, of those of the data-parallel ranks'
    pieces of the rows, within the rounding errors of additions in any order."""
    arm, sharding, run = arm_of(evidence), evidence.spec.sharding, run_of(evidence)
    if run is None:
        return
    if layout_of(evidence.spec).cuts_sums(sharding):
        yield plain("S2", arm, "grad_parameter", "not_applicable", "sums are cut over ranks")
        return
    if _unrounded_uses(evidence, run):
        why = "each use of a parameter may be rounded in one process and is not on ranks"
        yield plain("S2", arm, "grad_parameter", "not_applicable", why)
        return
    single = evidence.traces[EAGER.name].ranks
    entry = evidence.deviations.get("bias_gradient_of_codes", "")
    steps = evidence.spec.steps if evidence.spec.optimizes else 1
    after = sharding.resumed.ranks or sharding.ranks  # the others leave after the first step
    made = [(trace, steps) for trace in single]
    made += [(trace, steps if rank < after else 1) for rank, trace in enumerate(run.ranks)]
    for name in single[0].outputs:
        if not name.endswith(".grad"):
            continue
        key = next(iter(before_steps(single[0], name, 1)))
        # a first gradient after the first step is one of other parameters
        every = ((before_steps(trace, name, count), count) for trace, count in made)
        if any(key not in grads or len(grads) < count for grads, count in every):
            yield plain("S2", arm, "grad_parameter", "not_applicable", "no gradient")
            continue
        terms = holders(evidence, key)[1]
        each = [_by_backward(evidence, single[term], key) for term in terms]
        if not all(each):
            why = "a backward left no gradient"
            yield plain("S2", arm, "grad_parameter", "not_applicable", why)
            continue
        for part, pieces in enumerate(by_part(evidence, key)):
            cut = partial(_ends_of_part, stacked(evidence, pieces).shape, part, sharding.tensor)
            verdict = _reduced(evidence, key, pieces, _cut(each, cut))
            if verdict.status == "diverged" and entry and name_of(key).kind.endswith(_BIAS):
                of_codes = [_by_codes(evidence, single[term], key) for term in terms]
                if not all(of_codes):
                    why = "the codes of its output gradients were not seen"
                    verdict = plain("S2", arm, verdict.role, "inconclusive", why)
                elif _reduced(evidence, key, pieces, _cut(of_codes, cut)).status == "ok":
                    verdict = verdict.known(entry)
            yield verdict


def _unrounded_uses(evidence: Evidence, run: Trace) -> bool:
    """Do ranks add up what several uses of a parameter give, each of which one process rounds?"""
    return run.adds_unrounded and MODELS[evidence.spec.model].gradients.reused


def _cut(each: Sequence[Sequence[_Ends]], cut: Callable[[_Ends], _Ends]) -> list[tuple[_Ends, ...]]:
    """For each backward, the part of every rank's contribution."""
    return [*zip(*([*map(cut, term)] for term in each), strict=True)]


def _ends_of_part(shape: tuple[int, ...], part: int, parts: int, ends: _Ends) -> _Ends:
    """The ends for the part of this shape that a tensor-parallel rank has; the whole ends if they
    have no such part."""
    lo, hi = (part_of(end, shape, part, parts) for end in ends)
    return ends if lo is None or hi is None else (lo, hi)


def _by_backward(evidence: Evidence, trace: Trace, name: str) -> list[_Ends]:
    """The interval of each contribution to a parameter's gradient that backwards made before the
    first step, in one process. Only rounded sums are recorded; the ranks of DDP add up only the
    final ones, so there the one contribution is that sum. Empty if a backward gave no gradient."""
    count, fmt = first_step(evidence)[1], FORMATS[evidence.spec.dtype]
    run = run_of(evidence)
    if count == 1 or evidence.spec.sharding.ddp:
        term = (trace.outputs[name].astype(np.float64),) * 2
        return [_before_rounding(term, fmt) if run and run.adds_unrounded else term]
    sums = [
        x.astype(np.float64)
        for x in trace.accumulated_gradients.get(name_of(name).gradient_of, ())[:count]
    ]
    if len(sums) < count:
        return []
    found = [(sums[0], sums[0])]
    for before, after in pairwise(sums):
        with np.errstate(all="ignore"):
            off = fmt.unit_roundoff * (1.0 + 2.0 * fmt.unit_roundoff) * np.abs(after)
            found.append((after - before - off, after - before + off))
    if run and run.adds_unrounded:
        return [_before_rounding(ends, fmt) for ends in found]
    return found


def _before_rounding(ends: _Ends, fmt: Format) -> _Ends:
    """The interval of what gave these numbers when it was rounded to a format."""
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(ends[0]), np.abs(ends[1]))
        size = np.where(np.isfinite(size), size, 0.0)
        # a number that rounds to x is at most u / (1 - u) of |x| away
        off = fmt.unit_roundoff * (1.0 + 2.0 * fmt.unit_roundoff) * size + fmt.min_subnormal / 2.0
        return ends[0] - off, ends[1] + off


def _reduced(
    evidence: Evidence, name: str, by_rank: dict[int, F32], terms: Sequence[Sequence[_Ends]]
) -> Verdict:
    """Judges a gradient: ranks add up the ``terms`` of each backward, and each rank then adds up
    these sums."""
    arm, sharding, role = arm_of(evidence), evidence.spec.sharding, role_of(name)
    ranks, pieces = [*by_rank], [*by_rank.values()]
    got = joined(pieces, terms[0][0][0].shape)
    if got is None:
        expect = Same(At(name=name, run=EAGER.name))
        return diverged("S2", arm, role, NO_WHOLE, At(name=name), "pieces", expect)
    narrow = FORMATS[evidence.spec.dtype]
    adds_in = FORMATS["fp32"] if sharding.reduces_fp32 else narrow
    averaged = sharding.averages and sharding.data > 1
    sums: list[_Ends] = []
    for of_ranks in terms:
        lo, hi = sum_interval(
            [_dividing(t, sharding.data * averaged, adds_in) for t in of_ranks], adds_in
        )
        if averaged:
            lo, hi = _divided(lo, hi, sharding.data, adds_in)
        lo, hi = round_to(np.stack([lo, hi]), narrow, overflow="ieee")
        sums.append((lo, hi))
    lo, hi = sum_interval(sums, narrow) if len(sums) > 1 else sums[0]
    with np.errstate(all="ignore"):
        # a sum may overflow on the way, or ranks may divide first
        every = [end for of_ranks in terms for ends in of_ranks for end in ends]
        size = np.sum([np.abs(end) for end in every], axis=0) / 2.0
        may = Expected.between(lo, hi, ~(size < 0.25 * adds_in.max))
    bad = outside(may, got)
    if not bad.any():
        return passed("S2", arm, role, may)
    where = first(bad)
    piece, inside = origin(pieces, got.shape, where)
    symptom = "is not the ranks' sum" if np.isfinite(got[where]) else "not finite"
    at, actual = At(name=name, index=inside, rank=ranks[piece]), number(got[where])
    return diverged("S2", arm, role, symptom, at, actual, between(lo[where], hi[where]))


def _by_codes(evidence: Evidence, trace: Trace, name: str) -> list[_Ends]:
    """The interval of each backward's contribution to the gradient of a linear's bias, if that is
    the sum of the codes of the output gradients. Empty if some were not observed."""
    layer = name_of(name).gradient_of.removesuffix(".bias")
    found: list[_Ends] = []
    for call in [c for c in trace.calls if c.module == layer][: first_step(evidence)[1]]:
        linear = layer_evidence(evidence, EAGER.name, call)
        may = sum_of_codes(linear, linear.traces[EAGER.name])
        if may is None or may.unknown.any():
            return []
        found.append((may.lo, may.hi))
    return found


def _dividing(term: _Ends, by: int, fmt: Format) -> _Ends:
    """``term`` as the sum may contain it if ranks first divide it by ``by`` and round: the interval
    of that quotient, times ``by``. ``by`` 0: they do not divide. A quotient that the format holds
    is not rounded."""
    lo, hi = term
    if not by:
        return lo, hi
    with np.errstate(all="ignore"):
        exact = (lo == hi) & (round_to(lo / by, fmt, overflow="ieee") * by == lo)
        size = np.maximum(np.abs(lo), np.abs(hi))
        off = np.maximum(fmt.unit_roundoff * size, by * fmt.min_subnormal / 2.0)
    off = np.where(exact | ~np.isfinite(size), 0.0, off)
    return lo - off, hi + off


def _divided(lo: Any, hi: Any, by: int, fmt: Format) -> Any:
    """The interval of the mean, whether ranks divide after the sum or before it: one more rounding
    for each rank if the division is inexact, or the numbers are small."""
    slack: Any = (by + 1) * fmt.min_subnormal
    if by & (by - 1):
        slack = slack + (by + 1) * fmt.unit_roundoff * np.maximum(np.abs(lo), np.abs(hi)) / by
    exact = (np.abs(lo) > 2 * by * fmt.min_normal) & (np.abs(hi) > 2 * by * fmt.min_normal)
    if not by & (by - 1):
        slack = np.where(exact, 0.0, slack)
    with np.errstate(all="ignore"):
        return round_to(np.stack([lo / by - slack, hi / by + slack]), fmt, overflow="ieee")


def check_agreement(evidence: Evidence) -> Iterator[Verdict]:
    """S4: a tensor that several ranks hold in full is the same on all of them."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    if len(run.ranks) == 1:
        yield plain("S4", arm, "output", "not_applicable", "one rank")
        return
    for name in run.ranks[0].outputs:
        if name_of(name).kind == NORM and all(name in trace.outputs for trace in run.ranks):
            yield _agree(arm, name, 0, run.ranks)
    yield from _replicas(evidence, arm, run)
    yield from _beside_experts(evidence, arm)
    for rank, single, group in groups(evidence):
        laid_out = _as_laid_out(evidence, single)
        for name, whole in single.outputs.items():
            parts = [trace.outputs[name] for trace in group if name in trace.outputs]
            by_rows = name_of(name).by_rows
            if by_rows and name not in laid_out:
                continue
            sharded = evidence.spec.sharding.data > 1 and not by_rows
            number = name_of(name).kind == NORM
            if not (number or sharded) and copies(parts, whole.shape):
                yield _agree(arm, name, rank, group)


def _replicas(evidence: Evidence, arm: str, run: Trace) -> Iterator[Verdict]:
    """S4 for ranks that are replicas of each other: all results except those of their own rows."""
    copies = evidence.spec.sharding.replicas
    shards = len(run.ranks) // max(copies, 1)
    for rank in range(shards if copies > 1 and not evidence.spec.sharding.resumes else 0):
        same = run.ranks[rank::shards]
        for name in same[0].outputs:
            if name_of(name).kind != NORM and not name_of(name).by_rows:
                yield _agree(arm, name, rank, same, shards)


def _beside_experts(evidence: Evidence, arm: str) -> Iterator[Verdict]:
    """S4 for tensor-parallel ranks that share only parts of experts: all other results."""
    sharding, model = evidence.spec.sharding, MODELS[evidence.spec.model]
    if not sharding.experts or sharding.tensor < 2 or sharding.data < 2 or sharding.resumes:
        return
    for rank, _, group in groups(evidence):
        for name in group[0].outputs:
            of = name_of(name).gradient_of or name_of(name).kind
            if not model.shares(of, sharding):
                yield _agree(arm, name, rank, group)


def _as_laid_out(evidence: Evidence, single: Trace) -> Collection[str]:
    """The results of rows on the layout with which the case begins (without a second layout, all
    results). On another layout, pieces of more rows may have the shape of the earlier whole."""
    if not evidence.spec.sharding.resumes:
        return single.outputs
    forwards, backwards = first_step(evidence)
    before = before_steps(single, "output", forwards)
    return before | before_steps(single, "grad_input", backwards)


def _agree(arm: str, name: str, rank: int, group: Sequence[Trace], apart: int = 1) -> Verdict:
    """S4 for one result of a group, whose ranks are ``apart`` from each other, from ``rank`` on."""
    there, want = At(name=name, rank=rank), group[0].outputs[name]
    others = (
        differs("S4", arm, "differs between ranks", there, want, trace, rank + i * apart)
        for i, trace in enumerate(group[1:], start=1)
    )
    return next(filter(None, others), plain("S4", arm, role_of(name), "ok"))


def check_compiled(evidence: Evidence) -> Iterator[Verdict]:
    """S9: graphs that are traced on ranks, and run eagerly, give eager's bits. FSDP breaks graphs
    where a unit begins, and so does an exchange of rows between experts. Gradients that a tensor
    gets from several sides, from a norm and the residual beside it, or from a router and its
    experts, are then added in another order, so for such models only outputs before the first step
    are compared; and where gradients are added unrounded, as a graph may round them."""
    model, sharding = MODELS[evidence.spec.model], evidence.spec.sharding
    names, run = None, compiled_of(evidence)
    broken = sharding.experts or (sharding.data and sharding.units == "each")
    if run is not None and (
        run.adds_unrounded or ((model.normalises or model.branches) and broken)
    ):
        ranks = run.ranks
        names = before_steps(ranks[0], "output", first_step(evidence)[0]) if ranks else {}
    yield from _beside(
        "S9",
        evidence,
        processes_of(evidence) or run_of(evidence),
        run,
        "nothing is compiled",
        "differs from eager on ranks",
        names,
    )


def check_processes(evidence: Evidence) -> Iterator[Verdict]:
    """S10: ranks that are processes give the bits of ranks that are threads. Gloo's maximum over
    ranks keeps a NaN or loses it, depending on which rank has it; that of threads keeps it."""
    run, other = run_of(evidence), processes_of(evidence)
    both = [trace for one in (run, other) if one is not None for trace in one.ranks]
    broken = any(np.isnan(t).any() for one in both for t in one.outputs.values())
    if other is not None and evidence.plan.quantised and broken:
        why = "a result is NaN, which gloo's maximum of what is scaled may lose"
        yield plain("S10", other.arm, "output", "inconclusive", why)
        return
    yield from _beside(
        "S10",
        evidence,
        run_of(evidence),
        processes_of(evidence),
        "threads alone ran it",
        "differs from threads",
    )


def _beside(
    rule: str,
    evidence: Evidence,
    run: Trace | None,
    other: Trace | None,
    why: str,
    symptom: str,
    names: Collection[str] | None = None,
) -> Iterator[Verdict]:
    """Compares the ``other`` run with ``run``: bits must be equal, of the results ``names`` or of
    all. Not applicable if sums over ranks have three or more terms, whose result depends on the
    order that each kind of process group has."""
    if run is None or run.error is not None:
        return
    sharding = evidence.spec.sharding
    # the norm of experts' gradients is added up over all ranks at once
    most = sharding.ranks if sharding.experts else max(sharding.data, sharding.tensor)
    if other is None or other is run:
        yield plain(rule, arm_of(evidence), "output", "not_applicable", why)
    elif other.unusable_because or other.error is not None:
        yield plain(
            rule, other.arm, "output", "inconclusive", other.unusable_because or "it raised"
        )
    elif max(most, sharding.classes) > 2 and run is run_of(evidence):
        orders = "more than two ranks add in an order of their own"
        yield plain(rule, other.arm, "output", "not_applicable", orders)
    else:
        yield _same_on_ranks(rule, other, run, symptom, run.arm, names)


def _same_on_ranks(
    rule: str,
    run: Trace,
    other: Trace,
    symptom: str,
    title: str,
    names: Collection[str] | None = None,
) -> Verdict:
    """Every rank gives the same bits as in the ``other`` run, which addresses call ``title``: for
    the results ``names``, or for all."""
    found = (
        differs(rule, run.arm, symptom, At(name=name, rank=rank, run=title), want, trace, rank)
        for rank, (trace, one) in enumerate(zip(run.ranks, other.ranks, strict=True))
        for name, want in one.outputs.items()
        if names is None or name in names
    )
    return next(filter(None, found), plain(rule, run.arm, "output", "ok"))


def check_stages(evidence: Evidence) -> Iterator[Verdict]:
    """S12: for the stages that it has, a rank gives the bits of the whole chain in one process:
    microbatches are the same rows in the same order, and no sum is split."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    (single,) = evidence.traces[EAGER.name].ranks
    last_rank = {name: rank for rank, trace in enumerate(run.ranks) for name in trace.outputs}
    for name, want in single.outputs.items():
        if name_of(name).kind in ("grad_input", NORM):  # no stage returns it
            continue
        rank = last_rank.get(name, len(run.ranks) - 1)
        there = At(name=name, run=EAGER.name)
        found = differs("S12", arm, "differs from the chain", there, want, run.ranks[rank], rank)
        yield found or plain("S12", arm, role_of(name), "ok")


def check_precomputed(evidence: Evidence) -> Iterator[Verdict]:
    """S8: scales that are precomputed after each step are those that a gather computes itself, so
    all results are the same, those of later steps, too."""
    arm, run, sharding = arm_of(evidence), run_of(evidence), evidence.spec.sharding
    if run is None:
        return
    if sharding.gathers != "precomputed":
        yield plain("S8", arm, "output", "not_applicable", "no scale is computed ahead")
        return
    if sharding.tensor > 1:  # a known difference, which S3 judges
        why = "a gather scales its rank's shard of a linear, precomputed is the whole's scale"
        yield plain("S8", arm, "output", "not_applicable", why)
        return
    assert evidence.laid_out is not None
    other = evidence.laid_out(msgspec.structs.replace(sharding, gathers="codes"))
    if other.error is not None:
        yield plain("S8", arm, "output", "inconclusive", other.error.message)
        return
    yield _same_on_ranks("S8", run, other, "differs from scales of the gather", ON_THE_FLY)


def check_norm(evidence: Evidence) -> Iterator[Verdict]:
    """S6: the norm of all gradients is that of the whole gradients, however they are laid out."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    if evidence.spec.optimizes or NORM not in run.ranks[0].outputs:
        yield plain("S6", arm, NORM, "not_applicable", "no gradients are left")
        return
    outputs: dict[str, F32] = {}
    for piece in evidence.traces[EAGER.name].ranks:  # each may reach parameters that others do not
        outputs |= piece.outputs
    names = [name for name in outputs if name.endswith(".grad")]
    wholes = [whole_of(evidence, name, outputs[name].shape) for name in names]
    if any(whole is None for whole in wholes):
        yield plain("S6", arm, NORM, "inconclusive", NO_WHOLE)
        return
    grads = [(whole.astype(np.float64), np.zeros(whole.shape)) for whole in wholes]
    meshes = 2 if evidence.spec.sharding.experts else 1
    lo, hi = norm_between(grads, evidence.spec.dtype, len(run.ranks), meshes)
    if np.isnan(lo):
        yield plain("S6", arm, NORM, "inconclusive", "squares may over- or underflow")
        return
    got = float(run.ranks[0].outputs[NORM])
    if lo <= got <= hi:
        yield plain("S6", arm, NORM, "ok")
        return
    expect = between(lo, hi)
    yield diverged("S6", arm, NORM, NOT_THE_NORM, At(name=NORM), number(got), expect)
