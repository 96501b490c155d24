"""Which library a frame of a traceback belongs to, wherever that library is stored.

A library may be installed, or imported from a checkout, so a frame is named after the package that
contains its file, not after the folder that contains the package.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from traceback import FrameSummary

#: Our own packages, and Triton, through which an error passes from a kernel to its caller.
_OURS = frozenset({"narrowfuzz", "narrowfuzz_watch", "te_on_cpu", "triton", "triton_on_cpu"})
#: Modules of torch through which a call enters a dispatch mode, and through which it leaves it.
_ENTERS = frozenset({"torch._compile", "torch._dynamo.eval_frame"})
_LEAVES = frozenset({"torch._ops"})
#: The functions of a mode that torch calls.
_MODES = frozenset({"__torch_dispatch__", "__torch_function__"})
_STANDARD = Path(sysconfig.get_path("stdlib"))
#: The libraries that are tested. Whatever else a frame belongs to is the model's own code.
_TESTED = frozenset({"torch", "torchao", "torchtitan", "transformer_engine"})
_NOT_THE_MODELS = frozenset((package,) for package in _OURS | _TESTED)


@functools.cache
def module_of(filename: str) -> str:
    """Dotted name of the library module in a file; "" for the standard library, for our own
    packages and Triton, and for a file that belongs to no package."""
    path, parts = Path(filename), _dotted(filename)
    alone = len(parts) < 2 and path.stem != "__init__" and path.parent.name != "site-packages"
    if not parts or parts[0] in _OURS or alone or _is_standard(path):
        return ""
    return ".".join(parts)


@functools.cache
def _dotted(filename: str) -> tuple[str, ...]:
    """The names of the packages that contain a file, from the outermost on, and of its module."""
    path = Path(filename)
    parts = [path.stem] if path.stem != "__init__" else []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return tuple(parts)


def _is_standard(path: Path) -> bool:
    return _STANDARD in path.parents and "site-packages" not in path.parts


def of_the_model(frames: list[FrameSummary]) -> bool:
    """Has the model's own code raised: a file of the user's, or of a package that is not tested?
    What it calls of Python's standard library belongs to it."""
    own = [f for f in _as_unwatched(frames) if not _is_standard(Path(f.filename))]
    return bool(own) and _dotted(own[-1].filename)[:1] not in _NOT_THE_MODELS


def raised_by(filename: str, frames: list[FrameSummary]) -> bool:
    """Has the code of this file raised, or Python's standard library that it called?"""
    own = [
        f for f in frames if not f.filename.startswith("<") and not _is_standard(Path(f.filename))
    ]
    return bool(own) and own[-1].filename == filename


def in_libraries(frames: list[FrameSummary]) -> list[FrameSummary]:
    """The frames that are in a library, as of a run without a dispatch mode of ours."""
    return [frame for frame in _as_unwatched(frames) if module_of(frame.filename)]


def _as_unwatched(frames: list[FrameSummary]) -> list[FrameSummary]:
    """The frames without those of modes of ours, and without torch's around them: an error is
    attributed to the same code as in a run without these modes."""
    found: list[FrameSummary] = []
    watched = False
    for frame in frames:
        module = module_of(frame.filename)
        if frame.name in _MODES and not module:
            watched = True
            while found and module_of(found[-1].filename) in _ENTERS:
                found.pop()
        elif watched and (not module or module in _LEAVES):
            continue
        else:
            watched = False
            found.append(frame)
    return found
