"""Loaded into the process of the checks before anything imports TransformerEngine."""

from __future__ import annotations

import json
import os

import torch
from te_on_cpu import cuda_names
from te_on_cpu.environment import real_extension
from te_on_cpu.install import install

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton_on_cpu

    triton_on_cpu.install()
if real_extension():
    torch.set_default_device("cuda")
else:
    # Checks run twice: as a device that keeps transposes of FP8 tensors, and as one that does not.
    cuda_names._PROPERTIES.major, cuda_names._PROPERTIES.minor = json.loads(
        os.environ.get("TE_CAPABILITY", "[9, 0]")
    )
    install()
