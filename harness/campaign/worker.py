"""A worker: draws cases, judges them, triages what is new, and tells the supervisor.

The current case is journalled before it runs, so that an abort or a hang in a kernel costs one
worker and still names its case.
"""

from __future__ import annotations

import gc
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

from harness.arms.ladder import BY_NAME as ARMS
from harness.arms.ladder import select_arms, unavailable
from harness.campaign.config import Config
from harness.campaign.store import claim
from harness.case import Case, Compile, compile_key, dump_case
from harness.environment import settle
from harness.faults.registry import find_fault
from harness.judge import Judge, Judgement
from harness.ledger import Ledger, load_ledger
from harness.oracles import ORACLES
from harness.recipe import load_recipes, runnable, select
from harness.strategies import batches
from harness.triage.triage import triage
from harness.verdict import fingerprint

_RELATIONS = tuple(o for o in ORACLES if o.reruns)
_CORE = tuple(o for o in ORACLES if not o.reruns)
#: Seconds per slice of each kind, and the order a worker takes them in.
_SLICES: tuple[tuple[Compile, float], ...] = (
    ("none", 10.0),
    ("aot_eager", 4.0),
    ("none", 10.0),
    ("inductor", 10.0),
)
_REPORT_EVERY = 0.5
#: The rungs that later draws of a compiled Spec run on: the cheap ones have slices of their own.
_DEAR = {
    "aot_eager": frozenset({"aot_eager"}),
    "inductor": frozenset({"inductor_strict", "inductor"}),
}


def work(config: Config, number: int, generation: int, deadline: float, out: Connection) -> None:
    """Process entry point. ``deadline`` is on the monotonic clock, which processes share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    settle()
    worker = _Worker(config, number, generation, deadline, out)
    with ExitStack() as stack:
        if config.fault is not None:
            stack.enter_context(find_fault(*config.fault).plant())
        worker.loop()
    worker.flush(final=True)
    out.close()


class _Worker:
    def __init__(
        self, config: Config, number: int, generation: int, deadline: float, out: Connection
    ) -> None:
        self.config, self.deadline, self.out = config, deadline, out
        recipes = load_recipes(config.recipe_files)
        chosen = select(recipes, config.recipes).values()
        self.recipes = [able for r in chosen if (able := runnable(r, config.device))]
        ledger = load_ledger() if config.ledger else Ledger([])
        self.arms = select_arms(config.arms)
        self.judge = Judge(recipes, ledger, self.arms, device=config.device)
        self.journal = config.out / "journal" / f"{number}.json"
        self.rng = random.Random(f"{config.seed}/{config.part}/{number}/{generation}")
        self.first_slice = 2 * (number % 2)
        self.counts: Counter[Any] = Counter()
        #: Compiled Specs that have had their draws.
        self.served: set[str] = set()
        self.reported = time.monotonic()

    def loop(self) -> None:
        kinds = self._kinds()
        turn = self.first_slice if len(kinds) > 1 else 0
        while time.monotonic() < self.deadline:
            kind, seconds = kinds[turn % len(kinds)]
            self._slice(kind, min(self.deadline, time.monotonic() + seconds))
            turn += 1

    def _kinds(self) -> list[tuple[Compile, float]]:
        def wanted(kind: Compile) -> bool:
            names = {"none": "eager", "aot_eager": "aot_eager", "inductor": "inductor"}
            arms = [names[kind]] + (["inductor_strict"] if kind == "inductor" else [])
            return any(a in self.arms and not unavailable(ARMS[a]) for a in arms)

        return [(kind, seconds) for kind, seconds in _SLICES if wanted(kind)] or [_SLICES[0]]

    def _slice(self, kind: Compile, until: float) -> None:
        """Draw batches with Hypothesis until the slice's time is up; generation only."""
        draws = self.config.draws if kind == "none" else 4
        largest = 128 if kind == "none" and self.rng.random() < 0.3 else 64
        strategy = batches(self.recipes, compile=kind, draws=draws, largest=largest)

        @seed(self.rng.getrandbits(64))
        @settings(
            max_examples=40 if kind == "none" else 6,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run(batch: tuple[Case, ...]) -> None:
            if time.monotonic() < until:
                self._batch(batch, kind, until)

        run()
        gc.collect()  # engines and autograd graphs die in cycles; left alone they pile up for hours

    def _batch(self, batch: tuple[Case, ...], kind: Compile, until: float) -> None:
        if kind != "none":
            key = compile_key(batch[0].spec)
            if key in self.served:  # Hypothesis starts every run with the same simplest example
                return
            self.served.add(key)
            until = self.deadline  # a compile may outlast its slice: the draws are what it was for
        self.counts["specs"] += 1
        compiles = self.judge.compiles
        for i, case in enumerate(self._more(batch, kind)):
            if time.monotonic() > until and i >= 2:
                break
            if i < 2:
                judgement = self._judge(case, ORACLES)
            elif kind == "none":
                judgement = self._judge(case, (*_CORE, _RELATIONS[i % len(_RELATIONS)]))
            else:
                judgement = self._judge(case, _CORE, _DEAR[kind])
            if not judgement.ran:
                break  # a program that raises does so on every draw
        self.counts["compiles"] += self.judge.compiles - compiles

    def _more(self, batch: tuple[Case, ...], kind: Compile) -> Sequence[Case]:
        """A compiled artefact pays for itself over many draws: the drawn data with fresh seeds."""
        if kind == "none":
            return batch
        cases = []
        for i in range(self.config.compiled_draws):
            case = batch[i % len(batch)]
            data = msgspec.structs.replace(case.data, seed=(case.data.seed + i) % 2**32)
            cases.append(msgspec.structs.replace(case, data=data))
        return cases

    def _judge(
        self, case: Case, oracles: Sequence[Any], only: frozenset[str] | None = None
    ) -> Judgement:
        self.journal.write_bytes(dump_case(case))
        judgement = self.judge.judge(case, oracles, only)
        if only is not None and judgement.causes:
            judgement = self.judge.judge(case)  # which rung is the first to show it?
        self.counts["cases"] += 1
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
        left = max(5.0, min(25.0, self.deadline - time.monotonic()))
        result = triage(self.judge, case, verdict, seconds=left, plant=self.config.fault)
        self.out.send(("finding", result))

    def flush(self, *, final: bool = False) -> None:
        self.out.send(("counts", dict(self.counts)))
        self.counts.clear()
        self.reported = time.monotonic()
        if final:
            self.out.send(("done", None))
