"""``narrowfuzz list`` and ``narrowfuzz doctor``."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from narrowfuzz.environment import prepare, versions
from narrowfuzz.recipe import unknown
from narrowfuzz.verified import load_verified

_KINDS = ("recipes", "models", "arms", "oracles", "faults", "controls", "known", "coverage")


def list_command(
    what: str,
    files: tuple[Path, ...],
    recipes: tuple[str, ...] = (),
    arms: tuple[str, ...] = (),
) -> None:
    """Print one kind of thing; of what is known that which these recipes may show on these arms.
    Raises ValueError for a kind, a recipe or an arm that does not exist."""
    if what not in _KINDS:
        raise ValueError(unknown("list", what, _KINDS))
    if (recipes or arms) and what != "known":
        raise ValueError(f"--recipe and --arm choose from what is known: list {what} takes none")
    prepare()
    header, rows = _known(files, recipes, arms) if what == "known" else _rows(what, files)
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 160
    Console(highlight=False, markup=False, width=width).print(table)


def _rows(what: str, files: tuple[Path, ...]) -> tuple[tuple[str, ...], Iterable[tuple[str, ...]]]:
    if what == "recipes":
        from narrowfuzz.recipe import load_every, obstacles

        return ("recipe", "backends", "what", "here"), (
            (r.name, ", ".join(r.backends) or "its own", r.title, _here(obstacles(r, "cpu")))
            for r in load_every(files).values()
        )
    if what == "models":
        from narrowfuzz.catalog import MODELS

        return ("model", "what"), ((m.name, m.title) for m in MODELS.values())
    if what == "arms":
        from narrowfuzz.arm import LADDER
        from narrowfuzz.arms.ladder import unavailable

        return ("arm", "what", "here"), (
            (a.name, a.title, unavailable(a) or "available") for a in LADDER
        )
    if what == "oracles":
        from narrowfuzz.oracles import BY_NAME

        return ("rule", "what", "strength", "level", "applies where"), (
            (o.name, o.title, o.strength, o.level, o.precondition) for o in BY_NAME.values()
        )
    if what in ("faults", "controls"):
        from narrowfuzz.plants.registry import builtin_controls, builtin_faults

        plants = (builtin_faults if what == "faults" else builtin_controls)().values()
        return (what[:-1], "family", "what", "recipes", "needs"), (
            (p.id, p.family, p.title, ", ".join(p.recipes), p.needs) for p in plants
        )
    if what == "coverage":
        from narrowfuzz.factors import rows
        from narrowfuzz.recipe import load_recipes, runnable

        able = {n: r for n, x in load_recipes(files).items() if (r := runnable(x, "cpu"))}
        return ("recipe", "factor", "drawn", "not applicable", "not yet"), rows(able)
    raise AssertionError(what)


def _known(
    files: tuple[Path, ...], recipes: tuple[str, ...], arms: tuple[str, ...]
) -> tuple[tuple[str, ...], Iterable[tuple[str, ...]]]:
    from narrowfuzz.advice import applying
    from narrowfuzz.arm import BY_NAME
    from narrowfuzz.arms.ladder import select_arms
    from narrowfuzz.ledger import load_entries
    from narrowfuzz.machine import machine
    from narrowfuzz.recipe import load_every, select

    entries = load_entries()
    if recipes or arms:
        chosen = select(load_every(files, recipes), recipes).values()
        entries = applying(entries, chosen, [BY_NAME[n] for n in select_arms(arms)], machine())
    return ("entry", "severity", "recipes", "what", "what helps", "link"), (
        (e.id, e.severity, ", ".join(e.recipes), e.title, e.workaround, (*e.links, "")[0])
        for e in entries
    )


def known_command(id: str) -> None:
    """Print an entry of the ledger. Raises ValueError with the nearest match."""
    from narrowfuzz.ledger import load_entries

    entries = {entry.id: entry for entry in load_entries()}
    if id not in entries:
        raise ValueError(unknown("entry", id, entries))
    entry = entries[id]
    console = Console(highlight=False, markup=False)
    versions_ = ", ".join(f"{name} {wanted}" for name, wanted in entry.versions.items())
    parts = {
        "": f"{entry.title}\n\n{entry.explanation.strip()}",
        "severity": f"{entry.severity} ({entry.symptom}, the use is {entry.use})",
        "expected": entry.expected,
        "what helps": entry.workaround,
        "cured": entry.cured or "in no version that was tried",
        "recipes": ", ".join(entry.recipes),
        "versions": versions_,
        "seen on": ", ".join(entry.hardware),
        "documentation": entry.documentation,
        "links": " ".join(entry.links) or f"none: {entry.searched}",
        "script": str(entry.path),
    }
    for name, text in parts.items():
        console.print(f"{name}: {text}" if name else f"{text}\n", soft_wrap=True)


def _here(lacking: dict[str, str]) -> str:
    reasons = [f"not {backend}: {why}" if backend else why for backend, why in lacking.items()]
    return "\n".join(reasons) or "available"


def doctor_command() -> int:
    """Print what this machine has and lacks; returns 0 if the main job can run, else 2."""
    prepare()
    console = Console(highlight=False, markup=False)
    found = versions()
    for name, version in found.items():
        console.print(f"{name:12} {version}")
    problems = []
    if found["torch"] == "absent":
        problems.append("torch is not installed: pip install torch==2.13.0")
    else:
        _torch_facts(console)
    console.print(f"{'g++':12} {shutil.which('g++') or 'absent: compiled arms cannot run'}")
    from narrowfuzz.arm import LADDER
    from narrowfuzz.arms.ladder import unavailable
    from narrowfuzz.gpu import ask
    from narrowfuzz.ledger import load_entries

    for arm in LADDER:
        console.print(f"{'arm':12} {arm.name}: {unavailable(arm) or 'available'}")
        if found["torch"] != "absent" and ask().gpus:
            there = unavailable(arm, "cuda") or "available"
            console.print(f"{'arm on GPUs':12} {arm.name}: {there}")
    for record in load_verified():
        console.print(f"{'verified':12} {record.sentence()}", soft_wrap=True)
    here = {(record.torch, record.torchao) for record in load_verified()}
    if (found["torch"], found["torchao"]) not in here:
        console.print(
            f"{'verified':12} these versions: not yet; entries are tried by their scripts"
        )
    due = [entry.id for entry in load_entries() if entry.review < time.strftime("%Y-%m-%d")]
    console.print(
        f"{'ledger':12} {len(due)} entries are due for review{': ' * bool(due)}{', '.join(due)}"
    )
    for problem in problems:
        console.print(f"problem: {problem}")
    return 2 if problems else 0


def _torch_facts(console: Console) -> None:
    import torch

    from narrowfuzz.device import enter
    from narrowfuzz.environment import settle
    from narrowfuzz.gpu import ask, problem
    from narrowfuzz.machine import machine
    from narrowfuzz.policy import cast_policies

    settle()
    here = machine()
    console.print(f"{'cpu':12} {torch.backends.cpu.get_cpu_capability()}: {', '.join(here.cpu)}")
    console.print(f"{'oneDNN':12} {here.onednn or 'absent'}")
    console.print(f"{'compiler':12} {here.compiler or 'none: nothing that Inductor writes runs'}")
    for kind, kernel in here.kernels.items():
        console.print(f"{'multiplies':12} {kind}: {kernel or 'nothing'}")
    for kind, error in here.lacks.items():
        console.print(f"{'lacks':12} {kind}: {error}", soft_wrap=True)
    found = ask()
    for number, gpu in enumerate(found.gpus):
        console.print(f"{'gpu':12} cuda:{number}: {gpu.name}, {gpu.free / 2**30:.1f} GiB free")
    if why := problem("cuda", found, 1):
        console.print(f"{'gpu':12} none: {why}", soft_wrap=True)
    for line in enter("cpu").profile():
        console.print(f"{'adds':12} {line}", soft_wrap=True)
    for name, policy in cast_policies().items():
        console.print(f"{'cast':12} {name}: {policy}")
