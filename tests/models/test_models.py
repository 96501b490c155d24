"""The models: what a Spec builds, what it is called, and that its source stands alone."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from narrowfuzz.arms.model_names import gradient_names, linear_names, parameter_shapes, tied_names
from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.data import make_model_tensors
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.models.catalog import COMPOSED, MODELS
from narrowfuzz.models.model import heads_of
from narrowfuzz.triage.script.parts import model_source
from samples import recipes

ALL: tuple[ModelName, ...] = get_args(ModelName)
#: What needs no GPU, and no interpreter of Triton's, and must not raise in its forward.
#: TransformerEngine's own models, which patch their process, are built in te_on_cpu's tests.
BUILT = [name for name in ALL if MODELS[name].package != "transformer_engine"]
HERE = [
    name for name in BUILT if MODELS[name].runs_on("cpu", ("bf16",)) and not MODELS[name].forbidden
]
BF16 = recipes()["torch.bf16"]


def fixed(model: str) -> Mapping[str, Any]:
    """What of a Spec the model leaves no choice of: some have no backward on a CPU."""
    return MODELS[model].fixed


def spec_of(model: str, **changes: Any) -> Spec:
    fields = {"recipe": "torch.bf16", "m": 3, "k": 8, "n": 12, "bias": True, **changes}
    return Spec(model=model, **fields)


def built(spec: Spec) -> torch.nn.Module:
    return MODELS[spec.model].build(spec, dtype=torch.float32, device="cpu")


def test_a_librarys_own_model_is_built_only_where_the_library_is_loaded() -> None:
    """To load TransformerEngine patches the process."""
    with pytest.raises(ValueError, match="transformer_engine's own, which this process has not"):
        built(spec_of("te_experts_softmax"))


def test_every_name_of_a_case_is_a_model() -> None:
    assert set(MODELS) == set(ALL)
    assert all(model.name == name for name, model in MODELS.items())


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_its_text_builds_the_same_model_in_an_empty_namespace(
    name: ModelName, bias: bool, attention: str
) -> None:
    spec = spec_of(name, bias=bias, attention=attention, heads=4)
    imports = "import math\nfrom typing import Any\nimport torch\nimport torch.nn.functional as F\n"
    namespace: dict[str, Any] = {}
    text = f"{imports}from torch import nn\n{model_source(name)}\nmodel = "
    exec(text + MODELS[name].expression(spec), namespace)
    ours, theirs = built(spec), namespace["model"]
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {
        k: v.shape for k, v in ours.state_dict().items()
    }
    assert {n: p.requires_grad for n, p in theirs.named_parameters()} == {
        n: p.requires_grad for n, p in ours.named_parameters()
    }
    theirs.load_state_dict(ours.state_dict())
    x = rows(spec)
    torch.manual_seed(0)
    with torch.set_grad_enabled("grad_mode" not in fixed(name)):
        want = ours(x)
        torch.manual_seed(0)
        assert torch.allclose(want, theirs(x), rtol=0.0, atol=0.0, equal_nan=True)


def rows(spec: Spec) -> Any:
    """An input of the Spec's shape: features, or token ids below n."""
    if MODELS[spec.model].takes_ids:
        return (torch.arange(spec.tokens) % spec.n).reshape(spec.input_shape[:-1])
    return torch.linspace(-1, 1, spec.tokens * spec.k).reshape(spec.input_shape)


@pytest.mark.parametrize("name", BUILT)
def test_its_source_is_the_classes_it_uses_and_no_others(name: ModelName) -> None:
    defined = [n for n in ast.parse(model_source(name)).body if isinstance(n, ast.ClassDef)]
    functions = {"torch.autograd.Function"}  # of autograd: these are no modules
    classes = [n.name for n in defined if not functions & {*map(ast.unparse, n.bases)}]
    assert len(classes) == len(set(classes))
    assert classes[-1] == MODELS[name].module
    used = {c for m in built(spec_of(name, k=16)).modules() for c in type(m).__mro__}
    ours = {c.__name__ for c in used if c.__module__.startswith("narrowfuzz")}
    assert ours == set(classes)


@pytest.mark.parametrize("features", [0, 1, 10, 12])
def test_many_operators_share_any_number_of_features(features: int) -> None:
    spec = spec_of("many_operators", k=features)
    assert tuple(built(spec)(rows(spec)).shape) == spec.output_shape


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("batch", [0, 2])
def test_its_output_has_the_specs_shape(name: ModelName, batch: int) -> None:
    spec = spec_of(name, batch=batch, heads=2)
    with torch.set_grad_enabled("grad_mode" not in fixed(name)):
        assert tuple(built(spec)(rows(spec)).shape) == spec.output_shape


@pytest.mark.parametrize("name", BUILT)
def test_parameters_and_their_shapes(name: ModelName) -> None:
    spec = spec_of(name)
    found = {n: tuple(p.shape) for n, p in built(spec).named_parameters()}
    assert parameter_shapes(spec) == found and found
    tensors = make_model_tensors(
        Case(spec=spec, data=DataSpec()), parameter_shapes(spec), ids=MODELS[name].takes_ids
    )
    assert {n: tensors[n].shape for n in found} == found
    assert set(tensors) == {"input", "grad_output", *found}
    assert tensors["grad_output"].shape == (spec.tokens, spec.width)


@pytest.mark.parametrize(
    "name",
    [n for n in HERE if n not in ("linear", "mxfp8_grouped_idle") and "grad_mode" not in fixed(n)],
)
def test_gradient_names_are_what_a_backward_leaves(name: ModelName) -> None:
    spec = spec_of(name, dtype="bf16")
    case = Case(spec=spec, data=DataSpec())
    trace = Program(spec, BF16, EAGER).run(tensors_of(case, BF16), tap=False)
    assert trace.error is None, trace.error
    counted = {f"{buffer}.buffer" for buffer in MODELS[name].saved_buffers}
    assert set(trace.outputs) == {"output"} | gradient_names(spec) | counted
    assert ("grad_input" in trace.outputs) == (not MODELS[name].takes_ids)


