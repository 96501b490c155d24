"""Cases on ranks: clean layouts are silent, every rule sees a fault, and scripts show it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.arms.layouts import linear_specs_on_ranks
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike, dump_case, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.plants.registry import planted
from narrowfuzz.rules.sharded.operands import _same_source
from narrowfuzz.rules.table import rules_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Runs
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.triage import _still
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows, script_on_ranks

RECIPES = recipes()
TENSORWISE = "torchao.float8.tensorwise"


def case(recipe: str, sharding: dict[str, Any], seed: int = 3, **fields: Any) -> Case:
    sizes = {"m": 96, "k": 64, "n": 64} | fields
    spikes = sizes.pop("spikes", ())
    data = DataSpec(seed=seed, regime=sizes.pop("regime", "wild"), spikes=spikes)
    return Case(spec=Spec(recipe=recipe, sharding=Sharding(**sharding), **sizes), data=data)


def judge() -> Judge:
    return Judge(RECIPES, Ledger([]))


def broken(judged: Any) -> set[str]:
    return {verdict.rule for verdict in judged.causes}


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": 1}, {"data": 2}, {"data": 3}, {"data": 4, "reduces_fp32": True},
    {"data": 2, "averages": False, "units": "each"},
    {"tensor": 1}, {"tensor": 2}, {"tensor": 2, "style": "rowwise"},
    {"tensor": 2, "sequence": True}, {"tensor": 4, "style": "rowwise", "sequence": True},
    {"tensor": 2, "local_output": False}, {"data": 2, "tensor": 2},
)  # fmt: skip


@pytest.mark.parametrize("recipe", ["torch.bf16", TENSORWISE, "torchao.float8.rowwise"])
@pytest.mark.one_in(9)
@pytest.mark.parametrize("sharding", LAYOUTS, ids=str)
def test_a_clean_layout_is_silent(recipe: str, sharding: dict[str, Any]) -> None:
    judged = judge().judge(case(recipe, sharding, bias="float8" not in recipe))
    assert judged.ran and not judged.causes
    passed = {v.rule for v in judged.verdicts if v.status == "ok"}
    assert "contract" in passed and passed & {"S1", "S5"}
    assert ("S3" in passed) == ("float8" in recipe)


@pytest.mark.parametrize("sharding", [LAYOUTS[6], LAYOUTS[7], LAYOUTS[11]], ids=str)
def test_sums_over_ranks_are_exact_on_a_lattice(sharding: dict[str, Any]) -> None:
    judged = judge().judge(case("torch.fp32", sharding, regime="lattice", dtype="fp32"))
    assert not judged.causes
    assert "S5" in {v.rule for v in judged.verdicts if v.status == "ok"}


@pytest.mark.parametrize("model", ["mlp_gelu", "mlp_swiglu", "frozen_first"])
def test_a_shared_mlp_is_silent(model: str) -> None:
    judged = judge().judge(case("torch.bf16", {"data": 2, "tensor": 2}, model=model, steps=2))
    assert judged.ran and not judged.causes


@pytest.mark.parametrize("model", ["llama_block", "tied_embedding", "used_twice"])
def test_fsdp_of_a_model_is_silent(model: str) -> None:
    sharding = {"data": 2, "units": "each", "reduces_fp32": True}
    judged = judge().judge(case(TENSORWISE, sharding, model=model))
    assert judged.ran and not judged.causes


@pytest.mark.parametrize("gathers", ["codes", "precomputed"])
def test_gathered_codes_are_silent(gathers: str) -> None:
    judged = judge().judge(case(TENSORWISE, {"data": 2, "gathers": gathers}, steps=2))
    assert judged.ran and not judged.causes
    names = {v.rule for v in judged.verdicts if v.status == "ok"}
    assert {"S3", "S1"} <= names and ("S8" in names) == (gathers == "precomputed")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("sharding", "fields"),
    [
        ({"stages": 2}, {"microbatches": 2, "steps": 2}),
        ({"stages": 3, "schedule": "gpipe"}, {"microbatches": 2, "model": "mlp_swiglu"}),
        ({"stages": 4, "schedule": "interleaved"}, {"microbatches": 2, "model": "llama_block"}),
        ({"stages": 2}, {"microbatches": 2, "checkpoint": "selective", "model": "llama_block"}),
    ],
)
@pytest.mark.parametrize("recipe", ["torch.bf16", "torchao.mxfp8.floor"])
def test_a_pipeline_leaves_the_chains_bits(
    recipe: str, sharding: dict[str, Any], fields: dict[str, Any]
) -> None:
    judged = judge().judge(case(recipe, sharding, **fields))
    assert judged.ran and not judged.causes
    assert {("S12", "ok")} <= {(v.rule, v.status) for v in judged.verdicts}


def test_a_microbatch_begins_in_memory_as_it_does_in_the_chain() -> None:
    # a second row of 11 numbers, in memory of the first, is added up in another order
    sharding = {"stages": 2, "schedule": "gpipe"}
    sizes = {"m": 1, "k": 11, "n": 11, "microbatches": 2, "dtype": "fp32"}
    drawn = case("torch.fp32", sharding, seed=2, **sizes)
    data = DataSpec(seed=2, values="outlier")
    assert not judge().judge(msgspec.structs.replace(drawn, data=data)).causes


GRAPHS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"data": 2}, {}),
    ({"data": 2, "tensor": 2}, {}),
    ({"stages": 2}, {"microbatches": 2, "checkpoint": "full"}),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("sharding", "fields"), GRAPHS, ids=str)
def test_graphs_on_ranks_leave_eagers_bits(
    sharding: dict[str, Any], fields: dict[str, Any]
) -> None:
    judged = judge().judge(case("torch.bf16", sharding, compile="aot_eager", **fields))
    assert not judged.causes
    assert ("S9", "ok") in {(v.rule, v.status) for v in judged.verdicts}


RESUMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("torch.bf16", {"data": 3, "resumes": "fewer"}),
    ("torch.bf16", {"data": 2, "tensor": 2, "resumes": "alone"}),
    ("torch.bf16", {"data": 2, "style": "rowwise", "resumes": "swapped"}),
    (TENSORWISE, {"data": 2, "gathers": "precomputed", "resumes": "same"}),
    (TENSORWISE, {"data": 3, "gathers": "codes", "resumes": "fewer"}),
    ("torchao.float8.rowwise", {"tensor": 2, "resumes": "swapped"}),
    # as many rows on each of two ranks that share a sequence as there were on each of four
    ("torch.fp32", {"data": 2, "tensor": 2, "sequence": True, "resumes": "fewer"}),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("recipe", "sharding"), RESUMED, ids=str)
def test_a_training_resumes_on_another_layout(recipe: str, sharding: dict[str, Any]) -> None:
    judged = judge().judge(case(recipe, sharding, steps=2, optimizer="adamw", n=60, k=48))
    assert judged.ran and not judged.causes
    assert ("S11", "ok") in {(v.rule, v.status) for v in judged.verdicts}


def test_a_graph_is_not_of_the_mesh_of_a_run_before() -> None:
    # DTensor remembers that one: the ledger's dtensor-graph-of-older-mesh
    sharding = {"tensor": 2, "local_output": False, "processes": True}
    for batch, compile in ((2, "none"), (3, "none"), (3, "aot_eager")):
        fields = {"model": "mlp_gelu", "batch": batch, "compile": compile}
        assert not judge().judge(case("torch.fp32", sharding, **fields)).causes


def test_terms_on_both_sides_of_a_broken_graph_are_added_in_any_order() -> None:
    # data on which the residual's gradient and the norm's two show it
    spec = {"model": "llama_block", "m": 8, "k": 32, "n": 64, "dtype": "fp32"}
    sharding = {"data": 1, "units": "each", "reduces_fp32": True}
    drawn = case("torch.fp32", sharding, compile="aot_eager", **spec)
    spikes = (
        Spike(tensor="grad_output", row=203, col=212, bits="0x80000000"),
        Spike(tensor="bias", row=145, col=122, bits="0x80000000"),
    )
    data = DataSpec(seed=33554431, values="binade_edges", input_exponent=-9, spikes=spikes)
    judged = judge().judge(msgspec.structs.replace(drawn, data=data))
    assert ("S9", "ok") in {(v.rule, v.status) for v in judged.verdicts} and not judged.causes


def test_what_is_known_of_a_weight_is_known_in_each_of_its_products() -> None:
    drawn = case(TENSORWISE, {"data": 2, "tensor": 2, "gathers": "codes"}, m=2, k=32)
    judged = Judge(RECIPES, load_ledger()).judge(drawn)
    assert not judged.causes
    assert "float8-gather-scale-of-shard" in {v.explained_by for v in judged.known}


def test_a_case_on_no_ranks_shows_no_rule_of_ranks() -> None:
    alone = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
    seen = Verdict("S9", "sharded_aot_eager", "output", "diverged", "differs", At(), "1", Runs("E"))
    assert _still(judge(), alone, seen) is None


def test_a_maximum_that_one_rank_brings_nan_to_is_each_groups_own() -> None:
    spike = Spike(tensor="weight", row=178, col=31, bits="0x7fc00000")
    drawn = case(TENSORWISE, {"tensor": 2, "processes": True}, m=1, k=2, n=4)
    judged = judge().judge(msgspec.structs.replace(drawn, data=DataSpec(seed=744, spikes=(spike,))))
    assert not judged.causes
    assert ("S10", "inconclusive") in {(v.rule, v.status) for v in judged.verdicts}


def test_probes_give_a_distributed_result_nothing_to_lay_out() -> None:
    sharding = {"tensor": 1, "local_output": False}
    judged = judge().judge(case("torch.fp32", sharding, m=1, k=1, n=0))
    assert judged.ran and not judged.causes


def test_meshes_of_earlier_cases_are_forgotten() -> None:
    """A mesh over fewer ranks is taken for an earlier one's, whose groups are gone."""
    for sharding in ({"data": 2, "tensor": 2, "resumes": "fewer"}, {"tensor": 2}):
        assert not judge().judge(case(TENSORWISE, sharding, steps=2)).causes


