"""``make gpu``: all checks for a first day on a GPU, as one command.

Each of six steps answers one question. A step with the answer no ends the day, since later steps
depend on it (``--go-on`` continues). All output and findings are stored in one folder, summarised
in ``gpu.json``; a day that was interrupted continues where it stopped when it is started again. It
runs from the source tree with the current Python; missing packages come from a folder of wheels.

    python benchmarks/gpu_day.py --call 9 --wheels .whl --resume day.tgz
    python benchmarks/gpu_day.py --simulate --minutes 9

Parts that did not answer yes are run again. If the variable OUT names a folder, the whole day is
written to OUT/day.tgz, which another call may --resume. Exit code 0: all answers are yes; 1: at
least one is no; 3: the call's time is up, start it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_steps import NOT_SIMULATED, RUN, STEPS, Part, Step
from gpu_table import answer_of, keep

ROOT = Path(__file__).resolve().parents[1]
#: Names of the modules that must be importable.
NEEDED = (
    "cloudpickle", "hypothesis", "jinja2", "msgspec", "numpy", "packaging", "pytest", "rich",
    "sortedcontainers", "sqlalchemy", "torch", "torchao", "typer",
)  # fmt: skip
UNFINISHED = 3
#: Minutes of a whole day.
MINUTES = 18.0
#: Exit code of a part that ran out of time, and the seconds that a part may take beyond its share:
#: a campaign starts its workers and finishes its triage.
CUT_OFF, BESIDE = 124, 150.0
PACKAGES = "packages"


def main() -> int:
    args = _parser().parse_args()
    device = "simulated" if args.simulate else args.device
    out = (args.out or ROOT / "reports" / "runs" / f"gpu-{device.replace(':', '-')}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.resume is not None:
        with tarfile.open(args.resume) as archive:
            archive.extractall(out, filter="data")
    env = environment(out, args.wheels)
    try:
        return play(args, device, out, env)
    finally:
        if os.environ.get("OUT"):
            with tarfile.open(Path(os.environ["OUT"]) / "day.tgz", "w:gz") as archive:
                archive.add(out, ".", filter=lambda one: None if PACKAGES in one.name else one)


def play(args: argparse.Namespace, device: str, out: Path, env: dict[str, str]) -> int:
    """Run every part that has not answered yes. Returns the exit code."""
    file, until = out / "gpu.json", time.monotonic() + 60 * (args.call or 1e6)
    day: dict[str, Any] = {"parts": {}, "answers": {}}
    day |= json.loads(file.read_text()) if file.exists() else {}
    chosen = steps(args.only)
    whole = sum(part.minutes for step in chosen for part in step.parts)
    day |= {"device": device, "date": time.strftime("%Y-%m-%d"), "minutes": args.minutes}
    for step in chosen:
        print(f"== {step.name}: {step.question}", flush=True)
        for part in step.parts:
            before = day["parts"].get(part.name, {"good": False})
            if before.get("good", True):
                continue
            minutes = part.minutes * args.minutes / whole
            if time.monotonic() + 60 * minutes + BESIDE > until:
                print("the call's time is up: start it again")
                return UNFINISHED
            day["parts"][part.name] = done(part, minutes, device, out, env, args.workers)
            file.write_text(json.dumps(day, indent=2) + "\n")
        answer = day["answers"][step.question] = answer_of(step, day["parts"])
        file.write_text(json.dumps(day, indent=2) + "\n")
        print(f"== {step.name}: {answer}", flush=True)
        if answer == "no" and not args.go_on:
            print("what follows would say nothing: look at the output, or go on with --go-on")
            break
    if not args.only and (out / "probe.json").exists():
        keep([out])
    return int("no" in day["answers"].values())


def steps(names: Sequence[str] | None) -> tuple[Step, ...]:
    """All steps, or only the parts with these names and their steps. Raises SystemExit for a name
    that no part has."""
    every = [part.name for step in STEPS for part in step.parts]
    if unknown := set(names or ()) - set(every):
        raise SystemExit(f"no part {', '.join(unknown)}: there are {', '.join(every)}")
    few = (
        replace(step, parts=tuple(p for p in step.parts if not names or p.name in names))
        for step in STEPS
    )
    return tuple(step for step in few if step.parts)


def environment(out: Path, wheels: Path | None) -> dict[str, str]:
    """Environment variables for every part, whose path has the source tree and the missing
    packages, installed from the wheels. Raises SystemExit if packages are missing without wheels,
    or if narrowfuzz does not start."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    packages = out / PACKAGES
    if lacking and wheels is not None and not packages.exists():
        # renamed at the end, so that an interrupted installation is not taken for a complete one
        half = packages.with_suffix(".half")
        files = [str(file) for file in sorted(wheels.glob("*.whl"))]
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
        subprocess.run([*pip, "--upgrade", "--target", str(half), *files], check=True)
        half.rename(packages)
    if lacking and not packages.exists():
        raise SystemExit(f"this Python lacks {', '.join(lacking)}: name a folder of their wheels")
    paths = (ROOT / "harness", packages, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(str(one) for one in paths if str(one))
    env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", NO_COLOR="1")
    first = subprocess.run(
        [*RUN, "list", "arms"], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if first.returncode:
        raise SystemExit(f"narrowfuzz does not start here: {first.stderr.strip()[-500:]}")
    return env


def done(
    part: Part, minutes: float, device: str, out: Path, env: dict[str, str], workers: int = 6
) -> dict[str, Any]:
    """Run one part to its end. Returns its exit code, seconds, command and numbers, and in ``good``
    whether it answers yes."""
    if device == "simulated" and part.name in NOT_SIMULATED:
        return {"code": None, "why": "it needs a GPU that is not simulated"}
    words = {
        "minutes": f"{minutes:.3f}", "quarter": f"{minutes * 15:.1f}", "device": device,
        "workers": "0" if device == "simulated" else str(workers),
        "out": str(out / part.name),
    }  # fmt: skip
    command = [word.format_map(words) for word in part.command]
    shutil.rmtree(out / part.name, ignore_errors=True)  # left by a call that was interrupted
    started = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        code = _code(command, env, log, 60 * minutes + BESIDE)
    record: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - started, 1)}
    record |= {"command": " ".join(command[1:]), **numbers(out / part.name)}
    record["good"] = (
        code in part.good
        and all(record.get(name) for name in part.needs)
        and not (record.get("missed") or record.get("wrong"))
    )
    last = (out / f"{part.name}.log").read_text().strip().splitlines()[-1:]
    print(
        f"{part.name}: exit code {record['code']} after {record['seconds']:.0f} s: {last}",
        flush=True,
    )
    return record


