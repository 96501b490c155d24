"""Starts and stops watching in a process: one thread for a while, or all threads of a command."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from narrowfuzz_watch.collectives import Collectives, see_python_groups
from narrowfuzz_watch.watching import Watching

_THREAD = threading.local()
_LOCK = threading.Lock()
_HOOKED: list[Any] = []
#: Time for gloo's threads to get the interpreter lock that they wait for; many times what they
#: need.
_SECONDS_FOR_GLOO = 0.1


def _current() -> Watching | None:
    return getattr(_THREAD, "watching", None)


def _collectives() -> Collectives | None:
    watching = _current()
    return None if watching is None else watching.collectives


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watching = _current()
    if watching is not None:
        watching.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watching = _current()
    if watching is not None:
        watching.after_step(optimizer)


def _forked() -> None:
    watching = _current()
    if watching is not None:
        watching.forked()


def _hook() -> None:
    """Install the hooks that a process needs only once, for all of its threads."""
    with _LOCK:
        if not _HOOKED:
            _HOOKED.append(register_optimizer_step_pre_hook(_before_step))
            _HOOKED.append(register_optimizer_step_post_hook(_after_step))
            os.register_at_fork(after_in_child=_forked)
        if torch.distributed.is_available():
            see_python_groups(_collectives)


def begin(folder: Path, full: bool) -> Watching:
    """Watch this thread from now on. Raises ValueError if it is watched already."""
    if _current() is not None:
        raise ValueError("this thread is watched already: leave out the inner narrowfuzz.watch()")
    _hook()
    watching = Watching(folder, full)
    watching.__enter__()
    _THREAD.watching = watching
    return watching


def end() -> None:
    """Watch this thread no longer."""
    watching = _current()
    assert watching is not None
    _THREAD.watching = None
    watching.__exit__(None, None, None)
    watching.end()


def begin_process(folder: Path, full: bool) -> None:
    """Watch the thread that imports torch, and all that start after it, until the process ends."""
    begin(folder, full)
    atexit.register(_end_process)
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            begin(folder, full)
            try:
                run()
            finally:
                end()

        thread.run = watched  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = started  # type: ignore[assignment,method-assign]


def _end_process() -> None:
    """Stop watching, then wait a moment if there were collectives. Gloo's threads destroy the
    arguments of their calls, which hold Python objects in a watched process; they abort the process
    if they still wait for the interpreter lock when the interpreter ends."""
    watching = _current()
    if watching is not None:
        end()
        if watching.collectives.met:
            time.sleep(_SECONDS_FOR_GLOO)
