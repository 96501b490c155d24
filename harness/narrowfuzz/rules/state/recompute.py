"""What the recomputes of a library's checkpoint do to scaling state, by deviations from the rule.

By the rule, a recompute stages and commits nothing. TransformerEngine's checkpoint opens a region
for each recompute, and decides anew which layers update gradients; the ledger has the deviations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from narrowfuzz.case.events import Backward, Forward
from narrowfuzz.rules.state.library import Library
from narrowfuzz.rules.state.plan import Numbered
from narrowfuzz.rules.state.run import Deviations, Now, Run
from narrowfuzz.trace.snapshots import SlotName


@dataclass(frozen=True)
class Checkpoints:
    """The regions around and inside each forward's checkpoint, and the ownership of updates when
    its segments ran."""

    #: Forwards whose checkpoint was called in an enabled region.
    around: frozenset[int] = frozenset()
    #: Forwards that opened a region of their own.
    inside: frozenset[int] = frozenset()
    #: Did the next layer own the update when each segment that waits for its recompute ran? Oldest
    #: first.
    owners: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Recomputed:
    """The updates that the recomputes of one event make, each by a deviation."""

    #: Deviation -> the number of updates of the forward direction.
    forward: Mapping[str, int] = field(default_factory=dict)
    #: Is it decided anew for each layer whether it updates gradients
    #: (``segments_update_gradients``)?
    segments: bool = False
    #: If so, does each of them?
    own: bool = False


#: Library and checkpoints after the recomputes of an event, and the updates that these make.
Noted = tuple[Library, Checkpoints, Recomputed]


def recomputed(library: Library, checkpoints: Checkpoints, now: Now) -> Noted:
    """The effect of an event on checkpoints, and of its recomputes on the library's records."""
    run, event = now.run, now.event
    if isinstance(event, Forward):
        if event.inside:
            inside = checkpoints.inside | {now.progress.forwards}
            checkpoints = replace(checkpoints, inside=inside)
        if event.mode == "train" and run.by_library:
            checkpoints = _forward(library, checkpoints, event, now)
    elif isinstance(event, Backward):
        library = _called(library, checkpoints, now)
        if run.by_library:
            return _backward(library, checkpoints, now)
    return library, checkpoints, Recomputed()


def _enters_regions(deviations: Deviations) -> bool:
    """Does a recompute enter its forward's region anew? TransformerEngine's does since 2.0."""
    return "recompute_updates_forward" in deviations


def _called(library: Library, checkpoints: Checkpoints, now: Now) -> Library:
    """The library after recomputes, each of which is its layer's latest forward, whatever settings
    it runs under."""
    run, progress = now.run, now.progress
    enters = run.by_library and _enters_regions(now.deviations)
    # a recompute in high precision changes nothing, but for the inner one of two: there the
    # recompute of the outer is an ordinary forward
    inner = run.by_library and run.graphless and run.checkpoint == "nested"
    for call in now.seen.calls:
        if call.at.phase != "recompute":
            continue
        under, _ = progress.ran.get(call.at.forward, (None, None))
        if not enters and call.at.forward not in checkpoints.inside:
            under = progress.open[-1] if progress.open else None
        if run.by_library and not enters and call.layer not in library.high:
            continue  # the precision recorded for the layer does not change
        if under is not None or not enters or inner:
            library = library.called(call.layer, under)
    return library


def _forward(library: Library, checkpoints: Checkpoints, event: Forward, now: Now) -> Checkpoints:
    run, progress, calls = now.run, now.progress, len(now.seen.calls)
    around = checkpoints.around
    if progress.open and progress.open[-1] is not None:
        around |= {progress.forwards}
    takes = progress.inner(event) is not None and not event.inside and not run.graphless
    segments = {"each": calls, "whole": 1, "nested": calls + 1}[run.checkpoint]
    # the outer one of nested checkpoints reads it first, and a frozen layer does not take it
    taken = 1 + (run.checkpoint == "nested") + (run.layout == "frozen_first")
    owners = [library.owns_next and not (takes and i >= taken) for i in range(segments)]
    return replace(checkpoints, around=around, owners=(*checkpoints.owners, *owners))


def _backward(library: Library, checkpoints: Checkpoints, now: Now) -> Noted:
    run, progress, deviations = now.run, now.progress, now.deviations
    again = [call.at.forward for call in now.seen.calls if call.at.phase == "recompute"]
    if run.checkpoint == "whole":
        again = sorted(set(again))
    for forward in again:
        enters = _enters_regions(deviations) or forward in checkpoints.inside
        if forward in progress.ran and enters:
            library = library.chose(progress.ran[forward][0])
    owners, later = checkpoints.owners[: len(again)], checkpoints.owners[len(again) :]
    if owners and "recompute_leaves_ownership" in deviations:
        library = library.recomputed(owners[-1])
    around = [] if progress.open else [f for f in again if f in checkpoints.around]
    narrow = any(forward in progress.ran for forward in again)
    # of a group only the first layer updates, which no backward reaches in the dangling layout
    reached = not (run.grouped and run.layout == "dangling")
    updates = Recomputed(
        forward={
            "recompute_updates_forward": len(around),
            "inner_recompute_updates_forward": sum(f in checkpoints.inside for f in around),
        },
        segments=run.graphless,
        own=narrow and (not progress.open or any(owners)) and reached,
    )
    return library, replace(checkpoints, owners=later), updates


def modules(run: Run, casts: Sequence[Numbered]) -> Iterator[list[Numbered]]:
    """One backward's casts, split where recomputed layers update: after each of them, or after
    each group."""
    every = run.calls if run.grouped else 1
    seen: set[SlotName] = set()
    some: list[Numbered] = []
    ended = 0
    for number, cast in casts:
        assert cast.slot is not None
        if seen and (cast.slot in seen or cast.slot.layer != next(iter(seen)).layer):
            seen, ended = set(), ended + 1
            if ended % every == 0:
                yield some
                some = []
        seen.add(cast.slot)
        some.append((number, cast))
    if some:
        yield some
