"""Every rule catches a planted fault by itself and leaves the same cases alone without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.kind import LINEAR
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe.recipe import load_recipes, obstacles
from narrowfuzz.rules import BY_NAME, RULES
from narrowfuzz.trace.verdict import BAD, Verdict, fingerprint

prepare()
settle()

ROWWISE = "torchao.float8.rowwise"
TENSORWISE = "torchao.float8.tensorwise"
NAN = Spike("input", 3, 5, "0x7fc00000")


@dataclass(frozen=True)
class Hunt:
    """One rule, one fault, and where to look."""

    rule: str
    fault: str
    recipe: str = ROWWISE
    spec: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    #: Rungs to climb, where all of them would take minutes.
    arms: frozenset[str] | None = None

    def __str__(self) -> str:
        named = [
            self.rule,
            self.fault,
            self.recipe,
            *map(str, filter(None, [self.spec, self.data])),
        ]
        return " ".join(named)


#: K is recomputed through RMSNorm; that takes a block, not an attention alone.
BLOCK: dict[str, Any] = {
    "model": "llama_block", "m": 32, "k": 64, "n": 64, "heads": 2,
    "checkpoint": "selective", "compile": "inductor", "backend": "real", "dtype": "bf16",
}  # fmt: skip
#: A model in which biases and norms are summed up.
FLASH: dict[str, Any] = {"model": "attention", "attention": "flash", "heads": 2}
MINED = {"values": "mined"}
EMBEDDING: dict[str, Any] = {"model": "tied_embedding"}
NORM: dict[str, Any] = {"model": "layernorm_linear"}
SUMS: dict[str, Any] = {"model": "llama_block", "heads": 2, "bias": True}
GRADIENTS = {"regime": "ladder", "gemm": "grad_weight"}
DRIFTING = frozenset({"inductor+checkpoint_selective"})

EVALUATED, BACK = Forward(mode="eval"), Backward(of=(0,))
RELOADED = (Forward(), BACK, Step(), Reload(), Forward(), Backward(of=(1,)), Step())
WAITING = (Forward(), Forward(), BACK, Backward(of=(1,)), Step())
AGAIN = (Forward(), Backward(of=(0,), retain=True), BACK, Step())

HUNTS = [
    Hunt("contract", "backward-unsupported"),
    Hunt("contract", "bias-forgotten", spec={"bias": True}),
    Hunt("census", "conversion-does-nothing"),
    Hunt("census", "conversion-does-nothing", recipe=TENSORWISE),
    Hunt("census", "conversion-freezes"),
    Hunt("O1", "gemm-races"),
    Hunt("O1", "gemm-rows-unwritten", recipe="torch.scaled_mm"),
    Hunt("O2", "cast-truncates"),
    Hunt("O2", "cast-rounds-upwards", recipe=TENSORWISE),
    Hunt("O2", "cast-truncates", recipe="torchao.float8.rowwise_gw_hp"),
    Hunt("O3", "scale-doubled"),
    Hunt("O3", "scale-through-bf16", recipe=TENSORWISE),
    Hunt("O3", "mx-scale-byte-plus-one", recipe="torchao.mxfp8.rceil"),
    Hunt("O3", "mx-scale-byte-plus-one", recipe="torchao.mxfp8.even"),
    Hunt("O3", "mx-scale-byte-plus-one", recipe="torchao.mxfp8.rceil_wgrad_with_hp"),
    Hunt("O4", "amax-ignores-negatives"),
    Hunt("O5", "gemm-gain"),
    Hunt("O5", "bias-forgotten", spec={"bias": True}),
    Hunt("O6", "layer-gain"),
    Hunt("O7", "gemm-narrow-accumulator", data={"regime": "lattice"}),
    Hunt("O8", "compiled-scale-through-bf16", recipe=TENSORWISE, spec={"compile": "aot_eager"}),
    Hunt(
        "O9",
        "compiled-norm-in-bf16",
        recipe="torch.fp32",
        spec={"model": "rmsnorm_linear", "compile": "aot_eager"},
    ),
    Hunt("O10", "gemm-overflows"),
    Hunt("O11", "cast-swallows-nan", data={"values": "inf_nan", "spikes": (NAN,)}),
    Hunt("O12", "recompute-drifts", spec={"checkpoint": "full"}),
    Hunt("O12", "recompute-drifts", spec={"checkpoint": "reentrant"}),
    Hunt("O12", "recompute-unquantised", spec={"model": "mlp_swiglu", "checkpoint": "reentrant"}),
    Hunt(
        "O12",
        "recompute-unquantised",
        spec={"model": "mlp_swiglu", "checkpoint": "reentrant", "input_layout": "transposed"},
    ),
    Hunt("O13", "recompute-drifts", spec={"checkpoint": "full"}),
    Hunt("O13", "recompute-unquantised", spec={"model": "mlp_swiglu", "checkpoint": "reentrant"}),
    Hunt("O13", "inductor-backward-drift", spec=BLOCK, arms=DRIFTING),
    Hunt("O15", "gemm-loses-element"),
    Hunt("O16", "bias-gradient-loses-row", spec={"bias": True}),
    Hunt("O18", "attention-keys-move", recipe="torch.bf16", spec={"model": "attention"}),
    Hunt("O18", "inductor-backward-drift", spec=BLOCK, arms=DRIFTING),
    Hunt("O21", "tied-gradient-doubled", spec={"model": "used_twice"}),
    Hunt("O21", "tied-gradient-doubled", recipe="torchao.mxfp8.even", spec={"model": "used_twice"}),
    Hunt("O21", "gradient-accumulated-twice", recipe="torch.bf16", spec={"microbatches": 2}),
    *(
        Hunt(
            "O22",
            "checkpoint-forgets-generator",
            recipe="torch.fp32",
            spec={"model": "dropout", "checkpoint": how},
        )
        for how in ("full", "reentrant")
    ),
    Hunt("O23", "gemm-narrow-accumulator", data={"regime": "ladder"}),
    Hunt("O23", "gemm-narrow-accumulator", recipe=TENSORWISE, data=GRADIENTS),
    Hunt("R1", "input-flushed"),
    Hunt("R2", "gradient-flushed"),
    Hunt("R3", "weight-flushed"),
    Hunt("R4", "cast-rounds-upwards"),
    Hunt("R5", "row-tail-scale"),
    Hunt("R5", "row-tail-scale", data={"regime": "lattice"}),
    Hunt("R5", "mx-block-leaks-rows", recipe="torchao.mxfp8.floor"),
    Hunt("R6", "column-tail-scale"),
    Hunt("R7", "k-tail-dropped"),
    Hunt("R7", "k-tail-dropped", recipe=TENSORWISE, data={"regime": "lattice"}),
    Hunt("R8", "k-odd-blocks"),
    Hunt("R8", "k-odd-blocks", data={"regime": "lattice"}),
    Hunt("R9", "rows-ragged"),
    Hunt("R10", "tokens-ragged", data={"regime": "lattice"}),
    Hunt("R11", "weight-flushed"),
    Hunt("R12", "cast-shrinks"),
    Hunt("R13", "cast-swaps-codes"),
    Hunt("R14", "cast-sees-neighbours"),
    Hunt("R15", "mx-block-leaks-rows", recipe="torchao.mxfp8.floor"),
    Hunt("R16", "strides-ignored", spec={"input_layout": "transposed"}),
    Hunt("R16", "weight-strides-ignored", spec={"weight_layout": "strided"}),
    Hunt("R17", "batched-gain", spec={"batch": 2}),
    Hunt("R18", "cache-unfilled"),
    Hunt("R19", "bias-forgotten", spec={"bias": True}),
    Hunt("R20", "state-half-loaded"),
    Hunt("O25", "sum-in-narrow-dtype", recipe="torch.bf16", spec=SUMS),
    Hunt("O25", "sum-drops-last-row", recipe="torch.fp32", spec={**SUMS, "m": 33}),
    Hunt("O25", "layer-norm-gradient-drops-rows", recipe="torch.fp32", spec={**NORM, "m": 37}),
    Hunt("O25", "layer-norm-counts-padding", recipe="torch.fp32", spec={**NORM, "k": 48}),
    Hunt("O25", "embedding-gradient-loses-repeats", recipe="torch.fp32", spec=EMBEDDING),
    Hunt("O25", "attention-rows-exchanged", recipe="torch.bf16", spec=FLASH),
    Hunt(
        "O25",
        "attention-maximum-from-sentinel",
        recipe="torch.fp32",
        spec=FLASH,
        data={"input_exponent": 14},
    ),
    Hunt("O25", "attention-delta-of-previous-row", recipe="torch.fp32", spec=FLASH),
    Hunt("O25", "attention-query-gradient-grows", recipe="torch.bf16", data=MINED, spec=FLASH),
    Hunt("O25", "attention-statistics-read-packed", recipe="torch.fp32", spec=FLASH),
    Hunt(
        "O25",
        "chunked-loss-maximum-of-chunk",
        recipe="torch.fp32",
        spec={"model": "linear_cross_entropy"},
        data={"input_exponent": 8},
    ),
    *(
        Hunt("O25", fault, recipe=recipe, spec={"model": model, **more})
        for fault, recipe, model, more in (
            ("layer-norm-bias-gradient-in-fp16", "torch.fp32", "layer_norm", {}),
            ("layer-norm-epsilon-outside-root", "torch.fp32", "layer_norm", {}),
            ("layer-norm-gradient-uncentred", "torch.fp32", "layer_norm", {}),
            ("embedding-gradient-overwrites", "torch.fp32", "embedding", {"n": 4}),
            ("embedding-id-zero-is-padding", "torch.fp32", "embedding", {"n": 4}),
            ("embedding-gradient-by-frequency", "torch.fp32", "embedding", {"n": 4}),
            ("embedding-last-row-unwritten", "torch.fp32", "embedding", {"n": 17}),
            ("loss-mean-counts-ignored", "torch.fp32", "cross_entropy", {}),
            ("loss-gradient-of-ignored-rows", "torch.fp32", "cross_entropy", {}),
            ("loss-gradient-not-divided", "torch.fp32", "cross_entropy", {}),
            ("log-softmax-gradient-sums-in-fp16", "torch.fp32", "log_softmax", {}),
            ("softmax-gradient-of-row-before", "torch.bf16", "softmax", {}),
            ("addmm-bias-of-columns", "torch.fp32", "addmm", {"m": 16, "n": 16}),
            ("mm-repeats-row", "torch.bf16", "mm", {"m": 33}),
            ("bmm-drops-ragged-tail", "torch.fp32", "bmm", {"k": 60, "heads": 4}),
            ("bmm-sums-in-bf16", "torch.fp32", "bmm", {"k": 64}),
            ("bmm-of-matrix-before", "torch.bf16", "bmm", {"k": 64, "heads": 4}),
            ("grouped-mm-full-tile-loses-row", "torch.fp32", "grouped_uneven", {"m": 33, "n": 4}),
            ("grouped-mm-tile-of-expert-before", "torch.bf16", "grouped_uneven", {"m": 33, "n": 4}),
            ("grouped-mm-empty-group-unwritten", "torch.fp32", "grouped_uneven", {"m": 33, "n": 4}),
            ("grouped-mm-gradient-reads-tail", "torch.bf16", "grouped_tail", {"m": 33, "n": 4}),
            ("grouped-mm-gradient-sums-in-bf16", "torch.fp32", "grouped_last", {"m": 64}),
            ("grouped-mm-drops-ragged-tail", "torch.fp32", "grouped_uneven", {"k": 40, "n": 4}),
            ("mx-groups-scales-of-first-expert", "torch.bf16", "mxfp8_grouped_rceil", {"m": 96}),
            ("mx-groups-weight-quantised-twice", "torch.bf16", "mxfp8_grouped_floor", {"m": 96}),
            (
                "mx-groups-gradient-scale-of-block-before",
                "torch.fp32",
                "mxfp8_grouped_rceil",
                {"m": 96},
            ),
            ("mx-groups-padding-returned", "torch.bf16", "mxfp8_grouped_padded", {"m": 96}),
            ("topk-misses-last", "torch.fp32", "topk", {"k": 33, "n": 4}),
            ("topk-names-first-twice", "torch.bf16", "topk", {"m": 64, "k": 256, "n": 64}),
            ("sort-reverses-equal", "torch.bf16", "sort", {"m": 64, "k": 256}),
            ("index-put-adds-first-alone", "torch.fp32", "indexed", {"n": 4}),
            ("index-add-drops-ragged-tail", "torch.bf16", "index_add", {"m": 37, "n": 4}),
            ("scatter-add-starts-again", "torch.fp32", "scatter_add_flat", {"n": 4}),
            ("gelu-always-approximated", "torch.fp32", "gelu", {}),
            ("silu-gradient-of-gate-alone", "torch.bf16", "silu", {}),
            ("tanh-gradient-of-bf16", "torch.fp32", "softcap", {}),
            ("sigmoid-in-bf16", "torch.fp32", "sigmoid", {}),
            ("logsumexp-drops-ragged-classes", "torch.bf16", "z_loss", {"k": 37}),
            ("power-by-logarithm", "torch.fp32", "rms_norm_by_hand", {}),
            ("mean-counts-padding", "torch.bf16", "rms_norm_by_hand", {"k": 40}),
            ("rms-norm-epsilon-outside-root", "torch.fp32", "rms_norm", {}),
            ("rms-norm-mean-of-padding", "torch.bf16", "rms_norm", {"k": 48}),
            ("rms-norm-factor-constant-in-backward", "torch.fp32", "rms_norm", {}),
            ("smoothing-spread-over-others", "torch.fp32", "cross_entropy_smoothed", {}),
            ("smoothing-counts-ignored-rows", "torch.bf16", "cross_entropy_smoothed", {}),
            ("chunked-loss-drops-last-chunk", "torch.fp32", "linear_cross_entropy", {"m": 33}),
            (
                "adam-correction-lags",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "adamw", "steps": 2},
            ),
            (
                "adamw-decay-in-gradient",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "adamw", "steps": 2},
            ),
            (
                "adam-betas-exchanged",
                "torch.bf16",
                "scale_and_shift",
                {"optimizer": "adam_fused", "steps": 2},
            ),
            (
                "adam-epsilon-of-fp16",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "adamw", "steps": 2},
            ),
            (
                "sgd-decay-lost-in-narrow-dtypes",
                "torch.bf16",
                "scale_and_shift",
                {"optimizer": "sgd_momentum", "steps": 2},
            ),
            (
                "sgd-dampening-ignored",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "sgd_momentum", "steps": 3},
            ),
            (
                "fused-step-leaves-last-parameter",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "adamw_fused", "steps": 2},
            ),
            (
                "adagrad-rate-decays-early",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "adagrad", "steps": 2},
            ),
            (
                "adagrad-decay-apart",
                "torch.fp32",
                "scale_and_shift",
                {"optimizer": "adagrad_foreach", "steps": 2},
            ),
            ("norm-drops-tail", "torch.bf16", "scaled_by_norm", {"k": 20}),
            (
                "muon-without-iteration",
                "torch.fp32",
                "step_muon",
                {"optimizer": "muon", "steps": 2},
            ),
            (
                "muon-rate-of-transposed",
                "torch.fp32",
                "step_muon",
                {"optimizer": "muon", "n": 512, "steps": 2},
            ),
        )
    ),
    Hunt(
        "O25",
        "log-softmax-overflows",
        recipe="torch.fp32",
        spec={"model": "log_softmax"},
        data={"input_exponent": 10},
    ),
    Hunt(
        "O25",
        "logsumexp-without-maximum",
        recipe="torch.fp32",
        spec={"model": "z_loss"},
        data={"input_exponent": 10},
    ),
    Hunt(
        "O25",
        "unscale-passes-infinity",
        recipe="torch.fp32",
        spec={"model": "unscaled_gradient"},
        data={"spikes": (Spike("input", 3, 5, "0x7f800000"),)},
    ),
    Hunt(
        "O25",
        "flex-loses-ragged-key",
        recipe="torch.fp32",
        spec={"model": "flex_attention", "n": 33, "grad_mode": "no_grad"},
    ),
    Hunt(
        "O25",
        "flex-shared-heads-in-turn",
        recipe="torch.fp32",
        spec={"model": "flex_grouped", "k": 64, "heads": 4, "grad_mode": "no_grad"},
    ),
    Hunt("R21", "cast-truncates"),
    Hunt("R22", "transposed-copy-garbled"),
    Hunt("R23", "gradient-accumulated-twice", spec={"microbatches": 2}),
    Hunt("R23", "gradient-accumulated-twice", recipe="torch.bf16", spec={"microbatches": 3}),
    Hunt("R24", "evaluation-sticks", spec={"events": (EVALUATED, Forward(), Backward(of=(1,)))}),
    Hunt("R25", "saved-in-bf16", spec={"dtype": "fp32", "events": RELOADED}),
    Hunt("R26", "newest-input-kept", spec={"events": WAITING}),
    Hunt("R27", "backward-adds-up", spec={"events": AGAIN}),
    Hunt(
        "R28",
        "attention-padding-shows-through",
        recipe="torch.fp32",
        spec={"model": "sdpa_padding"},
    ),
    Hunt(
        "R29",
        "scaler-steps-anyway",
        recipe="torch.fp32",
        spec={"steps": 2, "loss_scaling": "grad_scaler"},
        data={"spikes": (Spike("grad_output", 3, 5, "0x7f800000"),)},
    ),
    Hunt(
        "R29",
        "fused-step-ignores-infinity",
        recipe="torch.bf16",
        spec={"steps": 2, "loss_scaling": "grad_scaler", "optimizer": "adamw_fused"},
        data={"spikes": (Spike("grad_output", 3, 5, "0x7f800000"),)},
    ),
    Hunt(
        "O26",
        "clips-what-is-scaled",
        recipe="torch.fp32",
        spec={"steps": 2, "loss_scaling": "grad_scaler", "clipping": "norm"},
    ),
    Hunt(
        "O26",
        "clipping-grows-gradients",
        recipe="torch.bf16",
        spec={"steps": 2, "clipping": "norm_inf"},
        data={"grad_exponent": -9},
    ),
    Hunt(
        "O26",
        "clipped-by-part-of-the-norm",
        recipe="torch.fp32",
        spec={"steps": 2, "clipping": "norm", "bias": True},
    ),
]


#: Inductor takes its time.
PARAMS = [
    pytest.param(hunt, marks=pytest.mark.heavy if hunt.arms else (), id=f"{hunt.rule}-{hunt.fault}")
    for hunt in HUNTS
]


_recipes = cache(load_recipes)


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    return _recipes()


def cases(hunt: Hunt) -> list[Case]:
    """A few draws, over both dtypes and the recipe's two backends unless the hunt names one."""
    recipe = _recipes()[hunt.recipe]
    lacking = obstacles(recipe, "cpu")
    several = recipe.backends[: 1 if "mxfp8" in hunt.recipe else 2]
    backends = [backend for backend in several if backend not in lacking]
    if not backends:
        pytest.skip(lacking[several[0]])
    specs = [
        Spec(**{"m": 32, "k": 64, "n": 32, "dtype": dtype, "backend": backend, **hunt.spec},
             recipe=hunt.recipe)
        for dtype in ("bf16", "fp32") if dtype in recipe.dtypes
        for backend in backends
    ]  # fmt: skip
    return [
        Case(spec=spec, data=DataSpec(seed=seed, **hunt.data))
        for spec in dict.fromkeys(specs)
        for seed in range(3)
    ]


