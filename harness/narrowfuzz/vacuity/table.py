"""What each rule looks at, as the perturbations that it must notice one of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
_ARRANGED = _AGAIN_RESULTS + _AGAIN_OPERANDS + _AGAIN_SCALES
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

#: Rule -> what falsifies what it observes.
RELEVANT: dict[str, tuple[Perturbation, ...]] = {
    "contract": _CONTRACT,
    "census": (of_trace("changed unasked", "conversion", changed_unasked),),
    "O1": _RESULTS,
    "O2": _seen(of_trace, "operands", operands, CODES),
    "O3": _seen(of_trace, "scales", operands, SCALES),
    "O4": _seen(of_trace, "amax", operands, AMAX),
    "O5": _RESULTS,
    "O6": _RESULTS,
    "O7": _RESULTS,
    "O8": _RESULTS,
    "O9": _RESULTS,
    "O10": _numbers(of_trace, "results", outputs, (LOST, INFINITE)),
    "O11": _numbers(of_trace, "results", outputs, (LOST,)),
    "O12": _RESULTS,
    "O13": _RECOMPUTED,
    "O15": _RESULTS,
    "O16": _BIAS,
    "O18": _STATISTICS,
    "O21": _RESULTS,
    "O22": _RESULTS,
    **dict.fromkeys(("R1", "R2", "R3", "R4", "R10", "R19", "R23"), _AGAIN_RESULTS),
    **dict.fromkeys(("R5", "R6", "R7", "R8", "R9", "R11", "R16", "R17", "R18", "R20"), _ARRANGED),
    **dict.fromkeys(("R14", "R15"), _AGAIN_OPERANDS),
    "R12": _AGAIN_OPERANDS + _AGAIN_SCALES,
    "R13": _seen(of_trace, "operands", operands, CODES),
    "R21": _AGAIN_OPERANDS + _AGAIN_SCALES,
    "R22": _COPIES,
}
