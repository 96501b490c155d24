"""The example of a library of one's own: its recipe is true of it, and a wrong plan is noticed."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from narrowfuzz import Fp32Scale, Plan, Recipe, load_recipes
from narrowfuzz.arms.census import RecipeError
from narrowfuzz.arms.sharded import run_alone
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.verify import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "own_library"
SPECS = (
    {"m": 16, "k": 32, "n": 48},
    {"m": 7, "k": 33, "n": 5, "bias": True, "dtype": "fp32"},
    {"m": 0, "k": 32, "n": 16},
    {"m": 8, "k": 0, "n": 16},
    {"model": "mlp_swiglu", "checkpoint": "full"},
    {"model": "looped_experts"},
    {"model": "attention", "compile": "aot_eager"},
)
BLOCK = """
import torch
from torch import nn
class Mine(nn.Linear): pass
def block():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), Mine(32, 16)), torch.randn(8, 16)
class Doubled(nn.Linear):
    def forward(self, x): return 2 * super().forward(x)
def doubled():
    return nn.Sequential(nn.Linear(16, 32), Doubled(32, 16)), torch.randn(8, 16)
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_recipes([FOLDER / "recipe.py"])["own.fp8"]


def judged(recipe: Recipe, case: Case) -> tuple[Verdict, ...]:
    return Judge({recipe.name: recipe}, Ledger([])).judge(case).verdicts


def test_the_recipe_is_true_of_its_library(recipe: Recipe) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed, fields in enumerate(SPECS):
        case = Case(spec=Spec(recipe=recipe.name, **fields), data=DataSpec(seed=seed))
        seen.update((v.rule, v.status) for v in judged(recipe, case))
    assert not [rule for rule, status in seen if status == "diverged"]
    for rule in ("O2", "O3", "O5", "O6", "O15", "census"):
        assert seen[rule, "ok"]


def called(judge: Judge, case: Case) -> set[str]:
    """The linears whose calls are recorded."""
    return {call.module for call in judge.observe(case).traces["eager"].calls}


def plain(module: torch.nn.Module) -> bool:
    return type(module).forward is torch.nn.Linear.forward


def every(model: torch.nn.Module) -> torch.nn.Module:
    """A conversion that gives each linear without a forward of its own the library's class."""
    from fp8_linear import Fp8Linear

    for module in model.modules():
        if plain(module):
            module.__class__ = Fp8Linear
    return model


def patched(model: torch.nn.Module) -> torch.nn.Module:
    """A conversion that gives each linear a forward, not a class, of the library."""
    from fp8_linear import Fp8Linear

    for module in model.modules():
        if plain(module):
            module.forward = MethodType(Fp8Linear.forward, module)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("conversion", ["class", "forward"])
