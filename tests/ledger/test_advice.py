"""What the ledger says of a configuration: named whether it is met or not, and nothing else is."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fresh import ends
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.arm import COMPILED, Compile
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.advice import applying, of_models
from narrowfuzz.ledger.facts import Fact, may_hold
from narrowfuzz.ledger.ledger import Entry, load_entries
from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.machine.machine import Machine, machine
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import FINITE_MASK, WRITTEN_PRODUCT, Gradients, Model
from narrowfuzz.report.summary import print_applying
from rich.console import Console
from samples import every_recipe

ROWWISE, MX, TE = "torchao.float8.rowwise", "torchao.mxfp8.floor", "te.delayed"


def test_what_is_not_listed_is_counted_and_said_to_be_on_the_page() -> None:
    console = Console(file=io.StringIO(), width=40, soft_wrap=True)
    known = entries(MX, "eager")
    print_applying(console, known, "Known:", "narrowfuzz list known --recipe x")
    assert isinstance(console.file, io.StringIO)
    *listed, last = console.file.getvalue().strip().splitlines()[1:]
    assert [line.split()[0] for line in listed] == [entry.id for entry in known[:6]]
    assert last.startswith(f"  and {len(known) - 6} more: the page of the run lists them")
    assert last.endswith("narrowfuzz list known --recipe x")


def named(recipe: str, arm: str, here: Machine | None = None) -> list[str]:
    return [entry.id for entry in entries(recipe, arm, here)]


def entries(recipe: str, arm: str, here: Machine | None = None) -> list[Entry]:
    recipes = [every_recipe()[recipe]]
    return applying(load_entries(), recipes, [BY_NAME[arm]], here or machine())


def test_the_drift_is_named_where_it_may_show_and_nowhere_else() -> None:
    """torchtitan 1056: rowwise, compiled, selective checkpointing."""
    drift = "inductor-recompute-drift"
    assert drift in named(ROWWISE, "inductor+checkpoint_selective")
    for recipe, arm in (
        (ROWWISE, "inductor"), (ROWWISE, "inductor+checkpoint"),
        (ROWWISE, "eager+checkpoint_selective"), (ROWWISE, "inductor_strict+checkpoint_selective"),
        (MX, "inductor+checkpoint_selective"), (TE, "eager"),
    ):  # fmt: skip
        assert drift not in named(recipe, arm), (recipe, arm)


def test_what_is_known_of_a_recipe_is_known_of_one_that_is_based_on_it() -> None:
    mine = replace(every_recipe()[ROWWISE], name="mine", based_on=ROWWISE)  # type: ignore[type-var]
    arms = [BY_NAME["inductor+checkpoint_selective"]]
    found = {entry.id for entry in applying(load_entries(), [mine], arms, machine())}
    assert "inductor-recompute-drift" in found


def test_the_worst_comes_first() -> None:
    levels = [SEVERITIES.index(e.severity) for e in entries(ROWWISE, "inductor")]
    assert levels == sorted(levels) and len(set(levels)) > 1


@pytest.mark.parametrize("amx", [False, True])
def test_what_a_machine_cannot_show_is_not_named(amx: bool) -> None:
    kernel = "brg_matmul:avx10_1_512_amx" if amx else "brg_matmul:avx2"
    cpu = ("amx_bf16", "amx_int8") if amx else ("avx512",)
    here = replace(machine(), cpu=cpu, kernels={"bf16": kernel})
    assert ("onednn-amx-row-leak" in named("torch.bf16", "eager", here)) is amx


def test_a_fact_that_is_not_known_may_hold() -> None:
    assert may_hold({"m": "odd", "dtype": "bf16"}, {"dtype": "bf16"})
    assert not may_hold({"m": "odd", "dtype": "bf16"}, {"dtype": "fp32"})


def test_what_a_configuration_rules_out_is_not_named() -> None:
    """One that trains without autocast, in bf16, under the whole memory budget."""
    arms = [BY_NAME["inductor+checkpoint_selective"]]
    recipes = [every_recipe()[ROWWISE]]
    mine = {"dtype": "bf16", "memory_budget": 100, "grad_mode": "train", "autocast": False}
    every = {e.id for e in applying(load_entries(), recipes, arms, machine())}
    found = {e.id for e in applying(load_entries(), recipes, arms, machine(), "cpu", mine)}
    assert "inductor-recompute-drift" in found < every
    assert {"rowwise-inference-mode", "sac-autocast-cached-cast"} <= every - found


def test_what_a_model_or_an_eager_training_cannot_show_is_not_named() -> None:
    mesh, bias = "dtensor-graph-of-older-mesh", "mx-wrapper-drops-bias"
    assert mesh in named(MX, "sharded_aot_eager")
    for arm in ("inductor", "sharded", "eager"):  # without ranks, without a compiler, without both
        assert mesh not in named(MX, arm), arm
    for has in (True, False):
        model = replace(MODELS["linear"], fixed={"bias": has})
        facts = of_models((model,))
        found = applying(
            load_entries(), [every_recipe()[MX]], [BY_NAME["eager"]], machine(), "cpu", facts
        )
        assert (bias in [entry.id for entry in found]) is has
    other = replace(MODELS["linear"], fixed={"bias": True})
    plain = {"changes_buffers": False, "second_derivative": False}
    assert of_models((model, other)) == {"model": "linear", **plain}


@pytest.mark.parametrize("called", [{"layer_norm", "layer_norm_backward"}, {"sum"}])
def test_what_is_known_of_an_operator_is_named_where_the_model_calls_it(called: set[str]) -> None:
    plain = replace(MODELS["linear"], fixed={"bias": True})
    model = replace(plain, operators=frozenset(called))
    other = replace(plain, operators=frozenset())
    narrow = {"layer-norm-narrow-sums", "embedding-narrow-sums"}
    shown = {"layer-norm-narrow-sums"} if "layer_norm_backward" in called else set()
    assert _applying((model, other)) & narrow == shown
    assert _applying((model, plain)) >= narrow  # of which it is not known
    assert "fp8-groups-by-rows-stride" not in _applying((model, other)), "nor that of a fingerprint"
    attends = replace(plain, operators=frozenset({"attention", *called}))
    assert "attention-large-mask" in _applying((attends, other)) - _applying((model, other))


@pytest.mark.parametrize("affected", [set(), {"embedding_narrow_sums"}, {"sum_narrow_parts"}])
def test_what_is_known_of_kernels_is_named_where_calls_are_of_that_kind(affected: set[str]) -> None:
    operators = frozenset({"embedding_backward", "sum", "attention"})
    plain = replace(MODELS["linear"], operators=operators)
    model = replace(plain, affected=frozenset(affected))
    every = {"embedding-narrow-sums", "sum-narrow-parts"}
    assert _applying((model,)) & every == {name.replace("_", "-") for name in affected}
    assert _applying((plain,)) >= every  # of which only the operators are known
    assert _applying((model, plain)) >= every
    masked = replace(model, affected=frozenset({FINITE_MASK}))
    assert "attention-large-mask" in _applying((masked,)) - _applying((model,))
    selective, own = "eager+checkpoint_selective", replace(model, name="model.py:build")
    writes = replace(own, affected=frozenset({WRITTEN_PRODUCT}))
    written = _applying((writes,), arm=selective) - _applying((own,), arm=selective)
    assert "sac-unsafe-view-in-place" in written


#: Entry -> recipe and arm with which it may show, and what of a model shows it.
SHOWN_BY = {
    "mxfp8-grouped-hp-fp32": ("torch.fp32", "eager", "grouped_mm"),
    "grouped-mm-compiles-bf16-only": ("torch.fp32", "aot_eager", "grouped_mm"),
    "mx-permute-padding-row": (ROWWISE, "eager", "permuted_rows"),
    "low-bit-state-cannot-be-copied": ("torch.fp32", "eager", "low_bit_adam_step"),
    "float8-attention-output-unquantised": (ROWWISE, "eager", "MultiheadAttention"),
    "lazy-linears": (ROWWISE, "eager", "LazyLinear"),
    "float8-swap-drops-own-forward": (ROWWISE, "eager", "subclass of Linear"),
    "float8-linear-registered-twice": (ROWWISE, "eager", "Linear of several names"),
    "mx-wrapper-unties-weights": ("torchao.mxfp8.rceil", "eager", "tied parameter"),
}


@pytest.mark.parametrize("entry", SHOWN_BY)
def test_what_no_model_without_something_can_show_is_not_named(entry: str) -> None:
    recipe, arm, what = SHOWN_BY[entry]
    plain = replace(MODELS["linear"], operators=frozenset({"mm"}), modules=frozenset({"Linear"}))
    calls = replace(plain, operators=frozenset({"mm", what}))
    holds = replace(plain, modules=frozenset({"Linear", what}))
    assert entry not in _applying((plain,), arm, recipe)
    assert entry in _applying((calls,), arm, recipe) | _applying((holds,), arm, recipe)
    assert entry in _applying((MODELS["linear"],), arm, recipe)  # of which it is not known


@pytest.mark.parametrize(
    ("part", "is_named"), [("Linear with a computed weight", True), ("ParametrizationList", False)]
)
def test_what_computed_weights_show_is_named_where_a_linear_has_one(
    part: str, is_named: bool
) -> None:
    """Convolutions may be parametrized, too, which no recipe converts."""
    modules = frozenset({"Linear", part})
    model = replace(MODELS["linear"], name="mine.py:build", own=True, modules=modules)
    assert ("parametrized-linears" in _applying((model,), recipe=ROWWISE)) is is_named


def test_what_only_other_families_arms_or_backends_show_is_not_named() -> None:
    copied, compiled = "low-bit-state-cannot-be-copied", "grouped-mm-compiles-bf16-only"
    assert copied in named("torch.bf16", "eager") and copied not in named(ROWWISE, "eager")
    assert compiled in named("torch.fp32", "aot_eager")
    assert compiled not in named("torch.fp32", "eager")
    budget = "partitioner-budget-saves-tuple"
    assert budget in named("torch.bf16", "aot_eager+checkpoint_selective")
    assert budget not in named("torch.bf16", "aot_eager+checkpoint")
    triton, mx = "mx-dim1-tiles-outside", every_recipe()[MX]
    assert triton in named(MX, "eager")
    here = replace(mx, backends=("linear", "wrapper"))  # type: ignore[type-var]
    found = applying(load_entries(), [here], [BY_NAME["eager"]], machine())
    assert triton not in {entry.id for entry in found}
    assert "mx-wrapper-drops-bias" in {entry.id for entry in found}


@pytest.mark.parametrize("again", [(), ("model.teacher",), ("model.tokens",)])
def test_what_a_recompute_does_to_buffers_is_named_where_it_changes_one(
    again: tuple[str, ...],
) -> None:
    model = replace(
        MODELS["linear"],
        name="mine.py:build",
        own=True,
        changing=("model.tokens", "model.calls"),
        changing_parameters=("model.teacher",),
        changing_again=again,
    )
    found = _applying((model,), "eager+checkpoint")
    assert ("checkpoint-changes-buffers-twice" in found) is ("model.tokens" in again)


@pytest.mark.parametrize("twice", [False, True])
def test_what_is_known_of_second_derivatives_is_named_where_a_forward_takes_one(
    twice: bool,
) -> None:
    gradients = Gradients(twice=twice)
    model = replace(MODELS["linear"], name="mine.py:build", own=True, gradients=gradients)
    assert ("float8-double-backward" in _applying((model,), recipe=ROWWISE)) is twice
    assert ("mx-double-backward" in _applying((model,), recipe=MX)) is twice
    compiled = "compiled-double-backward"
    assert (compiled in _applying((model,), "aot_eager", "torch.fp32")) is twice
    assert compiled not in _applying((model,), "eager", "torch.fp32")


def _applying(models: Sequence[Model], arm: str = "eager", recipe: str = "torch.bf16") -> set[str]:
    recipes, arms = [every_recipe()[recipe]], [BY_NAME[arm]]
    facts = of_models(models)
    return {e.id for e in applying(load_entries(), recipes, arms, machine(), "cpu", facts)}


def test_the_command_that_is_named_lists_what_is_known_of_what_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = RunOptions(recipes=(ROWWISE,), arms=("inductor*selective",))
    program, *command = shlex.split(options.list_known)
    assert program == "narrowfuzz" and RunOptions().list_known == "narrowfuzz list known"
    assert ends(*command, "--json") == 0
    found = [record["id"] for record in json.loads(capsys.readouterr().out)]
    assert sorted(found) == sorted(named(ROWWISE, "inductor+checkpoint_selective"))


@pytest.mark.parametrize("compile", ["inductor", "aot_eager"])
def test_a_check_names_what_its_own_compiler_may_show(compile: Compile) -> None:
    """Cases of Inductor also run on aot_eager, but as what comes before."""
    recipes = [every_recipe()["torch.bf16"]]
    arms = [BY_NAME["eager"], *COMPILED[compile]]
    facts: dict[str, Fact] = {"compile": compile, "dynamic": False}
    found = {e.id for e in applying(load_entries(), recipes, arms, machine(), "cpu", facts)}
    assert ("aot-eager-gradient-strides" in found) is (compile == "aot_eager")
    assert "dynamic-float-in-checkpoint" not in found
    assert "embedding-narrow-sums" in found
