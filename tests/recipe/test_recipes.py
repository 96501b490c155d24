"""Every recipe and backend: what it converts, what it says where it cannot run, its script."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels import needs, needs_fp8
from narrowfuzz.case.data import make_tensors
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.machine.machine import machine
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.plan import ROLES, OperandPlan, Role
from narrowfuzz.recipe.recipe import Emit, Recipe, lacks, obstacles, runnable
from narrowfuzz.report.listing import listed, print_listing
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.quantiser import check_cast, check_scale
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, bits
from narrowfuzz.trace.trace import Seen, Site, SiteTrace, Trace
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.script.recipe_source import recipe_source
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from torch import nn

RECIPES = recipes()
HERE = [
    pytest.param(name, backend, marks=[needs_fp8] * (backend == "real"))
    for name, recipe in RECIPES.items()
    for backend in (runnable(recipe, "cpu") or dataclasses.replace(recipe, backends=())).backends
]
ABSENT = {
    ("torchao.mxfp8.floor", "native"),
    ("torchao.mxfp8.floor", "triton"),
    ("torchao.mxfp8.rceil", "native"),
    ("torchao.mxfp8.rceil", "triton"),
    ("torchao.mxfp8.rceil_wgrad_with_hp", "native"),
    ("torchao.mxfp8.rceil_wgrad_with_hp", "triton"),
    ("torchao.blockwise_fp8", "scaled_mm"),
    ("torchao.blockwise_fp8", "triton"),
    ("torchao.nvfp4", "triton"),
}


class Tree(nn.Module):
    """Linears at three depths, one weight in two layers and, if asked, one layer used twice."""

    def __init__(self, dtype: torch.dtype, *, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64, dtype=dtype)
        self.inner = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=dtype), nn.ReLU())
        self.again = self.first if shared else nn.Linear(32, 64, dtype=dtype)
        self.blocks = nn.ModuleList([nn.ModuleDict({"out": nn.Linear(64, 32, dtype=dtype)})])
        self.tied = nn.Linear(32, 64, bias=False, dtype=dtype)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.inner, self.blocks[0]["out"], self.again):  # type: ignore[index]
            x = layer(x)
        return x


@pytest.mark.parametrize(("name", "backend"), HERE)
def test_every_linear_of_a_tree_is_converted_and_trains(name: str, backend: str) -> None:
    recipe = RECIPES[name]
    spec = Spec(recipe=name, backend=backend, dtype=recipe.dtypes[0])
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    with torch.no_grad():
        # float8-shared-module in the ledger: torchao's conversion forgets the second use
        shared = recipe.family != "torchao.float8"
        model = recipe.convert(Tree(dtype, shared=shared), spec)
    calls: list[int] = []
    quantised = recipe.plan(spec).quantised
    x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
    with recipe.tap(Emit(lambda *gemm: calls.append(1))):
        model(x).sum().backward()
    expected = 4 * sum(gemm.quantised for gemm in recipe.plan(spec).gemms.values())
    assert len(calls) == expected and bool(calls) == quantised
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    plain = type(model.first) is nn.Linear and not hasattr(model.first.weight, "_data")
    assert len(linears) == (4 if shared else 5) and plain != quantised
    assert (model.again is model.first) == shared and x.grad is not None
    tied = getattr(model.tied.weight, "_data", model.tied.weight)
    original = getattr(model.first.weight, "_data", model.first.weight)
    assert tied.data_ptr() == original.data_ptr()


def test_what_cannot_run_here_says_why() -> None:
    there = {name: recipe for name, recipe in RECIPES.items() if not lacks(recipe)}
    lacking = {(n, b): why for n, r in there.items() for b, why in obstacles(r, "cpu").items()}
    of_this_cpu = {machine().without("fp8"), machine().without("fp8_rowwise")} - {""}
    of_this_torch = ("scaled_mm has no kernel for CPUs: ", "torchao wraps no weight on torch 2.1")
    probed = {
        backend
        for backend, why in lacking.items()
        if why in of_this_cpu or why.startswith(of_this_torch)
    }
    assert set(lacking) - probed == ABSENT
    assert all("GPU" in lacking[backend] for backend in ABSENT)
    assert all("\n" not in why and len(why) < 200 for why in lacking.values())
    assert runnable(RECIPES["torchao.nvfp4"], "cpu") is None
    name = "torchao.mxfp8.rceil"
    narrowed = runnable(RECIPES[name], "cpu")
    here = tuple(b for b in ("linear", "wrapper") if (name, b) not in lacking)
    assert narrowed is not None and narrowed.backends == here


def test_a_public_operator_without_a_kernel_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["torch.scaled_mm"]
    before = obstacles(recipe, "cpu")

    def refuse(*args: Any, **kw: Any) -> None:
        raise NotImplementedError("Could not run 'aten::_scaled_mm_v2'. This could be\nbecause")

    probe = recipe.unavailable.__globals__["_not_public"]  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse)
    probe.cache_clear()
    try:
        after = obstacles(recipe, "cpu")
    finally:
        probe.cache_clear()
    new = {"tensorwise", "rowwise"} - set(before)
    assert {b: after[b] for b in new} == dict.fromkeys(
        new, "scaled_mm has no kernel for CPUs: Could not run 'aten::_scaled_mm_v2'"
    )
    assert set(after) == set(before) | {"tensorwise", "rowwise"}


@pytest.mark.parametrize("kind", ["fp8", "fp8_rowwise"])
def test_a_float8_recipe_needs_the_kernel_of_its_scales(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine()
    lacking = dataclasses.replace(
        here, kernels={**here.kernels, "fp8": "some", "fp8_rowwise": "some", kind: ""},
        lacks={kind: "no such kernel"},
    )  # fmt: skip
    for name in ("tensorwise", "rowwise", "rowwise_gw_hp"):
        recipe = RECIPES[f"torchao.float8.{name}"]
        probe = recipe.unavailable.func  # type: ignore[attr-defined]
        monkeypatch.setitem(probe.__globals__, "machine", lambda: lacking)
        needs = "fp8" if name == "tensorwise" else "fp8_rowwise"
        assert set(obstacles(recipe, "cpu")) == ({"real"} if needs == kind else set())
        assert obstacles(recipe, "cuda") == {}


def test_a_missing_package_is_an_obstacle_of_every_backend() -> None:
    recipe = dataclasses.replace(RECIPES["torch.scaled_mm"], package="no_such_package")
    assert obstacles(recipe, "cpu") == dict.fromkeys(
        recipe.backends, "needs no_such_package: pip install no_such_package"
    )


def test_list_shows_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing(listed("recipes"))
    shown = "".join(capsys.readouterr().out.split())
    assert "notnative:" in shown and "nottriton:" in shown and "available" in shown


# --- scripts --------------------------------------------------------------------------------------

SCRIPTED = [
    ("torch.scaled_mm", "tensorwise"),
    ("torch.scaled_mm", "rowwise"),
    ("torch.scaled_mm", "rowwise_v1"),
    ("torchao.mxfp8.even", "linear"),
    ("torchao.mxfp8.rceil_wgrad_with_hp", "wrapper"),
]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "arm", "role"),
    [pytest.param(*case, "eager", "grad_input", marks=needs(*case)) for case in SCRIPTED]
    # Inductor reuses an operand's buffer once it is multiplied: the script must have copied it
    + [
        pytest.param(
            "torch.scaled_mm", "rowwise", "inductor", "output",
            marks=[pytest.mark.heavy, needs("torch.scaled_mm", "rowwise")],
        ),
        pytest.param(
            "torch.scaled_mm", "tensorwise", "aot_eager", "output",
            marks=needs("torch.scaled_mm", "tensorwise"),
        ),
    ]
    + [
        pytest.param(*case, arm, "grad_input", marks=[needs_fp8, needs(*case)])
        for case in [("torchao.float8.rowwise_gw_hp", "real")]
        for arm in ("eager", "aot_eager_decomp_partition")
    ],
)  # fmt: skip
def test_a_script_runs_by_itself_and_finds_the_operand_it_is_asked_about(
    name: str, backend: str, arm: str, role: Role, tmp_path: Path, scripts: RunScript
) -> None:
    """grad_input's site is not the last but one where grad_weight is in high precision."""
    recipe = RECIPES[name]
    case = Case(spec=Spec(recipe=name, backend=backend, m=32, k=64, n=96), data=DataSpec())
    plan = recipe.plan(case.spec).gemms[role].a
    (x, _) = reference.canonical_operands(role, make_tensors(case, recipe.plan(case.spec)))
    planned = reference.quantise(x, plan)
    assert planned is not None and plan.format is not None
    code = plan.format.table[planned.codes[3, 5]]
    for claim, shown in ((code, False), (code + 1, True)):
        verdict = Verdict(
            "O2", arm, role, "diverged", "rounded code",
            At(what="codes", name=role, side="a", index=(3, 5)), "2",
            Is(bits(claim), signed=not BY_NAME[arm].compiler),
        )  # fmt: skip
        path = tmp_path / f"{shown}.py"
        path.write_text(script_of(case, verdict, recipe))
        result = scripts(path)
        assert result.shown is shown, result.output


