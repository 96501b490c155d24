"""O26: before each step gradients are clipped by the norm of all of them, or element by element, as
``torch.nn.utils`` documents it. Also the bound on the error of a norm of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.events import Step
from narrowfuzz.numerics.accumulator import gamma
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format
from narrowfuzz.operators.operator import Expected
from narrowfuzz.play.job import CLIPS_AT, FIRST_SCALE
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import beyond, outside
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.rules.sharded.evidence import arm_of, before_steps, run_of, whole_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

NAME = "O26"
#: The result that holds the norm of all gradients, over all ranks if there are several; symptoms.
NORM, NOT_THE_NORM = "norm", "is not the gradients' norm"
NOT_CLIPPED = "is not the clipped gradient"
#: Name of a parameter's gradient -> the whole gradient, put together from the pieces of all ranks;
#: None if that is not possible.
_Whole = Callable[[str], F32 | None]


def check_clipping(evidence: Evidence) -> Iterator[Verdict]:
    """O26 for every arm in one process."""
    for arm, trace in evidence.traces.items():
        if trace.error is not None:
            yield plain(NAME, arm, NORM, "not_applicable", "it raised")
        else:
            yield from _judged(evidence, arm, [trace], trace.outputs.get)


def check_clipping_on_ranks(evidence: Evidence) -> Iterator[Verdict]:
    """O26 on ranks: each rank clips its pieces by the norm of the whole gradients."""
    run = run_of(evidence)
    if run is None:
        return
    outputs = evidence.traces[EAGER.name].ranks[0].outputs

    def whole(name: str) -> F32 | None:
        return whole_of(evidence, name, outputs[name].shape) if name in outputs else None

    yield from _judged(evidence, arm_of(evidence), run.ranks, whole)


def norm_between(
    grads: Sequence[tuple[F64, F64]], dtype: str, ranks: int, meshes: int, order: float = 2.0
) -> tuple[float, float]:
    """Both ends of the interval of the norm, of order 2 or infinity, of whole ``grads``, each known
    as (value, radius); NaN if the squares or the result may over- or underflow.

    Proof. A rank's norm of each of its pieces errs by u, the norm of these norms by u more, and the
    two sums of squares, in fp32, together by gamma of their number of terms. Ranks then square
    (2 e + u), add r positive terms ((r - 1) u) and take a root, which halves that and rounds (u):
    (r + 2) u / 2 for each dimension of the mesh. With R ranks in all that is at most (R + 4) u,
    second orders included, with u of the gradients' dtype. If experts have a mesh of their own, the
    norms of both meshes are added in the same way: 2 u more. The largest absolute value is never
    rounded. A rounding to a subnormal number errs by at most half the smallest one: one rounding
    for each piece, and those R + 4.
    """
    sizes = [(np.maximum(np.abs(x) - radius, 0.0), np.abs(x) + radius) for x, radius in grads]
    if order == np.inf:
        largest = [[float(np.max(end, initial=0.0)) for end in ends] for ends in sizes]
        return max(lo for lo, _ in largest), max(hi for _, hi in largest)
    with np.errstate(all="ignore"):
        squares = [[float(np.sum(end**2)) for end in ends] for ends in sizes]
        lo, hi = np.sqrt(np.sum(squares, axis=0))
    fmt = FORMATS[dtype]
    if not (lo > 2.0**-50 and hi < min(2.0**60, fmt.max / 2.0)):
        return np.nan, np.nan
    terms = max(x.size for x, _ in grads) + len(grads)
    far = (ranks + 4 + 2 * (meshes - 1)) * fmt.unit_roundoff + gamma(terms)
    small = (len(grads) * ranks + ranks + 4) * fmt.min_subnormal / 2.0
    return float(lo * (1.0 - far) - small), float(hi * (1.0 + far) + small)


def unscaled(grad: F32, scale: float, fmt: Format) -> tuple[F64, F64]:
    """A gradient divided by a power of two, and the radius of its error: a quotient below the
    normal numbers is rounded, or flushed to zero."""
    x = grad.astype(np.float64) / scale
    tiny = (np.abs(x) < fmt.min_normal) & (scale != 1.0)
    return x, np.where(tiny, np.abs(x) + fmt.min_subnormal, 0.0)


def clipped(x: F64, radius: F64, norm: float | None, fmt: Format) -> Expected:
    """The result of clipping a gradient, known as value and radius, by the norm that torch
    computed; without a norm, of clipping each of its elements.

    Proof. The gradient is multiplied by c = min(CLIPS_AT / (norm + 1e-6), 1). The addition, the
    quotient, as a reciprocal and a product, and c times the gradient round once each, by u of the
    gradients' dtype: c errs by 4 u at most, second orders included, and by a subnormal number. A
    kernel may flush results below the normal numbers.
    """
    nowhere = np.zeros(x.shape, dtype=bool)
    if norm is None:
        lo, hi = (np.clip(end, -CLIPS_AT, CLIPS_AT) for end in (x - radius, x + radius))
        return Expected.between(lo, hi, nowhere)
    with np.errstate(all="ignore"):
        factor = CLIPS_AT / (norm + 1e-6)
        off = 0.0 if factor == 0.0 else 4.0 * fmt.unit_roundoff * factor + fmt.min_subnormal
        low = 0.0 if factor < fmt.min_normal else factor - off
        least, most = np.minimum((low, factor + off), 1.0)  # NaN stays
        centre = x * ((least + most) / 2.0)
        spread = np.abs(x) * (most - least) / 2.0 + radius * most
        changed = (most < 1.0) & (np.abs(centre) - spread < fmt.min_normal)
        spread = np.where(changed, spread + np.abs(centre), spread)
        spread = np.where(np.isnan(centre), 0.0, spread)
    return Expected.within(centre, spread, fmt, nowhere)


def _judged(
    evidence: Evidence, arm: str, ranks: Sequence[Trace], whole: _Whole
) -> Iterator[Verdict]:
    if evidence.spec.clipping == "none" or not evidence.spec.optimizes:
        yield plain(NAME, arm, NORM, "not_applicable", "no gradient is clipped")
        return
    every = ((trace, f"{kind}.grad") for trace in ranks for kind in _parameters(trace))
    if not any(t.any() for place in every for t in _of_steps(evidence, *place).values()):
        yield plain(NAME, arm, NORM, "inconclusive", "no parameter had a gradient but zeros")
        return
    if evidence.spec.clipping != "value":
        yield _norms(evidence, arm, ranks, whole)
    found = (
        verdict
        for rank, trace in enumerate(ranks)
        for verdict in _gradients(evidence, arm, rank, trace)
    )
    yield next(found, plain(NAME, arm, "clipped", "ok"))


def _norms(evidence: Evidence, arm: str, ranks: Sequence[Trace], whole: _Whole) -> Verdict:
    """The divergence of the first norm that is not the gradients'; else ok, or inconclusive with
    the reason if no norm could be judged."""
    spec, fmt = evidence.spec, FORMATS[evidence.spec.dtype]
    order = np.inf if spec.clipping == "norm_inf" else 2.0
    norms, why, judged = _of_steps(evidence, ranks[0], NORM), "nothing was clipped", False
    for step, (name, norm) in enumerate(norms.items()):
        scale, kinds = scale_of(evidence, ranks[0], step), _parameters(ranks[0])
        keys = [[*_of_steps(evidence, ranks[0], f"{kind}.grad")][step : step + 1] for kind in kinds]
        grads = [whole(key) for of_step in keys for key in of_step]
        wholes = [grad for grad in grads if grad is not None]
        if len(wholes) < len(kinds):
            why = "pieces make up no whole, or a parameter had no gradient"
            continue
        if not all(np.isfinite(grad).all() for grad in wholes):
            why = "a gradient is not finite"
            continue
        known = [unscaled(grad, scale, fmt) for grad in wholes]
        meshes = 2 if spec.sharding.experts else 1
        lo, hi = norm_between(known, spec.dtype, len(ranks), meshes, order)
        if np.isnan(lo):
            why = "squares may over- or underflow"
            continue
        judged = True
        if not lo <= (got := float(norm)) <= hi:
            at, expect = At(name=name), between(lo, hi)
            return diverged(NAME, arm, NORM, NOT_THE_NORM, at, number(got), expect)
    return plain(NAME, arm, NORM, "ok") if judged else plain(NAME, arm, NORM, "inconclusive", why)


def _gradients(evidence: Evidence, arm: str, rank: int, trace: Trace) -> Iterator[Verdict]:
    """The divergences of the gradients that one process or rank has clipped."""
    fmt, by_norm = FORMATS[evidence.spec.dtype], evidence.spec.clipping != "value"
    norms = [*_of_steps(evidence, trace, NORM).values()]
    for kind in _parameters(trace):
        before = _of_steps(evidence, trace, f"{kind}.grad").values()
        after = _of_steps(evidence, trace, f"{kind}.clipped").items()
        for step, (grad, (name, got)) in enumerate(zip(before, after, strict=False)):
            norm = float(norms[step]) if by_norm else None
            may = clipped(*unscaled(grad, scale_of(evidence, trace, step), fmt), norm, fmt)
            if (bad := outside(may, got)).any():
                at = At(name=name, rank=rank, index=first(bad))
                yield beyond(NAME, arm, "clipped", NOT_CLIPPED, at, got, may)


def _of_steps(evidence: Evidence, trace: Trace, kind: str) -> dict[str, F32]:
    """The results of this kind, one for each step, by name, in order."""
    steps = sum(isinstance(event, Step) for event in evidence.spec.training)
    return before_steps(trace, kind, steps)


def _parameters(trace: Trace) -> list[str]:
    """The parameters whose gradients were clipped."""
    return sorted({name_of(name).clipped_of for name in trace.outputs} - {""})


def scale_of(evidence: Evidence, trace: Trace, step: int) -> float:
    """The factor by which the loss of this step was multiplied."""
    if evidence.spec.loss_scaling == "none":
        return 1.0
    before = [*_of_steps(evidence, trace, "loss_scale").values()][:step]
    return float(before[-1].item()) if before else FIRST_SCALE
