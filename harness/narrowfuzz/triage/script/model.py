"""The played script of a model in one process.

It plays the whole case as it was judged, and the other runs that the verdict refers to: another
arm, other data, the same data after an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from narrowfuzz.arms.jobs import AFTER, events_of, job_of, with_model_names
from narrowfuzz.arms.model_names import ties
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.ladder import BY_NAME, base_of, climb
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play import (
    attention_scores,
    check,
    checkpoint,
    converted,
    job,
    kernels,
    layers,
    literal,
    player,
    watches,
)
from narrowfuzz.play.job import Event, Job, Taps
from narrowfuzz.play.names import name_of
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.rules.repeat import AGAIN
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Near, Ordered, Present, Refuses, Runs, Same
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.job import common_fields, fields_as_text, split_constants
from narrowfuzz.triage.script.model_check import check_of
from narrowfuzz.triage.script.parts import (
    POISON,
    TORCH_NAME,
    Tensors,
    model_source,
    packed,
)
from narrowfuzz.triage.script.played import Played
from narrowfuzz.triage.script.recipe_source import recipe_source

#: Modules whose source is pasted into scripts.
SOURCES = (
    kernels,
    layers,
    checkpoint,
    literal,
    watches,
    attention_scores,
    job,
    player,
    converted,
    check,
)
#: Imports for the source text that this module writes.
_IMPORTS = "import ctypes, math, re\nimport torch"


@dataclass(frozen=True)
class Run:
    """One run of a script. ``name`` is the run's name in addresses, "" for the case's own run;
    ``variable`` is the script's variable that holds its Trace."""

    name: str
    variable: str
    spec: Spec
    arm: Arm
    tensors: Tensors
    events: tuple[Event, ...]
    #: False: the run is of the unconverted model in float64, on the CPU.
    converts: bool = True
    device: str = "cpu"

    @property
    def job(self) -> Job:
        """The player's record of this run."""
        events = None if self.events == events_of(self.spec) else self.events
        job = job_of(self.spec, self.arm, self.device, events)
        if self.converts:
            return replace(job, tied=ties(self.spec))
        return replace(job, tied=ties(self.spec), dtype="float64", autocast=False, device="cpu")


def of_model(
    case: Case, verdict: Verdict, recipe: Recipe, tensors: Tensors, device: str = "cpu"
) -> Played:
    """The script of a model, for a device by torch's name. Raises ValueError for an address or an
    expectation that no script can check."""
    spec = case.spec
    runs = [*runs_of(case, verdict, tensors), *_earlier(case, recipe, verdict.arm)]
    runs = [replace(run, device=device) for run in runs]
    if spec.direct:
        verdict = _of_the_linear(spec, verdict, recomputes=bool(runs[0].arm.checkpoint))
    own_check = check_of(
        spec,
        verdict,
        recipe.plan(spec),
        {run.name: run.variable for run in runs if run.name != _BEFORE},
    )
    compilers = {run.arm.compiler for run in runs}
    around = _around(spec, runs[0].arm, varies=len(compilers) > 1) if own_check.kernels else ""
    taps = fields_as_text("taps", Taps(keeps=own_check.results, watch=own_check.watch))
    taps["taps.tap"] = "tap" if own_check.tapped else "None"
    whole = []
    for run in runs:
        own = "around" if around and not run.name else "None"
        whole.append(fields_as_text("job", run.job) | taps | {"taps.around": own})
    constants, given = split_constants(whole, common_fields(whole) | {"layout": "None"})
    if len(compilers) == 1:
        constants["compiler"] = repr(runs[0].arm.compiler)
    tapped = ("tap",) if own_check.tapped else ()
    # parts that a user's model compiles by itself run uncompiled, as they did when judged
    own_parts = any(MODELS[run.spec.model].own for run in runs) and not any(compilers)
    stance = '\ntorch.compiler.set_stance("force_eager")' if own_parts else ""
    models = dict.fromkeys(run.spec.model for run in runs)
    return Played(
        verdict,
        recipe.name,
        f"{spec.recipe}, {spec.model}",
        f"{_IMPORTS}\ntorch.set_num_threads({spec.threads}){stance}\n"
        f"dtype = {TORCH_NAME[spec.dtype]}",
        "play",
        SOURCES,
        constants,
        sorted(given[0]),
        lambda called: (recipe_source(recipe, spec, "convert", *tapped), model_source(*models)),
        "\n".join((around, *_plays(runs, given, verdict), own_check.text)),
        recipe.environment,
    )


def runs_of(case: Case, verdict: Verdict, tensors: Tensors) -> list[Run]:
    """The case's own run, and the others that the verdict compares it with."""
    spec, expect, own_tensors = case.spec, verdict.expect, with_model_names(case.spec, tensors)
    runs = [own := Run("", "trace", spec, BY_NAME[verdict.arm], own_tensors, events_of(spec))]
    for i, other in enumerate(verdict.runs):
        variable = f"other_{i}" if i else "other"
        theirs = with_model_names(other.spec, other.tensors)
        events = AFTER.get(other.event) or events_of(other.spec)
        runs.append(Run(other.name, variable, other.spec, base_of(other.spec), theirs, events))
    eager = replace(own, name="eager", variable="eager", arm=EAGER)
    if isinstance(expect, Near):
        exact = replace(eager, name="float64", variable="exact", converts=False)
        runs += [exact, eager]
    if isinstance(expect, Same) and expect.at.run in BY_NAME:
        other_arm = BY_NAME[expect.at.run]
        runs.append(replace(own, name=other_arm.name, variable="base", arm=other_arm))
    if AGAIN in (verdict.at.run, *([expect.at.run] if isinstance(expect, Same) else [])):
        runs.append(replace(own, name=AGAIN, variable="again"))
    return runs