def test_it_judges_the_linears_of_users(
    recipe: Recipe, conversion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fp8_linear

    monkeypatch.setattr(fp8_linear, "convert", patched if conversion == "forward" else every)
    recipe = replace(recipe, convertible=lambda module, name, spec: plain(module))
    if conversion == "forward":
        recipe = replace(recipe, converted=lambda module: "forward" in vars(module))
    file = tmp_path / f"own_library_{conversion}.py"
    file.write_text(BLOCK)
    register(f"{file}:block")
    register(f"{file}:doubled")
    block, doubled = (
        next(n for n in MODELS if n.startswith(f"{file.name}:{function}"))
        for function in ("block", "doubled")
    )
    judge = Judge({recipe.name: recipe}, Ledger([]))
    spec = fixed(Spec(recipe=recipe.name, model=block, dtype="fp32"), recipe)
    judgement = judge.judge(Case(spec=spec, data=DataSpec()))
    assert not [v for v in judgement.verdicts if v.status in ("diverged", "crashed")]
    ok = {v.rule for v in judgement.verdicts if v.status == "ok"}
    assert {"O2", "O3", "O5", "O15"} <= ok
    assert called(judge, judgement.case) == {"model.0", "model.2"}
    # a linear with a forward of the user's own computes what it likes
    spec = fixed(Spec(recipe=recipe.name, model=doubled, dtype="fp32"), recipe)
    assert called(judge, Case(spec=spec, data=DataSpec())) == {"model.0"}


def test_what_the_code_of_a_recipe_raises_is_no_failure_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fp8_linear", None)  # it cannot be imported
    recipe = load_recipes([FOLDER / "recipe.py"])["own.fp8"]
    case = Case(spec=Spec(recipe=recipe.name), data=DataSpec())
    with pytest.raises(RecipeError, match=r"fp8_linear.* \(.*recipe.py:30\)"):
        judged(recipe, case)


def test_a_mistake_is_found_where_convert_is_decorated_and_on_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fp8_linear", None)
    recipe = load_recipes([FOLDER / "recipe.py"])["own.fp8"]
    decorated = replace(recipe, convert=partial(torch.no_grad()(recipe.convert)))
    with pytest.raises(RecipeError, match=r"recipe.py:30\)"):
        judged(decorated, Case(spec=Spec(recipe=recipe.name), data=DataSpec()))
    spec = Spec(recipe=recipe.name, model="mlp_swiglu", sharding=Sharding(data=2, ddp="plain"))
    tensors = tensors_of(Case(spec=spec, data=DataSpec()), recipe)
    with pytest.raises(RecipeError, match=r"recipe.py:30\)"):
        run_alone(spec, recipe, tensors, "cpu")


@pytest.mark.parametrize(
    ("wrong", "by", "says"),
    [
        (
            "    return fp8_linear.convert(model)",
            "    fp8_linear.convert(model)",
            "returned NoneType",
        ),
        (
            "return isinstance(",
            "return isinstnce(",
            r"converted raised NameError.*\(.*recipe.py:38",
        ),
        ("return type(module) is", "return typ(module) is", "convertible raised NameError"),
    ],
)
def test_mistakes_around_a_conversion_are_the_recipes(
    wrong: str, by: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a finding: that the library fails although it promises to run the model."""
    monkeypatch.syspath_prepend(str(FOLDER))
    source = (FOLDER / "recipe.py").read_text()
    assert source.count(wrong) == 1
    (file := tmp_path / "recipe.py").write_text(source.replace(wrong, by))
    recipe = load_recipes([file])["own.fp8"]
    with pytest.raises(RecipeError, match=says):
        judged(recipe, Case(spec=Spec(recipe=recipe.name), data=DataSpec()))


@pytest.mark.parametrize(
    ("wrong", "by", "says"),
    [
        ('"tensor", 0', '"tensors", 0', r"'tensors' is none of tensor, row, .*recipe.py:23\)"),
        ('"tensor", 0', '"block", 0', "a block or tile has a size above 0"),
        ("0, scale)", "0)", "scale is None"),
        ("GemmPlan(e4m3, e4m3", "GemmPlan(e4m3, OperandPlan()", "both operands or neither"),
        (', "grad_weight": backward', "", "not output, grad_input"),
        ("return Plan(", "Plan(", "plan returned NoneType"),
        ("Fp32Scale(eps", "Fp32scale(eps", r"plan raised NameError.*recipe.py:22\)"),
        ("@contextmanager", "", "write @contextmanager"),
    ],
)
def test_mistakes_in_a_plan_are_said_when_the_file_is_loaded(
    wrong: str, by: str, says: str, tmp_path: Path
) -> None:
    source = (FOLDER / "recipe.py").read_text()
    assert source.count(wrong) == 1
    (file := tmp_path / "recipe.py").write_text(source.replace(wrong, by))
    with pytest.raises(ValueError, match=rf"recipe file {file}: own.fp8: .*{says}"):
        load_recipes([file])


@pytest.mark.parametrize(
    ("raises", "field"),
    [
        ("import no_such_library", 'package="no-such-library>=1"'),
        ("raise OSError('no GPU')", 'unavailable=lambda backend, device: "needs a GPU"'),
        ("assert spec.k % 128 == 0", 'refusal=lambda s, device: "k % 128" if s.k % 128 else ""'),
    ],
)
def test_a_plan_may_raise_where_its_recipe_does_not_run(
    raises: str, field: str, tmp_path: Path
) -> None:
    source = (FOLDER / "recipe.py").read_text()
    source = source.replace("    scale = Fp32Scale", f"    {raises}\n    scale = Fp32Scale")
    source = source.replace("        plan=plan,", f"        plan=plan,\n        {field},")
    (file := tmp_path / "recipe.py").write_text(source)
    assert "own.fp8" in load_recipes([file])


def test_what_a_library_raises_is_its_own(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    import fp8_linear

    def raises(model: object) -> object:
        return model.no_such_attribute  # type: ignore[attr-defined]

    code = raises.__code__.replace(co_filename=fp8_linear.__file__ or "")
    raises.__code__ = code
    monkeypatch.setattr(fp8_linear, "convert", raises)
    verdicts = judged(recipe, Case(spec=Spec(recipe=recipe.name), data=DataSpec()))
    assert {(v.rule, v.status) for v in verdicts if v.rule == "contract"} == {
        ("contract", "crashed")
    }


def test_a_plan_whose_scales_are_rounded_once_is_noticed_and_shown(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded_once(spec: Spec) -> Plan:
        plan = recipe.plan(spec)
        scale = Fp32Scale(eps=1e-12, power_of_two=False)
        return replace(
            plan,
            gemms={
                role: replace(gemm, a=replace(gemm.a, scale=scale), b=replace(gemm.b, scale=scale))
                for role, gemm in plan.gemms.items()
            },
        )

    wrong = replace(recipe, plan=rounded_once)
    judge = Judge({wrong.name: wrong}, Ledger([]))
    cases = (Case(spec=Spec(recipe=wrong.name), data=DataSpec(seed=seed)) for seed in range(20))
    case, cause = next((c, v) for c in cases for v in judge.judge(c).causes if v.rule == "O3")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    proof = proven(judge, case, cause, plant=None, scripts=run_script)
    assert not proof.why, proof.output
    assert "fp8_linear" in proof.script
