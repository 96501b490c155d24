"""``torch.nn.functional.rms_norm`` where it is one kernel, as on a GPU, and its backward. On a CPU
torch composes it of products, a mean and a reciprocal square root."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, gamma
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.operators.rows import LARGEST, rows_of, title_of, within
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.trace.trace import OperatorCall


def _read_forward(named: Mapping[str, Any], result: Any) -> Read | None:
    if named.get("eps") is None:
        return None  # the kernel takes one of its own
    tensors = {name: named.get(name) for name in ("input", "weight")}
    return Read(
        {name: t for name, t in tensors.items() if t is not None},
        dict(zip(("output", "rstd"), result, strict=True)),
        {"shape": tuple(named["normalized_shape"]), "eps": float(named["eps"])},
    )


def _read_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    tensors = {name: named.get(name) for name in ("grad_out", "input", "rstd", "weight")}
    mask = tuple(map(bool, named["output_mask"]))
    outputs = zip(("grad_input", "grad_weight"), result, strict=True)
    return Read(
        {name: t for name, t in tensors.items() if t is not None},
        {name: t for (name, t), asked in zip(outputs, mask, strict=True) if asked},
        {"shape": tuple(named["normalized_shape"]), "mask": list(mask)},
    )


def _forward(call: OperatorCall) -> dict[str, Expected]:
    """``rstd = (mean(input^2) + eps)^-1/2`` and ``output = input rstd weight`` in fp32.

    Proof. All terms of the mean are positive: added in any order it errs by gamma_{n+8} of itself,
    its root by half of that, the reciprocal root by 4 units in the last place, as CUDA's promises.
    """
    x, w, eps = rows_of(call, "input"), rows_of(call, "weight", 1.0), call.settings["eps"]
    with np.errstate(all="ignore"):
        mean = np.square(x).mean(1, keepdims=True)
        rstd = 1.0 / np.sqrt(mean + eps)
        off = rstd * (gamma(x.shape[1] + 8) + 8.0 * U32) + rstd**3 * FLUSHED
        centre = x * rstd * w
        radius = np.abs(x * w) * (off + gamma(4) * rstd) + FLUSHED * (1.0 + np.abs(w))
        unknown = ~(np.square(x).sum(1, keepdims=True) < LARGEST)
        return {
            "output": within(centre, radius, call, "output", unknown),
            "rstd": within(rstd, off, call, "rstd", unknown),
        }


def _backward(call: OperatorCall) -> dict[str, Expected]:
    """Of the rstd that it was given: with h = grad_out weight and x' = input rstd ``grad_input =
    rstd (h - x' mean(h x'))``, and ``grad_weight`` is the sum of ``grad_out x'`` over the rows;
    sums in fp32, in any order (gamma_n of the sums of magnitudes)."""
    dy, x = (rows_of(call, name) for name in ("grad_out", "input"))
    w = rows_of(call, "weight", 1.0)
    rstd = call.tensors["rstd"].astype(np.float64).reshape(-1, 1)
    rows, n = x.shape
    found: dict[str, Expected] = {}
    with np.errstate(all="ignore"):
        normal, h = x * rstd, dy * w
        size = np.abs(h) * np.abs(normal)
        unknown = ~(np.abs(dy) * np.maximum(np.abs(normal), 1.0) * np.abs(w) < LARGEST)
        unknown = unknown | ~(np.abs(x) * np.maximum(np.abs(h), np.abs(dy)) < LARGEST)
        if "grad_input" in call.outputs:
            along = (h * normal).mean(1, keepdims=True)
            alongs = size.mean(1, keepdims=True)
            centre = rstd * (h - normal * along)
            radius = rstd * gamma(n + 16) * (np.abs(h) + np.abs(normal) * alongs) + FLUSHED
            sums = size.sum(1, keepdims=True) * np.maximum(rstd, 1.0) ** 3
            wild = unknown.any(1, keepdims=True) | ~(sums < LARGEST)
            found["grad_input"] = within(centre, radius, call, "grad_input", wild)
        if "grad_weight" in call.outputs:
            terms = dy * normal
            centre = terms.sum(0, keepdims=True)
            radius = gamma(rows + 8) * np.abs(terms).sum(0, keepdims=True) + FLUSHED
            wild = unknown.any(0, keepdims=True)
            found["grad_weight"] = within(centre, radius, call, "grad_weight", wild)
    return found


OPERATORS = (
    Operator(
        name="rms_norm",
        words="RMS norms",
        kernels=("aten::_fused_rms_norm",),
        read=_read_forward,
        expected=_forward,
        expression="torch.ops.aten._fused_rms_norm(input, {shape}, weight, {eps})",
        title=partial(title_of, "torch.rms_norm"),
        results=("output", "rstd"),
        optional=("weight",),
    ),
    Operator(
        name="rms_norm_backward",
        words="gradients of RMS norms",
        kernels=("aten::_fused_rms_norm_backward",),
        read=_read_backward,
        expected=_backward,
        expression="torch.ops.aten._fused_rms_norm_backward(grad_out, input, {shape}, rstd, "
        "weight, {mask})",
        title=partial(title_of, "the backward of torch.rms_norm"),
        results=("grad_input", "grad_weight"),
        optional=("weight",),
    ),
)