#: One feature's gradient is infinite, which is one rank's of two that share a weight's rows.
SCALED: dict[str, Any] = {
    "steps": 2, "loss_scaling": "grad_scaler",
    "spikes": (Spike("grad_output", row=5, col=200, bits="0x7f800000"),),
}  # fmt: skip


def test_outputs_that_are_all_nan_do_not_say_that_nothing_was_quantised() -> None:
    spikes = (
        Spike("bias", row=40, col=135, bits="0xff800000"),
        Spike("input", row=25, col=19, bits="0x7fc00000"),
    )
    drawn = case(
        "torchao.float8.rowwise_gw_hp",
        {"data": 2, "tensor": 2, "local_output": False, "units": "each", "resumes": "early"},
        m=1, batch=2, k=64, n=32, model="mlp_gelu", backend="real", checkpoint="selective",
        bias=True, steps=2,
    )  # fmt: skip
    data = DataSpec(seed=2928, spikes=spikes)
    judged = judge().judge(msgspec.structs.replace(drawn, data=data))
    assert not judged.causes and ("S7", "inconclusive") in {
        (v.rule, v.status) for v in judged.verdicts
    }


def test_a_step_by_a_bias_gradient_of_codes_changes_what_follows() -> None:
    sharding = {"tensor": 1, "narrow_styles": True, "resumes": "early"}
    sizes = {"m": 1, "k": 1, "n": 2, "bias": True, "steps": 2, "backend": "emulated"}
    drawn = case(TENSORWISE, sharding, 55497, **sizes)
    judged = Judge(RECIPES, load_ledger()).judge(drawn)
    assert judged.ran and not judged.causes
    assert {v.explained_by for v in judged.known} == {"float8-styles-bias-gradient"}
    assert "S1" in broken(judge().judge(drawn))


