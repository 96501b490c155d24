"""Optimizers on ranks: a step is what their definition makes of each rank's gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.case.layout import check_sharding, fitting
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import OPTIMIZERS, Case, DataSpec, Spec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.operators.optimizer_steps import step_without_state
from narrowfuzz.plants.registry import planted
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows, script_on_ranks

RECIPES = recipes()
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": 1}, {"data": 2}, {"data": 3}, {"tensor": 2}, {"data": 2, "tensor": 2},
    {"data": 2, "replicas": 2}, {"data": 2, "experts": 2, "tensor": 2},
    {"data": 2, "units": "each", "averages": False},
)  # fmt: skip
STEPS: tuple[dict[str, Any], ...] = (
    {}, {"clipping": "norm"}, {"clipping": "norm_inf", "loss_scaling": "grad_scaler"},
    {"loss_scaling": "grad_scaler"}, {"microbatches": 2}, {"steps": 3},
)  # fmt: skip
ORDINARY = ("sgd", "adamw", "adamw_foreach", "adamw_fused")
LOW_BIT = ("adamw_8bit", "adamw_4bit", "adamw_fp8")


def case(recipe: str, sharding: dict[str, Any], **fields: Any) -> Case:
    model = "chosen_experts" if "experts" in sharding else "mlp_gelu"
    sizes = {"m": 48, "k": 16, "n": 16, "model": model, "steps": 2} | fields
    data = sizes.pop("data", DataSpec(seed=3))
    dtype = "fp32" if recipe == "torch.fp32" else "bf16"
    spec = Spec(recipe=recipe, sharding=Sharding(**sharding), dtype=dtype, **sizes)  # type: ignore[arg-type]
    return Case(spec=fitting(spec), data=data)


def verdicts(drawn: Case, ledger: Ledger | None = None) -> set[tuple[str, str]]:
    """What S15 says, after nothing else has said anything."""
    judged = Judge(RECIPES, ledger or Ledger([])).judge(drawn)
    assert judged.ran and not judged.causes
    return {(v.status, v.why) for v in judged.verdicts if v.rule == "S15"}


@pytest.mark.parametrize("recipe", ["torch.fp32", "torch.bf16"])
@pytest.mark.parametrize("optimizer", ORDINARY)
@pytest.mark.parametrize("how", STEPS, ids=str)
@pytest.mark.parametrize("sharding", LAYOUTS, ids=str)
@pytest.mark.one_in(72)
def test_a_step_is_the_optimizers(
    sharding: dict[str, Any], how: dict[str, Any], optimizer: str, recipe: str
) -> None:
    assert verdicts(case(recipe, sharding, optimizer=optimizer, **how)) == {("ok", "")}


@pytest.mark.parametrize("optimizer", LOW_BIT)
@pytest.mark.parametrize("sharding", [LAYOUTS[1], LAYOUTS[4]], ids=str)
@pytest.mark.one_in(4)
def test_a_step_of_few_bits_is_adams(sharding: dict[str, Any], optimizer: str) -> None:
    drawn = case("torch.fp32", sharding, optimizer=optimizer, k=128, n=128)
    assert verdicts(drawn) == {("ok", "")}


@pytest.mark.parametrize("how", [{"compile": "aot_eager"}, {"sharding": {"resumes": "same"}}])
def test_where_optimizers_of_few_bits_are_not_run(how: dict[str, Any]) -> None:
    sharding = {"data": 2} | how.get("sharding", {})
    spec = case("torch.fp32", sharding, compile=how.get("compile", "none")).spec
    spec = msgspec.structs.replace(spec, optimizer="adamw_8bit")
    with pytest.raises(ValueError, match="without compile and without resumes"):
        check_sharding(spec, ("fsdp",))


def test_a_step_that_is_skipped_is_not_judged() -> None:
    data = DataSpec(seed=3, spikes=(Spike("grad_output", row=5, col=3, bits="0x7f800000"),))
    drawn = case("torch.bf16", {"data": 2}, loss_scaling="grad_scaler", data=data)
    assert verdicts(drawn) == {("not_applicable", "an infinity skips the step")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sharding", [LAYOUTS[1], LAYOUTS[4], LAYOUTS[6]], ids=str)
def test_a_wrong_rate_is_seen(sharding: dict[str, Any], optimizer: str) -> None:
    drawn = case("torch.fp32", sharding, optimizer=optimizer)
    with planted("", "rate-times-ranks"):
        found = Judge(RECIPES, load_ledger()).judge(drawn).causes
    assert {v.rule for v in found} == {"S15"}


def test_each_step_of_sgd_is_judged() -> None:
    for optimizer, steps in (("sgd", 3), ("adamw", 1)):
        drawn = case("torch.fp32", {"data": 2}, steps=3, optimizer=optimizer)
        judged = Judge(RECIPES, Ledger([])).judge(drawn)
        of_parameters = [v for v in judged.verdicts if v.rule == "S15" and v.status == "ok"]
        assert len(of_parameters) == 2 * steps and not judged.causes


@pytest.mark.heavy
@pytest.mark.parametrize("sharding", [LAYOUTS[4], LAYOUTS[6]], ids=str)
@pytest.mark.one_in(2)
def test_a_script_shows_it(sharding: dict[str, Any], tmp_path: Path, scripts: RunScript) -> None:
    shown = case("torch.fp32", sharding, optimizer="adamw")
    path = script_on_ranks(shown, "rate-times-ranks", RECIPES["torch.fp32"], tmp_path)
    assert_shows(scripts, path, ("", "rate-times-ranks"))


def test_a_first_step_by_hand() -> None:
    param, grad = np.ones((2, 3), np.float32), np.full((2, 3), -2.0, np.float32)
    rate = OPTIMIZERS["sgd"][1]["lr"]
    may = step_without_state("SGD", {"lr": rate}, "fp32", param, grad)
    assert (may.lo <= 1.0 + 2.0 * rate).all() and (may.hi >= 1.0 + 2.0 * rate).all()
    decayed = 1.0 - 0.01 * 2.0**-8 + 2.0**-8
    may = step_without_state("AdamW", {"lr": 2.0**-8}, "fp32", param, grad)
    assert ((may.lo < decayed) & (decayed < may.hi) & (may.hi - may.lo < 1e-6)).all()
    assert step_without_state("AdamW", {"lr": 2.0**-8}, "fp32", param, grad * 2.0**63).unknown.all()
    few = step_without_state("AdamW8bit", {"lr": 2.0**-8}, "fp32", param, grad)
    assert (few.lo < may.lo).all() and (may.hi < few.hi).all() and (few.hi - few.lo < 1e-5).all()
