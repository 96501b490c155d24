"""Describes the machine as far as results depend on it: CPU features, which kernels multiply, and
which C++ compiler builds Inductor's code.

Two CPUs that run the same wheel may run different kernels: oneDNN picks them by instruction set,
and a bug may be in only one of them, or in the code that one compiler makes. So findings, ledger
entries and ``doctor`` state the machine.
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

#: Instruction sets that decide which kernels run; no others have been seen to make a difference.
_TELLING = re.compile(r"^(amx|avx10|avx512_(f$|bf16|fp16|vnni)|avx512f$|avx2$|avx_vnni$|sve|bf16$)")
#: oneDNN prints a line for each primitive:
#: ``onednn_verbose,v1,primitive,exec,cpu,matmul,KERNEL,...``.
_EXECUTED = re.compile(r"primitive,exec,cpu,(?:matmul|inner_product),([^,]+),")
_ONEDNN = re.compile(r"MKL-DNN v(\S+)")


@dataclass(frozen=True)
class Machine:
    """The facts about this process's machine that are recorded beside findings."""

    #: Its instruction sets, by torch's names.
    cpu: tuple[str, ...]
    #: Version of the oneDNN that torch was built with, "" if it has none.
    onednn: str
    #: Kind of multiply (``fp32``, ``bf16``, ``fp8`` with one scale per tensor, ``fp8_rowwise``) ->
    #: oneDNN's name of the kernel that runs; ``torch`` if torch's own code or BLAS runs; "" if
    #: there is none.
    kernels: dict[str, str]
    #: Kind of multiply -> the first error of ordinary multiplies; only kinds with an error.
    lacks: dict[str, str]

    @property
    def compiler(self) -> str:
        """The compiler that Inductor uses for C++, "" if there is none: for example ``g++ 12.2.0
        -mtune=generic``, where -mtune names the CPU that GCC takes for this one under
        -march=native."""
        return compiler()

    def without(self, kind: str) -> str:
        """Why this machine cannot run this kind of multiply, "" if it can."""
        return "" if self.kernels[kind] else f"this CPU has no kernel: {_brief(self.lacks[kind])}"

    def crawls(self, kind: str) -> bool:
        """Does oneDNN run this kind of multiply by its slow reference code, element by element?"""
        return self.kernels[kind].startswith("ref")

    def describe(self) -> dict[str, Any]:
        """The facts as a dict, as they are recorded beside findings."""
        return asdict(self) | {"compiler": self.compiler}


@functools.cache
def machine() -> Machine:
    """The facts about this machine, probed on the first call in a few milliseconds.

    Do not call it first while another thread writes to standard output: oneDNN prints there which
    kernels it runs, and the probe captures that.
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
    """As ``Machine.lacks``, for PyTorch's own kernels."""
    from narrowfuzz.play.kernels import without_onednn

    with without_onednn():
        kernels = {name: _kernel_of(name)[1] for name in _KINDS}
    return {name: error for name, error in kernels.items() if error}


def lacking_kernel(message: str, *, native: bool = False) -> str:
    """Why a multiply that raised this message is not the library's fault: ordinary multiplies of
    its kind raise the same message on this machine, with PyTorch's own kernels if ``native``. "" if
    they do not; then the error is held against the library."""
    lines = message.strip().splitlines()[:1]
    lacks = native_lacks() if native else machine().lacks
    kinds = [name for name, error in lacks.items() if lines == [error]]
    return (
        f"no kernel of this CPU multiplies {' or '.join(kinds)}: {_brief(lines[0])}"
        if kinds
        else ""
    )


def _brief(error: str) -> str:
    """The first sentence of an error message; for an assertion inside torch, the first sentence of
    the message that the assertion was given."""
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
    """torch's name of a CPU feature, which Linux may spell differently."""
    return {"avx512f": "avx512_f"}.get(flag, flag)


@functools.cache
def compiler() -> str:
    """``Machine.compiler``, chosen as by torch._inductor.config.cpp.cxx, but without importing
    that, which takes a second."""
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    version = _said_by(cxx, "-dumpfullversion", "-dumpversion").strip()
    if not version:
        return ""
    if "clang" in _said_by(cxx, "--version"):
        return f"clang {version}"
    tuned = re.search(r"-mtune=\s+(\S+)", _said_by(cxx, "-march=native", "-Q", "--help=target"))
    return f"g++ {version}" + (f" -mtune={tuned[1]}" if tuned else "")


def _said_by(*command: str) -> str:
    """The standard output of a command, "" if it cannot run or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout


#: The kinds of multiply that are probed.
_KINDS = ("fp32", "bf16", "fp8", "fp8_rowwise")
#: Sizes (m, k, n) of ordinary multiplies, aligned and unaligned; k is contracted.
_SHAPES = ((32, 64, 32), (16, 16, 16), (1, 16, 32), (33, 17, 5))


def _kernel_of(name: str) -> tuple[str, str]:
    """The kernel that runs this kind of multiply, "" if none does; and the first error among the
    probed shapes, "" if all run."""
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
    """Captures the lines in which oneDNN prints what it runs. The value is a function that returns
    their text; call it after the block."""
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
