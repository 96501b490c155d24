"""A first day on a GPU, as one command: ``make gpu``.

Five steps ask one question each; a step whose answer is no ends the day, for what follows would say
nothing (``--go-on`` goes on). Everything that was printed and found is kept in one folder, with
``gpu.json`` over it; a day that was cut off goes on where it stopped when it is started again. Runs
from the tree with the Python that is there; packages that lack come from a folder of wheels.

    python benchmarks/gpu_day.py --minutes 35 --call 9 --wheels .whl
    python benchmarks/gpu_day.py --simulate --minutes 12

Exit code 0: all is answered with yes; 1: a no; 3: the call's time is up, start it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_table import keep

ROOT = Path(__file__).resolve().parents[1]
#: What is imported, by the names of the distributions that bring it.
NEEDED = (
    "hypothesis", "msgspec", "numpy", "packaging", "pytest", "rich", "sortedcontainers", "torch",
    "torchao", "typer",
)  # fmt: skip
UNFINISHED = 3
_RUN = (sys.executable, "-m", "narrowfuzz.cli")


@dataclass(frozen=True)
class Part:
    """One command of a step. Of a day's time it gets its share; what it writes is in ``name``."""

    name: str
    minutes: float
    command: tuple[str, ...]
    #: Exit codes that answer yes.
    good: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Step:
    """Some parts that answer one question."""

    name: str
    question: str
    parts: tuple[Part, ...]


#: Of a whole day.
MINUTES = 35.0


def run(name: str, minutes: float, *globs: str, arms: tuple[str, ...] = ("eager*",)) -> Part:
    """A campaign on these recipes."""
    chosen = [text for glob in globs for text in ("--recipe", glob)]
    chosen += [text for arm in arms for text in ("--arm", arm)]
    command = ("run", *chosen, "--seed", "1", "--minutes", "{minutes}", "--out", "{out}")
    return Part(name, minutes, (*_RUN, *command, "--device", "{device}"))


COMPILED = ("eager", "aot_eager*", "inductor*")
FAULTS = ("gemm-gain", "gemm-narrow-accumulator", "attention-statistics-base-two",
          "recompute-drifts")  # fmt: skip
STEPS = (
    Step("probe", "Are our assumptions true?", (
        Part("probe", 4.0, (sys.executable, "benchmarks/gpu_probe.py", "--device", "{device}",
                            "--out", "{out}.json")),
    )),
    Step("baselines", "Is it silent on plain torch?", (
        run("baselines", 3.0, "torch.bf16", "torch.fp32", "torch.fp16"),
        Part("properties", 2.0, (
            sys.executable, "-m", "pytest", "-q", "-x", "properties", "--nf-profile", "smoke",
            "--nf-device", "{device}",
        )),
    )),
    Step("eager", "Do the bounds hold on FP8?", (
        run("float8", 5.0, "torch.scaled_mm", "torchao.float8.*"),
        run("blockwise", 1.5, "torchao.blockwise_fp8"),
        run("mxfp8", 1.0, "torchao.mxfp8.*"),
        run("schedules", 0.5, "reference.delayed"),
    )),
    Step("compiled", "Do taps and the rules of compiled rungs hold?", (
        run("compiled-baselines", 3.0, "torch.bf16", "torch.fp32", arms=COMPILED),
        run("compiled-float8", 5.0, "torchao.float8.*", arms=COMPILED),
    )),
    Step("faults", "Does it find anything, and survive?", (
        Part("score", 5.0, (
            *_RUN, "score", "--no-controls", "--device", "{device}", "--seconds", "{quarter}",
            "--seed", "1", "--json", "{out}.json", *[t for f in FAULTS for t in ("--only", f)],
        )),
        Part("seed-bug", 3.0, (
            sys.executable, "benchmarks/seed_bug.py", "--device", "{device}",
        )),
        Part("lost", 1.0, (
            *_RUN, "run", "--plant", "device-lost", "--recipe", "torchao.float8.rowwise",
            "--arm", "eager", "--workers", "1", "--seed", "1", "--minutes", "{minutes}",
            "--out", "{out}", "--device", "{device}",
        ), good=(1,)),
    )),
)  # fmt: skip
#: What a simulated GPU cannot do: compilers ask for a real one, and so do Triton's kernels.
NOT_SIMULATED = ("blockwise", "compiled-baselines", "compiled-float8", "seed-bug")


