"""A worker: draws cases, judges them, triages what is new, and tells the supervisor.

The current case is journalled before it runs, so that an abort or a hang in a kernel costs one
worker and still names its case.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from harness.arms.ladder import climb, rungs_of, select_arms
from harness.campaign.config import Config
from harness.campaign.slices import AGAIN, FIRST, Deck, Models, Slice
from harness.campaign.store import claim, release
from harness.case import Case, Compile, compile_key, dump_case
from harness.coverage import Pair, pairs
from harness.environment import prepare, settle
from harness.judge import Judge, Judgement
from harness.ledger import Ledger, load_ledger
from harness.oracles import ORACLES
from harness.oracles.schedule import SCHEDULE_ORACLES
from harness.planted import identity, planted
from harness.recipe import Recipe, load_recipes, load_stateful, runnable, select
from harness.stateful import Stateful, process_of, processes
from harness.strategies import (
    FACTORS,
    FRAGILE,
    SCHEDULE_FACTORS,
    WIDE,
    batches,
    schedule_cases,
)
from harness.triage.forked import ForkedScripts
from harness.triage.triage import triage
from harness.triage.verify import RunScript, run_script
from harness.verdict import fingerprint

_RELATIONS = tuple(o for o in ORACLES if o.reruns)
_CORE = tuple(o for o in ORACLES if not o.reruns)
_REPORT_EVERY = 0.5
#: A batch of models is the most novel of so many drawn ones, compiled and eager.
_CANDIDATES, _EAGER_CANDIDATES = 6, 3
#: How many cases close to their bounds are remembered for a dear rung, and how often one is taken.
_CLOSE_KEPT, _CLOSE_CHANCE = 8, 0.25
#: Data drawn for a compiled Spec and for a model's: they take longer than an eager linear's, and
#: what is wrong with a model seldom hangs on them, so more Specs find more.
_MODEL_DRAWS = 4
#: Draws that every compiled artefact serves, however fast it was to compile. A linear's serves
#: until they have taken as long as compiling it: what is wrong there may hang on one element.
_LEAST_DRAWS = 20
_SCHEDULE_SECONDS = 10.0
#: Chance that a slice may vary a factor: rare pairs need the other factors to stand still.
_SWARM = 0.6
#: Eager Specs in a slice where the number of cases is given: many slices see many models.
_FEW_LINEARS, _FEW_MODELS = 2, 8
#: Recipes, and models besides the linear, in one slice.
_TOGETHER = 4


def work(
    config: Config, number: int, generation: int, judged: int, deadline: float, out: Connection
) -> None:
    """Process entry point. ``judged``: cases that its predecessors have judged. ``deadline`` is on
    the monotonic clock, which processes share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    settle()
    worker = _Worker(config, number, generation, judged, deadline, out)
    with ExitStack() as stack:
        if config.plant is not None:
            prepare(identity(*config.plant))
            stack.enter_context(planted(*config.plant))
        out.send(("ready", None))
        worker.loop()
    worker.flush(final="recycled" if worker.worn_out and not worker.has_enough else "done")
    out.close()