# --- what only a GPU runs, judged from made-up traces ---------------------------------------------


def evidence(recipe: Recipe, changed: Any = None) -> Evidence:
    """NVFP4's three GEMMs as a faultless kernel would show them, or with ``changed`` codes."""
    spec = Spec(recipe=recipe.name, backend="triton", m=128, k=128, n=128)
    case = Case(spec=spec, data=DataSpec(seed=7))
    plan = recipe.plan(spec)
    tensors = make_tensors(case, plan)

    def seen(x: Any, operand: OperandPlan) -> Seen:
        x = reference.transformed(x, operand)
        scale = reference.scale(reference.amax(x, operand), operand)
        low, high = reference.admissible(x, scale, operand)
        codes = reference.codes(x, scale, operand)
        if operand.rounding == "stochastic":
            codes = np.where(np.random.default_rng(0).random(x.shape) < 0.5, low, high)
        return Seen(changed(codes, operand) if changed else codes, scale)

    sites = []
    for role in ROLES:
        a, b = reference.canonical_operands(role, tensors)
        gemm = plan.gemms[role]
        phase = "forward" if role == "output" else "backward"
        sites.append(SiteTrace(Site("proj", role, phase), seen(a, gemm.a), seen(b, gemm.b)))  # type: ignore[arg-type]
    traces = {"eager": Trace("eager", sites=tuple(sites))}
    return Evidence(case, traces, plan=plan, tensors=tensors)


