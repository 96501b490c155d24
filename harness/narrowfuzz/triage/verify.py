"""Runs a script in a fresh interpreter and reports whether it showed the divergence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from narrowfuzz.machine import isa as vectors

#: Exit codes of a script: the divergence is there, it is gone, the script cannot tell here.
SHOWN, GONE, CANNOT = 1, 0, 125
#: Libraries log and warn while they are imported, and a compiler that fails logs for pages.
SILENT = (
    "import logging, os, sys, warnings; "
    'logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")'
)
#: A line at the top of every script that we write: an uncaught exception ends the script with
#: CANNOT, not with the interpreter's 1.
GUARD = "sys.excepthook = lambda *e: (sys.__excepthook__(*e), sys.stdout.flush(), os._exit(125))"
#: What the interpreter writes to stderr about an uncaught exception.
_UNCAUGHT = re.compile(
    r"^(Traceback \(most recent call last\):|(Syntax|Indentation|Tab)Error: )", re.MULTILINE
)
#: The number of characters that are stored of a script's output, from its end.
_KEPT = 4000


@dataclass(frozen=True)
class ScriptRun:
    """Exit code and output of one fresh process; ``code`` is None if it ran out of time. The last
    line of the ``output`` is the last that the script printed, or the exception that ended it."""

    code: int | None
    output: str
    #: An uncaught exception ended the script, whatever its exit code is.
    raised: bool = False

    @property
    def shown(self) -> bool:
        """True if the script reached its own check and the divergence was there."""
        return self.code == SHOWN and not self.raised

    @property
    def crashed(self) -> bool:
        """True if a signal ended the process (a library aborted it) or it lost its device."""
        return self.code is not None and (self.code < 0 or "AcceleratorError: " in self.output)


class RunScript(Protocol):
    """Runs a script in a separate process on the run's device, with or without a planted fault."""

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
    """Run the script at ``path`` on a device; with ``plant`` = (file or "", id), under that planted
    fault."""
    command = script_command(path, plant=plant, device=device)
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-script-") as cache:
        code, out, err = ended(command, script_environment(Path(cache)), timeout)
    return script_ran(path.read_text(), code, out, err, timeout)


def script_ran(script: str, code: int | None, out: str, err: str, timeout: float) -> ScriptRun:
    """The result of a run of this ``script``, from its exit code, stdout and stderr together.

    Scripts that are written by hand have no GUARD, so an uncaught exception makes them exit with 1
    as well. In a script with a GUARD, 1 always comes from the script's own check, whatever a
    library logs.
    """
    if code is None:
        return ScriptRun(None, f"no verdict within {timeout:.0f} s")
    own_word = code == GONE or (code == SHOWN and GUARD in script)
    raised = not own_word and _UNCAUGHT.search(err) is not None
    parts = (out, quiet(err)) if raised else (quiet(err), out)
    output = "\n".join(part.strip("\n") for part in parts if part.strip())
    return ScriptRun(code, output[-_KEPT:], raised)


def ended(
    command: Sequence[str], environment: Mapping[str, str], timeout: float
) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a command. After a timeout the exit code is None and the
    whole process group has been killed, including the copies of a script that are its ranks; the
    output is what was printed before."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, *process.communicate()
    return process.returncode, out, err


def script_command(path: Path, *, plant: tuple[str, str] | None, device: str) -> list[str]:
    """The command that runs a script on a device, under the planted fault if there is one."""
    if plant is None and device != "simulated":
        return [sys.executable, str(path)]
    planted = ["-m", "narrowfuzz.plants", device, *(plant or ("", ""))]
    return [sys.executable, *planted, str(path)]


def script_environment(cache: Path) -> dict[str, str]:
    """The environment variables of a script's process, which compiles into ``cache``."""
    vectors.copy_cache_to(cache)
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": _python_path(),
    }


def quiet(err: str) -> str:
    """The stderr text without the lines that libraries log about themselves."""
    noise = ("Failed to load ", "W1", "I1")
    return "\n".join(line for line in err.splitlines() if not line.startswith(noise))


def _python_path() -> str:
    """The caller's path, then our own packages, which scripts about stateful recipes import. Ours
    come last, so that a script imports a library's checkout from the caller's path."""
    inherited = os.environ.get("PYTHONPATH", "")
    ours = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(part for part in (inherited, ours) if part)
