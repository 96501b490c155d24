"""The source of a user's model: a file or module, and the function in it that builds the model."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import pkgutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.own_models.dims import Dims
from narrowfuzz.trace.meaning import shortened

#: Folders of installed packages, which every process searches.
_INSTALLED = ("purelib", "platlib", "stdlib", "platstdlib")


@dataclass(frozen=True)
class Source:
    """A model's ``build`` function and where it is defined."""

    #: Absolute path of a file, or dotted name of a module: FOLDER:name, if its package is not
    #: installed but stands in that folder, which a new process may not search.
    where: str
    build: str
    #: Hash of the file's bytes.
    hash: str
    #: Arguments of ``build`` that are not its defaults.
    dims: Dims = ()

    @property
    def title(self) -> str:
        """FILE.py:build as a user writes it, without folders."""
        file = self.where.endswith(".py")
        name = Path(self.where).name if file else self.where.rpartition(":")[2]
        return f"{name}:{self.build}"

    def refused(self, why: str) -> ValueError:
        """The error that says, in one sentence, why the model cannot be judged."""
        return ValueError(f"model {self.name.partition('#')[0]}: {why}")

    @property
    def name(self) -> str:
        called = f"({', '.join(f'{n}={v!r}' for n, v in self.dims)})" if self.dims else ""
        return f"{self.title}{called}#{self.hash}"


def source_of(text: str) -> Source:
    """The source named by ``FILE.py:build`` or ``package.module:build``, or by the latter after the
    folder of the package, ``FOLDER:package.module:build``. Raises ValueError if there is no such
    file or module."""
    where, colon, build = text.rpartition(":")
    if not colon or not where or not build.isidentifier():
        raise ValueError(f"model {text!r}: write FILE.py:build or package.module:build")
    file = Path(where)
    if where.endswith(".py"):
        if not file.is_file():
            beside = [str(one) for one in file.parent.glob("*.py")] if file.parent.is_dir() else []
            raise ValueError(f"model {text!r}: there is no file {where}{like(where, beside)}")
        where = str(file.resolve())
    else:
        folder, _, where = where.rpartition(":")
        for place in (Path.cwd(), Path(folder).resolve()):
            if str(place) not in sys.path:
                sys.path.insert(0, str(place))
        try:
            found = importlib.util.find_spec(where)
        except ImportError as error:
            raise ValueError(f"model {text!r}: {error}{_like_module(where)}") from None
        if found is None or found.origin is None:
            raise ValueError(f"model {text!r}: there is no module {where}{_like_module(where)}")
        file = Path(found.origin)
        where = f"{folder}:{where}" if (folder := _searched(where)) else where
    return Source(where, build, hashlib.sha256(file.read_bytes()).hexdigest()[:8])


def _searched(module: str) -> str:
    """The folder that has to be searched for a module, absolute; "" for an installed one."""
    found = importlib.util.find_spec(module.partition(".")[0])
    assert found is not None
    places = [*(found.submodule_search_locations or ()), found.origin or ""]
    folder = Path(places[0]).parent.resolve()  # of a link's own name, not of what it points to
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in _INSTALLED}
    return "" if folder in installed else str(folder)


def module_of(file: Path) -> str:
    """The dotted name of a file in a package, "" if it is in none."""
    names = [] if file.stem == "__init__" else [file.stem]
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names) if len(names) > 1 else ""


def like(name: str, there: Sequence[str]) -> str:
    """``: did you mean NAME?`` if one of ``there`` has a similar name, else ""."""
    near = difflib.get_close_matches(name, there, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _like_module(name: str) -> str:
    """``: did you mean NAME?`` for the first part of a dotted name that does not exist, if a module
    beside it has a similar name; else ""."""
    above: list[str] = []
    for part in name.split("."):
        folders = _folders(".".join(above))
        here = [one.name for one in pkgutil.iter_modules(folders)]
        if part not in here:
            near = difflib.get_close_matches(part, here, n=1)
            return f": did you mean {'.'.join([*above, near[0]])!r}?" if near else ""
        above.append(part)
    return ""


def _folders(package: str) -> list[str]:
    """The folders that contain a package's modules; for "" those of all top-level modules."""
    if not package:
        return sys.path
    found = importlib.util.find_spec(package)
    return list(found.submodule_search_locations or []) if found else []


def error_text(error: BaseException) -> str:
    """An error's class and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {shortened(lines[0], 200)}" if lines else type(error).__name__


def raised(doing: str, error: BaseException) -> str:
    """A message about an error that was raised while ``doing`` something, with advice if a module
    is missing."""
    what = f"{doing} raised {error_text(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in sys.modules:
            return f"{what}; there is a {package}, but it is another release, or another package"
        return f"{what}; install {package} where narrowfuzz runs, or run narrowfuzz where it is"
    return what
