"""``torch.nn.functional.nll_loss`` and its backward, of log-probabilities [rows, classes];
``cross_entropy`` is this behind ``log_softmax``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F32, F64, FORMATS, FP32, round_to
from narrowfuzz.operators.operator import TORCH_DTYPE, Deviation, Expected, Operator, Read, narrow
from narrowfuzz.operators.sum import FLUSHED, rounded
from narrowfuzz.trace.trace import OperatorCall

#: torch's numbers for the values of ``reduction``.
_NONE, _MEAN = 0, 1


def _read(named: Mapping[str, Any], result: Any, outputs: Mapping[str, Any]) -> Read:
    x, target, weight = named["self"], named["target"], named.get("weight")
    if x.ndim != 2 or not x.numel() or max(x.shape) > 2**24:  # classes are recorded in fp32
        raise Unjudged("logits that are no matrix, empty or very large")
    tensors = {"input": x, "target": target.float()}
    tensors |= {} if weight is None else {"weight": weight}
    settings = {"reduction": int(named["reduction"]), "ignored": int(named["ignore_index"])}
    return Read(tensors, outputs, settings)


def _read_forward(named: Mapping[str, Any], result: Any) -> Read | None:
    whole = int(named["reduction"]) != _NONE
    outputs = {"output": result[0]} | ({"total_weight": result[1]} if whole else {})
    return _read(named, result, outputs)


def _read_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    read = _read(named, result, {"grad_input": result})
    more = {"grad_output": named["grad_output"], "total_weight": named["total_weight"]}
    return Read({**more, **read.tensors}, read.outputs, read.settings)


def _chosen(call: OperatorCall) -> tuple[NDArray[np.int64], NDArray[np.bool_], F64]:
    """The class of each row (0 if the row is ignored), whether the row counts, and the weight of
    its class (0 if it does not)."""
    target = call.tensors["target"].astype(np.int64)
    counts = target != call.settings["ignored"]
    classes = np.where(counts, target, 0)
    weight = call.tensors.get("weight")
    weights = np.ones(len(target)) if weight is None else weight.astype(np.float64)[classes]
    return classes, counts, np.where(counts, weights, 0.0)


def _terms(call: OperatorCall) -> tuple[F64, F64]:
    """The loss of each row, and its weight."""
    classes, counts, weights = _chosen(call)
    x = call.tensors["input"].astype(np.float64)[np.arange(len(classes)), classes]
    with np.errstate(all="ignore"):
        return np.where(counts, -x * weights, 0.0), weights


def _forward(call: OperatorCall) -> dict[str, Expected]:
    """The losses ``-input[row, target] weight[target]``, one rounding each, or their sum in
    fp32 in any order (gamma_{n+2} of the sum of magnitudes), for a mean divided by the sum of
    the weights."""
    terms, weights = _terms(call)
    fmt, how = FORMATS[call.dtypes["output"]], call.settings["reduction"]
    with np.errstate(all="ignore"):
        if how == _NONE:
            radius = 2.0 * U32 * np.abs(terms)
            return {"output": Expected.within(terms, radius, fmt, ~np.isfinite(terms))}
        g, size, total = gamma(len(terms) + 2), np.abs(terms).sum(), weights.sum()
        centre, radius = terms.sum(), g * size + FLUSHED
        if how == _MEAN:
            radius = radius / np.abs(total) + (g * weights.sum() / total + 2.0 * U32) * np.abs(
                centre / total
            )
            centre = centre / total
        unknown = ~(size < FP32.max * 0.5) | ~np.isfinite(centre) | (weights < 0.0).any()
        exact = "weight" not in call.tensors and total <= 2.0**24
        return {
            "output": _scalar(centre, radius, fmt, unknown),
            "total_weight": _scalar(
                total,
                0.0 if exact else g * total + FLUSHED,
                FORMATS[call.dtypes["total_weight"]],
                ~np.isfinite(total) | (weights < 0.0).any(),
            ),
        }


def _scalar(centre: Any, radius: Any, fmt: Any, unknown: Any) -> Expected:
    middle, around = (np.asarray(x, dtype=np.float64) for x in (centre, radius))
    return Expected.within(middle, around, fmt, np.asarray(unknown))


def _backward(call: OperatorCall) -> dict[str, Expected]:
    """``-grad_output weight[target]`` at each row's class, for a mean divided by ``total_weight``,
    and 0 everywhere else. The quotient may be rounded to the dtype before it is multiplied by a
    weight."""
    classes, counts, weights = _chosen(call)
    fmt = FORMATS[call.dtypes["grad_input"]]
    dy = call.tensors["grad_output"].astype(np.float64)
    with np.errstate(all="ignore"):
        if call.settings["reduction"] == _MEAN:
            dy = dy / call.tensors["total_weight"].astype(np.float64)
            dy = round_to(dy, fmt, overflow="ieee") if "weight" in call.tensors else dy
        at = (np.arange(len(classes)), classes)
        centre = np.zeros(call.outputs["grad_input"].shape)
        centre[at] = np.where(counts, -dy * weights, 0.0)
        radius = 2.0 * U32 * np.abs(centre)
        if "weight" in call.tensors:  # the rounding of that quotient to either of two neighbours
            least = np.zeros_like(centre)
            least[at] = fmt.min_subnormal / 2.0 * np.abs(weights)
            radius = radius + 2.0**-fmt.mantissa_bits * np.abs(centre) + least
        unknown = ~np.isfinite(centre)
    return {"grad_input": Expected.within(centre, radius, fmt, unknown)}


def _narrow_sums(call: OperatorCall) -> dict[str, Expected]:
    """The result of torch's CPU kernel in bf16 and fp16: it adds on eight levels, each of which
    passes its sum on after 16 terms (more for very many terms), and rounds every partial sum to the
    dtype."""
    dtype = call.dtypes["input"]
    if dtype == "fp32" or call.settings["reduction"] == _NONE:
        return {}
    classes, counts, weights = _chosen(call)
    x = call.tensors["input"][np.arange(len(classes)), classes]
    with np.errstate(all="ignore"):
        if "weight" in call.tensors:
            x = rounded(x * weights.astype(np.float32), dtype)
            total = _by_levels(weights.astype(np.float32), counts, dtype)
        else:
            total = rounded(np.array([counts.sum()], dtype=np.float32), dtype)
        loss = _by_levels(-x, counts, dtype)
        if call.settings["reduction"] == _MEAN:
            loss = rounded(loss / total, dtype)
    return {
        "output": Expected.exactly(loss.reshape(())),
        "total_weight": Expected.exactly(total.reshape(())),
    }


def _by_levels(terms: F32, counts: NDArray[np.bool_], dtype: str) -> F32:
    """The sum of the terms that count, as torch adds it on eight levels. Source:
    aten/src/ATen/native/LossNLL.cpp, ``nll_loss_out_frame``."""
    levels, n = 8, len(terms)
    power = max(4, math.ceil(math.log2(n)) // levels if n > 1 else 0)
    sums, mask = np.zeros((levels, 1), dtype=np.float32), (1 << power) - 1
    for row in range(n):
        if not counts[row]:
            continue
        sums[0] = rounded(sums[0] + terms[row], dtype)
        for level in range(levels - 1):
            if row & (mask << (level * power)):
                break
            sums[level + 1] = rounded(sums[level + 1] + sums[level], dtype)
            sums[level] = 0.0
    total = np.zeros(1, dtype=np.float32)
    for one in sums:
        total = rounded(total + one, dtype)
    return total


def _title(name: str, call: OperatorCall) -> str:
    how = {_NONE: "none", _MEAN: "mean"}.get(call.settings["reduction"], "sum")
    shape, dtype = list(call.tensors["input"].shape), TORCH_DTYPE[call.dtypes["input"]]
    return f"{name} of a {dtype} tensor of {shape}, reduction '{how}'"


OPERATORS = (
    Operator(
        name="nll_loss",
        words="negative log likelihoods",
        kernels=("aten::nll_loss_forward",),
        read=_read_forward,
        expected=_forward,
        expression="torch.ops.aten.nll_loss_forward(input, target.long(), weight, {reduction}, "
        "{ignored})",
        title=partial(_title, "torch.nn.functional.nll_loss"),
        results=("output", "total_weight"),
        optional=("weight",),
        deviations=(
            Deviation(
                "nll_loss_narrow_sums",
                "losses are summed in the dtype of their input",
                ("cpu",),
                _narrow_sums,
                narrow,
            ),
        ),
    ),
    Operator(
        name="nll_loss_backward",
        words="gradients of negative log likelihoods",
        kernels=("aten::nll_loss_backward",),
        read=_read_backward,
        expected=_backward,
        expression="torch.ops.aten.nll_loss_backward(grad_output, input, target.long(), weight, "
        "{reduction}, {ignored}, total_weight)",
        title=partial(_title, "the backward of torch.nn.functional.nll_loss"),
        results=("grad_input",),
        optional=("weight",),
    ),
)
