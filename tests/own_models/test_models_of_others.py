"""Models as others write them: nothing is said of one that is right, and all of it is judged.

``make models`` runs ``check`` on all of tests/own_models; these are the fastest pages of them.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ledger.test_ledger_neighbours import explaining
from narrowfuzz.arms.twin import twin_outputs
from narrowfuzz.campaign.check import _TRAINING, _specs
from narrowfuzz.case.data import make_model_tensors
from narrowfuzz.case.spec import Case, DataSpec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.models.model import Model
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.judged import judged_layers
from test_own_models import Own, own
from torchao.float8 import float8_linear
from torchao.float8.float8_training_tensor import GemmInputRole

__all__ = ["own"]  # a fixture
ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "tests" / "own_models"


def pages() -> list[Path]:
    """Models as their users would write them, which stand beside these tests."""
    return [file for file in PAGES.glob("*.py") if not file.name.startswith("test_")]


RECIPES = load_recipes()
LEDGER = load_ledger()
#: Pages, with the recipe that narrows each here.
FASTEST = {
    # its evaluations have a path of their own, that torch leaves where a module has hooks
    "torch_encoder.py:build": "torchao.float8.rowwise",
    "adaln_zero.py:build": "torchao.float8.rowwise",
    "clip.py:build": "torchao.float8.rowwise",
    "cross_attention.py:build": "torchao.float8.rowwise",
    "ema_teacher.py:build": "torchao.float8.rowwise",
    "gated_delta.py:build": "torchao.float8.rowwise",
    "gnn.py:build": "torchao.float8.rowwise",
    "gradient_reversal.py:build": "torchao.mxfp8.rceil",
    "llama_complex_rope.py:build": "torchao.mxfp8.rceil",
    "lora.py:build": "torchao.mxfp8.rceil",
    "loss_ignored.py:build": "torchao.mxfp8.rceil",
    "mnist.py:build": "torchao.float8.rowwise",
    "parallel_block.py:build": "torchao.mxfp8.rceil",
    "residual_scaling.py:build": "torchao.mxfp8.rceil",
    "softcap.py:build": "torchao.mxfp8.rceil",
    "swin.py:build": "torchao.float8.rowwise",
}


def page(name: str) -> Model:
    return register(f"{PAGES / name}")[0]


def cases(model: Model, narrow: str, **changes: Any) -> Iterator[Case]:
    """As it is trained, over steps with an evaluation in between, and narrow."""
    plain = _specs(model, [RECIPES[f"torch.{model.fixed['dtype']}"]], "none", "full")[0]
    quantised = _specs(model, [RECIPES[narrow]], "none", "full")[0]
    for spec in (plain, msgspec.structs.replace(plain, events=_TRAINING), quantised):
        yield Case(spec=spec, data=DataSpec())


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("name", "narrow"), FASTEST.items(), ids=[*FASTEST])
def test_nothing_is_said_of_a_page_that_is_right(name: str, narrow: str) -> None:
    model = page(name)
    for case in cases(model, narrow):
        judgement = Judge(RECIPES, LEDGER).judge(case)
        assert judgement.ran, case.spec
        assert [verdict.sentence() for verdict in judgement.causes] == [], case.spec
        seen = {layer for _, _, arm, _, layer in
                judged_layers(judgement.verdicts, case.spec.recipe, model.name)
                if arm == "eager"}  # fmt: skip
        assert seen >= {*model.linears} - NEVER_CALLED, case.spec


#: What no rule sees: nn.MultiheadAttention takes the weight of this linear and never calls it.
NEVER_CALLED = {
    "model.attention.out_proj",
    *(f"model.encoder.layers.{i}.self_attn.out_proj" for i in range(2)),
}


#: Entry -> page, recipes and checkpoint that show it: no model of ours does.
OF_OWN = {
    "float8-double-backward": (
        "gradient_penalty.py:build",
        ("torchao.float8.rowwise", "torchao.float8.tensorwise", "torchao.float8.rowwise_gw_hp"),
        "none",
    ),
    "linear-output-in-place": (
        "inplace_relu.py:build",
        ("torchao.float8.rowwise", "torchao.mxfp8.rceil"),
        "full",
    ),
    "mx-wrapper-weight-first": ("mamba_steps.py:build", ("torchao.mxfp8.rceil",), "full"),
    "parametrized-linears": (
        "weight_norm.py:build",
        ("torchao.float8.rowwise", "torchao.mxfp8.rceil"),
        "full",
    ),
    "sac-unsafe-view-in-place": ("inplace_scale.py:build", ("torch.fp32",), "selective"),
}


def narrow_cases(name: str, recipe: str, checkpoint: str = "full") -> Iterator[Case]:
    """The page under each backend that runs on a CPU."""
    model = page(name)
    for spec in _specs(model, [RECIPES[recipe]], "none", checkpoint):
        if not RECIPES[recipe].unavailable(spec.backend, "cpu"):
            yield Case(spec=spec, data=DataSpec())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("entry", OF_OWN)
def test_an_entry_of_users_models_explains_its_page(entry: str) -> None:
    name, recipes, checkpoint = OF_OWN[entry]
    for recipe in recipes:
        shown = narrow_cases(name, recipe, checkpoint)
        found = [Judge(RECIPES, LEDGER).judge(case) for case in shown]
        assert not [verdict.sentence() for each in found for verdict in each.causes]
        assert entry in {verdict.explained_by for each in found for verdict in each.known}


def test_every_entry_of_users_models_has_a_page() -> None:
    compiled = {"aot-eager-gradient-strides", "inductor-alpha-dropped"}  # ledger/test_cures.py
    assert explaining("own") == {*OF_OWN, *compiled, "compiled-double-backward"}


def test_a_second_derivative_that_the_compiler_refuses_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = page("gradient_penalty.py:build")
    (spec,) = _specs(model, [RECIPES["torch.fp32"]], "aot_eager", "none")
    case, arms = Case(spec=spec, data=DataSpec()), frozenset({"eager", "aot_eager"})
    judged = Judge(RECIPES, LEDGER, arms).judge(case)
    assert not judged.causes
    assert {verdict.explained_by for verdict in judged.known} == {"compiled-double-backward"}

    def fails(*args: Any, **named: Any) -> Any:
        raise RuntimeError("another reason")

    monkeypatch.setattr("torch._dynamo.backends.common.aot_module_simplified", fails)
    torch._dynamo.reset()
    assert Judge(RECIPES, LEDGER, arms).judge(case).causes


def test_another_failure_of_that_conversion_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **named: Any) -> Any:
        raise TypeError("another reason")

    monkeypatch.setattr("torchao.float8.float8_linear.Float8Linear.from_float", fails)
    for case in narrow_cases("weight_norm.py:build", "torchao.float8.rowwise"):
        assert Judge(RECIPES, LEDGER).judge(case).causes


def test_another_operand_that_is_not_float8_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **named: Any) -> Any:
        raise AssertionError("another reason")

    name = "gradient_penalty.py:build"
    monkeypatch.setattr("torchao.float8.float8_ops.preprocess_addmm", fails)
    for case in narrow_cases(name, "torchao.float8.rowwise", "none"):
        assert Judge(RECIPES, LEDGER).judge(case).causes
    monkeypatch.undo()
    # the same error of a model that does not differentiate twice
    cast = "torchao.float8.float8_linear.hp_tensor_to_float8_dynamic"
    real = float8_linear.hp_tensor_to_float8_dynamic

    def uncast(t: torch.Tensor, *args: Any, gemm_input_role: Any, **named: Any) -> Any:
        if gemm_input_role is GemmInputRole.GRAD_OUTPUT:
            return t
        return real(t, *args, gemm_input_role=gemm_input_role, **named)

    monkeypatch.setattr(cast, uncast)
    for case in narrow_cases("bilinear.py:build", "torchao.float8.rowwise", "none"):
        (verdict,) = Judge(RECIPES, LEDGER).judge(case).causes
        assert "AssertionError in float8_mm" in verdict.symptom


#: Nodes of the graph behind a linear that torchao converted.
FUNCTIONS = {"matmul_with_hp_or_float8_argsBackward", "mx_mmBackward"}


def test_another_failure_of_an_activation_in_place_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relu_ = torch.relu_

    def fails(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None and x.grad_fn.name() in FUNCTIONS:
            raise RuntimeError("another reason")
        return relu_(x)

    monkeypatch.setattr(torch, "relu_", fails)
    for recipe in OF_OWN["linear-output-in-place"][1]:
        for case in narrow_cases("inplace_relu.py:build", recipe):
            (verdict,) = Judge(RECIPES, LEDGER).judge(case).causes
            assert (verdict.rule, verdict.status) == ("contract", "crashed")


def test_another_refusal_by_the_wrapper_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **named: Any) -> Any:
        raise AssertionError("another reason")

    monkeypatch.setattr("torchao.prototype.moe_training.tensor._to_mxfp8_then_scaled_mm", fails)
    for case in narrow_cases("mamba_steps.py:build", "torchao.mxfp8.rceil"):
        if case.spec.backend == "wrapper":
            (verdict,) = Judge(RECIPES, LEDGER).judge(case).causes
            assert "in __torch_function__" in verdict.symptom


def test_a_head_on_a_part_of_a_sequence_is_no_refusal_by_sizes() -> None:
    """x[:, 0] is not contiguous, and to_mx says so before it asks for sizes."""
    for case in narrow_cases("shared_layers.py:build", "torchao.mxfp8.rceil"):
        judgement = Judge(RECIPES, LEDGER).judge(case)
        assert not judgement.causes
        assert "mx-noncontiguous-input" in {v.explained_by for v in judgement.known}


def test_parts_of_another_precision_keep_it() -> None:
    """A router and norms in float32, in a model in bf16: PyTorch itself refuses them cast."""
    model = page("mixed_dtypes.py:build")
    plain, *_ = cases(model, "torchao.float8.rowwise")
    built = model.build(plain.spec, dtype=torch.bfloat16, device="cpu")
    kinds = {name: p.dtype for name, p in built.named_parameters()}
    assert kinds["model.0.a.weight"] == torch.bfloat16
    assert kinds["model.0.router.weight"] == kinds["model.0.norm.weight"] == torch.float32
    wide = model.build(plain.spec, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    for case in cases(model, "torchao.float8.rowwise"):
        assert not Judge(RECIPES, LEDGER).judge(case).causes


@pytest.mark.heavy
def test_what_does_not_run_in_float64_is_not_called_random() -> None:
    """It casts to float32 by itself, and float32 does not go with float64 parameters."""
    for name, there in (("mixed_dtypes.py:build", False), ("softcap.py:build", True)):
        model = page(name)
        case, *_ = cases(model, "torchao.float8.rowwise")
        assert bool(twin_outputs(case.spec, tensors_of(case, RECIPES[case.spec.recipe]))) == there
        spec = _specs(model, [RECIPES[case.spec.recipe]], "aot_eager", "none")[0]
        verdicts = Judge(RECIPES, LEDGER).judge(Case(spec=spec, data=DataSpec())).verdicts
        reasons = {v.why for v in verdicts if v.status in ("inconclusive", "not_applicable")}
        assert not [reason for reason in reasons if "random" in reason], name
        assert ("the model does not run in float64" in reasons) != there


def test_a_refusal_by_a_rule_of_sizes_is_known_at_the_linear_that_refused() -> None:
    """A router to 2 experts, a picture of 14 by 14: MXFP8's blocks are of 32."""
    for name, layer, sizes in (
        ("mixed_dtypes.py:build", "model.1.router", (64, 64, 2)),
        ("mnist.py:build", "model.linear_relu_stack.0", (16, 196, 128)),
    ):
        *_, case = cases(page(name), "torchao.mxfp8.rceil")
        judge = Judge(RECIPES, LEDGER)
        judgement = judge.judge(case)
        assert not judgement.causes
        (refused,) = judgement.known
        assert refused.explained_by == "mx-shape-refusals"
        assert refused.at.layer == layer
        assert judge.run_arms(case)["eager"].error.sizes == sizes


