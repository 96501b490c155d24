"""repro.py: stands alone, stays short, and shows exactly the divergence it was written for."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrowfuzz.arms.available import select_arms
from narrowfuzz.case.data import make_tensors
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import LADDER
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules import BY_NAME, RULES
from narrowfuzz.rules.relations_shape import halves, variants
from narrowfuzz.rules.repeat import AGAIN
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import (
    Expect,
    Is,
    OneOf,
    Ordered,
    Refuses,
    Runs,
    Same,
    Within,
    bits,
)
from narrowfuzz.trace.verdict import OtherRun, Verdict, fingerprint
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.script.short_check import check_text
from narrowfuzz.triage.verify import RunScript, run_script
from samples import recipes
from scripts_of_findings import assert_shows, standing_alone

MAX_LINES = 60
#: Of a linear whose operands are looked at: its recipe's tap comes along.
MAX_TAPPED_LINES = 77
#: What is played brings the player, the model's source and, where it recomputes, the policy;
#: what activations write in place, modules that are no linears and blocks called twice cost 49.
MAX_PLAYED_LINES = 382
#: Relations that may point at an operand or at a result of another run.
VARIANTS = ("R5", "R6", "R7", "R8", "R9", "R11", "R16", "R17", "R18", "R20")
FLOAT8, MX = "torchao.float8.rowwise", "torchao.mxfp8.floor"
TENSORWISE = "torchao.float8.tensorwise"
SCALED_MM = "torch.scaled_mm"
OTHER_BACKEND = {MX: "wrapper", SCALED_MM: "rowwise"}
#: Rules that look inside: their operands are out of a plain script's reach under aot_eager.
TAPPED = ("O2", "O3", "O4", "O13", "R12", "R13", "R14", "R15", "R21", "R22")


def literal_lines(tree: ast.Module) -> int:
    """Lines of the statements ``name = tensor(...)`` and ``tensors = unpacked(...)``: data, not
    program."""
    return sum(
        node.end_lineno - node.lineno + 1
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in ("tensor", "unpacked")
        and node.end_lineno is not None
    )


def assert_stands_alone(text: str, limit: int = MAX_LINES) -> None:
    literals = literal_lines(standing_alone(text))
    assert len(text.splitlines()) - literals <= limit, text


def verdict_of(rule: str, arm: str, **changes: Any) -> Verdict:
    """A verdict as that rule would give it, pointing at the first element."""
    fields: dict[str, Any] = {"role": "output", "symptom": "wrong value", "got": "2", "side": "a"}
    fields |= {"status": "diverged", "expect": Within(bits(0.5), bits(1.0)), "index": (0, 0)}
    if rule == "contract":
        fields |= {"role": "forward", "status": "crashed", "what": "error", "index": ()}
        fields |= {"expect": Runs("RuntimeError")}
    elif rule == "census":
        fields |= {"role": "convert", "symptom": "hooks lost", "what": "module", "index": ()}
    elif rule == "O3":
        fields |= {"expect": Is(bits(127), byte=True), "what": "scale"}
    elif rule == "R22":
        row = At(what="significand", name="output", side="a", index=(0, 0))
        fields |= {"role": "grad_weight", "what": "significand", "side": "b", "expect": Same(row)}
    elif rule in ("O2", "O4", "R21"):
        what = {"O2": "codes", "O4": "amax", "R21": "values"}[rule]
        fields |= {"expect": Is(bits(448)), "what": what}
    elif rule == "R13":
        fields |= {
            "expect": Ordered(bits(1), At(what="codes", name="output", side="a", index=(0, 1)))
        }
        fields |= {"what": "codes"}
    elif rule == "O1":
        fields |= {"expect": Same(At(name="output", index=(0, 0), run=AGAIN), "1")}
    elif rule == "O12":
        plain = At(name="output", index=(0, 0), run=ARMS[arm].stage)
        fields |= {"expect": Same(plain, "1")}
    elif rule == "O13":
        there = At(what="codes", name="output", side="a", index=(0, 0), phase="forward")
        fields |= {"what": "codes", "phase": "recompute", "expect": Same(there, "1")}
    fields |= changes
    place = {name: fields.pop(name) for name in At.__struct_fields__ if name in fields}
    at = At(**{"name": fields["role"], **place})
    return Verdict(rule, arm, at=at, **fields)


def of_relation(rule: str, case: Case, **changes: Any) -> Verdict:
    """The verdict of a relation that points into the first of its other runs."""
    recipe = recipes()[case.spec.recipe]
    tensors = make_tensors(case, recipe.plan(case.spec))
    event = {"R18": "steps", "R20": "reload"}.get(rule, "")
    others = [OtherRun("another run", case.spec, tensors, event)]
    if rule == "R10":
        others = [half.run for half in halves(case.spec, recipe.plan(case.spec), tensors)]
    elif rule in VARIANTS and not event:
        found = variants(rule, case, recipe.plan(case.spec), tensors)
        others = [variant.run for variant in found[:1]]
    # what is not quantised is not tapped
    plain = case.spec.recipe.startswith("torch.fp32")
    side = {"side": ""} if plain or rule in ("R1", "R2", "R3", "R4", "R10", "R19") else {}
    what = {"R12": "values", "R14": "codes", "R15": "codes"}.get(rule, "codes")
    fields: dict[str, Any] = {"what": "result" if side else what, **side, **changes}
    here = At(what=fields["what"], name=fields.get("role", "output"),
              side=fields.get("side", "a"), index=(0, 0))  # fmt: skip
    fields = {"expect": Same(here, "1", 0.5 if side else 1.0), **fields}
    run = " + ".join(other.name for other in others)
    return verdict_of(rule, "eager", run=run, runs=tuple(others), **fields)


RICH = Spec(recipe=FLOAT8, m=3, k=32, n=5, batch=2, bias=True, input_layout="strided",
            grad_layout="expanded", checkpoint="reentrant", compile="inductor")  # fmt: skip
SPECS = {
    "plain": Spec(recipe="torch.fp32", dtype="fp32"),
    "rich": RICH,
    "transposed": Spec(recipe=TENSORWISE, backend="emulated", grad_layout="transposed",
                       input_layout="transposed", checkpoint="full", dtype="fp32"),
    "mx": Spec(recipe=MX, bias=True, m=64),
    "wrapper": Spec(recipe=MX, backend="wrapper", batch=2),
    "empty": Spec(recipe=FLOAT8, m=0, bias=True),
}  # fmt: skip


#: Arms whose scripts are made as those of others: every kind of recompute is there in eager code
#: and in Inductor's. One Spec takes them all.
REPEATS = {a.name for a in LADDER if a.recomputes and a.stage not in ("eager", "inductor")}


def places() -> Iterator[tuple[str, str]]:
    """(rule, Spec) wherever the rule can be broken."""
    for name, spec in SPECS.items():
        for rule in RULES:
            inside = rule.name in TAPPED and (name == "empty" or spec.recipe == "torch.fp32")
            amax = rule.name == "O4" and spec.recipe == MX
            empty = rule.name in VARIANTS and name == "empty"  # an operand without elements
            models = rule.name in (
                "O9",
                "O18",
                "O21",
                "O22",
                "R23",
            )  # test_script_model.py, test_play.py
            if not (inside or amax or empty or models) and says_something(rule.name, spec):
                yield rule.name, name


def says_something(relation: str, spec: Spec) -> bool:
    """False where a relation of shape has no second run of this Spec."""
    case = Case(spec=spec, data=DataSpec())
    plan = recipes()[spec.recipe].plan(spec)
    tensors = make_tensors(case, plan)
    if relation == "R10":
        return bool(halves(spec, plan, tensors))
    if relation in VARIANTS and relation not in ("R18", "R20"):
        return bool(variants(relation, case, plan, tensors))
    return True


def arms_of(rule: str) -> list[str]:
    """Relations, recompute and amax are judged eager only."""
    names = [arm.name for arm in LADDER[1:]]
    if rule == "O12":
        return [name for name in names if name.startswith("eager+checkpoint")]
    if rule == "O13":
        return [name for name in names if "checkpoint" in name]
    if rule == "O8":
        return [name for name in names if not name.startswith("eager")]
    if rule == "O4":
        return [name for name in names if name.startswith("eager")]
    if rule == "R22":
        return [name for name in names if "checkpoint" not in name]
    return ["eager"] if rule == "census" or BY_NAME[rule].reruns or rule == "R13" else names


@pytest.mark.one_in(72)
@pytest.mark.parametrize(
    ("rule", "name"),
    places(),
)
def test_every_rules_script_stands_alone(rule: str, name: str) -> None:
    case = Case(spec=SPECS[name], data=DataSpec())
    recipe = recipes()[case.spec.recipe]
    if rule != "census" and BY_NAME[rule].reruns and rule != "R21":
        assert_stands_alone(script_of(case, of_relation(rule, case), recipe), MAX_PLAYED_LINES)
        return
    for arm in arms_of(rule):
        if name != "rich" and arm in REPEATS:
            continue
        verdict = verdict_of(rule, arm)
        assert_stands_alone(script_of(case, verdict, recipe), MAX_PLAYED_LINES)


@pytest.mark.parametrize(
    ("rule", "arm"),
    [
        ("O5", "eager"),
        ("O2", "eager+checkpoint"),
        ("O15", "inductor"),
        ("O1", "eager"),
        ("contract", "aot_eager"),
    ],
)
def test_a_single_linear_has_a_short_script(rule: str, arm: str) -> None:
    case = Case(spec=SPECS["plain"] if rule == "O5" else SPECS["transposed"], data=DataSpec())
    text = script_of(case, verdict_of(rule, arm), recipes()[case.spec.recipe])
    assert_stands_alone(text, MAX_TAPPED_LINES if rule == "O2" else MAX_LINES)


@pytest.mark.parametrize(("what", "bound"), [("scale", False), ("result", False), ("result", True)])
@pytest.mark.one_in(36)
@pytest.mark.parametrize(("rule", "name"), (p for p in places() if p[0] in VARIANTS))
def test_every_variants_symptom_has_a_script(rule: str, name: str, what: str, bound: bool) -> None:
    case = Case(spec=SPECS[name], data=DataSpec())
    side = {"side": "b", "index": (0, 0)} if what == "scale" else {"side": ""}
    expect = {"expect": Within(bits(0.5), bits(1.0))} if bound else {}
    if what == "scale" and name == "plain":
        pytest.skip("it has no scales")
    for role in ("output", "grad_input", "grad_weight"):
        verdict = of_relation(rule, case, what=what, role=role, **side, **expect)
        text = script_of(case, verdict, recipes()[case.spec.recipe])
        assert_stands_alone(text, MAX_PLAYED_LINES)


def test_a_state_that_cannot_be_loaded_has_a_script() -> None:
    case = Case(spec=SPECS["wrapper"], data=DataSpec())
    verdict = of_relation("R20", case, role="state", side="", what="error", expect=Runs("Error"))
    text = script_of(case, verdict, recipes()[MX])
    assert_stands_alone(text, MAX_PLAYED_LINES)
    assert "('reload', True)" in text
    assert "{trace.doing or trace.phase} raises" in text and "trace.doing = 'load'" in text


@pytest.mark.parametrize(
    "expect",
    [
        Refuses("", "RuntimeError", "time"),
        Refuses("", "AssertionError", "layer"),
        Refuses("a rule"),
        Runs("RuntimeError"),
        Runs(),
    ],
)
def test_every_contract_expectation_has_a_script(expect: Expect) -> None:
    case = Case(spec=Spec(recipe=MX, k=33), data=DataSpec())
    verdict = verdict_of("contract", "eager", expect=expect)
    assert_stands_alone(script_of(case, verdict, recipes()[MX]))


@pytest.mark.parametrize("text", ['""" quoted', "back\\slash", 'ends in a quote"', "new\nline"])
def test_what_a_library_said_cannot_break_the_script(text: str) -> None:
    case = Case(spec=Spec(recipe=FLOAT8), data=DataSpec())
    verdict = verdict_of(
        "contract", "eager", got=text, symptom=text, name=text, expect=Refuses(text)
    )
    assert_stands_alone(script_of(case, verdict, recipes()[FLOAT8]))


