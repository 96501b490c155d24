"""``torch.softmax``, ``torch.log_softmax`` and their backwards, and ``torch.logsumexp``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS, round_to
from narrowfuzz.operators.operator import TORCH_DTYPE, UNIT, Expected, Operator, Read
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.trace.trace import OperatorCall

#: Relative error of an exponential or a logarithm in fp32: torch's own ``exp_u20`` promises 20
#: units in the last place, SLEEF's and the C library's err by less.
_EPS = 20.0 * 2.0**-23


def _read_forward(named: Mapping[str, Any], result: Any) -> Read | None:
    x = named["self"]
    if not x.ndim or named.get("half_to_float"):
        raise Unjudged("of a tensor without dimensions, or asked for in another dtype")
    return Read({"input": x}, {"output": result}, {"dim": int(named["dim"]) % x.ndim})


def _read_safe(named: Mapping[str, Any], result: Any) -> Read | None:
    if named["self"].dtype != result.dtype:
        raise Unjudged("asked for in another dtype")
    return _read_forward(named, result)


def _read_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    out, dy = named["output"], named["grad_output"]
    if not out.ndim or out.dtype != result.dtype:
        raise Unjudged("of a tensor without dimensions, or asked for in another dtype")
    dim = int(named["dim"]) % out.ndim
    dtype = str(result.dtype)
    tensors = {"grad_output": dy, "output": out}
    return Read(tensors, {"grad_input": result}, {"dim": dim, "dtype": dtype})


def _within(centre: F64, radius: F64, dtype: str, unknown: Any) -> Expected:
    unknown = unknown | ~np.isfinite(centre) | ~np.isfinite(radius)
    return Expected.within(centre, radius, FORMATS[dtype], unknown)


def of_exponential(log: F64, off: F64) -> F64:
    """The largest error of e^log if log errs by ``off``: e^log (e^off - 1). Where e^log is 0 in
    float64, as of a masked score, that may be 0 times infinity; there it is e^(log + off)."""
    with np.errstate(all="ignore"):
        value = np.exp(log)
        return np.where(value > 0.0, value * np.expm1(off), np.exp(log + off))


def _logs(x: F64, dim: int) -> tuple[F64, F64, F64, F64]:
    """x - max; the logarithm of the sum of its exponentials; and the largest errors in fp32: of
    each exponential, in its logarithm, and of the logarithm of the sum.

    Proof. x - max is rounded once, and the exponential errs by ``_EPS``: each term of the sum errs,
    in its logarithm, by tau = u |x - max| + eps + 4 u. So the sum errs, in its logarithm, by log
    sum P e^tau, exactly, and by gamma_n for its additions (Blanchard, Higham and Higham, IMA J.
    Numer. Anal. 41, 2021). A term below fp32's normal numbers may be flushed to 0: that changes it
    by at most 2^-126 and the sum, which is at least 1, by far less than the roundings that gamma
    counts beyond its n additions. A masked score, such as fp32's least number, has a term of 0:
    e^(off + tau) is below that as well, as tau is a small share of off.
    """
    off = x - x.max(dim, keepdims=True, initial=-np.inf)
    exps = np.exp(off)
    total = exps.sum(dim, keepdims=True)
    tau = U32 * np.abs(off) + _EPS + 4.0 * U32
    tau = np.where(np.isfinite(off), tau, 0.0)
    n = x.shape[dim]
    mean = of_exponential(off, tau).sum(dim, keepdims=True) / total
    return off, np.log(total), tau, np.log1p(mean) + gamma(n + 3)


def _off_logs(off: F64, total: F64, of_sum: F64, unit: float) -> F64:
    """The largest distance of a kernel's log-probabilities from ``off - total``, before they are
    rounded."""
    radius = 4.0 * U32 * (np.abs(off) + np.abs(total)) + _EPS * np.abs(total) + of_sum
    return radius + 1.01 * unit * (1.0 + np.abs(total))


def log_probabilities(x: F64, dtype: str, device: str) -> tuple[F64, F64]:
    """log_softmax of each row [rows, classes], and its largest error once it is rounded to the
    dtype of x; not finite where an element of x is not."""
    off, total, _, of_sum = _logs(x, 1)
    unit, least = UNIT[dtype]
    logs = off - total
    radius = _off_logs(off, total, of_sum, unit if dtype != "fp32" and device == "cpu" else 0.0)
    return logs, radius + unit * (np.abs(logs) + radius) + least


def _read_logsumexp(named: Mapping[str, Any], result: Any) -> Read | None:
    x, dims = named["self"], named["dim"]
    dims = [dims] if isinstance(dims, int) else dims
    if not x.ndim or not x.numel() or x.dtype != result.dtype or len(dims) != 1:
        raise Unjudged("of a tensor without dimensions, of nothing, or over several dimensions")
    settings = {"dim": dims[0] % x.ndim, "keepdim": bool(named.get("keepdim", False))}
    return Read({"input": x}, {"output": result}, settings)


def _logsumexp(call: OperatorCall) -> dict[str, Expected]:
    """The maximum plus the logarithm of the sum of exponentials. torch composes it of kernels, each
    of which rounds its result to the dtype (aten/src/ATen/native/ReduceOps.cpp): roundings of
    differences and exponentials move the sum by their relative errors, and the roundings of the sum
    and of its logarithm are added to that. Nothing is known of a row with +inf or NaN, or of -inf
    throughout."""
    x, dim = call.tensors["input"].astype(np.float64), call.settings["dim"]
    dtype = call.dtypes["output"]
    unit, least = UNIT[dtype] if dtype != "fp32" else (0.0, 0.0)
    with np.errstate(all="ignore"):
        off, log, _, of_sum = _logs(x, dim)
        top = x.max(dim, keepdims=True, initial=-np.inf)
        weights = np.exp(off - log)
        narrow = np.where(np.isfinite(off), weights * 1.01 * unit * (1.0 + np.abs(off)), 0.0)
        of_sum = of_sum + narrow.sum(dim, keepdims=True) + x.shape[dim] * least + 1.01 * unit
        radius = 1.01 * of_sum + (_EPS + unit) * np.abs(log) + 4.0 * U32 * (1.0 + np.abs(top + log))
        unknown = np.isnan(x).any(dim, keepdims=True) | ~np.isfinite(top) | ~(of_sum < 0.5)
        unknown = unknown | ~(np.exp(log) < FORMATS[dtype].max * 0.5)
        arrays = (top + log, radius, unknown)
        if not call.settings["keepdim"]:
            arrays = tuple(a.squeeze(dim) for a in arrays)
        return {"output": _within(*arrays[:2], dtype, arrays[2])}


def _forward(call: OperatorCall, *, log: bool) -> dict[str, Expected]:
    """From x - max and the log of the sum, each with its error; nothing is known of a row with +inf
    or NaN, or of -inf throughout.

    In bf16 and fp16 a CPU's kernels round on the way: softmax rounds each exponential, and may
    round their sum; log_softmax rounds the sum and its logarithm
    (aten/src/ATen/native/cpu/SoftMaxKernel.cpp and LogSoftmaxKernelImpl.h, of the last dimension).
    A GPU's kernels compute in fp32.
    """
    x, dim = call.tensors["input"].astype(np.float64), call.settings["dim"]
    fmt = FORMATS[call.dtypes["output"]]
    narrow = call.dtypes["input"] != "fp32" and call.device == "cpu"
    unit, least = (fmt.unit_roundoff, fmt.min_subnormal) if narrow else (0.0, 0.0)
    with np.errstate(all="ignore"):
        off, total, tau, of_sum = _logs(x, dim)
        top = x.max(dim, keepdims=True, initial=-np.inf)
        unknown = np.isnan(x).any(dim, keepdims=True) | ~np.isfinite(top)
        unknown = unknown | (narrow and log) & ~(np.exp(total) < fmt.max * 0.5)
        unknown = np.broadcast_to(unknown, x.shape)
        centre = off - total
        if log:
            radius = _off_logs(off, total, of_sum, unit)
            unknown = unknown | ~np.isfinite(off)
        else:
            radius = of_exponential(centre, tau + of_sum + 4.0 * U32 + 2.01 * unit)
            centre, radius = np.exp(centre), radius + FLUSHED + least
        return {"output": _within(centre, radius, call.dtypes["output"], unknown)}


def _safe(call: OperatorCall) -> dict[str, Expected]:
    """As softmax, but 0 for a row of -inf throughout, as attention needs it for a query that
    attends to no key."""
    right, x = _forward(call, log=False)["output"], call.tensors["input"]
    nothing = (x == -np.inf).all(call.settings["dim"], keepdims=True)
    lo, hi = (np.where(nothing, 0.0, end) for end in (right.lo, right.hi))
    return {"output": Expected.between(lo, hi, right.unknown & ~nothing)}


def _backward(call: OperatorCall, *, log: bool) -> dict[str, Expected]:
    """From the output that the backward was given: ``y (dy - sum(dy y))``, for log_softmax ``dy -
    exp(y) sum(dy)``, the sums in fp32 in any order. CUDA's softmax is given the products dy y as a
    tensor of their dtype, so these are rounded to it first (aten/src/ATen/native/cuda/SoftMax.cu,
    ``softmax_backward_cuda_out``)."""
    dy, y = (call.tensors[n].astype(np.float64) for n in ("grad_output", "output"))
    dim, dtype = call.settings["dim"], call.dtypes["grad_input"]
    rounds = call.device == "cuda" and not log
    with np.errstate(all="ignore"):
        terms, factor = (dy, np.exp(y)) if log else (dy * y, y)
        if rounds:
            terms = round_to(terms, FORMATS[dtype], overflow="ieee")
        g = gamma(y.shape[dim] + 4)
        total = terms.sum(dim, keepdims=True)
        sizes = np.abs(terms).sum(dim, keepdims=True)
        if log:
            centre = dy - factor * total
            radius = factor * (g * sizes + 2.0 * _EPS * np.abs(total))
            radius = radius + 4.0 * U32 * (np.abs(dy) + factor * np.abs(total))
            radius = radius + FLUSHED * np.abs(total)  # of a flushed exponential
        else:
            centre = terms - factor * total if rounds else factor * (dy - total)
            radius = np.abs(factor) * (g * sizes + 4.0 * U32 * (np.abs(dy) + np.abs(total)))
        unknown = ~np.isfinite(sizes) | ~(sizes < 2.0**100)
        open_ = np.broadcast_to(unknown, y.shape)
        return {"grad_input": _within(centre, radius + FLUSHED, dtype, open_)}


def _title(name: str, call: OperatorCall) -> str:
    x = next(iter(call.tensors.values()))
    dtype = TORCH_DTYPE[next(iter(call.dtypes.values()))]
    return f"{name} over dim {call.settings['dim']} of a {dtype} tensor of {list(x.shape)}"


def _both(name: str, words: str, *, log: bool) -> tuple[Operator, Operator]:
    return (
        Operator(
            name=name,
            words=words,
            kernels=(f"aten::_{name}",),
            read=_read_forward,
            expected=partial(_forward, log=log),
            expression=f"torch.{name}(input, {{dim}})",
            title=partial(_title, f"torch.{name}"),
        ),
        Operator(
            name=f"{name}_backward",
            words=f"gradients of {words}",
            kernels=(f"aten::_{name}_backward_data",),
            read=_read_backward,
            expected=partial(_backward, log=log),
            expression=f"torch.ops.aten._{name}_backward_data(grad_output, output, {{dim}}, "
            "{dtype})",
            title=partial(_title, f"the backward of torch.{name}"),
            results=("grad_input",),
        ),
    )


OPERATORS = (
    *_both("softmax", "softmax", log=False),
    *_both("log_softmax", "log-softmax", log=True),
    Operator(
        name="safe_softmax",
        words="softmax of attention",
        kernels=("aten::_safe_softmax",),
        read=_read_safe,
        expected=_safe,
        expression="torch.ops.aten._safe_softmax(input, {dim})",
        title=partial(_title, "softmax of attention"),
    ),
    Operator(
        name="logsumexp",
        words="logsumexp",
        kernels=("aten::logsumexp",),
        read=_read_logsumexp,
        expected=_logsumexp,
        expression="torch.logsumexp(input, {dim}, keepdim={keepdim})",
        title=partial(_title, "torch.logsumexp"),
    ),
)
