"""Run a script in a fresh interpreter and say what it showed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from narrowfuzz import vectors

#: Exit codes of a script: the divergence is there, it is gone, the script cannot tell here.
SHOWN, GONE, CANNOT = 1, 0, 125


@dataclass(frozen=True)
class ScriptRun:
    """Exit code and output of one fresh process. ``code`` None: it ran out of time."""

    code: int | None
    output: str

    @property
    def shown(self) -> bool:
        """The script reached its own check and the divergence was there.

        Scripts that are written by hand have no guard: a traceback of theirs exits 1, too.
        """
        ended = ("Traceback (most recent call last)", "SyntaxError: ", "IndentationError: ")
        return self.code == SHOWN and not any(text in self.output for text in ended)

    @property
    def crashed(self) -> bool:
        """A signal ended the process, as a library aborted it, or it has lost its device."""
        return self.code is not None and (self.code < 0 or "AcceleratorError: " in self.output)


class RunScript(Protocol):
    """Runs a script in a process of its own on the run's device, under a planted fault or
    without."""

    def __call__(
        self,
        path: Path,
        *,
        timeout: float = ...,
        plant: tuple[str, str] | None = ...,
    ) -> ScriptRun: ...


def run_script(
    path: Path,
    *,
    timeout: float = 180.0,
    plant: tuple[str, str] | None = None,
    device: str = "cpu",
) -> ScriptRun:
    """Run ``path`` on a device; with ``plant`` = (file or "", id), under what is
    planted so."""
    command = script_command(path, plant=plant, device=device)
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-script-") as cache:
        code, output = ended(command, script_environment(Path(cache)), timeout)
    if code is None:
        return ScriptRun(None, f"no verdict within {timeout:.0f} s")
    return ScriptRun(code, tidy(output))


def ended(
    command: Sequence[str], environment: Mapping[str, str], timeout: float
) -> tuple[int | None, str]:
    """Exit code and output of a command; None where its time was over, and then nothing of it is
    left, copies of a script that are ranks among it."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, out + err


def script_command(path: Path, *, plant: tuple[str, str] | None, device: str) -> list[str]:
    """What runs a script on a device, under what is planted."""
    if plant is None and device != "simulated":
        return [sys.executable, str(path)]
    planted = ["-m", "narrowfuzz.plants", device, *(plant or ("", ""))]
    return [sys.executable, *planted, str(path)]


def script_environment(cache: Path) -> dict[str, str]:
    """The variables of a script's process, which compiles into ``cache``."""
    vectors.tell(cache)
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": _python_path(),
    }


def tidy(output: str) -> str:
    """The end of it, without what libraries log about themselves."""
    noise = ("Failed to load ", "W1", "I1")
    return "\n".join(line for line in output.splitlines() if not line.startswith(noise))[-4000:]


def _python_path() -> str:
    """Scripts about stateful recipes import packages of ours; they come last, so that a library's
    checkout on the caller's path is what a script imports."""
    inherited = os.environ.get("PYTHONPATH", "")
    ours = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(part for part in (inherited, ours) if part)
