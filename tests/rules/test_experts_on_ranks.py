"""Ranks that share experts, and ranks that are replicas: clean layouts are silent, every rule sees
a fault, and scripts show it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.case.layout import check_sharding, fitting
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.plants.registry import planted
from narrowfuzz.play.ranks import on_ranks
from narrowfuzz.rules.sharded.results import _dividing
from narrowfuzz.trace.trace import Trace
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows, script_on_ranks

RECIPES = recipes()


def case(recipe: str, sharding: dict[str, Any], **fields: Any) -> Case:
    sizes = {"m": 32, "k": 32, "n": 48, "model": "chosen_experts"} | fields
    sizes.setdefault("dtype", "fp32" if recipe == "torch.fp32" else "bf16")
    data = sizes.pop("data", DataSpec(seed=3))
    spec = fitting(Spec(recipe=recipe, sharding=Sharding(**sharding), **sizes))
    return Case(spec=spec, data=data)


def judge(ledger: Ledger | None = None) -> Judge:
    return Judge(RECIPES, ledger or Ledger([]))


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": 2, "experts": 2}, {"data": 4, "experts": 2}, {"data": 4, "experts": 4},
    {"data": 4, "experts": 2, "replicas": 2}, {"data": 4, "replicas": 2},
    {"data": 2, "replicas": 2, "forces_sums": True}, {"data": 2, "experts": 2, "averages": False},
    {"data": 4, "experts": 2, "units": "each", "reduces_fp32": True},
    {"data": 2, "experts": 1, "forces_sums": True},
    {"data": 2, "experts": 2, "tensor": 2}, {"data": 1, "experts": 1, "tensor": 2},
    {"data": 2, "experts": 1, "tensor": 2, "units": "each", "averages": False},
)  # fmt: skip
#: Those whose tensor-parallel ranks have parts of each expert.
PARTED = LAYOUTS[-3:]


@pytest.mark.parametrize("recipe", ["torch.fp32", "torch.bf16", "torchao.float8.rowwise"])
@pytest.mark.parametrize("sharding", LAYOUTS, ids=str)
@pytest.mark.one_in(9)
def test_ranks_that_share_experts_leave_one_processs_bits(
    recipe: str, sharding: dict[str, Any]
) -> None:
    judged = judge().judge(case(recipe, sharding, checkpoint="full"))
    assert judged.ran and not judged.causes
    passed = {v.rule for v in judged.verdicts if v.status == "ok"}
    assert passed >= {"S1", "S2", "S4", "S6"}


@pytest.mark.parametrize("sharding", [LAYOUTS[0], LAYOUTS[1], PARTED[0]], ids=str)
@pytest.mark.parametrize("recipe", ["torchao.mxfp8.rceil", "torchao.mxfp8.floor"])
@pytest.mark.one_in(4)
def test_experts_in_mxfp8_are_padded_and_quantised_on_the_ranks_that_share_them(
    recipe: str, sharding: dict[str, Any]
) -> None:
    """Ranks receive any number of rows, which without padding is refused."""
    drawn = case(recipe, sharding, m=128, n=64, backend="wrapper")
    judged = judge().judge(drawn)
    assert judged.ran and not judged.causes
    assert {v.rule for v in judged.verdicts if v.status == "ok"} >= {"S1", "S2", "S7"}
    if "tensor" not in sharding:  # else one process cuts its weights in the same way
        with planted("", "experts-shared-unquantised"):
            assert {v.rule for v in judge().judge(drawn).causes} == {"S1"}


@pytest.mark.heavy
def test_experts_that_hide_what_is_converted_are_no_proof() -> None:
    """Their products are so large that nothing is seen of a converted linear's beside them."""
    drawn = case(
        "torchao.float8.tensorwise",
        {**PARTED[0], "gathers": "codes", "resumes": "early", "units": "each"},
        **{"m": 64, "k": 16, "n": 64, "steps": 2, "optimizer": "sgd"},
        data=DataSpec(seed=1789790, values="near_max"),
    )
    verdicts = judge().judge(drawn).verdicts
    assert {v.status for v in verdicts if v.rule == "S7"} == {"inconclusive"}


def test_three_ranks_have_an_expert_each() -> None:
    # rows of 48 end in the middle of a loop of vectors, where silu is computed otherwise
    data = DataSpec(seed=1, values="heavy_tail", input_exponent=-9, weight_exponent=-3)
    sharding = {"data": 3, "experts": 3}
    drawn = case("torch.fp32", sharding, m=96, model="grouped_experts", data=data)
    assert not judge().judge(drawn).causes


def test_pieces_of_rows_begin_where_those_of_a_rank_do() -> None:
    """Rows of 60 bytes: some kernels sum in another order where memory begins elsewhere."""
    drawn = case("torch.fp32", {"data": 3, "experts": 3}, m=3, k=15, n=1, model="grouped_experts")
    assert not judge().judge(drawn).causes


