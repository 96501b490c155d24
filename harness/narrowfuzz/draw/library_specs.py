"""Hypothesis strategies for schedules: the trainings of a library's own layers.

Every drawn schedule is valid by construction, and none is rejected. Its habits are drawn first,
then its events one by one. It shrinks to two steps with one forward and one backward each.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.altered import in_high_precision
from narrowfuzz.case.events import Settings, Stimulus
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Spec
from narrowfuzz.draw.choices import sampled
from narrowfuzz.draw.stimulus import repair
from narrowfuzz.draw.walk import Choose, Habits, walk
from narrowfuzz.recipe.carries import Carries

#: Factors of a schedule that a slice of a campaign may vary; others keep their simplest value.
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


#: (exponent in the first step, increment per step) of inputs or of output gradients.
_TREND = ((0, 0), (0, 0), (0, 0), (0, -3), (0, -6), (4, -8), (0, 4), (-12, 0))
_TRENDS = tuple(itertools.product(_TREND, _TREND))
#: Steps of a training. One in twenty takes a single step, which is too few to judge a state by.
_STEPS = (*[2] * 11, *[3] * 6, *[4] * 2, 1)
#: Whether a schedule has regions: one in 16 runs outside every region.
_REGIONS = (*[True] * 15, False)
#: (there are forwards without a graph in between, some graphs are retained for a second backward).
_ODDITIES = (*[(False, False), (True, False)] * 2, (False, True), (True, True))
#: Special values that one schedule may contain, repeated by the weight of each.
_SPECIAL: tuple[tuple[Stimulus, ...], ...] = (
    (),
    (),
    ("zero", "zero"),
    ("zero", "spike"),
    ("spike", "spike"),
    ("inf", "inf", "inf"),
)


#: Numbers of ranks that a schedule runs on, repeated by weight; 0: one process. A run on ranks,
#: which are processes, takes ten times as long.
RARELY, ALWAYS = (*[0] * 57, 2, 2, 1), (2, 2, 1)


def schedules(
    recipe: str,
    *,
    carries: Carries,
    vary: frozenset[str] = FACTORS,
    ranks: tuple[int, ...] = RARELY,
) -> st.SearchStrategy[Spec]:
    """Specs of a recipe, without their sizes: what ``carries`` allows, differing from the simplest
    in the factors of ``vary``.

    All use the state of the backward after it has changed, except those with a single step (one in
    twenty) and those outside every region (one in 16). ``ranks``: the numbers of ranks to draw
    from, if ``carries`` allows ranks.
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
    # even if only nesting may vary, a walk must choose among its moves
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
    """The Spec on a drawn number of ranks, each of which trains independently, and with a drawn
    reduction of their amaxes."""
    data = choose("ranks", *ranks)
    if not data:
        return spec
    reduces = choose("ranks", "all", "all", "own", "none")
    settings = msgspec.structs.replace(spec.settings, reduces=reduces)
    return msgspec.structs.replace(spec, sharding=Sharding(data=data), settings=settings)


def _model(choose: Choose, carries: Carries) -> dict[str, Any]:
    """Fields of a Spec that describe a model of a library's layers, without its events."""
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
    """Every combination of settings, so that one draw selects all five: that is faster."""
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
