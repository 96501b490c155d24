"""``narrowfuzz compare``: the same cases on two installations, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from narrowfuzz.exits import CLEAN, FOUND, OURS
from narrowfuzz.overlay import folder_of

#: What a run ends with if it came to its end.
_ENDED = (0, 1)


@dataclass(frozen=True)
class Side:
    """One of the two: a Python, and what is put before its packages."""

    title: str
    python: str
    overlay: str = ""


def side_of(text: str) -> Side:
    """A Python, the folder of an environment, a folder of packages to lay over this one's, or
    PACKAGE==VERSION of one.

    Raises ValueError if it is none of these.
    """
    path = Path(text)
    if "==" in text:
        return Side(text, sys.executable, str(folder_of(text)))
    if path.is_file() and os.access(path, os.X_OK):
        return Side(text, str(path))
    if (path / "bin" / "python").is_file():
        return Side(text, str(path / "bin" / "python"))
    if path.is_dir():
        return Side(text, sys.executable, str(path.resolve()))
    raise ValueError(
        f"{text!r} is no Python, no environment, no folder of packages and no PACKAGE==VERSION"
    )


def compare_command(
    first: str, second: str, *, cases: int, seed: int, workers: int, out: Path, more: Sequence[str]
) -> int:
    """Run the same cases on both; returns 0 if both show the same, 1 if not, 3 if a run did not
    come to its end. ``more``: options of ``run`` for both. What the ledger knows is shown as well:
    it may be what differs. Raises ValueError for a side that is none, or a folder that is used."""
    sides = [side_of(first), side_of(second)]
    if out.exists():
        raise ValueError(f"--out {out} is there already: name another folder")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    found: list[dict[str, dict[str, Any]]] = []
    digests: list[str] = []
    for letter, side in zip("AB", sides, strict=True):
        console.print(f"{letter}: {escape(side.title)}", soft_wrap=True)
        folder = out / letter
        code = _run(side, folder, ["--cases", str(cases), "--seed", str(seed),
                                   "--workers", str(workers), "--no-ledger", *more])  # fmt: skip
        if code not in _ENDED:
            console.print(f"its run ended with {code}: {escape(str(folder))}.log says why")
            return OURS
        rows = map(json.loads, (folder / "findings.jsonl").read_text().splitlines())
        found.append({row["fingerprint"]: row for row in rows})
        digests.append(json.loads((folder / "summary.json").read_text())["cases_digest"])
    return _tell(console, found, digests)


def _run(side: Side, folder: Path, options: Sequence[str]) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True)
    over = os.pathsep.join(filter(None, (side.overlay, os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, **({"PYTHONPATH": over} if over else {})}
    with Path(f"{folder}.log").open("w") as log:
        command = [side.python, "-m", "narrowfuzz", "run", *options, "--out", str(folder)]
        return subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT).returncode


def _tell(
    console: Console, found: Sequence[dict[str, dict[str, Any]]], digests: Sequence[str]
) -> int:
    a, b = found
    if digests[0] != digests[1]:
        console.print(
            "[yellow]the two did not judge the same cases[/]: recipes or arms that run on one do "
            "not on the other; single findings compare, counts do not"
        )
    for title, names in (
        ("only A", a.keys() - b.keys()), ("only B", b.keys() - a.keys()),
        ("both", a.keys() & b.keys()),
    ):  # fmt: skip
        console.print(f"[bold]{title}: {len(names)}[/]")
        for name in sorted(names):
            sides: dict[str, list[str]] = {}
            for letter, rows in zip("AB", found, strict=True):
                if name in rows:
                    sides.setdefault(_said(rows[name]), []).append(letter)
            for text, letters in sides.items():
                console.print(f"  {', '.join(letters)}: {escape(text)}", soft_wrap=True)
    return CLEAN if a.keys() == b.keys() else FOUND


def _said(row: dict[str, Any]) -> str:
    return f"{row['severity']}, {row['sentence']} ({row['recipe']}, {row['arm']})"
