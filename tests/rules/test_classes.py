"""Ranks that share the classes of a loss: torch's ``loss_parallel``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrowfuzz.case.layout import check_sharding, layouts
from narrowfuzz.case.layout.loss_parallel import CLASSES
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.sharded_specs import sharded_specs
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.plants.registry import planted
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.script.ranks import of_ranks
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows, script_on_ranks
from torch.distributed.tensor.parallel import loss

RECIPES = recipes()


def judge(ledger: Ledger | None = None) -> Judge:
    return Judge(RECIPES, Ledger([]) if ledger is None else ledger)


def case(sharding: dict[str, Any], recipe: str = "torch.fp32", **fields: Any) -> Case:
    fields = {"model": "cross_entropy", "dtype": recipe.removeprefix("torch."), **fields}
    spec = Spec(recipe=recipe, sharding=Sharding(**sharding), **fields)
    return Case(spec=spec, data=DataSpec(seed=1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sharding", "fields"),
    [
        ({"classes": 2}, {"steps": 2, "optimizer": "adamw", "checkpoint": "full"}),
        ({"classes": 3}, {"k": 10, "recipe": "torch.bf16", "microbatches": 2}),
        ({"classes": 4}, {"k": 33, "batch": 3, "m": 5}),
        ({"classes": 2, "processes": True}, {"m": 7}),
    ],
    ids=str,
)
def test_a_clean_loss_is_silent(sharding: dict[str, Any], fields: dict[str, Any]) -> None:
    judged = judge().judge(case(sharding, **fields))
    assert judged.ran and not judged.causes
    ok = {"contract", "O9", "S4"} | ({"S10"} if "processes" in sharding else set())
    assert ok <= {v.rule for v in judged.verdicts if v.status == "ok"}


FAULTS = (
    ("classes-own-maximum", {}),
    ("classes-counted-by-each", {}),
    ("classes-offset-of-even-parts", {"k": 10}),
    ("classes-ignored-count", {}),
    ("classes-gradient-of-the-sum", {}),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("fault", "fields"), FAULTS)
def test_a_fault_is_seen(fault: str, fields: dict[str, Any]) -> None:
    with planted("", fault):
        assert {v.rule for v in judge().judge(case({"classes": 3}, **fields)).causes} == {"O9"}


def test_a_script_shows_it(tmp_path: Path, scripts: RunScript) -> None:
    shown, fault = case({"classes": 2}, steps=2), "classes-ignored-count"
    path = script_on_ranks(shown, fault, RECIPES["torch.fp32"], tmp_path)
    assert_shows(scripts, path, ("", fault))


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"model": "cross_entropy_weighted"}, "loss-parallel-weight-ignored"),
        ({"k": 9}, "loss-parallel-empty-shard"),
    ],
)
def test_what_torch_raises_is_known(fields: dict[str, Any], known: str) -> None:
    drawn = case({"classes": 4}, **fields)
    assert {v.rule for v in judge().judge(drawn).causes} == {"contract"}
    judged = judge(load_ledger()).judge(drawn)
    assert not judged.causes and {v.explained_by for v in judged.known} == {known}


def test_what_one_process_must_refuse_ranks_must_refuse(
    tmp_path: Path, scripts: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = case({"classes": 2}, model="cross_entropy_outside")
    (found,) = judge().judge(drawn).causes
    assert found.symptom == "runs on ranks where one process raises"
    known = judge(load_ledger()).judge(drawn)
    assert {v.explained_by for v in known.known} == {"loss-parallel-target-outside"}
    recipe = RECIPES["torch.fp32"]
    text = write_played_script(of_ranks(drawn, found, recipe, tensors_of(drawn, recipe)))
    (path := tmp_path / "repro.py").write_text(text)
    shown = scripts(path)
    assert shown.shown and "a target that is neither a class nor" in shown.output
    usual = loss._nll_loss_forward

    def checked(x: Any, target: Any, *args: Any) -> Any:
        if (target >= 32).any():
            raise IndexError("no such class")
        return usual(x, target, *args)

    monkeypatch.setattr(loss, "_nll_loss_forward", checked)
    assert not judge().judge(drawn).causes


def test_losses_alone_are_drawn_so_and_nothing_else() -> None:
    plain = [RECIPES["torch.fp32"], RECIPES["torchao.float8.tensorwise"]]
    drawn = examples(sharded_specs(plain, ("cross_entropy", "cross_entropy_weighted")), 100)
    assert {spec.model for spec in drawn} == {"cross_entropy", "cross_entropy_weighted"}
    assert {spec.sharding.classes for spec in drawn} == {2, 3, 4}
    assert {spec.recipe for spec in drawn} == {"torch.fp32"}
    assert {spec.sharding.processes for spec in drawn} == {True, False}


def test_only_losses_share_classes() -> None:
    assert layouts("cross_entropy", ("fsdp", "classes")) == (CLASSES,)
    assert not layouts("cross_entropy", ("fsdp",)) and not layouts("softmax", ("classes",))
    assert CLASSES not in layouts("mlp_gelu", ("fsdp", "classes"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recipe": "torchao.float8.tensorwise"}, "not laid out by classes"),
        ({"model": "cross_entropy_smoothed"}, "share no classes of cross_entropy_smoothed"),
        ({"sharding": Sharding(classes=1)}, "give 2 or more"),
        ({"sharding": Sharding(classes=2, data=2)}, "no other way"),
        ({"m": 0}, "evenly"),
        ({"compile": "aot_eager"}, "not compiled"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, Any], says: str) -> None:
    spec = msgspec.structs.replace(case({"classes": 2}).spec, **fields)
    with pytest.raises(ValueError, match=says):
        check_sharding(spec, RECIPES[spec.recipe].shards)
