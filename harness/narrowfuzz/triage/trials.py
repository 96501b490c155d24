"""Tries entries of the ledger on versions or devices that they do not name.

The entry's script runs once, in a fresh process, and shows whether the divergence is still there.
The answer is stored on disk under a hash of the script, of the sources of the libraries that the
entry is about, of torch's version, of the CPU and the device, so a changed checkout is tried again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.machine.machine import machine
from narrowfuzz.triage.verify import GONE, ScriptRun, run_script

Answer = Literal["shows", "gone", "cannot tell"]


def cache_dir() -> Path:
    """The folder that stores answers: ``trials`` in $NARROWFUZZ_CACHE or ~/.cache/narrowfuzz."""
    root = os.environ.get("NARROWFUZZ_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "narrowfuzz") / "trials"


class Trials:
    """Tries an entry when its answer is needed, each entry once; ``answers`` holds the answers so
    far, by entry id."""

    def __init__(self, run: Callable[[Path], ScriptRun] | None = None, device: str = "cpu") -> None:
        self.run, self.device = run or partial(run_on, device), device
        self.answers: dict[str, Answer] = {}
        self._returned: set[str] = set()

    def new_answers(self) -> list[tuple[str, Answer]]:
        """The answers that no earlier call has returned."""
        fresh = [
            (name, answer) for name, answer in self.answers.items() if name not in self._returned
        ]
        self._returned.update(name for name, _ in fresh)
        return fresh

    def __call__(self, entry: Entry) -> bool:
        """True if the entry's divergence shows with what is installed here."""
        if entry.id not in self.answers:
            self.answers[entry.id] = self._ask(entry)
        return self.answers[entry.id] == "shows"

    def _ask(self, entry: Entry) -> Answer:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{entry.id}-{_identity(entry, self.device)}.json"
        with (folder / f"{entry.id}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # workers try the same entries
            if file.is_file():
                answer: Answer = json.loads(file.read_text())["answer"]
                return answer
            result = self.run(entry.path)
            answer = _answer(result)
            if result.code is None:  # out of time: not stored, as it may finish another day
                return answer
            file.write_text(json.dumps({"answer": answer, "output": result.output}, indent=2))
        return answer


_ON_GPU = """\
import runpy, torch
torch.set_default_device("cuda")
cpus = torch.autocast
torch.autocast = torch.amp.autocast = lambda device, *args, **kwargs: cpus("cuda", *args, **kwargs)
runpy.run_path({path!r}, run_name="__main__")
"""


def run_on(device: str, path: Path) -> ScriptRun:
    """Run an entry's script, which was written on a CPU, on a device."""
    if not device.startswith("cuda"):
        return run_script(path, device=device)
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
        moved = Path(folder) / path.name
        moved.write_text(_ON_GPU.format(path=str(path)))
        return run_script(moved)


def _answer(result: ScriptRun) -> Answer:
    if result.shown or result.crashed:
        return "shows"
    return "gone" if result.code == GONE else "cannot tell"


def _identity(entry: Entry, device: str) -> str:
    """Hash of all that the answer depends on."""
    here = machine()
    lines = [
        hashlib.sha256(entry.path.read_bytes()).hexdigest(),
        *(f"{package} {source_hash(package)}" for package in sorted({"torch", *entry.versions})),
        " ".join(here.cpu),
        here.compiler,
        *([] if device == "cpu" else [device]),
        json.dumps(here.kernels, sort_keys=True),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@functools.cache
def source_hash(package: str) -> str:
    """Hash of a package's Python sources as they would be imported, "absent" if it is not
    installed. For torch, whose compiled part decides, its version and commit instead."""
    if package == "torch":
        import torch

        return f"{torch.__version__} {torch.version.git_version}"
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return "absent"
    digest = hashlib.sha256()
    root = Path(found.origin).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def trials_line(answers: dict[str, Answer], unnamed: int) -> str:
    """A line that counts how many entries that name other versions, or another device, still hold
    here; "" if there are no such entries. ``unnamed`` is their number."""
    if not unnamed and not answers:
        return ""
    counts = Counter(answers.values())
    parts = [
        f"{counts['shows']} still show",
        f"{counts['gone']} are gone",
        *([f"{counts['cannot tell']} could not run"] if counts["cannot tell"] else []),
        f"{max(0, unnamed - len(answers))} were not tried",
    ]
    return f"ledger entries that name other versions than these: {', '.join(parts)}"
