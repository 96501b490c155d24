"""What a script's run says: its own word is told from an exception that nobody caught."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrowfuzz.triage.prove import _confirm, _why_not
from narrowfuzz.triage.script.parts import guarded
from narrowfuzz.triage.verify import CANNOT, GONE, SHOWN, RunScript, ScriptRun, run_script

#: Raises on a line that is longer than all that is kept of an output.
RAISES = f"import sys\nraise ValueError(len({'x' * 9000!r}))\n"
NO_PYTHON = "def broken(:\n    pass\n"
LOGS_AND_SHOWS = """
try:
    raise OSError("no such cache")
except OSError:
    import traceback
    traceback.print_exc()
print("got 1 must be 2")
sys.exit(1)
"""
LOGS = """
import logging
logging.getLogger("a library").critical("pages of a compiler")
print("expected 2, got 1")
sys.exit(1)
"""
WARNS = """
import sys
print("equal")
sys.stdout.flush()
print("mine.py:3: FutureWarning: deprecated\\n  return func(*args)", file=sys.stderr)
sys.exit({code})
"""


@pytest.fixture(params=["new", "forked"])
def run(request: pytest.FixtureRequest) -> RunScript:
    """Scripts run in a new interpreter, or in a copy of a clean process."""
    return run_script if request.param == "new" else request.getfixturevalue("scripts")


def ran(run: RunScript, folder: Path, text: str) -> ScriptRun:
    path = folder / "repro.py"
    path.write_text(text)
    return run(path, timeout=60.0)


@pytest.mark.parametrize("text", [RAISES, NO_PYTHON], ids=["long traceback", "no Python"])
def test_an_uncaught_exception_shows_nothing_however_long_it_is(
    run: RunScript, tmp_path: Path, text: str
) -> None:
    done = ran(run, tmp_path, text)
    assert done.code == SHOWN and done.raised and not done.shown
    assert done.output.splitlines()[-1].partition(":")[0] in ("ValueError", "SyntaxError")


def test_what_a_guarded_script_says_holds_whatever_is_logged(
    run: RunScript, tmp_path: Path
) -> None:
    done = ran(run, tmp_path, guarded('"""A finding."""', LOGS_AND_SHOWS))
    assert done.shown and "no such cache" in done.output
    assert done.output.splitlines()[-1] == "got 1 must be 2"


def test_a_guarded_script_prints_nothing_that_a_library_logs(
    run: RunScript, tmp_path: Path
) -> None:
    done = ran(run, tmp_path, guarded('"""A finding."""', LOGS))
    assert done.shown and done.output == "expected 2, got 1"


def test_a_guarded_script_that_raises_cannot_tell_and_says_what_was_raised(
    run: RunScript, tmp_path: Path
) -> None:
    done = ran(run, tmp_path, guarded('"""A finding."""', "print('so far')\n1 / 0"))
    assert done.code == CANNOT and done.raised and not done.shown
    assert done.output.splitlines()[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("code", [GONE, SHOWN, CANNOT])
def test_the_last_line_is_the_scripts_and_no_warnings(
    run: RunScript, tmp_path: Path, code: int
) -> None:
    done = ran(run, tmp_path, WARNS.format(code=code))
    assert done.code == code and not done.raised and done.shown == (code == SHOWN)
    assert "FutureWarning" in done.output and done.output.splitlines()[-1] == "equal"
    assert _why_not(done).endswith(": equal")


def test_of_an_error_of_several_lines_the_first_is_the_reason(
    run: RunScript, tmp_path: Path
) -> None:
    message = "shapes do not match\\n\\nSee the manual for\\nworkaround examples."
    raises = f'print("TypeError: an earlier one")\nraise RuntimeError("{message}")\n'
    for text in (raises, guarded('"""A finding."""', raises)):
        done = ran(run, tmp_path, text)
        assert done.output.splitlines()[-1] == "workaround examples."
        assert _why_not(done).endswith("): RuntimeError: shapes do not match")
    printed = 'print("ValueError: one that was handled")\nprint("equal")\n'
    assert _why_not(ran(run, tmp_path, printed)).endswith(": equal"), "it did not raise"


@pytest.mark.parametrize(
    ("run", "answered"),
    [
        (ScriptRun(0, "equal"), True),
        (ScriptRun(1, "differs"), True),
        (ScriptRun(125, "No module named 'mine'"), False),
        (ScriptRun(None, "no verdict within 180 s"), False),
    ],
)
def test_a_script_that_ended_without_telling_gave_no_answer(run: ScriptRun, answered: bool) -> None:
    """A check that has one exits with 4, not with 0."""
    assert _confirm("", None, lambda path, **_: run).answered is answered
