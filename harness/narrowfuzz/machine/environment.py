"""Sets up a worker's process before and after torch is imported, and describes its environment.

One thread per worker: on a shared machine the threads of several workers would spin-wait for each
other. Compiled artefacts live in a folder named by everything that shapes them, because a
monkey-patched library (a planted fault) is not in Inductor's own cache key.
"""

from __future__ import annotations

import ctypes
import gc
import getpass
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowfuzz.machine.machine import machine

_PACKAGES = ("torch", "torchao", "transformer_engine", "numpy", "hypothesis")
_SWITCHES = (
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCH_LOGS",
    "TORCH_COMPILE_DISABLE",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)


def versions() -> dict[str, str]:
    """Installed versions of Python, narrowfuzz and the packages that matter, "absent" for a package
    that is not installed."""
    from narrowfuzz import __version__

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found | {"narrowfuzz": __version__}  # narrowfuzz may run without being installed


def checkout(package: str) -> str:
    """The folder from which ``import`` takes a package, if that is not the installed
    distribution's; "" if it is, or if the package is not found."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return ""
    try:
        brought = importlib.metadata.distribution(package).locate_file(package)
    except importlib.metadata.PackageNotFoundError:
        return str(Path(found.origin).parent)
    inside = Path(str(brought)).resolve() in Path(found.origin).resolve().parents
    return "" if inside else str(Path(found.origin).parent)


def checkouts() -> dict[str, str]:
    """Library under test -> its folder, for those not imported from an installed distribution."""
    found = {package: checkout(package) for package in ("torch", "torchao")}
    return {package: folder for package, folder in found.items() if folder}


def cache_identity(fault: str) -> str:
    """Hash of versions, checkouts, environment switches and planted fault."""
    switches = {name: os.environ.get(name, "") for name in _SWITCHES}
    raw = json.dumps([versions(), checkouts(), switches, platform.machine(), fault], sort_keys=True)
    return hashlib.sha256(raw.encode()).hexdigest()[:16]


def artefacts(fault: str = "") -> Path:
    """The folder for artefacts compiled in this environment, with a planted fault or without."""
    root = Path(tempfile.gettempdir()) / f"narrowfuzz-{getpass.getuser()}" / cache_identity(fault)
    root.mkdir(parents=True, exist_ok=True)
    return root


def prepare(fault: str = "") -> None:
    """Set the environment of this process and its children. Call before torch is imported."""
    root = artefacts(fault)
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(root / "hypothesis"))
    # lower levels log advice once in each process
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(
        OMP_NUM_THREADS="1",
        # else checking for a GPU initialises CUDA, and workers could not be forked
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
        MKL_NUM_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(root),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        # each caches 1024 kernels by shape, which is a leak for a worker with ever new shapes
        ONEDNN_PRIMITIVE_CACHE_CAPACITY="1",
        LRU_CACHE_CAPACITY="1",
    )


#: glibc, mallopt(3): blocks of at least this many bytes are mapped one by one, and returned to the
#: system when they are freed.
_M_MMAP_THRESHOLD, _MAPPED = -3, 2**20


def _return_large_blocks() -> None:
    """Make glibc return large freed blocks to the system. Before 2.38 it seldom reuses freed blocks
    that were aligned, as torch's are (glibc bug 14581), so between small live blocks a worker's
    heap grew by gigabytes in ten minutes."""
    _of_glibc("mallopt", _M_MMAP_THRESHOLD, _MAPPED)


@dataclass
class Collector:
    """Collects cyclic garbage, of which engines and autograd graphs leave gigabytes in hours, in at
    most about this ``share`` of the time."""

    share: float = 0.02
    took: float = 0.0
    ended: float = 0.0

    def collect(self) -> None:
        """Collect garbage now, if that keeps within the share of time."""
        began = time.monotonic()
        if began - self.ended >= self.took / self.share:
            gc.collect()
            self.ended = time.monotonic()
            self.took = self.ended - began


def return_memory() -> None:
    """Return free memory inside the heap to the system: glibc does not reuse smaller freed blocks
    either."""
    _of_glibc("malloc_trim", 0)


def resident() -> int:
    """Bytes of resident memory of this process; 0 if the system does not report it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _of_glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc; does nothing if the C library does not have it."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


@contextmanager
def importing() -> Iterator[None]:
    """Run the block, which imports torch, without collections of garbage. Importing leaves none,
    and looking for it takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def settle(*, compiles: bool = True) -> None:
    """Make torch single-threaded and quiet. Call once in each process that runs cases. One that
    never ``compiles`` need not import the compiler, which takes as long as torch itself."""
    with importing():
        import torch

        if compiles:
            import torch._dynamo

    torch.set_num_threads(1)
    _return_large_blocks()
    # else a GPU may add partial sums of a split K in the operands' dtype, and multiply fp32 in
    # TF32, neither of which is in any plan
    of_gpus = torch.backends.cuda.matmul
    of_gpus.allow_fp16_reduced_precision_reduction = False
    of_gpus.allow_bf16_reduced_precision_reduction = False
    of_gpus.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if compiles and hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # all rungs of a Spec compile the same model code, and a draw that reloads compiles it again
        torch._dynamo.config.recompile_limit = 1024
        torch._dynamo.config.accumulated_recompile_limit = 4096
    # hooks switch off the fused kernels of nn.TransformerEncoder, and not every run has hooks
    torch.backends.mha.set_fastpath_enabled(False)
    gc.freeze()  # objects imported by now live as long as the process, so skip them in collections
    quieten()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one thread, like workers: several threads may add a sum in another order
    each time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quieten() -> None:
    """Silence the logs of libraries; errors that they raise are recorded in the traces."""
    import logging
    import warnings

    names = ("torch", "torch.__trace", "torch._inductor", "torch._dynamo", "torch.utils._pytree")
    for name in (*names, "torchao"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", module=r"(torch(ao|titan)?|transformer_engine|mmaemu)\b.*")


def describe() -> dict[str, Any]:
    """The environment as recorded beside every finding."""
    import torch

    return {
        "versions": versions(),
        "checkouts": checkouts(),
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": machine().describe(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "switches": {name: os.environ[name] for name in _SWITCHES if name in os.environ},
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
