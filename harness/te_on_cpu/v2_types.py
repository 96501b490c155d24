"""TransformerEngine's own tensor and quantizer classes, looked up after it is imported."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from te_on_cpu.kernels import Format
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_releases import STORAGES_ARE_CALLED_SO, installed_release

_FORMATS: dict[int, Format] = {7: "e4m3", 8: "e5m2"}
_TORCH_DTYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}


@dataclass(frozen=True)
class Classes:
    """The classes on which kernels dispatch, by exact type as in the real extension."""

    delayed: type
    current: type
    mx: type
    block: type
    fp4: type
    float8: tuple[type, type]
    mxfp8: tuple[type, type]
    blockwise: tuple[type, type]
    nvfp4: tuple[type, type]


#: The module of each kind of tensor in ``transformer_engine.pytorch.tensor``.
_MODULES = {
    "Float8": "float8_tensor",
    "MXFP8": "mxfp8_tensor",
    "Float8BlockwiseQ": "float8_blockwise_tensor",
    "NVFP4": "nvfp4_tensor",
}


@functools.cache
def classes() -> Classes:
    """Quantizers, and (storage, tensor) pairs; of a kind that the release lacks, classes that
    nothing is of."""

    return Classes(
        delayed=_class("Float8", "Float8Quantizer"),
        current=_class("Float8", "Float8CurrentScalingQuantizer"),
        mx=_class("MXFP8", "MXFP8Quantizer"),
        block=_class("Float8BlockwiseQ", "Float8BlockQuantizer"),
        fp4=_class("NVFP4", "NVFP4Quantizer"),
        float8=_pair("Float8"),
        mxfp8=_pair("MXFP8"),
        blockwise=_pair("Float8BlockwiseQ"),
        nvfp4=_pair("NVFP4"),
    )


def _pair(prefix: str) -> tuple[type, type]:
    named = "Storage" if installed_release() >= STORAGES_ARE_CALLED_SO else "Base"
    return _class(prefix, f"{prefix}Tensor{named}"), _class(prefix, f"{prefix}Tensor")


def _class(prefix: str, name: str) -> type:
    try:
        module = importlib.import_module(f"transformer_engine.pytorch.tensor.{_MODULES[prefix]}")
    except ModuleNotFoundError:
        return _Lacking
    found: type = getattr(module, name, _Lacking)
    return found


class _Lacking:
    """Stands for a class of a later release."""


def kind(quantizer: object) -> str:
    """ "none", "delayed", "current", "mx", "block" or "fp4". Raises UnsupportedByEmulation for any
    other quantizer."""
    if quantizer is None:
        return "none"
    known = classes()
    for name in ("delayed", "current", "mx", "block", "fp4"):
        if type(quantizer) is getattr(known, name):
            return name
    supported = "use delayed, current, MXFP8, FP8 block scaling or NVFP4"
    refuse(f"the quantizer {type(quantizer).__name__}", supported)


def is_float8(tensor: object) -> bool:
    """Whether it is per-tensor scaled FP8."""
    return type(tensor) in classes().float8


def is_mxfp8(tensor: object) -> bool:
    """Whether it is FP8 with an E8M0 scale for each block of 32."""
    return type(tensor) in classes().mxfp8


def is_blockwise(tensor: object) -> bool:
    """Whether it is FP8 with an fp32 scale for each block of 1 x 128 or 128 x 128."""
    return type(tensor) in classes().blockwise


def is_nvfp4(tensor: object) -> bool:
    """Whether it is FP4 with an E4M3 scale for each block of 16."""
    return type(tensor) in classes().nvfp4


def is_quantised(tensor: object) -> bool:
    """Whether it is FP8 or FP4 of any kind of scaling."""
    return any(one(tensor) for one in (is_float8, is_mxfp8, is_blockwise, is_nvfp4))


def fp8_format(dtype: Any) -> Format:
    """The FP8 format of the extension's DType or its integer value; ValueError for any other."""
    if int(dtype) not in _FORMATS:
        raise ValueError(f"DType {dtype!r} is no FP8 format; pass kFloat8E4M3 or kFloat8E5M2")
    return _FORMATS[int(dtype)]


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's type for the extension's DType or its integer value."""
    return _TORCH_DTYPES[int(dtype)]


def keeps_transposes() -> bool:
    """Whether the device multiplies FP8 in one layout only, so that tensors store their transpose.

    Hopper (compute capability 9) does; Blackwell (10) multiplies every layout from one copy.
    """
    major = torch.cuda.get_device_capability()[0]
    return major < 10 or major == 12


def flat_shape(shape: torch.Size) -> tuple[int, int]:
    """(product of all dimensions but the last, last)."""
    last = shape[-1] if len(shape) else 1
    return (shape.numel() // last if last else 0), last
