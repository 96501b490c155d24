"""O24: wrong backwards of users' own Functions are found, right ones pass, and what may be meant is
left alone with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_functions as zoo
import pytest
import torch
from fresh import python
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register
from narrowfuzz.play.derivatives import derivatives, of_call
from narrowfuzz.play.functions import FunctionCall
from narrowfuzz.play.own import OwnModel
from narrowfuzz.power.probe import falsifying, probe
from narrowfuzz.power.reads import FALSIFIES
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.own_functions import functions_seen, said_of_functions
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.own_functions import check_own_functions
from narrowfuzz.trace.expect import DerivativeOf
from narrowfuzz.trace.trace import Derivative
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import CANNOT, GONE, RunScript

RECIPES = load_recipes()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


def tried(name: str, dtype: torch.dtype) -> list[Derivative]:
    zoo.Stale.kept = None
    own = OwnModel(zoo.__file__, "build", 16, 16, {"name": name}, 0).to(dtype=dtype)
    return [Derivative(*one) for one in derivatives(own, 0)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", zoo.WRONG)
def test_a_wrong_backward_is_found(name: str, dtype: torch.dtype) -> None:
    found = tried(f"wrong: {name}", dtype)
    (wrong, *_) = [one for one in found if one.wrong]
    assert wrong.module == "model" and wrong.function.startswith("own_functions")
    assert wrong.off > 0.01 and not any(one.why for one in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", zoo.RIGHT)
def test_a_right_backward_passes_on_every_argument(name: str, dtype: torch.dtype) -> None:
    found = tried(f"right: {name}", dtype)
    assert found and not any(one.wrong or one.why for one in found), found


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", zoo.LEFT)
def test_what_may_be_meant_is_left_alone_with_a_reason(name: str, dtype: torch.dtype) -> None:
    found = tried(f"left: {name}", dtype)
    assert any(one.why for one in found) and not any(one.wrong for one in found), found


def of_one(function: Any, *args: torch.Tensor) -> Derivative:
    """The result for the first argument of one call."""
    call = FunctionCall(function, "model", args, {}, tuple(True for _ in args))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Derivative(*next(of_call(call, call)))


def halved(g: torch.Tensor) -> torch.Tensor:
    return torch.cat([g[:1] / 2, g[1:]])


#: How the backward of a clamp treats the few elements that it clamps, and whether that is wrong.
CLAMPS = {
    "passed through": (lambda g, inside: g, False),
    "passed through by a factor": (lambda g, inside: g * (1 + 0.1 * ~inside), False),
    "dropped": (lambda g, inside: g * inside, False),
    "dropped, and too much elsewhere": (lambda g, inside: 1.05 * g * inside, True),
    "dropped, and a row halved": (lambda g, inside: halved(g * inside), True),
}


@pytest.mark.parametrize(("change", "wrong"), CLAMPS.values(), ids=[*CLAMPS])
def test_few_clamped_elements_of_many_are_found(change: Any, wrong: bool) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    one = of_one(zoo.clamped(2.9, change), x)
    assert one.wrong is wrong
    passes = change(torch.ones(1), torch.zeros(1, dtype=torch.bool)) != 0
    assert wrong or ("straight through" in one.why) is bool(passes)


def test_a_result_of_zeros_is_not_what_the_function_was_given() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    one = of_one(zoo.straight(lambda x: (x > 99).to(x.dtype)), x)
    assert not one.wrong and "does not move with it" in one.why
    # no spike: only the other result tells whether the backward is right
    beside = of_one(zoo.neuron(lambda g, spiked, x: g * 0.9 + spiked), x)
    assert not beside.wrong and not beside.why
    # nor does a gradient that passes straight through one result hide a wrong one of the other
    assert of_one(zoo.neuron(lambda g, spiked, x: g * 3.0 + spiked), x).wrong
    assert of_one(zoo.neuron(lambda g, spiked, x: g * 0.9), x).why == ""
    assert of_one(zoo.neuron(lambda g, spiked, x: g * 0.8), x).wrong


def test_a_wrong_argument_is_named_and_the_others_are_not() -> None:
    by_name = {one.argument: one for one in tried("wrong: no broadcast sum", torch.float32)}
    assert {name: one.wrong for name, one in by_name.items()} == {"x": False, "w": False, "b": True}


def test_looking_leaves_classes_and_random_numbers_as_they_were() -> None:
    before, forward = torch.get_rng_state(), zoo.SwiGLU.__dict__["forward"]
    tried("right: swiglu", torch.float32)
    assert zoo.SwiGLU.__dict__["forward"] is forward
    assert "forward" not in zoo.MissingTerm.__dict__
    assert torch.equal(torch.get_rng_state(), before)


MINE = """
import torch
from torch import nn
class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, none):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y
    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return {gradient}, None
