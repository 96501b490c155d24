"""What a worker tells the supervisor: a record each, pickled into the pipe between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from narrowfuzz.triage.finding import Triaged


@dataclass(frozen=True)
class Ready:
    """It is about to judge its first case."""


@dataclass(frozen=True)
class Counts:
    """What it has counted since it last said so."""

    counts: Mapping[Any, int]


@dataclass(frozen=True)
class Compiling:
    """It compiles, on the monotonic clock since then, for what these words say."""

    what: str
    since: float


@dataclass(frozen=True)
class Compiled:
    """It has compiled that."""


@dataclass(frozen=True)
class Claimed:
    """It has seen what no worker had, and will look into it; until then that is suspected."""

    suspected: Triaged


@dataclass(frozen=True)
class Confirming:
    """It looks into what it has claimed, since then."""

    since: float


@dataclass(frozen=True)
class Shown:
    """A script shows it; a smaller case may come."""

    found: Triaged


@dataclass(frozen=True)
class Finished:
    """It has looked into a finding, the one that it has shown if it has shown one."""

    found: Triaged


@dataclass(frozen=True)
class Settled:
    """What it has claimed is confirmed or dropped."""

    fingerprint: str


@dataclass(frozen=True)
class Note:
    """Users are told this, once."""

    text: str


@dataclass(frozen=True)
class Digest:
    """The hash of the ids of the cases that it has judged, before it ends."""

    number: int
    generation: int
    hash: str


@dataclass(frozen=True)
class Recycled:
    """It ends on purpose, and another process is to go on."""


@dataclass(frozen=True)
class Done:
    """It has done its part."""


Message = (
    Ready
    | Counts
    | Compiling
    | Compiled
    | Claimed
    | Confirming
    | Shown
    | Finished
    | Settled
    | Note
    | Digest
    | Recycled
    | Done
)


def receive(channel: Connection) -> Message | None:
    """The next message of a worker; None if its process has ended."""
    try:
        message: Message = channel.recv()
    except (EOFError, OSError):
        return None
    return message
