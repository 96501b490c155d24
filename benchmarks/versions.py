"""Verify narrowfuzz on the installed versions: ``make versions`` runs this on the newest ones, or
on the torch that it is given.

It runs the script of every ledger entry, a campaign on the unquantised baselines, the smoke
properties on all recipes, and the tests of what torch and Triton generate for a GPU without having
one, and writes the result to reports/verified.json. Exit code 1: an entry that names these versions
does not show, the baselines have findings, or a test fails.

    python benchmarks/versions.py --minutes 2
    make versions TORCH=2.11.0
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from narrowfuzz.ledger.ledger import load_entries, stands
from narrowfuzz.ledger.verified import Verified, keep_verified
from narrowfuzz.machine.environment import prepare, settle, versions
from narrowfuzz.machine.machine import machine
from narrowfuzz.triage.trials import Trials

ROOT = Path(__file__).resolve().parents[1]
PROPERTIES = ("properties", "--nf-profile", "smoke")
#: Tests of code for a GPU; a CPU build without Triton runs fewer of them.
GPU = ("tests/machine/test_gpu_code.py", "tests/machine/test_meta_refusals.py")


def try_entries() -> tuple[dict[str, str], list[str]]:
    """(entry id -> the answer of its script, the ids of entries that should show but do not)."""
    trials, lost = Trials(), []
    for entry in load_entries():
        emulated = "transformer_engine" in entry.versions
        how = "other" if emulated else stands(entry)
        if how == "absent":
            trials.answers[entry.id] = "absent"  # type: ignore[assignment]
            continue
        trials(entry)
        print(f"{trials.answers[entry.id]:12} {entry.id}", flush=True)
        # some scripts can tell nothing on a machine without AMX, for example
        if how == "named" and trials.answers[entry.id] == "gone":
            lost.append(entry.id)
    return dict(trials.answers), lost


def run_baselines(minutes: float) -> tuple[int, tuple[str, ...]]:
    """The number of cases of a campaign on plain torch, and the fingerprints of its findings."""
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-versions-") as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "narrowfuzz", "run", "--recipe", "torch.bf16"]
        command += ["--recipe", "torch.fp32", "--minutes", str(minutes), "--seed", "1"]
        subprocess.run([*command, "--out", str(out)], check=False)
        summary = json.loads((out / "summary.json").read_text())
    return summary["cases"], tuple(found["fingerprint"] for found in summary["findings"])


def run_tests(tests: tuple[str, ...]) -> tuple[int, int]:
    """The number of tests that passed, and of those that failed or could not run."""
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-2000:], flush=True)
    counts = Counter(
        {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    )
    return counts["passed"], counts["failed"] + counts["error"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of the baselines' campaign")
    args = parser.parse_args()
    prepare()
    settle()
    entries, lost = try_entries()
    cases, findings = run_baselines(args.minutes)
    passed, failed = run_tests(PROPERTIES)
    gpu_passed, gpu_failed = run_tests(GPU)
    found = versions()
    record = Verified(
        date=time.strftime("%Y-%m-%d"), python=found["python"], torch=found["torch"],
        torchao=found["torchao"], kernels=machine().kernels, entries=entries,
        baseline_cases=cases, baseline_findings=findings,
        properties_passed=passed, properties_failed=failed,
        gpu_passed=gpu_passed, gpu_failed=gpu_failed,
    )  # fmt: skip
    keep_verified(record)
    print(record.sentence())
    for entry in lost:
        print(f"no longer shows on the versions that it names: {entry}")
    return 1 if lost or findings or failed or gpu_failed else 0


if __name__ == "__main__":
    sys.exit(main())
