"""Replicas that DistributedDataParallel trains: clean cases are silent, faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.case.layout import check_sharding
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.models.catalog import MODELS, OF_PACKAGES
from narrowfuzz.plants.registry import planted
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.triage.verify import RunScript
from scripts_of_findings import assert_shows, script_on_ranks

RECIPES = load_recipes()
FLOAT8, MX = "torchao.float8.tensorwise", "torchao.mxfp8.rceil"


def judge(known: Ledger | None = None) -> Judge:
    return Judge(RECIPES, known or Ledger([]))


def case(recipe: str, sharding: dict[str, Any], **fields: Any) -> Case:
    replicas = sharding.get("data", 2)
    shared = {"data": replicas, "replicas": replicas, "ddp": "plain", **sharding}
    base = Spec(
        recipe=recipe, backend=RECIPES[recipe].backends[0], m=192, k=32, n=32,
        dtype="fp32" if recipe == "torch.fp32" else "bf16",
    )  # fmt: skip
    spec = {name: getattr(base, name) for name in Spec.__struct_fields__}
    return Case(spec=Spec(**{**spec, "sharding": Sharding(**shared), **fields}), data=DataSpec())


CLEAN: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("torch.bf16", {}, {}),
    ("torch.fp32", {"data": 3, "units": "each"}, {"model": "mlp_swiglu"}),
    ("torch.fp32", {"ddp": "views"}, {"steps": 2, "microbatches": 2, "optimizer": "adamw"}),
    ("torch.bf16", {"ddp": "static"}, {"model": "two_blocks", "checkpoint": "reentrant"}),
    ("torch.bf16", {"ddp": "unused"}, {"model": "looped_experts", "steps": 2}),
    ("torch.bf16", {"units": "each"}, {"model": "llama_block", "checkpoint": "selective"}),
    ("torch.bf16", {"data": 1}, {"steps": 2}),
    ("torch.bf16", {}, {"steps": 2, "loss_scaling": "grad_scaler", "clipping": "norm"}),
    ("torch.bf16", {}, {"compile": "aot_eager", "model": "mlp_gelu", "steps": 2}),
    ("torch.bf16", {"processes": True}, {"steps": 2, "microbatches": 2}),
    ("torch.bf16", {"resumes": "same"}, {"steps": 2, "optimizer": "adamw"}),
    ("torch.bf16", {"data": 3, "resumes": "fewer"}, {"steps": 2}),
    (FLOAT8, {"ddp": "views"}, {"model": "mlp_swiglu", "steps": 2, "microbatches": 2}),
    (MX, {}, {"steps": 2, "optimizer": "adamw"}),
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("recipe", "sharding", "fields"), CLEAN, ids=str)
def test_a_clean_training_is_judged_and_left_alone(
    recipe: str, sharding: dict[str, Any], fields: dict[str, Any]
) -> None:
    drawn = case(recipe, sharding, **fields)
    check_sharding(drawn.spec, RECIPES[recipe].shards)
    judged = judge().judge(drawn)
    assert judged.ran and not judged.causes
    held = {v.rule for v in judged.verdicts if v.status == "ok"}
    assert {"S1", "S2"} <= held
    if drawn.spec.sharding.data > 1:
        assert ("S11" if drawn.spec.sharding.resumes else "S4") in held


#: A fault, where it shows, and the rules that see it first.
FAULTS: tuple[tuple[str, dict[str, Any], dict[str, Any], set[str]], ...] = (
    ("ddp-sums-gradients", {}, {}, {"S2"}),
    ("ddp-last-bucket-apart", {"units": "each"}, {"model": "mlp_gelu"}, {"S2", "S4"}),
    ("ddp-gradients-through-bf16", {}, {}, {"S2"}),
    ("ddp-accumulated-lost", {}, {"microbatches": 2}, {"S2"}),
)


@pytest.mark.parametrize(("fault", "sharding", "fields", "rules"), FAULTS)
def test_a_fault_is_seen(
    fault: str, sharding: dict[str, Any], fields: dict[str, Any], rules: set[str]
) -> None:
    drawn = case("torch.fp32", sharding, **fields)
    with planted("", fault):
        judged = judge().judge(drawn)
    assert {verdict.rule for verdict in judged.causes} & rules
    assert not judge().judge(drawn).causes


@pytest.mark.one_in(4)
@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0])
def test_a_script_shows_it(row: tuple[Any, ...], tmp_path: Path, scripts: RunScript) -> None:
    fault, sharding, fields, _ = row
    drawn = case("torch.fp32", sharding, **fields)
    assert_shows(
        scripts, script_on_ranks(drawn, fault, RECIPES["torch.fp32"], tmp_path), ("", fault)
    )


@pytest.mark.parametrize(("steps", "shown"), [(1, "S2"), (2, "contract")])
def test_a_bias_without_gradient_keeps_its_bucket_apart_and_is_known(
    steps: int, shown: str
) -> None:
    drawn = case(MX, {}, backend="wrapper", bias=True, steps=steps)
    assert {v.rule for v in judge().judge(drawn).causes} == {shown}
    known = judge(load_ledger()).judge(drawn)
    assert not known.causes
    assert {v.explained_by for v in known.known} == {"mx-wrapper-drops-bias"}


@pytest.mark.parametrize(
    ("sharding", "fields", "says"),
    [
        ({"tensor": 2}, {}, "with ddp the sharding is data=2, replicas=2, ddp=plain, not "),
        ({"replicas": 1}, {}, "with ddp the sharding is data=2, replicas=2, ddp=plain, not "),
        ({"ddp": "unused"}, {"checkpoint": "reentrant"}, "no reentrant checkpoint"),
        ({}, {"optimizer": "adamw_8bit_rounded", "steps": 2}, "give 'adamw_8bit'"),
    ],
)
def test_what_it_does_not_lay_out_is_said(
    sharding: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    spec = case("torch.bf16", sharding, **fields).spec
    with pytest.raises(ValueError, match=says):
        check_sharding(spec, RECIPES["torch.bf16"].shards)


def test_a_packages_own_model_is_not_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    row = OF_PACKAGES[1]
    monkeypatch.setitem(MODELS, row.name, row)
    spec = case("torch.bf16", {}, model=row.name).spec
    with pytest.raises(ValueError, match="torchtitan shards it by FSDP"):
        check_sharding(spec, RECIPES["torch.bf16"].shards)