#: The name of runs of earlier cases.
_BEFORE = "before"


def _earlier(case: Case, recipe: Recipe, compiled: str) -> Iterator[Run]:
    """Runs of the cases that ran before in the same process, on their rungs without a compiler and
    on the ``compiled`` arm. Raises ValueError for a case of another recipe or backend."""
    for earlier in case.history:
        spec = earlier.spec
        if (spec.recipe, spec.backend) != (case.spec.recipe, case.spec.backend):
            raise ValueError(f"{spec.recipe} ran before, and a script has one recipe")
        tensors = with_model_names(spec, tensors_of(earlier, recipe))
        for arm in climb(spec):
            if not arm.compiler or arm.name == compiled:
                yield Run(_BEFORE, "_", spec, arm, tensors, events_of(spec))


def _of_the_linear(spec: Spec, verdict: Verdict, *, recomputes: bool) -> Verdict:
    """The verdict on a single linear, with addresses as in the model that contains the linear."""
    called = {own: name for name, own in spec.gradients.items()}

    def placed(at: At) -> At:
        if at.what == "result":
            return msgspec.structs.replace(at, name=called.get(at.name, at.name))
        # addresses into a recompute name the layer
        return msgspec.structs.replace(at, layer="proj") if recomputes else at

    expect = verdict.expect
    if isinstance(expect, Same):
        expect = msgspec.structs.replace(expect, at=placed(expect.at))
    if isinstance(expect, Ordered):
        expect = msgspec.structs.replace(expect, than=placed(expect.than))
    if isinstance(expect, Present):
        names = tuple(called.get(name, name) for name in expect.names)
        expect = msgspec.structs.replace(expect, names=names)
    given = tuple(msgspec.structs.replace(g, at=placed(g.at)) for g in verdict.given)
    return replace(verdict, at=placed(verdict.at), expect=expect, given=given)


def _around(spec: Spec, arm: Arm, *, varies: bool) -> str:
    """Source text that defines ``around``, which records the arguments of kernels; ``varies`` if
    the script's runs differ in the compiler."""
    if not arm.compiler:
        return "watch = AttentionWatch()\naround = lambda: watch"
    random = MODELS[spec.model].random or arm.checkpoint
    passing = "\nlet_rng_pass()" if random else ""
    more = f", compiler={arm.compiler!r}" if varies else ""
    return f"watch = KernelWatch(){passing}\naround = lambda: inside(watch{more})"


def _plays(
    runs: Sequence[Run],
    given: Sequence[Mapping[str, str]],
    verdict: Verdict,
) -> Iterator[str]:
    """Source text of the runs: their data, then the runs."""
    own, spec = runs[0].tensors, runs[0].spec
    yield f"tensors = {packed(own)}"
    # one model for both runs, as in the judge, unless events or a lifecycle may change the model
    one = any(run.name == AGAIN for run in runs) and not spec.events and spec.lifecycle == "none"
    # earlier cases run first; sorting is stable
    for run, arguments in sorted(zip(runs, given, strict=True), key=lambda r: r[0].name != _BEFORE):
        held, other = _given(run.tensors, own)
        if other:
            held = f"{{**{held}, **{packed(other)}}}"
        model, there = MODELS[run.spec.model], repr(run.job.device)
        if not (model.own and run.converts):  # a user's model keeps its dtypes, except in float64
            there += ", dtype" if run.converts else ", torch.float64"
        make = f"{model.expression(run.spec)}.to({there})"
        if (layout := run.spec.weight_layout) != "contiguous":
            make = f"in_memory({make}, {layout!r})"
        make = f"convert({make})" if run.converts else make
        if one and run.name in ("", AGAIN):
            yield f"with torch.no_grad():\n    model = {make}" * (not run.name)
            make = "model"
        more = "".join(f", {name}={text}" for name, text in arguments.items())
        call = f"lambda: {make}, {held}{more}"
        again = 1 if run.arm.compiler else 20  # compiled arms take long
        if isinstance(verdict.expect, Runs | Refuses) and run.name == verdict.at.run:
            times, memory = (again, f"{POISON}\n") if run.name == AGAIN else (1, "")
            played = f"for _ in range({times}):\n        play(trace, {call})"
            yield f"{memory}trace = Trace()\ndef run():\n    {played}"
        elif run.name == AGAIN:  # on memory that holds NaN
            yield f"{POISON}\nagain = [play(Trace(), {call}) for _ in range({again})]"
        elif run.name == _BEFORE:  # no variable holds the run, so its model is freed
            forgets = "\ntorch._dynamo.reset()" if run.arm.compiler else ""
            yield f"play(Trace(), {call}){forgets}"
        else:
            yield f"{run.variable} = play(Trace(), {call})"


def _given(tensors: Tensors, own: Tensors) -> tuple[str, Tensors]:
    """An expression for those of the case's ``own`` tensors that another run takes, and the tensors
    that it has instead. Tensors of single events carry the event's number in their name, and those
    numbers differ from run to run."""
    other = {n: t for n, t in tensors.items() if not _held(n, t, own)}
    numbered = {name for name in own if name_of(name).number}
    if numbered <= tensors.keys() - other.keys():
        return "tensors", other
    given = {n: t for n, t in tensors.items() if n in other or name_of(n).number}
    return '{n: t for n, t in tensors.items() if "@" not in n}', given


def _held(name: str, values: F32, own: Tensors) -> bool:
    return (
        name in own and own[name].shape == values.shape and bool(same_bits(own[name], values).all())
    )
