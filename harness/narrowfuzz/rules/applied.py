"""Which rules are applied to what of a judged case: one list for all who apply them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from narrowfuzz.case.spec import Spec
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.kernels import check_kernels, check_weight_copies
from narrowfuzz.rules.layers import layer_evidences
from narrowfuzz.rules.rule import Check, Rule, converted, on_mesh
from narrowfuzz.rules.sharded.products import parts_of_calls
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict

#: Where, which rule, and what it looks at.
Applied = tuple[At, Check, Any]


#: How the linears of a whole run are found, to be judged one by one: each with its place.
_LINEARS: Mapping[Callable[[Spec], bool], Callable[[Any], Iterator[tuple[At, Evidence]]]] = {
    converted: layer_evidences,
    on_mesh: parts_of_calls,
}


def checks(evidence: Evidence, rules: Sequence[Rule]) -> Iterator[Applied]:
    """Rules of the whole run and of a single linear, a model's linears one by one, and the kernels
    its compiled graphs called. Of a case whose eager run raised, few rules have something to judge:
    the contract, and in a library's layers what happened until then."""
    spec, ran = evidence.spec, evidence.ran
    direct = spec.direct and converted(spec)
    for rule in rules:
        if (ran or rule.unfinished) and (rule.scope == "case" or direct):
            yield At(), rule.check, evidence
    if not ran or direct:
        return
    layered = [rule for rule in rules if rule.scope == "layer" and not rule.reruns]
    for are, linears in _LINEARS.items():
        for layer, seen in linears(evidence) if are(spec) else ():
            yield from ((layer, rule.check, seen) for rule in layered)
    if converted(spec):
        names = frozenset(rule.name for rule in rules)
        for check in (check_kernels, check_weight_copies):
            yield At(), partial(_named, check=check, names=names), evidence


def _named(evidence: Evidence, check: Check, names: frozenset[str]) -> Iterator[Verdict]:
    return (verdict for verdict in check(evidence) if verdict.oracle in names)
