"""Locates the first NaN or infinity of a finding by running its script under ``narrowfuzz watch``.

The report states in which step and phase, on which rank, by which operator and from which operands
the value was made, and whether the operator made it again from the same operands.
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
    """The finding with its ``first_bad`` filled in, if its script shows that results become NaN or
    infinite although no such data went in; any other finding unchanged."""
    finding = found.finding
    if not found.confirmed or finding.reach == "inf_nan" or math.isfinite(float(finding.effect)):
        return found
    lines = first_bad(found.script, plant=plant, device=device, seconds=seconds)
    return replace(found, finding=msgspec.structs.replace(finding, first_bad=lines))


def first_bad(
    script: str, *, plant: tuple[str, str] | None, device: str, seconds: float
) -> list[str]:
    """The lines that ``watch`` reports about a script's first bad value; none if it finds no such
    value within ``seconds``."""
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
    # a huge number is not bad here: scales of MX formats reach 2^127
    if report.first is None or report.first.bad == "huge":
        return []
    here = tuple(line.removeprefix(f"{folder}/") for line in report.first.lines)
    return list(of_first(msgspec.structs.replace(report.first, lines=here)))
