"""The census on small models, through torchao's own conversions: what survives, what does not."""

from __future__ import annotations

import copy
import gc
import runpy
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from kernels import skip_without_backend
from msgspec.structs import replace as replace_spec
from narrowfuzz.arms.census import convert
from narrowfuzz.arms.model_snapshot import snapshot
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_entries, load_ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe.recipe import Recipe, load_recipes, promises_nothing
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.census import check_census
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.trace.trace import Census, ChangeKind, Trace
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.effect import effect_of, observed
from narrowfuzz.triage.finding import weighed_of
from narrowfuzz.triage.script.census import of_conversion
from narrowfuzz.triage.script.short import write_short_script
from samples import every_recipe

prepare()
settle()

ROWWISE = Spec(recipe="torchao.float8.rowwise", dtype="fp32")
TENSORWISE = Spec(recipe="torchao.float8.tensorwise", dtype="fp32")
WRAPPER = Spec(recipe="torchao.mxfp8.rceil", backend="wrapper", dtype="fp32")
OURS = Spec(recipe="torchao.mxfp8.rceil", backend="linear", dtype="fp32")
BASELINE = Spec(recipe="torch.fp32", dtype="fp32")
LIBRARY = (ROWWISE, TENSORWISE, WRAPPER)
EVERY = (*LIBRARY, OURS, BASELINE)

HEAD = "from torch import nn\n"
LINEARS = HEAD + "model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))\n"
OWN = f"""{HEAD}
class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)
model = nn.Sequential(Twice(32, 32))
"""
NORMED = f"""{HEAD}
class Normed(nn.Linear):
    def __init__(self):
        super().__init__(32, 32)
        self.norm, self.gain = nn.LayerNorm(32), nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))
    def forward(self, x):
        return super().forward(self.norm(x)) * self.gain + self.shift
model = nn.Sequential(Normed())
"""
HOOKS = LINEARS + "model[2].register_forward_hook(lambda *a: None)\n"
TIED = f"""{HEAD}
model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32, bias=False))
model[1].weight = model[0].weight
"""
AGAIN = LINEARS + "model[2] = model[0]\n"
ELSEWHERE = f"""{HEAD}
shared = nn.Linear(32, 32)
model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
"""
FROZEN = LINEARS + "model[0].requires_grad_(False)\n"
EVALUATED = LINEARS + "model.eval()\n"
ATTENTION = HEAD + "model = nn.Sequential(nn.MultiheadAttention(32, 2))\n"


@dataclass(frozen=True)
class Sample:
    """A model and what converting it changes: kind -> the first module that shows it."""

    id: str
    source: str
    spec: Spec
    changes: dict[str, str]


def everywhere(id: str, source: str, specs: tuple[Spec, ...] = EVERY) -> list[Sample]:
    return [Sample(id, source, spec, {}) for spec in specs]


def float8(id: str, source: str, **changes: str) -> list[Sample]:
    named = {kind.replace("_", " ").replace("requires grad", "requires_grad"): module
             for kind, module in changes.items()}  # fmt: skip
    return [Sample(id, source, spec, named) for spec in (ROWWISE, TENSORWISE)]


