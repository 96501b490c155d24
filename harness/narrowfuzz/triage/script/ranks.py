"""The played script of a model on ranks. It plays ranks as processes over gloo, and each
data-parallel rank's piece of the rows in one process.

A divergence may have been seen on ranks that are threads, but those are a convenience of
narrowfuzz: reported is only what processes show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from narrowfuzz.arms.jobs import with_model_names
from narrowfuzz.arms.layouts import copies_of, job_alone, job_on_ranks, laid_out, prefixes
from narrowfuzz.arms.model_names import layer_names
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play import experts, mesh, processes, ranks
from narrowfuzz.play.job import Compile, Job, Taps
from narrowfuzz.play.ranks import Disagree
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.sharded.results import NO_WHOLE, ON_THE_FLY, OTHER_SHAPE
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Near, Own, Refuses, Runs, Same, Within, read
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.element import Places
from narrowfuzz.triage.script.job import common_fields, fields_as_text, split_constants
from narrowfuzz.triage.script.model import SOURCES
from narrowfuzz.triage.script.model_check import beyond_text
from narrowfuzz.triage.script.parts import (
    TORCH_NAME,
    Tensors,
    model_source,
    packed,
)
from narrowfuzz.triage.script.played import Played
from narrowfuzz.triage.script.recipe_source import recipe_source

#: Names of the runs in one process.
_ALONE = ("alone", "float64")
#: Modules whose source is pasted into scripts on ranks, besides the layout's player.
_RANKS = (ranks, processes, experts, mesh)
_RAISES = """\
try:
    on_ranks_here()
except Exception as error:
    print(type(error).__name__, "on rank", getattr(error, "rank", "?"), ":", error, flush=True)
    sys.exit(1 if {shown} else 125)
print("it ran on rank", os.environ["RANK"])
sys.exit(0)"""
_RAN = """\
try:
    on_ranks_here()
except Exception as error:
    print("refused, as due:", type(error).__name__, error, flush=True)
    sys.exit(0){others}
print("runs; expected {due}")
sys.exit(1)"""
#: Condition for an error that shows that ranks disagree: a rank waits in vain, or receives a
#: message that it cannot accept.
_DISAGREE = '"gloo/transport" in str(error) and "Connection closed" not in str(error)'
#: Only rank 0 continues; the others have sent it their traces.
_OTHERS = """
if os.environ["RANK"] != "0":
    sys.exit(0)"""
_UNQUANTISED = """
def results():
    found = [alone(0).results] + [trace.results for trace in on_ranks_here()]
    return [{name: t.double() for name, t in one.items()} for one in found]


def same(one, other):
    return all(
        torch.allclose(t, other[name], rtol=0, atol=0, equal_nan=True) for name, t in one.items()
    )


(alone_as_is, *as_is), convert = results(), lambda model: model
(alone_bare, *bare) = results()
if os.environ["RANK"] != "0":
    sys.exit(0)
one_process, ranks = same(alone_as_is, alone_bare), all(map(same, as_is, bare))
print("conversion changes results: in one process", not one_process, "on ranks", not ranks)
sys.exit(1 if ranks and not one_process else 0)"""
_SAME = "got == want or (got != got and want != want)"


def of_ranks(
    case: Case, verdict: Verdict, recipe: Recipe, tensors: Tensors, device: str = "cpu"
) -> Played:
    """The script of a model on ranks, for a device by torch's name. Raises ValueError for an
    address or an expectation that it cannot check."""
    spec = case.spec
    arm = BY_NAME[verdict.arm]
    watch = () if layout_of(spec).single_group or arm.compiled else layer_names(spec)
    together = tuple(f"{before}{name}" for before in prefixes(spec) for name in watch)
    runs = {
        name: _texts(spec, name, job, together if name in _ALONE else watch)
        for name, job in _jobs(spec, arm, device).items()
    }
    alike = common_fields([*runs.values()])
    if spec.sharding.resumes:  # the part after the handover has other taps, so they must vary
        alike = {name: text for name, text in alike.items() if not name.startswith("taps.")}
    constants, each = split_constants([*runs.values()], alike)
    given = dict(zip(runs, each, strict=True))
    laid_out = _laid_out(spec, with_model_names(spec, tensors), device, given)
    return Played(
        verdict,
        recipe.name,
        f"{spec.recipe}, {spec.model} on {spec.sharding.ranks} ranks",
        "import ctypes, math, re\nfrom functools import partial\nimport torch\n"
        f"torch.set_num_threads(1)\ndtype = {TORCH_NAME[spec.dtype]}",
        "play",
        (*SOURCES, *_RANKS, layout_of(spec).player),
        constants,
        [*given["ranks"], "layout"],
        lambda called: (recipe_source(recipe, spec, "convert", "tap"), model_source(spec.model)),
        laid_out + _check(spec, recipe, verdict, given),
        recipe.environment,
    )


def _jobs(spec: Spec, arm: Arm, device: str) -> dict[str, Job]:
    """Name of a run -> its Job: the training in one process, the training on ranks, and others that
    a check may compare with: without a compiler, without precomputed scales, in float64."""
    single, ranks = job_alone(spec, device), job_on_ranks(spec, arm, device)
    jobs = {"alone": single, "ranks": ranks}
    if arm.compiled:
        jobs["uncompiled"] = replace(ranks, compile=Compile())
    if spec.sharding.gathers == "precomputed":
        sharding = msgspec.structs.replace(spec.sharding, gathers="codes")
        other = msgspec.structs.replace(spec, sharding=sharding)
        jobs["on the fly"] = replace(ranks, layout=laid_out(other))
    if layout_of(spec).approximate:
        jobs["float64"] = replace(single, dtype="float64")
    return jobs


def _texts(spec: Spec, name: str, job: Job, watch: tuple[str, ...]) -> dict[str, str]:
    tap = "tap" if name in _ALONE else "of_this_thread"
    follows = layout_of(spec).follows_steps and name not in _ALONE
    taps = fields_as_text("taps", Taps(watch=watch, steps=follows))
    if watch:
        taps |= {"taps.tap": tap, "taps.shared": "tap" if tap == "of_this_thread" else "None"}
    return fields_as_text("job", job) | taps


def _laid_out(
    spec: Spec, tensors: Tensors, device: str, given: Mapping[str, Mapping[str, str]]
) -> str:
    """Source text that defines ``on_ranks_here()``, which runs the model on ranks, and
    ``alone(piece)``, which runs a piece of the rows in one process."""
    sharding, shared = spec.sharding, spec.sharding.experts
    plays = layout_of(spec).play.__name__
    copies = copies_of(spec)
    parts = max(sharding.tensor, 1)
    model = f"ExpertParallelReference(make(dtype), {shared}, {parts})" if shared else "make(dtype)"
    rows = f"rolled_inputs(rows, {shared}, {spec.steps * spec.microbatches})" if shared else "rows"
    one = f"play(Trace(), lambda: {model}, {rows}, **{{**by_itself, **other}})"
    if shared:
        one = f"split_by_rank({one}, {shared})[piece % {shared}]"
    piece = f"t.chunk({sharding.groups})[piece{f' // {shared}' if shared else ''}]"
    built = f"chained(build, {copies}).to(dtype)" if copies else "build().to(dtype)"
    return f"""
