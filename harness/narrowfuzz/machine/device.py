"""The device of a run: its name, torch's name of it, and how its multiplies add.

Only ``enter``, ``expected`` and a Device's ``describe`` and ``profile`` initialise CUDA: a process
from which workers are forked must not call them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowfuzz.machine.environment import settle
from narrowfuzz.machine.gpu import ALL, ask, gpus, problem, seen_here
from narrowfuzz.numerics.accumulator import (
    CPU,
    HOPPER,
    UNKNOWN,
    UNKNOWN_DEVICE,
    Accumulators,
    MeasuredAccumulator,
    disagrees,
    reconciled,
)

#: ``simulated`` is a Hopper GPU simulated on the CPU. ``cuda:1`` names one GPU, ``cuda`` all.
DEVICES = ("cpu", "cuda", "simulated")
_NAME = re.compile(r"cpu|simulated|cuda(:\d+)?")


@dataclass(frozen=True)
class Device:
    """The device on which a process runs its cases."""

    #: Its name on the command line.
    name: str = "cpu"
    #: Its name in torch.
    torch: str = "cpu"
    #: How it adds: from the table for its kind of device, with wider bounds where measurements
    #: disagree.
    accumulators: Accumulators = field(default_factory=lambda: CPU)
    #: The measurements, by the names of accumulators; empty if none were made.
    seen: Mapping[str, MeasuredAccumulator] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The device as a dict, as it is recorded beside findings."""
        adds = {kind: str(found) for kind, found in self.seen.items()}
        gpus = asdict(seen_here()) if self.name.startswith("cuda") else {}
        return {"name": self.name, "adds": adds, **gpus}

    def profile(self) -> list[str]:
        """Lines that report how it adds, and where that differs from the expected."""
        lines = [f"{kind}: {found}" for kind, found in self.seen.items()]
        differently = "ACCUMULATES DIFFERENTLY THAN EXPECTED"
        return lines + [
            f"{kind} {differently}: {why}; the wider one is used"
            for kind, why in self.disagreements().items()
        ]

    def disagreements(self) -> dict[str, str]:
        """The accumulators whose measurement is not what is expected, and how they differ."""
        usual = expected(self.torch)
        found = {
            kind: disagrees(usual.get(kind.replace(" rowwise", ""), UNKNOWN), measured)
            for kind, measured in self.seen.items()
        }
        return {kind: why for kind, why in found.items() if why}


def check_device(name: str, workers: int = 1) -> None:
    """Raises ValueError, with the remedy, for a device that this many workers cannot run on."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"--device must be one of {', '.join(DEVICES)} or cuda:N, got {name!r}")
    if name.startswith("cuda") and (why := problem(name, ask(), workers)):
        raise ValueError(f"--device {name}: {why}")
    if name == "simulated" and importlib.util.find_spec("mmaemu") is None:
        raise ValueError("--device simulated needs mmaemu: pip install mmaemu")


def forks(name: str) -> bool:
    """May a process that runs on the device be forked? CUDA does not survive a fork."""
    return not name.startswith("cuda")


def default_workers(name: str) -> int:
    """One worker for each GPU that is used, or for each core on a CPU. Raises ValueError if the
    GPUs cannot be queried."""
    if not name.startswith("cuda"):
        return os.cpu_count() or 1
    return 1 if ":" in name else max(1, len(ask().gpus))


def choose(name: str, worker: int = 0) -> None:
    """Let this process, and those that it starts, see only one of several GPUs: the named one, or
    else that of its ``worker``. Call it before CUDA is initialised. It may be called again: a
    process whose parent has chosen a GPU may choose another."""
    if not name.startswith("cuda"):
        return
    there = gpus()
    os.environ[ALL] = ",".join(there)
    number = int(name.partition(":")[2]) if ":" in name else worker % len(there)
    os.environ["CUDA_VISIBLE_DEVICES"] = there[number]


def torch_name(name: str) -> str:
    """torch's name of the device, in a process for which ``begin`` was called."""
    return "cpu" if name == "cpu" else "cuda"


def torch_name_before_begin(name: str) -> str:
    """torch's name of the device in a process for which ``begin`` was not called, to query recipes
    with. For a simulated GPU it is the CPU, as nothing is simulated there."""
    return "cpu" if name == "simulated" else torch_name(name)


def begin(name: str) -> None:
    """Make this process one that runs on the device."""
    if name == "simulated":
        from narrowfuzz.machine.simulated import simulate

        simulate()


def enter(name: str, worker: int | None = None, *, compiles: bool = True) -> Device:
    """Make this process one that runs cases on the device, and measure how that adds: the result
    has the accumulators of its kind of device, wider ones where measurements disagree. Of several
    GPUs it takes this worker's; with None, the one that its parent process has chosen. ``compiles``
    is that of ``settle``."""
    if worker is not None:
        choose(name, worker)
    settle(compiles=compiles)
    from narrowfuzz.machine.accumulator_probe import measure

    begin(name)
    there = torch_name(name)
    seen = measure(there)
    return Device(name, there, reconciled(expected(there), seen), seen)


def expected(device: str) -> Accumulators:
    """How devices of the same kind as torch's ``device`` are documented to add."""
    if device == "cpu":
        return CPU
    import torch

    major, _ = torch.cuda.get_device_capability()
    return HOPPER if major == 9 else UNKNOWN_DEVICE
