"""torchao 0.18's kernels that move rows to experts and their gradients back, each judged separately
(``prototype/moe_training/ep/kernels.py`` and ``permute.py``, from torchtitan's
``models/moe/kernels.py``).

Rows arrive ordered by rank, then by expert; experts get theirs ordered by expert, then by rank,
with each group padded to whole blocks. Padding has the row number -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.trace.trace import OperatorCall

#: The row number of padding.
_PADDING = -1
#: Calls with more numbers than this take longer to judge than to move.
_MOST = 2**22


def _read_numbers(named: Mapping[str, Any], result: Any) -> Read | None:
    if not result.numel():
        return None
    counts = named["tokens_per_expert_group"]
    if int(counts.min()) < 0 or int(counts.sum()) > _MOST:
        raise Unjudged("fewer rows than none, or more than 2^22")
    of = {"counts": counts, "starts": named["start_index_values"], "ends": named["write_offsets"]}
    how = {name: int(named[name]) for name in ("experts_per_rank", "num_ranks", "max_len")}
    return Read({n: t.float() for n, t in of.items()}, {"output": result.float()}, how)


def _numbers(call: OperatorCall) -> dict[str, Expected]:
    counts, starts, first = (
        call.tensors[name].astype(int) for name in ("counts", "starts", "ends")
    )
    experts, found = call.settings["experts_per_rank"], np.full(call.settings["max_len"], _PADDING)
    for expert in range(experts):
        place = first[expert]
        for number in range(expert, experts * call.settings["num_ranks"], experts):
            found[place : place + counts[number]] = starts[number] + np.arange(counts[number])
            place += counts[number]
    return {"output": Expected.exactly(found)}


def _read_gradient(named: Mapping[str, Any], result: Any) -> Read | None:
    if not result.numel() or not named["grad_output"].numel():
        return None
    if named["grad_output"].numel() > _MOST:
        raise Unjudged("more than 2^22 numbers take longer to judge than to move")
    tensors = {"grad_output": named["grad_output"], "numbers": named["permuted_indices"].float()}
    return Read(tensors, {"grad_input": result}, {"rows": int(named["original_rows"])})


def _gradient(call: OperatorCall) -> dict[str, Expected]:
    """Each row's own gradient, once: no row goes to two places. Rows that go nowhere have zeros."""
    numbers, grad = call.tensors["numbers"].astype(int), call.tensors["grad_output"]
    found = np.zeros((call.settings["rows"], grad.shape[1]))
    rows = numbers != _PADDING
    found[numbers[rows]] = grad[rows]
    return {"grad_input": Expected.exactly(found)}


def _title(kernel: str, call: OperatorCall) -> str:
    of = next(iter(call.tensors.values()))
    return f"torchao's {kernel} of a tensor of {list(of.shape)}"


OPERATORS = (
    Operator(
        name="permuted_rows",
        words="numbers of the rows that experts get",
        kernels=("torchao::_fill_indices_wrapper",),
        read=_read_numbers,
        expected=_numbers,
        expression=(
            "permuted_rows(counts, starts, ends, {experts_per_rank}, {num_ranks}, {max_len})"
        ),
        title=lambda call: _title("fill_indices_wrapper", call),
        helper="permuted_rows",
    ),
    Operator(
        name="permuted_rows_gradient",
        words="gradients of rows that experts got",
        kernels=("torchao::_triton_permute_bwd",),
        read=_read_gradient,
        expected=_gradient,
        expression="permuted_rows_gradient(grad_output, numbers, {rows})",
        title=lambda call: _title("_triton_permute_bwd", call),
        results=("grad_input",),
        helper="permuted_rows_gradient",
    ),
)
