"""Runs scripts in forked processes that need not import torch again.

A hunt for planted faults verifies a finding by two runs of its script, with the fault and without
it, and in each of them importing torch and torchao takes longer than all the rest. So a worker that
is about to plant a fault first forks a clean copy of itself, and scripts run in forks of that copy.
Findings that ``narrowfuzz run`` reports are verified in a new interpreter (``verify.run_script``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

from narrowfuzz.machine import isa as vectors
from narrowfuzz.machine.environment import importing
from narrowfuzz.plants.registry import planted
from narrowfuzz.triage.verify import ScriptRun, script_ran

_POLL = 0.02
#: Seconds after its timeout at which a script is given up that neither ended nor could be killed.
_SLACK = 30.0


class ForkedScripts:
    """Runs scripts in forks of this process as it was when the object was made."""

    def __init__(self) -> None:
        with importing(), contextlib.suppress(ImportError):
            # torchao imports it when it converts to float8: each script would do that anew
            import torch._inductor.codegen.triton  # noqa: F401
        reading, self._requests = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            # so as not to keep its parent's pipes and files open
            os.closerange(3, reading)
            os.closerange(reading + 1, 4096)
            _serve(reading)
        os.close(reading)

    def __call__(
        self,
        path: Path,
        *,
        timeout: float = 180.0,
        plant: tuple[str, str] | None = None,
    ) -> ScriptRun:
        """As ``verify.run_script``, but with the modules imported that the fork has imported."""
        with tempfile.TemporaryDirectory(prefix="narrowfuzz-script-") as folder:
            request = {
                "path": str(path),
                "plant": plant,
                "timeout": timeout,
                "folder": folder,
            }
            # shorter than a pipe's buffer, so that two threads' requests stay whole
            os.write(self._requests, (json.dumps(request) + "\n").encode())
            ended, until = Path(folder) / "ended", time.monotonic() + timeout + _SLACK
            while not ended.exists() and time.monotonic() < until:
                time.sleep(_POLL)
            code = ended.read_text() if ended.exists() else "None"
            if code == "None":
                return script_ran("", None, "", "", timeout)
            out, err = ((Path(folder) / n).read_text(errors="replace") for n in ("out", "err"))
            return script_ran(path.read_text(), int(code), out, err, timeout)


def _serve(requests: int) -> None:
    """Run requested scripts until the process that requests them has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of _keep
    with os.fdopen(requests) as lines:
        for line in lines:
            request = json.loads(line)
            if _compiles(request["path"]):
                _load_inductor()  # once, for all copies
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep(**request)
    os._exit(0)


def _compiles(path: str) -> bool:
    try:
        return "torch.compile(" in Path(path).read_text()
    except OSError:  # the requesting process has given up and removed the script
        return False


def _load_inductor() -> None:
    import torch._inductor.compile_fx  # noqa: F401

    # while SIGCHLD is ignored, subprocess cannot see that a child has failed
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    vectors.probe_and_cache()
    signal.signal(signal.SIGCHLD, before)


def _keep(path: str, plant: list[str] | None, timeout: float, folder: str) -> None:
    """Run one script in a child process, kill it at its timeout, and store its exit code."""
    child = os.fork()
    if child == 0:
        _run(path, plant, folder)
    until, code = time.monotonic() + timeout, None
    while code is None and time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(_POLL)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    half = Path(folder) / "half"
    half.write_text(str(code))
    half.rename(Path(folder) / "ended")
    os._exit(0)


def _run(path: str, plant: list[str] | None, folder: str) -> None:
    """Run the script as ``__main__``; this process ends with the script's exit code."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _log_to_stderr()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    vectors.copy_cache_to(Path(folder))
    sys.argv = [path]
    code = 0
    try:
        if plant is None:
            runpy.run_path(path, run_name="__main__")
        else:
            with planted(*plant):
                runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())  # a script's own hook ends the process
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_to_stderr() -> None:
    """Let the loggers of libraries write to this process's stderr, as in a new interpreter. They
    hold the stream of the process that was forked, which is closed here, so that each line they
    log would become a traceback."""
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(each for each in named if isinstance(each, logging.Logger))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if type(handler) is logging.StreamHandler:  # not the handlers of files or a test runner
            handler.setStream(sys.stderr)
