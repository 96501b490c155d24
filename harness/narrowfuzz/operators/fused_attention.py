"""``torch.nn.functional.scaled_dot_product_attention`` as a single kernel, and its backward: the
CPU's flash attention, and a GPU's flash, memory-efficient and cuDNN kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS, FP32
from narrowfuzz.operators.attention_products import for_each_head, products
from narrowfuzz.operators.large_attention import some_of
from narrowfuzz.operators.operator import (
    TORCH_DTYPE,
    UNIT,
    Deviation,
    Expected,
    Operator,
    Read,
    narrow,
)
from narrowfuzz.operators.softmax import of_exponential
from narrowfuzz.trace.trace import OperatorCall

#: Names of the gradients that a backward returns.
GRADIENTS = ("grad_query", "grad_key", "grad_value")
_PREFIX = "aten::_scaled_dot_product_"
#: By kernel, the source of the arguments after query, key and value (forward), and after grad_out,
#: query, key and value (backward); ``{}`` is filled in from the settings.
_FORWARD = {
    "flash_attention_for_cpu": "0.0, {causal}, attn_mask=mask",
    "flash_attention": "0.0, {causal}",
    "efficient_attention": "mask, True, 0.0, {causal}",
    "cudnn_attention": "mask, True, 0.0, {causal}",
}
_SEED = 'torch.zeros((), dtype=torch.int64, device="cuda")'
_SEEDS = (
    'torch.zeros(2, dtype=torch.uint64, device="cuda")',
    'torch.zeros((), dtype=torch.uint64, device="cuda")',
)
_BACKWARD = {
    "flash_attention_for_cpu": "out, logsumexp, 0.0, {causal}, attn_mask=mask",
    "flash_attention": "out, logsumexp, None, None, {rows}, {columns}, 0.0, {causal}, "
    + ", ".join(_SEEDS),
    "efficient_attention": f"mask, out, logsumexp, {_SEED}, {_SEED}, 0.0, "
    "[True, True, True, False], {causal}",
    "cudnn_attention": f"out, logsumexp, {_SEED}, {_SEED}, mask, None, None, {{rows}}, "
    "{columns}, 0.0, {causal}",
}
#: Kernels take their keys in blocks of at least this many, and may rescale their fp32 sums between
#: blocks.
_BLOCK = 16
#: Larger scores, and larger products with a gradient, may overflow fp32 on the way.
_LARGEST = 2.0**100
#: Block sizes of the CPU's kernel: pairs of the least number of queries and the queries of a block;
#: and the keys of a block. Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
_QUERIES, _KEYS = ((768, 256), (192, 64), (0, 32)), 512
#: The largest number of fp32 numbers that a vector register of a CPU holds.
_VECTOR = 16
#: Backwards that compute dS from the probabilities that they rounded for grad_value.
_ROUNDED_FOR_BOTH = {"attention_efficient_backward"}
#: Numbers below this may be flushed to zero.
_TINY = 2.0**-126


def _tensors(named: Mapping[str, Any], *names: str) -> dict[str, Any]:
    mask = next((named[n] for n in ("attn_mask", "attn_bias") if named.get(n) is not None), None)
    found = {name: named[name] for name in names}
    return found if mask is None else found | {"mask": mask}


def settings_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call. Raises Unjudged for dropout, for queries that are not 4-D, for
    empty queries or keys, and for a scale of 0."""
    q, k, scale = named["query"], named["key"], named.get("scale")
    if named.get("dropout_p"):
        raise Unjudged("dropout, whose random numbers are the kernel's own")
    if q.ndim != 4 or not q.numel() or not k.numel() or scale == 0.0:
        raise Unjudged("queries that have not four dimensions or are empty, or a scale of 0")
    return {
        "causal": bool(named.get("is_causal", False)),
        "scale": q.shape[-1] ** -0.5 if scale is None else float(scale),
        "rows": q.shape[-2],
        "columns": k.shape[-2],
    }


def _call(kernel: str, first: str, rest: str, settings: Mapping[str, Any]) -> str:
    rest = rest.format(**settings)
    return f"torch.ops.{kernel.replace('::', '.')}({first}, {rest}, scale={settings['scale']!r})"


def _read_forward(kernel: str, named: Mapping[str, Any], result: Any) -> Read | None:
    settings = settings_of(named)
    rest = _FORWARD[kernel.removeprefix(_PREFIX)]
    settings["call"] = _call(kernel, "query, key, value", rest, settings)
    outputs = {"output": result[0]}
    if result[1] is not None and result[1].numel():
        outputs["logsumexp"] = result[1]
    return Read(_tensors(named, "query", "key", "value"), outputs, settings)


