"""The short script of one call of an operator: its arguments as literal data, the call, and a check
of the element of its result that was wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators import BY_NAME
from narrowfuzz.play import (
    derived,
    flexed,
    function_call,
    groups,
    literal,
    optimizer_step,
    te_experts,
    unscaled,
)
from narrowfuzz.trace.expect import Is, Within, read
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.parts import TORCH_NAME, packed
from narrowfuzz.triage.script.paste import pasted
from narrowfuzz.triage.script.short import Short

#: Modules whose source is pasted into scripts.
_HELPERS = (literal, optimizer_step, function_call, derived, unscaled, flexed, groups, te_experts)
#: Tensors of at most this many elements are written as readable numbers.
_READABLE = 64
#: A script makes at most this many calls before the one that it is about, with at most so many
#: numbers together.
_EARLIER, _NUMBERS = 6, 2**20


def call_of(
    judge: Judge, case: Case, verdict: Verdict
) -> tuple[OperatorCall, tuple[OperatorCall, ...]]:
    """The call that the verdict is about, from a new run of the case; and the last calls of the
    same operator before it, in that run and in the case's history, as many as a script may make.
    Raises ValueError if that run does not make the call."""
    earlier: deque[OperatorCall] = deque(maxlen=_EARLIER)
    for past in case.history:
        earlier.extend(_calls(judge, past, verdict))
    for call in _calls(judge, case, verdict):
        if call.index == verdict.at.call:
            return call, _that_fit(earlier)
        earlier.append(call)
    raise ValueError(f"the call of {verdict.at.name} that was wrong is not made again")


def _that_fit(calls: Sequence[OperatorCall]) -> tuple[OperatorCall, ...]:
    """The last calls whose tensors have few enough numbers for a script."""
    sizes = [sum(x.size for x in call.tensors.values()) for call in reversed(calls)]
    count = sum(total <= _NUMBERS for total in accumulate(sizes))
    return tuple(calls)[len(calls) - count :]


def _calls(judge: Judge, case: Case, verdict: Verdict) -> Iterator[OperatorCall]:
    """The calls of the verdict's operator in a run of the case on the verdict's arm."""
    evidence = judge.observe(case, frozenset({verdict.arm}), repeat=False)
    trace = evidence.traces.get(verdict.arm)
    for call in trace.operators if trace is not None else ():
        if call.operator == verdict.at.name:
            yield call


def of_operator(
    call: OperatorCall, verdict: Verdict, device: str, earlier: Sequence[OperatorCall] = ()
) -> Short:
    """The script of a call, for a device by torch's name; before it, ``earlier`` calls are made,
    whose state it may depend on."""
    operator = BY_NAME[call.operator]
    title = operator.title(call)
    call, *before = (
        replace(
            one, tensors={n: x for n, x in one.tensors.items() if n not in operator.state_before}
        )
        for one in (call, *earlier)
    )
    tail = "\n".join(
        (
            *(line for one in before for line in (*_given(one, device), _called(one))),
            *_given(call, device),
            f"result = {_result(call, verdict)}",
            f"got = result{list(verdict.at.index) or ''}.item()",
            _check(verdict),
        )
    )
    every = (call, *before)
    used = {"laid"} if any(_other_layout(x) for one in every for x in _shapes(one)) else set()
    used |= set() if all(map(_readable, every)) else {"unpacked"}
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


def _given(call: OperatorCall, device: str) -> Iterator[str]:
    """Lines that set the call's tensors, on the device."""
    operator, readable = BY_NAME[call.operator], _readable(call)
    if readable:
        yield from (f"{name} = torch.tensor({x.tolist()!r})" for name, x in call.tensors.items())
    else:
        yield f"tensors = {packed(call.tensors)}"
    yield from (f"{n} = {_laid(call, n, device, readable=readable)}" for n in call.tensors)
    absent = (n for n in operator.optional if n not in {*call.tensors, *operator.state_before})
    yield from (f"{name} = None" for name in absent)


def _settings(call: OperatorCall) -> dict[str, str]:
    return {name: _text(value) for name, value in call.settings.items()}


def _called(call: OperatorCall) -> str:
    """The call as an expression."""
    return BY_NAME[call.operator].expression.format(**_settings(call))


def _result(call: OperatorCall, verdict: Verdict) -> str:
    """An expression for the result that the verdict is about."""
    operator, name, called = BY_NAME[call.operator], verdict.at.result, _called(call)
    if operator.derived is not None and name in operator.derived.names:
        tensors = f"dict({', '.join(f'{n}={n}' for n in call.tensors)})"
        returned = f"dict(zip({operator.returned!r}, {called}))"
        given = f"dict({', '.join(f'{n}={value}' for n, value in _settings(call).items())})"
        return f"{operator.derived.make.__name__}({tensors}, {returned}, {given})[{name!r}]"
    return f"{called}[{operator.returned.index(name)}]" if name else called


def _readable(call: OperatorCall) -> bool:
    return all(x.size <= _READABLE and np.isfinite(x).all() for x in call.tensors.values())


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