@pytest.mark.parametrize("raw", ["0x7fc00000", "0x7f800000", "0x80000000", "0x00000001"])
def test_special_values_reach_the_script_bit_for_bit(raw: str) -> None:
    case = Case(
        spec=Spec(recipe="torch.fp32", dtype="fp32", m=1, k=1, n=1),
        data=DataSpec(spikes=(Spike("input", 0, 0, raw),)),
    )
    text = script_of(case, verdict_of("O5", "eager"), recipes()["torch.fp32"])
    assert f'"{bytes.fromhex(raw[2:])[::-1].hex()}"' in text


@pytest.mark.parametrize(
    "expect", [Within(bits(-math.inf), bits(1.0)), Is(bits(math.nan))], ids=["infinite", "NaN"]
)
def test_special_bounds_are_valid_python(expect: Expect) -> None:
    case = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
    for rule in ("O5", "O11"):
        verdict = verdict_of(rule, "eager", expect=expect)
        assert_stands_alone(script_of(case, verdict, recipes()["torch.fp32"]))


@pytest.mark.parametrize("batch", [0, 2])  # the short form, and one that is played
@pytest.mark.parametrize(("got", "code"), [(1.0, 0), (4.0, 0), (3.0, 1)])
def test_a_ladders_sum_is_checked_to_the_bit_against_all_that_is_allowed(
    batch: int, got: float, code: int
) -> None:
    expect = OneOf((Within(bits(1.0), bits(1.0)), Within(bits(4.0), bits(4.0))))
    case = Case(spec=Spec(recipe="torch.fp32", dtype="fp32"), data=DataSpec(regime="ladder"))
    if batch:
        case = msgspec.structs.replace(case, spec=Spec(recipe="torch.fp32", lifecycle="deepcopy"))
    text = script_of(case, verdict_of("O23", "eager", expect=expect, side=""),
                        recipes()[case.spec.recipe])  # fmt: skip
    assert_stands_alone(text, MAX_PLAYED_LINES)
    check = next(line for line in text.splitlines() if line.startswith("sys.exit(0 if"))
    with pytest.raises(SystemExit) as ended:
        exec(f"import sys\n{check}", {"got": got})
    assert ended.value.code == code


