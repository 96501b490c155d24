"""Where the first bad value of a finding stands: its script, as ``narrowfuzz watch`` sees it run.

What comes out as NaN or infinity was made somewhere: in which step and phase, on which rank, by
which operator, from which operands, and did the operator make it again of the same operands?
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
from narrowfuzz_watch.read import REPORT
from narrowfuzz_watch.records import Report
from narrowfuzz_watch.words import of_first

from narrowfuzz.triage.finding import Triaged
from narrowfuzz.triage.verify import ended, script_command, script_environment


def with_first_bad(
    found: Triaged, *, plant: tuple[str, str] | None, device: str, seconds: float
) -> Triaged:
    """The same, and of what a script shows to end in NaN or infinity, though no such data went in,
    where the first one stood."""
    finding = found.finding
    if not found.confirmed or finding.reach == "inf_nan" or math.isfinite(float(finding.effect)):
        return found
    lines = first_bad(found.script, plant=plant, device=device, seconds=seconds)
    return replace(found, finding=msgspec.structs.replace(finding, first_bad=lines))


def first_bad(
    script: str, *, plant: tuple[str, str] | None, device: str, seconds: float
) -> list[str]:
    """What ``watch`` says of a script's first bad value; nothing if it names none in time."""
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-first-") as name:
        folder = Path(name)
        path, out = folder / "repro.py", folder / "watched"
        path.write_text(script)
        watch = [sys.executable, "-m", "narrowfuzz", "watch", "--out", str(out), "--"]
        command = watch + script_command(path, plant=plant, device=device)
        code, _, _ = ended(command, script_environment(folder), seconds)
        if code is None or not (out / REPORT).exists():
            return []
        report = msgspec.json.decode((out / REPORT).read_bytes(), type=Report)
    # a huge number is no bad value here: scales of MX formats reach 2^127
    if report.first is None or report.first.bad == "huge":
        return []
    here = tuple(line.removeprefix(f"{folder}/") for line in report.first.lines)
    return list(of_first(msgspec.structs.replace(report.first, lines=here)))
