"""Where a user's model comes from: a file or a module, and the function in it that builds one."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.own_models.dims import Dims


@dataclass(frozen=True)
class Source:
    """Where a model's ``build`` is: a file, or a module by its dotted name."""

    where: str
    build: str
    #: Of the file's bytes.
    hash: str
    #: What it is called with where that is not the default.
    dims: Dims = ()

    @property
    def title(self) -> str:
        """As a user names it, without folders."""
        return f"{Path(self.where).name}:{self.build}"

    @property
    def name(self) -> str:
        called = f"({', '.join(f'{n}={v!r}' for n, v in self.dims)})" if self.dims else ""
        return f"{self.title}{called}#{self.hash}"


def source_of(text: str) -> Source:
    """What ``FILE.py:build`` or ``package.module:build`` names. Raises ValueError if there is no
    such file or module."""
    where, colon, build = text.rpartition(":")
    if not colon or not where or not build.isidentifier():
        raise ValueError(f"model {text!r}: write FILE.py:build or package.module:build")
    file = Path(where)
    if where.endswith(".py"):
        if not file.is_file():
            raise ValueError(f"model {text!r}: there is no file {where}")
        where = str(file.resolve())
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(where)
        except ImportError as error:
            raise ValueError(f"model {text!r}: {error}") from None
        if found is None or found.origin is None:
            raise ValueError(f"model {text!r}: there is no module {where}")
        file = Path(found.origin)
    return Source(where, build, hashlib.sha256(file.read_bytes()).hexdigest()[:8])


def refused(source: Source, why: str) -> ValueError:
    """In one sentence, why a model is not judged."""
    return ValueError(f"model {source.name.partition('#')[0]}: {why}")


def said(error: BaseException) -> str:
    """An error's class and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def raised(doing: str, error: BaseException) -> str:
    """What was raised while ``doing`` something, and what helps where that is known."""
    what = f"{doing} raised {said(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"{what}; install {package} where narrowfuzz runs, or run narrowfuzz where it is"
    return what