def draws(recipe: str) -> Iterator[Case]:
    """Cases among which every planted fault of that recipe shows."""
    specs = [
        Spec(recipe=recipe, n=64),
        Spec(recipe=recipe, bias=True, checkpoint="full", batch=2, dtype="fp32"),
        Spec(recipe=recipe, backend=OTHER_BACKEND.get(recipe, "emulated")),
        Spec(recipe=recipe, batch=2, m=16, n=32)
        if recipe == MX
        else Spec(recipe=recipe, input_layout="transposed"),
    ]
    data = [
        DataSpec(),
        DataSpec(values="binade_edges", seed=3),
        DataSpec(values="zero_rows", seed=5),
        DataSpec(values="subnormal", seed=1),
        DataSpec(values="inf_nan", spikes=(Spike("input", 1, 1, "0x7fc00000"),)),
        DataSpec(values="heavy_tail", input_exponent=7, seed=2),
    ]
    yield from (Case(spec=spec, data=one) for one in data for spec in specs)


def causes(fault_id: str, rules: tuple[str, ...] = ()) -> list[tuple[Case, Verdict]]:
    """First causes of these rules that are the fault's, on the first case that has one."""
    fault = builtin_faults()[fault_id]
    recipe = MX if fault.recipes == ("torchao.mxfp8.*",) else FLOAT8
    if fault.recipes == (SCALED_MM,):
        recipe = SCALED_MM
    if fault_id in ("scale-through-bf16", "scale-rounded-after-cast"):  # rowwise are powers of two
        recipe = TENSORWISE
    clean = clean_fingerprints(recipe)  # before anything is planted
    with fault.plant():
        judge = Judge(recipes(), Ledger([]), select_arms(["eager*"]))
        for case in draws(recipe):
            judgement = judge.judge(case)
            found = [
                (case, v)
                for v in judgement.causes
                if (not rules or v.rule in rules)
                and fingerprint(v, judgement.family) not in clean[case.id]
            ]
            if found:
                return found
    return []