#: What torchao 0.18 does; every change here has an entry in reports/known.
SAMPLES = [
    *everywhere("plain", LINEARS),
    *everywhere("frozen", FROZEN),
    *everywhere("attention", ATTENTION),
    *everywhere("meta", HEAD + "model = nn.Sequential(nn.Linear(32, 32, device='meta'))\n"),
    *everywhere("root", HEAD + "model = nn.Linear(32, 32)\n"),
    *everywhere("own forward", OWN, (WRAPPER, OURS, BASELINE)),
    *float8("own forward", OWN, own_forward_lost="0"),
    *everywhere("normed", NORMED, (OURS, BASELINE)),
    *float8("normed", NORMED, own_forward_lost="0"),
    Sample("normed", NORMED, WRAPPER, {"parameter type changed": "0.norm"}),
    *everywhere("hooks", HOOKS, (WRAPPER, OURS, BASELINE)),
    *float8("hooks", HOOKS, hooks_lost="2"),
    *everywhere("attributes", LINEARS + "model[0].name = 'first'\n", (WRAPPER, OURS, BASELINE)),
    *float8("attributes", LINEARS + "model[0].name = 'first'\n", attributes_lost="0"),
    *everywhere("eval", EVALUATED, (WRAPPER, OURS, BASELINE)),
    *float8("eval", EVALUATED, training_flag_changed="0"),
    *everywhere("tied", TIED, (ROWWISE, TENSORWISE, OURS, BASELINE)),
    Sample("tied", TIED, WRAPPER, {"tied weights untied": "1"}),
    *everywhere("parameter hook", LINEARS + "model[0].weight.register_hook(lambda g: g)\n",
                (ROWWISE, TENSORWISE, OURS, BASELINE)),
    Sample("parameter hook", LINEARS + "model[0].weight.register_hook(lambda g: g)\n", WRAPPER,
           {"parameter hooks lost": "0"}),
    *everywhere("parameter attribute", LINEARS + "model[0].weight.shared = True\n",
                (ROWWISE, TENSORWISE, OURS, BASELINE)),
    Sample("parameter attribute", LINEARS + "model[0].weight.shared = True\n", WRAPPER,
           {"parameter attributes lost": "0"}),
    *everywhere("used twice", AGAIN, (WRAPPER, OURS, BASELINE)),
    *float8("used twice", AGAIN, second_name_left_unconverted="2"),
    *everywhere("in two parents", ELSEWHERE, (WRAPPER, OURS, BASELINE)),
    *float8("in two parents", ELSEWHERE, shared_module_split="1.0"),
]  # fmt: skip


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    return load_recipes()


def build(source: str) -> Any:
    names: dict[str, Any] = {"torch": torch, "dtype": torch.float32}
    exec(source, names)
    return names["model"]


def found(source: str, spec: Spec, recipes: dict[str, Recipe]) -> dict[str, str]:
    _, census = convert(recipes[spec.recipe], build(source), spec)
    assert census is not None
    return {c.kind: c.module for c in reversed(census.changes)}


def name(sample: Sample) -> str:
    return f"{sample.id}-{sample.spec.recipe}-{sample.spec.backend}"


@pytest.mark.parametrize("sample", SAMPLES, ids=name)
def test_what_a_conversion_changes(sample: Sample, recipes: dict[str, Recipe]) -> None:
    skip_without_backend(sample.spec)
    assert found(sample.source, sample.spec, recipes) == sample.changes


def _case(spec: Spec) -> Case:
    return Case(spec=spec, data=DataSpec())


@pytest.mark.parametrize("model", ["hooked", "own_forward", "tied_embedding"])
@pytest.mark.parametrize("spec", LIBRARY, ids=lambda spec: spec.recipe)
def test_the_ledger_explains_what_drawn_models_lose(spec: Spec, model: ModelName) -> None:
    judge = Judge(every_recipe(), load_ledger())
    case = _case(replace_spec(spec, model=model, m=32, k=32, n=32))
    assert not judge.judge(case, [BY_NAME["census"]]).causes


@pytest.mark.parametrize("family", ["torchao.float8", "torchao.mxfp8"])
def test_the_ledger_hides_no_unconverted_layer(family: str) -> None:
    """The entry for a shared linear's second name must not explain a layer that was left out."""
    verdict = Verdict("census", "eager", "convert", "diverged", "left unconverted")
    ledger, name = Ledger(load_entries()), fingerprint(verdict, family)
    assert not ledger.match(name, _case(ROWWISE), verdict, lambda cure: True)


