"""Tensors as text."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping

import torch


def unpacked(shapes: Mapping[str, tuple[int, ...]], text: str) -> dict[str, torch.Tensor]:
    """The fp32 tensors that ``text`` holds, one after the other: base 85 of zlib."""
    raw = bytearray(zlib.decompress(base64.b85decode(text))) + bytes(4)
    flat, tensors = torch.frombuffer(raw, dtype=torch.float32), {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        tensors[name], flat = flat[:size].reshape(shape), flat[size:]
    return tensors
