"""Tensors as text."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping

import torch


def unpacked(shapes: Mapping[str, tuple[int, ...]], text: str) -> dict[str, torch.Tensor]:
    """The fp32 tensors that ``text`` holds one after the other, compressed by zlib, in base 85."""
    raw = bytearray(zlib.decompress(base64.b85decode(text))) + bytes(4)
    flat, tensors = torch.frombuffer(raw, dtype=torch.float32), {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        tensors[name], flat = flat[:size].reshape(shape), flat[size:]
    return tensors


def laid(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with these strides; a stride of 0 repeats one value along its dimension."""
    shape = t.shape
    for dim, step in enumerate(strides):
        t = t.narrow(dim, 0, 1) if step == 0 and shape[dim] else t
    held = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
    return held.copy_(t).expand(shape)