def _read_backward(kernel: str, named: Mapping[str, Any], result: Any) -> Read | None:
    settings = settings_of(named)
    rest = _BACKWARD[kernel.removesuffix("_backward").removeprefix(_PREFIX)]
    settings["call"] = _call(kernel, "grad_out, query, key, value", rest, settings)
    named = {"grad_out": named.get("grad_out_"), **named}
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    outputs = zip(GRADIENTS, result, strict=False)
    return Read(_tensors(named, *names), {n: t for n, t in outputs if t is not None}, settings)


@dataclass(frozen=True)
class _Scores:
    """The attention scores, [batch, heads, rows, columns] in float64, and how far a kernel's may be
    from them."""

    q: F64
    k: F64
    v: F64
    #: The number of heads of queries that share one head of keys.
    share: int
    scores: F64
    #: Mask of the keys that each query attends to.
    seen: NDArray[np.bool_]
    #: The largest distance of a kernel's score from these.
    sigma: F64
    #: Unit roundoff of the narrow dtype, and half its least subnormal number; both are 0 for fp32,
    #: whose probabilities and their gradients are not rounded on the way.
    unit: float
    least: float
    #: Relative error of an exponential.
    eps: float
    #: Rows of which nothing is known: the query, a key or a value is not finite, the mask has NaN
    #: or +inf, or a score may be too large for fp32.
    unknown: NDArray[np.bool_]
    #: Rows that must be NaN: the query has NaN and no infinity, and all keys and values are finite.
    nan: NDArray[np.bool_]

    def of_seen(self, x: F64) -> F64:
        """``x``, with 0 for the keys that are not attended to."""
        return x if self.seen.all() else np.where(self.seen, x, 0.0)


def _scores(call: OperatorCall) -> _Scores:
    of = products(call.tensors["query"], call.tensors["key"])
    q, k, heads = of.q, of.k, of.q.shape[1]
    v, share = for_each_head(call.tensors["value"], heads), heads // call.tensors["key"].shape[1]
    scale, narrow = call.settings["scale"], call.dtypes["query"] != "fp32"
    # tensor cores truncate what they add: twice the error of rounding
    err = gamma((q.shape[-1] + 4) * (2 if call.device == "cuda" else 1))
    with np.errstate(all="ignore"):
        scores = of.raw * scale
        sigma = err * abs(scale) * of.size + abs(scale) * _TINY * (q.shape[-1] + of.sums)
        finite = np.isfinite(q).all(-1)
        keys = np.asarray(np.isfinite(k).all((-1, -2)) & np.isfinite(v).all((-1, -2)))
        unknown = ~(finite & (of.size < _LARGEST / abs(scale)).all(-1) & keys[..., None])
        if "mask" in call.tensors:
            added = call.tensors["mask"].astype(np.float64)
            scores += added
            sigma += err * np.where(np.isfinite(added), np.abs(added), 0.0)
            unknown = unknown | (np.isnan(added) | (added == np.inf)).any(-1)
        if call.settings["causal"]:
            scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, -np.inf)
        nan = np.asarray(~finite)
        if nan.any():
            nan = np.isnan(q).any(-1) & ~np.isinf(q).any(-1) & keys[..., None]
    unit, least = UNIT[call.dtypes["query"]] if narrow else (0.0, 0.0)
    # torch's fexp_u20 gives exp(0) = 0.99995; exp_u20 and exp2 of a GPU promise a few units
    eps = 2.0**-13 if narrow and call.device == "cpu" else 2.0**-20
    seen = scores != -np.inf
    return _Scores(q, k, v, share, scores, seen, sigma, unit, least, eps, unknown, nan)


