"""Ranks that share the rows of each sequence: PyTorch's own ring attention, on a CPU by a bridge of
the tests; it knows none of its own, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from context_bridge import bridged
from fresh import command
from hypothesis import given, settings
from narrowfuzz.arms import processes as ranks
from narrowfuzz.arms.available import none_runs, unavailable
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout.context_parallel import CONTEXT
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.sharded_specs import SHARDABLE, laid_out, sharded_specs
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import planted
from narrowfuzz.play import processes
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.table import rules_of
from narrowfuzz.triage.verify import run_script
from samples import recipes
from scripts_of_findings import assert_shows, script_on_ranks

RECIPES = recipes()
BF16 = RECIPES["torch.bf16"]
assert isinstance(BF16, Recipe)
BRIDGE = Path(__file__).parents[1] / "context_bridge.py"


def case(sharding: dict[str, Any], recipe: str = "torch.fp32", **fields: Any) -> Case:
    sizes = {"m": 16, "k": 32, "n": 32, "batch": 2, "heads": 2, "model": "attention"} | fields
    return Case(
        spec=Spec(recipe=recipe, sharding=Sharding(**sharding), **sizes), data=DataSpec(seed=3)
    )


def judged(case: Case) -> Judgement:
    return Judge(RECIPES, Ledger([])).judge(case)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    processes.around.append(bridged)
    with bridged():
        yield
    processes.around.remove(bridged)
    ranks.end()


def test_a_cpu_has_none_and_says_so() -> None:
    said = unavailable(BY_NAME["sharded_context"])
    assert "context parallelism in PyTorch" in said and "does not support CPU attention" in said
    assert "GPU" in unavailable(BY_NAME["sharded_context"], "simulated")


def test_it_alone_is_refused_on_a_cpu() -> None:
    assert "does not support CPU attention" in none_runs(["sharded_context*"], "cpu")
    assert not none_runs(["sharded_context", "sharded"], "cpu")


@pytest.mark.heavy
def test_no_command_runs_it_alone_on_a_cpu() -> None:
    for asked in (["run", "--arm", "sharded_context"], ["score", "--only", "context-*"]):
        assert "run here" in command(*asked, code=2).stderr


CLEAN: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"context": 1}, {}, "S1"),
    ({"context": 2}, {"steps": 2, "optimizer": "adamw"}, "O9"),
    ({"context": 4, "rotates": "alltoall"}, {"model": "llama_block"}, "O9"),
    ({"context": 2}, {"checkpoint": "selective", "recipe": "torch.bf16"}, "O9"),
    ({"context": 2}, {"microbatches": 2, "model": "two_blocks", "checkpoint": "full"}, "S4"),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("sharding", "fields", "rule"), CLEAN)
def test_a_clean_training_is_silent(
    on_cpu: None, sharding: dict[str, Any], fields: dict[str, Any], rule: str
) -> None:
    seen = judged(case(sharding, **fields))
    assert seen.ran and not seen.causes
    assert (rule, "ok") in {(v.rule, v.status) for v in seen.verdicts}


FAULTS = (
    ("context-merged-alike", {"O9"}),
    ("context-rows-out-of-order", {"O9"}),
    ("context-own-keys-again", {"O9"}),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("fault", "rules"), FAULTS)
def test_a_fault_is_seen(on_cpu: None, fault: str, rules: set[str]) -> None:
    with planted("", fault):
        seen = {verdict.rule for verdict in judged(case({"context": 2})).causes}
    assert seen >= rules


@pytest.mark.heavy
def test_every_rule_judges_something(on_cpu: None) -> None:
    ran = [judged(case(sharding)) for sharding in ({"context": 1}, {"context": 2})]
    told = {v.rule for one in ran for v in one.verdicts if v.status == "ok"}
    assert told == {*rules_of(case({"context": 2}).spec)}


@pytest.mark.heavy
def test_its_script_shows_it(on_cpu: None, tmp_path: Path) -> None:
    shown = case({"context": 2})
    path = script_on_ranks(shown, "context-merged-alike", RECIPES["torch.fp32"], tmp_path)
    plant, without = (str(BRIDGE), "bridge-merged-alike"), (str(BRIDGE), "bridge")
    assert_shows(run_script, path, plant, without)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recipe": "torchao.float8.tensorwise"}, "not laid out by context"),
        ({"model": "mlp_gelu"}, "share no sequences"),
        ({"attention": "math"}, "flash"),
        ({"sharding": {"context": 2, "data": 2}}, "no other way"),
        ({"m": 18}, "evenly"),
        ({"compile": "aot_eager"}, "not compiled"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    sharding = fields.pop("sharding", {"context": 2})
    spec = case(sharding, **fields).spec
    with pytest.raises(ValueError, match=says):
        RECIPES[spec.recipe].check(spec)


@given(laid_out(CONTEXT, [BF16], SHARDABLE, largest=64, most=2))
@settings(max_examples=40)
def test_what_is_drawn_of_them_can_be(spec: Spec) -> None:
    BF16.check(spec)
    assert 1 <= spec.sharding.ranks <= 2 and spec.k % (8 * spec.heads) == 0


def test_they_are_drawn_where_there_are_gpus_alone() -> None:
    def drawn(gpus: int) -> bool:
        specs = sharded_specs([BF16], gpus=gpus)
        return any(spec.sharding.context for spec in examples(specs, 150))

    assert drawn(4) and not drawn(0)
