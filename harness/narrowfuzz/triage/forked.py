"""Scripts in fresh processes that need not import torch anew.

A hunt verifies its finding by two runs of the script, with the fault and without it, and importing
torch and torchao costs each of them more than all the rest. So a worker that is about to plant a
fault first leaves a clean copy of itself behind, and scripts run in copies of that one. What
``narrowfuzz run`` reports is verified by a new interpreter (``verify.run_script``).
"""

from __future__ import annotations

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
from narrowfuzz.plants.registry import planted
from narrowfuzz.triage.verify import ScriptRun, script_ran

_POLL = 0.02
#: A script that neither ends nor can be ended is given up so much later.
_SLACK = 30.0


class ForkedScripts:
    """Runs scripts in copies of this process as it is when this is made."""

    def __init__(self) -> None:
        reading, self._requests = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            # not to keep alive what its maker holds open
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
        """As ``verify.run_script``; what is imported stays so."""
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
    """Answer requests until whoever makes them is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
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
    except OSError:  # whoever asked has given up
        return False


def _load_inductor() -> None:
    import torch._inductor.compile_fx  # noqa: F401

    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else no child of it ever fails
    vectors.ask()
    signal.signal(signal.SIGCHLD, before)


def _keep(path: str, plant: list[str] | None, timeout: float, folder: str) -> None:
    """Run one script in a child, end it if it takes too long, and write down how it ended."""
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
    """The script as ``__main__``; this process ends with its exit code."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _log_to_stderr()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    vectors.tell(Path(folder))
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
        sys.excepthook(*sys.exc_info())  # a script's own ends the process
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_to_stderr() -> None:
    """A library's loggers have the stream of the process that this is a copy of, which is closed
    here, and each line would be a traceback; in a new interpreter they had this one's."""
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(each for each in named if isinstance(each, logging.Logger))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if type(handler) is logging.StreamHandler:  # no file's, nor a test runner's
            handler.setStream(sys.stderr)
