"""Draws a worker's cases: batches of cases that share a Spec, slice by slice, and schedules.

Hypothesis is used for generation only; by itself it favours some recipes and models for hours. So
each slice takes only a few of them, some factors stay constant in it, and of several drawn
batches the one with the most pairs of features that are new to this worker is taken.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, get_args
from unittest.mock import patch

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from narrowfuzz.arms.available import natives, on_ranks, select_arms
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.slices import Deck, Models, Slice
from narrowfuzz.campaign.time_spent import TimeSpent
from narrowfuzz.case.arm import SHARDED_PROCESSES, Compile
from narrowfuzz.case.kind import ON_RANKS, kind_of
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout import MESH
from narrowfuzz.case.spec import Case, ModelName, Spec, compile_key, load_case
from narrowfuzz.draw.coverage import Pair, layout_pairs, pairs
from narrowfuzz.draw.library_specs import ALWAYS, RARELY
from narrowfuzz.draw.neighbours import near
from narrowfuzz.draw.operator_specs import operator_specs
from narrowfuzz.draw.sharded_specs import SHARDABLE, sharded_specs
from narrowfuzz.draw.specs import DIRECT, FACTORS, FRAGILE, WIDE, partly_recomputed, specs
from narrowfuzz.draw.strategies import (
    SCHEDULE_FACTORS,
    batches,
    ladder_percent_high,
    ladder_percent_low,
    schedule_cases,
)
from narrowfuzz.judge.judge import Judgement
from narrowfuzz.machine.device import forks, torch_name_before_begin
from narrowfuzz.machine.environment import Collector
from narrowfuzz.machine.gpu import gpus
from narrowfuzz.models.catalog import MODELS, of_kind
from narrowfuzz.models.operators import MANY
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.recipe.recipe import Recipe

#: Data draws per Spec of an eager model: they take longer than a linear's, and bugs of a model
#: seldom depend on the data, so more Specs find more.
MODEL_DRAWS = 4
#: Number of drawn batches of models of which the most novel one is taken: compiled, and eager; and
#: on ranks, where it is the one with the most that is new for the time that it takes.
_CANDIDATES, _EAGER_CANDIDATES, _CANDIDATES_ON_RANKS = 6, 3, 8
#: Eager cases near their error bound are tried again compiled: how many of them are remembered,
#: and the chance that one of them is taken in place of a drawn batch.
_NEAR_BOUND_KEPT, _NEAR_BOUND_CHANCE = 8, 0.25
#: Chance that a factor may vary in a slice: rare pairs need the other factors to stay constant.
_SWARM = 0.6
#: Examples in a slice where the number of cases is given: few, as many slices see many models. The
#: first compiled example is the simplest, and is left out.
_FEW_LINEARS, _FEW_MODELS, _FEW_SCHEDULES, _FEW_COMPILED, _FEW_SHARDED = 2, 8, 20, 2, 8
#: Data draws of a sharded Spec: its bugs depend on the layout.
_SHARDED_DRAWS = 1
#: Data draws of a Spec of one operator, each of which takes as long as the first; examples of each
#: operator in a slice, of which the first is the simplest, and is left out; and the number of
#: operators in a slice where the number of cases is given.
_OPERATOR_DRAWS, _FEW_OPERATORS, _COUNTED_OPERATORS = 2, 2, 6
#: How many neighbours an eager case of the corpus has in a slice, and how many a case has that is
#: compiled or runs on ranks, after the simplest, which is left out; and how many cases of the
#: corpus a slice tries where the number of cases is given.
_NEAR, _FEW_NEAR, _COUNTED_CORPUS = 3, 1, 4
#: Models that consist of one operator other than a linear.
SINGLE_OPERATORS = of_kind("operator")
#: Number of recipes in one slice, and of models besides the linear.
_TOGETHER = 4
_SCHEDULE_SECONDS = 10.0

Serve = Callable[[tuple[Case, ...]], None]


class Generator:
    """The draws of one worker: the same for the same ``rng``, unless the clock cuts a slice
    short."""

    def __init__(
        self,
        config: Config,
        recipes: Sequence[Recipe],
        stateful: Sequence[Recipe],
        rng: random.Random,
        plan_of: Callable[[Spec], Plan],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.recipes, self.stateful, self.rng = config, recipes, stateful, rng
        self.linears = config.linears and any(recipe.takes("linear") for recipe in recipes)
        #: The plan of a Spec: what it multiplies on the run's device, and how products are added.
        self.plan_of = plan_of
        named = (*filter(config.asks, WIDE), *(m for m in config.models if MODELS[m].own))
        self.models = tuple(m for m in named if any(recipe.takes(m) for recipe in recipes))
        #: Used for single operators and neighbours of the corpus only, so that the draws of other
        #: slices do not depend on these.
        self.independent_rng = copy.copy(rng)
        #: Models that compile in a few seconds, and models that partial recompute may break.
        of_blocks = {m for m in self.models if MODELS[m].kind == "block"}
        self.small = tuple(m for m in self.models if MODELS[m].compiled and m not in of_blocks)
        self.fragile = tuple(m for m in FRAGILE if m in self.models)
        #: Models that a compiled rung has time for.
        self.quick = tuple(m for m in self.models if MODELS[m].compiled)
        #: Per rung: decks of recipes, of models, of small and of fragile models. So each of them
        #: has its turn even on the most expensive rung.
        compilable = [recipe for recipe in recipes if recipe.compiles]
        self.decks: dict[Compile, tuple[Deck[Any], ...]] = {
            kind: (
                Deck(recipes if kind == "none" else compilable, rng),
                Deck(self.models if kind == "none" else self.quick, rng),
                Deck(self.small, rng),
                Deck(self.fragile, rng),
            )
            for kind in get_args(Compile)
        }
        self.operator_decks = self._operator_decks()
        self.corpus_decks = self._corpus_decks(copy.copy(rng))
        #: Ids of the cases of the corpus that have run unchanged.
        self.tried: set[str] = set()
        arms = select_arms(config.arms)
        ranks = on_ranks(arms, config.device)
        #: Number of GPUs, one for each rank; 0: ranks compute on the CPU.
        self.gpus = len(gpus()) if ranks and not forks(config.device) else 0
        #: Numbers of ranks to draw from for a library's own layers. There a rank is a process, so
        #: this does not depend on GPUs.
        self.ranks = RARELY if SHARDED_PROCESSES.name in arms else (0,)
        if all(BY_NAME[name].sharded for name in arms):
            self.ranks = ALWAYS
        #: Recipes and models that run on ranks.
        self.shardable = [recipe for recipe in recipes if recipe.shards and ranks]
        own = (m for m in self.models if MODELS[m].own and MESH.takes(m))
        self.shared = (*filter(config.asks, SHARDABLE), *own)
        #: True if the number of cases is given: then neither the clock nor this machine's results
        #: steer the draws, and there are too few cases for factors to stay constant.
        self.counted = bool(config.cases)
        #: Factors of a Spec that slices may vary.
        self.vary = FACTORS if self.models else FACTORS - {"model"}
        if not natives(arms, config.device):
            self.vary -= {"kernels"}
        if config.device.startswith("cuda"):  # the CPU multiplies nothing there
            self.vary -= {"threads"}
        self.time = TimeSpent(clock, limits=not self.counted)
        self.garbage = Collector()
        #: Pairs of features that have run.
        self.seen: set[Pair] = set()
        #: Ids of the cases that have run: Hypothesis changes one part of an example and keeps the
        #: others, so half of what it draws has been drawn before.
        self.ran: set[str] = set()
        #: Keys of the compiled Specs that have been drawn, and of the schedules that have been
        #: played.
        self.served: set[str] = set()
        self.played: set[str] = set()
        #: Eager cases whose results came closest to their bounds: (share of the radius, case).
        self.near_bound: list[tuple[float, Case]] = []

    def _operator_decks(self) -> dict[Compile, Deck[Any]]:
        """Per rung, a deck of the pairs of a recipe and a model of one operator that run there."""
        here = torch_name_before_begin(self.config.device)
        pairs = [
            (recipe, model)
            for recipe, model in itertools.product(
                self.recipes, filter(self.config.asks, SINGLE_OPERATORS)
            )
            if recipe.takes(model) and MODELS[model].runs_on(here, recipe.dtypes)
        ]
        compiled = [(recipe, model) for recipe, model in pairs if MODELS[model].compiled]
        # a compiled run has time for few operators: it begins with the graph that calls many, in
        # the widest format, where roundings hide least
        many = [(recipe, model) for recipe, model in compiled if model == MANY]
        many.sort(key=lambda pair: min(FORMATS[d].unit_roundoff for d in pair[0].dtypes))
        return {
            kind: Deck(pairs, self.independent_rng)
            if kind == "none"
            else Deck(compiled, self.independent_rng, [*many])
            for kind in get_args(Compile)
        }

    def _corpus_decks(self, rng: random.Random) -> dict[str, Deck[Case]]:
        """Decks of the corpus: of cases that are compiled, of cases on ranks, and of all others."""
        kinds: dict[str, list[Case]] = {"none": [], "sharded": [], "inductor": []}
        recipes = {recipe.name for recipe in (*self.recipes, *self.stateful)}
        for case in map(load_case, self.config.corpus):
            model, kind = case.spec.model, "none" if case.spec.compile == "none" else "inductor"
            wanted = self.linears if model == "linear" else self.config.asks(model)
            if case.spec.recipe in recipes and wanted:
                kinds["sharded" if kind_of(case.spec) in ON_RANKS else kind].append(case)
        return {kind: Deck(cases, rng) for kind, cases in kinds.items()}

    def slices(self, order: Iterable[Slice], rungs: Collection[Compile]) -> list[Slice]:
        """The slices of ``order`` for which there are recipes, models and rungs; before them one of
        schedules, if there are stateful recipes."""
        few = {
            "models": self.models,
            "small": self.small,
            "recomputed": self.fragile,
            "linears": self.linears,
            "either": self.models or self.linears,
            "ranks": self.shared or self.linears,
            "operators": self.operator_decks["none"].cards,
        }
        able = {rung for rung in rungs if rung == "none" or self.decks[rung][0].cards}
        kinds = {*able, *(["sharded"] if self.shardable else [])}
        playable = [
            s
            for s in order
            if s.kind in kinds
            and (
                self.corpus_decks[s.kind].cards
                if s.models == "corpus"
                else self.recipes and few.get(s.models, True)
            )
        ]
        return [*([Slice("schedule", _SCHEDULE_SECONDS)] if self.stateful else []), *playable]

    def converted_models(
        self, kind: Compile, wanted: Models, more: Callable[[], bool], serve: Serve
    ) -> None:
        """Draw one slice's batches of linears and models, which a recipe converts, on the rung
        ``kind``, and pass them to ``serve`` while ``more()``."""
        eager = kind == "none"
        draws = MODEL_DRAWS if eager and wanted != "linears" else self.config.draws
        vary = self.vary - {"model"} if wanted == "linears" else self.vary
        if wanted == "linears" and not eager and self.rng.random() < 0.5:
            vary &= DIRECT  # a linear that is trained once meets all rules, operand by operand
        largest = 128 if eager and self.rng.random() < 0.3 else 64
        if not self.counted and self.rng.random() < 0.75:
            vary = self._swarm(vary)
        # without single linears a model is drawn, even if the swarm has left out that factor
        wider = wanted in ("models", "small") or "model" in vary or not self.linears
        candidates = _CANDIDATES if not eager else _EAGER_CANDIDATES if wider else 1
        deck, several = self._models(kind, wanted, wider)
        models = tuple(deck.take(several))
        some_specs = self._specs(kind, wanted, vary, models, largest)
        batch = batches(some_specs, draws=draws, ladders=self._ladders)
        met: set[str] = set()

        def worth(batch: tuple[Case, ...]) -> tuple[bool, bool, int]:
            # a bug that only some graphs have shows with most other factors: new models come first
            new = self._novelty(batch)
            return new >= 0, not eager and batch[0].spec.model not in met, new

        def take(drawn: list[tuple[Case, ...]]) -> None:
            # Hypothesis' first example repeats the simplest batch: on compiled rungs it takes as
            # long as any other, and shows least
            if not more() or (not eager and drawn.count(drawn[0]) == len(drawn)):
                return
            if eager:
                drawn = [*filter(None, map(self._new, drawn))]
            if not drawn:
                return
            chosen = max(drawn, key=worth)
            if not eager:
                if self.rng.random() < _NEAR_BOUND_CHANCE:
                    chosen = self._closest(kind, wanted) or chosen
                key = compile_key(chosen[0].spec)
                if key in self.served:
                    return
                self.served.add(key)
            spec = chosen[0].spec
            if eager and self.time.eager_overspent(spec):
                return
            met.add(spec.model)
            with self.time.on_eager(spec) if eager else nullcontext():
                serve(chosen)

        some = st.lists(batch, min_size=candidates, max_size=candidates)
        self._generate(some, take, self._examples(eager, wanted))
        deck.unused([model for model in models if model not in met])

    def operators_alone(self, kind: Compile, more: Callable[[], bool], serve: Serve) -> None:
        """As ``converted_models``, with Specs of one operator, one Spec for each recipe and
        operator while ``more()``: there are many of them, and each is small."""
        eager = kind == "none"
        many = _COUNTED_OPERATORS if self.counted else len(self.operator_decks[kind].cards)
        chosen = self.operator_decks[kind].take(many if eager else 1)

        def take(drawn: list[tuple[Case, ...]]) -> None:
            if more() and drawn.count(drawn[0]) < len(drawn):  # else it repeats the simplest
                serve(max(drawn, key=self._novelty))

        while chosen and more():
            recipe, model = chosen.pop(0)
            specs = operator_specs([recipe], (model,), compile=kind, vary=self.vary)
            batch = batches(specs, draws=_OPERATOR_DRAWS if eager else self.config.draws)
            several = st.lists(batch, min_size=_EAGER_CANDIDATES, max_size=_EAGER_CANDIDATES)
            self._generate(several, take, _FEW_OPERATORS, self.independent_rng)
        self.operator_decks[kind].unused(chosen)

    def corpus(self, kind: str, more: Callable[[], bool], serve: Serve) -> None:
        """As ``converted_models``, with cases of the corpus: each unchanged, then its neighbours. A
        case that is compiled, or runs on ranks, has its neighbours when its turn comes again."""
        deck, eager = self.corpus_decks[kind], kind == "none"
        draws = _SHARDED_DRAWS if kind == "sharded" else _OPERATOR_DRAWS
        recipes = {recipe.name: recipe for recipe in self.recipes}
        cases = deck.take(_COUNTED_CORPUS if self.counted else len(deck.cards))
        while cases and more():
            case = cases.pop(0)
            recipe = recipes.get(case.spec.recipe)
            known = case.id in self.tried
            if not known or recipe is None:
                self.tried.add(case.id)
                serve(tuple(map(case.reseeded, range(draws if recipe else 1))))
            if recipe is not None and (eager or known):
                some = near(case, recipe, draws=draws)
                self._near(case, some, _NEAR if eager else _FEW_NEAR, more, serve)
        deck.unused(cases)

    def _near(
        self,
        case: Case,
        some: st.SearchStrategy[tuple[Case, ...]],
        many: int,
        more: Callable[[], bool],
        serve: Serve,
    ) -> None:
        def take(batch: tuple[Case, ...]) -> None:
            if more() and batch[0].spec != case.spec:
                serve(batch)

        self._generate(some, take, many + 1, self.independent_rng)

    def sharded(self, more: Callable[[], bool], serve: Serve) -> None:
        """As ``converted_models``, with models on ranks."""
        specs = sharded_specs(self.shardable, self.shared, gpus=self.gpus)
        batch = batches(specs, draws=_SHARDED_DRAWS)
        some = st.lists(batch, min_size=_CANDIDATES_ON_RANKS, max_size=_CANDIDATES_ON_RANKS)

        def take(drawn: list[tuple[Case, ...]]) -> None:
            if more() and (new := [*filter(None, map(self._new, drawn))]):
                serve(max(new, key=worth))

        def worth(batch: tuple[Case, ...]) -> float:
            return self._novelty(batch) / _seconds_on_ranks(batch[0].spec)

        self._generate(some, take, _FEW_SHARDED if self.counted else 40)

    def schedules(self, more: Callable[[], bool], serve: Serve) -> None:
        """As ``converted_models``, with stateful cases, one at a time."""
        vary = SCHEDULE_FACTORS
        if not self.counted and self.rng.random() < 0.5:
            vary = self._swarm(vary)

        def take(case: Case) -> None:
            key = compile_key(case.spec)
            if more() and key not in self.played:  # Hypothesis repeats itself
                self.played.add(key)
                serve((case,))

        many = 100 if not (self.counted and self.recipes) else _FEW_SCHEDULES
        some = schedule_cases(self.stateful, vary=vary, ranks=self.ranks)
        self._generate(some, take, many)

    def remember(self, case: Case, judgement: Judgement) -> None:
        """Record the case's pairs of features, which are not novel any more, and the case itself if
        it came close to its bound: it may be worth compiling."""
        self.seen.update(_pairs(case))
        self.ran.add(case.id)
        if self.counted or case.spec.compile != "none" or case.spec.events:
            return  # a graph cannot play every event
        shares = (v.factor for v in judgement.verdicts if v.rule == "O6" and v.status == "ok")
        share = max(shares, default=0.0)
        if share <= 0.0 or any(c.spec == case.spec for _, c in self.near_bound):
            return
        self.near_bound.append((share, case))
        if len(self.near_bound) > _NEAR_BOUND_KEPT:
            self.near_bound.remove(min(self.near_bound, key=lambda item: item[0]))

    def _models(self, kind: Compile, wanted: Models, wider: bool) -> tuple[Deck[ModelName], int]:
        """The deck that a slice takes its models from, and how many it takes."""
        _, every, small, fragile = self.decks[kind]
        if wanted == "recomputed":
            return fragile, 1
        if not wider:
            return every, 0
        # such a slice has time for one Spec: with one model a slice, each model has its turn
        one_at_a_time = kind == "inductor" and wanted in ("models", "small")
        return small if wanted == "small" else every, 1 if one_at_a_time else _TOGETHER

    def _specs(
        self,
        kind: Compile,
        wanted: Models,
        vary: frozenset[str],
        models: tuple[ModelName, ...],
        largest: int,
    ) -> st.SearchStrategy[Spec]:
        recipes = self.decks[kind][0].take(_TOGETHER)
        if wanted == "recomputed":
            return partly_recomputed(recipes, largest=largest, vary=vary, blocks=models)
        return specs(
            recipes,
            compile=kind,
            largest=largest,
            vary=vary,
            models=models,
            wild_shapes=self.config.wild_shapes,
            linears=self.linears and wanted not in ("models", "small"),
        )

    def _generate(
        self,
        strategy: st.SearchStrategy[Any],
        take: Callable[[Any], None],
        examples: int,
        rng: random.Random | None = None,
    ) -> None:
        @seed((rng or self.rng).getrandbits(64))
        @settings(
            max_examples=examples,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run(drawn: Any) -> None:
            take(drawn)

        with _wherever_files_lie():
            run()
        self.garbage.collect()

    def _ladders(self, spec: Spec) -> int:
        """Percentage of Specs that get ladder data: higher if an accumulator is known to the bit,
        as they then show errors that lattice data do not."""
        gemms = self.plan_of(spec).gemms.values()
        known = any(gemm.accumulator.to_the_bit for gemm in gemms)
        return ladder_percent_high(spec) if known else ladder_percent_low(spec)

    def _swarm(self, vary: frozenset[str]) -> frozenset[str]:
        """A random subset of the factors, which may vary; the others stay constant."""
        return frozenset(f for f in sorted(vary) if self.rng.random() < _SWARM)

    def _examples(self, eager: bool, wanted: Models) -> int:
        """How many Specs a slice has at most: few if the number of cases is given, so that these
        include both linears and models."""
        if not self.counted:
            return 40 if eager else 6
        if not eager:
            return _FEW_COMPILED
        return _FEW_LINEARS if wanted == "linears" else _FEW_MODELS

    def _new(self, batch: tuple[Case, ...]) -> tuple[Case, ...]:
        """The cases of the batch that have not run, each once."""
        cases = {case.id: case for case in batch}
        return tuple(case for key, case in cases.items() if key not in self.ran)

    def _novelty(self, batch: tuple[Case, ...]) -> int:
        """Number of the batch's pairs of features that this worker has not run yet; -1 for a
        compiled Spec that has been drawn before."""
        if compile_key(batch[0].spec) in self.served:
            return -1
        return len({p for case in batch for p in _pairs(case)} - self.seen)

    def _closest(self, kind: Compile, wanted: Models) -> tuple[Case, ...]:
        """The eager case nearest to its bound among those that such a slice may compile, as a batch
        of one on the rung ``kind``. Each is returned once. Empty if there is none."""
        able = {"linears": ("linear",), "small": self.small, "models": self.quick}
        some = (*self.quick, "linear") if wanted == "either" else able.get(wanted, ())
        near = max(
            (one for one in self.near_bound if one[1].spec.model in some),
            key=lambda one: one[0],
            default=None,
        )
        if near is None:
            return ()
        self.near_bound.remove(near)
        spec = msgspec.structs.replace(near[1].spec, compile=kind, kernels="default")
        return (msgspec.structs.replace(near[1], spec=spec),)


@contextmanager
def _wherever_files_lie() -> Iterator[None]:
    """Make draws independent of where modules are installed. Hypothesis also draws constants from
    the source of modules that it takes for the user's own, which are those outside site-packages:
    with a checkout of a library it would draw other cases than with its release."""
    if not hasattr(providers, "_get_local_constants"):  # before 6.131 it did not do that
        yield
        return
    none = providers.Constants()
    with patch.object(providers, "_get_local_constants", lambda: none):
        yield


def _pairs(case: Case) -> frozenset[Pair]:
    """The pairs of features by which draws are compared; on ranks, also those of the layout."""
    return layout_pairs(case.spec).union(pairs(case))


def _seconds_on_ranks(spec: Spec) -> float:
    """Roughly how long a case on ranks takes, as measured on two cores. One rank counts as two:
    nobody trains on a mesh of one, so these cases need not come first."""
    compiled, processes = spec.compile != "none", spec.sharding.processes
    ranks, steps = max(spec.sharding.ranks, 2), 1.3 if spec.steps > 1 else 1.0
    return 0.3 + 0.1 * ranks * steps + 1.5 * compiled + 0.3 * processes
