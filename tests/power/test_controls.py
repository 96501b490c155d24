"""Controls: what is right, or legally different, raises no finding; what is wrong does."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from narrowfuzz import plants
from narrowfuzz.arms.available import select_arms
from narrowfuzz.arms.program import Program
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.server import start_server
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.data import make_tensors
from narrowfuzz.case.events import Backward, Close, Forward, Open, Step
from narrowfuzz.case.features import FEATURES
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import builtin_plants, find_plant
from narrowfuzz.power.hunt import Limits, control, lacking, targets
from narrowfuzz.power.record import Controlled
from narrowfuzz.recipe.recipe import Recipe, load_every, select
from narrowfuzz.recipe.source import CONVERTED, LIBRARY
from narrowfuzz.report.tally import Tally
from narrowfuzz.triage.verify import run_script
from samples import every_recipe
from scripts_of_findings import assert_shows

CONTROLS = {id: plant for id, plant in builtin_plants().items() if plant.legal}
#: How the names of the files begin that a control's own code is in.
LEGAL = tuple(str(Path(plants.__file__).with_name(name)) for name in ("legal_", "sums"))
#: Those of TransformerEngine, which patch their process, are judged in test_te_faults.py.
PLANTED = [
    control
    for control in CONTROLS.values()
    if control.plant is not nullcontext and control.recipes != ("te.experts",)
]
TWO_STEPS = (
    Open(), Forward(), Close(), Backward(of=(0,)), Step(),
    Open(), Forward(), Close(), Backward(of=(1,)), Step(),
)  # fmt: skip
#: A control that hides a real fault, and one that is what it says.
FILE = """
from narrowfuzz import Plant
from narrowfuzz.plants.registry import find_plant

def legal(id, title, source, recipe, **plant):
    return Plant(id, "mine", title, source, (recipe,), legal=True, models=("linear",),
                 arms=("eager",), **plant)

PLANTS = [
    legal("gains", "3 % too large", "not legal", "torchao.float8.rowwise",
          plant=find_plant("", "gemm-gain").plant),
    legal("plain", "torch", "its own definition", "torch.fp32"),
]
"""


def recipes_of(control: Plant) -> dict[str, Recipe]:
    return select(load_every(control.recipe_files), control.recipes)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("control", CONTROLS.values(), ids=lambda control: control.id)
def test_a_control_names_what_exists(control: Plant) -> None:
    assert recipes_of(control)
    assert select_arms(control.arms)
    assert set(control.models) <= set(get_args(ModelName))
    assert all(file.is_file() for file in control.recipe_files)


def test_there_are_enough_of_them() -> None:
    assert len(CONTROLS) >= 30


def case_of(control: Plant) -> Case:
    """A case on which the control's own code has to run."""
    name, recipe = next(iter(recipes_of(control).items()))
    if recipe.source is LIBRARY:
        spec = Spec(recipe=name, model="library_linear", events=TWO_STEPS, checkpoint="full")
        return Case(spec=spec, data=DataSpec())
    backend = "emulated" if "emulated" in recipe.backends else ""
    model = control.models[0] if control.models else "linear"
    spec = Spec(recipe=name, backend=backend, model=model, steps=2)
    return Case(spec=spec, data=DataSpec())


@cache
def ledger() -> Ledger:
    return load_ledger()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("control", PLANTED, ids=lambda control: control.id)
def test_what_a_control_plants_runs_and_is_silent(control: Plant) -> None:
    ran: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LEGAL):
            ran.add(frame.f_code.co_name)

    case = case_of(control)
    judge = Judge(load_every(control.recipe_files), ledger())
    with control.plant():
        sys.setprofile(note)
        try:
            judgement = judge.judge(case)
        finally:
            sys.setprofile(None)
    assert ran
    assert judgement.ran
    assert [v.sentence() for v in judgement.causes] == []


@pytest.mark.parametrize(
    "control_id", ["float8-reversed-sums", "float8-blocked-sums", "linear-blocked-sums"]
)
def test_sums_in_another_order_have_other_bits(control_id: str) -> None:
    control = CONTROLS[control_id]
    recipe = next(r for r in recipes_of(control).values() if r.source is CONVERTED)
    backend = "emulated" if "emulated" in recipe.backends else ""
    spec = Spec(recipe=recipe.name, backend=backend, dtype="fp32", k=128)
    case = Case(spec=spec, data=DataSpec(seed=5))
    tensors = make_tensors(case, recipe.plan(spec))

    def output() -> Any:
        return Program(spec, recipe, EAGER).run(tensors, tap=False).outputs["output"]

    plain = output()
    with control.plant():
        planted = output()
    assert not np.array_equal(plain, planted)
    np.testing.assert_allclose(plain, planted, rtol=1e-3, atol=1e-3)


