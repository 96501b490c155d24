"""Finds content that is loaded by path (recipes/, properties/, reports/), and executes files of
recipes or plants.

The content of a checkout has priority over the copy that a wheel, or an editable install, puts
inside the package.
"""

from __future__ import annotations

import runpy
import sys
import zlib
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from narrowfuzz.recipe.deprecated import definitions, refused_keyword
from narrowfuzz.recipe.moved import SOURCE, outdated

_PACKAGE = Path(__file__).resolve().parents[1]
#: The root of the checkout, if the package is in one: <checkout>/harness/narrowfuzz.
_CHECKOUT = _PACKAGE.parents[1]

#: The modules made of folders of recipes or plants. They exist in this process only.
folders: list[ModuleType] = []

T = TypeVar("T")


def content_dir(name: str) -> Path:
    """The folder of one kind of content. Raises ValueError if this installation lacks it."""
    candidates = [_PACKAGE / "_content" / name]
    if in_checkout():
        candidates.insert(0, _CHECKOUT / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise ValueError(f"this installation has no {name}/ folder: reinstall narrowfuzz")


def in_checkout() -> bool:
    """True if the package runs from a source tree of its own."""
    return (
        _PACKAGE.parent.name == "harness"
        and (_CHECKOUT / "pyproject.toml").is_file()
        and (_CHECKOUT / "recipes").is_dir()
    )


def checkout() -> Path | None:
    """The root of the source tree that the package runs from; None in an installation."""
    return _CHECKOUT if in_checkout() else None


def load_definitions(file: Path, kind: str, name: str, types: tuple[type[T], ...]) -> list[T]:
    """The list called ``name`` that a Python file of this ``kind`` defines, all of ``types``.

    A folder is a package whose module ``<kind>.py`` defines it. Raises ValueError naming the file
    if it is missing, raises, or defines something else.
    """
    folder = file if file.is_dir() else None
    if folder is not None:
        file = folder / f"{kind}.py"
        if not file.is_file():
            raise ValueError(f"{kind} folder {folder} has no {file.name}, which must define {name}")
    if not file.is_file():
        raise ValueError(f"{kind} file {file} does not exist")
    files = sorted(folder.rglob("*.py")) if folder else [file]
    _refuse_outdated(kind, file, [one for one in files if SOURCE.encode() in one.read_bytes()])
    try:
        defined = _packaged(folder, file) if folder else runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError):
            _refuse_outdated(kind, file, files)
        if isinstance(error, TypeError) and (instead := refused_keyword(str(error))):
            raise ValueError(f"{kind} file {file}: {instead}") from error
        raise ValueError(f"{kind} file {file} raised {type(error).__name__}: {error}") from error
    items = definitions(defined, name, file)
    if not isinstance(items, list | tuple) or not all(isinstance(item, types) for item in items):
        wanted = " or ".join(f"narrowfuzz.{kind.__name__}" for kind in types)
        raise ValueError(f"{kind} file {file} must define {name}, a list of {wanted}")
    return list(items)


def _refuse_outdated(kind: str, file: Path, sources: Sequence[Path]) -> None:
    """Raises ValueError if one of these sources of the file imports a name of ours that has moved
    or is gone. In a checkout, an import of the source folder succeeds, so it is checked here."""
    for source in sources:
        if found := outdated(source.read_bytes()):
            raise ValueError(f"{kind} file {file} says {found}")


def _packaged(folder: Path, file: Path) -> dict[str, Any]:
    """The globals of ``file``, executed as the package ``folder`` under a unique name."""
    name = f"narrowfuzz_{file.stem}_{zlib.crc32(str(folder.resolve()).encode()):08x}"
    spec = spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    folders.append(module)
    return vars(module)