def bad_verdicts(judge: Judge, hunt: Hunt) -> Iterator[Verdict]:
    """One after the other: whoever wants one need not wait for all."""
    rule = BY_NAME[hunt.rule]
    for case in cases(hunt):
        for verdict in judge.judge(case, [rule]).verdicts:
            if verdict.status in BAD and verdict.rule == hunt.rule:
                yield verdict


#: The fingerprint that each hunt finds first: findings and ledger entries name them.
FROZEN = json.loads((Path(__file__).parent / "fingerprints.json").read_text())


@pytest.mark.parametrize("hunt", PARAMS)
def test_a_rule_catches_its_fault_alone(hunt: Hunt, recipes: dict[str, Any]) -> None:
    assert first_fingerprint(hunt, recipes) == FROZEN[str(hunt)]


def first_fingerprint(hunt: Hunt, recipes: dict[str, Any]) -> str:
    judge = Judge(recipes, Ledger([]), arms=hunt.arms)
    with builtin_faults()[hunt.fault].plant():
        verdict = next(bad_verdicts(judge, hunt))
    return fingerprint(verdict, recipes[hunt.recipe].family)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hunt", PARAMS)
def test_a_rule_judges_the_clean_library_and_stays_silent(
    hunt: Hunt, recipes: dict[str, Any]
) -> None:
    judge = Judge(recipes, Ledger([]), arms=hunt.arms)
    judged = 0
    for case in cases(hunt):
        verdicts = judge.judge(case, [BY_NAME[hunt.rule]]).verdicts
        assert not [v.sentence() for v in verdicts if v.status in BAD]
        judged += sum(v.status == "ok" for v in verdicts)
    assert judged, "a rule that never applies proves nothing"


