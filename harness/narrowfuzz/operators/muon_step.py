"""A step of ``torch.optim.Muon`` on a matrix: momentum, a Newton-Schulz iteration in bf16 that
makes its singular values nearly 1, and decay."""

from __future__ import annotations

import numpy as np

from narrowfuzz.numerics.accumulator import U32
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import UNIT, Derived, Deviation, Expected, Operator
from narrowfuzz.operators.optimizer_steps import expression_of_step, no_kernel, title_of_step
from narrowfuzz.play.derived import rate_of_muon, singular_values_and_alignment
from narrowfuzz.trace.trace import OperatorCall

#: The largest singular value that an update may have, and the smallest that one may have in place
#: of those that are at least ``_COUNTS`` of the gradient's norm. Chosen: five steps give 0.68 at
#: least, in exact arithmetic, and bf16 moved that to no less than 0.675 and no more than 1.205 on a
#: CPU for 4,613 random matrices of 1 to 200 rows and columns and 151 of up to 65,536 elements
#: (normal, of far magnitudes, of low rank, almost constant, with rows of zeros, of singular values
#: down to 1e-3, signs).
LARGEST, SMALLEST, _COUNTS = 1.3, 0.5, 0.02
#: Of right steps the alignment is 0.68 to 1.13, for the same reason; chosen with room as well.
_ALIGNED = 0.4
#: The norm's squares are added up in fp32: where it is larger they may overflow, and torch steps by
#: 0; where it is smaller they may underflow.
_LARGEST_NORM, _SMALLEST_NORM = 2.0**63, 2.0**-50


def _gradient(call: OperatorCall) -> tuple[F64, float]:
    """What is orthogonalised, of the momentum that was kept, and how far from it, in Frobenius
    norm, it may be: three operations are rounded to the dtype of the parameter."""
    momentum = call.settings["options"]["momentum"]
    kept = call.outputs["momentum_buffer"].astype(np.float64)
    unit, least = UNIT[call.dtypes["param"]]
    if _divides_in_place(call):  # what was kept may be another already
        right = _momentum(call)
        off = right.radius + unit * np.abs(right.centre) + least
        return right.centre, float(np.linalg.norm(off))
    if not call.settings["options"]["nesterov"]:
        return kept, 0.0
    grad = call.tensors["grad"].astype(np.float64)
    size = np.abs(1.0 - momentum) * np.abs(grad) + momentum * np.abs(kept)
    off = unit * size + 8.0 * U32 * (np.abs(grad) + np.abs(kept)) + least
    return grad * (1.0 - momentum) + kept * momentum, float(np.linalg.norm(off))


def _momentum(call: OperatorCall) -> Expected:
    """``m + (1 - momentum) (g - m)``, or the same from the other end, as ``lerp`` computes it in
    fp32 and rounds it once. Proof: the difference, the weight, the product and the sum are rounded;
    none is larger than the sum of both magnitudes."""
    grad = call.tensors["grad"].astype(np.float64)
    before = call.tensors.get("momentum_buffer", np.zeros(grad.shape)).astype(np.float64)
    centre = before + (1.0 - call.settings["options"]["momentum"]) * (grad - before)
    size = np.abs(before) + np.abs(grad)
    fmt = FORMATS[call.dtypes["param"]]
    unknown = ~(size < fmt.max * 0.5)
    if _divides_in_place(call) and not np.linalg.norm(centre) < _LARGEST_NORM:
        unknown = np.full(size.shape, True)
    return Expected.within(centre, 6.0 * U32 * size + 2.0**-149, fmt, unknown)


