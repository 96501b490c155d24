"""TransformerEngine's router of experts: the weight that each expert has for a token, the scores
for the auxiliary loss, and that loss.

All is computed in fp32, whatever the dtype of the logits, and rounded once (TransformerEngine 2.20,
``pytorch/router.py``, "Precision Notes"; ``common/fused_router/``). Which of several experts with
equal scores is chosen is not documented, so what follows from scores is only known of those that
fp32 tells apart; weights and gradients are computed from the experts that were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, Derived, Expected, Operator, Read
from narrowfuzz.operators.pointwise import EPS, error_of_exp, sigmoid
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.play.derived import chosen_count
from narrowfuzz.trace.trace import OperatorCall

Mask = NDArray[np.bool_]
#: What is added to a sum of scores before these are divided by it (``fused_router/utils.h``).
_EPSILON = 1e-20
#: Where numbers on the way are larger, they may overflow.
_LARGEST = 2.0**100
#: Calls with more pairs of experts than this take longer to judge than to run.
_MOST = 2**24
_OF = "transformer_engine.pytorch.router"


@dataclass(frozen=True)
class _Values:
    """Numbers [tokens, experts], and the largest error of each in fp32."""

    centre: F64
    radius: F64

    def __getitem__(self, mask: Mask) -> _Values:
        """The same, with zeros outside of the mask."""
        return _Values(np.where(mask, self.centre, 0.0), np.where(mask, self.radius, 0.0))

    def times(self, other: _Values) -> _Values:
        """The products, rounded once or flushed to zero."""
        a, b = np.abs(self.centre), np.abs(other.centre)
        own, theirs = self.radius, other.radius
        radius = own * b + theirs * a + own * theirs + U32 * (a + own) * (b + theirs)
        return _Values(self.centre * other.centre, radius + FLUSHED)

    def minus(self, other: _Values) -> _Values:
        """The differences, rounded once."""
        difference = self.centre - other.centre
        radius = self.radius + other.radius
        return _Values(difference, radius + U32 * (np.abs(difference) + radius))

    def sums(self) -> _Values:
        """The sum of each row, added in any order."""
        size = (np.abs(self.centre) + self.radius).sum(1, keepdims=True)
        n = self.centre.shape[1]
        radius = self.radius.sum(1, keepdims=True) + gamma(n) * size
        return _Values(self.centre.sum(1, keepdims=True), radius)

    def over(self, other: _Values) -> _Values:
        """The quotients, rounded once or flushed to zero; the radius is NaN where a divisor may be
        0."""
        safe = np.abs(other.centre) - other.radius
        safe = np.where(safe > 0.0, safe, np.nan)
        quotient = self.centre / other.centre
        radius = (self.radius + np.abs(quotient) * other.radius) / safe
        return _Values(quotient, radius + U32 * (np.abs(quotient) + radius) + FLUSHED)


def _constant(value: float) -> _Values:
    return _Values(np.array([[value]]), np.zeros((1, 1)))


def _softmax(x: F64, on: Mask) -> _Values:
    """The softmax over each row's numbers in the mask. The kernel keeps a running maximum, and
    multiplies its sum by an exponential when this grows (``apply_softmax_on_float``)."""
    off = np.where(on, x - np.where(on, x, -np.inf).max(1, keepdims=True), -np.inf)
    exps = np.exp(off)
    rescaled = (x.shape[1] / 32.0 + 8.0) * EPS
    error = np.where(on, error_of_exp(np.where(on, off, 0.0)) + rescaled, 0.0)
    return _Values(exps, exps * error + FLUSHED * on).over(_Values(exps, exps * error).sums())


def _scores(x: F64, kind: str, on: Mask) -> _Values:
    """The scores of logits: for softmax those in the mask."""
    if kind == "softmax":
        return _softmax(x, on)
    if kind == "sigmoid":
        value = sigmoid(x)
        return _Values(value.centre, value.radius)
    root = np.sqrt(np.logaddexp(0.0, x))
    # above 20 the kernel computes no exponential; one that is flushed to zero is less than 2^-126,
    # and its root than 2^-63
    error = error_of_exp(np.clip(x, -104.0, 20.0)) + EPS
    return _Values(root, root * error + 2.0**-63)


def _slope(x: F64, scores: _Values, kind: str) -> _Values:
    """The derivative of a score."""
    if kind == "sigmoid":
        return scores.times(_constant(1.0).minus(scores))
    inner = sigmoid(x)
    return _Values(inner.centre, inner.radius).over(_constant(2.0).times(scores))


def _largest(scores: _Values, k: int) -> tuple[Mask, Mask]:
    """Masks of each row's ``k`` largest scores, and of those of which this is not known."""
    lo, hi = scores.centre - scores.radius, scores.centre + scores.radius
    rivals = (hi[:, None, :] >= lo[:, :, None]).sum(2) - 1
    surely_better = (lo[:, None, :] > hi[:, :, None]).sum(2)
    inside, outside = rivals < k, surely_better >= k
    return inside, ~(inside | outside) | ~np.isfinite(scores.radius).all(1, keepdims=True)


