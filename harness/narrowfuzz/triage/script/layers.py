"""The played script of a library's own layers: the source of the recipe's verbs, the training's
events as literals, and one check."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from narrowfuzz.arms import events_data
from narrowfuzz.arms.jobs import events_of_layers, job_of_layers, plain
from narrowfuzz.case import data
from narrowfuzz.case.events import Backward, Forward, numbered
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics import delayed, follow
from narrowfuzz.play import check, check_layers, dtypes, layers, library, player, processes
from narrowfuzz.play.job import Job
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.equal_runs import through_reloads
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.job import common_fields, fields_as_text, split_constants
from narrowfuzz.triage.script.layers_check import Check, check_of
from narrowfuzz.triage.script.parts import TORCH_NAME
from narrowfuzz.triage.script.played import Played
from narrowfuzz.triage.script.recipe_source import verb_names, verbs_source

#: Modules whose source is pasted into scripts.
SOURCES = (
    dtypes,
    data,
    events_data,
    delayed,
    follow,
    check,
    layers,
    player,
    library,
    check_layers,
    processes,
)
#: Arguments of the layers that may differ from one forward to the next.
_HOW = ("inside", "first", "path")


@dataclass(frozen=True)
class Run:
    """One training of a script; ``variable`` holds its Trace."""

    variable: str
    case: Case
    checkpointed: bool
    #: The rank whose trace the variable holds, and the number of ranks. With 0 ranks, the training
    #: runs in one process, on that rank's rows.
    rank: int = 0
    ranks: int = 0

    def job(self, device: str, *, caching: bool) -> Job:
        """The player's record of this training."""
        spec = self.case.spec
        return job_of_layers(spec, device, recomputed=self.checkpointed, caching=caching)

    @property
    def hows(self) -> Mapping[int, Mapping[str, Any]]:
        """Number of a forward -> the arguments with which it calls the layers."""
        layers = self.job("cpu", caching=True).layers
        assert layers is not None
        return layers.hows


def of_layers(
    evidence: Evidence, verdict: Verdict, recipe: Recipe, *, device: str = "cpu"
) -> Played:
    """The script of a library's own layers, for a device by torch's name. Raises ValueError for a
    finding that no script shows by itself."""
    case, own_check = evidence.case, check_of(evidence, verdict)
    runs = [*_earlier(case, recipe, verdict.arm), *_compared(evidence, verdict, own_check)]
    caching = recipe.subject(device).caching
    caching = caching and any(how["first"] is not None for how in _forwards(runs))
    names, forwards = _named(runs), _forward_options_text(runs)
    # each run has its events in the lines before it; its ``hows`` are empty if no forwards differ
    whole = [
        fields_as_text("job", run.job(device, caching=caching))
        | fields_as_text("taps", own_check.taps)
        | {"job.events": "events", "job.layers.settings": names[plain(run.case.spec.settings)]}
        | {"job.layers.hows": _text(_differing(run, forwards), names)}
        for run in runs
    ]
    alike = common_fields(whole) | forwards | _stimuli(runs) | dict(own_check.constants)
    if any(run["job.layers.hows"] != "{}" for run in whole):
        alike.pop("job.layers.hows", None)
    constants, given = split_constants(whole, alike)
    verbs = verb_names(recipe, device)
    constants |= {f"subject.{name}": called for name, called in verbs.items()}
    constants |= {"subject": "None", "subject.layer": "layer"}
    reset = "" if own_check.other == "before" else f"{verbs['reset']}()"
    if own_check.linears_only:
        constants["subject.listen"] = "record_linear_tensors"
    one = _alike(runs)
    ready = [f"{verbs['enter']}()"] if "enter" in verbs else []
    made = "None" if one else "spec"
    ready.append(f"layer = lambda settings, of={verbs['layer']}: of({made}, settings)")

    plays = _plays(runs, given, constants, names, own_check, device, reset)

    def library(called: Collection[str]) -> list[str]:
        called = {*called, *(verbs[name] for name in ("enter", "layer", "reset") if name in verbs)}
        used = [name for name in verbs if verbs[name] in called]
        settings = case.spec.settings if len(names) == 1 else None
        spec = case.spec if one else None
        return [verbs_source(recipe, device, spec, settings, used), *ready]

    return Played(
        verdict,
        recipe.name,
        case.spec.recipe,
        "import numpy as np\nimport torch\ntorch.set_num_threads(1)",
        "play_layers",
        SOURCES,
        constants,
        sorted(given[0]),
        library,
        "\n".join((*plays, own_check.text)),
        shares=True,
    )


