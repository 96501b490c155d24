"""The dispatch mode of one thread of training, and what is looked at around an optimizer's step."""

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
    """Has anything been compiled? Then gradients may come from where no operator is seen."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("stats"))


class Watching(TorchDispatchMode):
    """Sees every operator of one thread. Compiled graphs are compiled and run as without it."""

    supports_higher_order_operators = True

    def __init__(self, folder: Path, full: bool) -> None:
        super().__init__()
        self.folder = folder
        self.observer = Observer(folder, full)
        self.collectives = Collectives(self.observer)
        self._reached = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Nothing is compiled otherwise because this mode stands around it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """It is skipped by its code, below: torch's way costs each operator a wrapper in Python."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _mode_of(_FAKE) is not None:
            return func(*args, **(kwargs or {}))  # what is made there has no numbers
        for kind in types:
            if kind in NO_NUMBERS:
                return func(*args, **(kwargs or {}))
            if kind.__torch_dispatch__ is not _OPAQUE:
                return NotImplemented  # its own operators come here, with plain tensors
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
        """Gradients as the optimizer gets them: a bad value in one has come to the end."""
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
                if parameter.grad is not None and screen.looked_at(local(parameter.grad))
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
            # nothing that ran operator by operator made it: a compiled backward, for one
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
        """The next step begins; what other ranks hold, too, is noted."""
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
        """A child process goes on with files of its own."""
        self.observer.recorder = Recorder(self.folder)
        self.observer.ran = 0

    def end(self) -> None:
        """Write down what is left to say."""
        with torch.no_grad(), self.observer.own():
            self.collectives.settle()
            self.observer.flush()
        if self.observer.ran:
            self.observer.tally()
        self.observer.recorder.close()


# what is compiled leaves alone this function and all that it calls
set_code_exec_strategy(
    Watching.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)