def test_one_linear_has_the_names_of_its_roles_until_it_is_scheduled() -> None:
    spec = spec_of("linear")
    assert gradient_names(spec) == {"grad_input", "grad_weight", "grad_bias"}
    plain = msgspec.structs.replace(spec, bias=False)
    assert gradient_names(plain) == {"grad_input", "grad_weight"}
    later = msgspec.structs.replace(spec, steps=2)
    assert gradient_names(later) == {"grad_input", "proj.weight.grad", "proj.bias.grad"}


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_without_a_backward_no_gradient_is_due(mode: str) -> None:
    assert not any(gradient_names(spec_of(name, grad_mode=mode)) for name in ALL)


def test_what_does_not_train_leaves_no_gradient() -> None:
    assert {"first.weight.grad", "first.bias.grad"}.isdisjoint(
        gradient_names(spec_of("frozen_first"))
    )
    assert gradient_names(spec_of("frozen_first")) >= {"second.weight.grad", "second.bias.grad"}


@pytest.mark.parametrize("name", BUILT)
def test_only_the_tied_model_has_a_parameter_under_two_names(name: ModelName) -> None:
    tied = {"head.weight": "embedding.weight"} if name == "tied_embedding" else {}
    assert tied_names(built(spec_of(name))) == tied


LINEARS = {
    "linear": ("proj",),
    "mlp_gelu": ("up", "down"),
    "mlp_swiglu": ("w1", "w2", "w3"),
    "attention": ("wq", "wk", "wv", "wo"),
    "tied_embedding": ("proj", "head"),
    "used_twice": ("proj",),
    "own_forward": ("proj",),
}


@pytest.mark.parametrize(("name", "linears"), LINEARS.items())
def test_the_linears_a_recipe_may_convert(name: str, linears: tuple[str, ...]) -> None:
    assert linear_names(built(spec_of(name))) == linears


def test_a_block_has_the_linears_of_attention_and_feed_forward_a_model_of_two_twice() -> None:
    block = linear_names(built(spec_of("llama_block")))
    assert set(block) == {f"attention.{w}" for w in LINEARS["attention"]} | {
        f"feed_forward.{w}" for w in LINEARS["mlp_swiglu"]
    }
    two = linear_names(built(spec_of("two_blocks")))
    assert two == tuple(f"layers.{i}.{name}" for i in (0, 1) for name in block)


@pytest.mark.parametrize("name", BUILT)
def test_regions_to_recompute_are_submodules(name: ModelName) -> None:
    model = built(spec_of(name))
    for region in MODELS[name].regions:
        model.get_submodule(region)
    assert bool(MODELS[name].regions) == (name == "two_blocks")


def test_token_ids_stay_below_the_vocabulary() -> None:
    spec = spec_of("tied_embedding", m=64, n=5)
    tensors = tensors_of(Case(spec=spec, data=DataSpec(seed=3)), BF16)
    assert set(np.unique(tensors["input"])) == {0.0, 1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 12])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_number_of_heads_divides_the_width(k: int, heads: int) -> None:
    found = heads_of(spec_of("attention", k=k, heads=heads))
    assert found == math.gcd(k, heads) and k % found == 0


def test_random_are_dropout_and_what_rounds_by_chance_and_the_norms_sum() -> None:
    random = [name for name in ALL if MODELS[name].random]
    assert random == ["dropout", "step_adamw_8bit_rounded"]
    pointwise = {name for name in ALL if MODELS[name].pointwise}
    assert pointwise == {"linear", "frozen_first", "hooked", "own_forward"}
    assert {name for name in COMPOSED if MODELS[name].attends} == {
        "attention", "llama_block", "two_blocks", "joined_blocks"
    }  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
def test_no_model_attends_that_does_not_say_so(name: ModelName) -> None:
    """Otherwise nobody would watch its attention."""
    assert MODELS[name].attends == ("scaled_dot_product_attention" in model_source(name))
    rounds = MODELS[name].fixed.get("optimizer", "").endswith("_rounded")
    assert MODELS[name].random == (rounds or "Dropout" in model_source(name))


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    groups, fused = MODELS["fp8_grouped_rowwise"], MODELS["step_adagrad_fused"]
    assert "--with triton==3.6.0" in groups.why_not("cpu", ("bf16",))
    assert not groups.why_not("cuda", ("bf16",))
    assert groups.why_not("cuda", ("bf16", "fp16")) == "cuda has no kernels for it in fp16"
    assert fused.why_not("cuda", ("bf16",)) == "it has kernels on cpu alone"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert groups.runs_on("cpu", ("bf16",)) and fused.runs_on("cpu", ("bf16",))


@pytest.mark.parametrize("name", ["fp8_cast_rows", "mx_scales", "permuted_rows"])
def test_beside_a_gpu_and_triton_a_model_is_built_on_no_device_without_the_interpreter(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interpreted(like: torch.Tensor) -> None:
        raise AssertionError("for a process whose kernels are interpreted")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    monkeypatch.setattr("narrowfuzz.play.groups.prepare_triton", interpreted)
    spec = Spec(recipe="torch.bf16", model=name, dtype="bf16")
    assert dict(MODELS[name].build(spec, dtype=torch.bfloat16, device="meta").named_parameters())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(AssertionError, match="interpreted"):
        MODELS[name].build(spec, dtype=torch.bfloat16, device="meta")
