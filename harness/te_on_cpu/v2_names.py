"""The module that stands in for transformer_engine_torch of 2.x, and its names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch

from te_on_cpu.refusal import refuse, refused
from te_on_cpu.v2_releases import NO_ATTENTION_OF_512, Release

NAME = "transformer_engine_torch"

#: Optional hooks that the library looks up; the real extension does not have them either.
_ABSENT = ("flash_attention", "get_attention_backend")

_DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}

_NUMBERED = {
    "FP8FwdTensors": [
        f"GEMM{n}_{part}" for n in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")
    ],
    "FP8BwdTensors": [f"GRAD_{part}{n}" for n in (1, 2, 3) for part in ("OUTPUT", "INPUT")],
    "NVTE_Bias_Type": [
        f"NVTE_{x}" for x in ("NO_BIAS", "PRE_SCALE_BIAS", "POST_SCALE_BIAS", "ALIBI")
    ],
    "NVTE_Mask_Type": [
        f"NVTE_{x}_MASK"
        for x in (
            "NO",
            "PADDING",
            "CAUSAL",
            "PADDING_CAUSAL",
            "CAUSAL_BOTTOM_RIGHT",
            "PADDING_CAUSAL_BOTTOM_RIGHT",
        )
    ],
    "NVTE_Softmax_Type": [f"NVTE_{x}_SOFTMAX" for x in ("VANILLA", "OFF_BY_ONE", "LEARNABLE")],
    "NVTE_QKV_Format": [
        *(f"NVTE_{x}" for x in ("SBHD", "BSHD", "THD", "BSHD_2SBHD", "SBHD_2BSHD", "THD_2BSHD")),
        *(f"NVTE_{x}" for x in ("THD_2SBHD", "BHSD", "QKV_Format_NOT_SET")),
    ],
    "NVTE_QKV_Layout": [
        *(f"NVTE_{x}" for x in ("SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD")),
        *(f"NVTE_{x}" for x in ("BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D", "BSHD_BSHD_BSHD")),
        *(f"NVTE_{x}" for x in ("T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD")),
        *(f"NVTE_{x}" for x in ("SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "THD_BSHD_BSHD")),
        *(f"NVTE_{x}" for x in ("THD_SBHD_SBHD", "Paged_KV_BSHD_BSHD_BSHD")),
        *(f"NVTE_Paged_KV_{x}" for x in ("BSHD_SBHD_SBHD", "SBHD_BSHD_BSHD", "SBHD_SBHD_SBHD")),
        *(f"NVTE_Paged_KV_{x}" for x in ("THD_BSHD_BSHD", "THD_SBHD_SBHD")),
        *("NVTE_BHSD_BHSD_BHSD", "NVTE_QKV_Layout_NOT_SET"),
    ],
    "NVTE_Fused_Attn_Backend": ["NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend"],
    "NVTEScalingMode": [
        *(f"NVTE_{x}" for x in ("DELAYED_TENSOR_SCALING", "MXFP8_1D_SCALING", "BLOCK_SCALING_1D")),
        *(f"NVTE_{x}" for x in ("BLOCK_SCALING_2D", "NVFP4_1D_SCALING", "INVALID_SCALING")),
    ],
    "NVTERoutingMapFormat": ["BYTEMAP", "BITMAP_U8"],
    "NVTEQBHistogramMode": ["TWO_KERNEL", "FUSED_ATOMIC"],
    "Float8BlockScaleTensorFormat": ["GEMM_READY", "COMPACT", "INVALID"],
    "CommOverlapType": ["RS", "AG"],
    "CommOverlapAlgo": [
        *("BULK_OVERLAP_AG", "BULK_OVERLAP_RS", "SPLIT_PIPELINED_AG_P2P", "SPLIT_PIPELINED_RS"),
        *("SPLIT_PIPELINED_RS_P2P", "ATOMIC_GEMM_RS", "ATOMIC_GEMM_AG_P2P", "ATOMIC_GEMM_RS_P2P"),
        "EXTERNAL_BULK_OVERLAP_AG",
    ],
}

_WITH_512 = {
    "NVTE_Fused_Attn_Backend": [
        *("NVTE_F16_max512_seqlen", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend")
    ]
}

_COMMUNICATION = (
    *("CommOverlapCore", "CommOverlapBase", "CommOverlapP2PBase"),
    *("CommOverlapHelper", "CommOverlap", "CommOverlapP2P"),
)


def extension(
    functions: Mapping[str, Callable[..., Any]], versions: Mapping[str, int], release: Release
) -> ModuleType:
    """The stand-in module of a release.

    :param functions: the emulated functions; each runs without gradients and outside CPU autocast,
        as kernels do.
    :param versions: constants that functions of these names return, whatever their arguments.

    Every other public name is a function that raises UnsupportedByEmulation when called.
    """
    module = refusing_module(NAME)
    module.__doc__ = "CPU emulation of TransformerEngine's compiled torch extension."
    module.__dict__.update(_types(release))
    module.__dict__.update({name: kernel(function) for name, function in functions.items()})
    for name, number in versions.items():
        setattr(module, name, lambda *_arguments, number=number: number)
    return module


def refusing_module(name: str) -> ModuleType:
    """A module whose every name but hidden ones is a function that raises
    UnsupportedByEmulation."""
    module = ModuleType(name, "Not carried by the CPU emulation.")
    # 2.15 imports a function of Triton's whose name begins with one underscore
    hidden = "_" if name == NAME else "__"
    module.__dict__["__getattr__"] = functools.partial(_missing, hidden)
    return module


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, made opaque to autograd and CPU autocast, as a kernel is."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if not torch.is_autocast_enabled("cpu"):
                return function(*args, **kwargs)
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)

    return call


def _types(release: Release) -> dict[str, Any]:
    numbered = _NUMBERED if release >= NO_ATTENTION_OF_512 else _NUMBERED | _WITH_512
    enums: dict[str, Any] = {
        name: IntEnum(name, {member: n for n, member in enumerate(members)}, module=NAME)
        for name, members in numbered.items()
    }
    enums["DType"] = IntEnum("DType", _DTYPES, module=NAME)
    plain = {name: type(name, (), {"__init__": _no_communication}) for name in _COMMUNICATION}
    return {**enums, **plain, "FP8TensorMeta": type("FP8TensorMeta", (), {"__module__": NAME})}


def _no_communication(self: object, *_args: object, **_kwargs: object) -> None:
    refuse(type(self).__name__, "leave communication overlap off")


def _missing(hidden: str, name: str) -> Any:
    if name.startswith(hidden) or name in _ABSENT:
        raise AttributeError(f"the emulated module has no attribute {name!r}")
    return refused(name)
