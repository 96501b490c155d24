"""Our own minimiser of cases: every step that it accepts keeps the fingerprint.

Hypothesis cannot shrink a journalled crash or a loaded file, and shrinking through compiles needs a
budget. An attempt succeeds if the fingerprint shows on any of five data draws. On eager rungs the
search ends when no single field can be reset to its default and no dimension halved; on compiled
rungs fields are reset in groups within a budget of builds, and untried changes are listed. A
library's own layers are cheap to run and their state depends on their data, so there every
neighbour is tried, on its own seed only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import msgspec

from narrowfuzz.case.layout import fitting, layout_of
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.triage.forms import form_of
from narrowfuzz.triage.simplify import simpler_events

#: Returns True if the case still shows the divergence that is being minimised.
Shows = Callable[[Case], bool]
Change = Callable[[Case], Case]

DRAWS = 5
_DIMS = ("m", "k", "n", "batch")
_DATA = ("regime", "gemm", "input_exponent", "weight_exponent", "grad_exponent", "variant")
_KEPT = ("recipe", "backend", "compile", "model", "m", "k", "n", "batch")
#: Value classes, tamest first. The class of a finding's minimal case is its reach.
REACH = (
    "gaussian",
    "zero_rows",
    "outlier",
    "outlier_rows",
    "heavy_tail",
    "equal",
    "aligned",
    "binade_edges",
    "mined",
    "near_max",
    "scale_ends",
    "subnormal",
)


@dataclass
class Minimised:
    """The smallest case found, and how far the search got."""

    case: Case
    attempts: int = 0
    untried: list[str] = field(default_factory=list)


def minimise(
    case: Case,
    shows: Shows,
    *,
    builds: int = 0,
    seconds: float = 60.0,
    hint: Spike | None = None,
) -> Minimised:
    """The smallest case found that still ``shows`` the divergence. ``builds`` > 0 limits the
    attempts that change the Spec, each of which costs a compile; 0 means no limit, and a library's
    own layers ignore it. ``hint`` is an element that may be enough to cause the divergence: it is
    first tried as the only special value in gaussian data, so that sizes can shrink without losing
    it."""
    neighbours = form_of(case.spec).neighbours
    limit, draws = (None, 1) if neighbours else (builds or None, DRAWS)
    search = _Search(case, shows, limit, time.monotonic() + seconds, draws)
    if hint is not None:
        hint_only = DataSpec(seed=case.data.seed, spikes=(hint,))
        search.attempt("hint", msgspec.structs.replace(case, data=hint_only))
    if neighbours:
        search.through(neighbours)
    else:
        if builds:
            # severity depends on the data, and time may run out before the data are tried
            search.attempt(f"values={REACH[0]}", _tamer(search.best, values=REACH[0]))
            search.group_resets()
        search.to_fixpoint()
    return Minimised(search.best, search.attempts, search.untried)


class _Search:
    def __init__(
        self, case: Case, shows: Shows, builds: int | None, deadline: float, draws: int
    ) -> None:
        self.best, self.shows = case, shows
        self.builds, self.deadline, self.draws = builds, deadline, draws
        self.attempts = 0
        self.untried: list[str] = []

    def attempt(self, name: str, candidate: Case) -> bool:
        """Make ``candidate`` the best case if it shows the divergence on any of its draws, and
        return whether it does."""
        now, then = candidate.spec, self.best.spec
        fixed = MODELS[now.model].fixed if now.model in MODELS and now.model == then.model else ()
        if any(getattr(now, name) != getattr(then, name) for name in fixed):
            return False  # the model fixes this field
        if candidate == self.best:
            return False
        rebuilds = candidate.spec != self.best.spec
        out_of_builds = rebuilds and self.builds is not None and self.builds <= 0
        if out_of_builds or time.monotonic() > self.deadline:
            if name not in self.untried:
                self.untried.append(name)
            return False
        if rebuilds and self.builds is not None:
            self.builds -= 1
        for draw in range(self.draws):
            # other data under the same transformation
            choice = candidate.data.choice
            drawn = _with_data(candidate, seed=draw, variant=choice) if draw else candidate
            self.attempts += 1
            if self.shows(drawn):
                self.best = drawn
                return True
        return False

    def group_resets(self) -> None:
        """Reset all Spec fields outside _KEPT at once, with and without the model, then each half
        of them: few attempts, where each build takes long."""
        fields = [f for f in _changed(self.best.spec) if f not in _KEPT]
        half = len(fields) // 2
        model = [] if MODELS[self.best.spec.model].own else ["model"]
        groups = [[*fields, *model], fields, fields[:half], fields[half:]]
        for group in groups:
            if group:
                defaults = {name: _default(Spec, name) for name in group}
                self.attempt("+".join(group), _with_spec(self.best, **defaults))

    def to_fixpoint(self) -> None:
        progress = True
        while progress:
            progress = False
            for name, candidate in self._candidates():
                if self.attempt(name, candidate(self.best)):
                    progress = True
                    self.untried = [u for u in self.untried if u != name]

    def through(self, neighbours_of: Callable[[Case], Iterator[tuple[str, Case]]]) -> None:
        """Try neighbours of the best case until none succeeds. After a success the search continues
        at the same position among the new case's neighbours, because those that failed before
        mostly fail again."""
        failed: set[Case] = set()
        progress = True
        while progress and not self.untried:
            progress, i = False, 0
            neighbours = list(neighbours_of(self.best))
            while i < len(neighbours):
                name, candidate = neighbours[i]
                if candidate not in failed and self.attempt(name, candidate):
                    progress = True
                    neighbours = list(neighbours_of(self.best))
                else:
                    failed.add(candidate)
                    i += 1

    def _candidates(self) -> Iterator[tuple[str, Change]]:
        """Changes of spikes, data fields, Spec fields, then dimensions. Each change is applied to
        the best case at the time when it is tried."""
        for i in reversed(range(len(self.best.data.spikes))):
            yield f"spike {i}", partial(_without_spike, index=i)
        for name in _DATA:
            yield name, partial(_with_data, **{name: _default(DataSpec, name)})
        for values in REACH:
            yield f"values={values}", partial(_tamer, values=values)
        for model in MODELS[self.best.spec.model].smaller:
            yield f"model={model}", partial(_with_model, model=model)
        for name in _changed(self.best.spec):
            if name not in (*_KEPT, "sharding"):
                yield name, partial(_with_spec, **{name: _default(Spec, name)})
        yield from simpler_shardings(self.best)
        for i, (phrase, _) in enumerate(simpler_events(self.best.spec.events)):
            yield phrase, partial(_simpler_events, which=i)
        yield "flattened", _flattened
        for name in _DIMS:
            yield f"{name} to {_default(Spec, name)}", partial(_dim_to_default, name=name)
            yield f"{name}/2", partial(_halved, name=name)


def simpler_shardings(case: Case) -> Iterator[tuple[str, Change]]:
    """Changes to layouts of ranks with fewer ranks, or with fields at their defaults."""
    for phrase, changes in layout_of(case.spec).simpler(case.spec.sharding):
        yield phrase, partial(_sharded, **changes)


def _sharded(case: Case, **changes: Any) -> Case:
    """The case with these sharding fields, and with sizes that the ranks can share evenly."""
    sharding = msgspec.structs.replace(case.spec.sharding, **changes)
    return msgspec.structs.replace(
        case, spec=fitting(msgspec.structs.replace(case.spec, sharding=sharding))
    )


def _with_spec(case: Case, **changes: Any) -> Case:
    spec = msgspec.structs.replace(case.spec, **changes)
    return msgspec.structs.replace(case, spec=fitting(spec))


def _with_model(case: Case, model: str) -> Case:
    sizes = {name: value for name, value in MODELS[model].fixed.items() if name != "dtype"}
    return _with_spec(case, model=model, **sizes)


def _with_data(case: Case, **changes: Any) -> Case:
    return msgspec.structs.replace(case, data=msgspec.structs.replace(case.data, **changes))


def _simpler_events(case: Case, which: int) -> Case:
    """The case with the simplification of its events at index ``which``, or the case itself if its
    present events have fewer simplifications."""
    simpler = list(simpler_events(case.spec.events))
    return _with_spec(case, events=simpler[which][1]) if which < len(simpler) else case


def _without_spike(case: Case, index: int) -> Case:
    spikes = tuple(s for i, s in enumerate(case.data.spikes) if i != index)
    return _with_data(case, spikes=spikes)


def _tamer(case: Case, values: str) -> Case:
    """The case with this value class, if it is tamer than the present one; else the case itself."""
    order = (*REACH, "inf_nan")
    if order.index(values) >= order.index(case.data.values):
        return case
    return _with_data(case, values=values)


def _flattened(case: Case) -> Case:
    """The case with the batch folded into the rows: as many tokens, one dimension less."""
    return _with_spec(case, batch=0, m=case.spec.tokens) if case.spec.batch else case


def _halved(case: Case, name: str) -> Case:
    size = getattr(case.spec, name)
    return _with_spec(case, **{name: size // 2}) if size >= 2 else case


def _dim_to_default(case: Case, name: str) -> Case:
    size, default = getattr(case.spec, name), _default(Spec, name)
    wants = size > default if name != "batch" else size != default
    return _with_spec(case, **{name: default}) if wants else case


def _changed(spec: Spec) -> list[str]:
    return [
        f for f in spec.__struct_fields__ if f != "recipe" and getattr(spec, f) != _default(Spec, f)
    ]


@cache
def _default(struct: type[msgspec.Struct], name: str) -> Any:
    for info in msgspec.structs.fields(struct):
        if info.name == name:
            return info.default
    raise AssertionError(name)
