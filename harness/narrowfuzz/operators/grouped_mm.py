"""``torch.nn.functional.grouped_mm``: each group of rows times its own matrix, as in experts that
get any number of tokens, and the gradients of both operands, which are calls of the same kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format
from narrowfuzz.operators.bmm import Factors, MultiplyRounding, rounding_of, sums_of
from narrowfuzz.operators.operator import TORCH_DTYPE, Expected, Operator, Read
from narrowfuzz.operators.sampled import judge_sampled, sample_places
from narrowfuzz.trace.trace import OperatorCall

#: Calls with more products than this take longer to judge than to compute.
_MOST, _MOST_QUANTISED = 2**22, 2**24
_Place = tuple[slice | int, ...]


@dataclass(frozen=True)
class _Form:
    """Which dimensions are grouped; this depends on the numbers of dimensions of the operands."""

    #: The index of a group's rows, columns or products in each operand, and in the result.
    input: str
    mat2: str
    output: str
    #: The dimension of the input, and of the result, along which rows do not depend on one another.
    rows: tuple[int, int]


#: One character per dimension: ``g`` is the slice of the group, ``i`` its number, ``:`` everything.
_FORMS = {
    (2, 3): _Form("g:", "i::", "g:", (0, 0)),
    (3, 2): _Form("i::", ":g", ":g", (1, 0)),
    (2, 2): _Form(":g", "g:", "i::", (0, 1)),
    (3, 3): _Form("i::", "i::", "i::", (1, 1)),
}


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b, offs = named["self"], named["mat2"], named.get("offs")
    if not result.numel():
        return None
    if named.get("bias") is not None:
        raise Unjudged("products of groups with a bias")
    if b.numel() > _MOST:
        raise Unjudged("more than 2^22 products a row take longer to judge than to compute")
    tensors = {"input": a, "mat2": b}
    if offs is not None:
        in_order(offs.tolist(), _grouped_length(a, b))
        tensors["offs"] = offs.float()
    return Read(tensors, {"output": result}, {})


def read_quantised(
    named: Mapping[str, Any], result: Any, settings: Mapping[str, Any]
) -> Read | None:
    """How a call of one of torchao's quantised products of groups is read: its rows and matrices
    ``A`` and ``B_t``, and ``offs``."""
    a, b, offs = named["A"], named["B_t"], named["offs"]
    if not result.numel():
        return None
    if a.shape[0] * b[0].numel() > _MOST_QUANTISED:
        raise Unjudged("more than 2^24 products take longer to judge than to compute")
    in_order(offs.tolist(), len(a))
    return Read({"input": a, "mat2": b, "offs": offs.float()}, {"output": result}, settings)


def title_of_quantised(kind: str, call: OperatorCall) -> str:
    """Such a call in words."""
    a, b = (list(call.tensors[name].shape) for name in ("input", "mat2"))
    offs = ", ".join(map(str, call.tensors["offs"].astype(int).tolist()))
    title = f"torchao's {kind} of {TORCH_DTYPE[call.dtypes['input']]} tensors of {a} and {b}"
    return f"{title}, groups up to {offs}{', padded' * bool(call.settings.get('padded'))}"


def _grouped_length(a: Any, b: Any) -> int:
    """The length of the dimension (rows, columns or products) that all groups share."""
    return int(b.shape[-1] if a.ndim == 3 else a.shape[1 if b.ndim == 2 else 0])


def in_order(offs: list[int], length: int) -> None:
    """Raises Unjudged for offsets that decrease or exceed ``length``, whose meaning the
    documentation does not define."""
    if any(start > end for start, end in zip([0, *offs], [*offs, length], strict=True)):
        raise Unjudged(f"offsets {offs} of {length} rows run backwards, or beyond the end")


def rows_of_groups(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """The number and the rows of each group, from the places ``ends`` where the groups end."""
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield group, slice(start, end)


def _groups(
    a: F32 | F64, b: F32 | F64, offs: F32 | None
) -> Iterator[tuple[_Place, _Place, _Place]]:
    """For each group, the places of its numbers in both operands and in the result."""
    form = _FORMS[a.ndim, b.ndim]
    ends = [0] * len(a) if offs is None else offs.astype(int).tolist()
    for number, rows in rows_of_groups(ends):
        of: dict[str, slice | int] = {"g": rows, "i": number, ":": slice(None)}
        left, right, place = (
            tuple(of[dim] for dim in dims) for dims in (form.input, form.mat2, form.output)
        )
        yield left, right, place


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """Each group as for ``torch.bmm``; a group without products gives zeros. Nothing is known of
    rows and columns behind the last group: torch leaves them unwritten and documents that they are
    ignored."""
    a, b, offs = (call.tensors.get(name) for name in ("input", "mat2", "offs"))
    assert a is not None and b is not None
    fmt, shape = FORMATS[call.dtypes["output"]], call.outputs["output"].shape
    return {"output": products_of_groups(a, b, offs, shape, fmt, rounding_of(call))}


def products_of_groups(
    a: F32 | F64,
    b: F32 | F64,
    offs: F32 | None,
    shape: tuple[int, ...],
    fmt: Format,
    rounding: MultiplyRounding,
) -> Expected:
    """The expectation of a result of this ``shape``, group by group by ``bmm.sums_of``; nothing is
    known outside all groups. Groups that multiply nothing are skipped: most experts may have no
    rows."""
    centre, radius, unknown = np.zeros(shape), np.zeros(shape), np.ones(shape, dtype=bool)
    for left, right, place in _groups(a, b, offs):
        if not a[left].size or not b[right].size:
            unknown[place] = False
            continue
        with np.errstate(invalid="ignore"):  # unwritten memory may hold a signalling NaN
            one, other = (Factors.of(x.astype(np.float64), rounding) for x in (a[left], b[right]))
        centre[place], radius[place], unknown[place] = sums_of(one, other, fmt, rounding)
    return Expected.within(centre, radius, fmt, unknown)


def _of_some_rows(call: OperatorCall) -> dict[str, Expected]:
    """The expected results; for a large call only of some of the rows that do not depend on one
    another."""
    a, b = call.tensors["input"], call.tensors["mat2"]
    of_input, of_output = _FORMS[a.ndim, b.ndim].rows
    rows = a.shape[of_input]
    # products of one row: a row of a 2-D operand meets one of the matrices, or all of a 2-D operand
    each = b.size // (len(b) if a.ndim < b.ndim else 1)
    if rows * each <= _MOST:
        return _expected(call)
    chosen = sample_places(rows, _MOST // (4 * each))
    if a.ndim < b.ndim:  # these rows are the grouped ones
        offs = np.searchsorted(chosen, call.tensors["offs"]).astype(np.float32)
        call = replace(call, tensors={**call.tensors, "offs": offs})
    return judge_sampled(_expected, call, {"input": of_input, "output": of_output}, chosen)


def _title(call: OperatorCall) -> str:
    a, b = (list(call.tensors[name].shape) for name in ("input", "mat2"))
    dtype = TORCH_DTYPE[call.dtypes["input"]]
    title = f"torch.nn.functional.grouped_mm of {dtype} tensors of {a} and {b}"
    if "offs" not in call.tensors:
        return title
    offs = call.tensors["offs"].astype(int).tolist()
    few = offs if len(offs) <= 8 else [*offs[:7], "..."]
    return f"{title}, groups up to {', '.join(map(str, few))}"


OPERATOR = Operator(
    name="grouped_mm",
    words="products of groups",
    kernels=("aten::_grouped_mm",),
    read=_read,
    expected=_of_some_rows,
    expression="torch._grouped_mm(input, mat2, offs=None if offs is None else offs.int())",
    title=_title,
    optional=("offs",),
)
