"""``make score``: measure in one run how many bugs the tool finds.

``narrowfuzz score`` searches for every planted fault and runs every clean control; two plain tests
search for the same faults; ``narrowfuzz vacuity`` determines for every passing check whether it
could have failed. The results are printed side by side; ``--write`` puts the tables into
docs/detection.md.

    python benchmarks/detection.py --seconds 60 --out reports/runs/score --write
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from narrowfuzz.power.recall import WITHIN
from narrowfuzz.power.record import Miss

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "detection.md"
#: Reasons why faults are missed, by id. A missed fault without an entry is not understood.
MISSED = HERE / "missed.toml"
BEGIN, END = "<!-- tables: make score -->", "<!-- end of tables -->"
_PLAIN = {
    "hypothesis": "plain Hypothesis test: eager against torch.compile",
    "suite": "fixed shapes, the libraries' own thresholds",
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the selected parts, each of which writes its JSON into the folder. Returns the contents
    of all JSON files there and the exit codes."""
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = str(args.seconds)
    ours = [sys.executable, "-m", "narrowfuzz"]
    commands = {
        "score": [*ours, "score", "--seconds", seconds],
        "baselines": [
            sys.executable,
            str(HERE / "baselines.py"),
            "--seconds",
            str(args.plain_seconds),
        ],
        "vacuity": [*ours, "vacuity", "--cases", str(args.cases)],
    }
    found: dict[str, Any] = {}
    for name, command in commands.items():
        file = args.out / f"{name}.json"
        if name in args.parts:
            started = time.monotonic()
            print(f"== {name}", flush=True)
            code = subprocess.run([*command, "--json", str(file)], check=False).returncode
            print(f"== {name}: exit {code}, {time.monotonic() - started:.0f} s", flush=True)
            found[f"{name} exit"] = code
        if file.is_file():
            found[name] = json.loads(file.read_text())
    return found


def recalls(found: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """(test, faults found, all faults, false alarms) of narrowfuzz and the plain tests, on the same
    faults."""
    faults = [f for f in found["score"]["faults"] if not f["problem"]]
    alarms = len(found["score"]["summary"]["false_alarms"])  # on the controls
    yield "narrowfuzz", sum(f["found"] for f in faults), len(faults), alarms
    plain = found.get("baselines", {"faults": {}})["faults"]
    for name, words in _PLAIN.items():
        both = [plain[f["id"]][name] for f in faults if f["id"] in plain]
        if both:
            alarms = sum(r["false_alarm"] for r in both)
            yield words, sum(r["found"] for r in both), len(both), alarms


def tables(found: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    """The page's tables, in Markdown."""
    score, summary = found["score"], found["score"]["summary"]
    versions = score["versions"]
    yield (
        f"Measured with torch {versions['torch']}, torchao {versions['torchao']}, two cores, no "
        f"GPU; seed {score['seed']}, {score['seconds']:g} s a fault, "
        f"{score['compiled_seconds']:g} s where only compiled runs show it.\n"
    )
    yield "| test | faults found | of | false alarms |\n| --- | ---: | ---: | ---: |"
    for name, hits, of, alarms in recalls(found):
        yield f"| {name} | {hits} | {of} | {alarms} |"
    controls = score["controls"]
    yield (
        f"\nIn libraries {_of(summary['libraries'])}, in our own references "
        f"{_of(summary['references'])}; needing a compiler {_of(summary['compiled'])}. Clean "
        f"controls: {len(controls)}, {sum(c['cases'] for c in controls)} cases, "
        f"{len(summary['false_alarms'])} false alarms.\n"
    )
    yield from _speeds(summary["speeds"])
    yield "| family | found | of | 95 % interval |\n| --- | ---: | ---: | --- |"
    for name, share in summary["families"].items():
        interval = f"{share['low']:.0%} to {share['high']:.0%}"
        yield f"| {name} | {share['found']} | {share['of']} | {interval} |"
    yield from _misses(score["faults"], why)
    if "vacuity" in found:
        yield from _vacuity(found["vacuity"])


def _speeds(speeds: Mapping[str, Any]) -> Iterator[str]:
    within = [f"within {most} s" for most in WITHIN]
    yield f"| faults | searched for | {' | '.join(within)} | median s | 90th percentile s |"
    yield "| --- |" + " ---: |" * (len(within) + 3)
    for kind, speed in speeds.items():
        counts = " | ".join(map(str, speed["within"].values()))
        ends = f"{speed['median']} | {speed['ninetieth']}"
        yield f"| {kind} | {speed['of']} | {counts} | {ends} |"
    yield ""


def _of(share: Mapping[str, Any]) -> str:
    return f"{share['found']} of {share['of']}"


def _misses(faults: Sequence[Mapping[str, Any]], why: Mapping[str, str]) -> Iterator[str]:
    missed = [f for f in faults if not f["found"]]
    if not missed:
        return
    yield "\n| missed | what it is | why |\n| --- | --- | --- |"
    for fault in missed:
        measured = msgspec.convert(fault["miss"], Miss).why if fault.get("miss") else ""
        known = why.get(fault["id"], "" if measured else "not understood yet")
        reason = fault["problem"] or "; ".join(filter(None, (measured, known)))
        yield f"| {fault['id']} | {fault['title']} | {reason} |"


def _vacuity(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "\n| rule | passes | could not have failed | share |\n| --- | ---: | ---: | ---: |"
    for rule in sorted({row["rule"] for row in rows}):
        mine = [row for row in rows if row["rule"] == rule]
        passes, idle = sum(r["passes"] for r in mine), sum(r["vacuous"] for r in mine)
        if passes:
            yield f"| {rule} | {passes} | {idle} | {idle / passes:.1%} |"


def write(page: Path, lines: Sequence[str]) -> None:
    """Put the tables between the page's marks. Raises ValueError if the page lacks the marks."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    lines = [*_with_kept(lines, rest.partition(END)[0])]
    page.write_text(f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}")


def _with_kept(lines: Sequence[str], old: str) -> Iterator[str]:
    """The tables, with the old text for parts that were not measured this time: the rows of the
    plain tests, which do not depend on narrowfuzz, and the table of vacuous passes."""
    rows = tuple(f"| {words} |" for words in _PLAIN.values())
    plain_rows = [line for line in old.splitlines() if line.startswith(rows)]
    anew = any(line.startswith(rows) for line in lines)
    for line in lines:
        yield line
        if line.startswith("| narrowfuzz |") and not anew:
            yield from plain_rows
    if not any("| rule | passes |" in line for line in lines) and "| rule | passes |" in old:
        yield "\n" + old[old.index("| rule | passes |") :].rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="a fault; 10 times if compiled")
    parser.add_argument("--plain-seconds", type=float, default=20.0, help="a plain test, a fault")
    parser.add_argument("--cases", type=int, default=300, help="for vacuity")
    parser.add_argument("--out", type=Path, default=Path(f"reports/runs/score-{int(time.time())}"))
    parser.add_argument("--parts", nargs="*", default=["score", "baselines", "vacuity"])
    parser.add_argument("--write", action="store_true", help="renew the tables of the page")
    args = parser.parse_args()
    found = measure(args)
    if "score" in found:
        lines = list(tables(found, tomllib.loads(MISSED.read_text())))
        print("\n".join(lines))
        if args.write:
            write(PAGE, lines)
    return max((code for name, code in found.items() if name.endswith(" exit")), default=0)


if __name__ == "__main__":
    sys.exit(main())
