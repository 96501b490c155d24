"""What the machine is, as far as results depend on it: CPU features, which kernel multiplies, and
which C++ compiler builds what Inductor writes.

Two CPUs that run one wheel do not run the same kernels: oneDNN picks them by instruction set, and a
bug may sit in one of them alone, or in what one compiler makes of them. So findings, ledger entries
and ``doctor`` say what was there.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Instruction sets that decide which kernels run; others make no difference that was ever seen.
_TELLING = re.compile(r"^(amx|avx10|avx512_(f$|bf16|fp16|vnni)|avx512f$|avx2$|avx_vnni$|sve|bf16$)")
#: oneDNN prints one line a primitive: ``onednn_verbose,v1,primitive,exec,cpu,matmul,KERNEL,...``.
_EXECUTED = re.compile(r"primitive,exec,cpu,(?:matmul|inner_product),([^,]+),")
_ONEDNN = re.compile(r"MKL-DNN v(\S+)")


@dataclass(frozen=True)
class Machine:
    """The facts about this process's machine that findings are recorded with."""

    #: Its instruction sets, as torch or the operating system names them.
    cpu: tuple[str, ...]
    #: Version of the oneDNN that torch was built with, "" if it has none.
    onednn: str
    #: Kernel by what it multiplies (``fp32``, ``bf16``, ``fp8`` with one scale a tensor,
    #: ``fp8_rowwise``): oneDNN's name for it, ``torch`` where torch's own code or BLAS runs, "" if
    #: there is none.
    kernels: dict[str, str]
    #: What the library says where it has no kernel for an ordinary multiply, by what it multiplies.
    lacks: dict[str, str]

    @property
    def compiler(self) -> str:
        """What Inductor compiles C++ with, "" where there is none: ``g++ 12.2.0 -mtune=generic``,
        where the CPU that GCC tunes for is what -march=native makes of this one."""
        return compiler()

    def without(self, kind: str) -> str:
        """Why nothing can be multiplied in this way here, "" if something can."""
        return "" if self.kernels[kind] else f"this CPU has no kernel: {_brief(self.lacks[kind])}"

    def crawls(self, kind: str) -> bool:
        """Does oneDNN multiply these by its reference code, an element at a time?"""
        return self.kernels[kind].startswith("ref")

    def describe(self) -> dict[str, Any]:
        """As recorded beside findings."""
        return asdict(self) | {"compiler": self.compiler}


@functools.cache
def machine() -> Machine:
    """What this machine is; probed on the first call, in a few milliseconds.

    Not while another thread writes to standard output: oneDNN prints there what it runs, and the
    probe catches it.
    """
    import torch

    found = _ONEDNN.search(torch.__config__.show())
    kernels = {name: _kernel_of(name) for name in _KINDS}
    return Machine(
        cpu=_features(),
        onednn=found.group(1) if found else "",
        kernels={name: kernel for name, (kernel, _) in kernels.items()},
        lacks={name: error for name, (_, error) in kernels.items() if error},
    )


def onednn_stays() -> str:
    """Why oneDNN cannot be switched off here, "" if it can."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN: its own kernels are those that eager runs"
    if not torch._C._get_mkldnn_enabled():
        return "oneDNN is off already: PyTorch's own kernels are those that eager runs"
    if torch.backends.flags_frozen():
        return "torch.backends.disable_global_flags() was called, so oneDNN cannot be switched off"
    return ""


@functools.cache
def native_lacks() -> dict[str, str]:
    """As ``Machine.lacks``, of PyTorch's own kernels."""
    from narrowfuzz.play.kernels import without_onednn

    with without_onednn():
        kernels = {name: _kernel_of(name)[1] for name in _KINDS}
    return {name: error for name, error in kernels.items() if error}


def lacking_kernel(message: str, *, native: bool = False) -> str:
    """Why a multiply that raised this is none the library could have done here: ordinary ones of
    its kind raise the same on this machine, by PyTorch's own kernels where it was ``native``. ""
    where they do not: then it is a claim."""
    said = message.strip().splitlines()[:1]
    lacks = native_lacks() if native else machine().lacks
    kinds = [name for name, error in lacks.items() if said == [error]]
    return (
        f"no kernel of this CPU multiplies {' or '.join(kinds)}: {_brief(said[0])}" if kinds else ""
    )


def _brief(error: str) -> str:
    """The first sentence; of an assertion inside torch the one that it was given."""
    head, _, given = error.partition("please report a bug to PyTorch. ")
    return (given or head).split(". ")[0].rstrip(".")


def _features() -> tuple[str, ...]:
    import torch

    if hasattr(torch.cpu, "get_capabilities"):  # torch 2.11
        flags = [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    else:
        info = Path("/proc/cpuinfo")
        text = info.read_text() if info.is_file() else ""
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
        flags = found.group(1).split() if found else []
    return tuple(sorted({_usual(name) for name in flags if _TELLING.match(name)}))


def _usual(flag: str) -> str:
    """torch's name of a feature that Linux writes otherwise."""
    return {"avx512f": "avx512_f"}.get(flag, flag)


@functools.cache
def compiler() -> str:
    """As torch._inductor.config.cpp.cxx chooses it, without importing that: it takes a second."""
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    version = _said_by(cxx, "-dumpfullversion", "-dumpversion").strip()
    if not version:
        return ""
    if "clang" in _said_by(cxx, "--version"):
        return f"clang {version}"
    tuned = re.search(r"-mtune=\s+(\S+)", _said_by(cxx, "-march=native", "-Q", "--help=target"))
    return f"g++ {version}" + (f" -mtune={tuned[1]}" if tuned else "")


def _said_by(*command: str) -> str:
    """Its standard output, "" where it cannot run or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout


#: What a machine is asked to multiply.
_KINDS = ("fp32", "bf16", "fp8", "fp8_rowwise")
#: Rows, contracted and other dimension of ordinary multiplies, aligned and not.
_SHAPES = ((32, 64, 32), (16, 16, 16), (1, 16, 32), (33, 17, 5))


def _kernel_of(name: str) -> tuple[str, str]:
    """What multiplies matrices of this kind, and the first error where one cannot be."""
    kernel, problem = "", ""
    with _onednn_tells() as output:
        for shape in _SHAPES:
            try:
                _multiply(name, *shape)
                kernel = "torch"
            except RuntimeError as error:
                problem = problem or str(error).strip().splitlines()[0]
    executed = _EXECUTED.findall(output())
    return (executed[0] if executed else kernel), problem


def _multiply(name: str, m: int, k: int, n: int) -> None:
    import torch

    from narrowfuzz.play.dtypes import DTYPES

    if not name.startswith("fp8"):
        dtype = DTYPES[name]
        torch.nn.functional.linear(torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype))
        return
    a, b = (torch.ones(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    scales = (torch.ones(m, 1), torch.ones(1, n)) if "rowwise" in name else (torch.ones(()),) * 2
    torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)


@contextmanager
def _onednn_tells() -> Iterator[Any]:
    """oneDNN writes down what it runs; the value gives the text once the block has been left."""
    import torch

    text: list[str] = []
    with tempfile.TemporaryFile() as file:
        usual = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                yield lambda: text[0]
        finally:
            os.dup2(usual, 1)
            os.close(usual)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))
