"""Caches which vector instructions Inductor may use, so that a machine finds out only once.

Inductor compiles and loads four small libraries to find out, and stores them with its artefacts. In
a fresh folder they cost more than the kernels of most cases, and on one machine the answer is
always the same.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import patch

from narrowfuzz.machine.environment import artefacts

#: A file that exists beside the libraries once all have been compiled.
_PROBED = "asked"


def probe_and_cache() -> None:
    """Find out which instructions may be used, for this process and for those that call
    ``copy_cache_to`` later. Idempotent."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    folder = _kept()
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)):
        valid_vec_isa_list()
    folder.mkdir(exist_ok=True)
    (folder / _PROBED).touch()


def copy_cache_to(folder: Path) -> None:
    """Copy the libraries into a fresh folder of artefacts, if ``probe_and_cache`` has compiled
    them."""
    if (_kept() / _PROBED).exists():
        shutil.copytree(_kept(), folder, dirs_exist_ok=True)


def _kept() -> Path:
    return artefacts() / "vectors"
