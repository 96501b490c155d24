"""Sampling of calls that are too large to judge whole: only some places are judged, each with
everything that it depends on, so sampling widens no bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.operators.operator import Expected
from narrowfuzz.trace.trace import OperatorCall

Judging = Callable[[OperatorCall], Mapping[str, Expected]]
Chosen = NDArray[np.int64]
_GOLDEN = (5.0**0.5 - 1.0) / 2.0
#: The fields of an ``Expected`` that hold a number for each element.
_NUMBERS = ("centre", "radius", "lo", "hi")
#: The largest number of judged elements of a call whose elements are independent.
_ELEMENTS = 2**16


def sample_places(count: int, wanted: int) -> Chosen:
    """About ``wanted`` of ``count`` places, at least one, one in each of as many equal parts, the
    first place and, of several, the last place included. The position of each in its part follows
    the golden ratio: steps of one length would meet the same columns of a table again and again."""
    wanted = max(1, min(wanted, count))
    part = np.arange(wanted)
    chosen = np.floor((part + part * _GOLDEN % 1.0) * count / wanted).astype(np.int64)
    chosen[[0, -1]] = 0, count - 1 if wanted > 1 else 0
    return np.unique(chosen)


def judge_sampled(
    judging: Judging, call: OperatorCall, axes: Mapping[str, int], chosen: Chosen
) -> dict[str, Expected]:
    """What ``judging`` expects of the call when it is cut down to the chosen places; ``axes`` names
    the tensors and results to cut, and the axis of each. It is placed in results of the full shape:
    nothing is known of other places. Results that ``axes`` does not name are missing."""

    def cut(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: np.take(x, chosen, axes[name]) if name in axes else x
            for name, x in arrays.items()
        }

    results = {name: x for name, x in call.outputs.items() if name in axes}
    if not results:
        return {}
    some = replace(call, tensors=cut(call.tensors), outputs=cut(results))
    return {
        name: _placed(found, results[name].shape, axes[name], chosen)
        for name, found in judging(some).items()
        if name in results
    }


def _placed(found: Expected, shape: tuple[int, ...], axis: int, chosen: Chosen) -> Expected:
    def whole(values: Any, otherwise: Any) -> Any:
        placed = np.full(shape, otherwise)
        np.moveaxis(placed, axis, 0)[chosen] = np.moveaxis(values, axis, 0)
        return placed

    numbers = {name: whole(getattr(found, name), 0.0) for name in _NUMBERS}
    return replace(found, **numbers, unknown=whole(found.unknown, True))


def elements(judging: Judging, call: OperatorCall) -> dict[str, Expected]:
    """What ``judging`` expects of a call whose tensors and results all have one shape and whose
    elements do not depend on one another; for a large call only of some elements."""
    arrays = {**call.tensors, **call.outputs}
    shape = next(iter(arrays.values())).shape
    size = int(np.prod(shape))
    if size <= _ELEMENTS:
        return dict(judging(call))
    flat = replace(
        call,
        tensors={name: x.reshape(-1) for name, x in call.tensors.items()},
        outputs={name: x.reshape(-1) for name, x in call.outputs.items()},
    )
    found = judge_sampled(judging, flat, dict.fromkeys(arrays, 0), sample_places(size, _ELEMENTS))
    return {name: _shaped(result, shape) for name, result in found.items()}


def _shaped(found: Expected, shape: tuple[int, ...]) -> Expected:
    arrays = {name: getattr(found, name).reshape(shape) for name in (*_NUMBERS, "unknown")}
    return replace(found, **arrays)
