"""The effect of moves on one slot: its scale and window, and which of the moves had an effect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from narrowfuzz.numerics.delayed import Slot, committed, cut, fresh, resized, staged
from narrowfuzz.rules.state.plan import Begin, Commit, Lose, Move, Quantise, Resize


class Miscast(NamedTuple):
    """A cast that used another scale than its slot's."""

    #: Number of the cast within the event.
    number: int
    #: The scale that it should have used.
    scale: np.float32


@dataclass(frozen=True)
class Outcome:
    """One slot after an event."""

    slot: Slot
    #: Moves that had an effect.
    done: tuple[Move, ...] = ()
    miscasts: tuple[Miscast, ...] = ()
    #: The slot before its last commit of something staged; None: there was no such commit.
    uncommitted: Slot | None = None
    #: The slot before its last commit, and that commit; None if a cast came after it.
    last: tuple[Slot, Commit] | None = None

    def in_other_arithmetic(self) -> Slot | None:
        """The slot with its last commit in the other arithmetic; None: no commit came last."""
        return None if self.last is None else _turned(*self.last)


def _turned(slot: Slot, commit: Commit) -> Slot:
    """The slot after a commit in the other arithmetic: a library's bulk update divides, its tensor
    by tensor path multiplies by a reciprocal, and it is not specified which of them an update must
    take."""
    policy = replace(commit.policy, reciprocal=not commit.policy.reciprocal)
    return committed(slot, policy, commit.largest)


def outcome(slot: Slot | None, moves: Iterable[Move]) -> Outcome:
    """The slot after its moves of one event; ``slot`` None: it does not exist yet."""
    done: list[Move] = []
    miscasts: list[Miscast] = []
    uncommitted: Slot | None = None
    last: tuple[Slot, Commit] | None = None
    now = fresh(1) if slot is None else slot
    for move in moves:
        match move:
            case Begin(history):
                now = fresh(history)
            case Lose():
                empty = fresh(len(now.window))
                if now.equals(empty):
                    continue
                now = empty
            case Resize(history, wrong):
                before, now = now, resized(now, history)
                if wrong and not now.equals(built := cut(before, history)):
                    now = built
                else:
                    move = Resize(history, cut=False)
            case Quantise(number, scale, amax, stages):
                if last is not None and scale != now.scale:
                    turned = _turned(*last)
                    now = turned if scale == turned.scale else now
                if scale != now.scale:
                    miscasts.append(Miscast(number, now.scale))
                last = None
                if not stages:
                    continue
                now = staged(now, amax)
            case Commit(policy, largest, _, idle, only):
                after = committed(now, policy, largest)
                if (idle or only is not None) and after.equals(now):
                    continue
                if only is not None and not only.equals(after):
                    continue
                uncommitted = uncommitted if idle else now
                now, last = after, (now, move)
        done.append(move)
    return Outcome(now, tuple(done), tuple(miscasts), uncommitted, last)
