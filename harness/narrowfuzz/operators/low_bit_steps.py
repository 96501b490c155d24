"""A step of torchao's AdamW with moments stored in 8 bits, 4 bits or FP8, on one parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import (
    TORCH_DTYPE,
    Derived,
    Deviation,
    Expected,
    Operator,
    Read,
)
from narrowfuzz.operators.rows import LARGEST
from narrowfuzz.play.derived import parameter_again
from narrowfuzz.trace.trace import OperatorCall

#: The optimizers of torchao.optim, and the options that their constructors take.
KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
#: The option that rounds a bf16 parameter stochastically.
ROUNDS = "bf16_stochastic_round"
_OPTIONS = ("lr", "betas", "eps", "weight_decay", ROUNDS)
#: The factor by which a step may exceed Adam's bound, which holds for exact moments. Chosen, not
#: proven: room for a first moment that its code doubles together with a second that its code
#: quarters.
_ROOM = 4.0
#: Half of fp32's least subnormal number, and the magnitude below which a GPU may flush to zero.
_LEAST, _FLUSHED = 2.0**-150, 2.0**-126


def read_low_bit_step(
    kind: str, group: Mapping[str, Any], param: Any, state: Any, start: Any, grads: Any
) -> Read | None:
    """The call, read before it is made. ``start``: the parameter before its first step; ``grads``
    [steps, ...]: the gradients of all steps, this one's last. None for other optimizers; raises
    Unjudged with the reason for options without a reference."""
    if kind not in KINDS:
        return None
    if group.get("amsgrad"):
        raise Unjudged("amsgrad")
    tensors = {"param": param, "start": start, "grads": grads}
    for name in ("exp_avg", "exp_avg_sq"):
        if (saved := state.get(name)) is not None:
            tensors[name] = saved.dequantize() if hasattr(saved, "dequantize") else saved
    options = {name: group[name] for name in _OPTIONS} | {"lr": float(group["lr"])}
    options[ROUNDS] = bool(group[ROUNDS])
    return Read(tensors, {}, {"kind": kind, "options": options, "steps": len(grads)})


def _before(call: OperatorCall) -> tuple[F64, F64, F64, F64]:
    """Parameter, gradient and both moments before this step."""
    param, grads = (call.tensors[name].astype(np.float64) for name in ("param", "grads"))
    moments = [
        call.tensors[name].astype(np.float64) if name in call.tensors else np.zeros(param.shape)
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return param, grads[-1], moments[0], moments[1]


def _decayed(call: OperatorCall, param: F64) -> F64:
    options = call.settings["options"]
    return param * (1.0 - options["lr"] * options["weight_decay"])


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """``param``: Adam's step in fp32, from the moments that the codes represent, rounded once, or,
    with stochastic rounding, to either neighbour; NaN stays NaN.
    ``bounded_param``: the step is no larger than Adam's can be, whatever the gradients were.

    Proof. By Cauchy and Schwarz ``m <= (1 - b1) sqrt(sum of (b1^2 / b2)^k) sqrt(v / (1 - b2))``,
    with as many terms as there were steps, and both moments are divided by their bias corrections
    (for the first step: by at most the rate; Kingma and Ba 2015, section 2.1).
    """
    options, steps = call.settings["options"], call.settings["steps"]
    (b1, b2), lr, fmt = options["betas"], options["lr"], FORMATS[call.dtypes["param"]]
    first, second = 1.0 - b1**steps, 1.0 - b2**steps
    with np.errstate(all="ignore"):
        param, grad, m0, v0 = _before(call)
        m, v = b1 * m0 + (1.0 - b1) * grad, b2 * v0 + (1.0 - b2) * np.square(grad)
        below = np.sqrt(v / second) + options["eps"]
        update, decayed = lr * m / first / below, _decayed(call, param)
        unit = 2.0 * U32
        near = lr / first / below * 4.0 * unit * (np.abs(m0) + np.abs(grad))
        # what may be flushed: of the moment, and of its product with the rate before the division
        flushed = call.device == "cuda"
        moment, product = (_FLUSHED, _FLUSHED) if flushed else (8.0 * _LEAST, _LEAST)
        near = near + (lr / first * moment + product) / below
        near = near + np.abs(update) * unit * (8.0 + 2.0 / first + 2.0 / second)
        near = near + 4.0 * unit * (np.abs(decayed) + np.abs(update))
        wild = ~(np.abs(grad) < np.sqrt(LARGEST)) | ~np.isfinite(decayed)
        wild = wild | ~(np.abs(m0) < LARGEST) | ~(np.abs(v0) < LARGEST)
        most = (1.0 - b1) / math.sqrt(1.0 - b2) * math.sqrt(second) / first
        most *= math.sqrt(sum((b1**2 / b2) ** k for k in range(steps)))
        far = np.full(param.shape, _ROOM * lr * most) + 4.0 * unit * np.abs(decayed)
        if options[ROUNDS] and call.dtypes["param"] == "bf16":  # to either neighbour
            spacing = 2.0**-fmt.mantissa_bits
            near = near + spacing * (np.abs(decayed) + np.abs(update)) + fmt.min_subnormal
            far = far * (1.0 + spacing) + spacing * np.abs(decayed) + fmt.min_subnormal
        nan = np.isnan(param) | np.isnan(grad) | np.isnan(m0) | np.isnan(v0)
        stepped = Expected.within(decayed - update, near, fmt, wild)
        lo, hi = (np.where(nan, np.nan, end) for end in (stepped.lo, stepped.hi))
    return {
        "param": replace(stepped, lo=lo, hi=hi, unknown=stepped.unknown & ~nan),
        "bounded_param": Expected.within(decayed, far, fmt, wild),
    }


def _moment_lost(call: OperatorCall) -> dict[str, Expected]:
    """Where the second moment's code is 0 and the first's is not, a step divides by epsilon or
    by what this gradient adds to it: the length of the step is then known only as far as
    ``param`` is."""
    right = _expected(call)
    _, _, m0, v0 = _before(call)
    lost = (v0 == 0.0) & (m0 != 0.0)
    ends = [np.where(lost, right["param"].lo, right["bounded_param"].lo)]
    ends.append(np.where(lost, right["param"].hi, right["bounded_param"].hi))
    unknown = np.where(lost, right["param"].unknown, right["bounded_param"].unknown)
    return {"bounded_param": Expected.between(ends[0], ends[1], unknown)}


def _nan_lost(call: OperatorCall) -> dict[str, Expected]:
    """Stochastic rounding increments the bits of a NaN as if they were a number's: the result is
    NaN, 0 or an infinity."""
    if not (call.settings["options"][ROUNDS] and call.dtypes["param"] == "bf16"):
        return {}
    right, got = _expected(call)["param"], call.outputs["param"].astype(np.float64)
    lost = np.isnan(right.lo) & ((got == 0.0) | np.isinf(got))
    return {
        "param": replace(right, lo=np.where(lost, got, right.lo), hi=np.where(lost, got, right.hi))
    }


def _title(call: OperatorCall) -> str:
    shape, dtype = list(call.tensors["param"].shape), TORCH_DTYPE[call.dtypes["param"]]
    return (
        f"step {call.settings['steps']} of torchao.optim.{call.settings['kind']} on a {dtype} "
        f"parameter of {shape}"
    )


OPERATOR = Operator(
    name="low_bit_adam_step",
    words="steps of AdamW with low-bit moments",
    read=lambda named, result: None,  # a step is not a kernel
    expected=_expected,
    expression="trained({kind}, {options}, start, grads)",
    title=_title,
    results=("param", "bounded_param"),
    derived=Derived(("bounded_param",), parameter_again),
    optional=("exp_avg", "exp_avg_sq"),
    state_before=("param", "exp_avg", "exp_avg_sq"),
    deviations=(
        Deviation(
            "low_bit_second_moment_lost",
            "a second moment that is small beside its block's largest is kept as 0, the first is "
            "not, and the next step divides by epsilon",
            ("cpu", "cuda"),
            _moment_lost,
        ),
        Deviation(
            "stochastic_rounding_loses_nan",
            "a NaN that is rounded to bf16 by chance becomes 0 or an infinity",
            ("cuda",),
            _nan_lost,
        ),
    ),
    helper="trained",
)
