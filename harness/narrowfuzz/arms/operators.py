"""Seeing which operators run: watches that keep their calls, and the calls as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from narrowfuzz.arms.tensors import DTYPE_NAME, fp32_array
from narrowfuzz.operators import BY_KERNEL
from narrowfuzz.play.layers import in_backward
from narrowfuzz.play.taps import AttentionWatch, KernelWatch, by_name, copied
from narrowfuzz.trace.trace import OperatorCall


@dataclass
class LiveCall:
    """One call of an operator, live."""

    operator: str
    phase: str
    index: int
    tensors: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    strides: dict[str, tuple[int, ...]]
    settings: dict[str, Any]
    module: str
    device: str


class OperatorWatch(AttentionWatch):
    """Records the calls of attention kernels, and those of operators that are judged by
    themselves. These return new tensors and change none that they are given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.operators: list[LiveCall] = []
        self._times: Counter[str] = Counter()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super().note(func, args, kwargs, result)
        operator = BY_KERNEL.get(func.name())
        if operator is None:
            return
        read = operator.read(by_name(func, args, kwargs), result)
        if read is None:
            return
        live = {**read.tensors, **read.outputs}
        if any(t.dtype not in DTYPE_NAME for t in live.values()):
            return  # float64, whole numbers, or a library's own format
        index = self._times[operator.name]
        self._times[operator.name] += 1
        call = LiveCall(
            operator=operator.name,
            phase="backward" if in_backward() else "forward",
            index=index,
            tensors={name: copied(t) for name, t in read.tensors.items()},
            outputs={name: copied(t) for name, t in read.outputs.items()},
            strides={name: tuple(t.stride()) for name, t in read.tensors.items()},
            settings=dict(read.settings),
            module=self.running(),
            device=next(iter(live.values())).device.type,
        )
        self.operators.append(call)


class GraphWatch(OperatorWatch, KernelWatch):
    """The same inside compiled graphs, and every matrix multiply."""


def operators_of(calls: Iterable[LiveCall]) -> tuple[OperatorCall, ...]:
    """Every call that was seen."""
    return tuple(_call(one) for one in calls)


def _call(one: LiveCall) -> OperatorCall:
    tensors, outputs = (
        {name: fp32_array(t) for name, t in live.items()} for live in (one.tensors, one.outputs)
    )
    dtypes = {name: DTYPE_NAME[t.dtype] for name, t in {**one.tensors, **one.outputs}.items()}
    return OperatorCall(
        one.operator,
        one.phase,  # type: ignore[arg-type]
        one.index,
        tensors,
        outputs,
        dtypes,
        one.strides,
        one.settings,
        one.module,
        one.device,
    )
