"""R28: the results of one operator follow changes of its operands (``models/relations.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.relations import Relation
from narrowfuzz.numerics.formats import F32, FORMATS, Format
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import BY_CHANCE, Evidence, same_bits
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.rules.whole import role_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import OtherRun, Verdict

NAME = "R28"
#: The smallest and largest magnitudes for which no product of four numbers leaves the range of fp32
#: or bf16, and none of two, or of few more, that of fp16.
_LEAST, _MOST = 2.0**-20, {"fp32": 2.0**20, "bf16": 2.0**20, "fp16": 2.0**7}


def check_relations(evidence: Evidence) -> Iterator[Verdict]:
    """R28: the operands of one operator, changed in ways that its results must follow exactly."""
    base = evidence.traces.get(evidence.base)
    relations = MODELS[evidence.spec.model].relations
    if not relations or base is None or base.error is not None:
        yield plain(NAME, evidence.base, "output", "not_applicable", "nothing to compare")
        return
    for relation in relations:
        changed = changed_by(relation, evidence)
        why = _excluded(relation, evidence, changed)
        if why:
            yield plain(NAME, evidence.base, "output", "not_applicable", why)
        else:
            yield from _followed(evidence, relation, base, changed)


def _followed(
    evidence: Evidence, relation: Relation, base: Trace, changed: Mapping[str, F32]
) -> Iterator[Verdict]:
    other = OtherRun(relation.words, evidence.spec, {**evidence.tensors, **changed})
    assert evidence.rerun is not None
    after = evidence.rerun(dict(other.tensors), other.spec, "")
    if after.error is not None:
        yield plain(NAME, evidence.base, "output", "inconclusive", "the rerun failed")
        return
    for result in base.outputs:
        part, kind, _ = name_of(result)
        if kind in relation.results and not part and result in after.outputs:
            yield _compared(evidence, relation, result, after.outputs[result], other)


def changed_by(relation: Relation, evidence: Evidence) -> Mapping[str, F32]:
    """The operands that the relation changes, with their new values."""
    made = {}
    for name, x in evidence.tensors.items():
        by = relation.operands.get(name_of(name).kind)
        if by is None:
            continue
        rows = _hidden(relation, evidence, x)
        with np.errstate(all="ignore"):
            made[name] = np.where(rows, np.float32(by) * x, x) if relation.hides else by * x
    return {name: x for name, x in made.items() if not same_bits(x, evidence.tensors[name]).all()}


def _hidden(relation: Relation, evidence: Evidence, x: F32) -> NDArray[np.bool_]:
    """True for elements of an operand, or of its gradient, in rows that nothing may depend on."""
    rows = np.zeros(x.shape, dtype=bool)
    if relation.hides is not None:
        rows[list(relation.hides(evidence.spec, len(x)))] = True
    return rows


def _excluded(relation: Relation, evidence: Evidence, changed: Mapping[str, F32]) -> str:
    """Why the relation is not judged on this case, "" if it is."""
    spec, outputs = evidence.spec, evidence.traces[evidence.base].outputs
    narrow = spec.dtype == "fp16" and not relation.in_fp16
    chance = evidence.twin is None or any(map(evidence.by_chance, ("output", "grad_weight")))
    why = {
        "it must raise an error": bool(MODELS[spec.model].forbidden),
        "nothing to change": not changed,
        BY_CHANCE: chance,
        "a training, whose parameters change": spec.scheduled and not relation.steps,
        "numbers of fp16 may be subnormal on the way": narrow,
    }
    if any(why.values()) or not (relation.scales or relation.hides):
        return next((words for words, is_so in why.items() if is_so), "")
    if not all(np.isfinite(x).all() for x in outputs.values()):
        return "numbers beyond their range"
    operands = (*evidence.tensors.values(), *changed.values())
    if not all(_far_from_the_ends(x, spec.dtype) for x in operands):
        return "numbers at an end of their range"
    return relation.excludes(spec, evidence.tensors)


def _far_from_the_ends(x: F32, dtype: str) -> bool:
    """Is no product of few of these numbers subnormal or infinite?"""
    magnitude = np.abs(x[x != 0])
    return bool(((magnitude > _LEAST) & (magnitude < _MOST[dtype])).all())


def _compared(
    evidence: Evidence, relation: Relation, result: str, got: F32, other: OtherRun
) -> Verdict:
    kind = name_of(result).kind
    before, times = evidence.traces[evidence.base].outputs[result], relation.results[kind]
    with np.errstate(all="ignore"):
        want = np.float32(times) * before
    operand = "input" if kind == "grad_input" else kind.removesuffix(".grad")
    judged = np.ones(before.shape, dtype=bool)
    if operand in relation.operands:
        judged &= ~_hidden(relation, evidence, before)
    if abs(times) != 1.0:
        judged &= _relative(before, want, FORMATS[evidence.spec.dtype])
    role = role_of(result)
    bad = judged & ~same_bits(got, want)
    called = {call.operator for call in evidence.traces[evidence.base].operators}
    if any(name.startswith("attention_cudnn") for name in called):
        # it turns infinite gradients into NaN or an infinity, depending on their sign
        bad &= np.isfinite(got) | np.isfinite(want)
    if not bad.any():
        nothing = not np.any(want[judged])
        why = "zeros in both runs" if nothing else ""
        return plain(NAME, evidence.base, role, "inconclusive" if nothing else "ok", why)
    index = first(bad)
    here = At(name=result, index=index)
    there = msgspec.structs.replace(here, run=other.name)
    symptom, actual = "does not follow its operands", number(got[index])
    expect = Same(here, number(want[index]), times)
    remark = f"{result} does not follow {relation.words}"
    return diverged(
        NAME, evidence.base, role, symptom, there, actual, expect, runs=(other,), remark=remark
    )


def _relative(before: F32, after: F32, fmt: Format) -> NDArray[np.bool_]:
    """True where both are numbers that are rounded relatively: normal and finite."""
    least = max(fmt.min_normal, 2.0**-100)
    both = np.abs(np.stack([before, after]))
    return np.asarray(((both > least) & (both <= fmt.max)).all(axis=0))
