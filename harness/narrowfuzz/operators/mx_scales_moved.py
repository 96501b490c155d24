"""torchao 0.18's kernels that move MX scales into the layout that tensor cores read, and the one
that dequantises MXFP8, each judged separately (``prototype/mx_formats/kernels.py``,
``prototype/moe_training/kernels/mxfp8/quant.py``).

Tiles are those of cuBLAS (documentation of its block scaling factors): 128 rows and 4 columns in
512 bytes, the byte of row r and column c at 16 (r mod 32) + 4 (r div 32) + c. Groups of rows, or of
columns, are padded to whole tiles; all bytes behind the last tile are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import BF16, F32, F64, FP32, round_to
from narrowfuzz.operators.grouped_mm import in_order, rows_of_groups
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.trace.trace import OperatorCall

_ROWS, _COLUMNS = 128, 4
#: Calls with more bytes than this take longer to judge than to move.
_MOST = 2**22
#: The byte that means NaN, and the exponent of byte 0.
_NAN, _LEAST = 255.0, -127.0
_Moved = Callable[[F64, list[int], int], F64]


def tiles(scales: F64) -> F64:
    """The bytes of [R, C], padded with zeros to whole tiles, one tile of 512 bytes after the
    other."""
    down, across = (
        -(-size // by) for size, by in zip(scales.shape, (_ROWS, _COLUMNS), strict=True)
    )
    whole = np.zeros((down * _ROWS, across * _COLUMNS))
    whole[: scales.shape[0], : scales.shape[1]] = scales
    parts = whole.reshape(down, 4, 32, across, _COLUMNS)
    return parts.transpose(0, 3, 2, 1, 4).ravel()


def _whole(scales: F64, ends: list[int], size: int) -> F64:
    return tiles(scales)


def _experts(scales: F64, ends: list[int], size: int) -> F64:
    return np.concatenate([tiles(one) for one in scales])


def _groups_of_rows(scales: F64, ends: list[int], size: int) -> F64:
    parts = [tiles(scales[rows]) for _, rows in rows_of_groups(ends)]
    return _with_zeros(parts, size)


def _groups_of_columns(scales: F64, ends: list[int], size: int) -> F64:
    parts = [tiles(scales[:, columns]) for _, columns in rows_of_groups(ends)]
    return _with_zeros(parts, size)


def _with_zeros(parts: list[F64], size: int) -> F64:
    used = np.concatenate(parts)
    return np.concatenate([used, np.zeros(max(0, size - len(used)))])


def _bytes(scales: Any) -> Any:
    """The bytes, as numbers, of a tensor of bytes or of E8M0 numbers."""
    if str(scales.dtype) == "torch.uint8":
        return scales.float()
    return scales.double().log2().sub(_LEAST).nan_to_num(_NAN).float()


def _read(along: int | None, named: Mapping[str, Any], result: Any) -> Read | None:
    scales = next(named[n] for n in ("scale_tensor", "scales_tensor") if n in named)
    if not scales.numel():
        return None
    if result.numel() > _MOST:
        raise Unjudged("more than 2^22 bytes take longer to judge than to move")
    tensors = {"input": _bytes(scales)}
    if along is not None:
        ends = named["input_offsets"]
        in_order(ends.tolist(), scales.shape[along])
        tensors["offs"] = ends.float()
    return Read(tensors, {"output": _bytes(result)}, {})


def _expected(moved: _Moved, call: OperatorCall) -> dict[str, Expected]:
    got = call.outputs["output"]
    ends = call.tensors["offs"].astype(int).tolist() if "offs" in call.tensors else []
    found = moved(call.tensors["input"].astype(np.float64), ends, got.size).reshape(got.shape)
    return {"output": Expected.between(found, found, np.zeros(got.shape, dtype=bool))}


def _read_codes(named: Mapping[str, Any], result: Any) -> Read | None:
    codes, scales = named["e4m3_data"], named["e8m0_scales"]
    if str(scales.dtype) != "torch.uint8":
        raise Unjudged("scales that are no bytes: torchao's kernel converts their values")
    if not result.numel():
        return None
    if result.numel() > _MOST:
        raise Unjudged("more than 2^22 numbers take longer to judge than to dequantise")
    flat = codes.float().reshape(-1, codes.shape[-1])
    how = {"dtype": str(named["out_dtype"]).removeprefix("torch.")}
    tensors = {"input": flat, "scales": scales.float()}
    return Read(tensors, {"output": result.reshape(flat.shape)}, how)


def _dequantised(call: OperatorCall) -> dict[str, Expected]:
    """A code times its power of two; a product, or a power, below fp32's normal numbers may be
    flushed to zero."""
    scales: F32 = call.tensors["scales"]
    codes = call.tensors["input"].astype(np.float64)
    with np.errstate(all="ignore"):
        power = np.where(scales == _NAN, np.nan, np.exp2(scales.astype(np.float64) + _LEAST))
        power = np.repeat(power, codes.shape[1] // scales.shape[1], axis=1)
        fmt = BF16 if call.settings["dtype"] == "bfloat16" else FP32
        right = round_to(round_to(codes * power, FP32, overflow="ieee"), fmt, overflow="ieee")
        tiny = (power < FP32.min_normal) | (np.abs(right) < FP32.min_normal)
    lo, hi = (np.where(tiny, end(right, 0.0), right) for end in (np.minimum, np.maximum))
    return {"output": Expected.between(lo, hi, np.zeros(right.shape, dtype=bool))}


def _title(name: str, call: OperatorCall) -> str:
    of = f"torchao's {name} of a tensor of {list(call.tensors['input'].shape)}"
    if "offs" not in call.tensors:
        return of
    return f"{of}, groups up to {', '.join(map(str, call.tensors['offs'].astype(int)))}"


def _moving(name: str, moved: _Moved, along: int | None = None) -> Operator:
    kernel = f"triton_{name}"
    return Operator(
        name=name,
        words="MX scales that are moved",
        kernels=(f"torchao::{kernel}",),
        read=partial(_read, along),
        expected=partial(_expected, moved),
        expression=f"mx_scales_moved({kernel!r}, input, offs)",
        title=partial(_title, kernel),
        optional=("offs",),
        helper="mx_scales_moved",
    )


OPERATORS = (
    _moving("mx_block_rearrange", _whole),
    _moving("mx_block_rearrange_per_group_3d", _experts),
    _moving("mx_block_rearrange_2d_M_groups", _groups_of_rows, 0),
    _moving("mx_block_rearrange_2d_K_groups", _groups_of_columns, 1),
    Operator(
        name="mxfp8_dequant_dim0",
        words="MXFP8 that is dequantised",
        kernels=("torchao::triton_mxfp8_dequant_dim0",),
        read=_read_codes,
        expected=_dequantised,
        expression="mxfp8_dequantised(input, scales, {dtype})",
        title=partial(_title, "triton_mxfp8_dequant_dim0"),
        helper="mxfp8_dequantised",
    ),
)
