"""``torch.nn.functional.rms_norm`` and its backward: one kernel each on a GPU; on a CPU torch
composes both from products, sums and a reciprocal square root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F64
from narrowfuzz.operators.operator import UNIT, Expected, Operator, Read, hull
from narrowfuzz.operators.rows import LARGEST, read_gradients, rows_of, title_of, within
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.trace.trace import OperatorCall


def _read_forward(named: Mapping[str, Any], result: Any) -> Read | None:
    if named.get("eps") is None:
        raise Unjudged("no eps is given, and the kernel takes one of its own")
    tensors = {name: named.get(name) for name in ("input", "weight")}
    return Read(
        {name: t for name, t in tensors.items() if t is not None},
        dict(zip(("output", "rstd"), result, strict=True)),
        {"shape": tuple(named["normalized_shape"]), "eps": float(named["eps"])},
    )


def _read_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    names = ("grad_out", "input", "rstd", "weight")
    return read_gradients(named, result, names, ("grad_input", "grad_weight"))


def _read_function(named: Mapping[str, Any], result: Any) -> Read | None:
    x, weight = named["input"], named["weight"]
    if x.device.type != "cpu":
        return None  # there it is one kernel, which is judged instead
    if not x.numel():
        raise Unjudged("it is empty")
    tensors = {"input": x} | ({} if weight is None else {"weight": weight})
    eps = None if named["eps"] is None else float(named["eps"])
    shape = tuple(named["normalized_shape"])
    return Read(tensors, {"output": result}, {"shape": shape, "eps": eps})


def _forward(call: OperatorCall) -> dict[str, Expected]:
    """``rstd = (mean(input^2) + eps)^-1/2`` and ``output = input rstd weight`` in fp32.

    Proof. All terms of the mean are positive: added in any order it errs by at most gamma_{n+8} of
    itself, its root by half of that, and the reciprocal root by 4 units in the last place, as
    CUDA's promises.
    """
    x, w, eps = rows_of(call, "input"), rows_of(call, "weight", 1.0), call.settings["eps"]
    with np.errstate(all="ignore"):
        mean = np.square(x).mean(1, keepdims=True)
        rstd = 1.0 / np.sqrt(mean + eps)
        off = rstd * (gamma(x.shape[1] + 8) + 8.0 * U32) + rstd**3 * FLUSHED
        centre = x * rstd * w
        radius = np.abs(x * w) * (off + gamma(4) * rstd) + FLUSHED * (1.0 + np.abs(w))
        unknown = ~(np.square(x).sum(1, keepdims=True) < LARGEST)
        found = {"output": within(centre, radius, call, "output", unknown)}
        if "rstd" in call.outputs:
            found["rstd"] = within(rstd, off, call, "rstd", unknown)
        return found


def _backward(call: OperatorCall) -> dict[str, Expected]:
    """The gradients, from the rstd that the backward was given, which is exact for that reason."""
    rstd = call.tensors["rstd"].astype(np.float64).reshape(-1, 1)
    return _gradients(call, rows_of(call, "grad_out"), rstd, np.zeros_like(rstd), 0.0)


def _whole_or_by_default(call: OperatorCall) -> dict[str, Expected]:
    """The function; where no eps is given, with that of the input's dtype, as documented, or with
    that of fp32, as in torch 2.13, which computes in fp32."""
    if call.settings["eps"] is not None:
        return _whole(call)
    own, wide = (
        _whole(replace(call, settings={**call.settings, "eps": 2.0 * UNIT[dtype][0]}))
        for dtype in (call.dtypes["input"], "fp32")
    )
    return {name: hull(own[name], wide[name]) for name in own}


def _whole(call: OperatorCall) -> dict[str, Expected]:
    """The function in fp32, rounded once. Its backward multiplies by the cube of rstd, which may be
    below fp32's normal numbers: flushing it costs that number times its other factors."""
    found = _forward(call)
    if "grad_output" not in call.tensors:
        return found
    x = rows_of(call, "input")
    with np.errstate(all="ignore"):
        rstd = 1.0 / np.sqrt(np.square(x).mean(1, keepdims=True) + call.settings["eps"])
        off = gamma(x.shape[1] + 8) + 8.0 * U32 + np.square(rstd) * FLUSHED  # relative
        off = np.where(np.square(x).sum(1, keepdims=True) < LARGEST, off, np.inf)
        dy = rows_of(call, "grad_output")
        along = np.abs(dy * rows_of(call, "weight", 1.0) * x).sum(1, keepdims=True)
        flushed = FLUSHED * np.abs(x) * (along + 1.0)
    return found | _gradients(call, dy, rstd, off, flushed)


def _gradients(
    call: OperatorCall, dy: F64, rstd: F64, off: F64, flushed: Any
) -> dict[str, Expected]:
    """The gradients for an rstd that is off by at most ``off`` of itself, with h = grad_out weight
    and x' = input rstd: ``grad_input = rstd (h - x' mean(h x'))``, and ``grad_weight`` is the sum
    of ``grad_out x'`` over the rows; sums in fp32, in any order (gamma_n of the sums of
    magnitudes). The cube of rstd is off by at most 3.1 times as much."""
    x, w = rows_of(call, "input"), rows_of(call, "weight", 1.0)
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
            part = np.abs(h) + np.abs(normal) * alongs
            radius = rstd * (gamma(n + 16) + 3.1 * off) * part + FLUSHED + flushed
            sums = size.sum(1, keepdims=True) * np.maximum(rstd, 1.0) ** 3
            wild = unknown.any(1, keepdims=True) | ~(sums < LARGEST)
            found["grad_input"] = within(centre, radius, call, "grad_input", wild)
        if "grad_weight" in call.outputs:
            terms = dy * normal
            centre = terms.sum(0, keepdims=True)
            sizes = np.abs(terms)
            radius = (gamma(rows + 8) * sizes + 1.1 * off * sizes).sum(0, keepdims=True) + FLUSHED
            wild = unknown.any(0, keepdims=True)
            found["grad_weight"] = within(centre, radius, call, "grad_weight", wild)
    return found


OPERATORS = (
    Operator(
        name="rms_norm",
        words="RMS norms",
        read=_read_function,
        expected=_whole_or_by_default,
        expression="called(torch.nn.functional.rms_norm, dict(input=input, "
        "normalized_shape={shape}, weight=weight, eps={eps}), grad_output, 'input', 'weight')",
        title=partial(title_of, "torch.nn.functional.rms_norm"),
        functions=("torch.nn.functional.rms_norm",),
        gradients={"input": "grad_input", "weight": "grad_weight"},
        results=("output", "grad_input", "grad_weight"),
        optional=("weight", "grad_output"),
        helper="called",
    ),
    Operator(
        name="fused_rms_norm",
        words="RMS norms of one kernel",
        kernels=("aten::_fused_rms_norm",),
        read=_read_forward,
        expected=_forward,
        expression="torch.ops.aten._fused_rms_norm(input, {shape}, weight, {eps})",
        title=partial(title_of, "torch.rms_norm"),
        results=("output", "rstd"),
        optional=("weight",),
    ),
    Operator(
        name="fused_rms_norm_backward",
        words="gradients of RMS norms of one kernel",
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
