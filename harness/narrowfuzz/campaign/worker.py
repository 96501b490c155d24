"""A worker: judges the cases that its generator draws, triages new divergences, and reports to the
supervisor.

The current case is journalled before it runs, so that an abort or a hang in a kernel costs one
worker only, and the case that caused it is known.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from narrowfuzz.arms.available import rungs_of, select_arms
from narrowfuzz.arms.lost import EXIT_LOST, DeviceLost
from narrowfuzz.campaign import messages
from narrowfuzz.campaign.comparison_side import SideRecorder
from narrowfuzz.campaign.compiling import Compiles
from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.campaign.first import dealt
from narrowfuzz.campaign.generator import MODEL_DRAWS, Generator
from narrowfuzz.campaign.journal import Journal, Writing
from narrowfuzz.campaign.raised import innermost
from narrowfuzz.campaign.slices import AGAIN, FIRST, Slice, in_turn
from narrowfuzz.campaign.triaging import Triaging
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.kind import LAYERS, kind_of
from narrowfuzz.case.spec import Case, Spec, load_case
from narrowfuzz.draw.coverage import pairs
from narrowfuzz.judge.judge import Judgement
from narrowfuzz.machine.device import Device, enter, forks
from narrowfuzz.machine.environment import prepare, resident, return_memory
from narrowfuzz.plants.registry import identity, planted
from narrowfuzz.recipe.recipe import processes
from narrowfuzz.recipe.source import split_by_source
from narrowfuzz.report.judged import (
    blocked_arms,
    called,
    happened,
    how_arms_ran,
    judged_layers,
    known_under,
)
from narrowfuzz.report.own_functions import functions_seen
from narrowfuzz.rules import RULES
from narrowfuzz.triage.forked import ForkedScripts
from narrowfuzz.triage.history import REMEMBERED
from narrowfuzz.triage.session import Session, SessionOptions, open_session
from narrowfuzz.triage.verify import RunScript, run_script

_RELATIONS = tuple(o for o in RULES if o.reruns)
_CORE = tuple(o for o in RULES if not o.reruns)
#: Resident memory, in bytes, above which a worker is replaced by a fresh process.
_LARGE = 3 * 2**30
_REPORT_EVERY = 0.5


class _Draws(NamedTuple):
    """How many data draws of a Spec are judged, and how the draws after the first are judged."""

    #: A compiled Spec serves at least ``least`` draws, and until these have taken this share of its
    #: compile time.
    due: float
    least: int
    #: An eager Spec serves at most this number of draws.
    most: float = math.inf
    repeat: bool = True
    #: Names of the arms that compiled ones are compared with.
    beside: frozenset[str] = frozenset()


def _draws_of(spec: Spec, now: Slice) -> _Draws:
    """More draws for a linear, whose bugs may depend on one element; those of a model seldom do,
    and more Specs find more. In a run's first slices both have fewer."""
    if spec.direct:
        return _Draws(min(1.0, 2.0 * now.data), 20)
    return _Draws(now.data, now.least, MODEL_DRAWS, repeat=False, beside=frozenset({EAGER.name}))


