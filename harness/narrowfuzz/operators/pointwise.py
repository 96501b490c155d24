"""Activations and other functions of one number, and their backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import erf, pi, sqrt
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, UNIT, Deviation, Expected, Operator, Read
from narrowfuzz.operators.sampled import elements
from narrowfuzz.operators.sum import FLUSHED, rounded
from narrowfuzz.trace.trace import OperatorCall

#: Relative error of a function of the C library, SLEEF or CUDA in fp32. SLEEF promises one unit in
#: the last place, the CUDA programming guide two for each function used here; four are allowed,
#: because some are computed from another: tanh and the logistic function from an exponential.
EPS = 8.0 * U32
#: Larger arguments overflow on the way, or (angles) need pi in more digits than fp32 has.
_LARGEST, _LARGEST_ANGLE = 2.0**20, 2.0**13

_erf = np.frompyfunc(erf, 1, 1)


@dataclass(frozen=True)
class Value:
    """The function of each argument in float64, and the largest distance from it that a kernel may
    have before it rounds to the dtype of the result."""

    centre: F64
    radius: F64


def error_of_exp(x: F64) -> F64:
    """Relative error of e^x: ``EPS``, and the loss of a kernel that computes it as 2 to the power
    of x log2(e), which is rounded."""
    return np.asarray(EPS + 2.0 * U32 * np.abs(x))


def _exp(x: F64) -> Value:
    y = np.exp(x)
    return Value(y, y * error_of_exp(x))


def _rsqrt(x: F64) -> Value:
    y = 1.0 / np.sqrt(x)
    return Value(y, y * EPS)


def _sin(x: F64) -> Value:
    return Value(np.sin(x), np.full(x.shape, EPS))


def _cos(x: F64) -> Value:
    return Value(np.cos(x), np.full(x.shape, EPS))


def _tanh(x: F64) -> Value:
    y = np.tanh(x)
    return Value(y, np.abs(y) * EPS)


def sigmoid(x: F64) -> Value:
    """1 / (1 + e^-x): the error of the exponential counts by its share of the sum, and both
    operations round. Where the exponential overflows, a result that is nearly 0 is 0."""
    y = 1.0 / (1.0 + np.exp(-x))
    return Value(y, y * ((1.0 - y) * error_of_exp(x) + EPS) + FLUSHED)


def _silu(x: F64) -> Value:
    y = sigmoid(x)
    return Value(x * y.centre, np.abs(x) * (y.radius + 2.0 * U32 * y.centre))


def _normal(x: F64) -> tuple[F64, F64]:
    """The cumulative normal distribution, and its density."""
    below = 0.5 * (1.0 + np.asarray(_erf(x / sqrt(2.0)), dtype=np.float64))
    return below, np.asarray(np.exp(-0.5 * x * x) / sqrt(2.0 * pi))


def _gelu(x: F64) -> Value:
    """x/2 (1 + erf(x / sqrt 2)): 1 is added to a number that may be nearly -1, so the error is
    relative to x, not to the result."""
    return Value(x * _normal(x)[0], np.abs(x) * EPS)


def _bent(x: F64) -> tuple[F64, F64]:
    """tanh of the polynomial in the tanh approximation of GELU, and the polynomial's derivative."""
    slope = sqrt(2.0 / pi) * (1.0 + 3.0 * 0.044715 * x * x)
    return np.tanh(sqrt(2.0 / pi) * (x + 0.044715 * x**3)), slope


def _gelu_tanh(x: F64) -> Value:
    return Value(0.5 * x * (1.0 + _bent(x)[0]), np.abs(x) * EPS)


def _tanh_slope(y: F64) -> Value:
    """1 - y^2, from tanh's own result y."""
    return Value(1.0 - y * y, np.full(y.shape, 4.0 * U32))


def _sigmoid_slope(y: F64) -> Value:
    slope = (1.0 - y) * y
    return Value(slope, np.abs(slope) * 4.0 * U32)


