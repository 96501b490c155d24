"""The supervisor: starts workers, stores their findings, replaces the ones that die.

Workers are forked from a server that has imported torch once, so a replacement costs a fraction of
a second. The supervisor itself never runs a case.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, assert_never

import msgspec

from narrowfuzz.arms.lost import EXIT_LOST
from narrowfuzz.campaign import messages
from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.campaign.interrupts import on_interrupt
from narrowfuzz.campaign.journal import Journal
from narrowfuzz.campaign.server import start_server, work
from narrowfuzz.case.spec import Case
from narrowfuzz.report.store import Store
from narrowfuzz.report.tally import Found, Tally
from narrowfuzz.trace.verdict import LOSES_DEVICE
from narrowfuzz.triage.finding import Triaged

Progress = Callable[["Tally"], None]
#: What a worker does with a finding, in words.
CONFIRMING = "confirming a finding: running its script in a fresh process"
SHRINKING = "looking for a smaller example of a finding"
#: How long workers may go on after the deadline, to finish a finding they are triaging.
GRACE_SECONDS = 75.0


@dataclass
class _Handle:
    """One worker's place; its process may be replaced."""

    number: int
    generation: int = 0
    process: Any = None
    channel: Connection | None = None
    done: bool = False
    #: Number of cases that its processes have reported as judged.
    judged: int = 0
    #: Its process has ended on purpose and wants a successor.
    recycled: bool = False
    #: Id of the finding whose case its process is making smaller; "" if none.
    shown: str = ""
    #: Fingerprint -> divergence that its processes have claimed, and not yet confirmed or dropped.
    claimed: dict[str, Triaged] = field(default_factory=dict)


def run_campaign(config: Config, store: Store, progress: Progress) -> Tally:
    """Run workers until the time is up or the user interrupts; everything found is in ``store``."""
    tally = Tally()
    start_server(config.device)
    with interruptible([tally]):
        play(config, store, progress, tally)
    return tally


def play(config: Config, store: Store, progress: Progress, tally: Tally) -> None:
    """Run workers until the time is up, enough is found, or ``tally`` says it was interrupted."""
    Supervisor(config, store, tally).play(progress)


@contextmanager
def interruptible(tallies: Sequence[Tally]) -> Iterator[None]:
    """Ctrl-C sets a flag; nothing is lost because the store is written as findings arrive."""

    def note() -> None:
        for tally in tallies:
            tally.interrupted = True

    with on_interrupt(note):
        yield


