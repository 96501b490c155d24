"""repro.py of a whole model: fails under its fault in a fresh process and passes without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import INDUCTOR
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules import BY_NAME
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows

ROWWISE = "torchao.float8.rowwise"
_SWIGLU = {"recipe": ROWWISE, "model": "mlp_swiglu", "m": 8, "k": 16, "n": 16}
_BLOCK = {
    "recipe": ROWWISE, "model": "llama_block", "m": 32, "k": 64, "n": 64, "heads": 2,
    "checkpoint": "selective", "compile": "inductor",
}  # fmt: skip
_INDUCTOR = [
    pytest.mark.heavy,
    pytest.mark.xdist_group("seed-bug"),
    pytest.mark.skipif(bool(unavailable(INDUCTOR)), reason=unavailable(INDUCTOR)),
]

#: A rule, a fault it sees, and where.
SHOWN = [
    ("contract", "recompute-trips-guard", _SWIGLU | {"checkpoint": "full"}),
    ("contract", "backward-unsupported", _SWIGLU | {"steps": 2}),
    ("O8", "compiled-scale-through-bf16",
     {"recipe": "torchao.float8.tensorwise", "k": 64, "compile": "aot_eager"}),
    ("O3", "compiled-scale-through-bf16",
     {"recipe": "torchao.float8.tensorwise", "model": "mlp_gelu", "k": 64, "compile": "aot_eager"}),
    ("O9", "compiled-norm-in-bf16",
     {"recipe": "torch.fp32", "dtype": "fp32", "model": "rmsnorm_linear", "k": 64,
      "compile": "aot_eager"}),
    ("O12", "recompute-unquantised", _SWIGLU | {"checkpoint": "reentrant"}),
    ("O13", "recompute-unquantised", _SWIGLU | {"checkpoint": "reentrant"}),
    ("O13", "recompute-drifts", _SWIGLU | {"checkpoint": "full"}),
    pytest.param("O13", "inductor-backward-drift", _BLOCK, marks=_INDUCTOR),
    ("O18", "attention-keys-move", {"recipe": "torch.bf16", "model": "attention", "m": 8, "k": 16}),
    ("O22", "checkpoint-forgets-generator",
     {"recipe": "torch.bf16", "model": "dropout", "m": 8, "k": 16, "checkpoint": "full"}),
    ("R23", "gradient-accumulated-twice", {"recipe": "torch.bf16", "model": "mlp_gelu", "m": 8,
                                           "k": 16, "microbatches": 3}),
    pytest.param("O18", "inductor-backward-drift", _BLOCK, marks=_INDUCTOR),
]  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fault", "spec"), SHOWN)
def test_a_models_script_fails_under_its_fault_and_passes_without(
    tmp_path: Path, scripts: RunScript, rule: str, fault: str, spec: dict[str, Any]
) -> None:
    case = Case(spec=Spec(**spec), data=DataSpec())
    path = tmp_path / "repro.py"
    rungs = frozenset({"inductor+checkpoint_selective"}) if "heads" in spec else None
    with builtin_faults()[fault].plant():
        judge = Judge(recipes(), Ledger([]), arms=rungs)
        cause = judge.judge(case, [BY_NAME[rule]]).causes[0]
        path.write_text(script_of(case, cause, recipes()[case.spec.recipe]))
    assert_shows(scripts, path, ("", fault))


@pytest.mark.heavy
@pytest.mark.slow
def test_what_only_a_second_step_shows_has_a_script_that_trains(scripts: RunScript) -> None:
    spec = Spec(recipe="torchao.float8.rowwise", m=16, k=16, n=16, steps=2)
    case, fault = Case(spec=spec, data=DataSpec()), "weight-codes-outlive-step"
    with builtin_faults()[fault].plant():
        judge = Judge(recipes(), Ledger([]))
        (cause, *_) = judge.judge(case, [BY_NAME["O2"], BY_NAME["O3"]]).causes
        found = triage(judge, case, cause, seconds=5.0, plant=("", fault), scripts=scripts)
    assert found.confirmed, found.finding.script_output
    assert "SGD" in found.script and found.finding.minimal.spec.steps == 2