def _silu_slope(x: F64) -> Value:
    """s (1 + x (1 - s)), whose factors cancel where x (1 - s) is nearly -1."""
    y = sigmoid(x)
    s, off = y.centre, y.radius
    factor = 1.0 + x * (1.0 - s)
    of_factor = np.abs(x) * (off + 3.0 * U32 * (1.0 - s) + U32 * s) + 2.0 * U32 * np.abs(factor)
    return Value(s * factor, off * (np.abs(factor) + of_factor) + s * of_factor + FLUSHED)


def _gelu_slope(x: F64) -> Value:
    below, density = _normal(x)
    of_density = 2.0 * EPS + x * x * 4.0 * U32
    return Value(below + x * density, EPS + np.abs(x) * density * of_density)


def _gelu_tanh_slope(x: F64) -> Value:
    t, slope = _bent(x)
    flat = 1.0 - t * t
    radius = EPS + 0.5 * np.abs(x) * slope * (2.0 * EPS * np.abs(t) + flat * 2.0 * EPS)
    # an error of tanh's argument moves 1 - t^2 by its derivative
    argument = np.abs(x * slope)
    return Value(0.5 * (1.0 + t) + 0.5 * x * flat * slope, radius + argument**2 * flat * EPS)


@dataclass(frozen=True)
class _Function:
    """A function of torch, and its derivative if its backward has a kernel of its own."""

    name: str
    #: As users call it.
    call: str
    value: Callable[[F64], Value]
    slope: Callable[[F64], Value] | None = None
    #: The tensor from which the backward computes the derivative: the result of the forward
    #: ("output"), or its input ("self").
    of: str = "self"
    largest: float = _LARGEST
    #: The source of the arguments behind the first, ``{}`` filled in from the settings.
    how: str = ""


_FUNCTIONS = (
    _Function("exp", "torch.exp", _exp),
    _Function("rsqrt", "torch.rsqrt", _rsqrt),
    _Function("sin", "torch.sin", _sin, largest=_LARGEST_ANGLE),
    _Function("cos", "torch.cos", _cos, largest=_LARGEST_ANGLE),
    _Function("tanh", "torch.tanh", _tanh, _tanh_slope, "output"),
    _Function("sigmoid", "torch.sigmoid", sigmoid, _sigmoid_slope, "output"),
    _Function("silu", "torch.nn.functional.silu", _silu, _silu_slope),
    _Function(
        "gelu",
        "torch.nn.functional.gelu",
        _gelu,
        _gelu_slope,
        how=", approximate={approximate}",
    ),
)
#: GELU with ``approximate="tanh"``.
_APPROXIMATE = _Function("gelu", "torch.nn.functional.gelu", _gelu_tanh, _gelu_tanh_slope)


def _settings(named: Mapping[str, Any], x: Any, result: Any) -> dict[str, Any]:
    if x.dtype != result.dtype:
        raise Unjudged("of whole numbers, or asked for in another dtype")
    return {"approximate": named.get("approximate", "none")}


def _read_forward(named: Mapping[str, Any], result: Any) -> Read | None:
    x = named["self"]
    return Read({"input": x}, {"output": result}, _settings(named, x, result))


def _read_backward(of: str, named: Mapping[str, Any], result: Any) -> Read | None:
    x = named[of]
    tensors = {"grad_output": named["grad_output"], "input" if of == "self" else of: x}
    return Read(tensors, {"grad_input": result}, _settings(named, x, result))


def _chosen(function: _Function, call: OperatorCall) -> _Function:
    return _APPROXIMATE if call.settings["approximate"] == "tanh" else function


def _forward(function: _Function, call: OperatorCall) -> dict[str, Expected]:
    """The function in fp32, rounded once to bf16 or fp16; a CPU rounds 1 / sqrt(x) twice for
    elements that do not fill a vector register."""
    function = _chosen(function, call)
    dtype = call.dtypes["output"]
    with np.errstate(all="ignore"):
        x = call.tensors["input"].astype(np.float64)
        value = function.value(x)
        radius = value.radius + FLUSHED
        if function.name == "rsqrt" and dtype != "fp32":
            radius = radius + 1.01 * UNIT[dtype][0] * np.abs(value.centre)
        unknown = ~(np.abs(x) < function.largest) | ~np.isfinite(value.centre)
    return {"output": Expected.within(value.centre, radius, FORMATS[dtype], unknown)}