def _code(command: list[str], env: dict[str, str], log: Any, seconds: float) -> int:
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return CUT_OFF
    return ended.returncode


def numbers(folder: Path) -> dict[str, Any]:
    """The numbers by which a day is judged, from the summary of a campaign or a score; empty if
    there is none."""
    scored = folder.with_suffix(".json")
    if folder.name == "score" and scored.exists():
        faults = json.loads(scored.read_text())["faults"]
        missed = [fault["id"] for fault in faults if not fault["found"]]
        return {"cases": len(faults) - len(missed), "missed": missed}
    if not (folder / "summary.json").exists():
        return {}
    summary = json.loads((folder / "summary.json").read_text())
    names = ("cases", "specs", "compiles", "seconds", "lost_workers")
    findings = [f"{f['recipe']} {f['arm']}: {f['sentence']}" for f in summary["findings"]]
    suspected = [f"{f['recipe']} {f['arm']}: {f['sentence']}" for f in summary["suspected"]]
    about_words = ("contract--", "census--")
    wrong = [f["fingerprint"] for f in summary["findings"]]
    wrong = [name for name in wrong if not name.startswith(about_words)]
    counts = {"findings": findings, "suspected": suspected, "wrong": wrong}
    return {n: summary[n] for n in names} | counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the whole day")
    parser.add_argument("--call", type=float, default=0.0, help="minutes of this call; 0: no limit")
    parser.add_argument("--workers", type=int, default=6, help="of a campaign on a GPU")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--simulate", action="store_true", help="on the simulated Hopper")
    parser.add_argument("--only", action="append", metavar="PART")
    parser.add_argument("--go-on", action="store_true", help="after a no, too")
    parser.add_argument("--wheels", type=Path, help="folder with the packages that lack")
    parser.add_argument("--out", type=Path, help="folder of the day")
    parser.add_argument("--resume", type=Path, help="day.tgz of an earlier call")
    return parser


if __name__ == "__main__":
    sys.exit(main())
