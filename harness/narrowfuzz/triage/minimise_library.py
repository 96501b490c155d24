"""Simpler neighbours of a case of a library's own layers: simpler Specs first, then simpler data
and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from narrowfuzz.case.spec import Case, DataSpec
from narrowfuzz.triage.simplify import simplifications

#: In every library, the sizes of FP8 products must be multiples of this.
_LEAST = 16


def simpler_cases(case: Case) -> Iterator[tuple[str, Case]]:
    """Cases that are simpler in one respect, each with a phrase that names the change; the seed
    stays.

    No candidate equals ``case``, and repeated simplification terminates.
    """
    for phrase, simpler in simplifications(case.spec):
        yield phrase, msgspec.structs.replace(case, spec=simpler)
    for phrase, candidate in _others(case):
        if candidate != case:
            yield phrase, candidate


def _others(case: Case) -> Iterator[tuple[str, Case]]:
    """Cases with data reduced to the seed, without a bias, in bf16, and with smaller sizes."""
    spec = case.spec
    yield "unused data", msgspec.structs.replace(case, data=DataSpec(seed=case.data.seed))
    yield "no bias", _with_spec(case, bias=False)
    yield "dtype bf16", _with_spec(case, dtype="bf16")
    for name in ("m", "k"):
        size = getattr(spec, name)
        for smaller in (_LEAST, -(-size // 2 // _LEAST) * _LEAST):
            if _LEAST <= smaller < size:
                yield f"{name}={smaller}", _with_spec(case, **{name: smaller})


def _with_spec(case: Case, **changes: Any) -> Case:
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, **changes))
