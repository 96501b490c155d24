"""The device of a run: its name, what torch calls it, how it adds what it multiplies.

Nothing here touches CUDA but ``enter``: a process that workers are forked from must not.
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
    Found,
    disagrees,
    reconciled,
)

#: ``simulated``: a Hopper GPU on the CPU. ``cuda:1`` names one GPU, ``cuda`` all that are there.
DEVICES = ("cpu", "cuda", "simulated")
_NAME = re.compile(r"cpu|simulated|cuda(:\d+)?")


@dataclass(frozen=True)
class Device:
    """Where a process runs its cases."""

    #: As a user asks for it.
    name: str = "cpu"
    #: What torch calls it.
    torch: str = "cpu"
    #: How it adds: by the table of its kind, wider where it was seen to leave that.
    accumulators: Accumulators = field(default_factory=lambda: CPU)
    #: What of that was measured, by the names of accumulators; empty: nothing was.
    seen: Mapping[str, Found] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """As recorded beside findings."""
        adds = {kind: str(found) for kind, found in self.seen.items()}
        gpus = asdict(seen_here()) if self.name.startswith("cuda") else {}
        return {"name": self.name, "adds": adds, **gpus}

    def profile(self) -> list[str]:
        """How it adds, a line each, and where that is not what was expected."""
        lines = [f"{kind}: {found}" for kind, found in self.seen.items()]
        usual = expected(self.torch)
        for kind, found in self.seen.items():
            of = usual.get(kind.replace(" rowwise", ""), UNKNOWN)
            if why := disagrees(of, found):
                lines.append(
                    f"{kind} ACCUMULATES DIFFERENTLY THAN EXPECTED: {why}; the wider one is used"
                )
        return lines


def check_device(name: str, workers: int = 1) -> None:
    """Raises ValueError with the remedy for a device that so many workers cannot run on."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"--device must be one of {', '.join(DEVICES)} or cuda:N, got {name!r}")
    if name.startswith("cuda") and (why := problem(name, ask(), workers)):
        raise ValueError(f"--device {name}: {why}")
    if name == "simulated" and importlib.util.find_spec("mmaemu") is None:
        raise ValueError("--device simulated needs mmaemu: pip install mmaemu")


def forks(name: str) -> bool:
    """May a process that runs on the device be copied by a fork? CUDA does not survive one."""
    return not name.startswith("cuda")


def default_workers(name: str) -> int:
    """One for each GPU that is used, or each core. Raises ValueError if torch cannot be asked."""
    if not name.startswith("cuda"):
        return os.cpu_count() or 1
    return 1 if ":" in name else max(1, len(ask().gpus))


def choose(name: str, worker: int = 0) -> None:
    """Of several GPUs let this process, and those it starts, see one: the named one, else its
    worker's. Call before CUDA is touched, and as often as wanted: a process that was started by one
    that has chosen may choose another."""
    if not name.startswith("cuda"):
        return
    there = gpus()
    os.environ[ALL] = ",".join(there)
    number = int(name.partition(":")[2]) if ":" in name else worker % len(there)
    os.environ["CUDA_VISIBLE_DEVICES"] = there[number]


def torch_name(name: str) -> str:
    """What torch calls the device, in a process that has begun on it."""
    return "cpu" if name == "cpu" else "cuda"


def asked_here(name: str) -> str:
    """The device that a process asks recipes about that has not begun on it. Of a simulated one
    only who has can say more than of the CPU."""
    return "cpu" if name == "simulated" else torch_name(name)


def begin(name: str) -> None:
    """Make this process one that runs on the device."""
    if name == "simulated":
        from narrowfuzz.machine.simulated import simulate

        simulate()


def enter(name: str, worker: int | None = None) -> Device:
    """Make this process one that runs cases on the device, and see how that adds: by the table of
    its kind, or wider where the device itself shows more. Of several GPUs it takes this worker's;
    None: that of the process that started it."""
    from narrowfuzz.machine.ladders import measure

    if worker is not None:
        choose(name, worker)
    settle()
    begin(name)
    there = torch_name(name)
    seen = measure(there)
    return Device(name, there, reconciled(expected(there), seen), seen)


def expected(device: str) -> Accumulators:
    """How devices add that are of the same kind as torch's ``device``."""
    if device == "cpu":
        return CPU
    import torch

    major, _ = torch.cuda.get_device_capability()
    return HOPPER if major == 9 else UNKNOWN_DEVICE