def _earlier(case: Case, recipe: Recipe, arm: str) -> Iterator[Run]:
    """The trainings that ran before in the same process. Raises ValueError if one had another
    recipe."""
    for earlier in case.history:
        if earlier.spec.recipe != case.spec.recipe:
            raise ValueError(f"{earlier.spec.recipe} ran before, and a script has one recipe")
        yield Run("", earlier, BY_NAME[arm].recomputes)


def _compared(evidence: Evidence, verdict: Verdict, own_check: Check) -> Iterator[Run]:
    """The run that the verdict is about, preceded by the run that it is compared with, if any."""
    own = Run("run", evidence.case, BY_NAME[verdict.arm].recomputes)
    if BY_NAME[verdict.arm].sharded:
        own = replace(own, rank=verdict.at.rank, ranks=evidence.spec.sharding.ranks)
    if own_check.other == "alone":
        yield replace(own, variable="other", ranks=0)
    if own_check.other == "before":
        yield replace(own, variable="other")
    if own_check.other == "plain":
        yield replace(own, variable="other", checkpointed=False)
    if own_check.other == "through":
        through = msgspec.structs.replace(own.case, spec=through_reloads(own.case.spec))
        yield replace(own, variable="other", case=through)
    yield own


def _forward_options_text(runs: Sequence[Run]) -> dict[str, str]:
    """The arguments with which all forwards call the layers alike, as source text."""
    values = {name: {repr(how[name]) for how in _forwards(runs)} for name in _HOW}
    return {n: v.pop() for n, v in values.items() if len(v) == 1 and "Settings" not in str(v)}


