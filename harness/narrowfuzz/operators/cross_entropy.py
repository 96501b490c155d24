"""``torch.nn.functional.cross_entropy`` with label smoothing, of logits [rows, classes]. Without
smoothing it is ``log_softmax`` and ``nll_loss``, which are judged separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS, FP32, round_to
from narrowfuzz.operators.operator import (
    TORCH_DTYPE,
    UNIT,
    Deviation,
    Expected,
    Operator,
    Read,
)
from narrowfuzz.operators.softmax import log_probabilities, of_exponential
from narrowfuzz.trace.trace import OperatorCall


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    x, target = named["input"], named["target"]
    smooth = named["label_smoothing"]
    if not smooth:
        return None
    if named["weight"] is not None or target.is_floating_point():
        raise Unjudged("smoothed labels with class weights, or targets that are probabilities")
    if x.ndim != 2 or not x.numel() or max(x.shape) > 2**24:  # classes are recorded in fp32
        raise Unjudged("logits that are no matrix, empty or very large")
    if named["size_average"] or named["reduce"] or result.dtype != x.dtype:
        raise Unjudged("deprecated size_average or reduce, or autocast")
    settings = {
        "reduction": named["reduction"],
        "ignored": int(named["ignore_index"]),
        "smoothing": float(smooth),
    }
    return Read({"input": x, "target": target.float()}, {"output": result}, settings)


def _targets(call: OperatorCall) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The class of each row (0 if the row is ignored), and whether the row counts."""
    target = call.tensors["target"].astype(np.int64)
    counts = target != call.settings["ignored"]
    return np.where(counts, target, 0), counts


def _losses(call: OperatorCall) -> tuple[tuple[F64, F64], tuple[F64, F64]]:
    """For each row ``-log p`` of its class, and the sum of ``-log p`` over all classes, each with
    its largest possible error; 0 for a row that is ignored. The sum is added in fp32 and rounded
    once."""
    classes, counts = _targets(call)
    dtype = call.dtypes["input"]
    logs, off = log_probabilities(call.tensors["input"].astype(np.float64), dtype, call.device)
    rows = np.arange(len(classes))
    sums, offs = -logs.sum(1), off.sum(1) + gamma(logs.shape[1]) * np.abs(logs).sum(1)
    offs = offs + UNIT[dtype][0] * (sums + offs)
    pairs = ((-logs[rows, classes], off[rows, classes]), (sums, offs))
    own, every = (tuple(np.where(counts, x, 0.0) for x in pair) for pair in pairs)
    return (own[0], own[1]), (every[0], every[1])


def _forward(call: OperatorCall) -> dict[str, Expected]:
    """``(1 - s) nll + s / classes * sum of -log p`` with the smoothing s: of each row, added up, or
    that sum divided by the number of rows that count.

    Proof. Each of these operations rounds to the dtype of the input. All terms are positive; the
    losses of the rows' own classes may be added in that dtype (n roundings), the others are added
    in fp32.
    """
    return _whole(call, narrow=False)


def _whole(call: OperatorCall, *, narrow: bool) -> dict[str, Expected]:
    """The expected loss. With ``narrow``, the sum over all classes is held in the dtype of the
    input, and makes an end of the loss infinite where it overflows."""
    dtype, how = call.dtypes["input"], call.settings["reduction"]
    unit, fmt, share = UNIT[dtype][0], FORMATS[dtype], call.settings["smoothing"]
    classes = call.tensors["input"].shape[1]
    with np.errstate(all="ignore"):
        (own, own_off), (every, every_off) = _losses(call)
        count: Any = 1.0
        if how != "none":
            n = len(own)
            own_off = own_off.sum() + n * unit * own.sum()
            every_off = every_off.sum() + (gamma(n) + unit) * every.sum()
            own, every = own.sum(), every.sum()
            count = np.float64(_targets(call)[1].sum()) if how == "mean" else 1.0
        unknown = ~(own + own_off < fmt.max * 0.5) | ~np.isfinite(every)
        # the sum over all classes, of which some may be masked, may overflow in fp32
        unknown = unknown | (share > 0.0) & ~(every + every_off < FP32.max * 0.5)
        scale = np.array([(1.0 - share) / count, share / classes / count])
        centre = scale[0] * own + scale[1] * every
        radius = scale[0] * (own_off + 4.0 * unit * own) + scale[1] * (
            every_off + 5.0 * unit * every
        )
        radius = radius + 4.0 * UNIT[dtype][1]
        known = Expected.within(np.asarray(centre), np.asarray(radius), fmt, np.asarray(unknown))
        if not narrow:
            return {"output": known}
        ends = np.stack([every - every_off, every + every_off])
        lost = np.isinf(round_to(ends, fmt, overflow="ieee"))
        lo, hi = (
            np.where(gone, np.inf, end)
            for gone, end in zip(lost, (known.lo, known.hi), strict=True)
        )
        return {"output": Expected.between(lo, hi, known.unknown)}


