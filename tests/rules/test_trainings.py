"""Trainings of models: which events are valid, what they do, and what they may not change."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from draws import drawn_apart
from hypothesis import given
from narrowfuzz.arms.program import Program
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.case import altered
from narrowfuzz.case import features as of_training
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.event_data import stimulated
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Step,
    Switch,
    last_gradients,
    plain_training,
    with_regions,
)
from narrowfuzz.case.spec import Case, DataSpec, Optimizer, Spec, Spike, dump_case, load_case
from narrowfuzz.case.trainings import check_events
from narrowfuzz.draw.specs import partly_recomputed, trainings
from narrowfuzz.draw.trainings import drawn_events
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.triage.minimise import minimise
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.simplify import simpler_events
from narrowfuzz.triage.verify import RunScript
from samples import recipes

LOOK, RATE = Forward(mode="eval"), 2.0**-6
#: Everything that may happen.
FULL: tuple[Event, ...] = (
    Forward(), Forward(mode="eval", shift=3), Forward(),
    Backward(of=(0,), retain=True), Backward(of=(0,)), Backward(of=(2,)), Step(), Reload(),
    Forward(values="spike"), Forward(), Backward(of=(3, 4), shift=-2), Step(), Reload(back=True),
    Forward(mode="no_grad"), Forward(), Backward(of=(6,)), Step(),
)  # fmt: skip


def case_of(events: tuple[Event, ...], recipe: str = "torch.fp32", **spec: Any) -> Case:
    fields = {"model": "mlp_gelu", "m": 32, "k": 32, "n": 64, "events": events}
    if recipe == "torch.fp32":
        fields["dtype"] = "fp32"
    return Case(spec=Spec(recipe=recipe, **{**fields, **spec}), data=DataSpec(seed=5))


def judge() -> Judge:
    return Judge(recipes(), Ledger([]))


def test_steps_and_microbatches_are_a_training() -> None:
    one = (Forward(), Backward(of=(0,)))
    assert plain_training(1, 1, "train") == one
    assert plain_training(1, 2, "train") == (*one, Forward(), Backward(of=(1,)))
    assert plain_training(2, 1, "train") == (*one, Step(), Forward(), Backward(of=(1,)), Step())
    assert plain_training(1, 1, "inference") == (Forward(mode="inference"),)


def test_gradients_that_are_left_are_those_since_the_last_used_step() -> None:
    assert last_gradients(plain_training(3, 2, "train")) == (4, 5)
    assert last_gradients(FULL) == (6,)
    assert last_gradients((Forward(), Backward(of=(0,)), Step(), LOOK)) == (0,)


@pytest.mark.parametrize(
    ("events", "spec", "says"),
    [
        ((Backward(of=(0,)),), {}, r"event 0 \(Backward\).*forward 0 has no graph"),
        ((Forward(), Backward(of=(0,)), Backward(of=(0,))), {}, "event 2.*already used"),
        ((Forward(), Step()), {}, "graph still waits"),
        ((LOOK, Step()), {}, "no gradient has been accumulated"),
        ((Open(), Forward()), {}, "a region is open when the training ends"),
        ((Forward(), Close()), {}, "no open region to close"),
        ((Switch(margin=1),), {}, "converted once"),
        ((Forward(path=1),), {}, "neither weights to keep nor branches"),
        ((Forward(inside=True),), {"dtype": "bf16"}, "not run under autocast in bf16"),
        ((Forward(inside=True),), {"checkpoint": "reentrant"}, "leaves, whose casts autocast"),
        ((Forward(mode="inference"),), {}, "'eval' or 'no_grad'"),
        ((Forward(shift=1),), {"model": "tied_embedding"}, "token ids"),
        (FULL, {"compile": "aot_eager"}, "kept graphs need compile 'none'"),
        (FULL, {"checkpoint": "selective"}, "backward once"),
        ((Forward(),), {"steps": 2}, "leave steps"),
        ((Forward(),), {"grad_mode": "no_grad"}, "grad_mode"),
    ],
)
def test_what_cannot_come_is_refused_with_the_event_and_the_reason(
    events: tuple[Event, ...], spec: dict[str, Any], says: str
) -> None:
    case = case_of(events, **spec)
    with pytest.raises(ValueError, match=says):
        check_events(case.spec, autocasts=True)
    with pytest.raises(ValueError, match=says):
        judge().judge(case)


@given(trainings(list(recipes().values())))
def test_what_is_drawn_is_valid_and_shrinks_to_valid(spec: Spec) -> None:
    autocasts = recipes()[spec.recipe].autocasts
    check_events(spec, autocasts=autocasts)
    case = Case(spec=spec, data=DataSpec())
    assert load_case(dump_case(case)) == case
    assert of_training.features(spec) <= of_training.OF_CONVERTED
    for _, simpler in simpler_events(spec.events):
        assert simpler != spec.events
        check_events(msgspec.structs.replace(spec, events=simpler), autocasts=autocasts)


def by_hand(case: Case) -> dict[str, F32]:
    """FULL in fp32, written as its user would."""
    tensors = {
        n: torch.from_numpy(np.array(t))
        for n, t in tensors_of(case, recipes()["torch.fp32"]).items()
    }
    build = lambda: MODELS["mlp_gelu"].build(case.spec, dtype=torch.float32, device="cpu")  # noqa: E731
    model, left = build(), {}
    model.load_state_dict({n: tensors[n] for n, _ in model.named_parameters()})
    first = {n: t.clone() for n, t in model.state_dict().items()}
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    x, g = tensors["input"], tensors["grad_output"]

    def forward(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rows.clone().requires_grad_(True)
        return rows, model(rows)

    def spiked(rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(stimulated(rows.numpy(), "spike", 0, "fp32"))

    x0, y0 = forward(x)
    model.eval()
    with torch.no_grad():
        looked = model((x * 8).roll(1, 0))
    model.train()
    x1, y1 = forward(x.roll(1, 0))
    y0.backward(g, retain_graph=True)
    left["grad_input@0"], x0.grad = x0.grad, None
    y0.backward(g)
    left["grad_input@1"] = x0.grad
    y1.backward(g)
    left["grad_input@2"] = x1.grad
    left |= {f"{n}.grad@0": p.grad for n, p in model.named_parameters()}
    sgd.step()
    state, model = model.state_dict(), build()
    model.load_state_dict(state)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    (x2, y2), (x3, y3) = forward(spiked(x).roll(2, 0)), forward(x.roll(3, 0))
    torch.autograd.backward([y2, y3], [g / 4, g / 4])
    left |= {"grad_input@3": x2.grad, "grad_input@4": x3.grad}
    left |= {f"{n}.grad@1": p.grad for n, p in model.named_parameters()}
    sgd.step()
    model.load_state_dict(first)
    sgd.zero_grad()
    with torch.no_grad():
        second = model(x.roll(4, 0))
    x4, y4 = forward(x.roll(4, 0))
    y4.backward(g)
    left |= {"grad_input": x4.grad, "output": y4}
    left |= {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters()}
    sgd.step()
    outputs = (y0, looked, y1, y2, y3, second)
    left |= {f"output@{i}": y for i, y in enumerate(outputs)}
    left |= dict(model.named_parameters())
    return {name: t.detach().numpy() for name, t in left.items()}


def test_a_training_does_what_its_events_say() -> None:
    case = case_of(FULL)
    recipe = recipes()["torch.fp32"]
    trace = Program(case.spec, recipe, EAGER).run(tensors_of(case, recipe), tap=True)
    want = by_hand(case)
    assert trace.error is None and set(trace.outputs) == set(want)
    for name, x in want.items():
        assert same_bits(trace.outputs[name], x.reshape(trace.outputs[name].shape)).all(), name
    # each call knows its forward
    calls = [(c.module, c.index, c.forward) for c in trace.calls if c.module == "up"]
    assert calls == [("up", i, i) for i in range(7)]


def test_a_recompute_belongs_to_the_forward_that_it_repeats() -> None:
    events = (Forward(), Forward(), Backward(of=(1,)), Backward(of=(0,)))
    case = case_of(events, checkpoint="full")
    trace = judge().run_arms(case)["eager+checkpoint"]
    again = [c.forward for c in trace.calls if (c.module, c.phase) == ("up", "recompute")]  # type: ignore[union-attr]
    assert again == [1, 0]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("recipe", ["torch.bf16", "torchao.float8.rowwise", "torchao.mxfp8.rceil"])
@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        *itertools.product(
            ("linear", "mlp_swiglu", "used_twice", "dropout"), ("none", "full", "reentrant")
        ),
        ("two_blocks", "full"),
    ],
)
def test_a_clean_training_is_silent(recipe: str, model: str, checkpoint: str) -> None:
    backend = {"backend": "emulated"} if "float8" in recipe else {}
    case = case_of(FULL, recipe, model=model, checkpoint=checkpoint, **backend)
    judged = judge().judge(case)
    assert not judged.causes, judged.causes[0].sentence()
    spoke = {v.rule for v in judged.verdicts if v.status == "ok"}
    # a new model, and a look in training mode, draw random numbers
    assert "R27" in spoke and {"R24", "R25"} & spoke == (
        {"R24", "R25"} if model != "dropout" else set()
    )
    assert (checkpoint == "none") or (
        {"O13"} <= spoke and ("O12" in spoke) == (checkpoint == "full")
    )


B0 = Backward(of=(0,))


@pytest.mark.parametrize("checkpoint", ["full", "reentrant", "selective"])
def test_a_model_trains_again_once_it_was_evaluated(checkpoint: str) -> None:
    """What is recomputed right behind an evaluation drops out what its forward did."""
    case = case_of((Forward(), LOOK, B0), "torch.bf16", model="dropout", checkpoint=checkpoint)
    assert not judge().judge(case).causes


def test_events_are_minimised() -> None:
    case = case_of(FULL)

    def shows(candidate: Case) -> bool:
        try:
            check_events(candidate.spec, autocasts=True)
        except ValueError:
            return False
        return "second backward" in of_training.features(candidate.spec)

    small = minimise(case, shows).case.spec
    assert small.events == (Forward(), Backward(of=(0,), retain=True), Backward(of=(0,)))
    assert minimise(case, lambda candidate: True).case.spec.events == ()


PLANTED = [
    # the fault, what happens, and a rule that sees it
    ("cast-outlives-load", (Forward(), B0, Step(), LOOK, Reload(back=True), Forward(),
                            Backward(of=(2,)), Step()), {"R22"}),
    ("evaluations-amax", (Forward(mode="eval", shift=5), Forward(), Backward(of=(1,))), {"O4"}),
    ("recompute-keeps-cast", (Forward(), B0, Step(), LOOK, Reload(back=True), Forward(),
                              Backward(of=(2,)), Step()), {"O13"}),
    ("newest-input-kept", (Forward(), Forward(), B0, Backward(of=(1,))), {"O2"}),
    ("backward-adds-up", (Forward(), Backward(of=(0,), retain=True), B0), {"O15"}),
    ("evaluation-sticks", (LOOK, Forward(), Backward(of=(1,))), {"R24"}),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("fault", "events", "rules"), PLANTED, ids=[row[0] for row in PLANTED])
def test_what_needs_a_training_is_seen_in_one_and_nowhere_else(
    fault: str, events: tuple[Event, ...], rules: set[str]
) -> None:
    case = case_of(events, "torchao.float8.rowwise", backend="emulated", checkpoint="full")
    plain = case_of((), "torchao.float8.rowwise", backend="emulated", checkpoint="full", steps=2)
    assert not judge().judge(case).causes
    with builtin_faults()[fault].plant():
        seen = judge().judge(case)
        assert rules <= {v.rule for v in seen.verdicts if v.status == "diverged"}
        assert not judge().judge(plain).causes


#: The evaluation's input is no training forward's once there is no evaluation.
EVALUATED_ON_ZEROS = (Forward(), Forward(mode="eval", values="zero"), B0, Step(), Forward(),
                      Backward(of=(2,)), Step())  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rule", "fault", "events"),
    [
        ("R24", "evaluation-sticks", EVALUATED_ON_ZEROS),
        ("R26", "newest-input-kept", (Forward(), Forward(), B0, Backward(of=(1,)), Step())),
        ("R27", "backward-adds-up", (Forward(), Backward(of=(0,), retain=True), B0)),
    ],
)
def test_a_relation_of_trainings_sees_by_itself_and_has_a_script(
    rule: str, fault: str, events: tuple[Event, ...], scripts: RunScript
) -> None:
    case, own = case_of(events, "torchao.float8.rowwise", backend="emulated"), judge()
    with builtin_faults()[fault].plant():
        verdict = next(v for v in own.judge(case).verdicts
                       if (v.rule, v.status) == (rule, "diverged"))  # fmt: skip
        proof = proven(own, case, verdict, ("", fault), scripts)
    assert not proof.why, f"{proof.why}\n{proof.output}"


INFINITE = Spike("grad_output", row=0, col=3, bits="0x7f800000")


@pytest.mark.parametrize(
    ("fault", "optimizer"),
    [("scaler-steps-anyway", "sgd"), ("fused-step-ignores-infinity", "adamw_fused")],
)
def test_a_scaled_training_has_a_script(
    fault: str, optimizer: Optimizer, scripts: RunScript
) -> None:
    spec = Spec(recipe="torch.bf16", steps=2, loss_scaling="grad_scaler", optimizer=optimizer)
    case, own = Case(spec=spec, data=DataSpec(seed=5, spikes=(INFINITE,))), judge()
    with builtin_faults()[fault].plant():
        verdict = next(v for v in own.judge(case).causes if v.rule == "R29")
        proof = proven(own, case, verdict, ("", fault), scripts)
    assert not proof.why, f"{proof.why}\n{proof.output}"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam_fused", "adagrad_fused"])
@pytest.mark.parametrize("spikes", [(), (INFINITE,)])
def test_a_grad_scaler_does_what_its_definition_says(
    optimizer: Optimizer, spikes: tuple[Spike, ...]
) -> None:
    spec = Spec(
        recipe="torch.bf16", model="mlp_gelu", steps=3, optimizer=optimizer,
        loss_scaling="grad_scaler",
    )  # fmt: skip
    case = Case(spec=spec, data=DataSpec(seed=5, spikes=spikes))
    judged = judge().judge(case)
    assert ("R29", "ok") in {(v.rule, v.status) for v in judged.verdicts} and not judged.causes
    results = judge().run_arms(case)["eager"].outputs
    assert float(results["loss_scale"]) == (128.0 if spikes else 8192.0)
    began = tensors_of(case, recipes()["torch.bf16"])["up.weight"]
    assert np.array_equal(results["up.weight"], began) == bool(spikes)


def test_gradients_are_seen_again_after_a_backward_through_several() -> None:
    events = (Forward(), Forward(), Backward(of=(0, 1)), Step(), Forward(), Backward(of=(2,)))
    trace = judge().run_arms(case_of(events))["eager"]
    seen = ["grad_weight" in c.outputs for c in trace.calls if c.module == "up"]  # type: ignore[union-attr]
    assert seen == [False, False, True]


def test_an_evaluation_in_a_region_changes_the_order_of_three_addends() -> None:
    """It makes the cast of a tied weight that the region's training forward uses, too."""
    events = (Open(), LOOK, Forward(), Close(), Forward(), Backward(of=(1, 2)))
    tied = case_of(events, model="tied_embedding", m=8, k=8, n=1)
    tied = msgspec.structs.replace(tied, data=DataSpec(seed=1))
    judged = judge().judge(tied)
    assert not judged.causes
    assert ("R24", "not_applicable") in {(v.rule, v.status) for v in judged.verdicts}
    assert ("R24", "ok") in {(v.rule, v.status) for v in judge().judge(case_of(events)).verdicts}