def test_what_ranks_that_stepped_alone_have_saved_is_no_other_finding() -> None:
    sharding = {"tensor": 2, "sequence": True, "resumes": "alone"}
    spikes = (Spike("grad_output", row=193, col=166, bits="0xff7f0000"),)
    drawn = case(
        "torch.fp32", sharding, 453, m=2, k=2, n=2, model="rmsnorm_linear", dtype="fp32",
        loss_scaling="grad_scaler", steps=2, spikes=spikes,
    )  # fmt: skip
    judged = Judge(RECIPES, load_ledger()).judge(drawn)
    assert judged.ran and not judged.causes
    assert {v.explained_by for v in judged.known} == {"grad-scaler-first-layout"}


def test_operands_whose_zeros_have_another_sign_are_not_the_same() -> None:
    """Their codes differ, which no quantiser has made: an activation's backward may give either."""

    def call(values: list[float]) -> Any:
        return SimpleNamespace(tensors={"input": np.array([values], np.float32)}, batch=0)

    whole = [1.0, -0.0, np.nan, -2.0]
    for values, same in (
        (whole, True),
        ([1.0, 0.0, *whole[2:]], False),
        ([2.0, *whole[1:]], False),
    ):
        want, halves = call(whole), [call(values[:2]), call(values[2:])]
        assert _same_source(want, halves, "input") is same