@pytest.mark.heavy
def test_graphs_that_fsdp_breaks_add_gradients_in_another_order() -> None:
    sharding, data = {"data": 2, "units": "each"}, DataSpec(seed=1, grad_exponent=-9)
    drawn = case("torch.bf16", sharding, m=16, n=64, compile="aot_eager", data=data)
    judged = judge().judge(drawn)
    assert not judged.causes
    assert ("S9", "ok") in {(v.rule, v.status) for v in judged.verdicts}


@pytest.mark.parametrize("sharding", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], PARTED[0]], ids=str)
@pytest.mark.one_in(2)
def test_gradients_of_experts_add_up_over_microbatches(sharding: dict[str, Any]) -> None:
    judged = judge().judge(case("torch.bf16", sharding, microbatches=3))
    assert not judged.causes
    passed = {(v.rule, v.role) for v in judged.verdicts if v.status == "ok"}
    assert {("S1", "output"), ("S2", "grad_parameter")} <= passed


@pytest.mark.heavy
@pytest.mark.parametrize("sharding", [LAYOUTS[0], LAYOUTS[3], PARTED[0]], ids=str)
def test_ranks_that_share_experts_are_compiled(sharding: dict[str, Any]) -> None:
    drawn = case("torch.bf16", sharding, compile="aot_eager", steps=2)
    judged = judge().judge(drawn)
    assert not judged.causes
    assert ("S9", "ok") in {(v.rule, v.status) for v in judged.verdicts}


@pytest.mark.parametrize("sharding", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], PARTED[0]], ids=str)
@pytest.mark.one_in(2)
def test_ranks_that_share_experts_skip_together(sharding: dict[str, Any]) -> None:
    spike = Spike("grad_output", row=5, col=3, bits="0x7f800000")
    how = {"steps": 2, "loss_scaling": "grad_scaler"}
    for spikes in ((), (spike,)):
        drawn = case("torch.bf16", sharding, data=DataSpec(seed=3, spikes=spikes), **how)
        seen: dict[str, Trace] = {}
        judging = judge()
        judging.observed = lambda case, traces: seen.update(traces)
        judged = judging.judge(drawn)
        assert not judged.causes
        assert ("S14", "ok") in {(v.rule, v.status) for v in judged.verdicts}
        scales = {float(rank.outputs["loss_scale"]) for rank in seen["sharded"].ranks}
        assert scales == ({256.0} if spikes else {4096.0})


@pytest.mark.parametrize("resumes", ["same", "fewer", "alone", "regrouped"])
@pytest.mark.parametrize(
    "sharding", [{"data": 4, "experts": 2}, {"data": 4, "replicas": 2, "experts": 2}], ids=str
)
@pytest.mark.one_in(8)
def test_experts_resume_on_other_ranks(sharding: dict[str, Any], resumes: str) -> None:
    sharding = {**sharding, "resumes": resumes, "averages": False}
    judged = judge().judge(case("torch.bf16", sharding, steps=2, optimizer="adamw"))
    assert judged.ran and not judged.causes
    assert ("S11", "ok") in {(v.rule, v.status) for v in judged.verdicts}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("resumes", ["same", "alone", "regrouped"])
def test_parts_of_experts_resume_on_other_ranks(resumes: str) -> None:
    sharding = {**PARTED[0], "resumes": resumes, "averages": False}
    judged = judge().judge(case("torch.bf16", sharding, steps=2, optimizer="adamw"))
    assert judged.ran and not judged.causes
    assert ("S11", "ok") in {(v.rule, v.status) for v in judged.verdicts}


@pytest.mark.heavy
@pytest.mark.parametrize("sharding", [{"data": 2, "experts": 2}, {"tensor": 2}], ids=str)
def test_a_training_that_is_saved_before_its_first_step(sharding: dict[str, Any]) -> None:
    model = "mlp_gelu" if "tensor" in sharding else "chosen_experts"
    early, fields = {**sharding, "resumes": "early"}, {"model": model, "steps": 2}
    plain, adam = (
        judge(load_ledger()).judge(case("torch.bf16", early, optimizer=how, **fields))
        for how in ("sgd", "adamw")
    )
    assert not plain.causes and not plain.known and not adam.causes
    known = {(v.rule, v.explained_by) for v in adam.known}
    assert known == {("S11", "dcp-optimizer-begins-at-step-one")}


def test_a_mesh_of_experts_is_not_that_of_a_run_before() -> None:
    for sharding in (LAYOUTS[3], LAYOUTS[4], LAYOUTS[1], {"data": 4}, LAYOUTS[0], {"data": 2}):
        assert not judge().judge(case("torch.fp32", sharding)).causes


