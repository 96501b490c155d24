"""How much of its bound does each operator use? Measured on drawn cases: a bound of which torch's
kernels use a hundredth tells little, and one that they leave is wrong or has found something.
"""

from __future__ import annotations

import fnmatch
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from narrowfuzz.case.arm import EAGER
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.specs import specs
from narrowfuzz.draw.strategies import batches
from narrowfuzz.judge.judge import Judge
from narrowfuzz.machine.device import check_device
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format
from narrowfuzz.operators import BY_NAME
from narrowfuzz.operators.operator import Expected
from narrowfuzz.recipe.recipe import UNCONVERTED, Recipe, unknown
from narrowfuzz.report import terminal
from narrowfuzz.rules.expected import outside
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.session import SessionOptions, open_session

#: A bound that is never used by more than this share sees little.
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
    #: Elements that must be exact; those that may err by less than the last rounding, which hides
    #: how much of the bound they use; and those that may err by more.
    exact: int = 0
    hidden: int = 0
    bounded: int = 0
    #: Calls of which an element lies outside: a finding, or a known issue.
    outside: int = 0
    #: Of the bounded ones the largest error before the result was rounded (the error less half a
    #: unit in the last place), as a share of what is allowed then.
    largest: float = 0.0
    #: What is allowed before rounding, as a share of the value: the median of calls' medians.
    width: float = 0.0

    @property
    def loose(self) -> bool:
        """Is the bound never used, although results may err by more than their last rounding?"""
        return self.bounded > 0 and self.largest < LOOSE


def used(call: OperatorCall, name: str, may: Expected) -> Used:
    """What one call used of the bound of one of its results."""
    got, dtype = call.outputs[name], call.dtypes[name]
    about = Used(call.operator, name, dtype, call.device, calls=1)
    if outside(may, got).any():
        return replace(about, outside=1)
    with np.errstate(all="ignore"):
        known = ~may.unknown & np.isfinite(may.centre) & np.isfinite(got)
        half = _half_unit(got, may.rounds_to or FORMATS[dtype])
        bounded = known & (may.radius > half)
        off = np.maximum(np.abs(got - may.centre) - half, 0.0)
        share = np.where(bounded, off / may.radius, 0.0)
        width = (may.radius / np.abs(may.centre))[bounded & (may.centre != 0.0)]
    exact = known & (may.radius == 0.0)
    return replace(
        about,
        exact=int(exact.sum()),
        hidden=int((known & ~exact & ~bounded).sum()),
        bounded=int(bounded.sum()),
        largest=float(share.max(initial=0.0)),
        width=float(np.median(width)) if width.size else 0.0,
    )


def _half_unit(got: F32, fmt: Format) -> F64:
    """Half a unit in the last place of each result: the most that rounding it may have added."""
    _, exponent = np.frexp(np.abs(got.astype(np.float64)))
    return np.asarray(np.ldexp(0.5, np.maximum(exponent - 1, fmt.emin) - fmt.mantissa_bits))


def together(calls: Sequence[Used]) -> Used:
    """What calls of one operator used together."""
    widths = [one.width for one in calls if one.bounded]
    return replace(
        calls[0],
        calls=sum(one.calls for one in calls),
        exact=sum(one.exact for one in calls),
        hidden=sum(one.hidden for one in calls),
        bounded=sum(one.bounded for one in calls),
        outside=sum(one.outside for one in calls),
        largest=max(one.largest for one in calls),
        width=float(np.median(widths)) if widths else 0.0,
    )


def measured(
    judge: Judge, recipes: Sequence[Recipe], operators: Sequence[str], cases: int, seed: int
) -> list[Used]:
    """Of so many cases of each recipe and model. Raises ValueError for a glob that names no
    operator."""
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
    models = [name for name, model in MODELS.items() if model.kind != "linear"]
    for recipe, model in itertools.product(recipes, models):
        if not recipe.takes(model):
            continue
        drawn = batches(specs([recipe], models=(model,), linears=False), draws=_DRAWS)
        number = random.Random(f"{seed}/{recipe.name}/{model}").getrandbits(64)
        every = itertools.chain.from_iterable(examples(drawn, -(-cases // _DRAWS), number))
        for case in itertools.islice(every, cases):
            for trace in judge.observe(case, frozenset({EAGER.name}), repeat=False).traces.values():
                yield from trace.operators


def asked(cases: int, operators: Sequence[str], device: str, seed: int) -> list[Used]:
    """What ``narrowfuzz bounds`` was asked for. Raises ValueError for a name of nothing."""
    check_device(device)
    session = open_session(SessionOptions(device=device, recipes=UNCONVERTED, ledger="none"))
    recipes = tuple(session.prepared().values())
    return measured(session.judge, recipes, operators, cases, seed)


def print_table(rows: Sequence[Used]) -> None:
    """As a table, and what it means."""
    table = Table(box=None, pad_edge=False)
    for title in ("operator", "result", "dtype", "device"):
        table.add_column(title)
    for title in ("calls", "exact", "hidden", "bounded", "largest share", "width", "outside"):
        table.add_column(title, justify="right")
    for row in rows:
        share = f"{row.largest:.1%}" if row.bounded else ""
        width = f"{row.width:.1e}" if row.bounded else ""
        counts = map(str, (row.calls, row.exact, row.hidden, row.bounded))
        names = row.operator, row.result, row.dtype, row.device
        table.add_row(*names, *counts, share, width, str(row.outside or ""))
    loose = sum(row.loose for row in rows)
    terminal.print_table(
        table,
        f"{loose} of {len(rows)} bounds are never used by more than {LOOSE:.0%}: they are loose, "
        "or leave little more room than the last rounding.\n"
        "exact, hidden, bounded: elements that must be exact, may err by no more than their last "
        "rounding, and by more. largest share: how much of the error that bounded ones may have "
        "before that rounding they had at most. width: the allowed error as a share of the value "
        "(median). outside: calls with a result beyond its bound, which `run` reports as a finding "
        "or a known issue.",
    )