@pytest.mark.heavy
def test_graphs_alone_do_not_say_that_nothing_was_quantised() -> None:
    """On exact data, where quantised products are the unconverted model's."""
    sharding = {"tensor": 2, "local_output": False}
    sizes = {"m": 32, "k": 32, "n": 32, "batch": 2, "dtype": "fp32", "compile": "aot_eager"}
    drawn = case(
        "torchao.mxfp8.floor", sharding, 132694, backend="linear", regime="lattice", **sizes
    )
    arms = frozenset({"sharded_aot_eager"})
    judged = Judge(RECIPES, Ledger([]), arms).judge(drawn)
    assert judged.ran and not judged.causes
    assert ("S7", "not_applicable") in {(v.rule, v.status) for v in judged.verdicts}


def test_codes_that_are_the_values_do_not_say_that_nothing_was_quantised() -> None:
    """Conversion that also changes nothing in one process says nothing about ranks."""
    fields = {"regime": "lattice", "dtype": "fp32", "m": 32, "k": 32, "n": 32}
    drawn = case(TENSORWISE, {"tensor": 2}, 3, **fields)
    with planted("", "float8-lost-by-tensor-parallel"):
        judged = judge().judge(drawn)
    assert [v.status for v in judged.verdicts if v.rule == "S7"] == ["inconclusive"]
    assert "in one process, too" in next(v.why for v in judged.verdicts if v.rule == "S7")


def test_infinite_outputs_that_are_the_unconverted_models_say_so() -> None:
    drawn = case("torchao.mxfp8.even", {"tensor": 1}, m=32, k=32, n=32, backend="wrapper")
    data = DataSpec(seed=248, values="near_max")
    judged = Judge(RECIPES, load_ledger()).judge(msgspec.structs.replace(drawn, data=data))
    assert {v.explained_by for v in judged.known} == {"mx-wrapper-tensor-parallel"}
    assert not judged.causes


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("rmsnorm_linear", DataSpec(seed=1446850, values="near_max")),
        ("layernorm_linear", DataSpec(seed=465286, values="scale_ends")),
    ],
    ids=["nan in one process", "nan on ranks, too"],
)
def test_results_beside_nan_show_that_nothing_was_quantised(model: Any, data: DataSpec) -> None:
    drawn = case(
        "torchao.mxfp8.even", {"tensor": 1, "sequence": True}, m=32, k=32, n=32,
        model=model, backend="wrapper",
    )  # fmt: skip
    judged = Judge(RECIPES, load_ledger()).judge(msgspec.structs.replace(drawn, data=data))
    assert not judged.causes
    assert {v.explained_by for v in judged.known} == {"mx-wrapper-tensor-parallel"}


