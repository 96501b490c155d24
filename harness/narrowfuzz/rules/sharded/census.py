"""S7: the layers that a recipe converts run quantised on ranks, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence, identical
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.sharded.evidence import arm_of, run_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Own
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

#: The expectation of a verdict about products that are not quantised on ranks.
QUANTISED = "quantised products, as in one process"


def check_quantised(evidence: Evidence) -> Iterator[Verdict]:
    """S7: if no quantised product is observed on ranks, although one process makes some, and
    conversion changes the results of one process, it must change those of ranks, too."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    assert evidence.unconverted_run is not None and evidence.unconverted_alone is not None
    if not evidence.plan.quantised or not _products(evidence.traces[EAGER.name]):
        yield plain("S7", arm, "operand", "not_applicable", "one process shows no product")
    elif BY_NAME[arm].compiled:
        yield plain("S7", arm, "operand", "not_applicable", "nobody sees what graphs multiply")
    elif _products(run):
        yield plain("S7", arm, "operand", "ok")
    elif not _same(evidence, run, other := evidence.unconverted_run()):
        why = "nothing is seen; other results without the conversion, or none of products alone"
        yield plain(
            "S7", arm, "operand", "inconclusive", other.error.message if other.error else why
        )
    elif (alone := evidence.unconverted_alone()).error is not None:
        yield plain("S7", arm, "operand", "inconclusive", alone.error.message)
    elif _identical(evidence.traces[EAGER.name], alone):
        why = "in one process, too, the results are those of the unconverted model"
        yield plain("S7", arm, "operand", "inconclusive", why)
    else:
        at, actual = At(what="module"), "the results of the unconverted model"
        yield diverged("S7", arm, "operand", "not quantised on ranks", at, actual, Own(QUANTISED))


def _products(run: Trace) -> bool:
    return any(call.sites for trace in run.ranks for call in trace.calls)


def _of_products(evidence: Evidence) -> set[str]:
    """The kinds of results that are products of converted linears, or made only of such products.
    In a model with other branches that excludes output and input gradient, which may show nothing
    but those branches. The gradient of a bias is no product: it is a sum of output gradients."""
    calls = (call for trace in evidence.traces[EAGER.name].ranks for call in trace.calls)
    made = {f"{call.module}.weight.grad" for call in calls if call.sites}
    return made if MODELS[evidence.spec.model].branches else {"output", "grad_input", *made}


def _same(evidence: Evidence, run: Trace, other: Trace) -> bool:
    """Are the results of every rank the same in both runs, and is some product neither zero nor
    NaN?"""
    if other.error is not None:
        return False
    products = _of_products(evidence)
    every = (item for trace in run.ranks for item in trace.outputs.items())
    made = (x for name, x in every if name_of(name).kind in products)
    judged = any(((x != 0.0) & ~np.isnan(x)).any() for x in made)
    return judged and _identical(run, other)


def _identical(one: Trace, other: Trace) -> bool:
    """Are the results of every rank the same in both runs?"""
    return all(
        a.outputs.keys() == b.outputs.keys()
        and all(identical(x, b.outputs[name]) for name, x in a.outputs.items())
        for a, b in zip(one.ranks, other.ranks, strict=True)
    )