def test_a_kept_weight_is_not_cast_again() -> None:
    from torchao.float8 import float8_utils

    recipe = every_recipe()["torchao.float8.rowwise"]
    spec = Spec(recipe=recipe.name, microbatches=2)
    case = Case(spec=spec, data=DataSpec())
    scales = 0

    def counted(original: Any) -> Any:
        def to_scale(*args: Any, **kwargs: Any) -> Any:
            nonlocal scales
            scales += 1
            return original(*args, **kwargs)

        return to_scale

    def scales_of(control: Plant | None) -> int:
        nonlocal scales
        scales = 0
        tensors = tensors_of(case, recipe)
        planted = control.plant() if control else nullcontext()
        with planted, attribute_replaced(float8_utils, "amax_to_scale", counted):
            assert Program(spec, recipe, EAGER).run(tensors, tap=False).error is None
        return scales

    # two microbatches of six casts each; the second one's two of the weight are spared
    assert scales_of(None) == 12
    assert scales_of(CONTROLS["float8-kept-weights"]) == 10


def test_a_user_brings_controls(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert find_plant(str(file), "plain").title == "torch"
    with pytest.raises(ValueError, match="unknown plant 'plane': did you mean 'plain'"):
        find_plant(str(file), "plane")
    file.write_text("PLANTS = 3")
    with pytest.raises(ValueError, match="must define PLANTS"):
        find_plant(str(file), "plain")
    with pytest.raises(ValueError, match="does not exist"):
        find_plant(str(tmp_path / "nothing.py"), "plain")
    with pytest.raises(ValueError, match="the rule that makes it so"):
        Plant("x", "", "", "", ("torch.fp32",), legal=True)


@pytest.mark.heavy
def test_a_script_runs_under_a_control(tmp_path: Path) -> None:
    script = tmp_path / "repro.py"
    script.write_text(
        "import sys\n"
        "from torch.nn import functional\n"
        "sys.exit(functional.linear.__module__ == 'narrowfuzz.plants.legal_torch')\n"
    )
    assert_shows(run_script, script, ("", "linear-blocked-sums"))


def test_a_config_tells_what_is_planted_and_how_much_each_worker_judges() -> None:
    plain = Config(out=Path("out"))
    assert plain.plant is None and plain.share == 0
    assert Config(out=Path("out"), cases=7, workers=3).share == 3


def test_what_no_control_has_run_is_named() -> None:
    def met(*what: str) -> Controlled:
        return Controlled(id="x", title="x", cases=1, seconds=0.0, met=what)

    some = (f"model {get_args(ModelName)[1]}", f"schedule {next(iter(FEATURES))}", "rung inductor")
    missing = lacking([met()])
    assert {kind for kind, _, _ in (what.partition(" ") for what in missing)} == {
        "model", "rung", "checkpoint", "schedule"
    }  # fmt: skip
    assert set(missing) - set(lacking([met(some[0]), met(*some[1:])])) == set(some)


def run(plant: Plant, file: str = "") -> Controlled:
    """Sixty cases of it."""
    start_server("cpu")
    (target,) = targets([(file, plant)], "cpu")
    return control(target, Limits(control_cases=60, seed=3), Tally())


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.xdist_group("campaign")
@pytest.mark.parametrize("control_id", ["plain-norms", "float8-power-by-bits", "delayed-unfused"])
def test_a_control_is_silent(control_id: str) -> None:
    result = run(CONTROLS[control_id])
    assert (result.cases, result.findings, result.problem) == (60, (), "")
    if control_id == "delayed-unfused":
        assert "schedule unfused" in result.met
    else:
        assert sum(what.startswith("model ") for what in result.met) > 1
        assert "rung eager" in result.met


@pytest.mark.heavy
@pytest.mark.xdist_group("campaign")
def test_a_fault_is_no_control(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    result = run(find_plant(str(file), "gains"), str(file))
    assert any(found.startswith("O5") for found in result.findings), result
    assert set(result.alarms) == {*result.findings, *result.suspected}
    for case in result.alarms.values():
        assert load_case(bytes(case)).spec.recipe
    assert run(find_plant(str(file), "plain"), str(file)).findings == ()
