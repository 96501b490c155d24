"""Finds the first bad value in the records of all ranks: where it was made, and which ranks it
reached."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from narrowfuzz_watch.address import At, AtPhase
from narrowfuzz_watch.records import Cause, Collective, Consequence, Event, FirstBad, Rank


def first_bad(records: Sequence[Rank]) -> tuple[FirstBad, bool] | None:
    """The first bad value, and whether it counts as a finding; None if there was none.

    A value counts if its operator gave other bits when it was run again. Otherwise it counts, in a
    step that no loss scaler checked, if a gradient had a bad value in that step, or if it is NaN
    that did not come from memory that was never written. If no value counts, the first is returned.
    """
    events = sorted((e for rank in records for e in rank.events), key=lambda e: (e.step, e.time))
    if not events:
        return None
    counting = [event for event in events if _counts(event, records)]
    start = (counting or events)[0]
    origin = _origin(start, records)
    return _first_bad(origin, records), bool(counting)


def first_nan(records: Sequence[Rank], first: FirstBad) -> At | None:
    """Where NaN came first after a first bad value that was not NaN; None if it did not."""
    if first.bad == "nan":
        return None
    events = [e for rank in records for e in rank.events if e.bad == "nan"]
    events = [e for e in events if e.step >= first.at.event]
    found = min(events, key=lambda e: (e.step, e.time), default=None)
    return None if found is None else at(found)


def _counts(event: Event, records: Sequence[Rank]) -> bool:
    if event.again in ("clean", "other"):
        return True
    own = next(r for r in records if r.rank == event.rank and event in r.events)
    if any(scaled.step == event.step for scaled in own.scaled):
        return False  # the loss scaler has seen it and skipped the step
    reached = any(seen.step == event.step for rank in records for seen in rank.reached)
    empty = event.made == "given" and any(operand.unwritten for operand in event.operands)
    return reached or (event.bad == "nan" and not empty)


def _origin(event: Event, records: Sequence[Rank]) -> Event:
    """The first event of the chain of events that led to this one."""
    seen = []
    while event not in seen:
        seen.append(event)
        event = _before(event, records) or event
    return event


def _before(event: Event, records: Sequence[Rank]) -> Event | None:
    if event.made == "crossed":
        senders = [
            (rank, part)
            for rank in records
            if rank.rank != event.rank
            for part in rank.collectives
            if part.key == (event.group, event.seq) and part.came == "bad"
        ]
        made = [e for rank, part in senders for e in rank.events if e.n < part.n]
        return min(made, key=lambda e: (e.step, e.time), default=None)
    came = [o.state for o in event.operands if o.state != "ok"]
    if event.made == "given" or came:
        own = next(rank for rank in records if rank.rank == event.rank and event in rank.events)
        earlier = [
            e for e in own.events if e.n < event.n and e.step == event.step and e.bad in came
        ]
        return min(earlier, key=lambda e: e.n, default=None)
    return None


def _first_bad(origin: Event, records: Sequence[Rank]) -> FirstBad:
    assert origin.bad != "ok"
    cause, because = _cause(origin, records)
    after = sorted(
        (
            e
            for rank in records
            if rank.rank != origin.rank
            for e in rank.events[:1]
            if e.made == "crossed" and e.step >= origin.step
        ),
        key=lambda e: (e.step, e.time),
    )
    also = {
        e.rank
        for rank in records
        for e in rank.events
        if e.made == "made" and e.rank != origin.rank and _place(e) == _place(origin)
    }
    return FirstBad(
        at=at(origin),
        bad=origin.bad,
        made=origin.made,
        operands=origin.operands,
        output=origin.output,
        cause=cause,
        because=because,
        through=_through(origin, records),
        consequences=tuple(
            Consequence(rank=e.rank, op=e.op, group=e.group, seq=e.seq, step=e.step) for e in after
        ),
        also=tuple(sorted(also)),
        lines=origin.lines,
    )


def _place(event: Event) -> tuple[int, str, str, str]:
    return event.step, event.phase, event.layer, event.op


def at(event: Event) -> At:
    """An event's address: its field ``event`` is the step, ``name`` the operator."""
    return At(
        rank=event.rank,
        event=event.step,
        layer=event.layer,
        phase=msgspec.convert(event.phase, AtPhase),
        name=event.op,
        index=event.output.index,
    )


def _through(origin: Event, records: Sequence[Rank]) -> Consequence | None:
    """The first collective into which the origin's rank sent a bad value."""
    if origin.made == "crossed":
        return Consequence(
            rank=origin.rank, op=origin.op, group=origin.group, seq=origin.seq, step=origin.step
        )
    own = next(rank for rank in records if rank.rank == origin.rank and origin in rank.events)
    sent = [part for part in own.collectives if part.came == "bad" and part.n > origin.n]
    first = min(sent, key=lambda part: part.n, default=None)
    if first is None:
        return None
    return Consequence(
        rank=first.rank, op=first.op, group=first.group, seq=first.seq, step=first.step
    )


def _cause(origin: Event, records: Sequence[Rank]) -> tuple[Cause, str]:
    if origin.made == "crossed":
        return _of_collective(origin, records)
    if origin.made == "given":
        return _of_operand(origin)
    match origin.again:
        case "clean":
            return "hardware or race", "run again on the same operands, it gave ordinary numbers"
        case "other":
            return "hardware or race", "run again on the same operands, it gave other bad numbers"
        case "same":
            return "software or data", "run again on the same operands, it gave the same bits"
    return "unknown", f"it could not be run again: {origin.why}"


def _of_operand(origin: Event) -> tuple[Cause, str]:
    bad = [operand for operand in origin.operands if operand.state == origin.bad]
    if not bad:
        return "not seen", "no operator that was seen made it: compiled code may have"
    if any(operand.unwritten for operand in bad):
        names = ", ".join(operand.name for operand in bad)
        return "software or data", f"the memory of {names} was never written as a whole"
    if any(operand.maker.startswith("CompiledFunction") for operand in bad):
        return "not seen", "a compiled graph made it: TORCH_COMPILE_DISABLE=1 shows the operator"
    if any(operand.maker for operand in bad):
        maker = next(operand.maker for operand in bad if operand.maker)
        return "not seen", f"{maker} made it, and was not seen as an operator"
    return "data", "it stood in an operand that no operator had made"


def _of_collective(origin: Event, records: Sequence[Rank]) -> tuple[Cause, str]:
    parts: list[Collective] = [
        part
        for rank in records
        for part in rank.collectives
        if part.key == (origin.group, origin.seq)
    ]
    reported = {part.rank for part in parts}
    if not set(origin.group) <= reported:
        missing = sorted(set(origin.group) - reported)
        return "unknown", f"of ranks {missing} it is not known what they sent"
    if any(part.came == "bad" for part in parts):
        return "unknown", "a rank sent a bad value, and no operator that was seen made it"
    if all(part.went != "ok" for part in parts):
        return "software or data", "all ranks sent ordinary numbers and got a bad one"
    sick = sorted(part.rank for part in parts if part.went != "ok")
    return "hardware or race", f"all ranks sent ordinary numbers, only ranks {sick} got a bad one"