@pytest.mark.parametrize("narrow", [True, False])
def test_another_error_in_a_linear_of_allowed_sizes_is_no_known_refusal(
    own: Own, narrow: bool
) -> None:
    """Its words are the rule's, its linear is not; and what the model raises unconverted, too, is
    its own."""
    text = own(f"""
class Says(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, narrow):
        ctx.narrow = narrow
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        if ctx.narrow or not {narrow}:
            raise AssertionError('must be divisible by block_size 32')
        return g, None
class Model(nn.Sequential):
    def forward(self, x):
        narrow = {{type(self[0]), type(self[0].weight)}} != {{nn.Linear, nn.Parameter}}
        return self[1](Says.apply(self[0](x), narrow))
def build(): return Model(nn.Linear(32, 32), nn.Linear(32, 32)), torch.ones(32, 32)
""")
    (model,) = register(text)
    *_, case = cases(model, "torchao.mxfp8.rceil")
    judgement = Judge(RECIPES, LEDGER).judge(case)
    assert bool(judgement.causes) == narrow and not judgement.known and not judgement.ran


def test_a_model_that_enters_autocast_by_itself() -> None:
    """torchao's float8 linear does not cast its operands under a CPU's autocast."""
    for case in cases(page("autocast_inside.py:build"), "torchao.float8.rowwise"):
        judgement = Judge(RECIPES, LEDGER).judge(case)
        assert [v.sentence() for v in judgement.causes] == [] and judgement.ran