@cache
def clean_fingerprints(recipe: str) -> dict[str, set[str]]:
    """What the library does by itself on the recipe's cases."""
    judge = Judge(recipes(), Ledger([]), select_arms(["eager*"]))
    return {case.id: judge.judge(case).fingerprints() for case in draws(recipe)}


#: Those with a drawn case of their own: tests/plants/test_faults.py.
DRAWN = set(json.loads((Path(__file__).parents[1] / "fault_cases.json").read_text()))
#: Those that take a schedule: tests/plants/test_state_faults.py.
OF_SCHEDULES = {
    id
    for id, fault in builtin_faults().items()
    if all(glob.startswith(("te.", "reference.")) for glob in fault.recipes)
}
NEED_MORE = {id for id, fault in builtin_faults().items() if fault.compiled or fault.needs}
#: Those of a device: tests/simulated_checks.py.
OF_DEVICES = {id for id, fault in builtin_faults().items() if fault.device}
#: Shown elsewhere: test_script_models.py, tests/rules/test_census.py, tests/rules/test_sharded.py,
#: tests/plants/test_faults.py.
OF_RANKS = {id for id, fault in builtin_faults().items() if "sharded*" in fault.arms}
ELSEWHERE = {"kernel-aborts", "device-lost"} | NEED_MORE
ELSEWHERE |= OF_SCHEDULES | DRAWN | OF_DEVICES | OF_RANKS