def forward_of(call: OperatorCall) -> dict[str, Expected]:
    """``softmax(query key^T scale + mask) value`` and the logarithm of the sum of exponentials.

    Proof. A score errs by sigma (gamma_{D+4} of the sum of magnitudes). The exponential errs, in
    its logarithm, by tau = sigma + u |s - max| + eps, and by 4 u for each block of keys that raises
    the maximum. The sum of a row errs, in its logarithm, by log sum P e^tau, exactly, and by
    gamma_n (Blanchard, Higham and Higham, IMA J. Numer. Anal. 41, 2021); each probability by delta,
    the sum of both. Where a probability is 0 in float64, as of a key that is masked by a large
    number, its bound is e^(log p + delta) itself: that is 0, too, unless the mask's own error may
    lift it. In bf16 and fp16 the probability is rounded before it is multiplied. Factors and
    products below fp32's normal numbers may be flushed to zero; of a GPU's fp32 factors, the
    parts that tensor cores carry separately, as well. A row whose keys are all masked is 0.
    Kernels that take exponentials in base 2 multiply scores by log2(e) first: where even the
    largest of a row may overflow then, its log-sum-exp is unknown.
    """
    at = _scores(call)
    with np.errstate(all="ignore"):
        s, size = at.scores, np.abs(at.v)
        n, blocks = s.shape[-1], -(-s.shape[-1] // _BLOCK)
        top = s.max(-1, keepdims=True)
        dead = (top == -np.inf)[..., 0]
        top = np.where(np.isfinite(top), top, 0.0)
        below = s - top
        p = np.exp(below)
        total = p.sum(-1, keepdims=True)
        p /= np.where(total > 0.0, total, 1.0)
        tau = at.of_seen(at.sigma - U32 * below + (at.eps + 4 * blocks * U32))
        moved, row = _moved(below, p, total, tau, gamma(n + blocks + 3))
        g = gamma(n + 8)
        # the probabilities' own errors and roundings, and with g those of the sum of n products
        wrong = moved * ((1.0 + at.unit) * (1.0 + g)) + p * (at.unit * (1.0 + g) + g)
        radius = wrong @ size + (_TINY + at.least) * size.sum(-2, keepdims=True) + (n + 1) * _TINY
        centre = p @ at.v
        nan = (at.nan & ~dead)[..., None]
        if at.nan.any() or dead.any():
            centre = np.where(nan, np.nan, np.where(dead[..., None], 0.0, centre))
            radius = np.where(nan | dead[..., None], 0.0, radius)
        unknown = (at.unknown & (dead | ~at.nan))[..., None]
        # the division by the sum of exponentials comes last, so the result may overflow before it;
        # the probabilities of a row add up to 1, so it cannot where the largest value times the
        # largest sum does not
        if not _largest(total) * _largest(size) < FP32.max * 0.25:
            unknown = unknown | (~((p * total) @ size < FP32.max * 0.5) & ~nan)
        fmt = FORMATS[call.dtypes["output"]]
        found = {"output": Expected.within(centre, radius, fmt, np.asarray(unknown))}
        if "logsumexp" in call.outputs:
            lse = (top + np.log(total))[..., 0]
            near = row[..., 0] + at.eps + 2.0 * U32 * np.abs(lse) + 4.0 * U32 * np.abs(top[..., 0])
            large = ~(np.abs(top[..., 0]) < FP32.max * 0.5)
            unknown = at.unknown | dead | large | ~np.isfinite(lse)
            found["logsumexp"] = _kept(call, lse, near + 2.0**-22, unknown)
    return found


def _moved(below: F64, p: F64, total: F64, tau: F64, added: float) -> tuple[F64, F64]:
    """The largest error of each probability ``p`` = e^below / total, and that of the logarithm of
    its row's sum. The logarithm of the probability errs by tau and by the error of its row's sum,
    whose additions alone err by ``added``. The probabilities of a row add up to one, so the largest
    errs by no more than all others together, and by nothing if there are no others."""
    grown = np.expm1(tau)
    row = np.log1p((p * grown).sum(-1, keepdims=True)) + added
    all_grown = np.expm1(row)
    moved = p * (grown * (1.0 + all_grown) + all_grown)
    if not np.isfinite(moved).all():  # e^tau overflows, as for a key that is masked by a number
        log = np.log(total)
        row = _log_sum(below + tau) - log + added
        moved = of_exponential(below - log, tau + row)
    rows = moved.reshape(-1, moved.shape[-1])
    largest = np.arange(len(rows)), p.argmax(-1).ravel()
    largest_row = rows[largest]
    rows[largest] = 0.0
    rows[largest] = np.minimum(largest_row, rows.sum(-1))
    return moved, row


def _log_sum(logs: F64) -> F64:
    """The logarithm of the sum of exponentials of each row."""
    top = logs.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    return np.asarray(top + np.log(np.exp(logs - top).sum(-1, keepdims=True)))


def _largest(x: F64) -> float:
    """The largest finite element; results that depend on any other are unknown anyhow."""
    largest = float(x.max())
    return largest if math.isfinite(largest) else float(x.max(where=np.isfinite(x), initial=0.0))


def _nan_swallowed(call: OperatorCall) -> dict[str, Expected]:
    """The output of torch's CPU kernel without a mask and with fewer keys than a vector register
    holds: the row of a query that is NaN counts as one without keys, and is 0."""
    masked = "mask" in call.tensors and not call.settings.get("written_out")
    if masked or call.settings["columns"] >= _VECTOR or "output" not in call.outputs:
        return {}
    nan = np.broadcast_to(_scores(call).nan[..., None], call.outputs["output"].shape)
    zeros = np.zeros(nan.shape)
    return {"output": Expected.between(zeros, zeros, ~nan)}


def _kept(call: OperatorCall, lse: F64, radius: F64, unknown: Any) -> Expected:
    """The expected log-sum-exp in the shape of the result: kernels may store more rows than there
    are, or a last dimension of one."""
    shape = call.outputs["logsumexp"].shape
    if lse.shape == shape:
        return Expected.within(lse, radius, FORMATS["fp32"], unknown)
    rows = lse.shape[-1]
    arrays = []
    for values, fill in ((lse, 0.0), (radius, 0.0), (unknown, True)):
        whole = np.full((*lse.shape[:2], math.prod(shape) // math.prod(lse.shape[:2])), fill)
        whole[..., :rows] = values
        arrays.append(whole.reshape(shape))
    centre, near, open_ = arrays
    return Expected.within(centre, near, FORMATS["fp32"], open_.astype(bool))


def _backward(call: OperatorCall) -> dict[str, Expected]:
    """The gradients, from the output and the log-sum-exp that the backward was given; results are
    rounded once.

    Proof. P = exp(s - lse) has the relative error rel = e^(sigma + u |s - lse| + 2^-20) - 1. dS = P
    (dP - delta), with dP = grad_out value^T and delta = sum grad_out out, errs by the error of P
    and by gamma_{D+2} of the sums of magnitudes. In bf16 and fp16 both P and dS are rounded before
    they are multiplied. Sums of n terms err by gamma_{n+4}. A GPU's tensor cores truncate, so their
    sums count twice as many roundings.
    """
    return _gradients(call, blocks=False)


def _block_sums(call: OperatorCall) -> dict[str, Expected]:
    """The gradients of torch's CPU kernel in bf16 and fp16: the contribution of each block of
    queries to grad_key and grad_value, or of keys to grad_query, is rounded and added to the sum so
    far in that dtype."""
    return _gradients(call, blocks=True) if call.dtypes["query"] != "fp32" else {}


#: Number of keys in a tile of cuDNN's backward; and the margin, in the logarithm, within which a
#: row counts as overflowing (chosen: delta is rounded on its way, and the kernel's order of
#: products is not known).
_TILE, _MARGIN = 128, 0.5


def _padded_tile(call: OperatorCall) -> dict[str, Expected]:
    """grad_query of cuDNN's backward on Hopper with a mask, where half of the last tile of keys is
    padding. The padding has the score 0. Where a row's log-sum-exp is so far below 0 that exp(0 -
    lse) overflows fp32, or its product with (0 - delta) overflows the dtype, infinity times the
    padding's 0 is NaN in grad_query (pytorch#196678)."""
    tiles = call.settings["columns"] % _TILE == _TILE // 2
    if "mask" not in call.tensors or not tiles or "grad_query" not in call.outputs:
        return {}
    right = _backward(call)["grad_query"]
    shape, largest = call.tensors["query"].shape, FORMATS[call.dtypes["query"]].max
    lse = call.tensors["logsumexp"].reshape(*shape[:2], -1)[..., : shape[-2], None]
    dy, out = (call.tensors[n].astype(np.float64) for n in ("grad_out", "out"))
    with np.errstate(all="ignore"):
        delta = np.log(np.abs((dy * out).sum(-1, keepdims=True)) + _TINY)
        over = (-lse > np.log(FP32.max)) | (delta - lse > np.log(largest) - _MARGIN)
    nan = np.broadcast_to(over, shape)
    lo, hi = (np.where(nan, np.nan, end) for end in (right.lo, right.hi))
    return {"grad_query": Expected.between(lo, hi, right.unknown & ~nan)}


@dataclass(frozen=True)
class _Products:
    """The factors P and dS that a backward multiplies for its gradients, and the largest distance
    of a kernel's factors from them; this includes the error of adding up their products."""

    p: F64
    of_p: F64
    #: dS is without the scale.
    ds: F64
    size_of_ds: F64
    of_ds: F64
    #: Rows of which nothing is known.
    unknown: NDArray[np.bool_]


def _products(call: OperatorCall, at: _Scores, dy: F64, g: float) -> _Products:
    """P and dS from the output and log-sum-exp that the backward was given; ``g``: the relative
    error of its sums."""
    out, scale, width = call.tensors["out"].astype(np.float64), call.settings["scale"], dy.shape[-1]
    s, lse = at.scores, call.tensors["logsumexp"].astype(np.float64)
    lse = lse.reshape(*s.shape[:2], -1)[..., : s.shape[-2], None]
    below = s - lse
    p = at.of_seen(np.exp(below))
    off = at.of_seen(at.sigma + U32 * np.abs(below) + 2.0**-20)
    grown = p * np.expm1(off)
    if not np.isfinite(grown).all():  # e^off overflows, as for a key that is masked by a number
        grown = at.of_seen(of_exponential(below, off))
    size_dy, size_out, size_v = np.abs(dy), np.abs(out), np.abs(at.v)
    apart = dy @ at.v.swapaxes(-1, -2) - (dy * out).sum(-1, keepdims=True)
    sizes = size_dy @ size_v.swapaxes(-1, -2) + (size_dy * size_out).sum(-1, keepdims=True)
    ds, apart = p * apart, np.abs(apart)
    steps = 2 * width + 8 if call.device == "cuda" else width + 2
    flushed = 2 * width + 2.0 * size_dy.sum(-1)[..., None] + size_out.sum(-1)[..., None]
    noise = gamma(steps) * sizes + 2.0 * U32 * apart
    noise += _TINY * flushed + _TINY * size_v.sum(-1)[..., None, :]
    of_ds = grown * apart + (p + grown) * noise + 2.0 * _TINY * apart
    if call.operator in _ROUNDED_FOR_BOTH:
        of_ds += (at.unit * (p + grown) + at.least) * apart
    more, both, size_of_ds = 1.0 + g, at.unit * (1.0 + g) + g, np.abs(ds)
    last = (at.least + _TINY) * max(1.0, 1.0 / abs(scale))
    of_ds = of_ds * ((1.0 + at.unit) * more) + size_of_ds * both + last * more
    of_p = grown * ((1.0 + at.unit) * more) + p * both + (_TINY + at.least) * more
    of_p, of_ds = at.of_seen(of_p), at.of_seen(of_ds)
    # dS may be rounded before it is scaled: in fp16 it may then overflow
    largest = FORMATS[call.dtypes["query"]].max * 0.5 / max(1.0, abs(scale))
    tame = (size_of_ds + of_ds < largest * more).all(-1)
    tame &= (sizes < _LARGEST / (1.0 + abs(scale))).all(-1)
    lost = ~np.isfinite(lse[..., 0]) & at.seen.any(-1)
    return _Products(p, of_p, ds, size_of_ds, of_ds, at.unknown | lost | ~tame)


def _gradients(call: OperatorCall, *, blocks: bool) -> dict[str, Expected]:
    at = _scores(call)
    dy, scale = call.tensors["grad_out"].astype(np.float64), call.settings["scale"]
    rows, columns = at.scores.shape[-2:]
    g = gamma((2 if call.device == "cuda" else 1) * (rows + columns) + 4)
    found = {}
    with np.errstate(all="ignore"):
        of = _products(call, at, dy, g)
        of_query = (of.ds, of.size_of_ds, of.of_ds)
        of_key, of_value = (
            tuple(x.swapaxes(-1, -2) for x in several)
            for several in (of_query, (of.p, of.p, of.of_p))
        )
        terms = {
            "grad_query": (of_query, at.k * scale, abs(scale), 1),
            "grad_key": (of_key, at.q * scale, abs(scale), at.share),
            "grad_value": (of_value, dy, 1.0, at.share),
        }
        for name, ((left, size, wrong), right, factor, share) in terms.items():
            if name not in call.outputs:
                continue
            fmt, size_right = FORMATS[call.dtypes[name]], np.abs(right)
            sums = size.sum(-1, keepdims=True)
            centre, radius = left @ right, wrong @ size_right
            radius += _TINY * (left.shape[-1] + factor * sums)
            times = _times(name, rows, columns) if blocks else 0
            unit, least = UNIT[call.dtypes[name]]
            # gradients of heads of queries that share a head of keys are rounded and added up in
            # the dtype of the gradient
            roundings = times + (share if share > 1 else 0)
            # the scale may come last, so the result may overflow before it: not where even the
            # largest sum of magnitudes times the largest magnitude does not
            most = fmt.max * 0.5 / max(1.0, 1.0 / abs(scale))
            tame = _largest(sums) * _largest(size_right) + _largest(radius) < most * 0.5
            weight: Any = 0.0 if tame and not roundings else size @ size_right
            if roundings:
                radius = radius + (roundings + 1) * (unit * (weight + radius) + least)
            bad: Any = of.unknown
            unknown = bad[..., None] if name == "grad_query" else bad.any(-1)[..., None, None]
            if share > 1:
                groups = (centre.shape[0], -1, share, *centre.shape[2:])
                centre, radius, weight = (
                    x.reshape(groups).sum(2) for x in (centre, radius, weight)
                )
                unknown = unknown.reshape(*groups[:3], 1, 1).any(2)
            open_ = unknown | ~(weight + radius < most) | ~np.isfinite(centre)
            found[name] = Expected.within(centre, radius, fmt, open_)
    return found


def _times(name: str, rows: int, columns: int) -> int:
    """The number of blocks that a CPU's kernel adds up in the dtype of the gradient."""
    if name == "grad_query":
        return -(-columns // _KEYS)
    return -(-rows // next(block for least, block in _QUERIES if rows >= least))


def _title(call: OperatorCall, before: str = "") -> str:
    q, k = call.tensors["query"], call.tensors["key"]
    dtype = TORCH_DTYPE[call.dtypes["query"]]
    how = ", causal" if call.settings["causal"] else ""
    how += ", with a mask" if "mask" in call.tensors else ""
    several = f"{list(q.shape)} to keys of {list(k.shape)}"
    return f"{before}attention of {dtype} queries of {several}{how}"


#: Known deviations of forwards and of backwards, by kernel.
_FORWARD_DEVIATIONS = {
    "flash_attention_for_cpu": (
        Deviation(
            "attention_nan_swallowed",
            "attention of a query that is NaN is 0 where there are fewer keys than a vector holds",
            ("cpu",),
            partial(some_of, _nan_swallowed),
        ),
    ),
}
_BACKWARD_DEVIATIONS = {
    "flash_attention_for_cpu": (
        Deviation(
            "attention_block_sums",
            "gradients of attention are added up over blocks in their own dtype",
            ("cpu",),
            partial(some_of, _block_sums),
            narrow,
        ),
    ),
    "cudnn_attention": (
        Deviation(
            "attention_padded_tile",
            "the gradient of a query with a mask is NaN where half of a tile of keys is padding "
            "and the scores are far below 0",
            ("cuda",),
            partial(some_of, _padded_tile),
        ),
    ),
}
#: The number of keys from which the blocks of a backward add up their shares of grad_query by
#: atomic operations: torch documents each of these kernels as not deterministic. Seen on an H200,
#: flash and cuDNN at 512 keys and not at 128.
_ATOMIC = {"efficient_attention": 65, "flash_attention": 129, "cudnn_attention": 129}


def _unordered(kernel: str, call: OperatorCall) -> bool:
    return kernel in _ATOMIC and call.tensors["key"].shape[-2] >= _ATOMIC[kernel]


def _operators() -> tuple[Operator, ...]:
    """One operator for each kernel and direction; all kernels of a direction share one
    expectation."""
    found = []
    for short in _FORWARD:
        kernel, on_cpu = f"{_PREFIX}{short}", short.endswith("cpu")
        name = "attention" if on_cpu else f"attention_{short.removesuffix('_attention')}"
        found += [
            Operator(
                name=name,
                words="attention",
                kernels=(kernel,),
                read=partial(_read_forward, kernel),
                expected=partial(some_of, forward_of),
                expression="{call}",
                title=_title,
                results=("output", "logsumexp"),
                optional=("mask",),
                deviations=_FORWARD_DEVIATIONS.get(short, ()),
            ),
            Operator(
                name=f"{name}_backward",
                words="gradients of attention",
                kernels=(f"{kernel}_backward",),
                read=partial(_read_backward, f"{kernel}_backward"),
                expected=partial(some_of, _backward),
                expression="{call}",
                title=partial(_title, before="the backward of "),
                results=GRADIENTS,
                optional=("mask",),
                deviations=_BACKWARD_DEVIATIONS.get(short, ()),
                unordered=partial(_unordered, short),
            ),
        ]
    return tuple(found)


OPERATORS = _operators()
