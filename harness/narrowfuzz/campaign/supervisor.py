"""The supervisor: starts workers, keeps what they find, replaces the ones that die.

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

from narrowfuzz.arms.lost import EXIT_LOST
from narrowfuzz.campaign import messages
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.running import running
from narrowfuzz.campaign.server import start_server
from narrowfuzz.case.spec import Case, load_case
from narrowfuzz.report.store import Store
from narrowfuzz.report.tally import Found, Tally
from narrowfuzz.triage.finding import Triaged

Progress = Callable[["Tally"], None]
#: What a worker does about a finding.
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
    #: Cases its processes have told of.
    judged: int = 0
    #: Its process has ended on purpose and wants a successor.
    recycled: bool = False
    #: Name of the finding that its process is making smaller, "" if none.
    shown: str = ""
    #: Fingerprint -> what its processes have seen and have not confirmed or dropped yet.
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
    context = mp.get_context("forkserver")
    deadline = time.monotonic() + config.minutes * 60.0
    handles = [_Handle(number) for number in range(config.workers)]
    try:
        for handle in handles:
            _start(handle, config, context, deadline)
        while not all(handle.done for handle in handles):
            _receive(handles, tally, store)
            progress(tally)
            for handle in handles:
                _look_after(handle, config, context, deadline, tally, store)
            shrinking = any(handle.shown for handle in handles)
            tally.enough = 0 < config.stop_after <= tally.new and not shrinking
            if tally.enough or tally.interrupted or time.monotonic() > deadline + GRACE_SECONDS:
                break
        _drain(handles, tally, store)
        _keep_claimed(handles, tally, store)
        for loss in () if tally.interrupted else tally.losses:
            loss.join()
        left = sorted(path.name for path in (store.out / "journal").glob("lost-*.json"))
        if left:
            tally.notes.append(
                f"cases that ended a worker and were not looked into: journal/{', '.join(left)}"
            )
    finally:
        for handle in handles:
            if handle.process is not None and handle.process.is_alive():
                handle.process.kill()
            if handle.process is not None:
                handle.process.join(5)


@contextmanager
def interruptible(tallies: Sequence[Tally]) -> Iterator[None]:
    """Ctrl-C sets a flag; nothing is lost because the store is written as findings arrive."""

    def note(signum: int, frame: Any) -> None:
        for tally in tallies:
            tally.interrupted = True

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(handle: _Handle, config: Config, context: Any, deadline: float) -> None:
    from narrowfuzz.campaign.worker import work

    receiving, sending = context.Pipe(duplex=False)
    handle.process = context.Process(
        target=work,
        args=(config, handle.number, handle.generation, handle.judged, deadline, sending),
        daemon=False,
    )
    handle.process.start()
    sending.close()
    handle.channel, handle.done, handle.shown = receiving, False, ""


def _receive(handles: list[_Handle], tally: Tally, store: Store) -> None:
    channels = {handle.channel: handle for handle in handles if handle.channel is not None}
    for channel in wait(list(channels), timeout=0.2):
        assert isinstance(channel, Connection)
        handle = channels[channel]
        if message := messages.receive(channel):
            _take(message, handle, tally, store)
        else:
            handle.channel = None


def _take(message: messages.Message, handle: _Handle, tally: Tally, store: Store) -> None:
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
        case messages.Confirming(since):
            tally.confirming[handle.number] = (CONFIRMING, since)
        case messages.Shown(found):
            handle.shown = found.finding.id
            handle.claimed.pop(found.finding.fingerprint, None)
            tally.confirming[handle.number] = (SHRINKING, time.monotonic())
            _keep(found, tally, store)
        case messages.Finished(found):
            _keep(found, tally, store, handle.shown)
            handle.shown = ""
            tally.confirming.pop(handle.number, None)
        case messages.Settled(fingerprint):
            handle.claimed.pop(fingerprint, None)
        case messages.Note(text):
            if text not in tally.notes:
                print(f"warning: {text}", file=sys.stderr, flush=True)
                tally.notes.append(text)
        case messages.Ended(number, generation, digest, recycled):
            tally.digests[number, generation] = digest
            handle.recycled, handle.done = recycled, not recycled
        case _:
            assert_never(message)


def _look_after(
    handle: _Handle, config: Config, context: Any, deadline: float, tally: Tally, store: Store
) -> None:
    """Notice a dead or silent worker, turn its case into a finding, and replace it."""
    tally.running.pop(handle.number, None)
    if handle.done or handle.process is None:
        return
    journal = store.out / "journal" / f"{handle.number}.json"
    silent = time.time() - journal.stat().st_mtime if journal.exists() else 0.0
    hung = silent > config.hang_seconds
    if hung:
        handle.process.kill()
        handle.process.join(10)
    if handle.process.is_alive() or (handle.channel is not None and not hung):
        if long := running(journal):
            tally.running[handle.number] = long
        return
    tally.compiling.pop(handle.number, None)
    tally.confirming.pop(handle.number, None)
    if handle.recycled:
        handle.generation, handle.recycled = handle.generation + 1, False
        _start(handle, config, context, deadline)
        return
    tally.lost_workers += 1
    if (handle.process.exitcode or 0) > 0 and handle.process.exitcode != EXIT_LOST:
        tally.broken = handle.done = True
        tally.notes.append(f"worker {handle.number} raised; its traceback is above")
        return
    case = _journalled(journal, tally, handle)
    how = "hangs" if hung else _how(handle.process.exitcode)
    if case is not None:
        # takes a minute of processes of its own: the other workers must be heard meanwhile
        kept = journal.rename(journal.with_name(f"lost-{case.id}.json"))
        loss = threading.Thread(
            target=_record_loss, args=(kept, case, how, config, tally, store, deadline), daemon=True
        )
        tally.losses.append(loss)
        loss.start()
    handle.generation += 1
    if time.monotonic() < deadline and (case is not None or handle.generation < 3):
        _start(handle, config, context, deadline)
    else:
        handle.done = True


def _journalled(journal: Path, tally: Tally, handle: _Handle) -> Case | None:
    if not journal.exists():
        tally.notes.append(f"worker {handle.number} ended before its first case")
        return None
    return load_case(journal.read_bytes())


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ends the process with {signal.Signals(-code).name}"
    if code == EXIT_LOST:
        return "loses the device"
    return f"ends the process with exit code {code}"


def _record_loss(
    kept: Path, case: Case, how: str, config: Config, tally: Tally, store: Store, deadline: float
) -> None:
    """Look into a loss, one at a time; those whose turn comes too late stay suspected."""
    from narrowfuzz.triage.loss import names_of_loss, triage_loss, untried_loss

    with tally.looking:
        names = names_of_loss(case, how, config.recipe_files)
        same = next((f for f in store.findings() if f.fingerprint in names), None)
        if same is not None:
            # it is minimised already; should another rung be guilty here, the case tells
            store.sight(same.id, case)
        elif tally.enough or time.monotonic() > deadline + GRACE_SECONDS:
            _keep(untried_loss(case, how, config.recipe_files, config.device), tally, store)
        else:
            _keep(
                triage_loss(case, how, config.recipe_files, config.plant, config.device),
                tally,
                store,
            )
        kept.unlink(missing_ok=True)  # the same case may be lost twice


def _keep(result: Triaged, tally: Tally, store: Store, larger: str = "") -> None:
    """A finding; one more sighting of an earlier one's cause; or suspected. It takes the place of
    the one named ``larger``, and was found when that was."""
    finding = result.finding
    if not larger:
        if store.add(finding, result.script) == "new":
            tally.found.append(Found(finding, tally.counts["cases"], tally.seconds))
        return
    status = store.replace(larger, finding, result.script)
    before = next((f for f in tally.found if f.finding.id == larger), None)
    if before is None:
        return
    at = tally.found.index(before)
    tally.found[at : at + 1] = [replace(before, finding=finding)] if status == "new" else []


def _keep_claimed(handles: Sequence[_Handle], tally: Tally, store: Store) -> None:
    """What workers have seen and had no time to confirm is suspected."""
    for handle in handles:
        for result in handle.claimed.values():
            _keep(result, tally, store)


def _drain(handles: list[_Handle], tally: Tally, store: Store) -> None:
    """Take what workers have already sent."""
    for handle in handles:
        while handle.channel is not None and handle.channel.poll():
            if not (message := messages.receive(handle.channel)):
                break
            _take(message, handle, tally, store)
