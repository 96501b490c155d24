"""Whether a user's own model computes on a rank what it computes alone, if nothing shards it.

Ranks are threads of one process. What a model keeps in variables of its module is one thing for
all of them, and what it keeps in variables of a thread is lacking in theirs; real ranks are
processes, and have neither problem. And a model that calls collectives itself, as contrastive
losses do, rightly computes something else on ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from narrowfuzz.own_models.calls import digest, kept_generators
from narrowfuzz.own_models.ranks import gradients_of
from narrowfuzz.play.own import OwnModel, floats_in
from narrowfuzz.play.ranks import on_ranks

#: The most turns that two ranks take, and the seconds that one waits for its turn: the other may
#: wait for this one, in a collective or for a lock.
_TURNS, _PATIENCE = 4000, 2.0


def disturbed(
    own: OwnModel,
    call: Callable[[torch.Tensor], Any],
    make: Callable[[], OwnModel],
    given: Sequence[torch.Tensor],
) -> str:
    """What differs, as the end of a sentence, if instances of a model, which ``make`` makes, run on
    two ranks, each with its own of the two inputs, and take turns; "" if nothing does. ``call``
    calls ``own`` in this thread; if that raises, nothing is said."""
    turns, default = _Turns(), torch.get_default_dtype()

    def run(rank: int, _mesh: Any) -> bytes:
        instance = make()
        try:
            with _InTurns(turns, rank):
                return _outcome(instance, instance.called, given[rank])
        finally:
            turns.end()

    with kept_generators():
        try:
            alone = [_outcome(own, call, x) for x in given]
        except Exception:  # noqa: BLE001 - the judge runs it, too
            return ""
        try:
            does = "computes something else" if on_ranks({"data": 2}, run) != alone else ""
        except Exception as error:  # noqa: BLE001
            does = f"raises {type(error).__name__}"
        finally:
            torch.set_default_dtype(default)
    why = "it communicates itself, or keeps values in variables of its module or of a thread"
    return does and f"on a rank, which is a thread, it {does} even unsharded: {why}"


def _outcome(own: OwnModel, call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> bytes:
    """A hash of what the model returns, and of the gradients of its parameters."""
    results = call(x.clone())
    trained = [p for p in own.parameters() if p.requires_grad]
    gradients = gradients_of(results, trained)
    return digest([*floats_in(results), *(g for g in gradients if g is not None)])


class _Turns:
    """Two threads take turns, until one ends or waits too long."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._whose, self._left = 0, _TURNS

    def pass_on(self, rank: int) -> None:
        """Let the other thread run until it passes on, too."""
        with self._moved:
            if not self._left:
                return
            self._whose, self._left = 1 - rank, self._left - 1
            self._moved.notify()
            if not self._moved.wait_for(lambda: self._whose == rank or not self._left, _PATIENCE):
                self._left = 0

    def end(self) -> None:
        with self._moved:
            self._left = 0
            self._moved.notify()


class _InTurns(TorchFunctionMode):
    """Before every function of torch, the other rank runs up to its next one."""

    def __init__(self, turns: _Turns, rank: int) -> None:
        super().__init__()
        self._turns, self._rank = turns, rank

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._turns.pass_on(self._rank)
        return func(*args, **(kwargs or {}))
