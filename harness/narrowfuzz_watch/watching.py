"""The dispatch mode of one thread of training, and the checks around an optimizer's step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.utils._python_dispatch import TorchDispatchMode

from narrowfuzz_watch import screen
from narrowfuzz_watch.collectives import Collectives
from narrowfuzz_watch.observer import Observer
from narrowfuzz_watch.operators import NO_NUMBERS, operator, read_by
from narrowfuzz_watch.recorder import Recorder, kept
from narrowfuzz_watch.replicas import local, replicated

_mode_of, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_OPAQUE = torch._C._disabled_torch_dispatch_impl


def _compiled() -> bool:
    """True if anything has been compiled: operators that are not seen may then make gradients."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("stats"))


class Watching(TorchDispatchMode):
    """Sees every operator of one thread; graphs are compiled and run as they are without it."""

    supports_higher_order_operators = True

    def __init__(self, folder: Path, full: bool) -> None:
        super().__init__()
        self.folder = folder
        self.observer = Observer(folder, full)
        self.collectives = Collectives(self.observer)
        self._reached = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: this mode must not change what is compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as torch's way of skipping costs each operator a wrapper in Python; Dynamo is made
        to skip ``__torch_dispatch__`` at the end of this file instead."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _mode_of(_FAKE) is not None:
            return func(*args, **(kwargs or {}))  # fake tensors have no numbers
        for kind in types:
            if kind in NO_NUMBERS:
                return func(*args, **(kwargs or {}))
            if kind.__torch_dispatch__ is not _OPAQUE:
                return NotImplemented  # the subclass then calls operators on plain tensors
        kwargs = kwargs or {}
        observer = self.observer
        if observer.quiet:
            return func(*args, **kwargs)
        what = operator(func)
        if self.collectives.open:
            self.collectives.settle(read_by(what, args, kwargs))
        kind = what.kind
        if kind in ("collective", "wait"):
            return self.collectives.operator(what, func, args, kwargs)
        if kind == "scaler":
            observer.recorder.write("scaler", rank=observer.rank, step=observer.place.step)
        return observer.operator(what, func, args, kwargs)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the gradients that the optimizer receives, and record the first bad one."""
        observer = self.observer
        observer.place.optimizing = True
        with torch.no_grad(), self.observer.own():
            observer.flush()
            if self._reached or (observer.worst == "ok" and not _compiled()):
                return
            graded = [
                (parameter, local(parameter.grad))
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None and screen.is_checkable(local(parameter.grad))
            ]

            def done(sums: list[float], _: list[int]) -> None:
                for (parameter, gradient), found in zip(graded, sums, strict=True):
                    if screen.suspect(found) and (bad := screen.state(gradient)) != "ok":
                        self._tell_reached(parameter, gradient, bad)
                        return

            observer.later([screen.total(gradient) for _, gradient in graded], [], done)
            observer.flush()

    def _tell_reached(
        self, parameter: torch.Tensor, gradient: torch.Tensor, bad: screen.State
    ) -> None:
        observer = self.observer
        step, name = observer.place.step, observer.place.parameter(parameter)
        observer.recorder.write("reached", rank=observer.rank, step=step, name=name, bad=bad)
        self._reached = True
        if screen.WORST.index(observer.worst) < screen.WORST.index(bad):
            # no operator that was seen made it, but for example a compiled backward
            observer.worst = bad
            observer.tell(
                observer.ran,
                (step, "backward", name),
                "gradient",
                bad,
                "given",
                operands=[],
                output=screen.described(gradient, "gradient"),
                again="",
                why="",
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the parameters that other ranks hold, too, and begin the next step."""
        observer, step = self.observer, self.observer.place.step
        with torch.no_grad(), self.observer.own():
            observer.flush()
            held = list(replicated(optimizer, observer.place)) if kept(step) else []
        if held:
            observer.recorder.write("held", rank=observer.rank, step=step, held=held)
        observer.place.stepped(optimizer)
        if kept(step):
            observer.tally()

    def forked(self) -> None:
        """Make a forked child process write to files of its own."""
        self.observer.recorder = Recorder(self.folder)
        self.observer.ran = 0

    def end(self) -> None:
        """Write the remaining records, and close the files."""
        with torch.no_grad(), self.observer.own():
            self.collectives.settle()
            self.observer.flush()
        if self.observer.ran:
            self.observer.tally()
        self.observer.recorder.close()


# Dynamo compiles neither this function nor anything that it calls
set_code_exec_strategy(
    Watching.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)