def test_a_bias_gradient_of_codes_is_known_where_it_is_clipped() -> None:
    sharding = {"tensor": 1, "narrow_styles": True, "resumes": "early"}
    sizes = {"m": 1, "k": 1, "n": 2, "bias": True, "steps": 2, "clipping": "norm"}
    drawn = case(TENSORWISE, sharding, 317, backend="real", **sizes)
    judged = Judge(RECIPES, load_ledger()).judge(drawn)
    assert not judged.causes
    assert {v.explained_by for v in judged.known} == {"float8-styles-bias-gradient"}
    assert "S2" in broken(judge().judge(drawn))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_sum_of_codes_over_ranks_is_known_and_hides_no_other_sum(microbatches: int) -> None:
    sharding = {"data": 2, "tensor": 1, "narrow_styles": True}
    sizes = {"m": 32, "k": 32, "n": 32, "bias": True, "microbatches": microbatches}
    drawn = case(TENSORWISE, sharding, backend="emulated", **sizes)

    def of_bias() -> set[str]:
        verdicts = (*(j := judge_known().judge(drawn)).verdicts, *j.known)
        named = (v for v in verdicts if v.rule == "S2" and "bias" in v.at.name)
        return {v.status for v in named} & {"diverged", "known"}

    assert of_bias() == {"known"}
    for fault in ("fsdp-sum-for-mean", "fsdp-last-rank-lost"):
        with planted("", fault):
            assert of_bias() == {"diverged"}


def judge_known() -> Judge:
    return Judge(RECIPES, load_ledger())


def test_shards_of_their_own_scales_are_known_where_one_contains_nan() -> None:
    spike = Spike("weight", row=69, col=195, bits="0x7fc00000")
    drawn = case(
        TENSORWISE, {"data": 1, "tensor": 2, "gathers": "codes"}, 5032992, m=1, k=2, n=2,
        backend="emulated", spikes=(spike,),
    )  # fmt: skip
    judged = Judge(RECIPES, load_ledger()).judge(drawn)
    assert not judged.causes
    assert {v.explained_by for v in judged.known} == {"float8-gather-scale-of-shard"}


def test_the_layout_on_which_a_training_resumes_may_cut_blocks() -> None:
    sharding = {"data": 4, "resumes": "swapped"}
    drawn = case("torchao.mxfp8.ceil", sharding, m=128, k=32, n=64, backend="linear", steps=2)
    assert [(piece.m, piece.k, piece.n) for piece in linear_specs_on_ranks(drawn.spec)] == [
        (32, 32, 64), (128, 32, 64), (128, 8, 64), (128, 32, 16),
    ]  # fmt: skip
    assert not judge().judge(drawn).causes


def test_it_may_give_each_rank_fewer_rows_than_a_block() -> None:
    """Whose gradients MXFP8 refuses, as in one process."""
    sharding = {"tensor": 2, "resumes": "swapped"}
    drawn = case("torchao.mxfp8.floor", sharding, m=32, k=64, n=64, backend="linear", steps=2)
    pieces = linear_specs_on_ranks(drawn.spec)
    assert {piece.m for piece in pieces} == {32, 16}
    assert not judge().judge(drawn).causes


def test_all_ranks_skip_what_one_of_them_finds_infinite() -> None:
    drawn = case("torch.bf16", {"data": 2}, **SCALED)
    judged = judge().judge(drawn)
    assert ("S14", "ok") in {(v.rule, v.status) for v in judged.verdicts} and not judged.causes
    (ranks,) = (t.ranks for arm, t in judge().run_arms(drawn).items() if arm == "sharded")
    assert [float(t.outputs["loss_scale"]) for t in ranks] == [256.0, 256.0]


#: Large enough that the last stage's gradients overflow, and not the first one's; and infinite.
OVERFLOWS = ("", "0x7f7fffff", "0x7f800000")


