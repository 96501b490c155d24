"""The names of TransformerEngine 1.x's extension that do not compute: enums, metadata,
placeholders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import torch

from te_on_cpu.kernels import Format
from te_on_cpu.refusal import refuse

EXTENSION = "transformer_engine_torch"


def _enum(name: str, members: Iterable[str] | dict[str, int]) -> Any:
    """An enum as the extension exports it; its module is the extension, as pickles refer to it."""
    numbered = members if isinstance(members, dict) else {m: i for i, m in enumerate(members)}
    return IntEnum(name, numbered, module=EXTENSION)


# Values: common/include/transformer_engine/transformer_engine.h, 64-bit integers are not exported.
DType = _enum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 1,
        "kFloat32": 3,
        "kFloat16": 4,
        "kBFloat16": 5,
        "kFloat8E4M3": 6,
        "kFloat8E5M2": 7,
    },
)
FP8FwdTensors = _enum(
    "FP8FwdTensors", [f"GEMM{i}_{t}" for i in (1, 2, 3) for t in ("INPUT", "WEIGHT", "OUTPUT")]
)
FP8BwdTensors = _enum(
    "FP8BwdTensors", [f"GRAD_{t}{i}" for i in (1, 2, 3) for t in ("OUTPUT", "INPUT")]
)
_ENUMS = [
    DType,
    FP8FwdTensors,
    FP8BwdTensors,
    _enum(
        "NVTE_Bias_Type",
        ["NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"],
    ),
    _enum(
        "NVTE_Mask_Type",
        [
            "NVTE_NO_MASK",
            "NVTE_PADDING_MASK",
            "NVTE_CAUSAL_MASK",
            "NVTE_PADDING_CAUSAL_MASK",
            "NVTE_CAUSAL_BOTTOM_RIGHT_MASK",
            "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
        ],
    ),
    _enum(
        "NVTE_QKV_Layout",
        [
            *("NVTE_SB3HD", "NVTE_SBH3D", "NVTE_SBHD_SB2HD", "NVTE_SBHD_SBH2D"),
            *("NVTE_SBHD_SBHD_SBHD", "NVTE_BS3HD", "NVTE_BSH3D", "NVTE_BSHD_BS2HD"),
            *("NVTE_BSHD_BSH2D", "NVTE_BSHD_BSHD_BSHD", "NVTE_T3HD", "NVTE_TH3D"),
            *("NVTE_THD_T2HD", "NVTE_THD_TH2D", "NVTE_THD_THD_THD"),
        ],
    ),
    _enum(
        "NVTE_Fused_Attn_Backend",
        {
            "NVTE_No_Backend": -1,
            "NVTE_F16_max512_seqlen": 0,
            "NVTE_F16_arbitrary_seqlen": 1,
            "NVTE_FP8": 2,
        },
    ),
]
_PIPELINED = (
    *("BULK_OVERLAP_AG", "BULK_OVERLAP_RS", "SPLIT_PIPELINED_AG_P2P", "SPLIT_PIPELINED_RS"),
    *("SPLIT_PIPELINED_RS_P2P", "ATOMIC_GEMM_RS", "ATOMIC_GEMM_AG_P2P", "ATOMIC_GEMM_RS_P2P"),
)


@dataclass(frozen=True)
class _Overlap:
    """How communication is overlapped with products: the enums, and the classes that are for
    annotations only."""

    enums: tuple[Any, ...]
    classes: tuple[str, ...]


#: pytorch/csrc/extensions/pybind.cpp of 1.12.
_IN_PYTORCH = _Overlap(
    (_enum("UbufOverlapAlgo", _PIPELINED),),
    ("UbufBootstrapCallbacks", "UbufCommOverlap", "UbufP2PCommOverlap"),
)
#: From 1.13 on in common/util/pybind_helper.h.
_IN_COMMON = _Overlap(
    (_enum("CommOverlapType", ["RS", "AG"]), _enum("CommOverlapAlgo", _PIPELINED)),
    ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P"),
)
#: FP8 formats by DType.
FORMAT: dict[Any, Format] = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}
#: Torch dtypes by DType; FP8 data is stored as uint8.
TORCH_DTYPE = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.uint8,
    DType.kFloat8E5M2: torch.uint8,
}


class FP8TensorMeta:
    """Scales [n], inverses [n] and amax histories [length, n] of one direction of a module."""

    def __init__(self) -> None:
        self.scale = torch.Tensor()
        self.scale_inv = torch.Tensor()
        self.amax_history = torch.Tensor()

    def __reduce__(self) -> NoReturn:
        # The extension's class cannot be pickled either, so torch.save and deepcopy of a whole
        # module fail there too.
        raise TypeError(f"cannot pickle '{EXTENSION}.FP8TensorMeta' object")


FP8TensorMeta.__module__ = EXTENSION


def _placeholder(name: str) -> type:
    """A class of the communication overlap, for annotations only: creating one is refused."""

    def construct(_self: object, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse(name)

    return type(name, (), {"__init__": construct, "__module__": EXTENSION})


def plain_names(since: tuple[int, int]) -> dict[str, Any]:
    """Everything the extension exports besides its functions, by name."""
    overlap = _IN_PYTORCH if since < (1, 13) else _IN_COMMON
    return {
        **{enum.__name__: enum for enum in (*_ENUMS, *overlap.enums)},
        **{name: _placeholder(name) for name in overlap.classes},
        "FP8TensorMeta": FP8TensorMeta,
        "_num_cublas_streams": 4,
    }
