"""``make bench``: measure narrowfuzz's speeds and compare each with its target.

Every part runs in a fresh process with one thread, one process at a time. Exit code 0: all targets
met; 1: one or more missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from narrowfuzz.campaign.slices import Slice
from narrowfuzz.machine.device import check_device, enter
from narrowfuzz.machine.environment import describe, prepare, settle

PARTS = (
    "eager", "recipes", "blocks", "operators", "inductor", "aot_eager", "schedules", "economy",
    "start", "memory", "watch",
)  # fmt: skip
AT_CASES = (1_000, 5_000, 10_000, 20_000)


def memory_part(seconds: float) -> dict[str, Any]:
    """Resident megabytes of one worker in the eager arm after each of ``AT_CASES`` cases."""
    import narrowfuzz.campaign.preload  # noqa: F401  what every worker starts with
    from plain_hypothesis import quiet_worker

    pages: dict[int, float] = {}
    page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20

    def after(cases: int) -> None:
        if cases in AT_CASES:
            pages[cases] = int(Path("/proc/self/statm").read_text().split()[1]) * page_mb

    with tempfile.TemporaryDirectory() as out:
        worker = quiet_worker(Path(out), ("eager",), after)
        start = time.perf_counter()
        while worker.ran < AT_CASES[-1]:
            worker.serve(Slice("none", 10.0, "linears"), time.monotonic() + 10.0)
    return {"mb": pages, "seconds": time.perf_counter() - start}


def start_part(seconds: float) -> dict[str, Any]:
    """Seconds from the start of ``narrowfuzz run`` to its first verdicts, of three runs.

    The run's own clock starts after its imports, so all time outside that clock is added.
    """
    command = [str(Path(sys.executable).with_name("narrowfuzz")), "run"]
    verdicts, bounds = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            start = time.perf_counter()
            subprocess.run(
                [*command, "--minutes", "0.2", "--workers", "2", "--out", str(out)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            wall = time.perf_counter() - start
            summary = json.loads((out / "summary.json").read_text())
        verdicts.append(summary["first_verdict_seconds"])
        bounds.append(verdicts[-1] + max(0.0, wall - summary["seconds"]))
    return {"first_verdict": verdicts, "from_start": bounds}


def economy_part(seconds: float) -> dict[str, Any]:
    """Counts from a campaign over everything, with two workers and twice ``seconds``."""
    command = [str(Path(sys.executable).with_name("narrowfuzz")), "run", "--seed", "7"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        done = subprocess.run(
            [*command, "--minutes", str(seconds / 30), "--workers", "2", "--out", str(out)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1):
            sys.stderr.buffer.write(done.stderr)
            raise RuntimeError(f"narrowfuzz run ended with exit code {done.returncode}")
        summary = json.loads((out / "summary.json").read_text())
    wanted = ("cases", "specs", "compiles", "seconds", "compile_seconds", "compiled_data_seconds")
    return {name: summary[name] for name in (*wanted, "pairs", "new", "suspected")}


def ladder_part(kind: Any, seconds: float) -> dict[str, Any]:
    """Judged cases and the time for them: as in a campaign (``ours``), and with one compile per
    example on the same Specs (``plain``)."""
    ours = _child(f"ours:{kind}", seconds)
    plain = _child(f"plain:{kind}", 1.5 * seconds, json.dumps(ours["firsts"]))
    done = len(plain["keys"])
    assert plain["keys"] == ours["keys"][:done], "the two sides drew different Specs"
    return {"ours": ours, "plain": plain}


def _child(part: str, seconds: float, extra: str = "", device: str = "cpu") -> dict[str, Any]:
    """Run one part in a fresh process; its result is the last line it prints."""
    command = [sys.executable, __file__, "--child", part, "--seconds", str(seconds)]
    done = subprocess.run(
        [*command, "--firsts", extra, "--device", device], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _run_child(part: str, seconds: float, firsts: str, device: str) -> dict[str, Any]:
    from blocks import blocks_part, operators_part
    from eager import eager_part, recipes_part
    from plain_hypothesis import many_draws_per_compile, one_compile_per_example
    from schedules import schedules_part
    from watch_overhead import overhead_part

    settle()
    side, _, kind = part.partition(":")
    if side == "ours":
        return many_draws_per_compile(kind, seconds)  # type: ignore[arg-type]
    if side == "plain":
        return one_compile_per_example(kind, json.loads(firsts), seconds)  # type: ignore[arg-type]
    if side == "schedules":
        return schedules_part(kind, seconds)
    if part == "memory":
        return memory_part(seconds)
    if part == "watch":
        return overhead_part()
    parts = {"eager": eager_part, "recipes": recipes_part, "blocks": blocks_part}
    parts["operators"] = operators_part
    return parts[part](seconds, enter(device))


class Report:
    """Prints each result with its target, and records in ``met`` whether all targets were met."""

    def __init__(self) -> None:
        self.met = True

    def target(
        self, name: str, value: float, unit: str, least: float, *, most: bool = False
    ) -> None:
        met = value <= least if most else value >= least
        self.met &= met
        sign = "at most" if most else "at least"
        verdict = "met" if met else "MISSED"
        print(f"{name}: {value:.4g} {unit}   target {sign} {least:g}: {verdict}", flush=True)


def _show(report: Report, part: str, found: dict[str, Any]) -> None:
    if part in ("eager", "recipes"):
        _show_eager(report, found, judged=part == "eager")
    elif part in ("inductor", "aot_eager"):
        rates = {}
        for side in ("ours", "plain"):
            s = found[side]
            rates[side] = s["cases"] / s["seconds"] * 60
            print(
                f"  {part}, {side}: {rates[side]:.0f} cases a minute ({s['cases']} cases, "
                f"{len(s['keys'])} Specs, {s['compiles']} compiles in {s['seconds']:.0f} s)"
            )
        least = {"inductor": 100, "aot_eager": 10}[part]
        report.target(f"{part}, ours over plain", rates["ours"] / rates["plain"], "times", least)
    elif part == "blocks":
        _show_blocks(report, found)
    elif part == "operators":
        _show_operators(report, found)
    elif part == "schedules":
        from schedules import TARGETS

        for recipe, rate in found.items():
            name = f"schedules of five events, {recipe}"
            report.target(name, rate["five"], "a second", TARGETS[recipe])
            print(f"  as drawn ({rate['events']:.0f} events): {rate['drawn']:.0f} a second")
    elif part == "economy":
        rate = found["specs"] / found["seconds"] * 60
        met, there = found["pairs"]["all"]
        print(
            f"  {found['cases']} cases of {found['specs']} Specs in {found['seconds']:.0f} s, "
            f"{rate:.0f} Specs a minute, {met} of {there} pairs met"
        )
        compiling, data = found["compile_seconds"], found["compiled_data_seconds"]
        print(f"  {found['compiles']} compiles: {compiling:.0f} s, data on them {data:.0f} s")
        ratio = data / compiling if compiling else 0.0
        report.target("economy, seconds of data over seconds of compiling", ratio, "times", 1)
    elif part == "watch":
        from watch_overhead import MOST

        plain, full = found["plain"], 100 * (found["full"] / found["plain"] - 1)
        print(f"  watch: {plain:.1f} ms a step without it; --full adds {full:.0f} %")
        added = 100 * (found["watched"] / plain - 1)
        report.target("watch, added to an eager step", added, "%", MOST, most=True)
    elif part == "start":
        print(f"  by the run's own clock: {_range(found['first_verdict'])} s")
        worst = statistics.median(found["from_start"])
        report.target("first verdicts after start, median", worst, "s", 12, most=True)
    else:
        mb = {int(cases): value for cases, value in found["mb"].items()}
        growth = (max(mb.values()) / mb[AT_CASES[0]] - 1) * 100
        shown = ", ".join(f"{cases}: {value:.0f} MB" for cases, value in mb.items())
        print(f"  resident after cases {shown} ({found['seconds']:.0f} s)")
        report.target("memory growth after case 1,000", growth, "%", 5, most=True)


def _show_eager(report: Report, found: dict[str, Any], *, judged: bool) -> None:
    """Print shares of raw PyTorch's speed. With ``judged`` they are compared with targets; slow
    ones always are."""
    from eager import LEAST, LEAST_IF_SLOW, SLOW_MS, share

    least = {f"{name} {backend}".strip(): at_least for (name, backend), at_least in LEAST.items()}
    for name, of_recipe in found.items():
        rounds = of_recipe["ms"]
        middle = {k: statistics.median(spent[k] for spent in rounds) for k in rounds[0]}
        shares = share(rounds)
        print(
            f"  eager, {name}, ms a case: {middle['judged']:.2f} judged, {middle['raw']:.2f} raw "
            f"({1e3 / middle['judged']:.0f} and {1e3 / middle['raw']:.0f} cases a second)"
        )
        slow = middle["raw"] >= SLOW_MS
        wanted = LEAST_IF_SLOW if slow else least.get(name) if judged else None
        title = f"eager, {name}, share of raw PyTorch's speed, median of {_range(shares)}"
        if wanted is None:
            print(f"  {title}: {statistics.median(shares):.2f}")
        else:
            report.target(title, statistics.median(shares), "", wanted)
        if "stages" in of_recipe:
            print(f"  raw, built for each case: {middle['raw, built for each']:.2f} ms")
            print("  where the time goes, ms a case:")
            for stage, ms in of_recipe["stages"].items():
                print(f"    {stage:14} {ms:6.3f}")


def _show_blocks(report: Report, found: dict[str, Any]) -> None:
    from blocks import LINEAR_MS

    for name, ms in found.items():
        recipe, model = name.split()
        subject, judge = ms["subject"], ms["judge"]
        print(f"  {recipe}, {model}: {subject:.2f} ms running, {judge:.2f} ms judged")
        most = LINEAR_MS if model == "linear" else round(subject, 2)
        report.target("    overhead", judge - subject, "ms", most, most=True)


def _show_operators(report: Report, found: dict[str, Any]) -> None:
    from blocks import OPERATOR_MS

    for model, ms in found.items():
        subject, judge = ms["subject"], ms["judge"]
        print(f"  {model}: {subject:.2f} ms running, {judge:.2f} ms judged")
        attends = model.startswith(("sdpa", "attention"))
        most = max(OPERATOR_MS, round(subject, 2)) if attends else OPERATOR_MS
        report.target("    overhead", judge - subject, "ms", most, most=True)


def _range(values: list[float]) -> str:
    return f"{len(values)}: {min(values):.3g} to {max(values):.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="measuring time of a part")
    parser.add_argument("--json", type=Path, help="write all numbers here too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME")
    parser.add_argument(
        "--device",
        default="cpu",
        help="of eager, recipes, blocks and operators: cpu, cuda or simulated",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--firsts", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    check_device(args.device)
    prepare()
    if args.child:
        print(json.dumps(_run_child(args.child, args.seconds, args.firsts, args.device)))
        return 0
    settle()
    results: dict[str, Any] = {"environment": describe(), "cores": os.cpu_count()}
    versions = "  ".join(f"{k} {v}" for k, v in results["environment"]["versions"].items())
    print(
        f"{versions}\ncpu {results['environment']['cpu']}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}: the machine is shared, timings move with the neighbours"
    )
    report = Report()
    for part in args.only:
        if part in ("inductor", "aot_eager"):
            results[part] = ladder_part(part, args.seconds)
        elif part == "schedules":
            from schedules import TARGETS

            results[part] = {r: _child(f"schedules:{r}", args.seconds / 3) for r in TARGETS}
        elif part == "economy":
            results[part] = economy_part(args.seconds)
        elif part == "start":
            results[part] = start_part(args.seconds)
        else:
            results[part] = _child(part, args.seconds / 3, device=args.device)
        _show(report, part, results[part])
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if report.met else 1


if __name__ == "__main__":
    sys.exit(main())