@pytest.mark.parametrize(
    "sharding",
    [
        {"data": 2},
        {"data": 3},
        {"data": 4, "reduces_fp32": True},
        {"data": 2, "averages": False},
        {"data": 4, "replicas": 2},
    ],
    ids=str,
)
@pytest.mark.one_in(4)
def test_gradients_add_up_over_microbatches(sharding: dict[str, Any]) -> None:
    for recipe, dtype in (("torch.fp32", "fp32"), ("torchao.float8.rowwise", "bf16")):
        for how in ({"microbatches": 3}, {"microbatches": 2, "steps": 2, "optimizer": "adamw"}):
            judged = judge().judge(case(recipe, sharding, dtype=dtype, **how))
            assert not judged.causes
            assert ("S2", "ok") in {(v.rule, v.status) for v in judged.verdicts}


@pytest.mark.parametrize("bits", OVERFLOWS)
@pytest.mark.parametrize(
    ("optimizer", "clipping"), [("adamw", "none"), ("adamw", "value"), ("sgd_fused", "value")]
)
@pytest.mark.one_in(3)
def test_the_stages_of_a_pipeline_skip_what_one_of_them_finds_infinite(
    optimizer: str, clipping: str, bits: str
) -> None:
    spikes = (Spike("grad_output", 0, 3, bits),) if bits else ()
    how = {"steps": 2, "microbatches": 2, "loss_scaling": "grad_scaler"}
    sharding = {"stages": 2, "schedule": "1f1b"}
    how |= {"dtype": "fp32", "m": 32, "k": 32, "n": 32, "clipping": clipping}
    drawn = case("torch.fp32", sharding, 5, optimizer=optimizer, spikes=spikes, **how)
    judged = Judge(RECIPES, load_ledger()).judge(drawn)
    found = {(v.rule, v.status) for v in judged.verdicts}
    assert not judged.causes and ("S14", "ok") in found
    both = optimizer == "sgd_fused" and bits == OVERFLOWS[2]
    known = {v.explained_by for v in judged.known}
    assert known == ({"fused-step-two-infinities"} if both else set())
    assert ("S12", "known" if both else "ok") in found


def test_a_replicated_gradient_in_front_decides_for_its_rank_alone() -> None:
    """grad-scaler-first-layout: of a norm and a linear behind it the norm's weight comes first."""
    spike = Spike("grad_output", row=204, col=41, bits="0x7f7f0000")
    shown = case(
        "torch.fp32", {"tensor": 4, "sequence": True, "local_output": False}, dtype="fp32",
        model="layernorm_linear", **{**SCALED, "spikes": (spike,)},
    )  # fmt: skip
    data = msgspec.structs.replace(shown.data, weight_exponent=-9)  # the norm's gradient is finite
    judged = Judge(RECIPES, load_ledger()).judge(msgspec.structs.replace(shown, data=data))
    assert not judged.causes
    assert {v.explained_by for v in judged.known} == {"grad-scaler-first-layout"}


