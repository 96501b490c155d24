"""The census: conversion changes nothing that it was not requested to change."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Own
from narrowfuzz.trace.trace import Change, ChangeKind
from narrowfuzz.trace.verdict import Verdict

ROLE = "convert"


def check_census(evidence: Evidence) -> Iterator[Verdict]:
    """One verdict for each class of change, at the first module that shows it.

    Conversion is the same on every arm, so only one arm is judged.
    """
    arm = evidence.base
    trace = evidence.traces.get(arm)
    if trace is None:
        return
    if trace.census is None:
        failed = trace.error is not None
        why = "conversion failed" if failed else "the recipe does not say what it converts"
        yield plain("census", arm, ROLE, "not_applicable", why)
        return
    by_kind: dict[ChangeKind, list[Change]] = {}
    changes = tuple(trace.census.changes)
    if evidence.drop_unread_attributes is not None and any(change.attributes for change in changes):
        changes = tuple(filter(None, map(evidence.drop_unread_attributes, changes)))
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    if not by_kind:
        none = not trace.census.changes
        yield plain("census", arm, ROLE, "ok", "" if none else "nothing reads what was lost")
    model = MODELS[evidence.spec.model]
    for kind, of_kind in by_kind.items():
        yield _verdict(arm, kind, of_kind, model)


def _verdict(arm: str, kind: ChangeKind, changes: list[Change], model: Model) -> Verdict:
    """A divergence at the first module that conversion was not to replace, if there is one, and
    that is no linear with a computed weight, which conversions do not know."""
    first = min(changes, key=lambda one: (one.swapped, model.computes_weight(one.module)))
    more = f" (and at {len(changes) - 1} more)" if len(changes) > 1 else ""
    at = At(what="module", name=first.module or "the root")
    actual = (first.after or "nothing") + more
    expect = Own(first.before or "nothing")
    return diverged("census", arm, ROLE, kind, at, actual, expect, swapped=first.swapped)
