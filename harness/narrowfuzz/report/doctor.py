"""``narrowfuzz doctor``: what this machine has and lacks, and what was verified on its versions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

from narrowfuzz.ledger.verified import load_verified
from narrowfuzz.machine.environment import checkouts, prepare, versions
from narrowfuzz.recipe.content import in_checkout
from narrowfuzz.report.terminal import console

#: What is used instead of a package that is absent.
_INSTEAD = {
    "transformer_engine": ": te.* recipes install its Python package into a separate folder on "
    "first use, and emulate its compiled extension"
}
#: The results of ``doctor``, by topic.
Report = dict[str, Any]


def examine() -> Report:
    """The results on all topics; ``problems`` is empty if narrowfuzz can run here at all."""
    prepare()
    found = versions()
    there = found["torch"] != "absent"
    return {
        "versions": found,
        "checkouts": checkouts(),
        "machine": _machine() if there else {},
        "g++": shutil.which("g++") or "",
        "arms": _arms(there),
        "verified": _verified(found),
        "ledger": _ledger(),
        "problems": [] if there else ["torch is not installed: pip install torch==2.13.0"],
    }


def _machine() -> dict[str, Any]:
    import torch

    from narrowfuzz.machine.device import enter
    from narrowfuzz.machine.gpu import ask, problem
    from narrowfuzz.machine.machine import machine
    from narrowfuzz.machine.policy import cast_policies

    device, here, gpus = enter("cpu"), machine(), ask()
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        **here.describe(),
        "gpus": [{"name": gpu.name, "free": gpu.free} for gpu in gpus.gpus],
        "no_gpu": problem("cuda", gpus, 1),
        "adds": device.profile(),
        "policies": cast_policies(),
    }


def _arms(torch_there: bool) -> list[dict[str, str]]:
    from narrowfuzz.arms.available import unavailable
    from narrowfuzz.case.ladder import LADDER
    from narrowfuzz.machine.gpu import ask

    devices = {"here": "cpu"}
    if torch_there and ask().gpus:
        devices["on_gpus"] = "cuda"
    return [
        {"id": arm.name}
        | {where: unavailable(arm, device) or "available" for where, device in devices.items()}
        for arm in LADDER
    ]


def _verified(found: dict[str, str]) -> dict[str, Any]:
    from narrowfuzz.ledger.ledger import standing

    records = load_verified()
    here = any((r.torch, r.torchao) == (found["torch"], found["torchao"]) for r in records)
    every = [how for _, how in standing()]
    remedy = "the scripts of the others run before they explain a finding"
    if in_checkout():
        remedy += "; python benchmarks/versions.py runs all of them, and records the results"
    return {
        "records": [record.sentence() for record in records],
        "these_versions": here,
        "named": f"{every.count('named')} of {len(every)} known issues name the installed versions",
        "remedy": "" if here else remedy,
    }


def _ledger() -> dict[str, Any]:
    from narrowfuzz.ledger.ledger import load_entries

    entries, today = load_entries(), time.strftime("%Y-%m-%d")
    due = [entry.id for entry in entries if entry.review < today]
    return {"entries": len(entries), "due": due}


def print_report(report: Report) -> None:
    """Print the results line by line, each with its topic first."""
    page = console(markup=False)
    for topic, text in _lines(report):
        page.print(f"{topic:12} {text}")
    for problem in report["problems"]:
        page.print(f"problem: {problem}")


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    for package, version in report["versions"].items():
        yield package, version + _INSTEAD.get(package, "") * (version == "absent")
    for package, folder in report["checkouts"].items():
        yield package, f"not a release, but the checkout in {folder}"
    if report["machine"]:
        yield from _lines_of_machine(report["machine"])
    yield "g++", report["g++"] or "not found: Inductor's C++ code cannot be compiled"
    for arm in report["arms"]:
        yield "arm", f"{arm['id']}: {arm['here']}"
        if "on_gpus" in arm:
            yield "arm on GPUs", f"{arm['id']}: {arm['on_gpus']}"
    for record in report["verified"]["records"]:
        yield "verified", record
    if not report["verified"]["these_versions"]:
        named, remedy = report["verified"]["named"], report["verified"]["remedy"]
        yield "verified", f"not with these versions: {named}; {remedy}"
    due = report["ledger"]["due"]
    yield "known", f"{len(due)} known issues are due for review{': ' * bool(due)}{', '.join(due)}"


def _lines_of_machine(here: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "cpu", f"{here['capability']}: {', '.join(here['cpu'])}"
    yield "oneDNN", here["onednn"] or "absent"
    yield "compiler", here["compiler"] or "none: Inductor's C++ code cannot be compiled"
    for kind, kernel in here["kernels"].items():
        yield "matmul", f"{kind}: {kernel or 'no kernel'}"
    for kind, error in here["lacks"].items():
        yield "missing", f"{kind}: {error}"
    for number, gpu in enumerate(here["gpus"]):
        yield "gpu", f"cuda:{number}: {gpu['name']}, {gpu['free'] / 2**30:.1f} GiB free"
    if here["no_gpu"]:
        yield "gpu", f"none: {here['no_gpu']}"
    for line in here["adds"]:
        yield "accumulates", line
    for name, policy in here["policies"].items():
        yield "cast", f"{name}: {policy}"