#: A fault, where it shows, and the rules that may be the first to see it.
FAULTS: tuple[tuple[str, dict[str, Any], dict[str, Any], set[str]], ...] = (
    ("exchange-loses-last-row", {"data": 2, "experts": 2}, {}, {"S1"}),
    ("exchange-loses-first-gradient", {"data": 4, "experts": 2}, {}, {"S1"}),
    ("fsdp-one-rank-ignores-factor", {"data": 2, "experts": 2}, {}, {"S2"}),
    ("hsdp-replicas-apart", {"data": 4, "replicas": 2}, {}, {"S2", "S4"}),
    ("norm-of-experts-inflated", {"data": 2, "experts": 2}, {"k": 16, "n": 16}, {"S6"}),
    ("experts-saved-as-plain-shards", {"data": 4, "experts": 2, "resumes": "regrouped"},
     {"steps": 2}, {"S11"}),
    ("expert-parts-send-no-sum", {"data": 2, "experts": 2, "tensor": 2}, {}, {"S1"}),
    ("expert-parts-send-no-sum", {"data": 2, "experts": 1, "tensor": 2},
     {"model": "grouped_experts"}, {"S1"}),
)  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("fault", "sharding", "fields", "rules"), FAULTS)
def test_a_fault_is_seen(
    fault: str, sharding: dict[str, Any], fields: dict[str, Any], rules: set[str]
) -> None:
    drawn = case("torch.fp32", sharding, **fields)
    with planted("", fault):
        judged = judge().judge(drawn)
    assert {verdict.rule for verdict in judged.causes} & rules
    known = judge(load_ledger()).judge(drawn)
    assert not known.causes


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("fault", "sharding", "fields", "rules"), FAULTS)
def test_a_script_shows_it(
    fault: str,
    sharding: dict[str, Any],
    fields: dict[str, Any],
    rules: set[str],
    tmp_path: Path,
    scripts: RunScript,
) -> None:
    shown = case("torch.fp32", {"averages": False, **sharding}, **fields)
    if fault == "fsdp-one-rank-ignores-factor":
        shown = case("torch.fp32", sharding, **fields)
    path = script_on_ranks(shown, fault, RECIPES["torch.fp32"], tmp_path)
    assert_shows(scripts, path, ("", fault))


def test_a_division_by_one_rank_twice_is_known_and_nothing_beside_it() -> None:
    drawn = case("torch.bf16", {"data": 2, "experts": 2, "forces_sums": True})
    found = judge().judge(drawn).causes
    assert {(v.rule, v.role) for v in found} == {("S2", "grad_parameter")}
    judged = judge(load_ledger()).judge(drawn)
    assert not judged.causes
    assert {v.explained_by for v in judged.known} == {"fsdp-one-rank-divides-twice"}
    with planted("", "exchange-loses-last-row"):
        assert "S1" in {v.rule for v in judge(load_ledger()).judge(drawn).causes}


def test_what_is_divided_before_it_is_added_may_be_rounded_there() -> None:
    fp32 = FORMATS["fp32"]
    small, large, odd = 3 * 2.0**-149, 1.0, 1.0 + 2.0**-23
    x = np.array([small, large, odd])
    lo, hi = _dividing((x, x), 2, fp32)
    assert lo[0] < small < hi[0] and lo[1] == hi[1] == large and lo[2] == hi[2] == odd
    thirds = _dividing((np.ones(1), np.ones(1)), 3, fp32)
    assert thirds[0][0] < 1.0 < thirds[1][0]
    assert _dividing((x, x), 0, fp32)[0][0] == small


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sharding": Sharding(data=3, experts=2)}, "data is 3, no multiple of 2"),
        ({"sharding": Sharding(data=3, replicas=2)}, "of 2 replicas times 1 ranks"),
        ({"sharding": Sharding(data=2, experts=2), "model": "mlp_gelu"}, "share no experts of"),
        ({"sharding": Sharding(data=1, experts=1, tensor=3)}, "share each expert, not 3"),
        ({"sharding": Sharding(data=2, tensor=2)}, "where experts is 1 or more"),
        ({"sharding": Sharding(tensor=2, experts=1)}, "so data is 1 or more"),
        ({"sharding": Sharding(data=2, resumes="regrouped"), "steps": 2}, "share experts"),
    ],
)
def test_layouts_that_are_none(changes: dict[str, Any], says: str) -> None:
    spec = Spec(recipe="torch.bf16", model="chosen_experts", n=48, m=96)
    with pytest.raises(ValueError, match=says):
        check_sharding(msgspec.structs.replace(spec, **changes), ("fsdp", "tensor"))


def test_ranks_that_fail_while_others_begin_to_wait_leave_their_threads() -> None:
    def main(rank: int, mesh: Any) -> int:
        import torch
        import torch.distributed as dist

        if rank % 2 and failing:
            raise OSError(f"rank {rank}")
        for _ in range(rank + 1):
            dist.all_reduce(torch.ones(1), group=mesh.get_group())
        return threading.get_ident()

    for _ in range(20):
        failing = True
        with pytest.raises(OSError, match="rank"):
            on_ranks({"data": 4}, main)
    failing = False
    assert len(set(on_ranks({"data": 1}, main))) == 1
