"""torchao 0.18's kernels that quantise the operands of experts to FP8, each judged separately
(``prototype/moe_training/kernels``): codes and scales bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.numerics.plan import OperandPlan
from narrowfuzz.operators.fp8_rows import Rows, quantised, row_plan, without_nan
from narrowfuzz.operators.grouped_mm import in_order, rows_of_groups
from narrowfuzz.operators.operator import TORCH_DTYPE, Deviation, Expected, Operator, Read
from narrowfuzz.trace.trace import OperatorCall

_Place = tuple[slice | int, ...]
#: Rows that are quantised independently of others: their numbers, the place of their codes in the
#: result, whether these are transposed there, and the place of their scales.
_Part = tuple[F32, _Place, bool, _Place]
_Parts = Callable[[F32, list[int]], Iterator[_Part]]
#: Calls with more numbers than this take longer to judge than to quantise.
_MOST = 2**20
_ALL = slice(None)


def _of_rows(x: F32, ends: list[int]) -> Iterator[_Part]:
    """[M, K], one scale per row."""
    yield x, (_ALL, _ALL), False, (_ALL, 0)


def _of_columns(x: F32, ends: list[int]) -> Iterator[_Part]:
    """[E, K, N], one scale per column of each matrix."""
    for expert, matrix in enumerate(x):
        yield matrix.T, (expert,), True, (expert,)


def _of_transposed(x: F32, ends: list[int]) -> Iterator[_Part]:
    """[E, K, N] -> [E, N, K], one scale per row of each matrix."""
    for expert, matrix in enumerate(x):
        yield matrix, (expert,), True, (expert,)


def _of_groups_of_columns(x: F32, ends: list[int]) -> Iterator[_Part]:
    """[M, K] with groups of columns, one scale per row of each group."""
    for group, columns in rows_of_groups(ends):
        yield x[:, columns], (_ALL, columns), False, (group,)


def _of_groups_of_rows(x: F32, ends: list[int]) -> Iterator[_Part]:
    """[M, K] with groups of rows, one scale per column of each group."""
    for group, rows in rows_of_groups(ends):
        yield x[rows].T, (rows,), True, (group,)


@dataclass(frozen=True)
class _Kernel:
    """One of these kernels; ``name`` is its name in torch's dispatcher."""

    name: str
    words: str
    parts: _Parts
    deviations: tuple[Deviation, ...] = ()


def _read(kernel: _Kernel, named: Mapping[str, Any], result: Any) -> list[Read | str]:
    """One call for each tensor: a kernel that takes two tensors counts as two calls."""
    if str(named["output_dtype"]) != "torch.float8_e4m3fn":
        raise Unjudged(f"{kernel.words} to another format than E4M3")
    offs = named.get("offsets")
    inputs = [named[name] for name in named if name.startswith("hp_tensor")]
    reads: list[Read | str] = []
    for x, codes, scales in zip(inputs, result[::2], result[1::2], strict=True):
        if not x.numel():
            continue
        if x.numel() > _MOST:
            raise Unjudged("more than 2^20 numbers take longer to judge than to quantise")
        tensors = {"input": x}
        if offs is not None:
            along = 1 if kernel.parts is _of_groups_of_columns else 0
            in_order(offs.tolist(), x.shape[along])
            tensors["offs"] = offs.float()
            scales = scales.reshape(len(offs), -1)
        how = {"kernel": kernel.name, "power_of_two": named["round_scales_to_power_of_2"]}
        reads.append(Read(tensors, {"codes": codes.float(), "scales": scales}, how))
    return reads


def _expected(
    parts: _Parts, made: Callable[[F32, OperandPlan], Rows], call: OperatorCall
) -> dict[str, Expected]:
    """Codes and scales, exactly. Nothing is known of elements outside all groups, nor of rows whose
    scale is uncertain. In a row with NaN, the code of the NaN itself must be NaN, and nothing else
    is known."""
    plan = row_plan(power_of_two=call.settings["power_of_two"])
    whole: dict[str, F64] = {n: np.zeros(x.shape) for n, x in call.outputs.items()}
    unknown = {n: np.ones(x.shape, dtype=bool) for n, x in call.outputs.items()}
    ends = call.tensors["offs"].astype(int).tolist() if "offs" in call.tensors else []
    for x, place, across, scale_place in parts(call.tensors["input"], ends):
        rows = made(np.ascontiguousarray(x), plan)
        open_codes = rows.scale_uncertain[:, None] | (np.isnan(rows.codes) & ~np.isnan(x))
        whole["codes"][place] = rows.codes.T if across else rows.codes
        unknown["codes"][place] = open_codes.T if across else open_codes
        # scales of a matrix are a row, or a matrix of one row or column
        shape = whole["scales"][scale_place].shape
        doubted = rows.scale_uncertain | np.isnan(rows.scale)
        whole["scales"][scale_place] = rows.scale.reshape(shape)
        unknown["scales"][scale_place] = doubted.reshape(shape)
    return {n: Expected.between(whole[n], whole[n], unknown[n]) for n in whole}


def _nan_hidden(parts: _Parts, call: OperatorCall) -> Mapping[str, Expected]:
    if not np.isnan(call.tensors["input"]).any():
        return {}
    return _expected(parts, without_nan, call)