def statuses(check: Any, *args: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for verdict in check(evidence(RECIPES["torchao.nvfp4"], *args)):
        found[verdict.role].append(verdict.status)
    return found


def test_either_neighbour_is_right_where_rounding_is_stochastic() -> None:
    right = {"output": ["ok"] * 2, "grad_input": ["ok"] * 2, "grad_weight": ["inconclusive"] * 2}
    assert statuses(check_cast) == right
    assert statuses(check_scale) == right


def test_a_third_code_is_wrong_even_where_rounding_is_stochastic() -> None:
    def off_by_two(codes: Any, operand: OperandPlan) -> Any:
        moved = codes.copy()
        if operand.rounding == "stochastic":
            magnitude = codes & 7
            moved[0] = (codes[0] & 8) | np.where(
                magnitude[0] > 3, magnitude[0] - 2, magnitude[0] + 2
            )
        return moved

    assert statuses(check_cast, off_by_two)["grad_input"] == ["diverged", "ok"]


def test_a_stochastic_code_is_wrong_where_the_plan_rounds_to_nearest() -> None:
    def next_code(codes: Any, operand: OperandPlan) -> Any:
        moved = codes.copy()
        if operand.rounding == "nearest" and operand.granularity == "block":
            moved[5, 7] ^= 1
        return moved

    assert statuses(check_cast, next_code)["output"] == ["diverged", "ok"]


# --- what scripts are made of --------------------------------------------------------------------


def by_position(model: Any, spec: Spec, mode: str = "a") -> Any:
    return model


def called(model: Any, spec: Spec) -> Any:
    """A name of the player's."""
    return model


def test_a_recipe_whose_names_are_the_players_has_no_script() -> None:
    recipe = dataclasses.replace(RECIPES["torch.fp32"], convert=called)
    case = Case(spec=Spec(recipe="torch.fp32", dtype="fp32", steps=2), data=DataSpec())
    at = At(name="output", index=(0, 0))
    verdict = Verdict("O5", "eager", "output", "diverged", "", at, "2", Is(bits(1)))
    with pytest.raises(ValueError, match=r"rename \['called'\]"):
        script_of(case, verdict, recipe)
    assert script_of(case, verdict, RECIPES["torch.fp32"])


def by_keyword(model: Any, spec: Spec, *, mode: Any = "a") -> Any:
    return model


@pytest.mark.parametrize(
    "convert",
    [
        lambda model, spec: model,
        partial(by_position, mode="b"),
        partial(by_keyword, mode=object()),
    ],
    ids=["lambda", "positional", "no literal"],
)
def test_a_recipe_without_pasteable_source_has_no_script(convert: Any) -> None:
    recipe = dataclasses.replace(RECIPES["torch.fp32"], convert=convert)
    with pytest.raises(ValueError, match="a script is made of the source of convert"):
        recipe_source(recipe, Spec(recipe="torch.fp32", dtype="fp32"), "convert")
    text = recipe_source(
        dataclasses.replace(recipe, convert=partial(by_keyword, mode="c")),
        Spec(recipe="torch.fp32", dtype="fp32"), "convert",
    )  # fmt: skip
    assert "def by_keyword(model, spec):" in text


@pytest.mark.parametrize(
    ("fields", "missing"), [({}, "plan and convert"), ({"convert": lambda m, s: m}, "plan")]
)
def test_a_recipe_says_what_it_lacks(fields: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"'mine' needs {missing}, or subject"):
        Recipe("mine", "mine", "", **fields)


def test_an_mx_product_with_a_bias_is_seen_too() -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    kind = {"block_size": 32, "kernel_preference": KernelPreference.EMULATED}
    a, b = (MXTensor.to_mx(torch.randn(n, 32), torch.float8_e4m3fn, **kind) for n in (32, 64))
    seen: list[Any] = []
    with RECIPES["torchao.mxfp8.floor"].tap(Emit(lambda *gemm: seen.append(gemm))):
        assert torch.addmm(torch.ones(64), a, b.t()).shape == (32, 64)
    ((left, _, right, right_scale, *_),) = seen
    assert (left.shape, right.shape, right_scale.shape) == ((32, 32), (64, 32), (64, 1))
