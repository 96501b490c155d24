"""repro.py of a case that runs on ranks: the player's own source, ranks as processes over gloo, and
each data-parallel rank's piece of the rows in one process.

Ranks that are threads may have shown it, but they are a convenience of ours: what is reported is
what processes show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narrowfuzz.arms.plain_steps import names_in_chain, steps_of
from narrowfuzz.arms.sharded import on_its_own, resuming, sharding_of
from narrowfuzz.arms.training import events_of, named, playing
from narrowfuzz.arms.zoo import layer_names
from narrowfuzz.case.arm import BY_NAME, EAGER, Arm
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play import context, pipeline, processes, ranks, resumed, sharded
from narrowfuzz.play.ranks import Disagree
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.sharded.results import NO_WHOLE, ON_THE_FLY, OTHER_SHAPE
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Near, Own, Runs, Same, Within, read
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.paste import pasted
from narrowfuzz.triage.recipe_source import recipe_source
from narrowfuzz.triage.script_element import Places
from narrowfuzz.triage.script_look import beyond_text
from narrowfuzz.triage.script_parts import (
    TORCH_NAME,
    Tensors,
    docstring,
    guarded,
    model_source,
    packed,
)
from narrowfuzz.triage.script_played import SOURCES

_RANKS = (ranks, processes, sharded, pipeline, context, resumed)
#: What the text of a script calls.
_PLAYED = ("start_ranks", "on_processes", "play", "Trace", "call_of", "rows", "unpacked")
_RAISES = """\
try:
    on_ranks_here()
except Exception as error:
    print(type(error).__name__, "on rank", getattr(error, "rank", "?"), ":", error, flush=True)
    sys.exit(1 if {shown} else 125)
print("it ran on rank", os.environ["RANK"])
sys.exit(0)"""
#: How it shows that ranks disagree: one waits in vain, or gets what it cannot take.
_DISAGREE = '"gloo/transport" in str(error) and "Connection closed" not in str(error)'
#: Ranks but the first leave what they have to it.
_OTHERS = """
if os.environ["RANK"] != "0":
    sys.exit(0)"""
_UNQUANTISED = """
def results():
    found = [alone(0).results] + [trace.results for trace in on_ranks_here()]
    return [{name: t.double().nan_to_num() for name, t in one.items()} for one in found]


def same(one, other):
    return all(torch.equal(t, other[name]) for name, t in one.items())


(alone_as_is, *as_is), convert = results(), lambda model: model
(alone_bare, *bare) = results()
if os.environ["RANK"] != "0":
    sys.exit(0)
one_process, ranks = same(alone_as_is, alone_bare), all(map(same, as_is, bare))
print("conversion changes results: in one process", not one_process, "on ranks", not ranks)
sys.exit(1 if ranks and not one_process else 0)"""
_SAME = "got == want or (got != got and want != want)"


def write_sharded_script(
    case: Case, verdict: Verdict, recipe: Recipe, tensors: Tensors, device: str = "cpu"
) -> str:
    """The script's text, for a device as torch calls it. Raises ValueError for a place or an
    expectation that it cannot look at."""
    spec = case.spec
    text = guarded(
        docstring(verdict, f"{spec.recipe}, {spec.model} on {spec.sharding.ranks} ranks"),
        "import ctypes, math, re\nfrom functools import partial\nimport torch",
        f"torch.set_num_threads(1)\ndtype = {TORCH_NAME[spec.dtype]}",
        recipe_source(recipe, spec, "convert", "tap"),
        model_source(spec.model),
        pasted(
            _played(spec, verdict),
            (*SOURCES, *_RANKS),
        ),
        _laid_out(spec, verdict, named(spec, tensors), device),
        _check(spec, recipe, verdict),
    )
    return text


def _laid_out(spec: Spec, verdict: Verdict, tensors: Tensors, device: str) -> str:
    """Text that defines ``on_ranks_here()`` and ``alone(piece)``."""
    shared = _stages if spec.sharding.stages else _rows if spec.sharding.context else _runs
    return f"""
def build():
    return {MODELS[spec.model].expression(spec)}.to(dtype)


tensors = {packed(tensors)}
events = {events_of(spec)!r}
start_ranks({spec.sharding.ranks})
{shared(spec, BY_NAME[verdict.arm], device)}"""


def _played(spec: Spec, verdict: Verdict) -> tuple[str, ...]:
    if spec.sharding.stages:
        return ("play_pipeline", "chained", *_PLAYED)
    if spec.sharding.context:
        return ("play_context", "beyond", *_PLAYED)
    threads = ("on_ranks",) if verdict.oracle == "S10" else ()
    resumed_on = ("resumed_on",) if spec.sharding.resumes else ()
    return ("play_sharded", *threads, *resumed_on, *_PLAYED)


def _stages(spec: Spec, arm: Arm, device: str) -> str:
    alone = playing(spec, EAGER, device) | {"tied": names_in_chain(spec)}
    return f"""

def on_ranks_here(**other):
    how = dict({_keywords(steps_of(spec, arm, device))})
    return play_pipeline(
        build, convert, tensors, on={_processes(device)}, dtype=dtype, **{{**how, **other}})


def alone(piece):
    def chain():
        return chained(build, {spec.sharding.stages})

    return play(Trace(), chain, convert, tensors, events, dtype=dtype, {_keywords(alone)})
"""


def _rows(spec: Spec, arm: Arm, device: str) -> str:
    return f"""

def on_ranks_here():
    return play_context(
        build, convert, tensors, on={_processes(device)}, dtype=dtype,
        {_keywords(steps_of(spec, arm, device))})