class Supervisor:
    """Supervises the workers of one campaign."""

    def __init__(self, config: Config, store: Store, tally: Tally) -> None:
        self.config, self.store, self.tally = config, store, tally
        self.deadline = time.monotonic() + config.minutes * 60.0
        self.handles = [_Handle(number) for number in range(config.workers)]
        #: Sightings of known issues that were claimed on another case.
        self.sighted: list[Triaged] = []

    def play(self, progress: Progress) -> None:
        """Run the workers to their end."""
        tally, handles = self.tally, self.handles
        try:
            for handle in handles:
                self._start(handle)
            while not all(handle.done for handle in handles):
                self._receive()
                tally.note_pairs()
                progress(tally)
                for handle in handles:
                    self._look_after(handle)
                shrinking = any(handle.shown for handle in handles)
                tally.enough = 0 < self.config.stop_after <= tally.new and not shrinking
                if tally.enough or tally.interrupted or self._late:
                    break
            self._drain()
            self.keep_claimed()
            for loss in () if tally.interrupted else tally.loss_threads:
                loss.join()
            lost = sorted(path.name for path in (self.store.out / "journal").glob("lost-*.json"))
            if lost:
                tally.notes.append(
                    f"cases that ended a worker and were not looked into: journal/{', '.join(lost)}"
                )
        finally:
            for process in (handle.process for handle in handles if handle.process is not None):
                if process.is_alive():
                    process.kill()
                process.join(5)

    @property
    def _late(self) -> bool:
        return time.monotonic() > self.deadline + GRACE_SECONDS

    def _start(self, handle: _Handle) -> None:
        context = mp.get_context("forkserver")
        receiving, sending = context.Pipe(duplex=False)
        place = Place(handle.number, handle.generation, handle.judged, self.deadline)
        handle.process = context.Process(
            target=work, args=(self.config, place, sending), daemon=False
        )
        handle.process.start()
        sending.close()
        handle.channel, handle.done, handle.shown = receiving, False, ""

    def _receive(self) -> None:
        channels = {one.channel: one for one in self.handles if one.channel is not None}
        for channel in wait(list(channels), timeout=0.2):
            assert isinstance(channel, Connection)
            handle = channels[channel]
            if message := messages.receive(channel):
                self.take(message, handle)
            else:
                handle.channel = None

    def _drain(self) -> None:
        """Process the messages that workers have already sent."""
        for handle in self.handles:
            while handle.channel is not None and handle.channel.poll():
                if not (message := messages.receive(handle.channel)):
                    break
                self.take(message, handle)

    def take(self, message: messages.Message, handle: _Handle) -> None:
        """Count, store or print the content of a worker's message."""
        tally = self.tally
        match message:
            case messages.Ready():
                tally.ready = tally.ready or tally.seconds
            case messages.Counts(counts):
                tally.counts.update(counts)
                handle.judged += counts.get("cases", 0)
                if not tally.first_verdict and counts:
                    tally.first_verdict = tally.seconds
            case messages.Compiling(what, since):
                tally.compiling[handle.number] = (what, since)
            case messages.Compiled():
                tally.compiling.pop(handle.number, None)
            case messages.Claimed(suspected):
                handle.claimed[suspected.finding.fingerprint] = suspected
            case messages.Sighted(seen):
                self.sighted.append(seen)
            case messages.Confirming(since):
                tally.confirming[handle.number] = (CONFIRMING, since)
            case messages.ScriptConfirmed(found):
                handle.shown = found.finding.id
                handle.claimed.pop(found.finding.fingerprint, None)
                tally.confirming[handle.number] = (SHRINKING, time.monotonic())
                self._keep(found)
            case messages.Finished(found):
                self._keep(found, handle.shown)
                handle.shown = ""
                tally.confirming.pop(handle.number, None)
            case messages.Settled(fingerprint):
                handle.claimed.pop(fingerprint, None)
            case messages.Note(text):
                if text not in tally.notes:
                    print(f"warning: {text}", file=sys.stderr, flush=True)
                    tally.notes.append(text)
            case messages.Ended(digest, recycled):
                tally.digests[handle.number, handle.generation] = digest
                handle.recycled, handle.done = recycled, not recycled
            case _:
                assert_never(message)

    def _look_after(self, handle: _Handle) -> None:
        """Notice a dead or silent worker, turn its case into a finding, and replace it."""
        tally = self.tally
        tally.running.pop(handle.number, None)
        if handle.done or handle.process is None:
            return
        journal = Journal.of(self.store.out, handle.number)
        hung = journal.silent > self.config.hang_seconds
        if hung:
            handle.process.kill()
            handle.process.join(10)
        if handle.process.is_alive() or (handle.channel is not None and not hung):
            if long := journal.running():
                tally.running[handle.number] = long
            return
        tally.compiling.pop(handle.number, None)
        tally.confirming.pop(handle.number, None)
        if handle.recycled:
            handle.generation, handle.recycled = handle.generation + 1, False
            self._start(handle)
            return
        tally.lost_workers += 1
        if (handle.process.exitcode or 0) > 0 and handle.process.exitcode != EXIT_LOST:
            tally.broken = handle.done = True
            tally.notes.append(f"worker {handle.number} raised; its error is above")
            return
        if case := journal.case:
            how = "hangs" if hung else _how(handle.process.exitcode)
            # takes a minute in other processes: messages of workers must be received meanwhile
            loss = threading.Thread(
                target=self.record_loss, args=(journal.lose(case), case, how), daemon=True
            )
            tally.loss_threads.append(loss)
            loss.start()
        else:
            tally.notes.append(f"worker {handle.number} ended before its first case")
        handle.generation += 1
        if time.monotonic() < self.deadline and (case or handle.generation < 3):
            self._start(handle)
        else:
            handle.done = True

    def record_loss(self, file: Path, case: Case, how: str) -> None:
        """Triage the loss of a worker, one at a time. Losses whose turn comes too late stay
        suspected."""
        from narrowfuzz.triage.loss import names_of_loss, triage_loss, untried_loss

        config, files = self.config, self.config.recipe_files
        with self.tally.loss_lock:
            names = names_of_loss(case, how, files)
            same = next((f for f in self.store.findings() if f.fingerprint in names), None)
            if same is not None:
                # it is minimised already; the stored case shows if another rung is at fault here
                self.store.add_sighting(same.id, case)
            elif self.tally.enough or self._late:
                self._keep(untried_loss(case, how, files, config.device))
            else:
                self._keep(triage_loss(case, how, files, config.plant, config.device))
            file.unlink(missing_ok=True)  # the same case may be lost twice

    def _keep(self, result: Triaged, larger: str = "") -> None:
        """Store the result as a finding, as one more sighting of an earlier finding's cause, or as
        suspected. If ``larger`` is the id of a finding, the result replaces it, and keeps the time
        at which that was found."""
        finding, tally = result.finding, self.tally
        if not larger:
            if self.store.add(finding, result.script) == "new":
                tally.found.append(Found(finding, tally.counts["cases"], tally.seconds))
            return
        status = self.store.replace(larger, finding, result.script)
        before = next((f for f in tally.found if f.finding.id == larger), None)
        if before is None:
            return
        at = tally.found.index(before)
        tally.found[at : at + 1] = [replace(before, finding=finding)] if status == "new" else []

    def keep_claimed(self) -> None:
        """Store the divergences that workers had no time to confirm as suspected, and a known issue
        that was confirmed on another case as one more sighting of it."""
        for handle in self.handles:
            for result in handle.claimed.values():
                self._keep(result)
        confirmed = {finding.known_issue for finding in self.store.findings()}
        for seen in self.sighted:
            finding = seen.finding
            if finding.known_issue in confirmed:
                finding = msgspec.structs.replace(finding, why_suspected="")
            self._keep(replace(seen, finding=finding))


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ends the process with {signal.Signals(-code).name}"
    if code == EXIT_LOST:
        return LOSES_DEVICE
    return f"ends the process with exit code {code}"
