"""Hashes of everything that the runs of a case recorded, to compare two installations bit by bit.

The sign and payload of a NaN are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np

from narrowfuzz.trace.trace import Seen, SiteTrace, Trace

#: Outputs, gradients and parameters; the operands of products; the operands' scales; and the
#: exception that ended the run, if one did.
Kind = Literal["results", "operands", "scales", "errors"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Codes of NaN with either sign: the only ones in E4M3 and the usual ones in E5M2.
_NAN, _MINUS_NAN = np.uint8(0x7F), np.uint8(0xFF)
#: Kind -> name -> hash.
Hashes = dict[str, dict[str, str]]


def hashes_of(traces: Mapping[str, Trace]) -> dict[str, Hashes]:
    """Arm -> the hashes of everything that its run recorded."""
    return {arm: _of_trace(trace) for arm, trace in traces.items()}


def _of_trace(trace: Trace) -> Hashes:
    found: Hashes = {kind: {} for kind in KINDS}
    for kind, name, value in _everything(trace):
        found[kind][name] = _hash(value)
    return {kind: hashes for kind, hashes in found.items() if hashes}


def _everything(trace: Trace, prefix: str = "") -> Iterator[tuple[Kind, str, Any]]:
    if trace.error is not None:  # messages may hold addresses and paths
        yield "errors", f"{prefix}{trace.error.phase}", trace.error.type
    for name, value in trace.outputs.items():
        yield "results", f"{prefix}{name}", value
    yield from _of_sites(trace.sites, prefix)
    for call in trace.calls:
        yield from _of_sites(call.sites, f"{prefix}{call.module} call {call.index} ")
    for i, product in enumerate(trace.multiplied):
        for side, seen in (("a", product.a), ("b", product.b)):
            yield from _of_operand(seen, f"{prefix}{product.phase} multiply {i} {side}")
    for moment in trace.moments:
        for j, cast in enumerate(moment.casts):
            place = f"{prefix}event {moment.event} cast {j} {cast.slot or ''}"
            yield "operands", place, np.where(cast.codes == _MINUS_NAN, _NAN, cast.codes)
            yield "scales", place, np.float32("nan") if cast.scale is None else cast.scale
            if cast.blocks:
                yield "scales", f"{place} blocks", np.frombuffer(cast.blocks, np.uint8)
    for rank, piece in enumerate(trace.ranks):
        yield from _everything(piece, f"{prefix}rank {rank} ")


def _of_sites(sites: Iterable[SiteTrace], prefix: str) -> Iterator[tuple[Kind, str, Any]]:
    for one in sites:
        yield from _of_operand(one.a, f"{prefix}{one.site} a")
        yield from _of_operand(one.b, f"{prefix}{one.site} b")


def _of_operand(seen: Seen, name: str) -> Iterator[tuple[Kind, str, Any]]:
    if seen.codes is not None:
        yield "operands", name, np.where(seen.codes == _MINUS_NAN, _NAN, seen.codes)
    elif seen.values is not None:
        yield "operands", name, seen.values
    if seen.scale is not None:
        yield "scales", name, seen.scale


def _hash(value: Any) -> str:
    if isinstance(value, str):
        return value
    array = np.ascontiguousarray(value)
    if np.issubdtype(array.dtype, np.floating):
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    head = f"{array.dtype} {array.shape} ".encode()
    return hashlib.blake2b(head + array.tobytes(), digest_size=8).hexdigest()
