"""Runs at the start of every Python process under ``narrowfuzz watch``: it starts to watch once
torch is imported. Another sitecustomize, if there is one, is run, too."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = Path(_HERE).parent


def _chain() -> None:
    others = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch() -> None:
    folder = os.environ.get("NARROWFUZZ_WATCH_FOLDER")
    if not folder:
        return
    if "narrowfuzz_watch" not in sys.modules:  # it may not be installed in this Python
        origin = str(_PACKAGE / "__init__.py")
        spec = importlib.util.spec_from_file_location(
            "narrowfuzz_watch", origin, submodule_search_locations=[str(_PACKAGE)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["narrowfuzz_watch"] = module
        spec.loader.exec_module(module)
    from narrowfuzz_watch.inside import begin_process
    from narrowfuzz_watch.removed import remove

    if what := os.environ.get("NARROWFUZZ_WATCH_REMOVE"):
        remove(what)
    begin_process(Path(folder), bool(os.environ.get("NARROWFUZZ_WATCH_FULL")))


class _ThenWatch(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _watch()


class _Waits(importlib.abc.MetaPathFinder):
    """Makes the import of torch start the watch. Only the import itself does: a program may look
    for torch's spec without importing it."""

    asks = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch" or self.asks:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenWatch(spec.loader)
        return spec


sys.meta_path.insert(0, _Waits())
_chain()
