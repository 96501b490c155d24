"""Runs what issues show as their reproduction, on the installed packages or on patched copies."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from narrowfuzz.ledger.filed import Issue
from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.report.known_issue import TE, release_of_te
from narrowfuzz.triage.verify import ScriptRun, ended, script_environment, script_ran
from te_on_cpu.environment import VERSION_VARIABLE, ensure

ROOT = Path(__file__).resolve().parents[1]
#: TransformerEngine runs on the emulated extension, of which an issue's script says nothing.
_EMULATED = (
    "import runpy, sys; from te_on_cpu.environment import enter; enter(); "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)


def alone(path: Path, entry: Entry, folder: Path, patched: Sequence[Path] = ()) -> ScriptRun:
    """Run a script of an entry in a process of its own, which compiles below ``folder`` and finds
    the ``patched`` packages first."""
    environment = script_environment(folder)
    first = [str(place) for place in patched]
    command = [sys.executable, str(path)]
    if TE in entry.versions:
        version = release_of_te(entry)
        first.append(str(ensure(version)))
        environment[VERSION_VARIABLE] = version
        command = [sys.executable, "-c", _EMULATED, str(path)]
    if about_gcc(entry):
        environment["CXX"] = str(tuned_for_generic(folder))
    environment["PYTHONPATH"] = os.pathsep.join([*first, environment["PYTHONPATH"]])
    code, out, err = ended(command, environment, 300.0)
    return script_ran(path.read_text(), code, out, err, 300.0)


def shown(issue: Issue, output: str) -> bool:
    """Does this output of an issue's reproduction show the bug?"""
    lines = "\n".join(line.rstrip() for line in output.splitlines())
    return fnmatch.fnmatchcase(lines, issue.shows or f"*{glob.escape(issue.actual.strip())}*")


def compiles(entry: Entry) -> bool:
    """Does what an issue shows compile C++, as torchao's optimizers do at each first step? It is
    slow."""
    source = entry.reproduction.read_text()
    return "torch.compile(" in source or "torchao.optim" in source


def about_gcc(entry: Entry) -> bool:
    """Is an entry about what some releases of GCC make of right C++?"""
    return entry.cure == "without_slp_vectorizer"


def tuned_for_generic(folder: Path) -> Path:
    """A compiler that tunes for no CPU in particular, as g++ does for one that it does not know."""
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nexec "{shutil.which("g++")}" "$@" -mtune=generic\n')
    script.chmod(0o755)
    return script


def miscompiles() -> bool:
    """Is the compiler here one of those that make wrong code, on a CPU for which they do?"""
    cpu = Path("/proc/cpuinfo")
    if not (cpu.is_file() and "GenuineIntel" in cpu.read_text()):
        return False
    asked = [shutil.which("g++") or "false", "-dumpversion"]
    version = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return re.match(r"1[12]\b", version) is not None
