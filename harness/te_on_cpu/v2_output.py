"""How fused kernels of 2.x return the fp32 values that they computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_on_cpu.v2_quantize import write
from te_on_cpu.v2_scales import largest
from te_on_cpu.v2_tensors import empty
from te_on_cpu.v2_types import kind


def rounded_or_quantised(
    values: Tensor,
    dtype: torch.dtype,
    quantizer: Any,
    output: Any = None,
    *,
    unrounded: tuple[str, ...] = ("delayed",),
    amax_of_unrounded: bool = False,
) -> Any:
    """fp32 ``values`` as a tensor of ``dtype`` or quantised, in ``output``'s buffers if given.

    :param unrounded: kinds of quantizers whose kernel casts ``values`` as they are.
    :param amax_of_unrounded: the kernel finds the amax of current scaling, and of NVFP4 without the
        Hadamard transform, before it rounds.

    Real contract: only delayed scaling casts values that were never rounded to ``dtype``
    (``common/util/vectorized_pointwise.h``, ``common/normalization``); current scaling quantises
    the rounded tensor in a second kernel (``pytorch/csrc/extensions``), and MXFP8 kernels round to
    ``dtype`` on the way (``common/cast/mxfp8``), those of activations since 2.6.
    """
    rounded = values if kind(quantizer) in unrounded else values.to(dtype)
    if quantizer is None:
        return rounded if output is None else output.detach().copy_(rounded)
    target = empty(quantizer, values.shape, dtype) if output is None else output
    found = amax_of_unrounded and _takes_amax(quantizer) and values.numel()
    write(rounded, quantizer, target, largest(values) if found else None)
    return target


def _takes_amax(quantizer: Any) -> bool:
    """Does it quantise with a largest magnitude that an earlier kernel found?"""
    by_tensor = kind(quantizer) == "fp4" and not quantizer.with_rht
    return by_tensor or kind(quantizer) == "current"