def _backward(function: _Function, call: OperatorCall) -> dict[str, Expected]:
    """The gradient times the derivative, in fp32, and rounded once. Of the logistic function's
    backward, all three operations are rounded to fp16, on a GPU to bf16 as well
    (aten/src/ATen/native/cpu/BinaryOpsKernel.cpp,
    aten/src/ATen/native/cuda/BinaryMiscBackwardOpsKernels.cu)."""
    assert function.slope is not None
    function = _chosen(function, call)
    of = "output" if "output" in call.tensors else "input"
    dtype = call.dtypes["grad_input"]
    with np.errstate(all="ignore"):
        dy, x = (call.tensors[name].astype(np.float64) for name in ("grad_output", of))
        slope = function.slope(x)  # type: ignore[misc]
        centre = dy * slope.centre
        radius = np.abs(dy) * slope.radius + 2.0 * U32 * np.abs(centre) + FLUSHED
        narrow = dtype == "fp16" or (dtype == "bf16" and call.device == "cuda")
        if function.name == "sigmoid" and narrow:
            unit, least = UNIT[dtype]
            radius = radius + 3.01 * unit * np.abs(centre) + 2.0 * least
        unknown = ~(np.abs(x) < function.largest) | ~(np.abs(dy) < 2.0**100)
    return {"grad_input": Expected.within(centre, radius, FORMATS[dtype], unknown)}


def _narrow_square(call: OperatorCall) -> dict[str, Expected]:
    """tanh's backward as a GPU computes it: y^2, 1 - y^2 and the product are each rounded to bf16
    or fp16."""
    dtype = call.dtypes["grad_input"]
    if dtype == "fp32":
        return {}
    dy, y = call.tensors["grad_output"], call.tensors["output"]
    with np.errstate(all="ignore"):
        slope = rounded(np.float32(1.0) - rounded(y * y, dtype), dtype)
        return {"grad_input": Expected.exactly(rounded(dy * slope, dtype))}


#: Known deviations of backwards, by the name of the function.
_KNOWN = {
    "tanh": (
        Deviation(
            "tanh_gradient_narrow_square",
            "the square of tanh in its gradient is rounded to the operands' dtype",
            ("cuda",),
            partial(elements, _narrow_square),
        ),
    ),
}


def _title(name: str, call: OperatorCall) -> str:
    x = next(iter(call.tensors.values()))
    dtype = TORCH_DTYPE[next(iter(call.dtypes.values()))]
    how = call.settings["approximate"]
    with_ = "" if how == "none" else f" (approximate={how!r})"
    return f"{name}{with_} of a {dtype} tensor of {list(x.shape)}"


def _operators() -> tuple[Operator, ...]:
    found = []
    for function in _FUNCTIONS:
        name = function.name
        found.append(
            Operator(
                name=name,
                words=function.call.rpartition(".")[2],
                kernels=(f"aten::{name}",),
                read=_read_forward,
                expected=partial(elements, partial(_forward, function)),
                expression=f"{function.call}(input{function.how})",
                title=partial(_title, function.call),
            )
        )
        if function.slope is not None:
            of = "input" if function.of == "self" else function.of
            found.append(
                Operator(
                    name=f"{name}_backward",
                    words=f"gradients of {name}",
                    kernels=(f"aten::{name}_backward",),
                    read=partial(_read_backward, function.of),
                    expected=partial(elements, partial(_backward, function)),
                    expression=f"torch.ops.aten.{name}_backward(grad_output, {of}{function.how})",
                    title=partial(_title, f"the backward of {function.call}"),
                    results=("grad_input",),
                    deviations=_KNOWN.get(name, ()),
                )
            )
    return tuple(found)


OPERATORS = _operators()
