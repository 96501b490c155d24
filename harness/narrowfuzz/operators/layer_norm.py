"""``torch.nn.functional.layer_norm`` and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, gamma
from narrowfuzz.numerics.formats import F32, F64, FORMATS, FP32, round_to
from narrowfuzz.operators.operator import Deviation, Expected, Operator, Read, narrow
from narrowfuzz.operators.rows import LARGEST, read_gradients, rows_of, title_of, within
from narrowfuzz.operators.sum import FLUSHED, exact_sums, rounded, shares, summed
from narrowfuzz.trace.trace import OperatorCall


def _read_forward(named: Mapping[str, Any], result: Any) -> Read | None:
    tensors = {name: named.get(name) for name in ("input", "weight", "bias")}
    names = ("output", "mean", "rstd")
    return Read(
        {name: t for name, t in tensors.items() if t is not None},
        dict(zip(names, result, strict=True)),
        {"shape": tuple(named["normalized_shape"]), "eps": float(named["eps"])},
    )


def _read_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    return read_gradients(named, result, names, ("grad_input", "grad_weight", "grad_bias"))


def _forward(call: OperatorCall) -> dict[str, Expected]:
    """Mean and variance are computed from sums in fp32, in any order, with or without a running
    mean; ``output = (input - mean) * rstd * weight + bias`` in fp32, where the mean is subtracted
    before or after the product.

    Proof. With g = gamma_{4n+16} the mean errs by at most e = g mean|x|. This holds for a sum
    (Higham 4.2) as well as for a running mean, whose step k rounds three times a number of at most
    sum|x| / k, which counts for k / n in the end; and for all means on the way. Welford's
    increments d_k d_k' are no less than half d_k^2 and add up to n v, so sum |d_k| <= n sqrt(2 v)
    (Cauchy-Schwarz), and errors of e in each d_k change v by at most g v + 2 e sqrt(2 v) + 2 e^2:
    the variance lies within that, and ``rstd`` between its values at both ends.
    """
    x, eps = rows_of(call, "input"), call.settings["eps"]
    w, b = rows_of(call, "weight", 1.0), rows_of(call, "bias")
    n = x.shape[1]
    with np.errstate(all="ignore"):
        g = gamma(4 * n + 16)
        mean = x.mean(1, keepdims=True)
        off = x - mean
        variance = np.square(off).mean(1, keepdims=True)
        e = g * np.abs(x).mean(1, keepdims=True) + FLUSHED
        spread = g * variance + 2.0 * e * np.sqrt(2.0 * variance) + 2.0 * e**2 + FLUSHED
        rstd = 1.0 / np.sqrt(variance + eps)
        least = 1.0 / np.sqrt(variance + spread + eps) * (1.0 - 8.0 * U32)
        low = np.maximum(variance - spread, 0.0) + eps
        most = np.where(low > 0.0, 1.0 / np.sqrt(low), np.inf) * (1.0 + 8.0 * U32)
        apart = np.maximum(most - rstd, rstd - least)
        normal = off * rstd
        radius = np.abs(w) * (
            np.abs(off) * apart + most * e + gamma(8) * (np.abs(x) + np.abs(mean) + e) * most
        )
        radius += gamma(8) * (np.abs(normal * w) + np.abs(b)) + FLUSHED
        unknown = ~(np.square(np.abs(x)).sum(1, keepdims=True) < LARGEST)
        wild = unknown | ~(np.abs(normal * w) + np.abs(b) < LARGEST) | ~np.isfinite(radius)
        centre = normal * w + b
    return {
        "output": within(centre, radius, call, "output", wild),
        "mean": within(mean, e, call, "mean", unknown),
        "rstd": within(rstd, apart, call, "rstd", unknown | ~np.isfinite(apart)),
    }


def _backward(call: OperatorCall) -> dict[str, Expected]:
    """The gradients, from the mean and the rstd that the backward was given.

    ``grad_bias`` is the sum of ``grad_out`` over the rows, ``grad_weight`` that of ``grad_out *
    (input - mean) * rstd``, each added in fp32 in any order: gamma_{rows}. ``grad_input = rstd (h -
    mean(h) - x' mean(h x'))`` with h = grad_out weight and x' = (input - mean) rstd; kernels may
    compute the sums of h and of h input before they subtract, so terms that cancel count by their
    magnitudes. Kernels multiply these sums by the cube of rstd before they multiply by the input
    again: a number that is flushed to zero on the way costs that number times the input.
    """
    dy, x, w = rows_of(call, "grad_out"), rows_of(call, "input"), rows_of(call, "weight", 1.0)
    mean, rstd = (call.tensors[n].astype(np.float64).reshape(-1, 1) for n in ("mean", "rstd"))
    rows, n = x.shape
    found: dict[str, Expected] = {}
    with np.errstate(all="ignore"):
        normal = (x - mean) * rstd
        size = (np.abs(x) + np.abs(mean)) * np.abs(rstd)
        unknown = ~(np.abs(dy) * np.maximum(size, 1.0) * np.abs(w) < LARGEST)
        far = np.abs(x) + np.abs(mean)
        unknown = unknown | ~(far * np.maximum(np.abs(dy), 1.0) < LARGEST)
        if "grad_input" in call.outputs:
            h = dy * w
            total, along = h.mean(1, keepdims=True), (h * normal).mean(1, keepdims=True)
            g = gamma(n + 16)
            sizes = np.abs(h).mean(1, keepdims=True)
            alongs = (np.abs(h) * size).mean(1, keepdims=True)
            radius = np.abs(rstd) * g * (np.abs(h) + sizes + size * (alongs + np.abs(along)))
            sums = (np.abs(h) * far).sum(1, keepdims=True)
            radius += FLUSHED * (1.0 + far * (1.0 + sums))
            centre = rstd * (h - total - normal * along)
            wild = unknown.any(1, keepdims=True) | ~(_on_the_way(h, x, mean, rstd) < LARGEST)
            found["grad_input"] = within(centre, radius, call, "grad_input", wild)
        wild = unknown.any(0, keepdims=True)
        if "grad_weight" in call.outputs:
            terms = dy * normal
            radius = gamma(max(rows - 1, 1)) * np.abs(terms).sum(0, keepdims=True)
            radius += gamma(rows + 8) * (np.abs(dy) * size).sum(0, keepdims=True) + FLUSHED
            centre = terms.sum(0, keepdims=True)
            found["grad_weight"] = within(centre, radius, call, "grad_weight", wild)
        if "grad_bias" in call.outputs:
            plain = summed(dy, (0,), FP32, keepdims=True)
            radius = np.where(exact_sums(dy, (0,), keepdims=True), 0.0, plain.radius)
            found["grad_bias"] = within(plain.centre, radius, call, "grad_bias", plain.unknown)
    return found


def _on_the_way(h: F64, x: F64, mean: F64, rstd: F64) -> F64:
    """The largest magnitude on the way to ``grad_input``, if sums of h and of h input are
    multiplied by rstd^3 before they are multiplied by the input again."""
    scale, most = np.abs(rstd) ** 3, np.abs(x).max(1, keepdims=True, initial=0.0) + np.abs(mean)
    sums = (np.abs(h) * (np.abs(x) + np.abs(mean))).sum(1, keepdims=True)
    parts = (sums, scale, sums * np.maximum(scale, 1.0) * np.maximum(most, 1.0), most)
    return np.max(np.stack(parts), axis=0)


def _may_sum_narrow(given: Sequence[Any], made: Sequence[Any]) -> bool:
    """Is one of these gradients a parameter's, of 16-bit rows? One of the input has its shape."""
    return narrow(given, made) and any(t.shape != given[1].shape for t in made)


