"""A library runs what it promises to run, and after a step it has nothing set aside."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.case.events import Forward, Step, Switch
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import steps_of
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.state.symptoms import circumstances, unfinished
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, Runs, bits
from narrowfuzz.trace.trace import RunError
from narrowfuzz.trace.verdict import Verdict


def check_contract(evidence: Evidence) -> Iterator[Verdict]:
    """contract: the library runs what it promises to run."""
    for arm, trace in evidence.traces.items():
        error = trace.error
        if error is None:
            yield plain("contract", arm, "schedule", "ok")
        elif error.type == "UnsupportedByEmulation":
            yield plain("contract", arm, "schedule", "unsupported", error.message)
        elif evidence.refusal:
            yield plain("contract", arm, "schedule", "not_applicable", evidence.refusal)
        else:
            symptom = f"{error.type} in {error.where}{separates(evidence, error)}"
            symptom += circumstances(evidence.spec, arm)
            yield Verdict(
                "contract",
                arm,
                "schedule",
                "crashed",
                symptom,
                At(what="error", event=error.event, name=error.where, rank=max(error.rank, 0)),
                f"{error.type}: {error.message[:200]}",
                Runs(error.type),
            )


def separates(evidence: Evidence, error: RunError) -> str:
    """Words that separate failures of one function: it failed after a switch of the history had
    resized its windows, or with quantised parameters in a forward outside of regions."""
    spec = evidence.spec
    if error.where.partition(".")[0] in evidence.own_layers.resizing:
        history = spec.settings.history
        for event in spec.events[: max(error.event, 0)]:
            if isinstance(event, Switch) and event.history not in (None, history):
                return ", after a switch of the history"
    for i, event, progress in steps_of(spec):
        if i == error.event and isinstance(event, Forward) and spec.quantized_init:
            return "" if progress.inner(event) else ", quantised parameters outside regions"
    return ""


def check_balance(evidence: Evidence) -> Iterator[Verdict]:
    """O19: after a step the library has nothing set aside for later."""
    for arm, trace in evidence.in_one_process.items():
        found = plain("O19", arm, "state", "not_applicable")
        for (i, event, progress), moment in zip(
            steps_of(evidence.spec), trace.moments, strict=False
        ):
            if not isinstance(event, Step) or progress.open:
                continue
            pending = {name: n for name, n in moment.pending.items() if n}
            if pending:
                symptom = f"left over: {', '.join(sorted(pending))}{unfinished(evidence.spec)}"
                symptom += circumstances(evidence.spec, arm)
                at = At(what="pending", event=i)
                due = Is(bits(0))
                found = diverged("O19", arm, "state", symptom, at, str(pending), due)
                break
            found = plain("O19", arm, "state", "ok")
        yield found
