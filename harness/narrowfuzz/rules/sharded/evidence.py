"""The runs on ranks, and how whole tensors are put together from the pieces of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from narrowfuzz.case.arm import EAGER, SHARDED_PROCESSES
from narrowfuzz.case.events import Backward, Forward, Step
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout import layout_of
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.trace.trace import LayerCall, Trace


def run_of(evidence: Evidence) -> Trace | None:
    """The first run on ranks, if it finished."""
    runs = [t for name, t in evidence.traces.items() if name != EAGER.name]
    return runs[0] if runs and runs[0].error is None and not runs[0].unusable_because else None


def compiled_of(evidence: Evidence) -> Trace | None:
    """The compiled run on ranks, if there is one."""
    return next((t for name, t in evidence.traces.items() if BY_NAME[name].compiled), None)


def processes_of(evidence: Evidence) -> Trace | None:
    """The eager run on ranks that are processes, if there is one."""
    stages = ((BY_NAME[name].stage, t) for name, t in evidence.traces.items())
    return next((t for stage, t in stages if stage == SHARDED_PROCESSES.name), None)


def arm_of(evidence: Evidence) -> str:
    """The first arm on ranks; eager if there is none."""
    return next((name for name in evidence.traces if name != EAGER.name), EAGER.name)


def groups(evidence: Evidence) -> Iterator[tuple[int, Trace, tuple[Trace, ...]]]:
    """Yields for each data-parallel rank the number of the first rank of its tensor-parallel group,
    the trace of its piece in one process, and the group's traces. In layouts such as pipelines all
    ranks are one group."""
    run, sharding = run_of(evidence), evidence.spec.sharding
    assert run is not None
    together = layout_of(evidence.spec).single_group
    size = sharding.ranks if together else max(sharding.tensor, 1)
    for piece, one in enumerate(evidence.traces[EAGER.name].ranks):
        first = piece * size
        yield first, one, run.ranks[first : first + size]


def holders(evidence: Evidence, name: str) -> tuple[list[int], list[int]]:
    """The ranks, in order, whose pieces of a parameter, or of its gradient, make up the whole; and
    the numbers of the pieces of the rows whose gradients add up to it.

    Each of the experts that ranks share has processed the rows of a whole group, and ranks at the
    same place in their groups hold the same experts. Of replicas only the first is included.
    Tensor-parallel ranks are next to each other.
    """
    run, sharding = run_of(evidence), evidence.spec.sharding
    assert run is not None
    pieces = range(len(evidence.traces[EAGER.name].ranks))
    ranks = range(len(run.ranks))[: len(run.ranks) // max(sharding.replicas, 1)]
    of, shared = name_of(name).gradient_of or name_of(name).kind, sharding.experts
    if not MODELS[evidence.spec.model].shares(of, sharding):
        return [*ranks], [*pieces]
    parts = max(sharding.tensor, 1)
    order = (first for place in range(shared) for first in ranks[place * parts :: shared * parts])
    return [first + part for first in order for part in range(parts)], [*pieces[::shared]]


def first_step(evidence: Evidence) -> tuple[int, int]:
    """The numbers of forwards and of backwards before the first step of the optimizer. Until then
    every rank computes with the parameters of the case."""
    forwards = backwards = 0
    for event in evidence.spec.training:
        forwards += isinstance(event, Forward)
        backwards += isinstance(event, Backward)
        if isinstance(event, Step):
            break
    return forwards, backwards


def before_steps(trace: Trace, name: str, count: int) -> dict[str, Any]:
    """The first ``count`` results of a kind, by name, in order."""
    numbered = [key for key in trace.outputs if name_of(key)[:2] == ("", name)]
    numbered.sort(key=lambda key: float(name_of(key).number or np.inf))
    return {key: trace.outputs[key] for key in numbered[:count]}


def joined(parts: Sequence[Any], shape: tuple[int, ...], batch: int = 0) -> Any:
    """The array of this shape that these pieces make up, in order, or that each of them is; None if
    neither. With a ``batch`` the rows are those of this many entries, each of which may be split
    over the pieces."""
    if all(part.shape == shape for part in parts):
        return parts[0]
    for axis in range(len(shape)):
        others = [part.shape[:axis] + part.shape[axis + 1 :] for part in parts]
        if any(other != shape[:axis] + shape[axis + 1 :] for other in others):
            continue
        if sum(part.shape[axis] for part in parts) != shape[axis]:
            continue
        if batch > 1 and axis == 0 and not any(part.shape[0] % batch for part in parts):
            parts = [part.reshape(batch, -1, *part.shape[1:]) for part in parts]
            return np.concatenate(parts, axis=1).reshape(shape)
        return np.concatenate(parts, axis=axis)
    return None


def whole_of(evidence: Evidence, name: str, shape: tuple[int, ...]) -> Any:
    """A whole parameter or gradient, None if its pieces do not make it up. FSDP splits along the
    first dimension what tensor parallelism has split before."""
    run = run_of(evidence)
    assert run is not None
    if any(name not in run.ranks[rank].outputs for rank in holders(evidence, name)[0]):
        return None
    return joined([stacked(evidence, pieces) for pieces in by_part(evidence, name)], shape)


def by_part(evidence: Evidence, name: str) -> list[dict[int, Any]]:
    """For each tensor-parallel part of a parameter, or of its gradient: rank -> piece, for the
    data-parallel ranks that hold this part, in order."""
    run, parts = run_of(evidence), max(evidence.spec.sharding.tensor, 1)
    assert run is not None
    ranks = holders(evidence, name)[0]
    return [
        {rank: run.ranks[rank].outputs[name] for rank in ranks[part::parts]}
        for part in range(parts)
    ]


def stacked(evidence: Evidence, pieces: Mapping[int, Any]) -> Any:
    """The pieces of these data-parallel ranks as one array."""
    every = [*pieces.values()]
    several = evidence.spec.sharding.data and len(every) > 1
    return np.concatenate(every) if several else every[0]


def part_of(whole: Any, shape: tuple[int, ...], part: int, parts: int) -> Any:
    """The part of this shape that a tensor-parallel rank has of a parameter, or of its gradient;
    the whole if ranks do not share it. None if it cannot be split so."""
    cut = [axis for axis, size in enumerate(whole.shape) if size != shape[axis]]
    if not cut:
        return whole
    if len(cut) > 1 or shape[cut[0]] * parts != whole.shape[cut[0]]:
        return None
    return np.split(whole, parts, cut[0])[part]


def origin(
    parts: Sequence[Any], shape: tuple[int, ...], index: tuple[int, ...], batch: int = 0
) -> tuple[int, tuple[int, ...]]:
    """The number of the piece that holds an element of the array made by ``joined``, and the index
    of the element in that piece."""
    numbers = np.cumsum([0, *(part.size for part in parts)])
    own = [
        np.arange(n, n + part.size).reshape(part.shape)
        for n, part in zip(numbers, parts, strict=False)
    ]
    number = int(joined(own, shape, batch)[index])
    piece = int(np.searchsorted(numbers, number, side="right")) - 1
    found = np.unravel_index(number - int(numbers[piece]), parts[piece].shape)
    return piece, tuple(int(i) for i in found)


def copies(parts: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Is each of several pieces the whole?"""
    return len(parts) > 1 and all(part.shape == shape for part in parts)


