"""A step of ``torch.optim.SGD``, ``Adam``, ``AdamW`` and ``Adagrad`` on one parameter, in any
implementation: a loop, operators for all parameters at once (``foreach``), or one kernel
(``fused``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.low_bit_steps import KINDS
from narrowfuzz.operators.operator import (
    TORCH_DTYPE,
    UNIT,
    Deviation,
    Expected,
    Operator,
    Read,
    hull,
)
from narrowfuzz.operators.sampled import elements
from narrowfuzz.trace.trace import OperatorCall

#: For each optimizer of torch.optim: its operator, the state that it stores for a parameter, and
#: the options that its constructor takes. The expectation of Muon is in muon_step.py.
_COMMON = ("lr", "weight_decay", "maximize", "foreach", "fused")
_ADAM = ("adam_step", ("exp_avg", "exp_avg_sq"), ("betas", "eps", *_COMMON))
_KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "SGD": ("sgd_step", ("momentum_buffer",), ("momentum", "dampening", "nesterov", *_COMMON)),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": (
        "adagrad_step",
        ("sum",),
        ("lr_decay", "initial_accumulator_value", "eps", *_COMMON),
    ),
    "Muon": (
        "muon_step",
        ("momentum_buffer",),
        ("lr", "weight_decay", "momentum", "nesterov", "eps", "adjust_lr_fn"),
    ),
}
#: Options that change a step in a way that has no reference here.
_OTHERWISE = ("amsgrad", "capturable", "differentiable")
#: Options of Muon's iteration as its authors published it; the reference covers no other values.
_PUBLISHED = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5}
#: The largest number of elements of a parameter: scripts contain whole tensors, and would have
#: megabytes for larger ones.
LARGEST_PARAMETER = 2**18
#: Steps of any optimizer, in words.
STEPS = "steps of optimizers"


def read_step(
    kind: str, group: Mapping[str, Any], param: Any, state: Any
) -> tuple[str, Read] | None:
    """The operator's name, and the call, read before it is made; its results are the parameter and
    its state afterwards. None for an empty parameter; raises Unjudged with the reason for other
    optimizers, options without a reference, a learning rate that is a tensor, a sparse gradient,
    and a very large parameter."""
    if kind not in _KINDS:
        raise Unjudged(f"torch.optim.{kind}")
    if others := [name for name in _OTHERWISE if group.get(name)]:
        raise Unjudged(f"{kind} with {', '.join(others)}")
    if others := [name for name, x in _PUBLISHED.items() if group.get(name, x) != x]:
        raise Unjudged(f"{kind} with other {', '.join(others)} than by default")
    if param.grad.is_sparse:
        raise Unjudged("a sparse gradient")
    if not isinstance(group["lr"], (float, int)):
        raise Unjudged("a learning rate that is a tensor")
    if param.numel() > LARGEST_PARAMETER:
        raise Unjudged(f"a parameter of more than {LARGEST_PARAMETER} elements")
    if not param.numel():
        return None
    operator, names, options = _KINDS[kind]
    states = {name: state[name] for name in names if state.get(name) is not None}
    settings = {
        "kind": kind,
        "options": {name: group[name] for name in options},
        "steps": int(state.get("step", 1 if states else 0)),
    }
    return operator, Read({"param": param, "grad": param.grad, **states}, {}, settings)


@dataclass(frozen=True)
class _Term:
    """Numbers in float64, and the largest distance from them that an implementation may have whose
    operations may each be rounded to ``dtype``. ``wild`` marks elements that may overflow on the
    way: nothing is known of them."""

    centre: F64
    radius: F64
    wild: NDArray[np.bool_]
    dtype: str

    @classmethod
    def of(cls, centre: F64, radius: F64, dtype: str, wild: Any = False) -> _Term:
        far = ~(np.abs(centre) + radius < FORMATS[dtype].max * 0.5)
        return cls(centre, radius, np.asarray(far | wild), dtype)

    def rounded(self) -> _Term:
        """Rounded to the dtype, or held in fp32 without rounding: the radius covers both."""
        unit, least = UNIT[self.dtype]
        size = np.abs(self.centre) + self.radius
        return replace(self, radius=self.radius + unit * size + least)

    def times(self, option: float) -> _Term:
        """The product with an option, which may be rounded to the dtype, too: that happens for the
        last elements of a parameter, which do not fill a vector register."""
        centre = self.centre * option
        unit = 0.0 if np.frexp(option)[0] in (0.5, -0.5, 0.0) else UNIT[self.dtype][0]
        radius = abs(option) * self.radius * (1.0 + unit) + (2.0 * U32 + unit) * np.abs(centre)
        return _Term.of(centre, radius, self.dtype, self.wild)

    def plus(self, other: _Term) -> _Term:
        centre, radius = self.centre + other.centre, self.radius + other.radius
        size = np.abs(self.centre) + np.abs(other.centre) + radius
        return _Term.of(centre, radius + 2.0 * U32 * size, self.dtype, self.wild | other.wild)

    def expected(self) -> Expected:
        """The expectation of the stored result, which is rounded once more."""
        return Expected.within(self.centre, self.radius, FORMATS[self.dtype], self.wild)


def _given(call: OperatorCall, name: str) -> _Term:
    x = call.tensors[name].astype(np.float64)
    return _Term.of(x, np.zeros(x.shape), call.dtypes["param"])


def _gradient(call: OperatorCall) -> _Term:
    """The gradient with the sign of ``maximize``, and with the weight decay that is part of it (not
    for AdamW)."""
    options = call.settings["options"]
    grad = _given(call, "grad").times(-1.0 if options["maximize"] else 1.0)
    decay = options["weight_decay"]
    if not decay or call.settings["kind"] == "AdamW":
        return grad
    return grad.plus(_given(call, "param").times(decay).rounded()).rounded()


def _sgd(call: OperatorCall) -> dict[str, Expected]:
    """``param - lr d``, where d is the gradient with its decay, or the momentum's buffer.

    Proof. Each line of the documented algorithm has at most two operations, each rounded to the
    dtype of the parameter, or computed in fp32; what is stored is rounded once.
    """
    options, found = call.settings["options"], {}
    with np.errstate(all="ignore"):
        d = _gradient(call)
        if momentum := options["momentum"]:
            buffer = d
            if "momentum_buffer" in call.tensors:
                before = _given(call, "momentum_buffer").times(momentum).rounded()
                buffer = before.plus(d.times(1.0 - options["dampening"]).rounded())
            found["momentum_buffer"] = buffer.expected()
            buffer = buffer.rounded()
            ahead = d.plus(buffer.times(momentum).rounded()).rounded()
            d = ahead if options["nesterov"] else buffer
        moved = _given(call, "param").plus(d.times(-options["lr"]).rounded())
        return {"param": moved.expected(), **found}


def _blocks_skipped(call: OperatorCall) -> dict[str, Expected]:
    """The step of torch's fused CPU kernel in bf16 and fp16: elements in whole vector registers,
    the smallest of which hold 8, stay as they are, and their momentum is whatever the memory held;
    only the last few elements of a parameter are stepped."""
    if not call.settings["options"]["fused"] or call.dtypes["param"] == "fp32":
        return {}
    shape = call.outputs["param"].shape
    size = call.outputs["param"].size
    block = (np.arange(size) < size // 8 * 8).reshape(shape)
    before, found = {**call.outputs, "param": call.tensors["param"]}, {}
    for name, right in _sgd(call).items():
        earlier, now = (x[name].astype(np.float64) for x in (before, call.outputs))
        same = block & ((earlier == now) | (np.isnan(earlier) & np.isnan(now)))
        lo, hi = (np.where(same, earlier, end) for end in (right.lo, right.hi))
        found[name] = Expected.between(lo, hi, right.unknown & ~same)
    return found


def _adam(call: OperatorCall) -> dict[str, Expected]:
    """Adam's step with the betas as given or, for the fused kernel of a GPU, as rounded to fp32:
    with 0.999 a second moment is then 1.3e-5 smaller, which torch considers acceptable
    (pytorch#173224)."""
    betas = call.settings["options"]["betas"]
    exact = _adam_with(call, betas)
    if not (call.settings["options"]["fused"] and call.device == "cuda"):
        return exact
    single = _adam_with(call, tuple(float(np.float32(beta)) for beta in betas), power=4.0 * U32)
    return {name: hull(one, single[name]) for name, one in exact.items()}


def _adam_with(
    call: OperatorCall, betas: tuple[float, ...], power: float = 0.0
) -> dict[str, Expected]:
    """The moments, each from its value before the step; and the parameter, from the moments that
    the step stored.

    Proof. As for SGD. In the quotient of the moments seven operations (both roots and divisions,
    eps, the moments' own last roundings and the step's size) may be rounded, so its relative error
    is at most eight unit roundoffs of the dtype. A power of a beta may be off by ``power``, which
    counts for more where 1 minus that power is small. Where the second moment or the denominator is
    near the dtype's least number, nothing is known.
    """
    options, dtype = call.settings["options"], call.dtypes["param"]
    (b1, b2), lr, steps = betas, options["lr"], call.settings["steps"] + 1
    unit, least = UNIT[dtype]
    with np.errstate(all="ignore"):
        d = _gradient(call)
        zeros = _Term.of(np.zeros(d.centre.shape), np.zeros(d.centre.shape), dtype)
        m, v = (_given(call, n) if n in call.tensors else zeros for n in ("exp_avg", "exp_avg_sq"))
        first = m.times(b1).rounded().plus(d.times(1.0 - b1).rounded())
        square = d.centre**2
        off = 2.0 * np.abs(d.centre) * d.radius + d.radius**2
        squared = _Term.of(square, off, dtype, d.wild)
        second = v.times(b2).rounded().plus(squared.times(1.0 - b2).rounded())
        found = {"exp_avg": first.expected(), "exp_avg_sq": second.expected()}
        m1, v1 = (call.outputs[n].astype(np.float64) for n in ("exp_avg", "exp_avg_sq"))
        size, root = lr / (1.0 - b1**steps), np.sqrt(1.0 - b2**steps)
        below = np.sqrt(v1) / root + options["eps"]
        update = size * m1 / below
        corrections = 2.0 * power / (1.0 - b1**steps) + power / root**2
        near = np.abs(update) * (8.0 * unit + 16.0 * U32 + corrections)
        # the first moment times the step's size may be subnormal: rounded before it is divided
        near = near + 2.0 * least * (1.0 + (1.0 + size) / below)
        step = _Term.of(-update, near, dtype)
        param = _given(call, "param")
        if call.settings["kind"] == "AdamW" and options["weight_decay"]:
            param = param.times(1.0 - lr * options["weight_decay"]).rounded()
        moved = param.plus(step).expected()
        lost = (v1 < 2.0**10 * least) & ((v1 > 0.0) | (square > 0.0))
        lost |= (below < 2.0**10 * least) | ~np.isfinite(m1) | ~np.isfinite(v1)
        unknown = moved.unknown | lost
        return {"param": Expected(moved.centre, moved.radius, moved.lo, moved.hi, unknown), **found}


#: The optimizers whose steps have a reference without their state, and the defaults of their
#: options; torchao's optimizers compute as Adam does.
_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
STATELESS: dict[str, Mapping[str, Any]] = {
    "SGD": {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "dampening": 0.0},
    "Adam": {**_ADAMW, "weight_decay": 0.0},
    **dict.fromkeys(("AdamW", *KINDS), _ADAMW),
}


def step_without_state(
    kind: str, options: Mapping[str, Any], dtype: str, param: NDArray[Any], grad: NDArray[Any]
) -> Expected:
    """A parameter after a step of SGD, or after the first step of Adam, whose moments were not
    recorded.

    Proof. Adam's moments are products of the gradient, rounded at most three times, and of its
    square, rounded at most four times, which the root halves: their quotient errs by less than six
    roundings more, and is at most 1, times the rate. Where the square overflows, nothing is known.
    torchao computes powers of the betas in fp32, as a fused kernel of a GPU does.
    """
    low_bit, given = (
        kind in KINDS,
        {**STATELESS[kind], "maximize": False, "fused": False, **options},
    )
    settings = {"kind": "AdamW" if low_bit else kind, "options": given, "steps": 0}
    tensors = {"param": param, "grad": grad}
    call = OperatorCall("", "forward", 0, tensors, {}, {"param": dtype}, {}, settings)
    if kind == "SGD":
        return _sgd(call)["param"]
    d, (b1, b2) = _gradient(call).centre, given["betas"]
    with np.errstate(all="ignore"):
        square = np.where(d**2 < FORMATS[dtype].max * 0.5, (1.0 - b2) * d**2, np.inf)
        moments = {"exp_avg": (1.0 - b1) * d, "exp_avg_sq": square}
        power = 4.0 * U32 if low_bit else 0.0
        may = _adam_with(replace(call, outputs=moments), given["betas"], power)["param"]
    more = 6.0 * UNIT[dtype][0] * given["lr"]
    return Expected.between(may.lo - more, may.hi + more, may.unknown)


def _adagrad(call: OperatorCall) -> dict[str, Expected]:
    """``sum + d d``, and ``param - lr / (1 + (step - 1) lr_decay) d / (sqrt(sum) + eps)``; the
    parameter, from the sum that the step stored.

    Proof. As for SGD, except that every implementation squares in fp32 (``addcmul``, and the fused
    kernels of aten/src/ATen/native/cpu/FusedAdagradKernel.cpp and its CUDA twin). In the quotient
    six operations (the root, eps and its sum, the rate, its product, the division) may be rounded,
    and a fused kernel takes the root before the sum is rounded, which counts for half of that
    rounding: at most seven unit roundoffs of the dtype. Where sum or denominator is near the
    dtype's least number, nothing is known.
    """
    options, dtype = call.settings["options"], call.dtypes["param"]
    unit, least = UNIT[dtype]
    rate = options["lr"] / (1.0 + call.settings["steps"] * options["lr_decay"])
    with np.errstate(all="ignore"):
        d = _gradient(call)
        square = d.centre**2
        off = 2.0 * np.abs(d.centre) * d.radius + d.radius**2
        squared = _Term.of(square, off * (1.0 + U32) + U32 * square + 2.0**-150, dtype, d.wild)
        total = _given(call, "sum").plus(squared).expected()
        squares = call.outputs["sum"].astype(np.float64)
        below = np.sqrt(squares) + options["eps"]
        update = rate * d.centre / below
        near = np.abs(update) * (8.0 * unit + 8.0 * U32) + rate * d.radius / below * (1.0 + unit)
        near = near + 2.0 * least * (1.0 + 1.0 / below)  # the rate times d may be rounded, too
        far = ~(rate * (np.abs(d.centre) + d.radius) < FORMATS[dtype].max * 0.5)
        step = _Term.of(-update, near, dtype, d.wild | far).rounded()
        moved = _given(call, "param").plus(step).expected()
        lost = (squares < 2.0**10 * least) & ((squares > 0.0) | (square > 0.0))
        lost |= (below < 2.0**10 * least) | ~np.isfinite(squares)
    return {"param": replace(moved, unknown=moved.unknown | lost), "sum": total}


def title_of_step(call: OperatorCall) -> str:
    options = {n: x for n, x in call.settings["options"].items() if x not in (None, False, 0)}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    x = call.tensors["param"]
    return (
        f"step {call.settings['steps'] + 1} of torch.optim.{call.settings['kind']}({given}) on a "
        f"{TORCH_DTYPE[call.dtypes['param']]} parameter of {list(x.shape)}"
    )


def no_kernel(named: Mapping[str, Any], result: Any) -> Read | None:
    raise AssertionError("a step is no kernel")


def expression_of_step(*state: str) -> str:
    given = ", ".join(f"{name}={name}" for name in state)
    return f"stepped({{kind}}, {{options}}, {{steps}}, param, grad, {given})"


OPERATORS = (
    Operator(
        name="sgd_step",
        words="steps of SGD",
        kernels=(),
        read=no_kernel,
        expected=partial(elements, _sgd),
        expression=expression_of_step("momentum_buffer"),
        title=title_of_step,
        results=("param", "momentum_buffer"),
        optional=("momentum_buffer",),
        deviations=(
            Deviation(
                "sgd_blocks_skipped",
                "fused SGD leaves whole vector registers of a bf16 or fp16 parameter as they are",
                ("cpu",),
                _blocks_skipped,
            ),
        ),
        helper="stepped",
    ),
    Operator(
        name="adam_step",
        words="steps of Adam and AdamW",
        kernels=(),
        read=no_kernel,
        expected=partial(elements, _adam),
        expression=expression_of_step("exp_avg", "exp_avg_sq"),
        title=title_of_step,
        results=("param", "exp_avg", "exp_avg_sq"),
        depends_on={"param": ("exp_avg", "exp_avg_sq")},
        optional=("exp_avg", "exp_avg_sq"),
        helper="stepped",
    ),
    Operator(
        name="adagrad_step",
        words="steps of Adagrad",
        read=no_kernel,
        expected=partial(elements, _adagrad),
        expression=expression_of_step("sum"),
        title=title_of_step,
        results=("param", "sum"),
        depends_on={"param": ("sum",)},
        helper="stepped",
    ),
)