def test_a_rollback_needs_no_step() -> None:
    case = case_of((LOOK, Reload(back=True), Forward(), Backward(of=(1,))))
    assert not judge().judge(case).causes


def test_what_partial_recompute_is_drawn_of_can_be_played() -> None:
    found = drawn_apart(partly_recomputed(list(recipes().values())), 400)
    for spec in found:
        check_events(spec, autocasts=recipes()[spec.recipe].autocasts)
    assert any(spec.events for spec in found)


def test_evaluations_often_come_first_in_a_region() -> None:
    """What a region keeps of a forward without a graph, the next one gets."""
    rng, drawn = random.Random(1), 300

    def first(events: tuple[Event, ...]) -> bool:
        looked = False
        for event, regions in with_regions(events):
            if not regions:
                looked = False
            elif isinstance(event, Forward):
                if looked and event.mode == "train":
                    return True
                looked |= event.mode != "train"
        return False

    found = [
        drawn_events(lambda factor, *values: rng.choice(values), case_of(()).spec, autocasts=True)
        for _ in range(drawn)
    ]
    assert sum(map(first, found)) > 0.15 * drawn


def test_no_training_is_taken_to_a_compiler_as_it_is() -> None:
    generator = Generator(
        Config(out=Path()), list(recipes().values()), [], random.Random(0),
        lambda spec: recipes()[spec.recipe].plan(spec),
    )  # fmt: skip
    for events, kept in ((FULL, 0), ((), 1)):
        case = case_of(events)
        generator.remember(case, judge().judge(case))
        assert len(generator.near_bound) == kept


