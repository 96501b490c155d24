"""Content that is loaded by path: where recipes/, properties/ and reports/ are, and how a file of
recipes or plants is executed.

The content of a checkout wins over the copy that a wheel, or an editable install, puts inside the
package.
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
import time
import zlib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

_PACKAGE = Path(__file__).resolve().parent
#: The checkout that the package would lie in: <checkout>/harness/narrowfuzz.
_CHECKOUT = _PACKAGE.parents[1]
#: The name of the source folder. A file that imports it means the package.
_OLD_NAME = "harness"

#: The modules that folders of content have been executed as: no process but this one has them.
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
        _PACKAGE.parent.name == _OLD_NAME
        and (_CHECKOUT / "pyproject.toml").is_file()
        and (_CHECKOUT / "recipes").is_dir()
    )


def checkout() -> Path | None:
    """The root of the source tree that the package runs from; None in an installation."""
    return _CHECKOUT if in_checkout() else None


def new_folder() -> Path:
    """Where a run goes that is not told: into a checkout's reports, else below the place where the
    user is."""
    inside = in_checkout() and Path.cwd().resolve() == _CHECKOUT
    home = Path("reports/runs" if inside else "narrowfuzz-runs")
    return home / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


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
    if old := _old_imports(file):
        raise ValueError(
            f"{kind} file {file} says {old!r}: the package is called narrowfuzz, write "
            f"{old.replace(_OLD_NAME, 'narrowfuzz', 1)!r}"
        )
    try:
        defined = _packaged(folder, file) if folder else runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{kind} file {file} raised {type(error).__name__}: {error}") from error
    found = defined.get(name)
    if not isinstance(found, list | tuple) or not all(isinstance(item, types) for item in found):
        wanted = " or ".join(f"narrowfuzz.{kind.__name__}" for kind in types)
        raise ValueError(f"{kind} file {file} must define {name}, a list of {wanted}")
    return list(found)


def _packaged(folder: Path, file: Path) -> dict[str, Any]:
    """The module's globals, executed as the package that the folder is, under a name of its own."""
    name = f"narrowfuzz_{file.stem}_{zlib.crc32(str(folder.resolve()).encode()):08x}"
    spec = spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    folders.append(module)
    return vars(module)


def _old_imports(file: Path) -> str:
    """The first import of ours under the name of the source folder, "" if there is none.

    A user's project may have a package of that name: only what names ours is meant.
    """
    source = file.read_bytes()
    if _OLD_NAME.encode() not in source:
        return ""  # most files, which are loaded often
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""  # running it says what is wrong, with the line
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module, node.names):
            names = ", ".join(alias.name for alias in node.names)
            return f"from {node.module} import {names}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if "." in alias.name and _is_ours(alias.name, []):
                    return f"import {alias.name}"
    return ""


def _is_ours(module: str, names: list[ast.alias]) -> bool:
    first, *rest = module.split(".")
    if first != _OLD_NAME:
        return False
    below = [rest[0]] if rest else [alias.name for alias in names]
    return any(_exists(name) for name in below)


def _exists(name: str) -> bool:
    """True if narrowfuzz has a module or a public name of this name."""
    from narrowfuzz import __all__ as public

    return (
        name in public
        or name == _PACKAGE.name
        or (_PACKAGE / f"{name}.py").is_file()
        or (_PACKAGE / name / "__init__.py").is_file()
    )