def _divides_in_place(call: OperatorCall) -> bool:
    """May a step divide the whole buffer by its norm, which may be infinite or none?"""
    return call.dtypes["param"] == "bf16" and not call.settings["options"]["nesterov"]


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """``momentum_buffer``: in fp32, rounded once.
    ``param``: each element at most ``LARGEST`` rates from the decayed one, for none is larger than
    the largest singular value; decay, update and parameter are rounded.
    ``singular_values``, of what the parameter was moved by, in rates, largest first: none above
    ``LARGEST``, and as many as the gradient has singular values of at least 0.02 of its norm are at
    least ``SMALLEST``; either may be off by what the parameter's roundings hide.
    ``alignment`` of the update with the gradient, by the largest that any matrix without singular
    values above 1 has: an update the other way, or of another matrix, has none.

    Proved is, in exact arithmetic, that none is above 1.2025: the iteration begins with a matrix of
    norm 1 and maps each singular value by 3.4445 x - 4.775 x^3 + 2.0315 x^5, which is at most
    1.2025 on [0, 1.2025] (it is at 0.5545); and what roundings of the parameter and of the momentum
    add, by Weyl. What the iteration's own roundings in bf16 add is not proved: ``LARGEST`` and
    ``SMALLEST`` are chosen.
    """
    options, dtype = call.settings["options"], call.dtypes["param"]
    (unit, least), fmt = UNIT[dtype], FORMATS[dtype]
    with np.errstate(all="ignore"):
        param, grad = (call.tensors[n].astype(np.float64) for n in ("param", "grad"))
        decay = 1.0 - options["lr"] * options["weight_decay"]
        decayed, rate = param * decay, rate_of_muon(options, *param.shape)
        momentum = _momentum(call)
        wild = not np.isfinite(grad).all() or bool(momentum.unknown.any())
        moved = rate * LARGEST + (unit + 4.0 * U32) * (np.abs(decayed) + rate * LARGEST) + least
        far = np.full(param.shape, wild) | ~(np.abs(decayed) + moved < fmt.max * 0.5)
        size = np.abs(decayed) + np.abs(call.outputs["param"].astype(np.float64))
        hidden = (unit + 4.0 * U32) * size + 8.0 * U32 * rate * LARGEST + 2.0 * least
        found = {
            "momentum_buffer": momentum,
            "param": Expected.within(decayed, moved, fmt, far),
        }
        singular = _singular(call, bool(far.any()), hidden / rate)
        return found | {"singular_values": singular, "alignment": _alignment(call, singular)}


def _alignment(call: OperatorCall, singular: Expected) -> Expected:
    """Between ``_ALIGNED`` and ``LARGEST``, less or more by what the singular values are; unknown
    of a gradient that is nothing beside its roundings, or beside epsilon."""
    gradient, apart = _gradient(call)
    hidden = singular.hi[:1] - LARGEST
    small = np.linalg.norm(gradient) < 20.0 * max(apart, call.settings["options"]["eps"])
    unknown = singular.unknown[:1] | bool(small)
    return Expected.between(_ALIGNED - hidden, LARGEST + hidden, unknown)


def _overwritten(call: OperatorCall) -> dict[str, Expected]:
    """As torch steps a bf16 parameter without Nesterov's momentum: the buffer is what the iteration
    begins with, divided by its norm, and the next step goes on from that. The norm is rounded to
    bf16, and so is the quotient."""
    if not _divides_in_place(call):
        return {}
    right = _momentum(call)
    with np.errstate(all="ignore"):
        norm = np.maximum(np.linalg.norm(right.centre), call.settings["options"]["eps"])
        centre, unit = right.centre / norm, UNIT["bf16"][0]
        radius = (right.radius + 2.0**-133) / norm + 3.0 * unit * np.abs(centre) + 2.0**-133
    unknown = np.asarray(right.unknown | ~np.isfinite(centre))
    return {"momentum_buffer": Expected.within(centre, radius, FORMATS["bf16"], unknown)}


def _singular(call: OperatorCall, wild: bool, hidden: F64) -> Expected:
    """``hidden``: how far each element of the update may be from what it was, in rates."""
    size = min(call.tensors["param"].shape)
    nowhere = np.zeros(size)
    off = float(np.linalg.norm(hidden))
    gradient, apart = _gradient(call)
    norm = max(float(np.linalg.norm(gradient)) + apart, call.settings["options"]["eps"])
    if wild or not np.isfinite(off) or not _SMALLEST_NORM < norm < _LARGEST_NORM:
        return Expected.between(nowhere, nowhere, np.ones(size, dtype=bool))
    counts = np.linalg.svd(gradient, compute_uv=False) - apart >= _COUNTS * norm
    least = np.where(counts, max(SMALLEST - off, 0.0), 0.0)
    return Expected.between(least, np.full(size, LARGEST + off), np.zeros(size, dtype=bool))


OPERATOR = Operator(
    name="muon_step",
    words="steps of Muon",
    read=no_kernel,
    expected=_expected,
    expression=expression_of_step("momentum_buffer"),
    title=title_of_step,
    results=("param", "momentum_buffer", "singular_values", "alignment"),
    made_of={"alignment": ("momentum_buffer",)},
    derived=Derived(("singular_values", "alignment"), singular_values_and_alignment),
    optional=("momentum_buffer",),
    helper="stepped",
    deviations=(
        Deviation(
            "muon_buffer_normalised",
            "Muon divides the momentum of a bf16 parameter by its norm where it takes no Nesterov "
            "step",
            ("cpu", "cuda"),
            _overwritten,
        ),
    ),
)