def alone(piece, dtype=dtype):
    given = {{name: t.to(dtype) for name, t in tensors.items()}}
    return play(
        Trace(), lambda: build().to(dtype), convert, given, events, dtype=dtype,
        {_keywords(playing(spec, EAGER, device))})
"""


def _runs(spec: Spec, arm: Arm, device: str) -> str:
    how, plainly = playing(spec, arm, device), playing(on_its_own(spec), EAGER, device)
    for name in ("input_shape", "output_shape"):
        del how[name]
    shared = {name: value for name, value in how.items() if plainly.get(name) == value}
    on_ranks = {name: value for name, value in how.items() if name not in shared}
    by_itself = {name: value for name, value in plainly.items() if name not in shared}
    # nobody looks inside of what is compiled
    looks = "watch=()" if arm.compiled else f"watch={layer_names(spec)!r}, tap=tap"
    resume = ""
    if spec.sharding.resumes:
        resume = f"""
    how_here["resume"] = partial(resumed_on, {_keywords(resuming(spec))})"""
    pieces = max(spec.sharding.data, 1)
    return f"""how = dict(dtype=dtype, {looks}, {_keywords(shared)})


def on_ranks_here(**other):
    how_here = dict({_keywords(on_ranks | sharding_of(spec))})
    how_here["on"] = {_processes(device)}{resume}
    return play_sharded(build, convert, tensors, events, **how, **{{**how_here, **other}})


def alone(piece):
    rows = {{
        name: t.chunk({pieces})[piece] if name.startswith(("input", "grad_output")) else t
        for name, t in tensors.items()}}
    return play(Trace(), build, convert, rows, events, **how, {_keywords(by_itself)})
"""


def _processes(device: str) -> str:
    where = "" if device == "cpu" else f", device={device!r}"
    return f"partial(on_processes, seconds=60.0{where})"


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _check(spec: Spec, recipe: Recipe, verdict: Verdict) -> str:
    expect = verdict.expect
    if isinstance(expect, Runs):
        named = f"type(error).__name__ == {expect.raised!r}"
        return _RAISES.format(shown=_DISAGREE if expect.raised == Disagree.__name__ else named)
    if isinstance(expect, Own):
        return _UNQUANTISED
    if verdict.symptom in (OTHER_SHAPE, NO_WHOLE):
        return _shapes(spec, verdict)
    if isinstance(expect, Near):
        return f"""
trace = on_ranks_here()[0]{_OTHERS}
exact, eager = alone(0, torch.float64), alone(0)
told, bad = {beyond_text(spec, verdict)}
print("{verdict.located}:", told)
sys.exit(bad)"""
    compiled = BY_NAME[verdict.arm].compiled
    got = _element(spec, recipe, verdict.at, compiled=compiled)
    if isinstance(expect, Same):
        want, holds = f"want = {_element(spec, recipe, expect.at, compiled=compiled)}", _SAME
        wanted = "{want}"
        assert want != f"want = {got}", verdict  # that would hold of anything
    elif isinstance(expect, Within):
        lo, hi = (repr(float(read(end))) for end in (expect.lo, expect.hi))
        lo, hi = (end.replace("inf", "math.inf") for end in (lo, hi))
        want, holds, wanted = "", f"{lo} <= got <= {hi}", str(expect)
    else:
        raise ValueError(f"a script on ranks cannot check {type(expect).__name__}")
    return f"""
ranks = on_ranks_here()
got = {got}
{want}{_OTHERS}
print(f"{verdict.located}: expected {wanted}, got {{got}}")
sys.exit(0 if {holds} else 1)"""


def _shapes(spec: Spec, verdict: Verdict) -> str:
    """The check of a result that is not there, or of another shape, or whose pieces are too few or
    too many elements."""
    name, rank = verdict.at.name, verdict.at.rank
    piece = f"ranks[{rank}].results.get({name!r})"
    whole = f"alone({rank // max(spec.sharding.tensor, 1)}).results[{name!r}]"
    if isinstance(verdict.expect, Same) and verdict.expect.at.name != name:
        whole = f"ranks[{rank}].results[{verdict.expect.at.name!r}]"
    got, want = f'getattr({piece}, "shape", None)', f"{whole}.shape"
    if verdict.symptom == NO_WHOLE:
        got, want = f"sum(t.results[{name!r}].numel() for t in ranks)", f"{whole}.numel()"
    return f"""
ranks = on_ranks_here()
got, want = {got}, {want}{_OTHERS}
print(f"{verdict.located}: expected {{want}}, got {{got}}")
sys.exit(0 if got == want else 1)"""


def _element(spec: Spec, recipe: Recipe, at: At, *, compiled: bool) -> str:
    """The number there, on the rank that the address names, or in one process. Graphs are held
    against processes that have none, processes against threads."""
    group = max(spec.sharding.tensor, 1)
    if spec.sharding.together:
        group = spec.sharding.ranks
    alone = at.run == EAGER.name
    run = f"alone({at.rank // group})" if alone else f"ranks[{at.rank}]"
    if BY_NAME.get(at.run, EAGER).sharded:
        other = "compiler='', compile_with={}" if compiled else "on=on_ranks"
        run = f"on_ranks_here({other})[{at.rank}]"
    if at.run == ON_THE_FLY:
        run = f"on_ranks_here(precomputes=False)[{at.rank}]"
    places = Places(spec, recipe.plan(spec), {at.run: run}, compiled=False)
    return places.element(msgspec.structs.replace(at, rank=0))
