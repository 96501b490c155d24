"""TransformerEngine 2.x on the CPU emulation of its extension: many checks in one process."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("emulated_te_v2_checks.py")
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)


@functools.cache
def results(capability: str) -> dict[str, str]:
    library = os.environ.get("NARROWFUZZ_TE2")
    if library is None:
        pytest.skip("set NARROWFUZZ_TE2 to a folder with TransformerEngine 2.20.2")
    environment = {**os.environ, "TE_CAPABILITY": capability}
    environment["PYTHONPATH"] = f"{library}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(CHECKS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capability", ["[9, 0]", "[10, 0]"])
def test_check(name: str, capability: str) -> None:
    failure = results(capability)[name]
    assert not failure, failure
