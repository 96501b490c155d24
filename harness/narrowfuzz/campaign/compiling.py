"""What a worker compiles, and for how long, told as it begins and as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch._dynamo.callback import CallbackArgs, callback_handler

from narrowfuzz.campaign.messages import Compiled, Compiling, Message


@dataclass(frozen=True)
class Compiles:
    """Says ``Compiling`` and ``Compiled`` around whatever Dynamo compiles: forwards, backwards and
    what it compiles once more."""

    send: Callable[[Message], None]
    #: What it is for, in words.
    what: Callable[[], str]

    def listen(self) -> None:
        """From now on, until ``torch._dynamo.reset`` forgets who listens."""
        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def _begin(self, args: CallbackArgs) -> None:
        self.send(Compiling(self.what(), time.monotonic()))

    def _end(self, args: CallbackArgs) -> None:
        self.send(Compiled())
