"""Scripts run in copies of a process: what they say, how they end, and what they leave alone."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from narrowfuzz.machine import isa as vectors
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.triage.forked import ForkedScripts, _load_inductor

SCALE = """
import sys, torch
from torchao.float8.float8_utils import amax_to_scale
scale = amax_to_scale(torch.tensor(1.0), torch.float8_e4m3fn).item()
print("scale", scale)
sys.exit(0 if scale == 448.0 else 1)
"""


@pytest.fixture(scope="module")
def scripts() -> ForkedScripts:
    return ForkedScripts()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("text", "code", "output"),
    [
        ("print('fine')", 0, "fine"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.abort()", -6, ""),
        ("import time; time.sleep(60)", None, "no verdict within 1 s"),
        ("import sys; print(__name__, sys.argv[0][-4:])", 0, "__main__ a.py"),
    ],
)
def test_how_a_script_ends(
    scripts: ForkedScripts, tmp_path: Path, text: str, code: int | None, output: str
) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    run = scripts(path, timeout=1.0 if code is None else 60.0)
    assert run.code == code and output in run.output


def test_a_fault_is_planted_in_the_copy_alone(scripts: ForkedScripts, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(SCALE)
    assert "scale-doubled" in builtin_faults()
    with ThreadPoolExecutor(2) as pool:  # as triage does
        planted = pool.submit(scripts, path, plant=("", "scale-doubled"))
        clean = pool.submit(scripts, path)
        assert planted.result().shown and "scale 896.0" in planted.result().output
        assert clean.result().code == 0
    assert scripts(path).code == 0


def test_what_runs_later_sees_nothing_of_what_is_patched_now(
    scripts: ForkedScripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_text("import sys; sys.exit(hasattr(sys, 'patched_by_a_test'))")
    scripts(path)
    monkeypatch.setattr(sys, "patched_by_a_test", True, raising=False)
    started = time.monotonic()
    assert scripts(path).code == 0
    assert time.monotonic() - started < 30.0


def test_what_is_asked_before_copies_are_made_may_be_answered_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where children are not waited for, none seems to fail: Inductor would take any vectors."""
    codes: list[int] = []

    def ask() -> None:
        codes.append(subprocess.run(["false"], check=False).returncode)

    monkeypatch.setattr(vectors, "probe_and_cache", ask)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        _load_inductor()
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert codes == [1]


def test_what_a_library_logs_is_no_exception_of_the_script(tmp_path: Path) -> None:
    """Its handler was made before the copy, with a stream that is closed there."""
    script = tmp_path / "a.py"
    script.write_text(
        "import logging, sys\nlogging.getLogger('a library').warning('a word')\nsys.exit(1)"
    )
    handler = logging.StreamHandler((tmp_path / "closed").open("w"))
    logging.getLogger("a library").addHandler(handler)
    try:
        result = ForkedScripts()(script)
    finally:
        logging.getLogger("a library").removeHandler(handler)
        handler.stream.close()
    assert result.shown and result.output == "a word"