def main() -> int:
    asked = _parser().parse_args()
    device = "simulated" if asked.simulate else asked.device
    out = (asked.out or ROOT / "reports" / "runs" / f"gpu-{device.replace(':', '-')}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    env = environment(out, asked.wheels)
    file, until = out / "gpu.json", time.monotonic() + 60 * (asked.call or 1e6)
    day: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    chosen = steps(asked.only)
    whole = sum(part.minutes for step in chosen for part in step.parts)
    day |= {"device": device, "date": time.strftime("%Y-%m-%d"), "minutes": asked.minutes}
    for step in chosen:
        print(f"== {step.name}: {step.question}", flush=True)
        for part in step.parts:
            if part.name in day["parts"]:
                continue
            minutes = part.minutes * asked.minutes / whole
            if time.monotonic() + 60 * minutes > until:
                print("the call's time is up: start it again")
                return UNFINISHED
            day["parts"][part.name] = done(part, minutes, device, out, env)
            file.write_text(json.dumps(day, indent=2) + "\n")
        answer = answer_of(step, day["parts"])
        print(f"== {step.name}: {answer}", flush=True)
        if answer == "no" and not asked.go_on:
            print("what follows would say nothing: look at the output, or go on with --go-on")
            return 1
    answers = {step.question: answer_of(step, day["parts"]) for step in chosen}
    file.write_text(json.dumps(day | {"answers": answers}, indent=2) + "\n")
    if not asked.only and (out / "probe.json").exists():
        keep(out)
    return int("no" in answers.values())


def steps(names: Sequence[str] | None) -> tuple[Step, ...]:
    """All steps, or those with one of these parts, and no others. Raises SystemExit for a name that
    no part has."""
    every = [part.name for step in STEPS for part in step.parts]
    if unknown := set(names or ()) - set(every):
        raise SystemExit(f"no part {', '.join(unknown)}: there are {', '.join(every)}")
    few = (
        replace(step, parts=tuple(p for p in step.parts if not names or p.name in names))
        for step in STEPS
    )
    return tuple(step for step in few if step.parts)


def environment(out: Path, wheels: Path | None) -> dict[str, str]:
    """Variables of every part: our tree, and what lacks, installed from the wheels. Raises
    SystemExit for what is not there."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    packages = out / "packages"
    if lacking and wheels is not None and not packages.exists():
        files = [str(file) for file in sorted(wheels.glob("*.whl"))]
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
        subprocess.run([*pip, "--target", str(packages), *files], check=True)
    if lacking and not packages.exists():
        raise SystemExit(f"this Python lacks {', '.join(lacking)}: name a folder of their wheels")
    paths = (ROOT / "harness", packages, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(str(one) for one in paths if str(one))
    return dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", NO_COLOR="1")


def done(part: Part, minutes: float, device: str, out: Path, env: dict[str, str]) -> dict[str, Any]:
    """Run one part to its end; how that went, and its numbers."""
    if device == "simulated" and part.name in NOT_SIMULATED:
        return {"code": None, "why": "it needs a GPU that is not simulated"}
    words = {
        "minutes": f"{minutes:.3f}", "quarter": f"{minutes * 15:.1f}", "device": device,
        "out": str(out / part.name),
    }  # fmt: skip
    command = [word.format_map(words) for word in part.command]
    started = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        ended = subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    told: dict[str, Any] = {"code": ended.returncode, "good": ended.returncode in part.good}
    told |= {"seconds": round(time.monotonic() - started, 1), "command": " ".join(command[1:])}
    told |= numbers(out / part.name)
    # what judged nothing says nothing
    told["good"] = told["good"] and told.get("cases", 1) > 0 and not told.get("missed")
    last = (out / f"{part.name}.log").read_text().strip().splitlines()[-1:]
    print(
        f"{part.name}: exit code {told['code']} after {told['seconds']:.0f} s: {last}", flush=True
    )
    return told


def numbers(kept: Path) -> dict[str, Any]:
    """Of a campaign's summary, or of a score's, what a day is judged by."""
    scored = kept.with_suffix(".json")
    if kept.name == "score" and scored.exists():
        faults = json.loads(scored.read_text())["faults"]
        missed = [fault["id"] for fault in faults if not fault["found"]]
        return {"cases": len(faults) - len(missed), "missed": missed}
    if not (kept / "summary.json").exists():
        return {}
    summary = json.loads((kept / "summary.json").read_text())
    names = ("cases", "specs", "compiles", "seconds", "lost_workers")
    findings = [f"{f['recipe']} {f['arm']}: {f['sentence']}" for f in summary["findings"]]
    suspected = [f"{f['recipe']} {f['arm']}: {f['sentence']}" for f in summary["suspected"]]
    return {n: summary[n] for n in names} | {"findings": findings, "suspected": suspected}


def answer_of(step: Step, parts: dict[str, Any]) -> str:
    """yes, no, or not asked."""
    told = [
        parts[part.name] for part in step.parts if parts.get(part.name, {}).get("code") is not None
    ]
    if not told:
        return "not asked"
    return "yes" if all(one["good"] for one in told) else "no"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the whole day")
    parser.add_argument("--call", type=float, default=0.0, help="minutes of this call; 0: no limit")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--simulate", action="store_true", help="on the simulated Hopper")
    parser.add_argument("--only", action="append", metavar="PART")
    parser.add_argument("--go-on", action="store_true", help="after a no, too")
    parser.add_argument("--wheels", type=Path, help="folder with the packages that lack")
    parser.add_argument("--out", type=Path, help="folder of the day")
    return parser


if __name__ == "__main__":
    sys.exit(main())
