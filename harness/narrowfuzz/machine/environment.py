"""What a worker's process must look like before torch is imported, and what it then is.

One thread per worker: two on a shared machine spin-wait each other into the ground. Compiled
artefacts live in a folder named by everything that shapes them, because a monkey-patched library
(a planted fault) is not in Inductor's own cache key.
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
    """Installed versions of what matters, "absent" where a package is not there."""
    from narrowfuzz import __version__

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found | {"narrowfuzz": __version__}  # which may run from a tree that nobody installed


def checkout(package: str) -> str:
    """The folder in which ``import`` finds a package, if that is not what the installed
    distribution brought; "" if it is, or nothing is there."""
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
    """Those of the libraries under test that are no release, and where they lie."""
    found = {package: checkout(package) for package in ("torch", "torchao")}
    return {package: folder for package, folder in found.items() if folder}


def cache_identity(fault: str) -> str:
    """Hash of versions, checkouts, environment switches and planted fault."""
    switches = {name: os.environ.get(name, "") for name in _SWITCHES}
    raw = json.dumps([versions(), checkouts(), switches, platform.machine(), fault], sort_keys=True)
    return hashlib.sha256(raw.encode()).hexdigest()[:16]


def artefacts(fault: str = "") -> Path:
    """The folder of what is compiled here, with a fault or without."""
    root = Path(tempfile.gettempdir()) / f"narrowfuzz-{getpass.getuser()}" / cache_identity(fault)
    root.mkdir(parents=True, exist_ok=True)
    return root


def prepare(fault: str = "") -> None:
    """Set the environment of this process and its children. Call before torch is imported."""
    root = artefacts(fault)
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(root / "hypothesis"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # advice, once for each process
    os.environ.update(
        OMP_NUM_THREADS="1",
        # else asking whether there is a GPU starts CUDA, and workers could not be forked
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
        MKL_NUM_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(root),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        # each keeps 1024 kernels by shape: with fresh shapes all day that is a leak
        ONEDNN_PRIMITIVE_CACHE_CAPACITY="1",
        LRU_CACHE_CAPACITY="1",
    )


#: glibc, mallopt(3): blocks of at least so many bytes are mapped one by one, and given back when
#: they are freed.
_M_MMAP_THRESHOLD, _MAPPED = -3, 2**20


def _return_large_blocks() -> None:
    """Below 2.38 glibc seldom uses a freed block again that was aligned, as torch's are (its bug
    14581): beside small blocks that live, a worker's heap grew by gigabytes in ten minutes."""
    _of_glibc("mallopt", _M_MMAP_THRESHOLD, _MAPPED)


@dataclass
class Collector:
    """Looks for garbage in cycles, of which engines and autograd graphs leave gigabytes in hours,
    and takes no more than this share of the time for it."""

    share: float = 0.02
    took: float = 0.0
    ended: float = 0.0

    def collect(self) -> None:
        """If it is time for it."""
        began = time.monotonic()
        if began - self.ended >= self.took / self.share:
            gc.collect()
            self.ended = time.monotonic()
            self.took = self.ended - began


def return_memory() -> None:
    """Give back what is free inside the heap: smaller blocks are not used again either."""
    _of_glibc("malloc_trim", 0)


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _of_glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc; nothing where there is another C library."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def settle() -> None:
    """Make torch single-threaded and quiet. Call once in each process that runs cases."""
    import torch

    torch.set_num_threads(1)
    _return_large_blocks()
    # else a GPU may add sums of splits in the operands' dtype, and fp32 in TF32: no plan says so
    of_gpus = torch.backends.cuda.matmul
    of_gpus.allow_fp16_reduced_precision_reduction = False
    of_gpus.allow_bf16_reduced_precision_reduction = False
    of_gpus.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # a Spec's rungs share the code of its model, and a draw that reloads compiles it again
        torch._dynamo.config.recompile_limit = 1024
        torch._dynamo.config.accumulated_recompile_limit = 4096
    # hooks turn the fused kernels of nn.TransformerEncoder off, and not every run has hooks
    torch.backends.mha.set_fastpath_enabled(False)
    gc.freeze()  # what is imported by now lives as long as the process: no use looking through it
    quieten()


@contextmanager
def one_thread() -> Iterator[None]:
    """As workers run: sums over several threads may come in another order each time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quieten() -> None:
    """Silence what libraries log about themselves: what they raise is recorded in the traces."""
    import logging
    import warnings

    names = ("torch", "torch.__trace", "torch._inductor", "torch._dynamo", "torch.utils._pytree")
    for name in (*names, "torchao"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", module=r"(torch(ao)?|mmaemu)\b.*")


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