def test_what_no_linear_shows_has_a_case_of_its_own() -> None:
    """Below, each fault is shown on linears."""
    faults = builtin_faults()
    assert not [id for id in set(faults) - ELSEWHERE if faults[id].models]


#: They ask what the library does by itself on the same cases.
TOGETHER = pytest.mark.xdist_group("clean fingerprints")
#: Ten seconds each: their cases raise, or are minimised in many ways.
SLOW = {"amax-ignores-negatives", "backward-unsupported"}


@TOGETHER
@pytest.mark.one_in(45)
@pytest.mark.parametrize(
    "fault_id",
    [
        *sorted(set(builtin_faults()) - ELSEWHERE - SLOW),
        *(pytest.param(id, marks=pytest.mark.heavy) for id in sorted(SLOW - ELSEWHERE)),
    ],
)
def test_a_first_cause_of_every_planted_fault_has_a_script(fault_id: str) -> None:
    """A finding without a script is not reported: the fault would go unseen."""
    found = causes(fault_id)
    assert found, "no rule sees it"
    refusals = []
    for case, verdict in found:
        try:
            text = script_of(case, verdict, recipes()[case.spec.recipe])
            assert_stands_alone(text, MAX_PLAYED_LINES)
        except ValueError as error:
            refusals.append(f"{verdict.rule}: {error}")
    assert len(refusals) < len(found), "; ".join(refusals)


@pytest.mark.one_in(6)
@TOGETHER
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault_id", "rules"),
    [
        ("amax-ignores-negatives", ("O4",)),
        ("scale-rounded-after-cast", ("O3",)),
        ("cast-shrinks", ("O2",)),
        ("mx-scale-byte-plus-one", ("O3",)),
        ("gemm-loses-element", ("O15",)),
        ("backward-unsupported", ("contract",)),
        ("recompute-drifts", ("O13", "O12")),
        ("conversion-does-nothing", ("census",)),
    ],
)
def test_a_script_fails_under_its_fault_and_passes_without(
    tmp_path: Path, scripts: RunScript, fault_id: str, rules: tuple[str, ...]
) -> None:
    case, verdict = causes(fault_id, rules)[0]
    path = tmp_path / "repro.py"
    path.write_text(script_of(case, verdict, recipes()[case.spec.recipe]))
    assert_shows(scripts, path, ("", fault_id))


#: A relation, a fault it sees alone, and where: Spec and data.
BROKEN: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("R5", "row-tail-scale", {}, {}),
    ("R5", "mx-block-leaks-rows", {"recipe": MX, "m": 64}, {"values": "heavy_tail"}),
    ("R6", "column-tail-scale", {"bias": True, "batch": 2}, {"regime": "lattice"}),
    ("R7", "k-tail-dropped", {"input_layout": "transposed"}, {}),
    ("R8", "k-odd-blocks", {"k": 64, "bias": True}, {"regime": "lattice"}),
    ("R9", "rows-ragged", {}, {}),
    ("R10", "tokens-ragged", {"backend": "emulated", "dtype": "fp32"}, {"regime": "lattice"}),
    ("R11", "weight-flushed", {"n": 48}, {}),
    ("R16", "strides-ignored", {"input_layout": "transposed"}, {}),
    ("R17", "batched-gain", {"batch": 2}, {}),
    ("R18", "cache-unfilled", {}, {}),
    ("R19", "bias-forgotten", {"bias": True}, {}),
    ("R20", "state-half-loaded", {"bias": True}, {}),
    ("R21", "cast-truncates", {}, {}),
    ("R22", "transposed-copy-garbled", {}, {}),
    ("R23", "gradient-accumulated-twice", {"microbatches": 2}, {}),
    ("O12", "no-grad-unquantised", {"checkpoint": "reentrant"}, {}),
    ("R4", "cast-rounds-upwards", {}, {}),
)


@pytest.mark.one_in(9)
@pytest.mark.slow
@pytest.mark.parametrize(("relation", "fault_id", "spec", "data"), BROKEN)
def test_a_relations_script_fails_under_its_fault_and_passes_without(
    tmp_path: Path,
    scripts: RunScript,
    relation: str,
    fault_id: str,
    spec: dict[str, Any],
    data: dict[str, Any],
) -> None:
    """Judged alone: with the rules below it in play it is a mere consequence."""
    case = Case(spec=Spec(**{"recipe": FLOAT8, **spec}), data=DataSpec(**data))
    with builtin_faults()[fault_id].plant():
        judge = Judge(recipes(), Ledger([]), select_arms(["eager*"]))
        verdict = judge.judge(case, (BY_NAME[relation],)).causes[0]
    path = tmp_path / "repro.py"
    path.write_text(script_of(case, verdict, recipes()[case.spec.recipe]))
    assert_shows(scripts, path, ("", fault_id))