def weight_pieces(evidence: Evidence, call: LayerCall, ranks: int) -> list[Any]:
    """The pieces of a shared linear's weight that tensor-parallel ranks hold; empty for others."""
    style = evidence.styles.get(call.module)
    if style is None or "weight" not in call.tensors:
        return []
    return np.split(call.tensors["weight"], ranks, 0 if style == "colwise" else 1)


def calls(
    single: Trace, group: Sequence[Trace], forwards: int
) -> Iterator[tuple[LayerCall, tuple[LayerCall, ...]]]:
    """Yields each call of a linear in one process, in the first ``forwards`` forwards, with the
    same call on every rank of the group, if all ranks made it. If a reentrant checkpoint builds a
    call's graph only when it recomputes, the call gets the gradients from there."""
    made = [_with_graphs(trace.calls) for trace in group]
    for call in single.calls:
        key = (call.module, call.index, call.phase)
        if call.forward < forwards and all(key in own for own in made):
            yield call, tuple(own[key] for own in made)


def _with_graphs(
    calls: Sequence[LayerCall],
) -> dict[tuple[str, int, str], LayerCall]:
    """The calls by module, index and phase; one that got no gradient back has that of its
    recompute."""
    again: dict[tuple[str, int, int], LayerCall] = {}
    for call, place in _placed(calls, "recompute"):
        again[place] = call
    found: dict[tuple[str, int, str], LayerCall] = {
        (call.module, call.index, call.phase): call for call in calls
    }
    for call, place in _placed(calls, "forward"):
        other = again.get(place)
        if other is not None and "grad_output" not in call.tensors:
            back = tuple(seen for seen in other.sites if seen.site.phase == "backward")
            found[call.module, call.index, call.phase] = replace(
                call,
                tensors={**other.tensors, **call.tensors},
                outputs={**other.outputs, **call.outputs},
                sites=(*call.sites, *back),
                unobserved=call.unobserved or other.unobserved,
            )
    return found


def _placed(
    calls: Sequence[LayerCall], phase: str
) -> Iterator[tuple[LayerCall, tuple[str, int, int]]]:
    """Yields each call of a phase with its module, its forward, and the number of earlier calls of
    the same module in the same forward."""
    before: Counter[tuple[str, int]] = Counter()
    for call in calls:
        if call.phase == phase:
            yield call, (call.module, call.forward, before[call.module, call.forward])
            before[call.module, call.forward] += 1
