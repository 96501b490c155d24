"""S2 where ranks add up what one process rounds first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.formats import FORMATS, round_to
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.sharded.results import check_compiled, check_gradients
from samples import recipes

NAME = "attention_norm.weight.grad"


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    sharding = Sharding(data=2, reduces_fp32=True)
    spec = Spec(recipe="torch.bf16", model="llama_block", m=96, k=64, n=64, sharding=sharding)
    case = Case(spec=spec, data=DataSpec(seed=3))
    return Judge(recipes(), Ledger([])).observe(case)


@pytest.mark.parametrize(
    ("unrounded", "away", "found"), [(True, 0.5, False), (True, 9.0, True), (False, 0.5, True)]
)
def test_a_rank_may_add_what_was_not_rounded(
    evidence: Evidence, unrounded: bool, away: float, found: bool
) -> None:
    """As FSDP does from torch 2.15 on: the weight gradient of a norm, which one process rounds, is
    rounded after the sum over ranks alone. ``away``: from the sum of what was rounded, in units of
    the largest error of one such rounding."""
    alone, run = evidence.traces["eager"], evidence.traces["sharded"]
    terms = np.stack([trace.outputs[NAME].astype(np.float64) for trace in alone.ranks])
    error = np.abs(terms).max(axis=0) * FORMATS["bf16"].unit_roundoff
    mean = round_to(terms.mean(axis=0) + away * error, FORMATS["bf16"]).astype(np.float32)
    ranks = tuple(
        replace(trace, outputs={**trace.outputs, NAME: part})
        for trace, part in zip(run.ranks, np.split(mean, len(run.ranks)), strict=True)
    )
    changed = replace(run, ranks=ranks, adds_unrounded=unrounded)
    verdicts = check_gradients(replace(evidence, traces={**evidence.traces, "sharded": changed}))
    assert any(v.status == "diverged" and v.at.name == NAME for v in verdicts) == found


@pytest.mark.parametrize(("name", "found"), [("norm.weight.grad", False), ("output", True)])
def test_a_graph_may_round_what_eager_adds_unrounded(name: str, found: bool) -> None:
    sharding = Sharding(data=2, reduces_fp32=True)
    spec = Spec(
        recipe="torch.bf16", model="rmsnorm_linear", m=32, k=16, n=16, sharding=sharding,
        compile="aot_eager",
    )  # fmt: skip
    evidence = Judge(recipes(), Ledger([])).observe(Case(spec=spec, data=DataSpec(seed=3)))
    traces = {n: replace(t, adds_unrounded=n != "eager") for n, t in evidence.traces.items()}
    (arm,) = (n for n in traces if "aot_eager" in n)
    ranks = tuple(
        replace(t, outputs={**t.outputs, name: t.outputs[name] + 1.0}) for t in traces[arm].ranks
    )
    traces[arm] = replace(traces[arm], ranks=ranks)
    verdicts = check_compiled(replace(evidence, traces=traces))
    assert any(v.status == "diverged" and v.at.name == name for v in verdicts) == found
