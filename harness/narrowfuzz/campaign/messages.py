"""What a worker tells the supervisor: a record each, pickled into the pipe between the two."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from msgspec import Struct

from narrowfuzz.triage.finding import Triaged


class Ready(Struct, frozen=True):
    """It is about to judge its first case."""


class Counts(Struct, frozen=True):
    """What it has counted since it last said so."""

    counts: Mapping[Any, int]


class Compiling(Struct, frozen=True):
    """It compiles for what these words say, since then on the monotonic clock."""

    what: str
    since: float


class Compiled(Struct, frozen=True):
    """It has compiled that."""


class Note(Struct, frozen=True):
    """Users are told this, once."""

    text: str


class Ended(Struct, frozen=True):
    """It has judged all it will, cases whose ids have this hash; ``recycled``: its successor is to
    go on."""

    digest: str
    recycled: bool


class Claimed(Struct, frozen=True):
    """It has seen what no worker had, and will look into it; until then that is suspected."""

    suspected: Triaged


class Sighted(Struct, frozen=True):
    """It has seen once more what an entry of the ledger explains, of which the run has a finding or
    is about to have one; ``seen`` names the entry."""

    seen: Triaged


class Confirming(Struct, frozen=True):
    """It looks into what it has claimed, since then."""

    since: float


class Shown(Struct, frozen=True):
    """A script shows it; a smaller case may come."""

    found: Triaged


class Finished(Struct, frozen=True):
    """It has looked into a finding: what it has shown last, if it has shown anything."""

    found: Triaged


class Settled(Struct, frozen=True):
    """What it has claimed is confirmed or dropped."""

    fingerprint: str


AboutFinding = Claimed | Sighted | Confirming | Shown | Finished | Settled
Message = Ready | Counts | Compiling | Compiled | Note | Ended | AboutFinding


def receive(channel: Connection) -> Message | None:
    """The next message of a worker; None if its process has ended."""
    try:
        message: Message = channel.recv()
    except (EOFError, OSError):
        return None
    return message
