"""observe(case) -> evidence: run the arms of a case, and collect what rules compare them with.

Rules are applied in ``judge.py``; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

import msgspec
from torch.nn import Linear

from narrowfuzz.arms.attributes import lost_by, read_of, still_read
from narrowfuzz.arms.available import approximate, keeps_generators, unavailable
from narrowfuzz.arms.functions import derivatives_of
from narrowfuzz.arms.jobs import AFTER
from narrowfuzz.arms.layouts import linear_specs_on_ranks
from narrowfuzz.arms.library_ranks import run_on_ranks
from narrowfuzz.arms.memory import poisoned
from narrowfuzz.arms.model_names import gradient_names, layer_names, parameter_shapes, ties
from narrowfuzz.arms.modules import may_be_missing, not_called_on
from narrowfuzz.arms.program import Program
from narrowfuzz.arms.sharded import run_alone, run_sharded, sharded_traces
from narrowfuzz.arms.twin import twin_outputs
from narrowfuzz.case.arm import SHARDED, Arm, with_checkpoint
from narrowfuzz.case.data import make_model_tensors, make_tensors
from narrowfuzz.case.event_data import with_events
from narrowfuzz.case.kind import CONVERTED, LAYERS, ON_RANKS, Kind, kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import base_of, climb, references
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.judge.batch import Drawn, drawn_together
from narrowfuzz.judge.observe_library import observe_library
from narrowfuzz.judge.programs import Programs
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.device import Device
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Plan, unquantised
from narrowfuzz.recipe.recipe import Recipe, no_tap, runnable, unknown
from narrowfuzz.recipe.source import split_by_source
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.own_functions import DERIVATIVES
from narrowfuzz.trace.trace import Change, RunError, Trace
from narrowfuzz.trace.verdict import PLAIN_FAMILY, Verdict

#: Number of plans in the cache: those of some Specs and of their models' linears.
_PLANS = 256


class _Extent(NamedTuple):
    """How much of a case is run and checked: on which of its rungs (None: all); the number of the
    linear that is checked (None: all); and whether every rung runs twice."""

    only: frozenset[str] | None
    focus: int | None
    repeat: bool


@dataclass
class Observer:
    """Recipes, ledger, device and selected arms, plus the cache of built programs."""

    recipes: Mapping[str, Recipe]
    ledger: Ledger
    arms: frozenset[str] | None = None
    device: Device = field(default_factory=Device)
    #: Called with each case of another shape or layout that a rule is about to run.
    before_rerun: Callable[[Case], None] = lambda case: None
    #: Recipe -> why its tap saw nothing in the first case that had operands to see; "" if it saw
    #: some.
    tap_failures: dict[str, str] = field(default_factory=dict)
    #: Draws that were made together and are not judged yet.
    _drawn: dict[Case, Drawn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = Programs(self.recipes, self.device.torch)
        # needed in every case, and for every call of a model's linears
        self.plan: Callable[[Spec], Plan] = lru_cache(_PLANS)(self._plan)
        self.plan_of_converted: Callable[[Spec], Plan] = lru_cache(_PLANS)(self._plan_of_converted)

    def recipe(self, spec: Spec) -> Recipe:
        """The Spec's recipe. Raises ValueError with the nearest match."""
        if spec.recipe not in self.recipes:
            raise ValueError(unknown("recipe", spec.recipe, self.recipes))
        return self.recipes[spec.recipe]

    def _plan(self, spec: Spec) -> Plan:
        """The recipe's plan on this device, or that of a plain linear if the recipe does not
        convert the Spec's linear. Raises ValueError as ``recipe``, and for an unknown backend."""
        recipe, plan = self.recipe(spec), self.plan_of_converted(spec)
        if spec.model != "linear" or not plan.quantised or recipe.converted is None:
            return plan
        linear = Linear(spec.k, spec.n, spec.bias, device="meta")
        if recipe.convertible(linear, "proj", spec):
            return plan
        return unquantised(spec.dtype).added_by(self.device.accumulators, spec.dtype)

    def _plan_of_converted(self, spec: Spec) -> Plan:
        """The recipe's plan for linears that it converts. Raises ValueError as ``plan``."""
        recipe = self.recipe(spec)
        recipe.backend(spec)
        return recipe.plan(spec).added_by(self.device.accumulators, spec.dtype)

    def draw(self, cases: Sequence[Case]) -> None:
        """Prepare the cases of one Spec that are judged next: make the tensors and references of a
        linear for all of them at once."""
        spec = cases[0].spec
        if not kind_of(spec).judges_each_linear:
            make = partial(tensors_of, recipe=self.recipe(spec))
            same = [case for case in cases if case.spec == spec]
            self._drawn = drawn_together(same, self.plan(spec), make)

    def rungs(self, spec: Spec) -> tuple[Arm, ...]:
        """The arms that this Spec runs on here; those that others are compared with are always
        among them."""
        wanted = references(spec)
        return tuple(
            arm
            for arm in climb(spec)
            if arm in wanted
            or (
                (self.arms is None or arm.name in self.arms)
                and not unavailable(arm, self.device.name)
            )
        )

    def beneath(self, spec: Spec, arm: str) -> frozenset[str]:
        """Names of the rungs up to and including this arm's, one of which is the first to show a
        divergence of this arm; none if the Spec does not climb so high."""
        rungs, stage = self.rungs(spec), ARMS[arm].stage
        last = max((i for i, other in enumerate(rungs) if other.stage == stage), default=-1)
        return frozenset(other.name for other in rungs[: last + 1])

    def observe(
        self,
        case: Case,
        only: frozenset[str] | None = None,
        *,
        focus: int | None = None,
        repeat: bool = True,
    ) -> Evidence:
        """The evidence that rules judge: the runs of a case, and what they are compared with.
        Raises ValueError that names what of the case its recipe cannot run."""
        recipe = self.recipe(case.spec)
        recipe.check(case.spec)
        extent = _Extent(only, focus, repeat)
        evidence = _OBSERVED[kind_of(case.spec)](self, case, recipe, extent)
        if (failure := evidence.tap_failure) is not None:
            self.tap_failures.setdefault(recipe.name, failure)
        return evidence

    def run_arms(self, case: Case) -> Mapping[str, Trace]:
        """The traces of every rung of a case, unjudged. Raises ValueError as ``observe``."""
        return self.observe(case, repeat=False).traces

    def _observe_layers(self, case: Case, recipe: Recipe, extent: _Extent) -> Evidence:
        """The evidence of a case of a library's own layers."""
        return observe_library(
            case,
            self.programs.subject(recipe),
            self._chosen(case.spec, extent.only),
            self.ledger.deviations(case),
            recipe.refusal(case.spec, self.device.torch),
            extent.focus,
            partial(run_on_ranks, prepare=recipe.prepare, device=self.device.torch),
        )

    def _observe_model(self, case: Case, recipe: Recipe, extent: _Extent) -> Evidence:
        """The evidence of a case of a converted model, or a linear, in one process."""
        spec, model = case.spec, MODELS[case.spec.model]
        drawn = self._drawn.pop(case, None) or Drawn(tensors_of(case, recipe))
        tensors = drawn.tensors
        traces, repeats = self._run(spec, tensors, extent)
        return replace(
            self._of_converted(case, tensors, traces),
            focus=extent.focus,
            prepared=drawn.reference,
            traces={arm: trace for arm, trace in traces.items() if not trace.unusable_because},
            unusable_because={
                arm: trace.unusable_because
                for arm, trace in traces.items()
                if trace.unusable_because
            },
            repeats=repeats,
            elides=frozenset(a.name for a in climb(spec) if a.fuses),
            approximate=frozenset(a.name for a in climb(spec) if approximate(a, self.device.torch)),
            refusal=recipe.refusal(_refused(spec, traces), self.device.torch),
            forbidden=model.forbidden,
            batch_invariant=recipe.backend(case.spec) in recipe.batch_invariant,
            rerun=partial(self._rerun, case),
            peers=lambda: power_of_two_peers(self.recipes, spec, self.device.torch),
            twin=None if model.random or model.forbidden else lambda: twin_outputs(spec, tensors),
            plan_for_spec=self.plan,
            gradients=gradient_names(spec),
            may_be_missing=self._may_be_missing(case, recipe, tensors) if model.own else None,
            lacking=self._lacking(case, recipe, tensors) if model.own else None,
            unconverted_error=(
                partial(self._unconverted_error, case, recipe, tensors) if model.own else None
            ),
            drop_unread_attributes=self._drop_unread(case, recipe, tensors, traces),
            tied=ties(spec),
            layers=() if recipe.functional else layer_names(spec),
            pointwise=model.pointwise,
            output_linear=model.last,
            regions=model.recomputed(spec)[0],
            data={
                DERIVATIVES: partial(derivatives_of, spec, self.device.torch),
            },
        )

    def _observe_ranks(self, case: Case, recipe: Recipe, extent: _Extent) -> Evidence:
        """The evidence of a case of a converted model on ranks."""
        spec, device, tensors = case.spec, self.device.torch, tensors_of(case, recipe)
        traces = sharded_traces(spec, recipe, tensors, self._chosen(spec, extent.only), device)
        bare = replace(recipe, convert=lambda model, spec: model, tap=no_tap)
        arm = with_checkpoint(SHARDED, spec.checkpoint)
        refusals = (recipe.refusal(piece, device) for piece in linear_specs_on_ranks(spec))
        return replace(
            self._of_converted(case, tensors, traces),
            refusal=next(filter(None, refusals), ""),
            forbidden=MODELS[spec.model].forbidden,
            twin=(lambda: twin_outputs(spec, tensors)) if layout_of(spec).approximate else None,
            layers=layer_names(spec),
            styles=MODELS[spec.model].styles(spec),
            unconverted_run=partial(run_sharded, spec, bare, tensors, arm, device),
            unconverted_alone=partial(run_alone, spec, bare, tensors, device),
            laid_out=lambda sharding: run_sharded(
                msgspec.structs.replace(spec, sharding=sharding), recipe, tensors, arm, device
            ),
        )

    def _of_converted(
        self, case: Case, tensors: dict[str, F32], traces: Mapping[str, Trace]
    ) -> Evidence:
        """The evidence that cases of all converted models have."""
        plan = self.plan(case.spec)
        return Evidence(
            case=case,
            traces=traces,
            deviations=self.ledger.deviations(self.as_known(case)),
            plan=plan,
            tensors=tensors,
            converted_plan_of=self.plan_of_converted,
            accumulators=self.device.accumulators,
            unconverted=not plan.quantised and self.plan_of_converted(case.spec).quantised,
        )

    def _chosen(self, spec: Spec, only: frozenset[str] | None) -> list[Arm]:
        return [arm for arm in self.rungs(spec) if only is None or arm.name in only]

    def _run(
        self, spec: Spec, tensors: dict[str, F32], extent: _Extent
    ) -> tuple[dict[str, Trace], dict[str, Trace]]:
        traces: dict[str, Trace] = {}
        repeats: dict[str, Trace] = {}
        for arm in self._chosen(spec, extent.only):
            program = self.programs.of(spec, arm)
            trace = self.programs.tapped(program, tensors, spec, extent.focus)
            if trace.error is not None and extent.focus is not None and MODELS[spec.model].own:
                # with all linears watched, the trace names the one that failed
                trace = self.programs.tapped(program, tensors, spec, None)
            traces[arm.name] = trace
            ended = traces[arm.name].error is not None or bool(traces[arm.name].unusable_because)
            if ended and arm is base_of(spec):
                break  # other rungs would end in the same way
            seeded = not keeps_generators(arm, spec, self.device.torch)
            if not ended and extent.repeat and seeded:
                sizes = {result.size for result in traces[arm.name].outputs.values()}
                again = self.programs.of(spec, arm)
                with poisoned(sizes, self.device.torch):
                    repeats[arm.name] = again.run(tensors, tap=False, spec=spec)
        return traces, repeats

    def _rerun(self, case: Case, tensors: dict[str, F32], spec: Spec, event: str) -> Trace:
        self.before_rerun(msgspec.structs.replace(case, spec=spec))
        program = self.programs.of(spec, base_of(spec))
        return program.run(tensors, tap=True, spec=spec, events=AFTER.get(event))

    def _bare(self, case: Case, recipe: Recipe, arm: Arm | None = None) -> Program:
        """The case's model, unconverted and freshly built, on its base or another arm."""
        bare = replace(recipe, convert=lambda model, spec: model, converted=None, tap=no_tap)
        return Program(case.spec, bare, arm or base_of(case.spec), device=self.device.torch)

    def _unconverted_error(
        self, case: Case, recipe: Recipe, tensors: dict[str, F32], arm: str
    ) -> RunError | None:
        """The error with which the unconverted model fails on this arm; None if it does not."""
        return self._bare(case, recipe, ARMS[arm]).run(tensors, tap=False).error

    def _may_be_missing(
        self, case: Case, recipe: Recipe, tensors: dict[str, F32]
    ) -> Callable[[frozenset[str]], frozenset[str]]:
        """Returns which of the missing gradients of a user's model need not exist."""

        @lru_cache
        def of_the_model(names: frozenset[str]) -> frozenset[str]:
            found = may_be_missing(self._bare(case, recipe), tensors, names)
            if found == names:
                return found
            converted = Program(case.spec, recipe, base_of(case.spec), device=self.device.torch)
            return found | not_called_on(converted, tensors, names - found)

        return of_the_model

    def _lacking(
        self, case: Case, recipe: Recipe, tensors: dict[str, F32]
    ) -> Callable[[str], frozenset[str]]:
        """Returns the gradients that the unconverted model does not get on an arm."""

        @lru_cache
        def lacking(arm: str) -> frozenset[str]:
            run = self._bare(case, recipe, ARMS[arm]).run(tensors, tap=False)
            return gradient_names(case.spec) - run.outputs.keys()

        return lacking

    def _drop_unread(
        self, case: Case, recipe: Recipe, tensors: dict[str, F32], traces: Mapping[str, Trace]
    ) -> Callable[[Change], Change | None]:
        """Returns a change of the census without the lost attributes that nobody reads; None if
        nothing of it is left."""

        @lru_cache
        def read() -> frozenset[tuple[str, str]]:
            taken = (t.census.changes for t in traces.values() if t.census is not None)
            wanted = lost_by(change for changes in taken for change in changes)
            return read_of(self._bare(case, recipe), tensors, wanted)

        return lambda change: still_read(change, read()) if change.attributes else change

    def as_known(self, case: Case, verdict: Verdict | None = None) -> Case:
        """The case as the ledger names it: with the recipe that its own is based on, or, for a
        verdict on a linear that was not converted, with the plain recipe."""
        recipe, spec = self.recipe(case.spec), case.spec
        if verdict is not None and verdict.unconverted:
            spec = msgspec.structs.replace(spec, recipe=f"{PLAIN_FAMILY}.{spec.dtype}", backend="")
        elif recipe.based_on:
            spec = msgspec.structs.replace(spec, recipe=recipe.based_on)
        return msgspec.structs.replace(case, spec=spec)


