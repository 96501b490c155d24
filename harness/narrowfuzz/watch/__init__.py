"""The old place of ``narrowfuzz_watch``, until 0.1.0: old module names give the new modules.

Only ``import narrowfuzz.watch`` loads this module and warns. The attribute ``narrowfuzz.watch`` of
the package is public and does not warn.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from narrowfuzz.recipe.deprecated import warn

_NEW = "narrowfuzz_watch"


class _Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the new module for a name below the old one, so that no second copy is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        below = name.startswith(f"{__name__}.")
        return importlib.util.spec_from_loader(name, self) if below else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(_NEW + name.removeprefix(__name__))


warn(f"import {__name__}", f"import {_NEW}, or from narrowfuzz import watch")
sys.meta_path.insert(0, _Renamed())
sys.modules[__name__] = importlib.import_module(_NEW)