def _selected(scores: _Values, settings: Mapping[str, Any]) -> tuple[Mask, Mask]:
    """Masks of the experts that each token goes to, and of those of which this is not known; with
    groups, only the experts of the groups whose largest scores add up to most."""
    k, groups = settings["topk"], settings["group_topk"]
    if not groups:
        return _largest(scores, k)
    tokens, count = len(scores.centre), settings["num_groups"]
    rows = scores.centre.reshape(tokens * count, -1)
    radius = scores.radius.reshape(rows.shape).max(1, keepdims=True)
    best = -np.sort(-rows, axis=1)[:, : k // groups]
    total = _Values(best, np.broadcast_to(radius, best.shape)).sums()
    of_groups = _Values(total.centre.reshape(tokens, count), total.radius.reshape(tokens, count))
    inside, open_ = _largest(of_groups, groups)
    wide = np.repeat(inside, rows.shape[1], axis=1)
    own = _Values(np.where(wide, scores.centre, -np.inf), np.where(wide, scores.radius, 0.0))
    chosen, unknown = _largest(own, k)
    return chosen, unknown | open_.any(1, keepdims=True)


def _divisor(own: _Values) -> _Values:
    """The sum of each row, plus the kernels' ``epsilon``."""
    total = own.sums()
    centre = total.centre + _EPSILON
    return _Values(centre, total.radius + U32 * centre)


def _shares(values: _Values, chosen: Mask) -> _Values:
    """The chosen values over their sum."""
    own = values[chosen]
    return own.over(_divisor(own))


def _gradient_of_shares(grad: _Values, values: _Values, chosen: Mask) -> _Values:
    """The gradient of the chosen values, from that of their shares in their sum."""
    own = values[chosen]
    total = _divisor(own)
    mean = grad.times(own)[chosen].sums().over(total.times(total))
    return grad.over(total).minus(mean)[chosen]


def _gradient_of_softmax(grad: _Values, values: _Values) -> _Values:
    return values.times(grad.minus(values.times(grad).sums()))


def _weights(x: F64, bias: F64, chosen: Mask, settings: Mapping[str, Any]) -> _Values:
    """Each chosen expert's weight. A bias is added to choose, and subtracted again."""
    kind, early = settings["score_function"], settings["use_pre_softmax"]
    every = np.ones(x.shape, bool)
    if kind == "softmax":
        return _softmax(x, every if early else chosen)[chosen]
    scores = _scores(x, kind, every)
    of_bias = np.where(bias == 0.0, 0.0, 2.0 * U32 * (np.abs(scores.centre) + np.abs(bias)))
    values = _Values(scores.centre, scores.radius + of_bias)[chosen]
    return _shares(values, chosen) if settings["topk"] > 1 else values


def _gradient(x: F64, grad: _Values, chosen: Mask, settings: Mapping[str, Any]) -> _Values:
    """The gradient of the logits, from that of the weights before they are scaled."""
    kind, early = settings["score_function"], settings["use_pre_softmax"]
    every = np.ones(x.shape, bool)
    grad = grad[chosen]
    if kind == "softmax":
        return _gradient_of_softmax(grad, _softmax(x, every if early else chosen))
    scores = _scores(x, kind, every)
    if settings["topk"] > 1:
        grad = _gradient_of_shares(grad, scores, chosen)
    return grad.times(_slope(x, scores, kind))


def _read_router(named: Mapping[str, Any], result: Any) -> Read | None:
    if named["topk_indices"] is not None or named.get("qb_histogram") is not None:
        raise Unjudged("a router that returns indices, or that counts a histogram")
    x, (probs, chosen) = named["logits"], result
    if chosen.shape != x.shape:
        raise Unjudged("a map with a bit for each expert")
    _limited(x)
    names = ("topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor")
    how = {name: named[name] for name in (*names, "score_function")}
    bias = named["expert_bias"]
    tensors = {"input": x} if bias is None else {"input": x, "bias": bias}
    return Read(tensors, {"output": probs, "chosen": chosen.float()}, how)


def _read_scores(named: Mapping[str, Any], result: Any) -> Read | None:
    x, (chosen, scores) = named["logits"], result
    if chosen.shape != x.shape:
        raise Unjudged("a map with a bit for each expert")
    _limited(x)
    how = {name: named[name] for name in ("topk", "score_function")}
    return Read({"input": x}, {"output": scores, "chosen": chosen.float()}, how)


def _limited(x: Any) -> None:
    if x.ndim != 2 or x.numel() * x.shape[1] > _MOST:
        raise Unjudged("logits that are no matrix, or more than 2^24 pairs of experts")


def _rounded(values: _Values, call: OperatorCall, result: str, on: Mask, largest: F64) -> Expected:
    """The values in the mask, rounded to the dtype of the result; zeros elsewhere. Nothing is known
    of rows with a number that is not finite, or whose ``largest`` on the way may overflow."""
    fine = np.isfinite(call.tensors["input"]).all(1, keepdims=True) & (largest < _LARGEST)
    centre, radius = values.centre, values.radius + FLUSHED
    centre, radius = np.where(on, centre, 0.0), np.where(on, radius, 0.0)
    unknown = np.broadcast_to(~fine, centre.shape)
    return Expected.within(centre, radius, FORMATS[call.dtypes[result]], unknown)


def _largest_on_the_way(dy: F64, scores: _Values, shared: Mask | None) -> F64:
    """A bound of what a gradient is computed from: products of gradients and scores, and their
    quotients by the square of the sum of the ``shared`` scores."""
    size = np.abs(dy).sum(1, keepdims=True)
    top = np.maximum(np.abs(scores.centre).max(1, keepdims=True), 1.0)
    low = np.ones_like(top)
    if shared is not None:
        low = np.minimum(_divisor(scores[shared]).centre, 1.0)
    return np.asarray(size * top**2 / low**2)


def _strange(call: OperatorCall) -> Mask:
    """The rows with a number that is not finite: for these, kernels may choose an expert twice."""
    fine = np.isfinite(call.tensors["input"]).all(1)
    bias = call.tensors.get("bias", np.zeros(1))
    return np.asarray(~(fine & np.isfinite(bias).all()))


def _mapped(selected: tuple[Mask, Mask], call: OperatorCall) -> Expected:
    inside, unknown = selected
    found = inside.astype(np.float64)
    return Expected.between(found, found, unknown | _strange(call)[:, None])


def _count(call: OperatorCall) -> Expected:
    """How many experts each token goes to."""
    strange = _strange(call)
    found = np.full(len(strange), float(call.settings["topk"]))
    return Expected.between(found, found, strange)


def _router(call: OperatorCall) -> dict[str, Expected]:
    x, how = call.tensors["input"].astype(np.float64), call.settings
    bias = np.zeros(x.shape[1])
    if "bias" in call.tensors:
        bias = call.tensors["bias"].astype(np.float64)
    chosen = call.outputs["chosen"] != 0.0
    factor = 1.0 if how["scaling_factor"] is None else how["scaling_factor"]
    scaling = _Values(np.array([[factor]]), np.array([[abs(factor) * U32]]))
    every = np.ones(x.shape, bool)
    with np.errstate(all="ignore"):
        if how["score_function"] == "softmax" and not how["use_pre_softmax"]:
            scores = _Values(x, np.zeros(x.shape))
        else:
            scores = _scores(x, how["score_function"], every)
        biased = scores.centre + bias
        radius = scores.radius + np.where(bias == 0.0, 0.0, U32 * np.abs(biased))
        weights = _weights(x, bias, chosen, how).times(scaling)
        found = {
            "output": _rounded(
                weights, call, "output", chosen, np.abs(scores.centre).max(1)[:, None]
            ),
            "chosen": _mapped(_selected(_Values(biased, radius), how), call),
            "count": _count(call),
        }
        if "grad_input" in call.outputs:
            dy = call.tensors["grad_output"].astype(np.float64)
            grad = _Values(dy, np.zeros(dy.shape)).times(scaling)
            soft = how["score_function"] == "softmax"
            shared = None if soft or how["topk"] == 1 else chosen
            largest = _largest_on_the_way(grad.centre, scores, shared)
            on = every if how["use_pre_softmax"] and soft else chosen
            given = _gradient(x, grad, chosen, how)
            found["grad_input"] = _rounded(given, call, "grad_input", on, largest)
    return found


def _aux_scores(call: OperatorCall) -> dict[str, Expected]:
    """Scores of all experts, which add up to 1."""
    x, kind = call.tensors["input"].astype(np.float64), call.settings["score_function"]
    every = np.ones(x.shape, bool)
    with np.errstate(all="ignore"):
        scores = _scores(x, kind, every)
        shares = scores if kind == "softmax" else _shares(scores, every)
        found = {
            "output": _rounded(
                shares, call, "output", every, np.abs(scores.centre).max(1)[:, None]
            ),
            "chosen": _mapped(_largest(shares, call.settings["topk"]), call),
            "count": _count(call),
        }
        if "grad_input" in call.outputs:
            dy = call.tensors["grad_output"].astype(np.float64)
            grad = _Values(dy, np.zeros(dy.shape))
            if kind == "softmax":
                given = _gradient_of_softmax(grad, scores)
            else:
                given = _gradient_of_shares(grad, scores, every).times(_slope(x, scores, kind))
            largest = _largest_on_the_way(dy, scores, None if kind == "softmax" else every)
            found["grad_input"] = _rounded(given, call, "grad_input", every, largest)
    return found


def _read_loss(named: Mapping[str, Any], result: Any) -> Read | None:
    names = ("total_num_tokens", "num_experts", "topk", "coeff")
    how = {name: float(named[name]) if name == "coeff" else int(named[name]) for name in names}
    counts = named["tokens_per_expert"].float()
    return Read({"input": named["probs"], "counts": counts}, {"output": result}, how)


def _loss(call: OperatorCall) -> dict[str, Expected]:
    """The coefficient times the sum over experts of their tokens times their probabilities. The
    given coefficient, the number of tokens (which divides twice) and each of four operations are
    rounded; blocks of rows are added in any order."""
    p, counts = (call.tensors[name].astype(np.float64) for name in ("input", "counts"))
    how, rows = call.settings, len(p)
    factor = how["num_experts"] * how["coeff"] / how["topk"] / float(how["total_num_tokens"]) ** 2
    with np.errstate(all="ignore"):
        terms, of_factor = p * counts, 8.0 * U32
        size = np.abs(terms).sum() * abs(factor)
        # a coefficient below the normal numbers has no bound of its relative error
        tiny = 0.0 < abs(factor) < 2.0**-100
        radius = np.asarray((gamma(rows + len(counts) + 4) + of_factor) * size + FLUSHED)
        unknown = np.asarray(~(max(size, np.abs(terms).sum()) < _LARGEST) | tiny)
        fmt = FORMATS[call.dtypes["output"]]
        found = {"output": Expected.within(np.asarray(terms.sum() * factor), radius, fmt, unknown)}
        if "grad_input" in call.outputs:
            row = factor * counts * float(call.tensors["grad_output"].item())
            radius = np.abs(row) * (of_factor + 3.0 * U32) + FLUSHED
            centre, radius, unknown = (
                np.broadcast_to(x, p.shape) for x in (row, radius, ~(np.abs(row) < _LARGEST) | tiny)
            )
            fmt = FORMATS[call.dtypes["grad_input"]]
            found["grad_input"] = Expected.within(centre, radius, fmt, unknown)
    return found


def _atomic(call: OperatorCall) -> bool:
    """Do blocks of rows add up by atomic operations, in any order? Two sums have only one."""
    return call.device == "cuda" and len(call.tensors["input"]) > 2


def _title(name: str, call: OperatorCall) -> str:
    x = call.tensors["input"]
    return f"TransformerEngine's {name} of a {TORCH_DTYPE[call.dtypes['input']]} {list(x.shape)}"


_of_logits = partial(
    Operator,
    gradients={"logits": "grad_input"},
    results=("output", "chosen", "grad_input", "count"),
    depends_on={"output": ("chosen",), "grad_input": ("chosen",)},
    derived=Derived(("count",), chosen_count),
)

OPERATORS = (
    _of_logits(
        name="te_router",
        words="TransformerEngine's routers",
        read=_read_router,
        expected=_router,
        expression=(
            "te_router(input, bias, grad_output, topk={topk}, use_pre_softmax={use_pre_softmax}, "
            "num_groups={num_groups}, group_topk={group_topk}, scaling_factor={scaling_factor}, "
            "score_function={score_function})"
        ),
        title=partial(_title, "fused_topk_with_score_function"),
        library=(f"{_OF}:fused_topk_with_score_function",),
        optional=("bias", "grad_output"),
        helper="te_router",
    ),
    _of_logits(
        name="te_scores",
        words="TransformerEngine's scores of experts",
        read=_read_scores,
        expected=_aux_scores,
        expression="te_scores(input, grad_output, {topk}, {score_function})",
        title=partial(_title, "fused_compute_score_for_moe_aux_loss"),
        library=(f"{_OF}:fused_compute_score_for_moe_aux_loss",),
        optional=("grad_output",),
        graded=1,
        helper="te_scores",
    ),
    Operator(
        name="te_aux_loss",
        words="TransformerEngine's auxiliary losses of experts",
        read=_read_loss,
        expected=_loss,
        expression=(
            "te_aux_loss(input, counts, grad_output, {total_num_tokens}, {num_experts}, {topk}, "
            "{coeff})"
        ),
        title=partial(_title, "fused_moe_aux_loss"),
        library=(f"{_OF}:fused_moe_aux_loss",),
        gradients={"probs": "grad_input"},
        results=("output", "grad_input"),
        optional=("grad_output",),
        unordered=_atomic,
        helper="te_aux_loss",
    ),
)