def _forwards(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """The arguments with which the forwards of all runs call the layers."""
    return [how for run in runs for how in run.hows.values()]


def _stimuli(runs: Sequence[Run]) -> dict[str, str]:
    """The arguments of ``stimulus`` that all tensors of all runs have in common, as source text."""
    moving = [
        e for run in runs for e in run.case.spec.training if isinstance(e, Forward | Backward)
    ]
    specs = [run.case.spec for run in runs]
    found = {
        "values": {repr(e.values) for e in moving},
        "shift": {repr(e.shift) for e in moving},
        "seed": {repr(run.case.data.seed) for run in runs},
        "shape": {repr((spec.m, spec.k)) for spec in specs},
        "dtype": {TORCH_NAME[spec.dtype] for spec in specs},
    }
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _plays(
    runs: Sequence[Run],
    given: Sequence[Mapping[str, str]],
    constants: Mapping[str, str],
    names: Mapping[Any, str],
    own_check: Check,
    device: str,
    reset: str,
) -> Iterator[str]:
    """Source text of the runs: their data, then the runs, each after a ``reset`` if any."""
    yield from (f"{name} = {settings!r}" for settings, name in names.items())
    yield from (f"start_ranks({run.ranks})" for run in runs if run.ranks)
    shown = ""
    for run, own in zip(runs, given, strict=True):
        spec = run.case.spec
        data = _tensors(run.case, constants)
        text = f"events = {_wrapped([_text(event, names) for event in events_of_layers(spec)])}"
        head = "" if _alike(runs) else f"import types\n{_spec(spec)}\n"
        if head + data + text != shown:
            shown = head + data + text
            yield f"{head}{data}\n{text}"
        fill = "filled"
        if "seed" not in constants:
            fill = f"lambda layers: filled(layers, seed={run.case.data.seed})"
        more = "".join(f", {name}={text}" for name, text in own.items())
        begun = f"play_layers(Trace(), {fill}, "
        where = "" if device == "cpu" else f", device={device!r}"
        again = own_check.runs and run.variable == "run"
        lines = [*([reset] if reset else ()), *_call(run, begun, f"{more})", where, again)]
        yield "\n    ".join(("def again():", *lines)) if again else "\n".join(lines)


def _call(run: Run, begun: str, rest: str, where: str, again: bool) -> Iterator[str]:
    """The lines that run it and, unless it is run ``again`` by the check, store its trace. The
    run's tensors stand between ``begun`` and ``rest``. A run on ranks gets ``where``, the device,
    as an argument, and only rank 0 continues after it."""
    whose = f"of_rank(tensors, {run.rank})" if run.rank else "tensors"
    call, keeps = f"{begun}{whose}{rest}", f"{run.variable} = " if run.variable else ""
    if run.ranks:
        on_rank, shape = f"{begun}of_rank(tensors, rank){rest}", {"data": run.ranks}
        call = f"on_processes({shape}, lambda rank, mesh: {on_rank}, seconds=20.0{where})"
        keeps = "ranks = "
    yield call if again else f"{keeps}{call}"
    if run.ranks and not again:
        yield f'if os.environ["RANK"] != "0":\n    sys.exit(0)\n{run.variable} = ranks[{run.rank}]'


def _named(runs: Sequence[Run]) -> dict[Any, str]:
    """Settings that the runs use -> the name of each in the script."""
    found: dict[Any, str] = {}
    for run in runs:
        spec = run.case.spec
        given_settings = (x for _, *how in events_of_layers(spec) for x in how)
        opened = [x for x in given_settings if isinstance(x, library.Settings)]
        inside = [how["inside"] for how in run.hows.values() if how["inside"] is not None]
        for settings in (plain(spec.settings), *opened, *inside):
            found.setdefault(settings, f"settings_{len(found)}" if found else "settings")
    return found


def _differing(run: Run, constants: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """Number of a forward -> the arguments of its call of the layers that are not alike in all
    forwards; empty if all are."""
    found = {
        number: {n: value for n, value in how.items() if n not in constants}
        for number, how in run.hows.items()
    }
    return found if any(found.values()) else {}


def _text(x: Any, names: Mapping[Any, str]) -> str:
    """A literal in which settings stand by their names."""
    if isinstance(x, library.Settings):
        return names[x]
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v, names)}" for k, v in x.items()) + "}"
    if isinstance(x, tuple):
        inside = ", ".join(_text(v, names) for v in x)
        return f"({inside},)" if len(x) == 1 else f"({inside})"
    return repr(x)


def _wrapped(parts: Sequence[str], width: int = 90) -> str:
    """A list as source text, over few lines of about ``width`` characters."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += f"{part}, "
    inside = "\n".join(f"    {line.rstrip()}" for line in lines)
    return f"[\n{inside}\n]"


def _tensors(case: Case, constants: Mapping[str, str]) -> str:
    """The line that defines inputs and output gradients, each by those arguments of ``stimulus``
    that are not among the constants."""
    spec, calls = case.spec, []
    own = {"seed": repr(case.data.seed), "shape": repr((spec.m, spec.k))}
    own["dtype"] = TORCH_NAME[spec.dtype]
    for number, event in numbered(spec.training):
        if isinstance(event, Forward | Backward):
            given = {"values": repr(event.values), "shift": repr(event.shift), **own}
            more = "".join(f", {n}={value}" for n, value in given.items() if n not in constants)
            calls += [
                f"{name!r}: stimulus({drawn!r}{more})"
                for name, drawn in events_data.names_of(event, number)
            ]
    return f"tensors = {{{_wrapped(calls)[1:-1]}}}"


def _alike(runs: Sequence[Run]) -> bool:
    """Are the layers of all runs built alike?"""
    return len({_made(run.case.spec) for run in runs}) == 1


def _made(spec: Spec) -> Spec:
    """The Spec without the fields that do not matter when its layers are built."""
    return msgspec.structs.replace(spec, events=(), checkpoint="none", wraps="whole")


def _spec(spec: Spec) -> str:
    """The line that defines ``spec``, with the fields from which a library's layer is built."""
    made = f"layer={spec.layer!r}, quantized_init={spec.quantized_init}"
    return (
        f"spec = types.SimpleNamespace(k={spec.k}, bias={spec.bias}, dtype={spec.dtype!r},\n"
        f"    {made})"
    )
