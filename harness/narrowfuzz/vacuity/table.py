"""What each rule looks at, as the perturbations that it must notice one of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from narrowfuzz.oracles import ORACLES
from narrowfuzz.oracles.oracle import Reads
from narrowfuzz.vacuity.falsify import (
    AMAX,
    CODES,
    INFINITE,
    LOST,
    NUMBERS,
    SCALES,
    Numbers,
    Operands,
)
from narrowfuzz.vacuity.perturbation import (
    Falsified,
    Perturbation,
    changed_unasked,
    mute,
    of_rerun,
    of_trace,
    operands,
    outputs,
    raised,
    recomputed,
    recomputed_tensors,
    second_copies,
    statistics,
    without,
)

Made = Callable[[str, str, Falsified], Perturbation]


def _numbers(
    made: Made, of: str, what: Callable[..., Falsified], kinds: Iterable[Numbers], *names: str
) -> tuple[Perturbation, ...]:
    return tuple(made(kind.name, of, what(kind, *names)) for kind in kinds)


def _seen(
    made: Made, of: str, what: Callable[[Operands], Falsified], kinds: Iterable[Operands]
) -> tuple[Perturbation, ...]:
    return tuple(made(kind.name, of, what(kind)) for kind in kinds)


_RESULTS = _numbers(of_trace, "results", outputs, NUMBERS)
_AGAIN_RESULTS = _numbers(of_rerun, "results again", outputs, NUMBERS)
_AGAIN_OPERANDS = _seen(of_rerun, "operands again", operands, CODES)
_AGAIN_SCALES = _seen(of_rerun, "scales again", operands, SCALES)
_RECOMPUTED = (
    *_seen(of_trace, "recomputed operands", recomputed, CODES + SCALES),
    *_numbers(of_trace, "recomputed input", recomputed_tensors, NUMBERS),
)
_COPIES = _seen(of_trace, "second copies", second_copies, CODES + SCALES)
_STATISTICS = tuple(
    perturbation
    for name in ("lse", "out", "q", "k", "v")
    for perturbation in _numbers(of_trace, f"attention's {name}", statistics, NUMBERS, name)
)
_CONTRACT = (
    of_trace("no end", "run", raised),
    of_trace("no message", "refusal", mute),
    of_trace("missing", "output", without("output")),
)
_BIAS = _numbers(of_trace, "bias gradient", outputs, NUMBERS, "grad_bias")

#: What a rule reads -> what falsifies it.
_FALSIFIES: dict[Reads, tuple[Perturbation, ...]] = {
    "run": _CONTRACT,
    "conversion": (of_trace("changed unasked", "conversion", changed_unasked),),
    "results": _RESULTS,
    "finite": _numbers(of_trace, "results", outputs, (LOST, INFINITE)),
    "nan": _numbers(of_trace, "results", outputs, (LOST,)),
    "bias gradient": _BIAS,
    "operands": _seen(of_trace, "operands", operands, CODES),
    "scales": _seen(of_trace, "scales", operands, SCALES),
    "amax": _seen(of_trace, "amax", operands, AMAX),
    "second copies": _COPIES,
    "recomputed": _RECOMPUTED,
    "statistics": _STATISTICS,
    "results again": _AGAIN_RESULTS,
    "operands again": _AGAIN_OPERANDS,
    "scales again": _AGAIN_SCALES,
}
#: Rule -> what falsifies what it observes.
RELEVANT: dict[str, tuple[Perturbation, ...]] = {
    rule.name: tuple(p for read in rule.reads for p in _FALSIFIES[read]) for rule in ORACLES
}
