"""What makes a known divergence go away: an entry of the ledger that names a cure explains only
what the same case no longer shows under it.

A miscompiled loop shows as whatever its garbage does to the rules. A predicate wide enough for all
of that would hide other bugs; the cure tells them apart.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


@contextmanager
def without_slp_vectorizer() -> Iterator[None]:
    """What Inductor writes is compiled without GCC's vectoriser of straight-line code.

    Inductor has no setting for flags, so its compiler is a script that adds one. The script's name
    is g++, by which Inductor tells GCC, and its path is always the same: it is part of the key that
    a compiled kernel is kept under.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    real = shutil.which(os.environ.get("CXX", "g++")) or "g++"
    script = Path(cache_dir()) / "without_slp_vectorizer" / "g++"
    text = f'#!/bin/sh\nexec "{real}" "$@" -fno-tree-slp-vectorize\n'
    if not script.exists() or script.read_text() != text:  # of another compiler
        script.parent.mkdir(parents=True, exist_ok=True)
        fresh = script.with_name(f"g++.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(script)  # another worker may be at it, too
    with config.patch({"cpp.cxx": (None, str(script))}):
        yield


#: By the name that an entry gives; each is entered around all that builds and runs a case.
CURES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "without_slp_vectorizer": without_slp_vectorizer,
}
