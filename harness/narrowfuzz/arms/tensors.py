"""torch <-> numpy at the edges of an arm, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowfuzz.case import Spec
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.taps import unseen

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def host(t: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor of any device; on the CPU its memory."""
    return np.asarray(t.detach().cpu().numpy())


def fp32_array(t: torch.Tensor) -> F32:
    """An fp32, bf16 or fp16 tensor as float32 values."""
    with unseen():
        t = t.detach().cpu()
        if t.dtype == torch.float16:
            return host(t).astype(np.float32)
        if t.dtype == torch.bfloat16:
            bits = host(t.view(torch.int16)).view(np.uint16)
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        assert t.dtype == torch.float32, t.dtype
        return host(t)


def fp8_codes(t: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of an 8-bit float tensor."""
    with unseen():
        return host(t.detach().view(torch.uint8))


def to_torch(x: F32, dtype: str, device: str = "cpu") -> torch.Tensor:
    """Values into a fresh tensor of the layer's dtype (exact: the data fits it)."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(TORCH_DTYPE[dtype]).to(device)


def ids_tensor(x: F32, spec: Spec, device: str = "cpu") -> torch.Tensor:
    """Token ids in the Spec's shape without its last dimension."""
    return torch.from_numpy(x.astype(np.int64)).reshape(spec.input_shape[:-1]).to(device)


def input_tensor(x: F32, spec: Spec, device: str = "cpu") -> torch.Tensor:
    """The leaf input in the Spec's shape and memory layout."""
    t = to_torch(x, spec.dtype, device).reshape(spec.input_shape)
    if spec.input_layout == "transposed":
        t = t.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif spec.input_layout == "strided":
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=device)
        wide[..., ::2] = t
        t = wide[..., ::2]
    return t.detach().requires_grad_(True)


def grad_tensor(g: F32, spec: Spec, device: str = "cpu") -> torch.Tensor:
    """The output gradient in the Spec's shape and memory layout."""
    t = to_torch(g, spec.dtype, device).reshape(spec.output_shape)
    if spec.grad_layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if spec.grad_layout == "expanded" and spec.tokens:
        return t.reshape(spec.tokens, spec.width)[0].expand(spec.output_shape)
    return t


def as_rows(t: Any, spec: Spec, width: int) -> F32:
    """An output or gradient as float32 [tokens, width]."""
    return fp32_array(t).reshape(spec.tokens, width)
