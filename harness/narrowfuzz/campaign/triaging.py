"""What a worker does about divergences: it claims each, so that no other worker takes it, and
triages it at once, or once there is time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from narrowfuzz.campaign import messages
from narrowfuzz.campaign.comparison_side import PendingTriage, SideRecorder
from narrowfuzz.campaign.config import Config
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.report.store import claim, release
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.first_bad import with_first_bad
from narrowfuzz.triage.triage import triage, unconfirmed
from narrowfuzz.triage.verify import RunScript

#: Seconds, in all, for making smaller what only one side of a comparison shows.
_TOGETHER_SECONDS = 20.0
#: The share of a run's time that triage may take before the requested configuration has been
#: compiled.
_AT_ONCE = 0.2
#: A known issue is claimed by this prefix and its id; and seconds for making its case smaller.
_KNOWN, _KNOWN_SECONDS = "known issue ", 8.0


class Triaging:
    """The divergences that one worker has claimed."""

    def __init__(
        self,
        config: Config,
        judge: Judge,
        unfiltered_ledger: Ledger | None,
        scripts: RunScript,
        deadline: float,
        tell: Callable[[messages.Message], None],
        flush: Callable[[], None],
    ) -> None:
        self.config, self.judge, self.unfiltered_ledger = config, judge, unfiltered_ledger
        self.scripts, self.deadline, self.tell = scripts, deadline, tell
        #: Sends what the worker has counted: triage may take long, and end the process.
        self.flush = flush
        #: Seconds spent on triage; and those of them spent on compiling.
        self.seconds = self.compiling = 0.0
        #: While something more urgent is to run, triage may take ``at_once`` seconds.
        self.holding, self.at_once = False, _AT_ONCE * 60.0 * config.minutes
        self.waiting: list[PendingTriage] = []
        #: Fingerprint -> the name by which the known issue that explains it is claimed.
        self.issues: dict[str, str] = {}
        #: Fingerprint of a divergence that no script has shown -> when it may be triaged again. It
        #: pauses as long as its triage took, so at most half of the time goes to it.
        self.paused: dict[str, float] = {}

    def claim(self, case: Case, judgement: Judgement, past: Sequence[Case]) -> None:
        """Claim the case's divergences that no other worker has claimed. ``past`` are the cases
        that this process has judged before."""
        for verdict in judgement.causes:
            name = fingerprint(verdict, judgement.family)
            if time.monotonic() < self.paused.get(name, -math.inf):
                continue
            claimed = claim(self.config.out, name, case.spec.dtype)
            if claimed and not self._sighted(case, verdict, name):
                pending = PendingTriage(case, verdict, tuple(past))
                self.tell(messages.Claimed(unconfirmed(self.judge, case, verdict)))
                if not self.holding or self.seconds < self.at_once:
                    self._triage(pending)
                else:
                    self.waiting.append(pending)
        self.work_off()

    def work_off(self) -> None:
        """Triage the divergences that had to wait, unless they must go on waiting."""
        while self.waiting and not self.holding:
            self._triage(self.waiting.pop(0))

    def settle(self, side: SideRecorder, alive: Callable[[], None]) -> None:
        """In a comparison: triage the divergences that the other side does not show, each on one
        case after the other until a script shows it. Calls ``alive`` while it waits."""
        differing = side.differing(self.deadline, alive)
        for name, waiting in differing:
            for one in waiting:
                if not claim(self.config.out, name, one.case.spec.dtype):
                    break
                most = max(_TOGETHER_SECONDS / len(differing), 3.0)
                self._triage(one, most=most)

    def _sighted(self, case: Case, verdict: Verdict, name: str) -> bool:
        """Where known issues count as findings: is this one that a worker has already claimed on
        another case? One finding stands for all sightings of a known issue: confirming each would
        take most of a short run."""
        if self.unfiltered_ledger is None:
            return False
        issue = self.judge.with_ledger(self.unfiltered_ledger).known_as(case, verdict)
        if not issue:
            return False
        self.issues[name] = _KNOWN + issue
        if claim(self.config.out, self.issues[name]):
            return False
        seen = unconfirmed(self.judge, case, verdict)
        finding = msgspec.structs.replace(seen.finding, known_issue=issue)
        self.tell(messages.Sighted(dataclasses.replace(seen, finding=finding)))
        return True

    def _triage(self, pending: PendingTriage, *, most: float = 25.0) -> None:
        self.flush()
        case, verdict = pending.case, pending.verdict
        wanted = fingerprint(verdict, self.judge.family(case.spec))
        if wanted in self.issues:
            most = min(most, _KNOWN_SECONDS)
        started, compiling = time.monotonic(), self.judge.programs.compile_seconds
        self.tell(messages.Confirming(started))
        at_once = self.at_once - self.seconds if self.holding else math.inf
        least = min(5.0, most)
        seconds = max(least, min(most, self.deadline - time.monotonic(), at_once))
        result = triage(
            self.judge,
            case,
            verdict,
            seconds=seconds,
            plant=self.config.plant,
            scripts=self.scripts,
            past=pending.past,
            files=self.config.recipe_files,
            models=self.config.own,
            shown=lambda found: self.tell(messages.ScriptConfirmed(found)),
            unfiltered_ledger=self.unfiltered_ledger,
        )
        result = with_first_bad(
            result, plant=self.config.plant, device=self.judge.device.name, seconds=seconds
        )
        self.tell(messages.Finished(result))
        self.tell(messages.Settled(wanted))
        if not result.confirmed or result.finding.fingerprint != wanted:
            release(self.config.out, wanted, case.spec.dtype)
            if wanted in self.issues:
                release(self.config.out, self.issues[wanted])
            if not self.config.cases:  # else no clock decides what is found
                self.paused[wanted] = 2.0 * time.monotonic() - started
        self.seconds += time.monotonic() - started
        self.compiling += self.judge.programs.compile_seconds - compiling