def _gradient(call: OperatorCall) -> dict[str, Expected]:
    """``(p - (1 - s) [class is the target] - s / classes)`` times the gradient of the loss, for a
    mean divided by the number of rows that count.

    Proof. The gradient that log_softmax receives, g, is rounded at most five times; its backward is
    ``g - p sum(g)``, of a p whose logarithm was rounded to the dtype of the input.
    """
    if "grad_input" not in call.outputs:
        return {}
    dtype, how = call.dtypes["input"], call.settings["reduction"]
    (unit, least), share = UNIT[dtype], call.settings["smoothing"]
    x = call.tensors["input"].astype(np.float64)
    width = x.shape[1]
    classes, counts = _targets(call)
    with np.errstate(all="ignore"):
        logs, off = log_probabilities(x, dtype, call.device)
        p = np.exp(logs)
        grad = call.tensors["grad_output"].astype(np.float64)
        grad = grad / (counts.sum() if how == "mean" else 1.0)
        of_row = np.where(counts, np.broadcast_to(grad, counts.shape), 0.0)[:, None]
        wanted = np.full(x.shape, share / width)
        wanted[np.arange(len(classes)), classes] += 1.0 - share
        centre = of_row * (p - wanted)
        size = np.abs(of_row)
        radius = 5.0 * unit * size * wanted + 6.0 * least
        radius = radius + (of_exponential(logs, off) + p * (6.0 * unit + gamma(width + 4))) * (
            size * 1.01
        )
        radius = radius + p * 6.0 * width * least
        radius = np.where(counts[:, None], radius, 0.0)
        unknown = ~np.isfinite(logs).all(1, keepdims=True) | ~(size < FORMATS[dtype].max * 0.5)
    unknown = np.broadcast_to(unknown, x.shape) & counts[:, None]
    return {"grad_input": Expected.within(centre, radius, FORMATS[dtype], unknown)}


def _expected(call: OperatorCall) -> dict[str, Expected]:
    return _forward(call) | _gradient(call)


def _title(call: OperatorCall) -> str:
    shape, dtype = list(call.tensors["input"].shape), TORCH_DTYPE[call.dtypes["input"]]
    how, share = call.settings["reduction"], call.settings["smoothing"]
    return (
        f"torch.nn.functional.cross_entropy(label_smoothing={share!r}, reduction={how!r}) of a "
        f"{dtype} tensor of {shape}"
    )


OPERATOR = Operator(
    name="smoothed_cross_entropy",
    words="cross entropies with smoothed labels",
    read=_read,
    expected=_expected,
    expression="called(torch.nn.functional.cross_entropy, dict(input=input, target=target.long(), "
    "reduction={reduction}, ignore_index={ignored}, label_smoothing={smoothing}), grad_output, "
    "'input')",
    title=_title,
    functions=("torch.nn.functional.cross_entropy",),
    gradients={"input": "grad_input"},
    results=("output", "grad_input"),
    optional=("grad_output",),
    deviations=(
        Deviation(
            "smoothed_sums_overflow",
            "losses of all classes are summed in the dtype of their input, where they overflow",
            ("cpu", "cuda"),
            lambda call: _whole(call, narrow=True),
        ),
    ),
    helper="called",
)