def test_parts_in_eval_mode_stay_in_it() -> None:
    """A frozen BatchNorm is no bug: an evaluation in between does not thaw it."""
    plain, trained, _ = cases(page("batch_norm.py:frozen"), "torchao.float8.rowwise")
    for case in (plain, trained):
        assert [v.sentence() for v in Judge(RECIPES, LEDGER).judge(case).causes] == []


FLAG = """
class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)
    def forward(self, x):
        return self.proj(x) * (2.0 if self.proj.training else 1.0)
def asked():
    model = Asks()
    model.proj.eval()
    return model, torch.ones(32, 32)
def never_asked():
    return nn.Sequential(nn.Linear(32, 32)).eval(), torch.ones(32, 32)
"""


@pytest.mark.parametrize(("build", "found"), [("asked", True), ("never_asked", False)])
def test_a_training_flag_that_conversion_changes_counts_where_it_is_read(
    own: Own, build: str, found: bool
) -> None:
    (model,) = register(own(FLAG, build))
    *_, case = cases(model, "torchao.float8.rowwise")
    verdicts = Judge(RECIPES, LEDGER).judge(case).verdicts
    said = [v for v in verdicts if v.symptom == "training flag changed"]
    assert bool(said) == found
    assert all(v.got == "training=True" for v in said)


