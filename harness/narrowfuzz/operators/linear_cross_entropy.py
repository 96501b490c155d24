"""``torch.nn.functional.linear_cross_entropy``: the cross entropy of a linear's outputs, computed
whole or in chunks of rows, so that the logits are never all in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, UNIT, Deviation, Expected, Operator, Read
from narrowfuzz.operators.softmax import log_probabilities, of_exponential
from narrowfuzz.trace.trace import OperatorCall

#: Calls with more products than this take longer to judge than to compute.
_MOST = 2**22


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    x, weight, target = named["input"], named["linear_weight"], named["target"]
    if x.ndim != 2 or weight.ndim != 2 or target.is_floating_point() or not x.numel():
        raise Unjudged("an input that is no matrix, or targets that are probabilities")
    if named["linear_bias"] is not None or named["weight"] is not None or named["label_smoothing"]:
        raise Unjudged("a bias, class weights or smoothed labels")
    if x.shape[0] * weight.numel() > _MOST:
        raise Unjudged("more than 2^22 products, which take longer to judge than to compute")
    if not x.dtype == weight.dtype == result.dtype:
        raise Unjudged("autocast, or a weight of another dtype")
    ignored, options = named["ignore_index"], named["options"]
    settings = {
        "reduction": named["reduction"],
        "ignored": -100 if ignored is None else int(ignored),
        "options": None if options is None else f"torch.nn.{options!r}",
        "rows": x.shape[0] if options is None else options.batch_chunk_size or 1,
    }
    tensors = {"input": x, "weight": weight, "target": target.float()}
    return Read(tensors, {"output": result}, settings)


def _logits(call: OperatorCall) -> tuple[F64, F64, NDArray[np.int64], NDArray[np.bool_]]:
    """Logarithms of the probabilities and their largest possible errors, [rows, classes]; the class
    of each row (0 if the row is ignored), and whether the row counts.

    Proof. A logit is a product of rows added in fp32 (gamma_k of the sum of magnitudes) and may be
    rounded to the dtype of the input. An error e of a logit moves log p by at most e; errors of all
    logits move the logarithm of the sum of exponentials by at most the largest of them.
    """
    x, w = (call.tensors[name].astype(np.float64) for name in ("input", "weight"))
    dtype, target = call.dtypes["input"], call.tensors["target"].astype(np.int64)
    counts = target != call.settings["ignored"]
    z, sizes = x @ w.T, np.abs(x) @ np.abs(w).T
    unit, least = UNIT[dtype]
    off = gamma(x.shape[1] + 2) * sizes + 2.0**-126
    off = off + unit * (np.abs(z) + off) + least
    logs, own = log_probabilities(z, dtype, call.device)
    off = off + off.max(1, keepdims=True, initial=0.0) + own
    # a logit that may overflow may make its row NaN
    off = np.where((sizes < FORMATS[dtype].max * 0.5).all(1, keepdims=True), off, np.inf)
    return logs, off, np.where(counts, target, 0), counts


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """The loss of each row that counts, their sum, or that sum divided by their number; and the
    gradients, to which a row that is ignored adds nothing.

    Proof. ``p - [class is the target]`` and its factor are rounded to the dtype of the input at
    most four times; products with it are added in fp32, and the weight's gradient may be rounded to
    its dtype after each chunk. For losses that are added up, gradients may be computed for a loss
    whose gradient is 1, and multiplied by the loss's gradient in the end.
    """
    dtype, how = call.dtypes["input"], call.settings["reduction"]
    (unit, least), fmt = UNIT[dtype], FORMATS[dtype]
    with np.errstate(all="ignore"):
        logs, off, classes, counts = _logits(call)
        rows, count = np.arange(len(classes)), np.float64(counts.sum() if how == "mean" else 1.0)
        own = np.where(counts, -logs[rows, classes], 0.0)
        own_off = np.where(counts, off[rows, classes], 0.0)
        if how != "none":
            own_off = np.asarray(own_off.sum() + len(rows) * unit * own.sum()) / count
            own = np.asarray(own.sum() / count)
        unknown = ~np.isfinite(own_off) | ~(own * max(count, 1.0) < fmt.max * 0.5)
        loss = Expected.within(
            own, own_off + 3.0 * unit * own + least, fmt, unknown & (count > 0.0)
        )
        found = {"output": loss}
        if "grad_output" not in call.tensors:
            return found
        grad = call.tensors["grad_output"].astype(np.float64)
        scale, factor = (grad, 1.0 / count) if how != "none" else (np.float64(1.0), grad)
        factor = np.where(counts, factor, 0.0)[:, None]
        p, target = np.exp(logs), np.zeros(logs.shape)
        target[rows, classes] = 1.0
        dz = np.where(counts[:, None], factor * (p - target), 0.0)
        of_p = of_exponential(logs, off)
        size = np.abs(factor) * (p + of_p + target)
        dz_off = np.abs(factor) * of_p + (4.0 * unit + 8.0 * U32) * size
        dz_off = dz_off + 4.0 * least * max(1.0, 1.0 / max(abs(float(np.max(scale))), 2.0**-60))
        dz_off = np.where(counts[:, None], dz_off, 0.0)
        # 0 times NaN is NaN
        wild = ~np.isfinite(dz_off) | ~np.isfinite(off).all(1, keepdims=True)
        wild = wild | ~(np.abs(grad).max(initial=0.0) < fmt.max * 0.5)
        x, w = (call.tensors[name].astype(np.float64) for name in ("input", "weight"))
        chunks = -(-len(rows) // call.settings["rows"])
        for name, ours, theirs, b, roundings in (
            ("grad_input", dz, (dz_off, wild), w, 1),
            ("grad_weight", dz.T, (dz_off.T, wild.T), x, chunks),
        ):
            if name in call.outputs:
                found[name] = _product(ours, theirs, b, scale, dtype, roundings)
        return found


def _product(
    a: F64, of_a: tuple[F64, Any], b: F64, scale: Any, dtype: str, roundings: int
) -> Expected:
    """``scale`` times a [n, k] times b [k, m], added in fp32. ``of_a``: the largest error of each
    element of a, and a mask of the elements that may be anything. Sums are rounded to the dtype
    ``roundings`` times on the way, and the scaled result once more."""
    (off, wild), (unit, least), fmt = of_a, UNIT[dtype], FORMATS[dtype]
    size, centre = np.abs(a) @ np.abs(b), a @ b
    radius = off @ np.abs(b) + gamma(a.shape[1] + 4) * size + 2.0**-126 * (size > 0.0)
    on_way = np.abs(centre) if roundings == 1 else size
    radius = radius + roundings * (size > 0.0) * (unit * (on_way + radius) + least)
    lost = wild.any(1, keepdims=True) | ~(size + radius < fmt.max * 0.5) | ~np.isfinite(b).all()
    centre, radius = centre * scale, radius * np.abs(scale)
    radius = radius + unit * (np.abs(centre) + radius) + least * (radius > 0.0)
    return Expected.within(centre, radius, fmt, lost | ~np.isfinite(centre))


def _nothing_counts(call: OperatorCall) -> dict[str, Expected]:
    """The results of torch's chunked loss. Rows that are ignored are multiplied by 0, so their NaN
    reaches the sum; where no row counts, a mean gives each row a factor of NaN, which reaches every
    gradient."""
    if not call.settings["options"] or call.settings["reduction"] == "none":
        return {}
    with np.errstate(all="ignore"):
        _, off, _, counts = _logits(call)
    lost = {"output"} if (~np.isfinite(off).all(1) & ~counts).any() else set()
    if call.settings["reduction"] == "mean" and not counts.any():
        lost |= {"grad_input", "grad_weight"}
    every = {n: np.full(x.shape, np.nan) for n, x in call.outputs.items() if n in lost}
    return {n: Expected.between(x, x, np.zeros(x.shape, bool)) for n, x in every.items()}


def _title(call: OperatorCall) -> str:
    x, w = call.tensors["input"], call.tensors["weight"]
    chunks = " in chunks" if call.settings["options"] else ""
    return (
        f"torch.nn.functional.linear_cross_entropy{chunks}, reduction "
        f"{call.settings['reduction']!r}, of {TORCH_DTYPE[call.dtypes['input']]} tensors of "
        f"{list(x.shape)} and {list(w.shape)}"
    )


OPERATOR = Operator(
    name="linear_cross_entropy",
    autocasts=True,
    words="cross entropies of a linear's outputs",
    read=_read,
    expected=_expected,
    expression="called(torch.nn.functional.linear_cross_entropy, dict(input=input, "
    "linear_weight=weight, target=target.long(), reduction={reduction}, ignore_index={ignored}, "
    "options={options}), grad_output, 'input', 'linear_weight')",
    title=_title,
    functions=("torch.nn.functional.linear_cross_entropy",),
    gradients={"input": "grad_input", "linear_weight": "grad_weight"},
    results=("output", "grad_input", "grad_weight"),
    optional=("grad_output",),
    deviations=(
        Deviation(
            "linear_cross_entropy_divides_by_none",
            "in chunks, the mean over no row has gradients of NaN, and the NaN of a row that is "
            "ignored reaches the loss",
            ("cpu",),
            _nothing_counts,
        ),
    ),
    helper="called",
)