class Inner(nn.Module):
    def forward(self, x):
        return {call}
class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 16), Inner(), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.inner(self.up(x)))
def build():
    return Mine(), torch.zeros(4, 8)
"""
CALL, WRONG, RIGHT = "Tanh.apply(x, None)", "g * (1 - y)", "g * (1 - y * y)"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "mine_with_functions.py"
    sys.modules.pop("mine_with_functions", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def written(file: Path, gradient: str, call: str = CALL) -> Path:
    file.write_text(MINE.format(gradient=gradient, call=call))
    return file


def case_of(file: Path) -> Case:
    (model,) = register(f"{file}:build")
    spec = fixed(Spec(recipe="torch.fp32", model=model.name, dtype="fp32"), RECIPES["torch.fp32"])
    return Case(spec=spec, data=DataSpec())


def of_functions(judge: Judge, case: Case) -> list[Verdict]:
    return [v for v in judge.judge(case, [BY_NAME["O24"]]).verdicts if v.rule == "O24"]


def test_a_finding_names_function_argument_and_module_and_its_script_shows_it(
    file: Path, tmp_path: Path, scripts: RunScript
) -> None:
    judge, case = Judge(RECIPES, Ledger([])), case_of(written(file, WRONG))
    (cause,) = judge.judge(case).causes
    at, expect = cause.at, cause.expect
    assert (cause.rule, at.layer, at.name) == ("O24", "model.inner", "x")
    assert isinstance(expect, DerivativeOf) and "mine_with_functions.Tanh" in cause.symptom
    assert float.fromhex(expect.off) > float.fromhex(expect.allowed) == 2.0**-7
    assert expect.directions == 20 and not expect.others
    said = cause.sentence()  # which argument's, how far off over all, and what is allowed
    assert "gradient of x that is not the forward's: off by" in said and "(allowed: 0.78 %)" in said
    assert "times the tolerance" not in said
    result = triage(judge, case, cause, seconds=2.0, scripts=scripts)
    assert result.confirmed, result.finding.why_suspected
    assert result.finding.severity == "high" and float(result.finding.effect) > 0.01
    alone = tmp_path / "repro.py"
    alone.write_text(result.script)
    assert "import narrowfuzz" not in result.script and "from narrowfuzz" not in result.script
    # without us on the path: torch and the user's file are all it takes
    done = python("-I", alone, env={"PYTHONPATH": ""}, cwd="/", code=1)
    assert "finite differences" in done.stdout
    written(file, RIGHT)
    assert scripts(alone).code == GONE
    written(file, WRONG, call="torch.tanh(x)")
    assert scripts(alone).code == CANNOT


def test_a_right_function_is_judged_and_none_is_not_applicable(file: Path, tmp_path: Path) -> None:
    judge = Judge(RECIPES, Ledger([]))
    case = case_of(written(file, RIGHT))
    assert [v.status for v in of_functions(judge, case)] == ["ok"]
    other = case_of(written(tmp_path / "other.py", RIGHT, call="torch.tanh(x)"))
    assert [v.status for v in of_functions(judge, other)] == ["not_applicable"]
    shipped = Case(spec=Spec(recipe="torch.fp32", model="mlp_gelu", dtype="fp32"), data=DataSpec())
    assert [v.status for v in of_functions(judge, shipped)] == ["not_applicable"]


def test_it_is_tried_once_for_a_model_and_not_for_each_case(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowfuzz.arms import functions

    asked: list[int] = []
    monkeypatch.setattr(functions, "_FOUND", {})
    monkeypatch.setattr(functions, "derivatives", lambda own, ids: asked.append(ids) or [])
    judge, case = Judge(RECIPES, Ledger([])), case_of(written(file, RIGHT))
    for seed in range(3):
        of_functions(judge, Case(spec=case.spec, data=DataSpec(seed=seed)))
    assert asked == [0]
    assert not MODELS[case.spec.model].takes_ids


def test_a_model_that_raises_on_other_numbers_is_said_to(file: Path) -> None:
    picky = "Tanh.apply(x, None) if x.abs().max() < 0.4 else [][1]"
    case = case_of(written(file, RIGHT, call=picky))
    judge = Judge(RECIPES, Ledger([]))
    evidence = judge.observe(case, frozenset({"eager"}))
    assert isinstance(evidence, Evidence)
    (verdict,) = check_own_functions(evidence)
    assert verdict.status == "inconclusive" and "IndexError" in verdict.why
    said = said_of_functions(functions_seen([verdict]))
    assert said.startswith("No autograd.Function of your own was looked for: the model: the")


def test_the_input_has_the_dtype_of_the_linears_and_not_of_any_parameter(file: Path) -> None:
    text = written(file, RIGHT).read_text()
    scaled = "super().__init__()\n        self.scale = nn.Parameter(torch.ones(1).half())"
    file.write_text(text.replace("super().__init__()", scaled))
    (verdict,) = of_functions(Judge(RECIPES, Ledger([])), case_of(file))
    assert verdict.status == "ok"


def test_no_pass_could_not_have_failed(file: Path) -> None:
    evidence = Judge(RECIPES, Ledger([])).observe(case_of(written(file, RIGHT)))
    (found,) = probe(check_own_functions, evidence, falsifying([BY_NAME["O24"]], FALSIFIES))
    assert found.noticed >= {"zeros (a Function's backward)", "sign flip (a Function's backward)"}


def test_a_run_can_say_what_was_checked_and_what_was_not(file: Path) -> None:
    judge, case = Judge(RECIPES, Ledger([])), case_of(written(file, RIGHT))
    (verdict,) = of_functions(judge, case)
    unclear = Verdict("O24", "eager", "backward", "inconclusive", at=verdict.at,
                      expect=verdict.expect, why="it rounds")  # fmt: skip
    assert functions_seen([verdict]) == {("function", "mine_with_functions.Tanh", "ok", "")}
    assert said_of_functions(functions_seen([verdict])) == (
        "Backward compared with finite differences: 1 of 1 autograd.Function of your own"
    )
    said = said_of_functions(functions_seen([unclear]))
    assert "0 of 1 autograd.Function of your own" in said and "it rounds" in said
    assert said_of_functions(set()) == ""


def test_an_errors_full_stop_is_none_of_the_sentence() -> None:
    keys = {("function", "mine.F", "inconclusive", "F(x): it raised Error: one dtype.")}
    assert said_of_functions([*keys]).endswith("; not compared: F(x): it raised Error: one dtype")


def test_what_is_given_without_a_gradient_is_named() -> None:
    why, *_ = {one.why for one in tried("left: given statistics", torch.float32)}
    assert "its input r has no gradient, but is another one with other data" in why


INSIDE = """
class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Tanh.apply(x + 0.0, None)
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(Tanh.apply(x, None), x, g)
class Inner"""


def test_a_function_inside_of_another_is_said_to_be_asked_for_no_gradient_in_a_forward(
    file: Path,
) -> None:
    """Its backward runs in that of the other one, which calls it again."""
    written(file, RIGHT, call="Outer.apply(x)")
    file.write_text(file.read_text().replace("\nclass Inner", INSIDE))
    found = of_functions(Judge(RECIPES, Ledger([])), case_of(file))
    (inside,) = [v for v in found if v.why]
    assert "Tanh(x): in a forward it is asked for no gradient, as inside of another" in inside.why
    (outer,) = [v for v in found if not v.why]
    assert outer.status == "ok" and outer.expect.function.endswith("Outer")
