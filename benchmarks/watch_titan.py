"""``make watch-titan``: run ``watch`` around torchtitan's own trainer, without a fault, in one
process and in two of torchrun. It must find nothing and change no loss.

Exit code 0: that is the case; 1: it is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from narrowfuzz.machine.overlay import restart_with_releases
from narrowfuzz_watch.read import REPORT
from narrowfuzz_watch.records import Report

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: Number of ranks -> the command that starts them.
_STARTS = {1: (sys.executable,), 2: _TORCHRUN}


def losses(command: tuple[str, ...]) -> tuple[int, set[str]]:
    """The exit code, and the lines of losses that the ranks print."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (lines := {line for line in done.stdout.splitlines() if line.startswith("losses")}):
        raise RuntimeError(f"{' '.join(command)} trained nothing:\n{done.stderr[-2000:]}")
    return done.returncode, lines


def trial(ranks: int, steps: int) -> Iterator[str]:
    """A description of each problem when this number of ranks is watched."""
    script = str(Path(__file__).with_name("titan_train.py"))
    train = (*_STARTS[ranks], script, str(steps), "--rows", str(4 // ranks))
    with tempfile.TemporaryDirectory() as folder:
        watch = (sys.executable, "-m", "narrowfuzz", "watch", "--fail", "--out", folder, "--")
        (_, bare), (code, watched) = losses(train), losses((*watch, *train))
        report = msgspec.json.decode((Path(folder) / REPORT).read_bytes(), type=Report)
    print(
        f"{report.steps} steps of {len(report.ranks)} ranks: {report.operators} operators checked, "
        f"{100 * report.overhead:.1f} % of the time"
    )
    if code or report.found:
        yield f"it ended with {code} and names {report.first or report.votes}"
    if (report.steps, len(report.ranks)) != (steps, ranks):
        yield f"it saw {report.steps} steps of ranks {report.ranks}"
    if bare != watched:
        yield f"losses were {bare}, and watched {watched}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=20)
    steps = parser.parse_args().steps
    restart_with_releases(("torchtitan==0.1.0", "torchao==0.11.0"))
    wrong = [f"{ranks} ranks: {why}" for ranks in _STARTS for why in trial(ranks, steps)]
    print(*wrong or ["silent, and no loss is another"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
