"""Which rules are applied to what of a judged case: one list for all who apply them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from narrowfuzz.case.kind import LINEAR, MESHES, MODEL, Kind, kind_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.kernels import check_kernels, check_weight_copies
from narrowfuzz.rules.layers import layer_evidences
from narrowfuzz.rules.rule import Check, Rule
from narrowfuzz.rules.sharded.products import parts_of_calls
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict

#: Where, which rule, and what it looks at.
Applied = tuple[At, Check, Any]


@dataclass(frozen=True)
class _Parts:
    """What rules are applied to of a kind of case, besides the whole run."""

    #: Its linears, each with its place.
    linears: Callable[[Evidence], Iterator[tuple[At, Evidence]]] = lambda evidence: iter(())
    #: What is checked of the kernels that its compiled graphs called.
    kernels: tuple[Check, ...] = ()


_PARTS: Mapping[Kind, _Parts] = {
    LINEAR: _Parts(lambda evidence: iter([(At(), evidence)])),
    MODEL: _Parts(layer_evidences, (check_kernels, check_weight_copies)),
    **dict.fromkeys(MESHES, _Parts(parts_of_calls)),
}


def checks(evidence: Evidence, rules: Sequence[Rule]) -> Iterator[Applied]:
    """Rules of the whole run, those of a linear on each of its linears, and what is checked of
    kernels. Of a case whose eager run raised, few rules have something to judge: the contract, and
    in a library's layers what happened until then."""
    parts, ran = _PARTS.get(kind_of(evidence.spec), _Parts()), evidence.ran
    for rule in rules:
        if rule.scope == "case" and (ran or rule.unfinished):
            yield At(), rule.check, evidence
    if not ran:
        return
    for place, linear in parts.linears(evidence):
        for rule in rules:
            # what was seen inside of a model is not run again by itself
            if rule.scope == "layer" and (linear.rerun is not None or not rule.reruns):
                yield place, rule.check, linear
    names = frozenset(rule.name for rule in rules)
    for check in parts.kernels:
        yield At(), partial(_named, check=check, names=names), evidence


def _named(evidence: Evidence, check: Check, names: frozenset[str]) -> Iterator[Verdict]:
    return (verdict for verdict in check(evidence) if verdict.rule in names)