def _narrow_sums(call: OperatorCall) -> dict[str, Expected]:
    """The result of torch's CPU kernel, which sums bf16 and fp16 rows in their own dtype: each
    thread adds its share of them one by one, and the threads' sums are then added in fp32.

    A term of ``grad_weight`` is known up to its own roundings in fp32; adding and rounding are
    monotone, so both ends go through the same sums.
    """
    dtype = call.dtypes["input"]
    if dtype == "fp32":
        return {}
    dy, x = rows_of(call, "grad_out"), rows_of(call, "input")
    mean, rstd = (call.tensors[n].astype(np.float64).reshape(-1, 1) for n in ("mean", "rstd"))
    with np.errstate(all="ignore"):
        terms = dy * (x - mean) * rstd
        spread = gamma(8) * np.abs(dy) * (np.abs(x) + np.abs(mean)) * np.abs(rstd) + FLUSHED
        ends = (terms - spread, terms + spread)
        # rounded outwards where an end is not an fp32 number
        low, high = (
            np.nextafter(end.astype(np.float32), np.float32(to))
            for end, to in zip(ends, (-np.inf, np.inf), strict=True)
        )
    plain = dy.astype(np.float32)
    sums = {"grad_weight": (low, high), "grad_bias": (plain, plain)}
    found = {}
    for name, each in sums.items():
        if name in call.outputs:
            to = FORMATS[call.dtypes[name]]
            lo, hi = (
                round_to(_by_threads(x, dtype, call.threads), to, overflow="ieee") for x in each
            )
            shape = call.outputs[name].shape
            lo, hi, got = lo.reshape(shape), hi.reshape(shape), call.outputs[name]
            # a narrow sum that overflowed is infinite, and infinities of both signs add up to NaN:
            # if only one end is NaN, the result may be either
            some = (np.isnan(lo) ^ np.isnan(hi)) & ~np.isfinite(got)
            lo, hi = np.where(some, got, lo), np.where(some, got, hi)
            found[name] = Expected.between(lo, hi, np.isnan(lo) ^ np.isnan(hi))
    return found


