"""Queries torch about the GPUs of this machine in a separate process, so that the calling process
does not initialise CUDA and may still be forked."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

from narrowfuzz.trace.words import plural

#: Bytes that a worker needs: a CUDA context, library workspaces, the largest case.
NEEDED = 3 * 2**29
_SECONDS = 120.0
#: Environment variable: the GPUs that processes of this run choose from.
ALL = "NARROWFUZZ_GPUS"


@dataclass(frozen=True)
class Gpu:
    """One GPU at the time of the query; memory in bytes."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine and the versions of the software that runs them."""

    #: The CUDA version that torch was built with, "" for a build without CUDA.
    cuda: str
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cudnn: str = ""
    cublaslt: str = ""
    #: torch's message if it can use no GPU.
    error: str = ""


def problem(name: str, found: Gpus, workers: int) -> str:
    """Why this many workers cannot run on the device ``name`` (``cuda`` or ``cuda:N``), "" if they
    can."""
    if not found.cuda:
        return "this torch is built without CUDA: install a CUDA build, or run on cpu or simulated"
    if found.error or not found.gpus:
        return f"{found.error or 'torch sees no GPU'}: run on cpu or simulated"
    chosen = list(enumerate(found.gpus))
    if ":" in name:
        number = int(name.partition(":")[2])
        if number >= len(chosen):
            there = ", ".join(f"cuda:{i}" for i, _ in chosen)
            return f"there is no such GPU, only {there}"
        chosen = chosen[number : number + 1]
    each = -(-workers // len(chosen))
    for number, gpu in chosen:
        if gpu.free < each * NEEDED:
            return (
                f"cuda:{number} has {gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free, and"
                f" {plural(each, 'worker')} on it need {each * NEEDED / 2**30:.1f}: end what"
                " fills it, or ask for fewer --workers"
            )
    return ""


def gpus() -> list[str]:
    """The GPUs of this run, as CUDA_VISIBLE_DEVICES names them, also in a worker, which itself sees
    only one of them. Raises ValueError as ``ask``."""
    visible = os.environ.get(ALL) or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [one for one in visible.split(",") if one] or [str(i) for i in range(len(ask().gpus))]


@functools.cache
def ask() -> Gpus:
    """The GPUs that a fresh process sees. Raises ValueError if that process fails or hangs."""
    command = [sys.executable, "-m", "narrowfuzz.machine.gpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        message = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise ValueError(f"torch does not say what GPUs are here: {message}") from None
    answer = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple(Gpu(**(gpu | {"capability": tuple(gpu["capability"])})) for gpu in answer["gpus"])
    return Gpus(**(answer | {"gpus": gpus}))


def seen_here() -> Gpus:
    """The GPUs that this process sees; CUDA is initialised afterwards."""
    import torch

    built = torch.version.cuda or ""
    if not built:
        return Gpus("")
    try:
        torch.cuda.init()
        return Gpus(
            built,
            tuple(_gpu(i) for i in range(torch.cuda.device_count())),
            driver=_driver(),
            cudnn=_dotted(torch.backends.cudnn.version() or 0, 10000, 100),
            cublaslt=_cublaslt(),
        )
    except RuntimeError as error:  # no driver, one that is too old, a device that is lost or full
        return Gpus(built, error=str(error).strip().splitlines()[0].split(". ")[0].rstrip("."))


def _gpu(i: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    return Gpu(properties.name, (properties.major, properties.minor), free, total)


def _dotted(version: int, major: int, minor: int) -> str:
    return f"{version // major}.{version % major // minor}" if version else ""


def _driver() -> str:
    """The newest CUDA version that the driver supports, "" if there is no driver (torch does not
    report it)."""
    import ctypes

    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return _dotted(version.value, 1000, 10)


def _cublaslt() -> str:
    """The version of cuBLASLt, "" if it cannot be loaded."""
    import ctypes

    from torch.version import cuda

    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(cuda or '').split('.')[0]}")
    except OSError:
        return ""
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return _dotted(int(library.cublasLtGetVersion()), 10000, 100)


if __name__ == "__main__":
    print(json.dumps(asdict(seen_here())))
