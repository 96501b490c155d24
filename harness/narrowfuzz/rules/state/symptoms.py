"""The symptoms of O14: the class of a divergence, and what distinguishes causes that look alike."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from narrowfuzz.case.events import Backward, Close, Event, Forward, Switch
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import steps_of
from narrowfuzz.rules.rule import number
from narrowfuzz.rules.state.run import by_library
from narrowfuzz.trace.snapshots import SlotName
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict


def symptom_of(
    name: SlotName,
    event: Event,
    before: Slot | None,
    want: Slot,
    got: Slot,
    uncommitted: Slot | None,
) -> str:
    """The class of a divergence, in words."""
    direction = name.direction
    if uncommitted is not None and got.equals(uncommitted):
        return f"{direction} scale not updated"
    if uncommitted is None and before is not None and want.equals(before):
        if isinstance(event, Backward | Close | Forward):
            if np.array_equal(got.window[1:], want.window[1:]) and got.scale == want.scale:
                return f"{direction} maximum staged by {_kind(event)}"
            return f"{direction} state moved without a commit by {_kind(event)}"
        return f"{direction} state changed by {_kind(event)}"
    if uncommitted is not None and got.window.tobytes() == want.window.tobytes():
        return f"{direction} scale"
    if got.scale == want.scale and len(got.window) == len(want.window):
        if np.array_equal(got.window[1:], want.window[1:]):
            return f"{direction} staged maximum"
        return f"{direction} window"
    return f"{direction} scale and window"


def _kind(event: Event) -> str:
    if isinstance(event, Forward) and event.mode != "train":
        return "an evaluation"
    return f"a {type(event).__name__.lower()}"


def described(slot: Slot) -> str:
    """Scale and window, in words."""
    window = ", ".join(f"{x:.4g}" for x in slot.window)
    return f"scale {number(float(slot.scale))} window [{window}]"


def differing(got: Slot, want: Slot) -> str:
    """The parts of ``got``, scale and window, that differ from ``want``, in words."""
    parts = []
    if got.scale.tobytes() != want.scale.tobytes():
        parts.append(f"scale {number(float(got.scale))}")
    if got.window.tobytes() != want.window.tobytes():
        parts.append(f"window [{', '.join(number(float(x)) for x in got.window)}]")
    return " ".join(parts)


def placed(verdict: Verdict, evidence: Evidence, trace: Trace, event: int) -> Verdict:
    """The verdict with its arm, its event, and its circumstances."""
    symptom = verdict.symptom + _circumstances(evidence.spec)
    symptom += circumstances(evidence.spec, trace.arm)
    at = msgspec.structs.replace(verdict.at, event=event)
    return replace(verdict, arm=trace.arm, symptom=symptom, at=at)


def _spans_regions(spec: Spec) -> bool:
    """True if one backward runs through what ran in several regions, nested ones among them."""
    each = spec.region in ("each", "nested") and spec.calls > 1
    for _, event, progress in steps_of(spec):
        if isinstance(event, Backward):
            regions = {progress.ran[f][1] for f in event.of if f in progress.ran}
            inner = sum(f in progress.nested for f in event.of)
            if len(regions) + inner > 1 or (each and inner + sum(r.own for r in regions)):
                return True
    return False


def _circumstances(spec: Spec) -> str:
    """Words that separate causes that look alike: another code path updates, there is an unused
    layer whose backward never comes, or one backward runs through several regions. They are part of
    the symptom, so minimising keeps them."""
    switches = [e.algorithm for e in spec.events if isinstance(e, Switch)]
    by_tensor = not spec.settings.fused or "callable" in (
        spec.settings.algorithm,
        *switches,
    )
    named = {
        "unfused": by_tensor,
        "unused layer": spec.layout == "dangling",
        "several regions": _spans_regions(spec),
    }
    return "".join(f", {name}" for name, holds in named.items() if holds)


def circumstances(spec: Spec, arm: str) -> str:
    """Words that separate causes on the arms of a library's checkpoint; part of the symptom."""
    if not by_library(arm):
        return ""
    words = {
        "nested": spec.region == "nested",
        "another precision in between": _changes_precision(spec),
        "high precision recomputed in a region": any(
            isinstance(event, Backward)
            and any(progress.open[-1:])
            and not set(event.of) <= progress.ran.keys()
            for _, event, progress in steps_of(spec)
        ),
    }
    return "".join(f", {name}" for name, holds in words.items() if holds)


def unfinished(spec: Spec) -> str:
    """Words for the symptom if no backward reaches some checkpointed layer call; "" if all do."""
    forwards = [e for e in spec.events if isinstance(e, Forward)]
    trained = {i for i, event in enumerate(forwards) if event.mode == "train"}
    used = {f for event in spec.events if isinstance(event, Backward) for f in event.of}
    has_unused = spec.layout in ("dangling", "frozen_first") or bool(trained - used)
    return ", some forward unused" if has_unused else ""


def _changes_precision(spec: Spec) -> bool:
    """Did a layer, before it is recomputed, run a later forward in another precision?"""
    last: dict[int, bool] = {}
    ran: dict[int, tuple[int, bool]] = {}
    for _, event, progress in steps_of(spec):
        if isinstance(event, Forward):
            narrow = progress.inner(event) is not None
            last[event.path] = narrow
            ran[progress.forwards] = (event.path, narrow)
        elif isinstance(event, Backward) and any(last[ran[f][0]] != ran[f][1] for f in event.of):
            return True
    return False
