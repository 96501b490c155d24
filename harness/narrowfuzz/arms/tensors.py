"""Conversion of torch tensors to numpy arrays, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.watches import unseen

DTYPE_NAME = {dtype: name for name, dtype in DTYPES.items()}


def host(t: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor on any device; the array shares the memory of a tensor on the CPU."""
    return np.asarray(t.detach().cpu().numpy())


def as_float(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or for dtypes that recipes do not know (complex, fp64, integers: parameters of
    users' models) its values as fp32."""
    with unseen():
        t = t if t.layout == torch.strided else t.to_dense()
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        return t if t.dtype in DTYPE_NAME else t.float()


def fp32_array(t: torch.Tensor) -> F32:
    """An fp32, bf16 or fp16 tensor as float32 values."""
    with unseen():
        if t.dtype == torch.float16:
            return host(t).astype(np.float32)
        if t.dtype == torch.bfloat16:
            wide = host(t.detach().view(torch.int16)).astype(np.uint32)
            wide <<= np.uint32(16)  # sign extension filled the upper half; the shift drops it
            return wide.view(np.float32)
        assert t.dtype == torch.float32, t.dtype
        return host(t)


def fp8_codes(t: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of an 8-bit float tensor."""
    with unseen():
        return host(t.detach().view(torch.uint8))


def as_rows(t: Any, spec: Spec, width: int) -> F32:
    """An output or gradient as float32 [tokens, width]."""
    return fp32_array(t).reshape(spec.tokens, width)