#: A fault, where it shows, and the rules that may be the first to see it.
FAULTS: tuple[tuple[str, str, dict[str, Any], dict[str, Any], set[str]], ...] = (
    ("fsdp-mean-divided-twice", "torch.fp32", {"data": 2}, {"dtype": "fp32"}, {"S2"}),
    ("fsdp-sum-for-mean", "torch.bf16", {"data": 2}, {}, {"S2"}),
    ("fsdp-last-rank-lost", "torch.bf16", {"data": 3}, {}, {"S2"}),
    ("fsdp-uneven-shards-shifted", "torch.bf16", {"data": 3}, {}, {"S2"}),
    (
        "fsdp-reduces-in-bf16", "torch.fp32", {"data": 2, "reduces_fp32": True},
        {"dtype": "fp32"}, {"S2"},
    ),
    (
        "fsdp-keeps-last-backward", "torch.bf16", {"data": 2}, {"microbatches": 2}, {"S2"},
    ),
    ("fsdp-gathers-once", "torch.bf16", {"data": 1}, {"steps": 2}, {"S1"}),
    ("fsdp-gathers-once", "torch.bf16", {"data": 2, "tensor": 2}, {"steps": 2}, {"S16"}),
    ("norm-of-local-shards", "torch.bf16", {"data": 2}, {}, {"S4", "S6"}),
    (
        "norm-of-local-shards", "torch.bf16", {"data": 2},
        {"steps": 2, "clipping": "norm"}, {"S4", "O26"},
    ),
    (
        "bias-added-by-every-rank", "torch.bf16", {"tensor": 2, "style": "rowwise"},
        {"bias": True}, {"S5"},
    ),
    ("input-gradient-not-added", "torch.bf16", {"tensor": 2}, {}, {"S5"}),
    ("rank-makes-nan", "torch.fp32", {"data": 2}, {}, {"S1"}),
    ("rate-times-ranks", "torch.bf16", {"data": 2}, {"steps": 2, "optimizer": "adamw"}, {"S15"}),
    ("sequence-out-of-order", "torch.bf16", {"tensor": 2, "sequence": True}, {}, {"O5"}),
    (
        "bias-gradient-of-one-rank", "torch.bf16", {"tensor": 2, "style": "rowwise"},
        {"bias": True}, {"O16", "S4"},
    ),
    ("float8-amax-of-local-shard", TENSORWISE, {"tensor": 2}, {}, {"S3"}),
    ("rowwise-amax-of-local-shard", "torchao.float8.rowwise", {"tensor": 2}, {}, {"S3"}),
    ("fsdp-amax-not-reduced", TENSORWISE, {"data": 2, "gathers": "codes"}, {}, {"S3"}),
    (
        "precomputed-scale-stale", TENSORWISE, {"data": 2, "gathers": "precomputed"},
        {"steps": 3, "optimizer": "adamw"}, {"S8"},
    ),
    ("float8-lost-by-tensor-parallel", TENSORWISE, {"tensor": 2}, {}, {"S7"}),
    (
        "idle-rank-leaves-collective", TENSORWISE, {"data": 2, "gathers": "codes"}, {"seed": 4},
        {"contract", "S3"},
    ),
    ("graphs-of-other-ranks", "torch.bf16", {"data": 2}, {"compile": "aot_eager"}, {"S9"}),
    (
        "graphs-of-other-ranks", "torch.bf16", {"stages": 2},
        {"compile": "aot_eager", "microbatches": 2}, {"S9"},
    ),
    (
        "checkpoint-swaps-kept", "torch.bf16", {"stages": 2},
        {"checkpoint": "selective", "microbatches": 2, "model": "llama_block"}, {"S12"},
    ),
    (
        "pipeline-microbatches-reversed", "torch.bf16", {"stages": 2, "schedule": "gpipe"},
        {"microbatches": 2}, {"S12"},
    ),
    (
        "pipeline-gradients-averaged", TENSORWISE, {"stages": 2}, {"microbatches": 2}, {"S12"},
    ),
    (
        "collective-not-waited-for", "torch.bf16",
        {"tensor": 2, "style": "rowwise", "sequence": True, "processes": True}, {}, {"S10"},
    ),
    (
        "resharded-a-row-off", "torch.bf16", {"data": 3, "resumes": "fewer"}, {"steps": 2},
        {"S11"},
    ),
    (
        "second-moment-not-loaded", "torch.bf16", {"data": 2, "resumes": "alone"},
        {"steps": 2, "optimizer": "adamw"}, {"S11"},
    ),
    ("gemm-loses-element", TENSORWISE, {"tensor": 2, "style": "rowwise"}, {}, {"O15"}),
    (
        "scaler-of-own-shards", "torch.fp32", {"stages": 2, "schedule": "1f1b"},
        {
            "steps": 2, "microbatches": 2, "loss_scaling": "grad_scaler", "dtype": "fp32", "m": 32,
            "k": 32, "n": 32, "spikes": (Spike("grad_output", 0, 3, "0x7f7fffff"),),
        },
        {"S14"},
    ),
    ("scaler-of-own-shards", "torch.bf16", {"data": 2}, SCALED, {"S14"}),
)  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("fault", "recipe", "sharding", "fields", "rules"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_a_fault_is_seen(
    fault: str, recipe: str, sharding: dict[str, Any], fields: dict[str, Any], rules: set[str]
) -> None:
    with planted("", fault):
        judged = judge().judge(case(recipe, sharding, **fields))
    assert broken(judged) & rules, [str(v.sentence()) for v in judged.causes]
    assert not judge().judge(case(recipe, sharding, **fields)).causes


SCRIPTED = {
    "checkpoint-swaps-kept", "collective-not-waited-for", "float8-amax-of-local-shard",
    "float8-lost-by-tensor-parallel", "fsdp-mean-divided-twice", "graphs-of-other-ranks",
    "input-gradient-not-added", "norm-of-local-shards", "pipeline-gradients-averaged",
    "pipeline-microbatches-reversed", "precomputed-scale-stale", "scaler-of-own-shards",
}  # fmt: skip


@pytest.mark.one_in(22)
@pytest.mark.parametrize(
    ("name", "recipe", "sharding", "fields", "rules"),
    [fault for fault in FAULTS if fault[0] in SCRIPTED],
)
def test_a_script_shows_it(
    name: str,
    recipe: str,
    sharding: dict[str, Any],
    fields: dict[str, Any],
    rules: set[str],
    tmp_path: Path,
    scripts: RunScript,
) -> None:
    shown = case(recipe, sharding, **fields)
    path = script_on_ranks(shown, name, RECIPES[recipe], tmp_path)
    assert_shows(scripts, path, ("", name))


def test_every_rule_of_ranks_has_a_fault() -> None:
    of_pipeline, on_mesh = (case("torch.bf16", own).spec for own in ({"stages": 2}, {"data": 2}))
    assert {*rules_of(of_pipeline), *rules_of(on_mesh)} == set().union(
        *(fault[4] for fault in FAULTS)
    )


def test_a_case_on_ranks_survives_its_file() -> None:
    drawn = case(TENSORWISE, {"data": 2, "gathers": "codes"})
    assert load_case(dump_case(drawn)) == drawn


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sharding": Sharding(data=4, tensor=2)}, "at most 4"),
        ({"sharding": Sharding(tensor=2), "model": "attention"}, "shares no linears"),
        ({"sharding": Sharding(data=2), "model": "dropout"}, "random|other numbers"),
        ({"sharding": Sharding(data=2), "compile": "inductor"}, "aot_eager"),
        ({"sharding": Sharding(data=2), "m": 33}, "evenly"),
        ({"sharding": Sharding(data=2, gathers="codes")}, "communicates no codes"),
        ({"sharding": Sharding(style="rowwise")}, "has no ranks"),
        ({"sharding": Sharding(stages=2, data=2)}, "no other way"),
        ({"sharding": Sharding(stages=2)}, "needs a microbatch for each"),
        (
            {"sharding": Sharding(stages=2), "microbatches": 2, "checkpoint": "reentrant"},
            "reentrant checkpoint refuses",
        ),
        ({"sharding": Sharding(stages=2, schedule="gpipe"), "n": 48}, "evenly"),
        ({"sharding": Sharding(stages=2, schedule="gpipe"), "model": "dropout"}, "follow on"),
        ({"sharding": Sharding(data=2, resumes="same")}, "2 or more"),
        ({"sharding": Sharding(data=1, resumes="fewer"), "steps": 2}, "fewer"),
        (
            {"sharding": Sharding(data=2, resumes="swapped"), "steps": 2, "model": "attention"},
            "alike",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    spec = msgspec.structs.replace(Spec(recipe="torch.bf16"), **changes)
    with pytest.raises(ValueError, match=says):
        RECIPES["torch.bf16"].check(spec)