def test_a_reload_that_loses_something_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: here the new model's weights are rounded when they are loaded."""
    from torchao.float8.float8_linear import Float8Linear

    events = (Forward(), B0, Step(), Reload(), Forward(), Backward(of=(1,)), Step())
    case = case_of(events, "torchao.float8.rowwise", backend="emulated", dtype="fp32")
    assert not judge().judge(case).causes
    load = Float8Linear._load_from_state_dict

    def rounded(self: Any, state: Any, prefix: str, *args: Any) -> None:
        rounds = {prefix + "weight": state[prefix + "weight"].bfloat16()}
        load(self, {**state, **rounds}, prefix, *args)

    monkeypatch.setattr(Float8Linear, "_load_from_state_dict", rounded)
    found = [v for v in judge().judge(case).verdicts if v.status == "diverged"]
    assert {v.rule for v in found} >= {"R25"}
    assert "changed by a reload" in {v.symptom for v in found}


def test_events_in_order_run_each_graph_at_once() -> None:
    mixed = (Forward(), LOOK, Forward(), Backward(of=(2,)), Backward(of=(0,)), Step())
    assert altered.in_order(mixed) == (Forward(), B0, LOOK, Forward(), Backward(of=(2,)), Step())
    summed = (Forward(), Forward(), Backward(of=(0, 1)))
    assert altered.in_order(summed) == (Forward(), B0, Forward(), Backward(of=(1,)))
    assert altered.evaluations_dropped(mixed)[0] == Forward()
    assert LOOK not in altered.evaluations_dropped(FULL)
    assert [e for e in altered.reloads_dropped(FULL) if isinstance(e, Reload)] == [
        Reload(back=True)
    ]


def test_files_of_a_training_are_small(tmp_path: Path) -> None:
    assert len(dump_case(case_of(FULL))) < 3000
