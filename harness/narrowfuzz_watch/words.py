"""A report as a few lines of text for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from narrowfuzz_watch.address import At
from narrowfuzz_watch.records import Consequence, FirstBad, Report, Tensor, Vote

_BAD = {"nan": "NaN", "inf": "infinity", "huge": "huge number", "differs": "difference"}


def lines(report: Report, folder: Path) -> Iterator[str]:
    """The lines that ``narrowfuzz watch`` prints at its end."""
    if not report.trained:
        yield "no training was seen: no backward pass and no optimizer step in a Python with torch"
    if report.first is not None:
        passing = "" if report.counts else " (it reached no gradient, and is no finding)"
        yield from _first("first", report.first, passing)
        if report.first_nan is not None:
            yield f"  NaN came first at {place(report.first_nan)}"
        if report.loss_nan is not None:
            yield f"  the loss was NaN for the first time in step {report.loss_nan}"
        for rerun in report.reruns:
            yield f"  {rerun.came} {rerun.change}" + (f": {rerun.detail}" if rerun.detail else "")
    elif report.trained:
        yield (
            f"nothing bad in {_count(report.steps, 'step')} of {_count(len(report.ranks), 'rank')}"
        )
    if report.divergence is not None:
        yield from _first("first", report.divergence, " from the earlier run")
    yield from map(_vote, report.votes)
    yield from report.stuck
    yield from report.notes
    if report.trained:
        yield (
            f"{report.operators} operators checked, {100 * report.overhead:.1f} % of the time; "
            "what runs inside compiled graphs is not seen"
        )
    yield f"report: {folder}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def of_first(first: FirstBad) -> Iterator[str]:
    """Lines on the place of the first bad value, and on its cause as far as it was shown."""
    return _first("first", first, "")


def _first(word: str, first: FirstBad, more: str) -> Iterator[str]:
    yield f"{word} {_BAD[first.bad]}{more}: {place(first.at)}"
    if first.lines:
        called = f", called from {first.lines[1]}" if len(first.lines) > 1 else ""
        yield f"  at {first.lines[0]}{called}"
    for operand in first.operands:
        yield f"  before it, {_tensor(operand)}"
    if first.output is not None:
        yield f"  it gave {_tensor(first.output)}"
    if first.through is not None:
        yield f"  crossed {_collective(first.through)}"
    for consequence in first.consequences:
        yield f"  rank {consequence.rank} got it out of {_collective(consequence)}"
    if first.also:
        yield f"  the same operator on ranks {list(first.also)} made one, too"
    yield f"  {first.cause}: {first.because}"


def place(at: At) -> str:
    """An address in words: step, rank, phase, layer, operator."""
    parts = [f"step {at.event}", f"rank {at.rank}", at.phase or "outside of a pass"]
    parts += [f"layer {at.layer}"] if at.layer else []
    return f"{', '.join(parts)}, operator {at.name}"


def more_times(number: int) -> str:
    """``run once more``, or ``run 3 more times``."""
    return "run once more" if number == 1 else f"run {number} more times"


def _tensor(tensor: Tensor) -> str:
    bad = [f"{tensor.nan} NaN"] if tensor.nan else []
    bad += [f"{tensor.inf} infinite"] if tensor.inf else []
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    what = " and ".join(bad) or "finite"
    index = f", first at {list(tensor.index)}" if tensor.index else ""
    return f"{tensor.name} ({tensor.dtype} {shape}): {what}{index}{_numbers(tensor)}"


def _numbers(tensor: Tensor) -> str:
    """Words on its finite elements: their range, and how many are zero."""
    if tensor.count <= tensor.nan + tensor.inf:
        return ""
    if tensor.count == 1:
        return f", {tensor.most:.3g}"
    zeros = f", {tensor.zeros} of {tensor.count} are zero" if tensor.zeros else ""
    return f", from {tensor.least:.3g} to {tensor.most:.3g}{zeros}"


def _collective(part: Consequence) -> str:
    return f"{part.op} {part.seq} of ranks {list(part.group)} (step {part.step})"


def _vote(vote: Vote) -> str:
    who = (
        f"ranks {list(vote.sick)} hold other bits than the majority"
        if vote.sick
        else "they disagree, and no majority tells who is wrong"
    )
    return f"ranks {list(vote.group)} should hold the same {vote.what} (step {vote.step}): {who}"
