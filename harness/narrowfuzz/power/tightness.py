"""How much of its bound does each operator use? Measured on drawn cases: a bound of which torch's
kernels use a hundredth tells little, and one that they leave is wrong or has found something.
"""

from __future__ import annotations

import fnmatch
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from narrowfuzz.case.arm import EAGER
from narrowfuzz.draw.specs import specs
from narrowfuzz.draw.strategies import batches
from narrowfuzz.judge.judge import Judge
from narrowfuzz.machine.device import check_device
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format
from narrowfuzz.operators import BY_NAME
from narrowfuzz.operators.operator import Expected
from narrowfuzz.power.cases import examples
from narrowfuzz.recipe.recipe import Recipe, unknown
from narrowfuzz.rules.expected import outside
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.session import SessionOptions, open_session

#: What is judged: torch's own kernels, which no recipe replaces.
RECIPES = ("torch.fp32", "torch.bf16")
#: A bound that is never used by more than this share is too loose to be called one.
LOOSE = 0.01
#: Draws of the data of one Spec.
_DRAWS = 4


@dataclass(frozen=True)
class Used:
    """What calls of one operator used of the bound of one result, in one dtype, on one device."""

    operator: str
    result: str
    dtype: str
    device: str
    calls: int = 0
    #: Elements that must be exact, and those that may err.
    exact: int = 0
    bounded: int = 0
    #: Calls of which an element lies outside: a finding, or a known issue.
    outside: int = 0
    #: The largest error before the result was rounded, as a share of what is allowed then: the
    #: error less half a unit in the last place. 0: every error can be the last rounding's.
    largest: float = 0.0
    #: What is allowed before rounding, as a share of the value: the median of calls' medians.
    width: float = 0.0

    @property
    def loose(self) -> bool:
        """Is the bound never used, although results may err?"""
        return self.bounded > 0 and self.largest < LOOSE


def used(call: OperatorCall, name: str, may: Expected) -> Used:
    """What one call used of the bound of one of its results."""
    got, dtype = call.outputs[name], call.dtypes[name]
    about = Used(call.operator, name, dtype, call.device, calls=1)
    if outside(may, got).any():
        return replace(about, outside=1)
    with np.errstate(all="ignore"):
        known = ~may.unknown & np.isfinite(may.centre) & np.isfinite(got)
        errs = known & (may.radius > 0.0)
        share = np.where(errs, _unrounded(got, may, FORMATS[dtype]) / may.radius, 0.0)
        width = (may.radius / np.abs(may.centre))[errs & (may.centre != 0.0)]
    return replace(
        about,
        exact=int((known & ~errs).sum()),
        bounded=int(errs.sum()),
        largest=float(share.max(initial=0.0)),
        width=float(np.median(width)) if width.size else 0.0,
    )


def _unrounded(got: F32, may: Expected, fmt: Format) -> F64:
    """How far a result was from the reference at least, before it was rounded to its format."""
    _, exponent = np.frexp(np.abs(got.astype(np.float64)))
    half = np.ldexp(0.5, np.maximum(exponent - 1, fmt.emin) - fmt.mantissa_bits)
    return np.asarray(np.maximum(np.abs(got - may.centre) - half, 0.0))


def together(calls: Sequence[Used]) -> Used:
    """What calls of one operator used together."""
    widths = [one.width for one in calls if one.bounded]
    return replace(
        calls[0],
        calls=sum(one.calls for one in calls),
        exact=sum(one.exact for one in calls),
        bounded=sum(one.bounded for one in calls),
        outside=sum(one.outside for one in calls),
        largest=max(one.largest for one in calls),
        width=float(np.median(widths)) if widths else 0.0,
    )


def measured(
    judge: Judge, recipes: Sequence[Recipe], operators: Sequence[str], cases: int, seed: int
) -> list[Used]:
    """Of so many cases of each recipe. Raises ValueError for a glob that names no operator."""
    for glob in operators:
        if not fnmatch.filter(BY_NAME, glob):
            raise ValueError(unknown("operator", glob, BY_NAME))
    found: defaultdict[tuple[str, str, str, str], list[Used]] = defaultdict(list)
    for call in _calls(judge, recipes, cases, seed):
        if operators and not any(fnmatch.fnmatch(call.operator, glob) for glob in operators):
            continue
        try:
            expected = BY_NAME[call.operator].expected(call)
        except ValueError:  # too large to be judged, which the rule says
            continue
        for name, may in expected.items():
            one = used(call, name, may)
            found[one.operator, one.result, one.dtype, one.device].append(one)
    return [together(found[key]) for key in sorted(found)]


def _calls(
    judge: Judge, recipes: Sequence[Recipe], cases: int, seed: int
) -> Iterator[OperatorCall]:
    models = tuple(name for name, model in MODELS.items() if model.kind != "linear")
    for recipe in recipes:
        taken = tuple(model for model in models if recipe.takes(model))
        drawn = specs([recipe], largest=128, models=taken, linears=False)
        strategy = batches(drawn, draws=_DRAWS)
        number = random.Random(f"{seed}/{recipe.name}").getrandbits(64)
        every = itertools.chain.from_iterable(examples(strategy, -(-cases // _DRAWS), number))
        for case in itertools.islice(every, cases):
            for trace in judge.observe(case, frozenset({EAGER.name}), repeat=False).traces.values():
                yield from trace.operators


def asked(cases: int, operators: Sequence[str], device: str, seed: int) -> list[Used]:
    """What ``narrowfuzz bounds`` was asked for. Raises ValueError for a name of nothing."""
    check_device(device)
    session = open_session(SessionOptions(device=device, recipes=RECIPES, ledger="none"))
    recipes = tuple(session.prepared().values())
    return measured(session.judge, recipes, operators, cases, seed)


def print_table(rows: Sequence[Used]) -> None:
    """As a table, and what it means."""
    table = Table(box=None, pad_edge=False)
    for title in ("operator", "result", "dtype", "device"):
        table.add_column(title)
    for title in ("calls", "exact elements", "bounded", "largest share", "width", "outside"):
        table.add_column(title, justify="right")
    for row in rows:
        share = f"{row.largest:.1%}" if row.bounded else ""
        width = f"{row.width:.1e}" if row.bounded else ""
        counts = str(row.calls), str(row.exact), str(row.bounded)
        names = row.operator, row.result, row.dtype, row.device
        table.add_row(*names, *counts, share, width, str(row.outside or ""))
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    loose = sum(row.loose for row in rows)
    console.print(
        f"\n{loose} of {len(rows)} bounds are never used by more than {LOOSE:.0%}: too loose to be "
        "called one. largest share: of what a result may be off before its last rounding, how much "
        "it was off. width: what that is of the value, in the middle. outside: calls with a result "
        "beyond its bound, which `run` reports as a finding or a known issue.",
        soft_wrap=True,
    )
