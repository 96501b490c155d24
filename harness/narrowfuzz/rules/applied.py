"""Which rules are applied to which parts of a case, in one place for all callers."""

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

#: The place that is judged, the check of a rule, and the evidence that the check gets.
Applied = tuple[At, Check, Any]


@dataclass(frozen=True)
class _Parts:
    """The parts of a kind of case, besides the whole run, that rules are applied to."""

    #: Yields the place and the evidence of each of its linears.
    linears: Callable[[Evidence], Iterator[tuple[At, Evidence]]] = lambda evidence: iter(())
    #: Checks of the kernels that its compiled graphs called.
    kernels: tuple[Check, ...] = ()


_PARTS: Mapping[Kind, _Parts] = {
    LINEAR: _Parts(lambda evidence: iter([(At(), evidence)])),
    MODEL: _Parts(layer_evidences, (check_kernels, check_weight_copies)),
    **dict.fromkeys(MESHES, _Parts(parts_of_calls)),
}


def checks(evidence: Evidence, rules: Sequence[Rule]) -> Iterator[Applied]:
    """All checks of a case: rules of the whole run, rules of a linear for each of its linears, and
    checks of kernels. If the case did not run (``Evidence.ran``), only ``unfinished`` rules apply:
    the contract, and in a library's own layers those that judge what happened before the error."""
    parts, ran = _PARTS.get(kind_of(evidence.spec), _Parts()), evidence.ran
    for rule in rules:
        if rule.scope == "case" and (ran or rule.unfinished):
            yield At(), rule.check, evidence
    if not ran:
        return
    for place, linear in parts.linears(evidence):
        for rule in rules:
            # a linear inside a model cannot be rerun by itself
            if rule.scope == "layer" and (linear.rerun is not None or not rule.reruns):
                yield place, rule.check, linear
    names = frozenset(rule.name for rule in rules)
    for check in parts.kernels:
        yield At(), partial(_named, check=check, names=names), evidence


def _named(evidence: Evidence, check: Check, names: frozenset[str]) -> Iterator[Verdict]:
    return (verdict for verdict in check(evidence) if verdict.rule in names)
