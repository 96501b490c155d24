"""Schedules: what is drawn is valid and rich, what is dropped or repaired stays valid."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from typing import get_args

import draws
import msgspec
import pytest
from hypothesis.strategies import integers, lists
from narrowfuzz.case.event_rules import check_schedule, repaired, simpler, without
from narrowfuzz.case.event_text import lines
from narrowfuzz.case.events import (
    Algorithm,
    Backward,
    Close,
    Event,
    Forward,
    Layout,
    Open,
    Reload,
    Settings,
    Step,
    Switch,
)
from narrowfuzz.case.features import FEATURES
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case, load_case
from narrowfuzz.draw.library_specs import FACTORS, schedules
from narrowfuzz.draw.stimulus import census, histogram, repair, weakness
from narrowfuzz.models.catalog import LIBRARY
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.triage.simplify import simplifications

#: One worker draws for all of them.
pytestmark = pytest.mark.xdist_group("drawn schedules")
EVERYTHING = Carries(
    layers=tuple(LIBRARY.values()),
    layouts=get_args(Layout),
    checkpoints=("full", "reentrant", "by_torch", "by_torch_reentrant"),
    caching=True,
    quantized_init=True,
    settings=True,
    algorithms=get_args(Algorithm),
    unfused=True,
    reload=True,
    switch=True,
    ranks=True,
)
IN, OUT, STEP = Open(), Close(), Step()


def F(**fields: object) -> Forward:
    return Forward(**fields)  # type: ignore[arg-type]


def B(*of: int, **fields: object) -> Backward:
    return Backward(of=of, **fields)  # type: ignore[arg-type]


def script(*events: Event, **fields: object) -> Spec:
    fields = {"model": "library_linear"} | fields
    return Spec(recipe="r", events=events, **fields)  # type: ignore[arg-type]


PLAIN = script(IN, F(), OUT, B(0), STEP, IN, F(), OUT, B(1), STEP)


def drawn(
    count: int, carries: Carries = EVERYTHING, vary: frozenset[str] = FACTORS
) -> tuple[Spec, ...]:
    return tuple(draws.drawn_apart(schedules("r", carries=carries, vary=vary), count))


@cache
def many() -> tuple[Spec, ...]:
    return drawn(400)


def few() -> tuple[Spec, ...]:
    """Two hundred that differ."""
    return tuple(dict.fromkeys(many()))[:200]


def is_valid(events: tuple[Event, ...]) -> bool:
    check_schedule(script(*events, layout="branch"))
    return True


class TestDraw:
    def test_every_schedule_is_valid_and_of_moderate_length(self) -> None:
        for schedule in many():
            check_schedule(schedule)
        lengths = sorted(len(schedule.events) for schedule in many())
        assert lengths[0] >= 3 and lengths[-1] <= 40
        assert 10 <= lengths[len(lengths) // 2] <= 20

    def test_a_case_with_a_schedule_survives_json(self) -> None:
        for schedule in few():
            case = Case(spec=schedule, data=DataSpec())
            assert load_case(dump_case(case)) == case

    @pytest.mark.parametrize("feature", ["checkpoint", "interleaved", "eval between", "left early"])
    def test_what_state_faults_need_is_in_a_third_of_all(self, feature: str) -> None:
        assert histogram(many())[feature] >= 0.3

    def test_no_feature_is_rare(self) -> None:
        shares = histogram(many())
        assert set(shares) == {*FEATURES, "weak"}
        assert {name for name, share in shares.items() if share < 0.03} - {"weak"} == set()

    def test_few_schedules_are_weak_and_those_are_short_or_in_high_precision(self) -> None:
        assert 0.01 < histogram(many())["weak"] < 0.15
        high = [s for s in many() if not any(isinstance(e, Open) for e in s.events)
                and not any(isinstance(e, Forward) and e.inside for e in s.events)]  # fmt: skip
        assert 0.02 < len(high) / len(many()) < 0.1
        for schedule in many():
            if weakness(schedule) and schedule not in high:
                assert sum(isinstance(event, Step) for event in schedule.events) == 1

    def test_the_simplest_is_two_plain_steps(self) -> None:
        assert set(drawn(20, vary=frozenset())) == {PLAIN}

    def test_what_a_recipe_does_not_carry_is_not_drawn(self) -> None:
        absent = {
            "checkpoint", "nested checkpoints", "reload", "switch", "cached weights", "margin",
            "idle layer", "quantized init", "short history", "unfused",
        }  # fmt: skip
        assert all(not absent & census(schedule) for schedule in drawn(100, Carries()))

    def test_without_settings_there_is_nothing_to_switch(self) -> None:
        found = drawn(50, Carries(switch=True, unfused=True))
        assert not any(census(schedule) & {"switch", "unfused"} for schedule in found)

    def test_graphs_are_kept_where_that_is_carried(self) -> None:
        def kept(carries: Carries) -> bool:
            found = drawn(100, carries)
            return any(isinstance(e, Backward) and e.retain for s in found for e in s.events)

        assert kept(Carries()) and not kept(Carries(keeps_graphs=False))

    @pytest.mark.parametrize("factor", sorted(FACTORS))
    def test_a_slice_varies_what_it_may_and_nothing_else(self, factor: str) -> None:
        found = drawn(100, vary=frozenset({factor}))
        fields = {
            name
            for schedule in found
            for name in Spec.__struct_fields__
            if getattr(schedule, name) != getattr(PLAIN, name)
        }
        assert fields == CHANGES.get(factor, {"events"})

    def test_no_reentrant_checkpoint_where_its_input_needs_no_gradient(self) -> None:
        frozen = [s for s in many() if s.layout == "frozen_first"]
        assert any(s.checkpoint != "none" for s in frozen)
        assert not any(s.reentrant for s in frozen)

    @pytest.mark.heavy
    def test_drawing_costs_little(self) -> None:
        """Held against what the same machine takes to draw plain numbers."""

        numbers = lists(integers(), min_size=20, max_size=20)

        def seconds(draw: Callable[[], object]) -> float:
            draw()
            start = time.process_time()
            draw()
            return time.process_time() - start

        assert seconds(lambda: drawn(500)) < 6 * seconds(lambda: draws.drawn_apart(numbers, 500))


#: What one factor alone changes besides events.
CHANGES = {
    "checkpoint": {"checkpoint", "wraps"},
    "layer": {"model"},
    "layout": {"layout", "depth", "events"},
    "quantized_init": {"quantized_init"},
    "ranks": {"sharding", "settings"},
    "settings": {"settings"},
}


INVALID = (
    ((OUT,), "event 0 (Close)", "no open region"),
    ((IN, IN, IN), "event 2 (Open)", "two deep"),
    ((B(0),), "event 0 (Backward)", "forward 0 has no graph"),
    ((F(), B(0, 0)), "event 1 (Backward)", "named twice"),
    ((F(), B(0), B(0)), "event 2 (Backward)", "forward 0 has no graph"),
    ((F(mode="eval"), B(0)), "event 1 (Backward)", "not in train mode"),
    ((F(), STEP), "event 1 (Step)", "waits for its backward"),
    ((STEP,), "event 0 (Step)", "no gradient"),
    ((F(), B(0), Reload(), STEP), "event 2 (Reload)", "waits for the optimizer"),
    ((F(), B(0, retain=True), STEP), "event 2 (Step)", "waits for its backward"),
    ((F(), Reload()), "event 1 (Reload)", "waits for its backward"),
    ((IN, Reload()), "event 1 (Reload)", "region is open"),
    ((IN, Switch(margin=1)), "event 1 (Switch)", "region is open"),
    ((F(first=True),), "event 0 (Forward)", "inside an enabled region"),
    ((IN, F(first=False)), "event 1 (Forward)", "has cached the weights"),
    ((IN, F(mode="eval", first=True)), "event 1 (Forward)", "training forwards"),
    ((IN, F(first=True), B(0), STEP, F(first=False)), "event 4 (Forward)", "has cached"),
    ((IN, F(first=True, path=1), F(first=False)), "event 2 (Forward)", "has cached the weights"),
)  # fmt: skip


class TestRules:
    @pytest.mark.parametrize(("events", "where", "why"), INVALID)
    def test_an_error_names_the_event_and_the_reason(
        self, events: tuple[Event, ...], where: str, why: str
    ) -> None:
        with pytest.raises(ValueError, match="not valid there") as error:
            check_schedule(script(*events, layout="branch"))
        assert where in str(error.value) and why in str(error.value)

    @pytest.mark.parametrize(
        ("schedule", "why"),
        [
            (script(F(path=1)), "path 1 needs layout 'branch'"),
            (script(F(), depth=2, layout="twice"), "depth 2 needs layout 'chain'"),
            (script(F(), layout="frozen_first", checkpoint="reentrant"), "reentrant"),
        ],
    )
    def test_fields_must_fit_each_other(self, schedule: Spec, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            check_schedule(schedule)

    def test_dropping_any_event_leaves_a_shorter_valid_schedule(self) -> None:
        for events in (schedule.events for schedule in few()):
            for i in range(len(events)):
                rest = without(events, i)
                assert is_valid(rest) and len(rest) < len(events)

    def test_dropping_several_is_valid_too(self) -> None:
        for events in (schedule.events for schedule in few()):
            third = range(len(events) // 3, 2 * len(events) // 3)
            assert is_valid(without(events, *third))
            assert len(without(events, *third)) <= len(events) - len(third)
            assert without(events, *range(len(events))) == ()

    def test_a_dropped_forward_takes_its_backward_and_the_others_keep_theirs(self) -> None:
        events = (IN, F(), F(shift=1), OUT, B(1, shift=1), B(0), STEP)
        assert without(events, 1) == (IN, F(shift=1), OUT, B(0, shift=1), STEP)
        assert without(events, 2) == (IN, F(), OUT, B(0), STEP)
        assert without((IN, F(), F(), B(0, 1), OUT), 1) == (IN, F(), B(0), OUT)

    def test_a_dropped_region_is_neither_entered_nor_left(self) -> None:
        assert without((IN, IN, F(), OUT, OUT, B(0)), 0) == (IN, F(), OUT, B(0))
        assert without((IN, F(first=True), OUT, B(0), STEP), 0) == (F(), B(0), STEP)

    def test_a_dropped_backward_takes_the_steps_that_would_need_it(self) -> None:
        assert without((F(), B(0), STEP, Reload()), 1) == (F(),)

    def test_repaired_keeps_a_valid_schedule_and_is_idempotent(self) -> None:
        for events in (schedule.events for schedule in few()):
            assert repaired(events) == events
            for broken in (events[::-1], events[1:], events[::2]):
                once = repaired(broken)
                assert is_valid(once) and repaired(once) == once

    def test_simpler_resets_one_field(self) -> None:
        found = set(simpler(B(2, 1, shift=3, retain=True)))
        assert found == {B(2, shift=3, retain=True), B(2, 1, retain=True), B(2, 1, shift=3)}
        assert list(simpler(F())) == []


def test_a_schedule_reads_as_python() -> None:
    schedule = script(
        IN, F(first=True), Open(enabled=False), F(mode="eval", inside=True, values="zero"), OUT,
        IN, OUT, OUT, Switch(history=1, margin=-1), Switch(), B(0, shift=-3, retain=True),
        B(0, values="inf", shift=2), STEP, Reload(), IN, F(shift=4, path=1),
        layout="branch",
    )  # fmt: skip
    check_schedule(schedule)
    assert lines(schedule) == [
        "with autocast(recipe):",
        "    y0 = model(x0, is_first_microbatch=True)",
        "    with autocast(enabled=False):",
        "        y1 = model(zero(x1), mode='eval', autocast='inside')",
        "    with autocast(recipe):",
        "        pass",
        "recipe = replace(recipe, history=1, margin=-1)",
        "recipe = replace(recipe)",
        "backward({y0: g * 2**-3}, retain_graph=True)",
        "backward({y0: inf(g) * 2**2})",
        "optimizer.step(); optimizer.zero_grad()",
        "model = load(save(model))",
        "with autocast(recipe):",
        "    y2 = model(x2 * 2**4, path=1)",
    ]
    assert lines(script(IN)) == ["with autocast(recipe):", "    pass"]


INF = F(values="inf")
WEAK = (
    ((), "no training forward"),
    ((F(), B(0), STEP, F(), B(1)), "no training forward"),
    ((IN, Open(enabled=False), F(), B(0), STEP, F(), B(1)), "no training forward"),
    ((IN, F(), OUT), "no backward"),
    ((IN, F(mode="eval"), OUT, F(), B(1), STEP), "no training forward"),
    ((IN, F(), OUT, B(0)), "no optimizer step"),
    ((IN, F(), F(), OUT, B(0), B(1), STEP), "no second FP8 backward"),
    ((IN, F(), OUT, B(0), STEP, F(), B(1), STEP), "no second FP8 backward"),
    ((IN, F(), OUT, B(0), STEP, IN, F(), OUT, B(1, values="zero")), "no second FP8 backward"),
    ((IN, F(), B(0, values="zero"), STEP, F(), B(1, values="zero")), "are zero"),
    ((IN, F(values="zero"), B(0), STEP, F(values="zero"), B(1)), "are zero"),
    ((IN, F(), B(0), STEP, F(path=1), B(1), STEP), "same layers"),
    ((IN, INF, B(0), STEP, F(), B(1), STEP, F(), B(2)), "an infinity reaches"),
    ((IN, F(), F(), B(0), B(1, values="inf"), STEP, F(), B(2)), "an infinity reaches"),
)  # fmt: skip
STRONG = (
    PLAIN.events,
    (IN, F(), B(0), STEP, F(), B(1)),
    (F(inside=True), B(0), STEP, Reload(), Switch(history=1), F(inside=True), B(1, values="inf")),
    (IN, F(path=1), F(), B(0, 1), STEP, F(path=1), B(2)),
    (IN, F(), OUT, F(), B(0, 1), STEP, IN, F(values="spike"), OUT, B(2), STEP),
)


class TestStimulus:
    @pytest.mark.parametrize(("events", "why"), WEAK)
    def test_a_weak_stimulus_is_told_and_repaired(
        self, events: tuple[Event, ...], why: str
    ) -> None:
        schedule = script(*events, layout="branch")
        assert why in weakness(schedule) and "weak" in census(schedule)
        better = repair(schedule)
        check_schedule(better)
        assert weakness(better) == "" and repair(better) == better

    @pytest.mark.parametrize("events", STRONG)
    def test_what_is_strong_is_left_alone(self, events: tuple[Event, ...]) -> None:
        schedule = script(*events, layout="branch")
        assert weakness(schedule) == "" and repair(schedule) is schedule

    def test_the_smallest_repair_is_taken(self) -> None:
        zero = script(IN, F(), B(0), STEP, F(), B(1, values="zero"))
        assert repair(zero) == script(IN, F(), B(0), STEP, F(), B(1))
        assert repair(script(IN, F(), OUT, B(0))) == script(
            *(IN, F(), OUT, B(0)), *(STEP, IN, F(), OUT, B(1))
        )
        assert repair(script(IN, F(), OUT)).events == (IN, F(), OUT, B(0), STEP, IN, F(), OUT, B(1))

    def test_any_drawn_schedule_can_be_repaired_whatever_is_dropped(self) -> None:
        for schedule in few():
            for size in range(len(schedule.events)):
                part = msgspec.structs.replace(schedule, events=schedule.events[:size])
                better = repair(part)
                check_schedule(better)
                assert weakness(better) == ""

    def test_a_full_schedule_has_room_for_its_repair(self) -> None:
        full = script(*(IN, OUT) * 32)
        assert weakness(repair(full)) == "" and len(repair(full).events) <= 64

    @pytest.mark.parametrize(
        ("events", "has", "lacks"),
        [
            ((IN, F(), F(), OUT, B(0), B(1)), {"interleaved", "accumulated"}, {"sum of forwards"}),
            ((IN, F(), B(0), F(), B(1)), {"backward inside"}, {"interleaved", "left early"}),
            ((IN, F(), OUT, IN, B(0)), {"left early", "backward in another region"}, {"nested"}),
            ((IN, F(), F(mode="eval"), OUT, B(0)), {"eval between"}, {"backward inside"}),
            ((IN, F(), OUT, B(0), STEP, IN, F(mode="eval")), {"left early"}, {"eval between"}),
            ((IN, IN, F(), OUT, OUT, B(0)), {"nested"}, {"disabled inside", "inside autocast"}),
            ((IN, Open(enabled=False), F()), {"disabled inside", "high precision"}, {"nested"}),
            ((F(inside=True), B(0, retain=True), B(0)), {"inside autocast", "second backward"},
             {"accumulated"}),
            ((IN, F(), F(), OUT, B(0, 1), STEP), {"sum of forwards"}, {"accumulated"}),
            ((IN, F(), OUT, B(0), STEP, Reload()), set(), {"reload", "forward dropped"}),
            ((IN, F(), OUT), {"forward dropped"}, {"left early"}),
            ((IN, F(first=True), F(first=False)), {"cached weights"}, {"decaying"}),
            ((IN, F(), OUT, B(0), STEP, IN, F(shift=-3), OUT, B(1)), {"decaying"}, {"spike"}),
        ],
    )  # fmt: skip
    def test_features_are_what_they_say(
        self, events: tuple[Event, ...], has: set[str], lacks: set[str]
    ) -> None:
        found = census(script(*events))
        assert has <= found and not lacks & found


def size(schedule: Spec) -> int:
    """Events, and forwards that open a region of their own."""
    own = (isinstance(event, Forward) and event.inside for event in schedule.events)
    return len(schedule.events) + sum(own)


def minimised(schedule: Spec, shows: Callable[[Spec], bool]) -> Spec:
    assert shows(schedule)
    while True:
        for _, candidate in simplifications(schedule):
            if shows(candidate):
                schedule = candidate
                break
        else:
            return schedule


def recomputed_after_a_step(schedule: Spec) -> bool:
    kinds = [type(event) for event in schedule.events]
    after = kinds.index(Step) if Step in kinds else len(kinds)
    return schedule.checkpoint != "none" and Backward in kinds[after:]


SMALLEST: tuple[tuple[Callable[[Spec], bool], Spec], ...] = (
    (recomputed_after_a_step, script(F(), B(0), STEP, F(), B(1), checkpoint="full", wraps="each")),
    (lambda s: "interleaved" in census(s), script(IN, F(), F(), B(0))),
    (lambda s: "left early" in census(s), script(IN, F(), OUT, B(0))),
    (lambda s: "cached weights" in census(s), script(IN, F(first=True), F(first=False))),
    (lambda s: s.settings.history == 1, script(settings=Settings(history=1))),
    (lambda s: any(isinstance(e, Forward) and e.path for e in s.events),
     script(F(path=1), layout="branch")),
    (lambda s: weakness(s) == "", script(IN, F(), B(0), STEP, F(), B(1))),
)  # fmt: skip


class TestSimplify:
    def test_every_simplification_is_valid_other_and_named(self) -> None:
        for schedule in few()[:60]:
            for name, candidate in simplifications(schedule):
                check_schedule(candidate)
                assert candidate != schedule and 0 < len(name) < 60
                assert size(candidate) <= size(schedule)

    def test_going_on_from_any_of_them_ends_at_the_empty_schedule(self) -> None:
        for seed, schedule in enumerate(few()[:20]):
            chance, steps = random.Random(seed), 0
            while found := [candidate for _, candidate in simplifications(schedule)]:
                schedule, steps = chance.choice(found), steps + 1
            assert schedule == script() and steps < 200

    def test_the_empty_schedule_has_none(self) -> None:
        assert list(simplifications(script())) == []

    @pytest.mark.parametrize(("shows", "smallest"), SMALLEST)
    def test_a_greedy_search_reaches_the_smallest_script(
        self, shows: Callable[[Spec], bool], smallest: Spec
    ) -> None:
        assert shows(smallest)
        starts = [schedule for schedule in few() if shows(schedule)][:12]
        assert starts
        for schedule in starts:
            assert minimised(schedule, shows) == smallest
