"""Bugs that narrowfuzz began with, by the ``run`` commands of docs/seeds.md (torchtitan#951 is
``watch``'s)."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: What a command's words begin with, and what its findings must say or be called.
FOUND = {
    "--recipe torchao.float8.rowwise": "O13--",
    "--recipe 'torchao.float8.*' --plant": "checkpoint",
    "--recipe te.delayed": "te-checkpoint-skips-gradient-scale",
    # not the "unsupported" of another shape or of what is not contiguous
    "--with torchtitan==": "triton_to_mxfp8_dim1",
}
COMMANDS = re.findall(r"^    narrowfuzz run (.*)$", (ROOT / "docs/seeds.md").read_text(), re.M)
#: Besides what a command asks for: workers start, packages are installed, findings are confirmed.
BESIDE = 400.0


def test_every_command_has_its_bug() -> None:
    assert [next(begin for begin in FOUND if c.startswith(begin)) for c in COMMANDS] == [*FOUND]


@pytest.mark.heavy
@pytest.mark.parametrize("command", COMMANDS)
def test_a_seed_is_found(command: str, tmp_path: Path) -> None:
    said = next(text for begin, text in FOUND.items() if command.startswith(begin))
    words = shlex.split(command)
    seconds = 60 * float(words[words.index("--minutes") + 1]) + BESIDE
    run = [sys.executable, "-m", "narrowfuzz", "run", *words, "--out", str(tmp_path / "run")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(run, cwd=ROOT, stdout=log, stderr=log)
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until:
            time.sleep(2.0)
            if found(tmp_path / "run", said):
                process.send_signal(signal.SIGINT)
                process.wait(BESIDE)
        if process.poll() is None:
            process.kill()
    assert found(tmp_path / "run", said), (tmp_path / "log").read_text()[-3000:]


def found(folder: Path, said: str) -> bool:
    """Is there a finding, which its own script has shown, that says so?"""
    for kept in folder.glob("findings/*/explain.json"):
        finding = json.loads(kept.read_text())
        names = ("fingerprint", "known_issue", "sentence")
        words = " ".join(str(finding.get(name)) for name in names)
        if said in words and not finding.get("why_suspected"):
            return True
    return False
