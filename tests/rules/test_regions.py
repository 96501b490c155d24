"""Autocast regions around several forwards, and checkpoints inside checkpoints, of converted
models."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from draws import ONCE
from hypothesis import given, settings
from narrowfuzz.case.altered import around_forwards, in_order, without_regions
from narrowfuzz.case.event_rules import Standing
from narrowfuzz.case.events import Backward, Close, Event, Forward, Open, Reload, Step
from narrowfuzz.case.features import features
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import trainings
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe.recipe import runnable
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.verify import RunScript
from samples import every_recipe, recipes

B0, B1 = Backward(of=(0,)), Backward(of=(1,))
LOOK = Forward(mode="no_grad")
#: Two microbatches and an evaluation in one region.
TOGETHER = (Open(), Forward(), LOOK, Forward(), Close(), B0, Backward(of=(2,)), Step())


@cache
def judge() -> Judge:
    return Judge(every_recipe(), Ledger([]))


def spec_of(*events: Event, **fields: Any) -> Spec:
    return Spec(**{"recipe": "torch.fp32", "dtype": "fp32", "events": events, **fields})


def case_of(*events: Event, **fields: Any) -> Case:
    return Case(spec=spec_of(*events, **fields), data=DataSpec(seed=3))


def of(verdicts: tuple[Verdict, ...], rule: str) -> set[str]:
    return {v.status for v in verdicts if v.rule == rule}


def test_a_region_narrows_the_forwards_in_it() -> None:
    inside = Forward(inside=True)
    off = (Open(), Open(enabled=False), Forward(), inside, Close(), Forward(), Close(), Forward())
    assert spec_of(*off).narrowed == {1, 2}
    assert spec_of(*TOGETHER).narrowed == {0, 1, 2}
    assert spec_of(Forward(), B0).narrowed == frozenset()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", ["torch.fp32", "torchao.float8.rowwise"])
@pytest.mark.parametrize("model", ["linear", "mlp_gelu", "attention", "tied_embedding"])
def test_forwards_of_one_region_are_judged_by_every_rule(recipe: str, model: str) -> None:
    judged = judge().judge(case_of(*TOGETHER, recipe=recipe, model=model))
    assert not judged.causes, judged.causes[0].sentence()
    assert of(judged.verdicts, "R24") == {"ok"}
    assert "ok" in of(judged.verdicts, "O5")
    calls = judge().run_arms(judged.case)["eager"].calls
    assert {call.dtype for call in calls} == {"bf16"}


def test_only_what_a_region_narrows_returns_its_type() -> None:
    events = (Open(), Forward(), Close(), B0, Step(), Forward(), B1)
    calls = judge().run_arms(case_of(*events, model="mlp_gelu"))["eager"].calls
    assert {(call.forward, call.dtype) for call in calls} == {(0, "bf16"), (1, "fp32")}


@pytest.mark.parametrize(
    ("events", "fields", "why"),
    [
        (
            (Open(), Forward(), B0, Close()),
            {},
            r"event 2 \(Backward\) .*: autocast is for forwards",
        ),
        ((Open(), Forward(), Close(), B0, Open(), Step(), Close()), {}, "close the region first"),
        ((Open(), Forward()), {}, "a region is open when the training ends"),
        (TOGETHER, {"autocast": True}, "all of it runs under autocast"),
        (TOGETHER, {"recipe": "torch.bf16", "dtype": "bf16"}, "not run under autocast in bf16"),
        (TOGETHER, {"checkpoint": "reentrant"}, "no reentrant checkpoint"),
        ((Open(), Open(), Open()), {}, "regions nest at most two deep"),
    ],
)
def test_regions_that_make_no_sense_are_refused(
    events: tuple[Event, ...], fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        judge().judge(case_of(*events, **fields))


def test_regions_are_around_forwards_alone() -> None:
    far = (Open(), Forward(), B0, Open(enabled=False), Step(), Close(), Forward(), B1, Close())
    assert around_forwards(far) == (
        Open(), Forward(), Close(), B0, Step(), Open(), Forward(), Close(), B1,
    )  # fmt: skip
    assert without_regions(far) == (Forward(), B0, Step(), Forward(), B1)
    inside = Forward(inside=True)
    assert in_order(TOGETHER) == (
        inside, B0, Forward(mode="no_grad", inside=True), inside, Backward(of=(2,)), Step(),
    )  # fmt: skip


@settings(ONCE, max_examples=60)
@given(trainings([r for n in ("torch.fp32", "torchao.float8.rowwise")
                  if (r := runnable(recipes()[n], "cpu"))]))  # fmt: skip
def test_drawn_regions_are_valid_and_stand_around_forwards(spec: Spec) -> None:
    judge().recipe(spec).check(spec)
    standing = Standing()
    for event in spec.events:
        assert not (standing.regions and isinstance(event, Backward | Step | Reload))
        standing.take(event)
    assert spec.narrowed or not any(isinstance(e, Open) and e.enabled for e in spec.events)


def test_a_shared_region_is_told_from_regions_of_their_own() -> None:
    assert "shared region" in features(spec_of(*TOGETHER))
    apart = (Open(), Forward(), Close(), Open(), Forward(), Close(), B0, B1, Step())
    assert "shared region" not in features(spec_of(*apart))
    off = (Open(enabled=False), Forward(), Forward(), Close(), B0, B1, Step())
    assert "shared region" not in features(spec_of(*off))


def test_what_torch_makes_of_casts_that_selective_checkpoints_share_is_known() -> None:
    case = case_of(*TOGETHER, model="mlp_gelu", checkpoint="selective")
    (cause,) = judge().judge(case).causes
    assert "fails only in recompute" in cause.symptom
    known = Judge(every_recipe(), load_ledger()).judge(case)
    assert not known.causes
    assert {v.explained_by for v in known.known} == {"sac-autocast-cached-cast"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpoint", ["full", "reentrant"])
@pytest.mark.parametrize("model", ["llama_block", "two_blocks", "joined_blocks"])
def test_a_checkpoint_inside_a_checkpoint_recomputes_the_same(checkpoint: str, model: str) -> None:
    case = case_of(
        recipe="torchao.float8.rowwise", model=model, checkpoint=checkpoint, wraps="nested",
        dtype="bf16",
    )  # fmt: skip
    judged = judge().judge(case)
    assert not judged.causes, judged.causes[0].sentence()
    assert of(judged.verdicts, "O12") == of(judged.verdicts, "O13") == {"ok"}
    calls = judge().run_arms(case)[judged.verdicts[-1].arm].calls
    again = [call for call in judge().run_arms(case)[_arm(case)].calls if call.phase == "recompute"]
    forwards = [call for call in calls if call.phase == "forward"]
    assert len(again) == 2 * len(forwards)  # of the whole, and of each part in it


def _arm(case: Case) -> str:
    return judge().rungs(case.spec)[-1].name


def test_a_recompute_that_forgets_to_quantise_is_seen_in_a_nested_checkpoint() -> None:
    case = case_of(
        recipe="torchao.float8.rowwise", model="llama_block", checkpoint="full", wraps="nested",
        dtype="bf16",
    )  # fmt: skip
    with builtin_faults()["recompute-unquantised"].plant():
        causes = judge().judge(case).causes
    # torch itself counts what a recompute saves
    assert {v.rule for v in causes} & {"O12", "O13", "contract"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": "mlp_gelu", "checkpoint": "full", "wraps": "nested"}, "has no parts"),
        ({"model": "llama_block", "checkpoint": "selective", "wraps": "nested"}, "keeps nothing"),
        ({"model": "llama_block", "checkpoint": "full", "wraps": "each"}, "of a converted model"),
    ],
)
def test_what_no_checkpoint_wraps_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        judge().judge(case_of(**fields))


LIBRARY = {"recipe": "reference.delayed", "model": "library_linear", "dtype": "bf16"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (LIBRARY | {"compile": "inductor"}, "compile 'inductor' is of a converted model"),
        (LIBRARY | {"kernels": "both"}, "kernels 'both' is of a converted model"),
        (LIBRARY | {"steps": 2}, "events say what each step is"),
        ({"layout": "twice"}, "layout 'twice' is of a library's own layers"),
        ({"quantized_init": True}, "quantized_init True is of a library's own layers"),
        ({"checkpoint": "by_torch"}, "torch.fp32 takes none, full, reentrant, selective"),
    ],
)
def test_a_field_that_would_say_nothing_is_refused(fields: dict[str, Any], why: str) -> None:
    """Else a case would be judged as what it was not: eager under a compiled rung's name."""
    with pytest.raises(ValueError, match=why):
        judge().judge(case_of(Forward(), B0, Step(), **fields))


@pytest.mark.parametrize("name", ["region-keeps-graphless-cast", "recompute-unquantised"])
def test_what_regions_and_nested_checkpoints_show_has_a_script(
    name: str, scripts: RunScript
) -> None:
    nested = {"recipe": "torchao.float8.rowwise", "model": "llama_block", "wraps": "nested"}
    case = case_of(Open(), LOOK, Forward(), Close(), Backward(of=(1,)))
    if name == "recompute-unquantised":
        case = case_of(**nested, checkpoint="full", dtype="bf16", backend="emulated")
    with builtin_faults()[name].plant():
        cause = judge().judge(case).causes[0]
        proof = proven(judge(), case, cause, ("", name), scripts)
    assert not proof.why, proof.output
