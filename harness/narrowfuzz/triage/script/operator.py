"""The short script of one call of an operator: its arguments as literal data, the call, and a check
of the element of its result that was wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators import BY_NAME
from narrowfuzz.operators.operator import Operator
from narrowfuzz.play import (
    derived,
    flexed,
    function_call,
    groups,
    literal,
    optimizer_step,
    unscaled,
)
from narrowfuzz.trace.expect import Is, Within, read
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.parts import TORCH_NAME, packed
from narrowfuzz.triage.script.paste import pasted
from narrowfuzz.triage.script.short import Short

#: Modules whose source is pasted into scripts.
_HELPERS = (literal, optimizer_step, function_call, derived, unscaled, flexed, groups)
#: Tensors of at most this many elements are written as readable numbers.
_READABLE = 64


def call_of(judge: Judge, case: Case, verdict: Verdict) -> OperatorCall:
    """The call that the verdict is about, from a new run of the case. Raises ValueError if that run
    does not make the call."""
    arm: Arm = ARMS[verdict.arm]
    evidence = judge.observe(case, frozenset({arm.name}), repeat=False)
    trace = evidence.traces.get(arm.name)
    for call in trace.operators if trace is not None else ():
        if (call.operator, call.index) == (verdict.at.name, verdict.at.call):
            return call
    raise ValueError(f"the call of {verdict.at.name} that was wrong is not made again")


def of_operator(call: OperatorCall, verdict: Verdict, device: str) -> Short:
    """The script of a call, for a device by torch's name."""
    operator = BY_NAME[call.operator]
    title = operator.title(call)
    call = replace(
        call, tensors={n: x for n, x in call.tensors.items() if n not in operator.state_before}
    )
    names = tuple(call.tensors)
    settings = {name: _text(value) for name, value in call.settings.items()}
    readable = all(_readable(x) for x in call.tensors.values())
    tail = "\n".join(
        (
            *(_numbers(call) if readable else [f"tensors = {packed(call.tensors)}"]),
            *(f"{name} = {_laid(call, name, device, readable=readable)}" for name in names),
            *(
                f"{name} = None"
                for name in operator.optional
                if name not in {*names, *operator.state_before}
            ),
            f"result = {_result(operator, verdict, names, settings)}",
            f"got = result{list(verdict.at.index) or ''}.item()",
            _check(verdict),
        )
    )
    used = {"laid"} if any(map(_other_layout, _shapes(call))) else set()
    used |= set() if readable else {"unpacked"}
    used |= {operator.helper} if operator.helper else set()
    used |= {operator.derived.make.__name__} if operator.derived else set()
    return Short(
        verdict,
        title,
        f"import math\nimport torch\ntorch.set_num_threads({call.threads})",
        (
            pasted(tuple(sorted(used)), _HELPERS) if used else "",
            tail,
        ),
    )


def _result(
    operator: Operator, verdict: Verdict, names: Iterable[str], settings: Mapping[str, str]
) -> str:
    """An expression for the result that the verdict is about."""
    name, called = verdict.at.result, operator.expression.format(**settings)
    if operator.derived is not None and name in operator.derived.names:
        tensors = f"dict({', '.join(f'{n}={n}' for n in names)})"
        returned = f"dict(zip({operator.returned!r}, {called}))"
        given = f"dict({', '.join(f'{n}={value}' for n, value in settings.items())})"
        return f"{operator.derived.make.__name__}({tensors}, {returned}, {given})[{name!r}]"
    return f"{called}[{operator.returned.index(name)}]" if name else called


def _readable(x: F32) -> bool:
    return bool(x.size <= _READABLE and np.isfinite(x).all())


def _numbers(call: OperatorCall) -> Iterator[str]:
    for name, x in call.tensors.items():
        yield f"{name} = torch.tensor({x.tolist()!r})"


def _laid(call: OperatorCall, name: str, device: str, *, readable: bool) -> str:
    """An expression for a tensor of its dtype, on the device, with its strides."""
    values = name if readable else f"tensors[{name!r}]"
    text = f"{values}.to({device!r}, {TORCH_NAME[call.dtypes[name]]})"
    strides = call.strides[name]
    return f"laid({text}, {strides!r})" if _other_layout((call.tensors[name], strides)) else text


def _shapes(call: OperatorCall) -> Iterator[tuple[F32, tuple[int, ...]]]:
    return ((x, call.strides[name]) for name, x in call.tensors.items())


def _other_layout(laid: tuple[F32, tuple[int, ...]]) -> bool:
    """Does a tensor with these strides lie in memory otherwise than row by row?"""
    x, strides = laid
    rows = np.cumprod((1, *x.shape[:0:-1]))[::-1] if x.ndim else ()
    return any(n > 1 and s != r for n, s, r in zip(x.shape, strides, rows, strict=True))


def _text(value: object) -> str:
    """A setting as source text. A string that starts with ``torch.`` is an expression, not a string
    literal."""
    return value if isinstance(value, str) and value.startswith("torch.") else repr(value)


def _check(verdict: Verdict) -> str:
    expect = verdict.expect
    if isinstance(expect, Is):
        holds = "got != got"
    else:
        assert isinstance(expect, Within)
        lo, hi = (f"float.fromhex({end!r})" for end in (expect.lo, expect.hi))
        same = read(expect.lo) == read(expect.hi)
        holds = f"got == {lo}" if same else f"{lo} <= got <= {hi}"
    return (
        f'print(f"{verdict.located}: expected {expect}, got {{got:.9g}}")\n'
        f"sys.exit(0 if {holds} else 1)"
    )