def test_a_cache_that_the_first_forward_makes_is_no_state() -> None:
    """No later call changes it, and what it holds is the same for any input."""
    model = page("rope_cache.py:build")
    for case in cases(model, "torchao.float8.rowwise"):
        judgement = Judge(RECIPES, LEDGER).judge(case)
        assert judgement.ran and [v.sentence() for v in judgement.causes] == []


def test_a_buffer_that_the_first_input_fills_is_refused(own: Own) -> None:
    text = own("""
class Fills(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer('scale', None)
    def forward(self, x):
        if self.scale is None: self.scale = x.detach().std(0)
        return super().forward(x / self.scale)
def build(): return Fills(), torch.randn(4, 8)
""")
    with pytest.raises(ValueError, match="buffer scale"):
        register(text)


def test_what_an_evaluation_changes_is_still_found(own: Own) -> None:
    text = own("""
class Grows(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        if not self.training: self[1].weight.data.mul_(2)
        return y
def build(): return Grows(nn.Linear(8, 8), nn.LayerNorm(8)), torch.ones(4, 8)
""")
    (model,) = register(text)
    _, trained, _ = cases(model, "torchao.float8.rowwise")
    causes = Judge(RECIPES, LEDGER).judge(trained).causes
    assert any(verdict.symptom == "changed by an evaluation" for verdict in causes), causes


def test_a_gradient_that_is_a_single_number_is_compared_on_compiled_arms() -> None:
    spec = _specs(page("clip.py:build"), [RECIPES["torch.fp32"]], "aot_eager", "none")[0]
    judgement = Judge(RECIPES, LEDGER).judge(Case(spec=spec, data=DataSpec()))
    assert not judgement.causes
    assert any(v.rule == "O9" and v.status == "ok" for v in judgement.verdicts)


@pytest.mark.parametrize("name", ["a", "bias"])
def test_a_parameter_may_be_a_single_number(name: str) -> None:
    case, *_ = cases(page("clip.py:build"), "torchao.float8.rowwise")
    spike = Spike(tensor="bias", row=3, col=5, bits="0x7fc00000")
    case = msgspec.structs.replace(case, data=DataSpec(spikes=(spike,)))
    tensors = make_model_tensors(case, {name: (), "weight": (4, 4)}, ids=False)
    assert tensors[name].shape == () and tensors[name].dtype == np.float32
    assert np.isnan(tensors[name]) == (name == "bias")


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: make models installs it",
)
def test_nothing_is_said_of_a_llama_of_transformers() -> None:
    model = page("hf_transformers.py:llama")
    plain, trained, _ = cases(model, "torchao.float8.rowwise")
    for case in (plain, trained):
        assert [v.sentence() for v in Judge(RECIPES, LEDGER).judge(case).causes] == []


