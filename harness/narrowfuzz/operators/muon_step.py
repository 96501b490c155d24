"""A step of ``torch.optim.Muon`` on a matrix: momentum, a Newton-Schulz iteration in bf16 that
makes its singular values nearly 1, and weight decay."""

from __future__ import annotations

import numpy as np

from narrowfuzz.numerics.accumulator import U32
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import UNIT, Derived, Deviation, Expected, Operator
from narrowfuzz.operators.optimizer_steps import expression_of_step, no_kernel, title_of_step
from narrowfuzz.play.derived import rate_of_muon, singular_values_and_alignment
from narrowfuzz.trace.trace import OperatorCall

#: The largest singular value that an update may have; the smallest that it may have for each
#: singular value of the gradient that is at least ``_COUNTS`` of the gradient's norm; and
#: ``_COUNTS``. Chosen: five steps give 0.68 at least, in exact arithmetic, and bf16 moved that to
#: no less than 0.675 and no more than 1.205 on a CPU for 4,613 random matrices of 1 to 200 rows and
#: columns and 151 of up to 65,536 elements (normal, of far magnitudes, of low rank, almost
#: constant, with rows of zeros, of singular values down to 1e-3, signs).
LARGEST, SMALLEST, _COUNTS = 1.3, 0.5, 0.02
#: The smallest alignment that an update may have. Correct steps have 0.68 to 1.13, for the same
#: reason; chosen with room as well.
_ALIGNED = 0.4
#: The norm's squares are added up in fp32: with a larger norm they may overflow, and torch steps by
#: 0; with a smaller one they may underflow.
_LARGEST_NORM, _SMALLEST_NORM = 2.0**63, 2.0**-50


def _gradient(call: OperatorCall) -> tuple[F64, float]:
    """The matrix that is orthogonalised, from the stored momentum, and the largest distance of
    the kernel's from it, in Frobenius norm: three operations are rounded to the dtype of the
    parameter."""
    momentum = call.settings["options"]["momentum"]
    momentum_buffer = call.outputs["momentum_buffer"].astype(np.float64)
    unit, least = UNIT[call.dtypes["param"]]
    if _divides_in_place(call):  # the stored one may be divided by its norm already
        right = _momentum(call)
        off = right.radius + unit * np.abs(right.centre) + least
        return right.centre, float(np.linalg.norm(off))
    if not call.settings["options"]["nesterov"]:
        return momentum_buffer, 0.0
    grad = call.tensors["grad"].astype(np.float64)
    size = np.abs(1.0 - momentum) * np.abs(grad) + momentum * np.abs(momentum_buffer)
    off = unit * size + 8.0 * U32 * (np.abs(grad) + np.abs(momentum_buffer)) + least
    return grad * (1.0 - momentum) + momentum_buffer * momentum, float(np.linalg.norm(off))


def _momentum(call: OperatorCall) -> Expected:
    """``m + (1 - momentum) (g - m)``, or the equivalent from the other end, as ``lerp`` computes it
    in fp32 and rounds it once. Proof: the difference, the weight, the product and the sum are
    rounded; none is larger than the sum of both magnitudes."""
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
    """True if a step may divide the whole momentum buffer by its norm, which may be infinite or
    NaN."""
    return call.dtypes["param"] == "bf16" and not call.settings["options"]["nesterov"]


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """``momentum_buffer``: in fp32, rounded once.
    ``param``: each element differs from the decayed one by at most ``LARGEST`` rates, because no
    element of an update is larger than its largest singular value; decay, update and parameter are
    rounded.
    ``singular_values`` of the change of the decayed parameter, in units of the rate, largest first:
    none is above ``LARGEST``, and as many as the gradient has singular values of at least 0.02 of
    its norm are at least ``SMALLEST``; both limits are widened by what the parameter's roundings
    hide.
    ``alignment``: the product of the update with the gradient, divided by the largest that any
    matrix without singular values above 1 has. An update in the opposite direction, or of another
    matrix, is not aligned.

    Proved is, in exact arithmetic, that no singular value is above 1.2025: the iteration begins
    with a matrix of norm 1 and maps each singular value by 3.4445 x - 4.775 x^3 + 2.0315 x^5, which
    is at most 1.2025 on [0, 1.2025] (it is at 0.5545). Proved is also, by Weyl, what roundings of
    the parameter and of the momentum add. What the iteration's own roundings in bf16 add is not
    proved: ``LARGEST`` and ``SMALLEST`` are chosen.
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
    """Between ``_ALIGNED`` and ``LARGEST``, widened by as much as the singular values; unknown for
    a gradient whose norm is less than 20 times that of its roundings, or 20 times epsilon."""
    gradient, apart = _gradient(call)
    hidden = singular.hi[:1] - LARGEST
    small = np.linalg.norm(gradient) < 20.0 * max(apart, call.settings["options"]["eps"])
    unknown = singular.unknown[:1] | bool(small)
    return Expected.between(_ALIGNED - hidden, LARGEST + hidden, unknown)


def _overwritten(call: OperatorCall) -> dict[str, Expected]:
    """torch's step of a bf16 parameter without Nesterov momentum: the iteration begins with the
    momentum buffer itself, which it divides by its norm in place, and the next step goes on from
    that. The norm is rounded to bf16, and so is the quotient."""
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
    """The expected singular values. ``wild``: nothing is known of them; ``hidden``: the largest
    error of each element of the update, in units of the rate."""
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
    depends_on={"alignment": ("momentum_buffer",)},
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