def test_every_rule_has_a_fault() -> None:
    of_users = {"O24"}  # tests/own_models: what is wrong there is wrong in a user's file
    every = {rule.name for rule in RULES if LINEAR in rule.cases}
    assert {hunt.rule for hunt in HUNTS} | of_users == every


def test_every_fault_is_hunted_or_ends_the_process() -> None:
    hunted = {hunt.fault for hunt in HUNTS}
    # tests/rules/test_census.py, tests/triage/test_history.py
    elsewhere = {"kernel-aborts", "device-lost", "eps-too-large", "codes-of-dead-weights"}
    elsewhere |= {id for id, fault in builtin_faults().items() if fault.needs == "a model"}
    of_schedules = {
        id
        for id, fault in builtin_faults().items()
        if all(glob.startswith(("te.", "reference.")) for glob in fault.recipes)
    }
    drawn = set(json.loads((Path(__file__).parents[1] / "fault_cases.json").read_text()))
    # tests/simulated_checks.py
    of_devices = {id for id, fault in builtin_faults().items() if fault.device}
    # tests/rules/test_sharded.py, tests/rules/test_context.py
    of_ranks = {
        id
        for id, fault in builtin_faults().items()
        if any(glob.startswith("sharded") for glob in fault.arms)
    }
    left = set(builtin_faults()) - hunted - of_schedules - of_devices - of_ranks - drawn
    assert left == elsewhere - hunted  # tests/plants


def test_a_fault_is_gone_after_its_context(recipes: dict[str, Any]) -> None:
    hunt = Hunt("O5", "gemm-gain")
    with builtin_faults()["gemm-gain"].plant():
        pass
    assert not list(bad_verdicts(Judge(recipes, Ledger([])), hunt))


def all_causes(judge: Judge, hunts: Sequence[Hunt]) -> list[set[str]]:
    return [{v.rule for c in cases(h) for v in judge.judge(c).causes} for h in hunts]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("scale-doubled", {"O3"}), ("cast-truncates", {"O2"}), ("amax-ignores-negatives", {"O4"})],
)
def test_consequences_fold_under_the_first_cause(
    fault: str, cause: set[str], recipes: dict[str, Any]
) -> None:
    """One wrong scale byte is one finding, although a dozen rules see it."""
    with builtin_faults()[fault].plant():
        judge = Judge(recipes, Ledger([]))
        assert all_causes(judge, [Hunt("O2", fault)]) == [cause]


if __name__ == "__main__":  # writes the fingerprints down afresh
    found = {str(hunt): first_fingerprint(hunt, load_recipes()) for hunt in HUNTS}
    (Path(__file__).parent / "fingerprints.json").write_text(json.dumps(found, indent=1) + "\n")
