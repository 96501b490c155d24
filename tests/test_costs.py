"""What it costs to add something, in files of the package: added to a copy of it, it works."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from fresh import python

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "harness" / "narrowfuzz"

#: A module of plants: one that is found, and one that must not be.
PLANTS = """
from narrowfuzz.plants.patching import float8_mm
from narrowfuzz.plants.plant import Plant

PLANTS = [
    Plant("trial-gain", "gain", "products 3 % too large", "none", ("torchao.float8.tensorwise",),
          lambda: float8_mm(lambda a, b, result, role: result * 1.03)),
    Plant("trial-legal", "as it is", "nothing is changed", "its own definition", ("torch.fp32",),
          legal=True, models=("linear",), arms=("eager",)),
]
"""
RULE = '''
from narrowfuzz.rules.rule import plain


def check_trial(evidence):
    """Results are there."""
    for arm, trace in evidence.traces.items():
        yield plain("R99", arm, "output", "ok" if trace.outputs else "inconclusive")
'''
#: One that reads what no other does: the largest input.
RULE_OF_ITS_OWN = '''
from narrowfuzz.rules.datum import Datum
from narrowfuzz.rules.rule import plain

LARGEST = Datum("the largest input", lambda found, change: change(found))


def check_own_trial(evidence):
    """Something is there to multiply."""
    largest = evidence.datum(LARGEST)
    yield plain("R98", evidence.base, "output", "ok" if largest > 0 else "diverged")
'''
MODEL = '''

class Trial(nn.Module):
    """A linear behind its own halved input."""

    def __init__(self, dim: int, out: int, bias: bool) -> None:
        super().__init__()
        self.only = nn.Linear(dim, out, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x * 0.5)
'''
ROW = 'Model("trial", "on trial", "Trial", _sides, "mlp", wide=True, last="only")'
#: Ranks that train the whole model by themselves, on all rows.
LAYOUT = '''
from dataclasses import dataclass

from narrowfuzz.case.layout.layout import Layout
from narrowfuzz.models.catalog import MODELS


@dataclass(frozen=True)
class Trial:
    """So many ``ranks`` do the same."""

    ranks: int


TRIAL = Layout(
    "trial",
    lambda sharding: sharding.trial > 0,
    lambda model: MODELS[model].kind != "operator" and not MODELS[model].own,
    lambda spec: spec,
    lambda spec, shards: iter(()),
    lambda sharding: iter([("two ranks", {"trial": 2})] if sharding.trial > 2 else ()),
    lambda spec, linears: Trial(spec.sharding.trial),
    drawn=((("trial",), ((2,), (3,))), (("steps",), ((1,), (2,)))),
    single_group=True,
    cuts_sums=lambda sharding: True,
)
'''
PLAYER = """
from narrowfuzz.play.converted import play
from narrowfuzz.play.player import Trace


def play_trial(make, tensors, *, job, taps, on):
    def main(rank, mesh):
        return play(Trace(), make, tensors, job=job, taps=taps)

    return on({"trial": job.layout.ranks}, main)
"""
#: A recipe in a format that nobody else has, by a scale rule of its own: half of the range is used.
RECIPE = """
from contextlib import contextmanager

import numpy as np
import torch
from narrowfuzz.numerics.formats import Format
from narrowfuzz.numerics.plan import ROLES, GemmPlan, OperandPlan, Plan
from narrowfuzz.numerics.scales import Fp32Scale
from narrowfuzz.recipe.recipe import Recipe
from torch import nn

E3M2 = Format("e3m2", 3, 2, 3, "none")


class Half(Fp32Scale):
    def of(self, amax, fmt):
        return super().of(amax, fmt) * np.float32(0.5)


def quantise(x):
    amax = x.abs().amax().double()
    scale = (28.0 / amax.clamp(min=1e-12)).float() * 0.5
    y = x.float() * scale
    exponent = (torch.frexp(y.abs()).exponent - 1).clamp(min=-2)
    units = torch.ldexp(y.abs(), 2 - exponent).round()  # of a quarter of its power of two
    code = units + 4 * (exponent + 2)
    return (code + 32 * torch.signbit(y)).to(torch.uint8), scale, torch.ldexp(units, exponent - 2)


def product(a, b):
    (a_codes, a_scale, x), (b_codes, b_scale, y) = quantise(a), quantise(b)
    seen(a_codes, a_scale, b_codes, b_scale)
    x, y = (torch.where(t < 0, -q, q) / s for t, q, s in ((a, x, a_scale), (b, y, b_scale)))
    return (x @ y.t()).to(a.dtype)


def seen(*operands):
    pass


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return product(grad, weight.t()), product(grad.t(), x.t())


