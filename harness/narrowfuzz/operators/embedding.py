"""The backward of ``torch.nn.functional.embedding``: gradient rows are added up by the id that
looked them up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.index_add import sums_at
from narrowfuzz.operators.operator import TORCH_DTYPE, Deviation, Expected, Operator, Read, narrow
from narrowfuzz.operators.sampled import Judging, judge_sampled, sample_places
from narrowfuzz.operators.sum import rounded
from narrowfuzz.trace.trace import OperatorCall

#: Calls with more numbers than this take longer to judge than to add.
_MOST = 2**20


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    if named.get("scale_grad_by_freq"):
        raise Unjudged("scale_grad_by_freq")
    indices = named["indices"]
    rows, padding = int(named["num_weights"]), int(named["padding_idx"])
    if rows > 2**24:  # ids are recorded in fp32
        raise Unjudged("more than 2^24 embeddings")
    return Read(
        {"grad_output": named["grad_output"], "indices": indices.float()},
        {"grad_weight": result},
        {"rows": rows, "padding": padding},
    )


def _terms(call: OperatorCall) -> tuple[F64, Any]:
    """The gradient rows that count, all but those of padding, and the id of each."""
    ids = call.tensors["indices"].ravel().astype(np.int64)
    grad_output = call.tensors["grad_output"].astype(np.float64)
    rows = grad_output.reshape(len(ids), grad_output.shape[-1])
    counts = ids != call.settings["padding"]
    return rows[counts], ids[counts]


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """For every id the sum of its rows, added in fp32 in any order and rounded once; 0 for an id
    that does not occur."""
    terms, ids = _terms(call)
    rows, columns = call.settings["rows"], terms.shape[1]
    places = ids[:, None] * columns + np.arange(columns)
    fmt = FORMATS[call.dtypes["grad_weight"]]
    return {"grad_weight": sums_at(np.zeros((rows, columns)), terms, places, fmt)}


def _of_some_columns(judging: Judging, call: OperatorCall) -> dict[str, Expected]:
    """What ``judging`` expects of a call; for a large call only of some columns."""
    rows, columns = call.tensors["indices"].size, call.tensors["grad_output"].shape[-1]
    if rows * columns <= _MOST:
        return dict(judging(call))
    axes = {"grad_output": call.tensors["grad_output"].ndim - 1, "grad_weight": 1}
    return judge_sampled(judging, call, axes, sample_places(columns, _MOST // rows))


#: torch's CUDA kernel handles up to this many ids by warps, of 32 each: source,
#: aten/src/ATen/native/cuda/Embedding.cu.
_SHORT, _WARP = 3072, 32


def _narrow_sums(call: OperatorCall) -> dict[str, Expected]:
    """The result of torch's CPU kernel, which adds bf16 and fp16 rows one by one and rounds each
    partial sum."""
    dtype = call.dtypes["grad_output"]
    if dtype == "fp32":
        return {}
    terms, ids = _terms(call)
    total = np.zeros((call.settings["rows"], terms.shape[1]), dtype=np.float32)
    with np.errstate(all="ignore"):
        for id, row in zip(ids, terms.astype(np.float32), strict=True):
            total[id] = rounded(total[id] + row, dtype)
    return {"grad_weight": Expected.exactly(total)}


def _chunked_sums(call: OperatorCall) -> dict[str, Expected]:
    """The result of torch's CUDA kernel for bf16 and fp16 rows of up to 3072 ids: it adds the rows
    of 32 ids in fp32 and rounds their sum, adds that to the total so far, and rounds again."""
    dtype, ids = call.dtypes["grad_output"], call.tensors["indices"].ravel().astype(np.int64)
    if dtype == "fp32" or len(ids) > _SHORT:
        return {}
    rows, padding = call.tensors["grad_output"].reshape(len(ids), -1), call.settings["padding"]
    total = np.zeros((call.settings["rows"], rows.shape[1]), dtype=np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), _WARP):
            chunk = np.zeros_like(total)
            for at in range(start, min(start + _WARP, len(ids))):
                if ids[at] != padding:
                    chunk[ids[at]] += rows[at]
            total = rounded(total + rounded(chunk, dtype), dtype)
    return {"grad_weight": Expected.exactly(total)}


def _title(call: OperatorCall) -> str:
    shape, dtype = list(call.tensors["grad_output"].shape), TORCH_DTYPE[call.dtypes["grad_output"]]
    return f"the backward of torch.embedding of a {dtype} tensor of {shape}"


OPERATOR = Operator(
    name="embedding_backward",
    words="gradients of embeddings",
    kernels=("aten::embedding_dense_backward",),
    read=_read,
    expected=partial(_of_some_columns, _expected),
    expression="torch.ops.aten.embedding_dense_backward(grad_output, indices.long(), {rows}, "
    "{padding}, False)",
    title=_title,
    results=("grad_weight",),
    deviations=(
        Deviation(
            "embedding_narrow_sums",
            "rows of an embedding's gradient are summed in their own dtype",
            ("cpu",),
            partial(_of_some_columns, _narrow_sums),
            narrow,
        ),
        Deviation(
            "embedding_chunked_sums",
            "sums of 32 rows of an embedding's gradient are added up in their own dtype",
            ("cuda",),
            partial(_of_some_columns, _chunked_sums),
        ),
    ),
)
