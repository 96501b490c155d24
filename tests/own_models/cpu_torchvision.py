"""Lets torchvision be imported beside a CPU torch.

The package index's torchvision is built for CUDA. Its operators do not load beside a CPU torch, and
its import asks for two of them, which no model here calls; ``timm`` and ``transformers`` import it
wherever it is installed. Imported before them, this declares the two where they are missing.
"""

import importlib.util

import torch

if importlib.util.find_spec("torchvision") and not torch.backends.cuda.is_built():
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou) -> Tensor"
        )