class Half6(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


def convert(model, spec):
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Half6
    return model


@contextmanager
def tap(emit):
    globals()["seen"] = emit
    yield
    globals()["seen"] = lambda *operands: None


def plan(spec):
    one = OperandPlan(E3M2, "tensor", 0, RULE(1e-12, False))
    return Plan(dict.fromkeys(ROLES, GemmPlan(one, one, scale_roundings=4)))


RULE = Half
RECIPES = [Recipe(name="own.e3m2", family="own", title="FP6", plan=plan, convert=convert, tap=tap)]
"""
#: Judges it, and by a plan that does not know its scales.
WITH_RECIPE = """
import sys
from pathlib import Path

from narrowfuzz.machine.environment import prepare, settle
prepare(); settle()
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.recipe.recipe import load_every
for name in sys.argv[1:]:
    spec = Spec(recipe="own.e3m2", m=48, k=64, n=40)
    case = Case(spec=spec, data=DataSpec(regime="wild", seed=1))
    judged = Judge(load_every([Path(name)]), Ledger([])).judge(case)
    print(*sorted({v.rule for v in judged.verdicts if v.status == "ok"}))
    print(*(v.rule for v in judged.causes))
"""
#: Judges one case and says which rules passed on which rungs.
JUDGED = """
from narrowfuzz.machine.environment import prepare, settle
prepare(); settle()
from narrowfuzz.campaign.slices import AGAIN
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.coverage import universe
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.power.probe import falsifying, probe
from narrowfuzz.power.reads import FALSIFIES
from narrowfuzz.recipe.recipe import load_every, load_recipes
from narrowfuzz.rules import RULES
from narrowfuzz.draw.specs import WIDE
case = Case(spec=Spec(recipe="torch.bf16", {fields}), data=DataSpec(seed=1))
judge = Judge(load_every(), Ledger([]))
judged = judge.judge(case)
assert not judged.causes, judged.causes
print(*sorted({{f"{{v.rule}}/{{v.arm}}" for v in judged.verdicts if v.status == "ok"}}))
(own,) = [rule for rule in RULES if rule.name == "R98"]
(seen,) = probe(own.check, judge.observe(case), falsifying([own], FALSIFIES))
print("noticed:", *seen.noticed)
print("drawn:", *WIDE, *(one.kind for one in AGAIN))
pairs = universe(load_recipes(), ["none"])
print("met:", *sorted({{value for pair in pairs for _, value in pair}}))
"""


#: Draws Specs, judges one on three ranks and writes its script.
LAID_OUT = """
from narrowfuzz.machine.environment import prepare, settle
prepare(); settle()
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.sharded_specs import sharded_specs
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Runs
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.script.ranks import of_ranks
recipes = load_recipes()
own = recipes["torch.bf16"]
print(*sorted({spec.sharding.trial for spec in examples(sharded_specs([own]), 100)}))
case = Case(spec=Spec(recipe=own.name, sharding=Sharding(trial=3)), data=DataSpec(seed=1))
judged = Judge(recipes, Ledger([])).judge(case)
assert not judged.causes, judged.causes
print(*sorted({f"{v.rule}/{v.arm}" for v in judged.verdicts if v.status == "ok"}))
verdict = Verdict("contract", "sharded", "output", "diverged", "raised", At(), "", Runs("Disagree"))
print("play_trial" in write_played_script(of_ranks(case, verdict, own, tensors_of(case, own))))
"""


@dataclass(frozen=True)
class Trial:
    """Files to add, and texts to put into others, each behind a text that is there."""

    added: dict[str, str]
    put: tuple[tuple[str, str, str], ...] = ()

    @property
    def files(self) -> set[str]:
        return {*self.added, *(file for file, _, _ in self.put)}


TRIALS = {
    "plant": Trial({"plants/trial.py": PLANTS}),
    "rule": Trial(
        {"rules/trial.py": RULE},
        (
            ("rules/table.py", "from functools import partial\n",
             "from narrowfuzz.rules.trial import check_trial\n"),
            ("rules/table.py", "RULES: tuple[Rule, ...] = (\n",
             '    whole("R99", check_trial),\n'),
        ),
    ),
    "rule with data of its own": Trial(
        {"rules/own_trial.py": RULE_OF_ITS_OWN},
        (
            ("rules/table.py", "from functools import partial\n",
             "from narrowfuzz.rules.own_trial import LARGEST, check_own_trial\n"),
            ("rules/table.py", "RULES: tuple[Rule, ...] = (\n",
             '    whole("R98", check_own_trial, reads=(), data=(LARGEST,)),\n'),
            ("judge/observe.py", "from functools import cache, lru_cache, partial\n",
             "from narrowfuzz.rules.own_trial import LARGEST\n"),
            ("judge/observe.py", "            data={\n",
             "                LARGEST: lambda: abs(tensors['input']).max(),\n"),
        ),
    ),
    "arm": Trial(
        {},
        (
            ("case/arm.py", 'Compile = Literal["none", ', '"trial", '),
            ("case/arm.py", "reorders=True)\n\n", 'TRIAL = Arm("trial", "traced", "trial")\n'),
            ("case/arm.py", '    "none": (),\n', '    "trial": (TRIAL,),\n'),
            ("arms/compilers.py", '    "aot_eager": _traced,\n', '    "trial": _traced,\n'),
        ),
    ),
    "layout": Trial(
        {"case/layout/trial.py": LAYOUT, "play/trial.py": PLAYER},
        (
            ("case/sharding.py", '"alltoall"] = "allgather"\n', "    trial: int = 0\n"),
            ("case/sharding.py", "            return together\n",
             "        if self.trial:\n            return self.trial\n"),
            ("case/layout/__init__.py", "from narrowfuzz.case.layout.resumed import RESUMED\n",
             "from narrowfuzz.case.layout.trial import TRIAL\n"),
            ("case/layout/__init__.py", "LAYOUTS = (ONE, ", "TRIAL, "),
        ),
    ),
    "model": Trial(
        {},
        (
            ("play/models.py", "self.norm(self.proj(self.embedding(ids))))\n", MODEL),
            ("models/catalog.py", "    for model in (\n", f"        {ROW},\n"),
        ),
    ),
}  # fmt: skip


def tree(folder: Path, trial: Trial) -> Path:
    """A copy of the package with the trial in it."""
    leave = shutil.ignore_patterns("_content")
    shutil.copytree(OURS.parent, folder / "harness", ignore=leave)
    for name in ("pyproject.toml", "recipes", "reports"):
        (folder / name).symlink_to(ROOT / name)
    package = folder / "harness" / "narrowfuzz"
    for name, text in trial.added.items():
        (package / name).write_text(text)
    for name, behind, text in trial.put:
        before = (package / name).read_text()
        assert behind in before, (name, behind)
        (package / name).write_text(before.replace(behind, behind + text, 1))
    return folder


#: Source files that each takes.
FEW = [
    ("plant", 1),
    ("rule", 2),
    ("rule with data of its own", 3),
    ("arm", 2),
    ("model", 2),
    ("layout", 4),
]


def ran(folder: Path, *args: str) -> str:
    return python(*args, cwd=folder, env={"PYTHONPATH": "harness"}, seconds=300).stdout


@pytest.mark.parametrize(("name", "most"), FEW)
def test_adding_something_costs_few_files(name: str, most: int) -> None:
    """A recipe costs none: it is a file of the user's own (tests/recipe)."""
    assert len(TRIALS[name].files) == most


@pytest.mark.heavy
@pytest.mark.xdist_group("campaign")
def test_a_plant_is_listed_and_scored_as_what_it_is(tmp_path: Path) -> None:
    """The registry finds it, and score and list ask the registry."""
    folder, cli = tree(tmp_path, TRIALS["plant"]), ("-m", "narrowfuzz")
    assert "products 3 % too large" in ran(folder, *cli, "list", "faults")
    assert "nothing is changed" in ran(folder, *cli, "list", "controls")
    shown = ran(
        folder, *cli, "score", "--only", "trial-*", "--arm", "eager", "--control-cases", "10"
    )
    assert "found     trial-gain" in shown and "silent    trial-legal: 10 cases" in shown
    assert "in torch, torchao and TransformerEngine: 1 of 1" in shown


@pytest.mark.heavy
@pytest.mark.slow
def test_a_rule_an_arm_and_a_model_work_at_once(tmp_path: Path) -> None:
    """Every file that any of them needs is among those that are counted."""
    parts = [TRIALS[name] for name in ("rule", "rule with data of its own", "arm", "model")]
    added = {name: text for part in parts for name, text in part.added.items()}
    folder = tree(tmp_path, Trial(added, tuple(put for part in parts for put in part.put)))
    fields = 'model="trial", compile="trial", checkpoint="full"'
    rules, noticed, drawn, met = ran(folder, "-c", JUDGED.format(fields=fields)).splitlines()
    arms = ("eager", "eager+checkpoint", "trial+checkpoint")
    assert {"R98/eager", *(f"R99/{arm}" for arm in arms)} <= set(rules.split())
    # what falsifies the rule's own data is in its own file
    assert "zeros (the largest input)" in noticed
    # the arm is compared with eager, and the model's layer is judged like any other's
    assert {"O8/trial+checkpoint", "O12/eager+checkpoint", "O5/eager"} <= set(rules.split())
    assert drawn.split().count("trial") == 2 and "trial" in met.split()


@pytest.mark.heavy
@pytest.mark.slow
def test_a_layout_of_ranks_is_drawn_judged_and_shown_at_once(tmp_path: Path) -> None:
    """Rules that hold on it are those of what its record says of it."""
    drawn, rules, script = ran(tree(tmp_path, TRIALS["layout"]), "-c", LAID_OUT).splitlines()
    assert drawn.split() == ["0", "2", "3"]
    assert {"contract/sharded", "S4/sharded"} <= set(rules.split())
    assert script == "True"


@pytest.mark.heavy
def test_a_recipe_in_a_format_and_by_a_scale_of_its_own_takes_no_file_of_ours(
    tmp_path: Path,
) -> None:
    names = ("right.py", "wrong.py")
    for name, rule in zip(names, ("Half", "Fp32Scale"), strict=True):
        (tmp_path / name).write_text(RECIPE.replace("RULE = Half", f"RULE = {rule}"))
    shown = python("-c", WITH_RECIPE, *names, cwd=tmp_path, env={"PYTHONPATH": str(OURS.parent)})
    passed, causes, _, wrong = shown.stdout.splitlines()
    assert {"O2", "O3", "O5", "O6", "O15"} <= set(passed.split())
    assert not causes and "O3" in wrong.split()