#: The numbers of rows of a group that the one-pass kernel may take at once.
_AT_ONCE = (256, 512, 1024, 2048)


def _by_average(call: OperatorCall) -> Mapping[str, Expected]:
    """The result of the one-pass kernel, which is chosen by the average size of a group: it takes
    that many rows, rounded up to a power of two, of each group, and writes no others. On a CPU
    memory that was never written is NaN; on a GPU it holds anything."""
    x, ends = call.tensors["input"], call.tensors["offs"].astype(int).tolist()
    most = 1
    while most < -(-len(x) // len(ends)):
        most *= 2
    beyond = [range(rows.start + most, rows.stop) for _, rows in rows_of_groups(ends)]
    if most not in _AT_ONCE or not any(beyond):
        return {}

    def begun(x: F32, ends: list[int]) -> Iterator[_Part]:
        for group, rows in rows_of_groups(ends):
            rows = slice(rows.start, min(rows.stop, rows.start + most))
            yield x[rows].T, (rows,), True, (group,)

    found = _expected(begun, without_nan, call)
    for rows in beyond:
        unwritten = call.outputs["codes"][rows] if call.device == "cuda" else np.nan
        found["codes"].lo[rows] = found["codes"].hi[rows] = unwritten
        found["codes"].unknown[rows] = False
    return _with_scales_of_nothing(call, found) if call.device == "cuda" else found


def _mask(parts: _Parts) -> Deviation:
    return Deviation(
        "fp8_groups_by_columns_mask",
        "the last block of a group's scales, where it is not full, writes scales of nothing over "
        "the next group's first ones",
        ("cuda",),
        partial(_beside_mask, parts),
    )


_AVERAGE = Deviation(
    "fp8_groups_by_average",
    "of a group that is larger than the average, the rows behind the first 256 (512, 1024) are not "
    "written",
    ("cpu", "cuda"),
    _by_average,
)


#: The numbers of rows, or columns, that a block may have.
_BLOCKS = (32, 64, 128)


def _beside_mask(parts: _Parts, call: OperatorCall) -> Mapping[str, Expected]:
    return _with_scales_of_nothing(call, _expected(parts, quantised, call))


def _with_scales_of_nothing(call: OperatorCall, found: dict[str, Expected]) -> dict[str, Expected]:
    """``found`` with the scales that the mask of the kernel lets it overwrite. The mask counts
    within a block. So a last block that is not full writes the scale of an amax of 0 over the first
    scales of the next group, unless that group's own scales are written later."""
    scales, got = found["scales"], call.outputs["scales"]
    length = got.shape[1]
    over = max(-length % block if length > block else 0 for block in _BLOCKS)
    plan = row_plan(power_of_two=call.settings["power_of_two"])
    nothing = quantised(np.zeros((1, 1), np.float32), plan).scale[0]
    wrong = np.zeros(got.shape, dtype=bool)
    wrong[1:, :over] = got[1:, :over] == nothing
    scales.lo[wrong] = scales.hi[wrong] = nothing
    return found


def _title(call: OperatorCall) -> str:
    shape, dtype = list(call.tensors["input"].shape), TORCH_DTYPE[call.dtypes["input"]]
    title = f"torchao's {call.settings['kernel']} of a {dtype} tensor of {shape}"
    if "offs" not in call.tensors:
        return title
    return f"{title}, groups up to {', '.join(map(str, call.tensors['offs'].astype(int)))}"


_KERNELS = (
    _Kernel("triton_fp8_rowwise_2d_scale_and_cast", "FP8 casts by rows", _of_rows),
    _Kernel("triton_fp8_colwise_3d_scale_and_cast", "FP8 casts of experts", _of_columns),
    _Kernel("triton_fp8_rowwise_transpose_rhs", "FP8 casts of transposed experts", _of_transposed),
    _Kernel(
        "triton_fp8_rowwise_transpose_rhs_fused", "FP8 casts of transposed experts", _of_transposed
    ),
    _Kernel(
        "triton_fp8_per_group_rowwise_scales",
        "FP8 casts of groups by rows",
        _of_groups_of_columns,
        (_mask(_of_groups_of_columns),),
    ),
    _Kernel(
        "triton_fp8_per_group_colwise_scales",
        "FP8 casts of groups by columns",
        _of_groups_of_rows,
        (_AVERAGE, _mask(_of_groups_of_rows)),
    ),
    _Kernel(
        "triton_fp8_per_group_colwise_scales_dual",
        "FP8 casts of groups by columns",
        _of_groups_of_rows,
    ),
)

OPERATORS = tuple(
    Operator(
        name=kernel.name.removeprefix("triton_"),
        words=kernel.words,
        kernels=(f"torchao::{kernel.name}",),
        read=partial(_read, kernel),
        expected=partial(_expected, kernel.parts, quantised),
        expression="fp8_cast({kernel}, input, offs, {power_of_two})",
        title=_title,
        results=("codes", "scales"),
        optional=("offs",),
        deviations=(
            Deviation(
                "fp8_grouped_nan_hidden",
                "a NaN becomes the code 448, and leaves no trace in the scale of its row",
                ("cpu", "cuda"),
                partial(_nan_hidden, kernel.parts),
            ),
            *kernel.deviations,
        ),
        helper="fp8_cast",
    )
    for kernel in _KERNELS
)
