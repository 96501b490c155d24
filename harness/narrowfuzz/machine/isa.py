"""Which vector instructions Inductor may use: asked of the C++ compiler once a machine.

Inductor compiles and loads four small libraries to find out, and keeps them with its artefacts. In
a fresh folder they cost more than the kernels of most cases, and on one machine the answer is
always the same.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import patch

from narrowfuzz.machine.environment import artefacts

#: Stands beside the libraries once all have been made.
_ASKED = "asked"


def ask() -> None:
    """Let this process know, and those that get a folder of artefacts later. Idempotent."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    kept = _kept()
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(kept)):
        valid_vec_isa_list()
    kept.mkdir(exist_ok=True)
    (kept / _ASKED).touch()


def tell(folder: Path) -> None:
    """What is known of it, into a fresh folder of artefacts."""
    if (_kept() / _ASKED).exists():
        shutil.copytree(_kept(), folder, dirs_exist_ok=True)


def _kept() -> Path:
    return artefacts() / "vectors"
