"""S7: the layers that a recipe converts run quantised on ranks, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    conversion changes the products of one process, it must change the results of ranks, too."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    alone = evidence.traces[EAGER.name]
    if not evidence.plan.quantised or not _products(alone):
        yield plain("S7", arm, "operand", "not_applicable", "one process shows no product")
    elif BY_NAME[arm].compiled:
        yield plain("S7", arm, "operand", "not_applicable", "nobody sees what graphs multiply")
    elif _products(run):
        yield plain("S7", arm, "operand", "ok")
    elif why := _not_comparable(evidence, run, alone):
        yield plain("S7", arm, "operand", "inconclusive", why)
    else:
        at, actual = At(what="module"), "the results of the unconverted model"
        yield diverged("S7", arm, "operand", "not quantised on ranks", at, actual, Own(QUANTISED))


def _products(run: Trace) -> bool:
    return any(call.sites for trace in run.ranks for call in trace.calls)


def _not_comparable(evidence: Evidence, run: Trace, alone: Trace) -> str:
    """Why results do not show that ranks quantise nothing; "" if they do: on ranks they are those
    of the unconverted model, and in one process its products are not."""
    assert evidence.unconverted_run is not None and evidence.unconverted_alone is not None
    bare = evidence.unconverted_run()
    if bare.error is not None:
        return bare.error.message
    if not _identical(run, bare, lambda name: True):
        return "no product is seen on ranks, and their results differ without the conversion"
    every = (item for trace in run.ranks for item in trace.outputs.items())
    hidden = {name_of(name).kind for name, x in every if np.isnan(x).any()}
    bare_alone, products = evidence.unconverted_alone(), _of_products(evidence) - hidden
    if bare_alone.error is not None:
        return bare_alone.error.message
    if _identical(alone, bare_alone, lambda name: name_of(name).kind in products):
        return "in one process, too, products without NaN are those of the unconverted model"
    return ""


def _of_products(evidence: Evidence) -> set[str]:
    """The kinds of results that are products of converted linears, or made only of such products.
    In a model with other branches that excludes output and input gradient, which may show nothing
    but those branches. The gradient of a bias is no product: it is a sum of output gradients."""
    calls = (call for trace in evidence.traces[EAGER.name].ranks for call in trace.calls)
    made = {f"{call.module}.weight.grad" for call in calls if call.sites}
    return made if MODELS[evidence.spec.model].branches else {"output", "grad_input", *made}


def _identical(one: Trace, other: Trace, counts: Callable[[str], bool]) -> bool:
    """Are the results of every rank whose names count the same in both runs?"""
    return all(
        a.outputs.keys() == b.outputs.keys()
        and all(identical(x, b.outputs[name]) for name, x in a.outputs.items() if counts(name))
        for a, b in zip(one.ranks, other.ranks, strict=True)
    )
