"""Messages from a worker to the supervisor: records, pickled into the pipe between the two."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from msgspec import Struct

from narrowfuzz.triage.finding import Triaged


class Ready(Struct, frozen=True):
    """The worker is about to judge its first case."""


class Counts(Struct, frozen=True):
    """What the worker has counted since its last such message."""

    counts: Mapping[Any, int]


class Compiling(Struct, frozen=True):
    """The worker compiles for ``what``, in words, since this time on the monotonic clock."""

    what: str
    since: float


class Compiled(Struct, frozen=True):
    """The worker has finished compiling."""


class Note(Struct, frozen=True):
    """A sentence that is shown to the user, once."""

    text: str


class Ended(Struct, frozen=True):
    """The worker judges no more cases; ``digest`` is the hash of the ids of those it has judged.
    ``recycled``: a successor is to continue."""

    digest: str
    recycled: bool


class Claimed(Struct, frozen=True):
    """The worker has seen a divergence that no worker had claimed, and will triage it; until then
    it is suspected."""

    suspected: Triaged


class Sighted(Struct, frozen=True):
    """The worker has seen another case of a known issue of which the run has a finding, or is about
    to have one; ``seen`` names the entry of the ledger."""

    seen: Triaged


class Confirming(Struct, frozen=True):
    """The worker triages a divergence that it has claimed, since this time."""

    since: float


class ScriptConfirmed(Struct, frozen=True):
    """A script shows the divergence; a smaller case may follow."""

    found: Triaged


class Finished(Struct, frozen=True):
    """The triage has ended with this result, which replaces what was shown last, if anything."""

    found: Triaged


class Settled(Struct, frozen=True):
    """The claimed divergence is confirmed or dropped."""

    fingerprint: str


AboutFinding = Claimed | Sighted | Confirming | ScriptConfirmed | Finished | Settled
Message = Ready | Counts | Compiling | Compiled | Note | Ended | AboutFinding


def receive(channel: Connection) -> Message | None:
    """The next message of a worker; None if its process has ended."""
    try:
        message: Message = channel.recv()
    except (EOFError, OSError):
        return None
    return message