#: Kind of case -> the method that observes it.
_OBSERVED: Mapping[Kind, Callable[[Observer, Case, Recipe, _Extent], Evidence]] = {
    LAYERS: Observer._observe_layers,
    **dict.fromkeys(CONVERTED, Observer._observe_model),
    **dict.fromkeys(ON_RANKS, Observer._observe_ranks),
}


def _refused(spec: Spec, traces: Mapping[str, Trace]) -> Spec:
    """The Spec with the sizes for which a recipe may refuse the case: for a user's model, whose
    linears may have any size, those of the linear that failed."""
    base = traces.get(base_of(spec).name)
    sizes = None if base is None or base.error is None else base.error.sizes
    if not MODELS[spec.model].own or sizes is None:
        return spec
    m, k, n = sizes
    return msgspec.structs.replace(spec, m=m, batch=0, k=k, n=n)


def tensors_of(case: Case, recipe: Recipe) -> dict[str, F32]:
    """The tensors a case runs on."""
    if case.spec.direct:
        return make_tensors(case, recipe.plan(case.spec))
    ids = MODELS[case.spec.model].takes_ids
    return with_events(case.spec, make_model_tensors(case, parameter_shapes(case.spec), ids=ids))


def power_of_two_peers(
    recipes: Mapping[str, Recipe], spec: Spec, device: str
) -> dict[str, tuple[Spec, Plan]]:
    """Recipe -> this Spec of it and its plan, for the other recipes that run here, accept the Spec,
    and whose scales are all powers of two."""
    peers: dict[str, tuple[Spec, Plan]] = {}
    models, _ = split_by_source(recipes.values())
    for recipe in models:
        backend = _backend(recipe, device)
        if backend is None or recipe.name == spec.recipe or spec.dtype not in recipe.dtypes:
            continue
        other = msgspec.structs.replace(spec, recipe=recipe.name, backend=backend)
        if recipe.refusal(other, device):
            continue
        plan = recipe.plan(other)
        if all(o.power_of_two for gemm in plan.gemms.values() for o in (gemm.a, gemm.b)):
            peers[recipe.name] = other, plan
    return peers


@cache
def _backend(recipe: Recipe, device: str) -> str | None:
    """The backend of a recipe that runs here, as a Spec says it: "" for its first; None: none."""
    here = runnable(recipe, device)
    if here is None:
        return None
    return "" if here.backends[0] == recipe.backends[0] else here.backends[0]
