"""Triton's kernels on a machine without a GPU, with the numbers of an NVIDIA GPU.

Triton's interpreter runs them; the operations that it computes differently from PTX are replaced.
``install()`` patches Triton and torch, so it needs a process of its own.
"""

from triton_on_cpu.install import install
from triton_on_cpu.memory import OutsideError, WrittenTwiceError
from triton_on_cpu.torchao_kernels import install_torchao

__all__ = ["OutsideError", "WrittenTwiceError", "install", "install_torchao"]