def test_a_traceback_is_not_a_divergence(tmp_path: Path) -> None:
    path = tmp_path / "repro.py"
    path.write_text("raise RuntimeError('mine')")
    run = run_script(path)
    assert run.code == 1 and not run.shown and not run.crashed


def test_a_script_that_never_ends_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "repro.py"
    path.write_text("import time\ntime.sleep(60)")
    run = run_script(path, timeout=0.5)
    assert (run.code, run.shown, run.crashed) == (None, False, False)
    assert "no verdict within" in run.output


def test_a_signal_is_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "repro.py"
    path.write_text("import os\nprint('before', flush=True)\nos.abort()")
    run = run_script(path)
    assert run.crashed and not run.shown and "before" in run.output


def test_a_script_does_not_see_the_environment_of_the_campaign(tmp_path: Path) -> None:
    path = tmp_path / "repro.py"
    path.write_text("import os\nprint(os.environ['TORCHINDUCTOR_CACHE_DIR'])")
    outputs = {run_script(path).output for _ in range(2)}
    assert len(outputs) == 2  # a fresh cache each time: a stale artefact cannot answer


def test_triage_keeps_the_rungs_the_divergence_needs() -> None:
    from narrowfuzz.triage.forms import _only_as_dear

    case = Case(spec=RICH, data=DataSpec())
    assert _only_as_dear(case, "eager").spec == msgspec.structs.replace(
        RICH, compile="none", checkpoint="none"
    )
    assert _only_as_dear(case, "inductor").spec.compile == "inductor"
    assert _only_as_dear(case, "aot_eager").spec.compile == "aot_eager"
    assert _only_as_dear(case, "eager+checkpoint").spec.checkpoint == "reentrant"


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (2.0, 1)])
def test_a_layer_that_gets_no_gradient_has_a_script(
    tmp_path: Path, scripts: RunScript, factor: float, code: int
) -> None:
    """Under no_grad no gradient comes back: its script runs forward, and checks the output."""
    spec = Spec(recipe=FLOAT8, m=2, k=16, n=4, grad_mode="no_grad")
    tensors = make_tensors(Case(spec=spec, data=DataSpec()), recipes()[FLOAT8].plan(spec))
    layer = {name: t for name, t in tensors.items() if name != "grad_output"}
    whole = Case(spec=spec, data=DataSpec())
    got = float(Judge(recipes(), Ledger([])).run_arms(Case(spec=spec, data=DataSpec()))["eager"]
                .outputs["output"][0, 0])  # fmt: skip
    only = Within(bits(got * factor), bits(got * factor))
    verdict = verdict_of("O5", "eager", expect=only, layer="up")
    path = tmp_path / "repro.py"
    path.write_text(script_of(whole, verdict.of_linear(), recipes()[FLOAT8], layer))
    run = scripts(path)
    assert run.code == code, run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["import no_such_library", "raise RuntimeError('not this')", "torch.ones(2) @ torch.ones(3)"],
)
def test_what_is_not_its_subject_ends_a_script_with_125(
    tmp_path: Path, scripts: RunScript, text: str
) -> None:
    case = Case(spec=Spec(recipe="torch.fp32", dtype="fp32", m=1, k=1, n=1), data=DataSpec())
    script = script_of(case, verdict_of("O5", "eager"), recipes()["torch.fp32"])
    path = tmp_path / "repro.py"
    path.write_text(script.replace("torch.set_num_threads(1)", f"torch.set_num_threads(1)\n{text}"))
    run = scripts(path)
    assert run.code == 125 and not run.shown, run.output


@pytest.mark.parametrize(
    ("raised", "code"), [("ValueError('no')", 1), ("TypeError('no')", 125), ("None", 0)]
)
def test_another_error_is_not_this_scripts_subject(raised: str, code: int) -> None:
    check = check_text(verdict_of("contract", "eager", expect=Runs("ValueError")))
    source = "import re, sys\nphase = 'forward'\ninput = weight = grad_output = None\n"
    source += (
        f"def run(*args):\n    error = {raised}\n    if error: raise error\n{check}\nsys.exit(0)"
    )
    with pytest.raises(SystemExit) as ended:
        exec(source, {})
    assert ended.value.code == code