class _Worker:
    def __init__(
        self,
        config: Config,
        number: int,
        generation: int,
        judged: int,
        deadline: float,
        out: Connection,
    ) -> None:
        self.config, self.deadline, self.out = config, deadline, out
        #: Made while nothing is planted or patched yet.
        self.scripts: RunScript = ForkedScripts() if config.plant else run_script
        self.judged = judged
        recipes = load_recipes(config.recipe_files)
        stateful = load_stateful(config.recipe_files)
        chosen = select({**recipes, **stateful}, config.recipes).values()
        #: Recipes that need a process of their own take turns with the others.
        kinds = processes(chosen)
        self.turns = len(kinds) > 1
        self.process = kinds[(number + generation) % len(kinds)]
        mine = [r for r in chosen if process_of(r) == self.process]
        self.recipes = [
            able for r in mine if isinstance(r, Recipe) and (able := runnable(r, config.device))
        ]
        self.stateful = [
            r for r in mine if isinstance(r, Stateful) and not r.unavailable(config.device)
        ]
        for recipe in self.stateful:
            recipe.prepare()
        ledger = load_ledger() if config.ledger else Ledger([])
        self.arms = select_arms(config.arms)
        self.judge = Judge(recipes, ledger, self.arms, device=config.device, stateful=stateful)
        self.journal = config.out / "journal" / f"{number}.json"
        self.rng = random.Random(f"{config.seed}/{config.part}/{number}/{generation}")
        #: A worker that takes the place of one that was worn out goes on where that was.
        self.starts = generation == 0
        self.counts: Counter[Any] = Counter()
        #: One relation per draw, going on where the last Spec stopped: there are more of them than
        #: draws of a Spec.
        self.relations = itertools.cycle(_RELATIONS)
        self.models = tuple(m for m in WIDE if not config.models or m in config.models)
        #: Those that partial recompute may break.
        self.fragile = tuple(m for m in FRAGILE if m in self.models)
        #: Recipes, models and fragile ones, for eager slices and for compiled ones.
        cards: tuple[Sequence[Any], ...] = (self.recipes, self.models, self.fragile)
        self.decks = [tuple(Deck(c, self.rng) for c in cards) for _ in range(2)]
        #: So many cases in all leave no time for factors to stand still.
        self.swarms = not config.cases
        #: What the slices may vary of a Spec.
        self.vary = FACTORS if self.models else FACTORS - {"model"}
        self.began = time.monotonic()
        #: Schedules that have been played.
        self.played: set[str] = set()
        #: Compiled Specs that have had their draws.
        self.served: set[str] = set()
        #: Pairs of features this worker has run.
        self.seen: set[Pair] = set()
        #: Eager cases whose results came closest to their bounds: (share of the radius, case).
        self.close: list[tuple[float, Case]] = []
        self.triage_seconds = 0.0
        self.triage_compiling = 0.0
        self.reported = time.monotonic()

    def loop(self) -> None:
        """Slices in turn until the time is up or this process has compiled enough."""
        first, again = self._slices(FIRST), self._slices(AGAIN)
        if not self.starts:
            first = []
        only = len({one.kind for one in (*first, *again)}) == 1
        for now in itertools.chain(first, itertools.cycle(again)):
            if time.monotonic() >= self.deadline or self.over:
                break
            # counted in cases, draws must not hang on the clock
            seconds = math.inf if self.config.cases and only else now.seconds
            until = min(self.deadline, time.monotonic() + seconds)
            if now.kind == "schedule":
                self._schedules(until)
            else:
                self._slice(now.kind, now.models, until)

    @property
    def worn_out(self) -> bool:
        """True once compiled code has cost this process more memory than a fresh one would, or its
        turn is over."""
        turn = self.turns and time.monotonic() - self.began > self.config.turn_seconds
        return turn or self.judge.compiles >= self.config.recycle_compiles

    @property
    def has_enough(self) -> bool:
        """This worker's share of the cases is judged."""
        return 0 < self.config.share <= self.judged

    @property
    def over(self) -> bool:
        """Nothing more to draw in this process."""
        return self.worn_out or self.has_enough

    def _slices(self, order: Sequence[Slice]) -> list[Slice]:
        """Those that this worker can serve."""
        rungs = rungs_of(self.arms)
        few = {"models": self.models, "recomputed": self.fragile}
        layers = [s for s in order if s.kind in rungs and self.recipes and few.get(s.models, True)]
        return [*([Slice("schedule", _SCHEDULE_SECONDS)] if self.stateful else []), *layers]

    def _slice(self, kind: Compile, wanted: Models, until: float) -> None:
        """Draw batches with Hypothesis until the slice's time is up; generation only."""
        eager = kind == "none"
        draws = self.config.draws if eager and wanted == "linears" else _MODEL_DRAWS
        largest = 128 if eager and self.rng.random() < 0.3 else 64
        vary = self.vary - {"model"} if wanted == "linears" else self.vary
        # swarm: some factors stand still for this slice
        if self.swarms and self.rng.random() < 0.75:
            vary = frozenset(f for f in sorted(vary) if self.rng.random() < _SWARM)
        recipes, models, fragile = self.decks[not eager]
        wider = wanted == "models" or "model" in vary
        # few recipes and models at a time: left to itself the engine favours some for hours
        batch = batches(
            recipes.hand(_TOGETHER),
            compile=kind,
            draws=draws,
            largest=largest,
            vary=vary,
            models=tuple(models.hand(_TOGETHER)) if wider else (),
            fragile=tuple(fragile.hand(1)) if wanted == "recomputed" else (),
            linears=wanted != "models",
            recomputed=wanted == "recomputed",
        )
        candidates = _CANDIDATES if not eager else _EAGER_CANDIDATES if wider else 1

        @seed(self.rng.getrandbits(64))
        @settings(
            max_examples=self._examples(eager, wanted),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(batch, min_size=candidates, max_size=candidates))
        def run(drawn: list[tuple[Case, ...]]) -> None:
            if time.monotonic() < until and not self.over:
                chosen = max(drawn, key=self._novelty)
                if not eager and self.close and self.rng.random() < _CLOSE_CHANCE:
                    chosen = self._closest(kind)
                self._batch(chosen, kind, until)

        run()
        gc.collect()  # engines and autograd graphs die in cycles; left alone they pile up for hours

    def _examples(self, eager: bool, wanted: Models) -> int:
        """How many Specs a slice has at most: few where the cases are counted, so that they see
        linears and models alike."""
        if not eager:
            return 6
        if self.swarms:
            return 40
        return _FEW_LINEARS if wanted == "linears" else _FEW_MODELS

    def _schedules(self, until: float) -> None:
        """Draw stateful cases until the slice's time is up; generation only."""
        vary = SCHEDULE_FACTORS
        if self.swarms and self.rng.random() < 0.5:
            vary = frozenset(f for f in sorted(vary) if self.rng.random() < _SWARM)

        @seed(self.rng.getrandbits(64))
        @settings(
            max_examples=100,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(schedule_cases(self.stateful, vary=vary))
        def run(case: Case) -> None:
            key = compile_key(case.spec)
            if time.monotonic() > until or self.over or key in self.played:
                return  # Hypothesis repeats itself
            self.played.add(key)
            self.counts["specs"] += 1
            self._judge(case, SCHEDULE_ORACLES)

        run()
        gc.collect()

    def _closest(self, kind: Compile) -> tuple[Case, ...]:
        """The eager case nearest to its bound, taken to a dear rung; each is taken once."""
        self.close.sort(key=lambda item: item[0])
        _, case = self.close.pop()
        spec = msgspec.structs.replace(case.spec, compile=kind)
        return (msgspec.structs.replace(case, spec=spec),)

    def _keep_close(self, case: Case, judgement: Judgement) -> None:
        shares = (v.factor for v in judgement.verdicts if v.oracle == "O6" and v.status == "ok")
        share = max(shares, default=0.0)
        if share <= 0.0 or any(c.spec == case.spec for _, c in self.close):
            return
        self.close.append((share, case))
        if len(self.close) > _CLOSE_KEPT:
            self.close.remove(min(self.close, key=lambda item: item[0]))

    def _novelty(self, batch: tuple[Case, ...]) -> int:
        """Pairs of features that this worker has not run yet, none for a Spec that had its turn."""
        if compile_key(batch[0].spec) in self.served:
            return -1
        return len({p for case in batch for p in pairs(case)} - self.seen)

    def _batch(self, batch: tuple[Case, ...], kind: Compile, until: float) -> None:
        if kind != "none":
            key = compile_key(batch[0].spec)
            if key in self.served:  # Hypothesis starts every run with the same simplest example
                return
            self.served.add(key)
            until = self.deadline  # a compile may outlast its slice: the draws are what it was for
        self.counts["specs"] += 1
        compiles, compiling = self.judge.compiles, self.judge.compile_seconds
        started, aside = time.monotonic(), self.triage_seconds
        self.triage_compiling = 0.0
        for i, case in enumerate(self._more(batch, kind)):
            if self.has_enough or (time.monotonic() > until and i >= 2):
                break
            compile_time = self.judge.compile_seconds - compiling - self.triage_compiling
            data_time = time.monotonic() - started - compile_time - self.triage_seconds + aside
            paid = data_time >= compile_time or not case.spec.direct
            if kind != "none" and i >= _LEAST_DRAWS and paid:
                break
            if kind == "none" and i >= _MODEL_DRAWS and not case.spec.direct:
                break
            if not self._draw(case, kind, i).ran:
                break  # a program that raises does so on every draw
        self.counts["compiles"] += self.judge.compiles - compiles
        if self.judge.compiles > compiles:
            self.counts["compile ms"] += int(1000 * compile_time)
            self.counts["data ms"] += int(1000 * max(0.0, data_time))

    def _draw(self, case: Case, kind: Compile, i: int) -> Judgement:
        """A Spec's first draws meet every rule on every rung, later ones those where it pays:
        compiled ones the dear rungs only, since the cheap ones have slices of their own."""
        if i == 0:
            return self._judge(case, ORACLES)
        if i == 1 or kind == "none":
            return self._judge(case, (*_CORE, next(self.relations)), thorough=i == 1)
        names = frozenset(a.name for a in climb(case.spec) if a.compiler)
        needs_eager = not case.spec.direct  # what a compiled model is compared with
        dear = names - {"aot_eager"} if kind == "inductor" else names
        return self._judge(
            case, _CORE, dear | ({"eager"} if needs_eager else set()), thorough=False
        )

    def _more(self, batch: tuple[Case, ...], kind: Compile) -> Iterator[Case]:
        """A compiled artefact pays for itself over many draws: the drawn data with fresh seeds."""
        if kind == "none":
            yield from batch
            return
        for i in range(self.config.compiled_draws):
            case = batch[i % len(batch)]
            data = msgspec.structs.replace(case.data, seed=(case.data.seed + i) % 2**32)
            yield msgspec.structs.replace(case, data=data)

    def _judge(
        self,
        case: Case,
        oracles: Sequence[Any],
        only: frozenset[str] | None = None,
        *,
        thorough: bool = True,
    ) -> Judgement:
        self.journal.write_bytes(dump_case(case))
        judgement = self.judge.judge(case, oracles, only, thorough=thorough)
        if only is not None and judgement.causes:
            judgement = self.judge.judge(case)  # which rung is the first to show it?
        self.counts["cases"] += 1
        self.judged += 1
        for pair in pairs(case):
            self.counts["pair", pair] += 1
            self.seen.add(pair)
        if case.spec.compile == "none" and case.spec.schedule is None:
            self._keep_close(case, judgement)
        for verdict in judgement.verdicts:
            self.counts[verdict.oracle, case.spec.recipe, verdict.status] += 1
        for verdict in judgement.known:
            self.counts["known", verdict.explained_by] += 1
        for verdict in judgement.causes:
            if claim(self.config.out, fingerprint(verdict, judgement.family)):
                self._triage(case, verdict)
        if time.monotonic() - self.reported > _REPORT_EVERY:
            self.flush()
        return judgement

    def _triage(self, case: Case, verdict: Any) -> None:
        self.flush()
        started, compiling = time.monotonic(), self.judge.compile_seconds
        left = max(5.0, min(25.0, self.deadline - time.monotonic()))
        result = triage(self.judge, case, verdict, seconds=left, plant=self.config.plant,
            scripts=self.scripts,
        )  # fmt: skip
        self.out.send(("finding", result))
        if not result.confirmed:
            release(self.config.out, result.finding.fingerprint)
        self.triage_seconds += time.monotonic() - started
        self.triage_compiling += self.judge.compile_seconds - compiling

    def flush(self, *, final: str = "") -> None:
        self.out.send(("counts", dict(self.counts)))
        self.counts.clear()
        self.reported = time.monotonic()
        if final:
            self.out.send((final, None))
