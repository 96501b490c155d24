"""The device of a run: what torch calls it, whether it is there, how it adds what it multiplies."""

from __future__ import annotations

import importlib.util

from narrowfuzz.numerics.accumulator import CPU, HOPPER, UNKNOWN_DEVICE, Accumulators

#: ``simulated``: a Hopper GPU on the CPU.
DEVICES = ("cpu", "cuda", "simulated")


def check_device(name: str) -> None:
    """Raises ValueError with the remedy for a device that is not here."""
    if name not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "--device cuda: torch sees no CUDA device here; run with --device cpu or simulated"
            )
    if name == "simulated" and importlib.util.find_spec("mmaemu") is None:
        raise ValueError("--device simulated needs mmaemu: pip install mmaemu")


def enter(name: str) -> str:
    """Make this process one that runs on the device; what torch calls it."""
    if name != "simulated":
        return name
    from narrowfuzz.simulated import simulate

    simulate()
    return "cuda"


def accumulators(device: str) -> Accumulators:
    """How the device, as torch calls it, adds."""
    if device == "cpu":
        return CPU
    import torch

    major, _ = torch.cuda.get_device_capability()
    return HOPPER if major == 9 else UNKNOWN_DEVICE
