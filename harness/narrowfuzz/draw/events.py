"""Hypothesis strategies for what happens to a library's own layers.

Every drawn schedule is valid by construction and none is thrown away. What it is inclined to is
drawn once, what happens is drawn event by event, and it shrinks to two steps of one forward and one
backward.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.altered import in_high_precision
from narrowfuzz.case.events import Settings, Stimulus
from narrowfuzz.case.spec import Sharding, Spec
from narrowfuzz.draw.choices import sampled
from narrowfuzz.draw.stimulus import repair
from narrowfuzz.draw.walk import Choose, Habits, walk
from narrowfuzz.recipe.carries import Carries

#: What a slice of a campaign may vary of a schedule; the rest keeps its simplest value.
FACTORS = frozenset(
    {
        "caching",
        "checkpoint",
        "events",
        "layer",
        "layout",
        "nesting",
        "quantized_init",
        "ranks",
        "reload",
        "settings",
        "stimulus",
        "switch",
    }
)


#: Exponents of inputs and of gradients: in the first step, added with each step.
_TREND = ((0, 0), (0, 0), (0, 0), (0, -3), (0, -6), (4, -8), (0, 4), (-12, 0))
_TRENDS = tuple(itertools.product(_TREND, _TREND))
#: Steps of a training; one in twenty takes a single one, which is too few to judge a state by.
_STEPS = (*[2] * 11, *[3] * 6, *[4] * 2, 1)
#: One schedule in so many runs outside every region.
_REGIONS = (*[True] * 15, False)
#: Whether forwards without a graph come in between, and whether graphs are kept.
_ODDITIES = (*[(False, False), (True, False)] * 2, (False, True), (True, True))
#: Special values that one schedule may hold; each comes as often as it stands there.
_SPECIAL: tuple[tuple[Stimulus, ...], ...] = (
    (),
    (),
    ("zero", "zero"),
    ("zero", "spike"),
    ("spike", "spike"),
    ("inf", "inf", "inf"),
)


#: How many ranks a schedule runs on, each as often as it stands there. In processes it takes ten
#: times as long.
RARELY, ALWAYS = (*[0] * 57, 2, 2, 1), (2, 2, 1)


def schedules(
    recipe: str,
    *,
    carries: Carries,
    vary: frozenset[str] = FACTORS,
    ranks: tuple[int, ...] = RARELY,
) -> st.SearchStrategy[Spec]:
    """Specs of a recipe, but for their sizes: what ``carries`` allows, differing from the simplest
    in the factors of ``vary``.

    All but one in twenty can exercise the state of the backward. ``ranks`` says how many they may
    run on, where they may.
    """
    return _built(recipe, carries, vary, ranks if carries.ranks else (0,))


@cache
def _built(
    recipe: str, carries: Carries, vary: frozenset[str], ranks: tuple[int, ...]
) -> st.SearchStrategy[Spec]:
    return _schedules(recipe, carries, vary, ranks)


@st.composite
def _schedules(
    draw: st.DrawFn, recipe: str, carries: Carries, vary: frozenset[str], ranks: tuple[int, ...]
) -> Spec:
    # with nothing but nesting free, a walk still chooses among its moves
    free = vary | ({"moves"} if vary & {"events", "nesting"} else frozenset())

    def choose(factor: str, *values: Any) -> Any:
        return draw(sampled(*values)) if factor in free and len(values) > 1 else values[0]

    steps = choose("events", *_STEPS)
    model = _model(choose, carries)
    habits = _habits(choose, carries, steps=steps, branches=model["layout"] == "branch")
    spec = Spec(recipe=recipe, events=walk(choose, habits), **model)
    spec = _on_ranks(choose, spec, ranks)
    if choose("nesting", *_REGIONS):
        return spec if steps == 1 else repair(spec)
    events = in_high_precision(spec.events)
    return msgspec.structs.replace(spec, events=events, quantized_init=False)


def _on_ranks(choose: Choose, spec: Spec, ranks: tuple[int, ...]) -> Spec:
    """The Spec on so many ranks, each of which trains by itself, and what they share."""
    data = choose("ranks", *ranks)
    if not data:
        return spec
    reduces = choose("ranks", "all", "all", "own", "none")
    settings = msgspec.structs.replace(spec.settings, reduces=reduces)
    return msgspec.structs.replace(spec, sharding=Sharding(data=data), settings=settings)


def _model(choose: Choose, carries: Carries) -> dict[str, Any]:
    """Every field that a library's layers add to a Spec, but its events."""
    fields: dict[str, Any] = {
        "model": f"library_{choose('layer', *carries.layers)}",
        "layout": choose("layout", *carries.layouts),
    }
    if fields["layout"] == "chain":
        fields["depth"] = choose("layout", 1, 1, 2, 3)
    if carries.checkpoints:
        wraps, checkpoint = choose("checkpoint", *_checkpoints(carries))
        # a reentrant checkpoint passes gradients only if its input needs them
        starved = fields["layout"] == "frozen_first" and checkpoint.endswith("reentrant")
        if wraps and not starved:
            fields |= {"checkpoint": checkpoint, "wraps": wraps}
    if carries.quantized_init:
        fields["quantized_init"] = choose("quantized_init", False, False, False, True)
    if carries.settings and choose("settings", False, True):
        every = _settings(carries)
        fields["settings"] = every[choose("settings", *range(len(every)))]
    return fields


@cache
def _checkpoints(carries: Carries) -> tuple[Any, ...]:
    wraps = ("", "", "whole", "each", "nested")
    return tuple(itertools.product(wraps, carries.checkpoints))


@cache
def _settings(carries: Carries) -> tuple[Settings, ...]:
    """Every combination: one draw costs less than five."""
    formats: tuple[Literal["hybrid", "e4m3"], ...] = ("hybrid", "e4m3")
    return tuple(
        Settings(history=history, algorithm=algorithm, margin=margin, format=format_, fused=fused)
        for history, algorithm, margin, format_, fused in itertools.product(
            (4, 1, 2, 3, 16),
            carries.algorithms,
            (0, 0, 1, -1, 4),
            formats,
            (True, False) if carries.unfused else (True,),
        )
    )


def _habits(choose: Choose, carries: Carries, *, steps: int, branches: bool) -> Habits:
    calm, special = choose("stimulus", (True, ()), (True, ()), *((False, s) for s in _SPECIAL))
    input_trend, grad_trend = choose("stimulus", *_TRENDS)
    evaluates, retains = choose("events", *_ODDITIES)
    switches = carries.settings and carries.switch
    return Habits(
        steps=steps,
        evaluates=evaluates,
        retains=retains and carries.keeps_graphs,
        nests=choose("nesting", False, False, True),
        caches=carries.caching and choose("caching", False, False, True),
        calm=calm,
        special=special,
        input_trend=input_trend,
        grad_trend=grad_trend,
        reload_at=choose("reload", 0, 0, 0, 3, 6, 9) if carries.reload else 0,
        switch_at=choose("switch", 0, 0, 0, 2, 4, 7) if switches else 0,
        algorithms=carries.algorithms,
        dropped=choose("events", *[""] * 6, "region", "inside"),
        branches=branches,
    )