# what `make models` says


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/models.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import models

    yield models
    sys.modules.pop("models", None)


def test_each_page_is_in_the_list_and_each_of_the_list_is_there(table: Any) -> None:
    settings = tomllib.loads(table.SETTINGS.read_text())
    listed = {model.name for model in table.models(settings)}
    there = {
        f"{file.name}:{node.name}"
        for file in pages()
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert listed <= there
    files = {file.name for file in pages()} - {"cpu_torchvision.py"}
    assert {name.partition(":")[0] for name in listed} == files
    owners = table.owners_of(settings)
    assert all(owner.owner and owner.why for owner in owners)
    globs = [glob for owner in owners for glob in owner.models]
    unmet = [glob for glob in globs if not any(table.fnmatchcase(n, glob) for n in listed)]
    assert not unmet
    assert listed >= {*FASTEST}


def test_what_has_no_owner_or_is_false_is_a_fault(table: Any) -> None:
    reports = [
        table.Reported("finding", "O5--output--eager--wrong value--torchao.mxfp8", "y is wrong"),
        table.Reported("finding", "O18--output--eager--off--torch", "it does not sum to 1"),
        table.Reported("suspected", "O1--output--eager--differs--torch", "it differs"),
        table.Reported("broke", "", "a traceback"),
    ]
    row = table.Row(model="a.py:build", way="recomputed", code=1, seconds=1.0, reports=reports)
    owners = [
        table.Owner(("*.py:build",), "torchao", "known", fingerprint="O5--*"),
        table.Owner(("a.py:*",), table.OURS, "the mask is not known", fingerprint="O18--*"),
        table.Owner(("a.py:build",), "torchao", "another way", way="compiled"),
        table.Owner(("b.py:build",), "torchao", "another model"),
    ]
    faults = list(table.wrong([row], owners))
    assert len(faults) == 3
    assert "false alarm of ours" in faults[0] and "without an owner" in faults[1]
    assert "it broke" in faults[2]
    everything = table.Owner(("*",), "torchao", "all is theirs")
    assert list(table.wrong([row], [everything])) == [faults[2]], "what broke has no owner"


def test_what_a_check_said_is_read_of_its_document(table: Any) -> None:
    refused = table.row_of("a.py:build", "compiled", 2, 1.0, "", "narrowfuzz: model a.py: no\n")
    assert [(one.kind, one.sentence) for one in refused.reports] == [("refused", "model a.py: no")]
    broke = table.row_of("a.py:build", "compiled", -9, 1.0, "", "")
    assert [one.kind for one in broke.reports] == ["broke"]
    document = {
        "cases": 5, "never_judged": ["r a m"], "known": {"entry": 2}, "notes": ["a worker died"],
        "findings": [], "suspected": [],
        "linears_judged": [{"recipe": "r", "arm": "eager", "linears": ["x"], "of": 2}],
    }  # fmt: skip
    for code, kinds in ((0, []), (4, []), (3, ["broke"])):
        row = table.row_of("a.py:build", "compiled", code, 1.0, msgspec.json.encode(document), "")
        assert [one.kind for one in row.reports] == kinds
        assert row.linears == {"r, eager": (1, 2)} and row.known == {"entry": 2}
    page = table.table([refused, row], [], ["`b.py:build` compiled"])
    assert "| a.py:build | compiled | 5 | 1 of 2, in 1 of 1 pairs; never: 1 | `entry` |" in page
    assert "**no owner yet**" in page and "1 more checks have not run" in page


@pytest.mark.one_in(4)
@pytest.mark.parametrize("focus", [None, 0, 7])
def test_which_linear_refuses_is_seen_whichever_is_watched(focus: int | None) -> None:
    """A router's gate to eight experts is not a multiple of MX's block."""
    *_, case = cases(page("counting_router.py:build"), "torchao.mxfp8.rceil")
    judgement = Judge(RECIPES, LEDGER).judge(case, focus=focus)
    assert [v.sentence() for v in judgement.causes] == []
    assert {v.explained_by for v in judgement.known} == {"mx-shape-refusals"}
