"""The script that is run on each version: of a finding, of a known issue, or a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.bisect.search import VersionAnswer
from narrowfuzz.ledger.ledger import load_entries
from narrowfuzz.machine.device import check_device
from narrowfuzz.report.lookup import OnDisk, lookup
from narrowfuzz.triage.verify import (
    GONE,
    ended,
    script_command,
    script_environment,
    script_ran,
)

#: How often the script of a finding runs that does not show in every process.
FLAKY_RUNS = 10
_SECONDS = 300.0


@dataclass(frozen=True)
class Script:
    """A script, its divergence in a sentence, the device it runs on, how many runs without the
    divergence mean that it is gone, the planted fault: (file or "", id), and the finding that it
    belongs to."""

    path: Path
    title: str
    device: str = "cpu"
    runs: int = 1
    plant: tuple[str, str] | None = None
    finding: OnDisk | None = None

    def ask(self, version: str, variables: Mapping[str, str]) -> VersionAnswer:
        """The answer of the script in a process with these variables, which select the version."""
        done = None
        for _ in range(self.runs):
            with tempfile.TemporaryDirectory(prefix="narrowfuzz-bisect-") as cache:
                command = script_command(self.path, plant=self.plant, device=self.device)
                own = {**script_environment(Path(cache)), **variables}
                code, out, err = ended(command, own, _SECONDS)
            done = script_ran(self.path.read_text(), code, out, err, _SECONDS)
            if done.shown:
                return VersionAnswer(version, "shows")
            if done.code != GONE or done.raised:
                lines = [line for line in done.output.splitlines() if line.strip()]
                last = lines[-1].strip().removeprefix("cannot tell: ") if lines else "no output"
                return VersionAnswer(version, "cannot tell", last)
        assert done is not None, "it runs at least once"
        return VersionAnswer(version, "gone")


def script_of(target: str, runs: int = 0) -> Script:
    """The script that a user names: by a finding's id or folder, a known issue's id, or its file.

    Raises ValueError if it is none of these, or a finding without a script.
    """
    entries = {entry.id: entry for entry in load_entries()}
    if target in entries:
        entry = entries[target]
        return Script(entry.path, entry.title, runs=runs or 1)
    if os.path.isfile(target) and target.endswith(".py"):
        return Script(Path(target).resolve(), Path(target).name, runs=runs or 1)
    found = lookup(target)
    if not isinstance(found, OnDisk):
        raise ValueError(f"{target} is a case without a script: name a finding's folder or id")
    path = (found.folder / "repro.py").resolve()
    if not path.is_file() or not path.read_text().strip():
        raise ValueError(f"{found.folder} has no script: nothing has shown it in a fresh process")
    finding = found.finding
    check_device(finding.device)
    usual = 1 if finding.flake == "always" else FLAKY_RUNS
    return Script(path, finding.sentence, finding.device, runs or usual, finding=found)
