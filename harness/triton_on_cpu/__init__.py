"""Triton's kernels on a machine without a GPU, with the numbers of an NVIDIA GPU.

Triton's interpreter runs them; what it computes otherwise than PTX defines is replaced. Only in a
process that is for it: ``install()`` patches Triton and torch.
"""

from triton_on_cpu.install import install
from triton_on_cpu.memory import OutsideError, WrittenTwiceError
from triton_on_cpu.torchao_kernels import install_torchao

__all__ = ["OutsideError", "WrittenTwiceError", "install", "install_torchao"]
