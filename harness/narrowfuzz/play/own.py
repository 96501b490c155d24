"""A user's model, wrapped as one of ours: rows of features or token ids in, rows of features out.

A stand-alone script is written from this source, as from that of ``models.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

#: Held while a model is built: ranks that are threads share torch's generator.
_seeded = threading.Lock()


class OwnModel(nn.Module):
    """The model that ``build`` of a file or module returns, and what it is called with.

    The case's input replaces the tensor ``driven``: an argument's position, or its name. All floats
    that the model returns, one tensor after the other, are the output, in rows of ``width`` with
    zeros at the end of the last. Modules built in eval mode stay in it. ``cut``: the input is given
    without its gradient.
    """

    def __init__(
        self,
        where: str,
        build: str,
        rows: int,
        width: int,
        dims: dict[str, Any],
        driven: Any,
        cut: bool = False,
    ) -> None:
        super().__init__()
        self.rows, self.width, self.driven, self.cut = rows, width, driven, cut
        plainly_scripted()  # a rank may be a thread
        with _seeded, torch.device("cpu"):  # ``build`` may read parameters
            torch.manual_seed(0)
            self.model, self.given = built(where, build, dims)
        if dist.is_initialized():  # ranks with a model seed that generator: they wait for others
            dist.all_reduce(torch.zeros(1, dtype=torch.int32))
        linears = (m for m in self.model.modules() if isinstance(m, nn.Linear))
        self.dtype = next((linear.weight.dtype for linear in linears), torch.float32)
        self.modes = {module: module.training for module in self.model.modules()}

    def train(self, mode: bool = True) -> OwnModel:
        if not mode:
            return super().train(False)
        self.training = True
        self._as_built(self.model)
        return self

    def _as_built(self, module: nn.Module) -> None:
        """Set it and what is inside to the modes that they were built in. What is all in eval mode
        is not touched: its ``train`` may act, as that of merging layers does."""
        inside = [m for m in module.modules() if m in self.modes]
        modes = {self.modes[m] for m in inside}
        if modes == {False}:
            if any(m.training for m in inside):
                module.train(False)
        elif len(modes) < 2:
            module.train(True)
        else:
            mode = self.modes.get(module, True)  # a conversion may have made it
            if type(module).train is nn.Module.train:
                module.training = mode
            else:
                module.train(mode)
            for child in module.children():
                self._as_built(child)

    def called(self, x: torch.Tensor) -> Any:
        """The model's results, with x in place of the driven argument."""
        # other dtypes than that of the linears stay, unless the model as a whole was cast
        cast = x.is_floating_point() and x.dtype != self.dtype
        given = {
            key: handed(value, x.dtype if cast else None, x) for key, value in self.given.items()
        }
        like = self.given[self.driven]
        dtype = x.dtype if cast or not x.is_floating_point() else like.dtype
        # a copy: the model may write into what it is given
        own = x.detach() if self.cut else x
        given[self.driven] = own.reshape(like.shape).to(dtype, copy=True)
        args = [value for key, value in given.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        return self.model(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        floats = [t.reshape(-1) for t in floats_in(self.called(x))]
        y = floats[0] if len(floats) == 1 else torch.cat(floats)
        missing = self.rows * self.width - y.numel()
        y = F.pad(y, (0, missing)) if missing else y
        return y.reshape(*x.shape[: x.dim() - x.is_floating_point()], self.width)


def plainly_scripted() -> None:
    """Functions of ``torch.jit.script`` are run as they are written. TorchScript's executor would,
    from their second call on, differentiate them by formulas of its own, which round differently:
    neither a recompute nor a compiled run could have their bits. The switch is the thread's own: a
    GPU's backward, and what it recomputes, runs in another."""
    torch._C._set_graph_executor_optimize(False)


def interpreted() -> None:
    """If Triton's kernels are interpreted: those imported after this compute a GPU's numbers. Warns
    if Triton or torchao is a release whose kernels are not known."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    except (ImportError, ValueError) as why:
        warnings.warn(f"Triton's kernels have its interpreter's numbers: {why}", stacklevel=2)


@cache
def imported(where: str) -> Any:
    """The module of this file, or of this dotted name (FOLDER:name, if its package stands in a
    folder that a new process may not search). A file's own imports are also searched in its folder.
    """
    interpreted()
    plainly_scripted()
    if not where.endswith(".py"):
        folder, _, name = where.rpartition(":")
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(name)
    file = Path(where)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    # its classes have the names that the user knows, unless another module has the file's name
    found = importlib.machinery.PathFinder.find_spec(file.stem)
    first = found is not None and found.origin is not None and file.samefile(found.origin)
    loaded = sys.modules.get(file.stem)
    if Path(getattr(loaded, "__file__", None) or ".").resolve() == file.resolve():
        return loaded  # by the user's test: a second copy would register its operators twice
    free = first and loaded is None
    name = file.stem if free else f"{file.stem}_of_a_user"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # else the part that ran would be found there the next time
        raise
    return module


def built(where: str, build: str, dims: dict[str, Any]) -> tuple[Any, dict[Any, Any]]:
    """The model that ``build`` returns, and its arguments by position or name."""
    model, given = getattr(imported(where), build)(**dims)
    return model, by_place(given)


def by_place(given: Any) -> dict[Any, Any]:
    """A model's arguments by position or, if they are a mapping, by name."""
    if isinstance(given, Mapping):
        return dict(given)
    return dict(enumerate(given if isinstance(given, (list, tuple)) else (given,)))


def handed(a: Any, dtype: torch.dtype | None, x: torch.Tensor) -> Any:
    """A copy of the argument on the device of x; its floats get ``dtype``, if there is one."""
    if not isinstance(a, torch.Tensor):
        return a
    floats = dtype if a.is_floating_point() else None
    return a.to(x.device, floats or a.dtype, copy=True)


def floats_in(y: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a model's results, in order."""
    return [t for t in tensors_in(y) if t.is_floating_point()]


def tensors_in(y: Any) -> list[torch.Tensor]:
    """All tensors in it, in order; also those inside tuples, lists, mappings and dataclasses."""
    if isinstance(y, torch.Tensor):
        return [y]
    parts: Any = ()
    if isinstance(y, Mapping):
        parts = y.values()
    elif isinstance(y, (list, tuple)):
        parts = y
    elif dataclasses.is_dataclass(y):
        parts = [getattr(y, field.name) for field in dataclasses.fields(y)]
    return [t for part in parts for t in tensors_in(part)]
