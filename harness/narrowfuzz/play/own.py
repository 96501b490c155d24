"""A user's model, as one of ours: rows of features or token ids in, rows of features out.

A stand-alone script is written from this source, as from that of ``models.py``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class OwnModel(nn.Module):
    """What ``build`` of a file or module gives: a model, and what it is called with.

    The case's input takes the place of the first tensor there that holds floats, or of the first
    one if all hold token ids. All floats that the model returns, one tensor after the other, are
    the output, in rows of ``width`` with zeros at the end of the last.
    """

    def __init__(self, where: str, build: str, rows: int, width: int, dims: dict[str, Any]) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        torch.manual_seed(0)
        with torch.device("cpu"):  # what builds a model may read numbers
            self.model, self.given = built(where, build, dims)
        self.driven = driven(self.given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {key: handed(value, x) for key, value in self.given.items()}
        # a copy: the model may write into what it is given
        given[self.driven] = x.reshape(self.given[self.driven].shape).clone()
        args = [value for key, value in given.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        floats = [t.reshape(-1) for t in tensors_in(self.model(*args, **kwargs))]
        y = floats[0] if len(floats) == 1 else torch.cat(floats)
        missing = self.rows * self.width - y.numel()
        y = F.pad(y, (0, missing)) if missing else y
        return y.reshape(*x.shape[: x.dim() - x.is_floating_point()], self.width)


@cache
def imported(where: str) -> Any:
    """The module of that dotted name, or of that file, beside which its own imports are looked
    for."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    # its classes have the names that their user knows, unless another module has the file's
    found = importlib.machinery.PathFinder.find_spec(file.stem)
    first = found is not None and found.origin is not None and file.samefile(found.origin)
    free = first and file.stem not in sys.modules
    name = file.stem if free else f"{file.stem}_of_a_user"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def built(where: str, build: str, dims: dict[str, Any]) -> tuple[Any, dict[Any, Any]]:
    """The model that ``build`` gives, and what it is called with, by place or by name."""
    model, given = getattr(imported(where), build)(**dims)
    if isinstance(given, dict):
        return model, given
    return model, dict(enumerate(given if isinstance(given, (list, tuple)) else (given,)))


def driven(given: dict[Any, Any]) -> Any:
    """Place or name of what the case's input takes the place of."""
    tensors = [key for key, value in given.items() if isinstance(value, torch.Tensor)]
    floats = [key for key in tensors if given[key].is_floating_point()]
    return (floats or tensors)[0]


def handed(a: Any, x: torch.Tensor) -> Any:
    """An argument where x is: floats in its precision, if it has one."""
    if not isinstance(a, torch.Tensor):
        return a
    if a.is_floating_point() and x.is_floating_point():
        return a.to(x.device, x.dtype, copy=True)
    return a.to(x.device, copy=True)


def tensors_in(y: Any) -> list[torch.Tensor]:
    """The tensors of floats in what a model returns, in order."""
    if isinstance(y, torch.Tensor):
        return [y] if y.is_floating_point() else []
    parts = y.values() if isinstance(y, dict) else y if isinstance(y, (list, tuple)) else ()
    return [t for part in parts for t in tensors_in(part)]