def _by_threads(terms: F32, dtype: str, threads: int) -> F32:
    """The sum of the rows in fp32, of which each thread adds its share one by one in ``dtype``."""
    parts = [_one_by_one(terms[some], dtype) for some in shares(len(terms), threads)]
    with np.errstate(all="ignore"):
        return np.sum(parts, axis=0, dtype=np.float32)


def _one_by_one(terms: F32, dtype: str) -> F32:
    """The sum of the rows in fp32, each partial sum rounded to ``dtype``."""
    total = np.zeros(terms.shape[1], dtype=np.float32)
    with np.errstate(all="ignore"):
        for row in terms:
            total = rounded(total + row, dtype)
    return total


OPERATORS = (
    Operator(
        name="layer_norm",
        words="layer norms",
        kernels=("aten::native_layer_norm",),
        read=_read_forward,
        expected=_forward,
        expression="torch.ops.aten.native_layer_norm(input, {shape}, weight, bias, {eps})",
        title=partial(title_of, "torch.layer_norm"),
        results=("output", "mean", "rstd"),
        optional=("weight", "bias"),
    ),
    Operator(
        name="layer_norm_backward",
        words="gradients of layer norms",
        kernels=("aten::native_layer_norm_backward",),
        read=_read_backward,
        expected=_backward,
        expression="torch.ops.aten.native_layer_norm_backward(grad_out, input, {shape}, mean, "
        "rstd, weight, bias, {mask})",
        title=partial(title_of, "the backward of torch.layer_norm"),
        results=("grad_input", "grad_weight", "grad_bias"),
        optional=("weight", "bias"),
        deviations=(
            Deviation(
                "layer_norm_narrow_sums",
                "gradients of a layer norm's parameters are summed in the dtype of its input",
                ("cpu",),
                _narrow_sums,
                _may_sum_narrow,
            ),
        ),
    ),
)
