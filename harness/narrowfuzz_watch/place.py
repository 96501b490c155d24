"""Determines where the program is: step, phase, module. This is read from Python's stack, so that
the program is not changed: there are no hooks on modules, and nothing is added to a graph.

In a backward pass, the running graph node has a sequence number; the forward has noted in which
module each number was assigned.
"""

from __future__ import annotations

import bisect
import os
import sys
import sysconfig
import weakref
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd import graph as autograd_graph

_MODULE_CALL: CodeType = torch.nn.Module._call_impl.__code__
_ENGINE: CodeType = autograd_graph._engine_run_backward.__code__
_MOST_NOTED = 200_000
_LIBRARY = sysconfig.get_paths()
_PACKAGES = tuple(_LIBRARY[name] + os.sep for name in ("purelib", "platlib"))
_OWN = tuple(_LIBRARY[name] + os.sep for name in ("stdlib", "platstdlib"))
#: Files of torch and of this package, and Python's own frozen modules that start a program.
_NOT_THE_PROGRAMS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    "<frozen ",
)


class Place:
    """The place of one thread of training."""

    def __init__(self) -> None:
        self.step = 1
        self.optimizing = False
        self._counts: int | None = None  # the optimizer whose steps are counted
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._parameters: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers: list[int] = []
        self._modules: list[str] = []
        self._following = torch._C._autograd._get_sequence_nr()

    def note(self) -> None:
        """Note, in a forward, that graph nodes made since the last operator belong to the module
        that runs now. An operator's node is made just before the operator runs."""
        following = torch._C._autograd._get_sequence_nr()
        if following == self._following:
            return
        begin, self._following = min(self._following, following - 1), following
        layer = self.layer()
        if self._numbers and self._numbers[-1] > begin:  # numbers of another thread
            keep = bisect.bisect_left(self._numbers, begin)
            del self._numbers[keep:], self._modules[keep:]
        if not self._modules or self._modules[-1] != layer:
            self._numbers.append(begin)
            self._modules.append(layer)
            if len(self._numbers) > _MOST_NOTED:
                del self._numbers[: _MOST_NOTED // 2], self._modules[: _MOST_NOTED // 2]

    def now(self) -> tuple[int, str, str]:
        """Step, phase and module of the operator that is running."""
        backward = torch._C._current_graph_task_id() != -1
        layer = self.layer()
        if layer:
            return self.step, "recompute" if backward else "forward", layer
        if backward:
            return self.step, "backward", self._of_node()
        if self.optimizing:
            return self.step, "optimizer", ""
        return self.step, "forward" if torch.is_grad_enabled() else "", ""

    def layer(self) -> str:
        """Dotted name of the innermost module whose forward is running; "" if there is none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _MODULE_CALL:
                return self._name(frame.f_locals["self"], frame)
            if code is _ENGINE:
                return ""
            frame = frame.f_back
        return ""

    def lines(self) -> tuple[str, ...]:
        """Where the program called the running operator: the innermost line of Python outside of
        torch and, if that is in an installed package, also the innermost line outside of packages.
        Callers of ``backward`` are left out, so operators of a backward pass have no lines."""
        frame: FrameType | None = sys._getframe(1)
        found: list[str] = []
        while frame is not None and frame.f_code is not _ENGINE:
            file = frame.f_code.co_filename
            packaged = file.startswith(_PACKAGES)
            if not file.startswith(_NOT_THE_PROGRAMS) and (packaged or not file.startswith(_OWN)):
                if not found or not packaged:
                    found.append(f"{_short(file)}:{frame.f_lineno} in {frame.f_code.co_qualname}")
                if not packaged:
                    break
            frame = frame.f_back
        return tuple(found)

    def loss(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the running backward pass began with; none if the pass runs in a thread
        of the autograd engine."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _ENGINE:
                began = frame.f_locals.get("t_outputs", ())
                return tuple(item for item in began if isinstance(item, torch.Tensor))
            frame = frame.f_back
        return ()

    def _name(self, module: torch.nn.Module, frame: FrameType) -> str:
        known = self._names.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        root, up = module, frame.f_back
        while up is not None:
            if up.f_code is _MODULE_CALL:
                root = up.f_locals["self"]
            up = up.f_back
        for name, part in root.named_modules():
            old = self._names.get(id(part))
            # a module that first ran by itself gets its longer name once its parent runs
            if old is None or old[0]() is not part or len(old[1]) < len(name):
                self._names[id(part)] = (weakref.ref(part), name or type(root).__name__)
        self._parameters[root] = {id(p): name for name, p in root.named_parameters()}
        found = self._names.get(id(module))
        return found[1] if found is not None else type(module).__name__

    @property
    def roots(self) -> list[torch.nn.Module]:
        """Modules whose forward did not run inside that of another module."""
        return list(self._parameters)

    def parameter(self, tensor: torch.Tensor) -> str:
        """A parameter's dotted name; "" if no module that ran has it."""
        for names in self._parameters.values():
            if name := names.get(id(tensor)):
                return name
        for root in list(self._parameters):  # sharding may have replaced the parameters
            names = {id(p): name for name, p in root.named_parameters()}
            self._parameters[root] = names
            if name := names.get(id(tensor)):
                return name
        return ""

    def _of_node(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            return self.parameter(variable)
        return self.of_number(node._sequence_nr())

    def of_number(self, number: int) -> str:
        """The module in which a graph node was made."""
        at = bisect.bisect_right(self._numbers, number) - 1
        return self._modules[at] if at >= 0 else ""

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has ended its step. If there are several optimizers, only the
        steps of the first are counted."""
        self.optimizing = False
        if self._counts is None:
            self._counts = id(optimizer)
        if self._counts == id(optimizer):
            self.step += 1


def _short(file: str) -> str:
    """The file's path, relative to the current folder if it is inside."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
