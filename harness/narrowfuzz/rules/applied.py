"""Which rules are applied to what of a judged case: one list for all who apply them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.kernels import check_kernels, check_weight_copies
from narrowfuzz.rules.layers import layer_evidences
from narrowfuzz.rules.library.evidence import LibraryEvidence
from narrowfuzz.rules.rule import Check, Rule
from narrowfuzz.rules.sharded.evidence import ShardedEvidence
from narrowfuzz.rules.sharded.products import parts_of_calls
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict

#: Where, which rule, and what it looks at.
Applied = tuple[At, Check, Any]


#: What the rules of one kind of case look at.
AnyEvidence = Evidence | ShardedEvidence | LibraryEvidence


def checks(evidence: AnyEvidence, rules: Sequence[Rule]) -> Iterator[Applied]:
    """Rules of the whole run and of a single linear, a model's linears one by one, and the kernels
    its compiled graphs called. Of a case whose eager run raised, the contract is all there is to
    judge; of a library's layers also what happened until then."""
    if isinstance(evidence, LibraryEvidence):
        yield from ((At(), rule.check, evidence) for rule in rules)
        return
    if isinstance(evidence, ShardedEvidence):
        yield from _sharded(evidence, rules)
        return
    ran, direct = evidence.ran, evidence.case.spec.direct
    for rule in rules:
        if (ran or rule.name == "contract") and (rule.scope == "case" or direct):
            yield At(), rule.check, evidence
    if not ran or direct:
        return
    layered = [o for o in rules if o.scope == "layer" and not o.reruns]
    for layer, seen in layer_evidences(evidence):
        for rule in layered:
            yield layer, rule.check, seen
    names = frozenset(rule.name for rule in rules)
    for check in (check_kernels, check_weight_copies):
        yield At(), partial(_named, check=check, names=names), evidence


def _sharded(evidence: ShardedEvidence, rules: Sequence[Rule]) -> Iterator[Applied]:
    """Rules of the whole run, and on what each rank multiplies by itself those of a linear."""
    whole = [rule for rule in rules if rule.scope == "case"]
    if not evidence.ran:
        whole = [rule for rule in whole if rule.name == "contract"]
    yield from ((At(), rule.check, evidence) for rule in whole)
    if evidence.ran and evidence.sharded is not None:
        layered = [rule for rule in rules if rule.scope == "layer"]
        for layer, seen in parts_of_calls(evidence):
            yield from ((layer, rule.check, seen) for rule in layered)


def _named(evidence: Evidence, check: Check, names: frozenset[str]) -> Iterator[Verdict]:
    return (verdict for verdict in check(evidence) if verdict.oracle in names)
