"""Messages to the supervisor when a worker begins to compile, and when it has compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch._dynamo.callback import CallbackArgs, callback_handler

from narrowfuzz.campaign.messages import Compiled, Compiling, Message


@dataclass(frozen=True)
class Compiles:
    """Sends ``Compiling`` before and ``Compiled`` after each compilation by Dynamo: of forwards, of
    backwards, and recompilations."""

    send: Callable[[Message], None]
    #: Returns in words for which case it compiles.
    what: Callable[[], str]

    def listen(self) -> None:
        """Register the callbacks; they stay until ``torch._dynamo.reset`` removes them."""
        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def _begin(self, args: CallbackArgs) -> None:
        self.send(Compiling(self.what(), time.monotonic()))

    def _end(self, args: CallbackArgs) -> None:
        self.send(Compiled())