#: Kinds that follow from one that was found: the census leaves them out, a script cannot.
FOLDED: dict[str, set[ChangeKind]] = {
    "used twice": {"left unconverted", "shared module split"},
    "normed": {
        "attributes lost", "buffer missing", "module missing", "parameter missing",
        "parameter order changed", "state_dict keys changed",
    },
}  # fmt: skip


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    "sample",
    SAMPLES,  # each is a process
    ids=name,
)
def test_a_script_shows_what_the_census_found_and_nothing_else(
    sample: Sample, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    skip_without_backend(sample.spec)
    recipe = recipes[sample.spec.recipe]
    folded = FOLDED.get(sample.id, set()) if sample.changes else set()
    for kind in set(get_args(ChangeKind)) - folded:
        shown = run(sample.source, sample.spec, kind, recipe, tmp_path)
        assert shown == (kind in sample.changes), kind


def run(source: str, spec: Spec, kind: str, recipe: Recipe, folder: Path) -> bool:
    """Does the script for this class of change exit with 1?"""
    verdict = Verdict("census", "eager", "convert", "diverged", kind)
    case = Case(spec=spec, data=DataSpec())
    file = folder / "repro.py"
    file.write_text(write_short_script(of_conversion(case, verdict, recipe, source)))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    return bool(ended.value.code)


@pytest.mark.parametrize(
    ("fault", "source", "spec", "kind"),
    [
        ("conversion-does-nothing", LINEARS, TENSORWISE, "left unconverted"),
        ("conversion-skips-layers", LINEARS, ROWWISE, "left unconverted"),
        ("conversion-unties-weights", TIED.replace("Embedding(32, 32)", "Linear(32, 32)"),
         ROWWISE, "tied weights untied"),
        ("conversion-unfreezes", FROZEN, TENSORWISE, "requires_grad changed"),
        ("conversion-freezes", LINEARS, TENSORWISE, "requires_grad changed"),
        ("conversion-drops-hooks", HOOKS, WRAPPER, "hooks lost"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_shown(
    fault: str, source: str, spec: Spec, kind: str, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    skip_without_backend(spec)
    recipe = recipes[spec.recipe]
    assert not found(source, spec, recipes)
    with builtin_faults()[fault].plant():
        assert kind in found(source, spec, recipes)
        assert run(source, spec, kind, recipe, tmp_path)
    assert not found(source, spec, recipes)
    assert not run(source, spec, kind, recipe, tmp_path)


RICH = f"""{HEAD}
model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32, bias=False))
model[1].name = "norm"
model[0].weight.shared = True
model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
model[1].register_forward_pre_hook(lambda *a: None)
model.alias = model[1]
"""
#: A statement that does to ``model`` what no conversion may, for each kind of change.
VANDALISM: dict[ChangeKind, str] = {
    "own forward lost": "model[1].forward = lambda x: x",
    "forward changed": "model[0].forward = lambda x: x",
    "module type changed": "model[1].__class__ = type('Other', (type(model[1]),), {})",
    "module missing": "del model[2]",
    "module added": "model.add_module('extra', torch.nn.ReLU())",
    "shared module split": "model.alias = copy.copy(model[1])",
    "training flag changed": "model[2].eval()",
    "hooks lost": "model[1]._forward_pre_hooks.clear()",
    "attributes lost": "del model[1].name",
    "attributes changed": "model[1].eps = 1.0",
    "tied weights untied": "model.alias = copy.deepcopy(model[1])",
    "weights tied": "model[2].weight = model[0].weight",
    "parameter missing": "model[0].bias = None",
    "parameter added": "model[0].gain = torch.nn.Parameter(torch.ones(1))",
    "parameter type changed": "model[2].weight = type('P', (torch.nn.Parameter,), {})("
    "model[2].weight.detach())",
    "parameter shape changed": "model[2].weight = torch.nn.Parameter(torch.zeros(32, 16))",
    "parameter dtype changed": "model[2].double()",
    "parameter device changed": "model[2].to('meta')",
    "parameter order changed": "owned = model[0]._parameters; "
    "model[0]._parameters = dict(reversed(owned.items()))",
    "parameter hooks lost": "model[0].weight._post_accumulate_grad_hooks.clear()",
    "parameter attributes lost": "del model[0].weight.shared",
    "requires_grad changed": "model[0].bias.requires_grad_(False)",
    "buffer missing": "model[1].running_mean = None",
    "buffer added": "model[1].register_buffer('extra', torch.zeros(1))",
    "buffer changed": "model[1].running_mean = torch.zeros(32, dtype=torch.float64)",
    "state_dict keys changed": "model._register_state_dict_hook("
    "lambda m, d, *a: d.update(x=d.pop('0.bias')))",
}


@pytest.mark.parametrize("kind", get_args(ChangeKind))
def test_every_kind_of_change_is_found_and_shown(
    kind: ChangeKind, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    model = RICH
    if kind == "left unconverted":
        recipe = replace(recipes[ROWWISE.recipe], convert=leave)
    elif kind == "second name left unconverted":
        recipe, model = recipes[ROWWISE.recipe], AGAIN
    elif kind == "converted unasked":
        recipe = replace(recipes[ROWWISE.recipe], convertible=promises_nothing)
    else:
        spoils = partial(spoil, statement=VANDALISM[kind])
        recipe = replace(recipes[BASELINE.recipe], convert=spoils)
    _, census = convert(recipe, build(model), ROWWISE)
    assert census is not None
    assert kind in {change.kind for change in census.changes}
    assert run(model, ROWWISE, kind, recipe, tmp_path)


def leave(model: Any, spec: Spec) -> Any:
    return model


def spoil(model: Any, spec: Spec, *, statement: str) -> Any:
    """A conversion that does one thing too many."""
    exec(statement, {"model": model, "torch": torch, "copy": copy})
    return model


def test_the_oracle_gives_one_verdict_for_each_kind(recipes: dict[str, Recipe]) -> None:
    source = EVALUATED + "model[0].name = 'a'\nmodel[2].name = 'b'\n"
    _, census = convert(recipes[ROWWISE.recipe], build(source), ROWWISE)
    trace = Trace("eager", census=census)
    verdicts = verdicts_of({"eager": trace, "inductor": replace(trace, arm="inductor")})
    assert {fingerprint(v, "f") for v in verdicts} == {
        "census--convert--eager--training flag changed--f",
        "census--convert--eager--attributes lost--f",
    }
    assert len(verdicts) == 2
    assert "and at 1 more" in verdicts[0].sentence()
    clean = Trace("eager", census=Census((), ()))
    assert [v.status for v in verdicts_of({"eager": clean})] == ["ok"]
    assert [v.status for v in verdicts_of({"eager": Trace("eager")})] == ["not_applicable"]


def verdicts_of(traces: dict[str, Trace]) -> list[Verdict]:
    case = Case(spec=ROWWISE, data=DataSpec())
    plan = every_recipe()[ROWWISE.recipe].plan(ROWWISE)
    return list(check_census(Evidence(case, traces, plan=plan)))


def test_a_recipe_that_does_not_say_has_no_census(recipes: dict[str, Recipe]) -> None:
    silent = replace(recipes[ROWWISE.recipe], converted=None)
    model, census = convert(silent, build(LINEARS), ROWWISE)
    assert census is None and type(model[0]).__name__ == "Float8Linear"


def test_every_shipped_recipe_takes_a_census(recipes: dict[str, Recipe]) -> None:
    assert not [name for name, recipe in recipes.items() if recipe.converted is None]


def test_a_frozen_weight_is_one_finding(recipes: dict[str, Recipe]) -> None:
    """The gradient the contract misses is its consequence."""
    with builtin_faults()["conversion-freezes"].plant():
        judgement = Judge(recipes, Ledger([])).judge(Case(spec=ROWWISE, data=DataSpec()))
    assert judgement.fingerprints() == {
        "census--convert--eager--requires_grad changed--torchao.float8"
    }


@pytest.mark.parametrize(
    ("kind", "severity"),
    [("own forward lost", "high"), ("hooks lost", "medium"), ("training flag changed", "low")],
)
def test_severity_is_what_the_change_costs(kind: str, severity: str) -> None:
    verdict = Verdict("census", "eager", "convert", "diverged", kind)
    case = Case(spec=ROWWISE, data=DataSpec())
    judge = Judge(every_recipe(), Ledger([]))
    effect = effect_of(observed(judge, case, verdict), verdict)
    assert weighed_of(verdict, case, effect).severity == severity


def test_a_snapshot_outlives_its_model() -> None:
    """Plain data only: nothing in it may keep a tensor alive or be one."""
    model = build(AGAIN)
    watched = weakref.ref(model[0].weight)
    before = snapshot(model, lambda module, name: False)
    text = repr(before)
    del model
    gc.collect()
    assert watched() is None
    assert repr(before) == text
    assert before.modules["2"].first == "0"


def test_a_lazy_model_is_written_down(recipes: dict[str, Recipe]) -> None:
    lazy = HEAD + "model = nn.Sequential(nn.LazyLinear(32))\n"
    assert not found(lazy, BASELINE, recipes)
    assert "hooks lost" in found(lazy, ROWWISE, recipes)


@pytest.mark.parametrize("planted", [False, True])
def test_a_conversion_is_judged_where_the_converted_model_does_not_run(
    planted: bool, recipes: dict[str, Recipe]
) -> None:
    """MXFP8 converts a linear of 40 features, and its forward refuses these."""
    case = Case(spec=replace_spec(WRAPPER, model="hooked", k=40), data=DataSpec())
    judge = Judge(recipes, load_ledger())
    with builtin_faults()["conversion-drops-hooks"].plant() if planted else nullcontext():
        judgement = judge.judge(case)
    assert not judgement.ran
    found = {"census--convert--eager--hooks lost--torchao.mxfp8"} if planted else set()
    assert judgement.fingerprints() == found