def work(config: Config, place: Place, out: Connection) -> None:
    """Process entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    try:
        _work(config, place, out)
    except Exception as error:
        journal = Journal.of(config.out, place.number)
        message = f"{innermost(error)}\nworker {place.number} raised an exception; {journal}"
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def _work(config: Config, place: Place, out: Connection) -> None:
    assert forks(config.device) or not torch.cuda._is_in_bad_fork(), "CUDA was up before the fork"
    device = enter(config.device, place.number)
    worker = Worker(config, place, out, device)
    with ExitStack() as stack:
        if config.plant is not None:
            prepare(identity(*config.plant))
            stack.enter_context(planted(*config.plant))
        worker.tell(messages.Ready())
        try:
            worker.loop()
            worker.settle()
        except DeviceLost as lost:
            print(f"worker {place.number} has lost its device: {lost}", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST)  # the supervisor takes its case from the journal
    worker.end()
    out.close()


def _opened(config: Config, device: Device) -> Session:
    return open_session(
        SessionOptions(
            device=device,
            recipes=config.recipes,
            recipe_files=config.recipe_files,
            models=config.own,
            arms=select_arms(config.arms),
            ledger="tried" if config.ledger else "none",
            ledgers=config.ledgers,
        )
    )


class Worker:
    """One process of a campaign, for the recipes that can share a process."""

    def __init__(self, config: Config, place: Place, out: Connection, device: Device) -> None:
        self.config, self.place, self.deadline = config, place, place.deadline
        self.tell: Callable[[messages.Message], None] = out.send
        # before anything is planted or patched: forked scripts start from a clean copy
        copies = config.plant and forks(device.name)
        scripts: RunScript = ForkedScripts() if copies else partial(run_script, device=device.name)
        self.judged = place.judged
        #: Hash of the ids of the cases that it has judged, in order.
        self.digest = hashlib.sha256()
        self.arms = select_arms(config.arms)
        session = _opened(config, device)
        #: Recipes that need a process of their own take turns with the others.
        kinds = processes(session.selected.values())
        self.kinds = len(kinds)
        self.process = kinds[(place.number + place.generation) % len(kinds)]
        able = session.prepared_recipes(self.process)
        self.recipes, self.stateful = split_by_source(able.values())
        self.trials, self.judge = session.trials, session.judge
        self.triaging = Triaging(
            config,
            self.judge,
            session.unfiltered_ledger,
            scripts,
            place.deadline,
            self.tell,
            self.flush,
        )
        self.judge.before_rerun = self._note
        self.judge.programs.note_arm = lambda arm: self.journal.note_arm(arm.name)
        self.judge.programs.listen = Compiles(self.tell, lambda: self.subject).listen
        #: In a comparison: writes its results, for the other side to read.
        self.side_recorder = config.beside and SideRecorder(config.out, config.beside, place)
        if self.side_recorder:
            self.judge.observed = self.side_recorder.observed
        self.journal = Writing(Journal.of(config.out, place.number))
        #: Recipe and model of the case that runs.
        self.subject = ""
        rng = random.Random(f"{config.seed}/{config.part}/{place.number}/{place.generation}")
        self.generator = Generator(
            config,
            self.recipes,
            self.stateful,
            rng,
            self.judge.plan,
            self._clock,
        )
        self.counts: Counter[Any] = Counter()
        #: Keys that are counted once only, such as recipe, arm, model and layer that were judged.
        self.counted_once: set[tuple[Any, ...]] = set()
        #: Recipes for which the user was warned that their tap sees nothing.
        self.warned: set[str] = set()
        #: The cases that this process has judged last.
        self.past: deque[Case] = deque(maxlen=REMEMBERED)
        #: Rules that rerun a case: one per draw, continuing where the last Spec stopped, as there
        #: are more of them than draws of a Spec.
        self.relations = itertools.cycle(_RELATIONS)
        #: Number of the linear of a model (and of other parts) that is checked next.
        self.focus = itertools.count()
        #: Selects the Inductor arm that runs next: with eager's roundings, or as users run it.
        self.inductors = itertools.count()
        self.began = time.monotonic()
        self.reported = time.monotonic()

    def loop(self) -> None:
        """Serve slices in turn until the time is up, or this process is to draw no more."""
        if self.place.generation < self.kinds:
            self._begin()
        rungs = rungs_of(self.arms, self.judge.device.name)
        again = self.generator.slices(AGAIN, rungs)
        # a process that replaces a worn-out one continues after the first slices
        first = [] if self.place.generation else self.generator.slices(FIRST, rungs)
        spent = self.generator.time
        for now in in_turn(first, again, spent.compiled_overspent):
            if time.monotonic() >= self.deadline or self.over:
                break
            seconds = math.inf if self.config.cases else now.seconds
            with spent.on_slice(now.compiled):
                self.serve(now, min(self.deadline, time.monotonic() + seconds))

    def _clock(self) -> float:
        """Seconds, without those of triage."""
        return time.monotonic() - self.triaging.seconds

    def _begin(self) -> None:
        """Judge this worker's part of the cases that come before any is drawn. Their divergences
        are triaged at once as long as that leaves time for the first compiled cases, else after
        these."""
        first = map(load_case, self.config.first)
        mine = [c for c in first if self.judge.recipe(c.spec).process == self.process]
        only = frozenset(self.config.first_arms) or None
        for case, holding in dealt(mine, self.place.number, self.config.workers):
            if time.monotonic() >= self.deadline or self.has_enough:
                break
            self.triaging.holding = holding
            self.counts["specs"] += 1
            with self._compiles_counted():
                judgement = self._judge(case, RULES, only)
            self.counts["first"] += 1
            if not judgement.ran:
                self.counts["first stopped"] += 1
                verdicts = (*judgement.verdicts, *judgement.known)
                blocked = blocked_arms(verdicts, case.spec.recipe, case.spec.model)
                self.counts.update(("stopped", *one) for _, *one in blocked)
            self.flush()  # time may be up before the next case ends
        self.triaging.holding = False
        self.triaging.work_off()

    def serve(self, now: Slice, until: float) -> None:
        """Serve one slice, which ends at the time ``until``."""

        def more() -> bool:
            return time.monotonic() < until and not self.over

        if now.kind == "schedule":
            self.generator.schedules(more, self._schedule)
        elif now.models == "corpus":
            serve = partial(self._again, now=now, until=until)
            self.generator.corpus(now.kind, more, serve)
        elif now.kind == "sharded":
            self.generator.sharded(more, partial(self._batch, now=now, until=until))
        elif now.models == "operators":
            serve = partial(self._batch, now=now, until=until)
            self.generator.operators_alone(now.kind, more, serve)
        else:
            serve = partial(self._batch, now=now, until=until)
            self.generator.converted_models(now.kind, now.models, more, serve)

    @property
    def worn_out(self) -> bool:
        """True once compiled code costs this process more memory than a fresh process would, or its
        turn is over."""
        if self.config.cases:  # a given number of cases must give the same ones on every machine
            turn, large = self.judged - self.place.judged >= self.config.turn_cases, False
        else:
            turn = time.monotonic() - self.began > self.config.turn_seconds
            large = resident() > _LARGE
        compiled = self.judge.programs.compiles >= self.config.recycle_compiles
        return compiled or large or (turn and self.kinds > 1)

    @property
    def has_enough(self) -> bool:
        """True if this worker's share of the cases is judged."""
        return 0 < self.config.share <= self.judged

    @property
    def over(self) -> bool:
        """True if this process is to draw no more."""
        return self.worn_out or self.has_enough

    def _schedule(self, batch: tuple[Case, ...]) -> None:
        self.counts["specs"] += 1
        for case in batch:
            self._judge(case, RULES, focus=next(self.focus))

    def _again(self, batch: tuple[Case, ...], *, now: Slice, until: float) -> None:
        """Judge a batch of the corpus, or of its neighbours, like a drawn one."""
        self.counts["corpus"] += 1
        if kind_of(batch[0].spec) is LAYERS:
            self._schedule(batch)
        else:
            self._batch(batch, now=now, until=until)

    def _batch(self, batch: tuple[Case, ...], *, now: Slice, until: float) -> None:
        draws, eager = _draws_of(batch[0].spec, now), now.kind == "none"
        # a compiled program serves many draws; bugs on ranks depend on the layout, so one is enough
        serves = not eager and now.kind != "sharded"
        if not eager:
            until = self.deadline  # compiling may outlast the slice, and is in vain without draws
        self.counts["specs"] += 1
        with self._compiles_counted() as spent:
            arms = self._arms(batch[0].spec)
            if eager:
                self.judge.draw(batch)
            for i, case in enumerate(self._more(batch) if serves else batch):
                if self.has_enough or (time.monotonic() > until and i >= 2):
                    break
                compile_time, data_time = spent()
                paid = bool(self.config.cases) or data_time >= draws.due * compile_time
                if serves and i >= draws.least and paid:
                    break
                if eager and i >= draws.most:
                    break
                if not (self._draw(case, arms, i, draws).ran or self.config.cases):
                    break  # a program that raises does so on every draw
        return_memory()

    @contextmanager
    def _compiles_counted(self) -> Iterator[Callable[[], tuple[float, float]]]:
        """Count what is compiled in the block. Yields a function that returns the seconds so far,
        for compiling and for data, without those of triage."""
        programs = self.judge.programs
        compiles, compiling = programs.compiles, programs.compile_seconds
        started, aside, triaging = self._clock(), self.triaging.compiling, self.triaging

        def spent() -> tuple[float, float]:
            compile_time = programs.compile_seconds - compiling - (triaging.compiling - aside)
            return compile_time, max(0.0, self._clock() - started - compile_time)

        yield spent
        if programs.compiles > compiles:
            compile_time, data_time = spent()
            self.counts["compiles"] += programs.compiles - compiles
            self.counts["compile ms"] += int(1000 * compile_time)
            self.counts["data ms"] += int(1000 * data_time)

    def _arms(self, spec: Spec) -> tuple[Arm, ...]:
        """The arms on which a Spec is judged. Generating code takes longer than all else, so of the
        two arms that do, one runs, in turn; its divergences are judged on the whole ladder. With
        selective checkpointing it is always the arm that users run: with eager's roundings the
        recompute equals the forward."""
        arms = self.judge.rungs(spec)
        compiled = [arm for arm in arms if arm.compiler == "inductor"]
        if not compiled:
            return arms
        chosen = -1 if spec.checkpoint == "selective" else next(self.inductors) % len(compiled)
        return (*(a for a in arms if not a.compiler), compiled[chosen])

    def _draw(self, case: Case, arms: Sequence[Arm], i: int, draws: _Draws) -> Judgement:
        """Judge draw number ``i`` of a Spec. The first, on ranks the only one, meets every rule on
        every rung. Later ones, and ladder data, which one rule is about, meet only what pays: one
        of the rules that rerun a case, or, from the third draw of a compiled Spec on, none of them,
        and the compiled rungs only, with what they are compared with."""
        only = None if arms == self.judge.rungs(case.spec) else frozenset(a.name for a in arms)
        compiled = any(a.compiler for a in arms)
        if i == 0 and case.data.regime != "ladder":
            return self._judge(case, RULES, only)
        if i <= 1 or not compiled:
            rules, focus = (*_CORE, next(self.relations)), None if i <= 1 else next(self.focus)
            return self._judge(case, rules, only, focus=focus, repeat=draws.repeat)
        names = draws.beside | {a.name for a in arms if a.compiler}
        return self._judge(case, _CORE, names, focus=next(self.focus), repeat=False)

    def _more(self, batch: tuple[Case, ...]) -> Iterator[Case]:
        """The drawn data with fresh seeds, over and over: only many draws pay for compiling."""
        for i in range(self.config.compiled_draws):
            yield batch[i % len(batch)].reseeded(i)

    def _note(self, case: Case) -> None:
        """Journal the case that runs from here on."""
        self.subject = f"{case.spec.recipe} {case.spec.model.partition('#')[0]}"
        self.journal.begin(case)

    def _judge(
        self,
        case: Case,
        rules: Sequence[Any],
        only: frozenset[str] | None = None,
        *,
        focus: int | None = None,
        repeat: bool = True,
    ) -> Judgement:
        self._note(case)
        if self.side_recorder:
            self.side_recorder.begin(case)
        judgement = self.judge.judge(case, rules, only, focus=focus, repeat=repeat)
        verdicts, known = judgement.verdicts, judgement.known
        if only is not None and judgement.causes:  # which rung is the first to show it?
            rungs = (self.judge.beneath(case.spec, v.arm) for v in judgement.causes)
            once_more = frozenset[str]().union(*rungs)
            judgement = self.judge.judge(case, only=once_more)
            verdicts = (*(v for v in verdicts if v.arm not in once_more), *judgement.verdicts)
            known = (*(v for v in known if v.arm not in once_more), *judgement.known)
        self.counts["cases"] += 1
        self.judged += 1
        self.digest.update(case.id.encode())
        self.counts.update(("pair", pair) for pair in pairs(case))
        self.generator.remember(case, judgement)
        if why := self.judge.tap_failures.get(case.spec.recipe):
            self._warn(case.spec.recipe, why)
        for verdict in verdicts:
            self.counts["rule", verdict.rule, case.spec.recipe, verdict.status] += 1
        once: set[tuple[Any, ...]] = {*judged_layers(verdicts, case.spec.recipe, case.spec.model)}
        once |= called(verdicts)
        once |= happened(case) if once else set()
        once |= functions_seen(verdicts)
        asked = [a.name for a in self.judge.rungs(case.spec) if only is None or a.name in only]
        self.counts.update(
            how_arms_ran((*verdicts, *known), case.spec.recipe, case.spec.model, asked)
        )
        self.counts.update(once - self.counted_once)
        self.counted_once |= once
        for verdict in known:
            self.counts["known", verdict.explained_by] += 1
        self.counts.update(known_under(case, known))
        if self.side_recorder:
            self.side_recorder.judged(case, judgement, self.past)
        else:
            self.triaging.claim(case, judgement, self.past)
        self.past.append(case)
        if time.monotonic() - self.reported > _REPORT_EVERY:
            self.flush()
        return judgement

    def _warn(self, recipe: str, why: str) -> None:
        """Warn once that rules about operands judge nothing of this recipe."""
        if recipe not in self.warned:
            self.warned.add(recipe)
            unseen = f"{recipe}: what its GEMMs multiply cannot be seen ({why})"
            self.tell(messages.Note(f"{unseen}: rules about operands check nothing"))

    def settle(self) -> None:
        """In a comparison: triage the divergences that the other side does not show."""
        if self.side_recorder:
            self.flush()  # it waits for the other side
            self.triaging.settle(self.side_recorder, self.journal.journal.file.touch)

    def flush(self) -> None:
        self.counts.update(("trial", answer) for answer in self.trials.new_answers())
        self.tell(messages.Counts(dict(self.counts)))
        self.counts.clear()
        self.reported = time.monotonic()

    def end(self) -> None:
        """Send the last counts, and whether a successor is to continue."""
        self.flush()
        goes_on = self.worn_out and not self.has_enough
        self.tell(messages.Ended(self.digest.hexdigest(), goes_on))