def build():
    return {MODELS[spec.model].expression(spec)}


def make(dtype=dtype):
    return convert({built})


tensors = {packed(tensors)}
start_ranks({sharding.ranks})
by_ranks = dict({_given(given["ranks"])})
by_itself = dict({_given(given["alone"])})


def on_ranks_here(on={_processes(device)}, **other):
    return {plays}(make, tensors, on=on, **{{**by_ranks, **other}})


def alone(piece, dtype=dtype, **other):
    rows = {{
        name: {piece} if name.startswith(("input", "grad_output")) else t
        for name, t in tensors.items()}}
    return {one}
"""


def _given(given: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in given.items())


def _processes(device: str) -> str:
    where = "" if device == "cpu" else f", device={device!r}"
    return f"partial(on_processes, seconds=60.0{where})"


def _check(
    spec: Spec, recipe: Recipe, verdict: Verdict, given: Mapping[str, Mapping[str, str]]
) -> str:
    expect = verdict.expect
    if isinstance(expect, Runs):
        named = f"type(error).__name__ == {expect.raised!r}"
        return _RAISES.format(shown=_DISAGREE if expect.raised == Disagree.__name__ else named)
    if isinstance(expect, Refuses):
        return _RAN.format(due=expect, others=_OTHERS)
    if isinstance(expect, Own):
        return _UNQUANTISED
    if verdict.symptom in (OTHER_SHAPE, NO_WHOLE):
        return _shapes(spec, verdict)
    if isinstance(expect, Near):
        return f"""
trace = on_ranks_here()[0]{_OTHERS}
exact, eager = alone(0, torch.float64, {_given(given["float64"])}), alone(0)
sentence, bad = {beyond_text(spec, verdict)}
print("{verdict.located}:", sentence)
sys.exit(bad)"""
    got = _element(spec, recipe, verdict.at, given)
    if isinstance(expect, Same):
        want, holds = f"want = {_element(spec, recipe, expect.at, given)}", _SAME
        wanted = "{want}"
        assert want != f"want = {got}", verdict  # else the check could never fail
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
    """The check of a result that is missing, has another shape, or whose pieces have too few or too
    many elements together."""
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


def _element(spec: Spec, recipe: Recipe, at: At, given: Mapping[str, Mapping[str, str]]) -> str:
    """An expression for the number at an address, on the rank that it names or in one process.
    Compiled ranks are compared with uncompiled processes, processes with threads."""
    group = max(spec.sharding.tensor, 1)
    if layout_of(spec).single_group:
        group = spec.sharding.ranks
    in_one_process = at.run == EAGER.name
    run = f"alone({at.rank // group})" if in_one_process else f"ranks[{at.rank}]"
    if BY_NAME.get(at.run, EAGER).sharded:
        other = _given(given["uncompiled"]) if "uncompiled" in given else "on=on_ranks"
        run = f"on_ranks_here({other})[{at.rank}]"
    if at.run == ON_THE_FLY:
        run = f"on_ranks_here({_given(given['on the fly'])})[{at.rank}]"
    places = Places(spec, recipe.plan(spec), {at.run: run}, compiled=False)
    return places.element(msgspec.structs.replace(at, rank=0))
