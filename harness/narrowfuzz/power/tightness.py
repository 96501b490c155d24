"""Measures on drawn cases how much of its error bound each operator uses. A bound of which torch's
kernels use a hundredth detects little; one that they exceed is wrong, or has found a bug.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace

import numpy as np
from rich.table import Table

from narrowfuzz.case.arm import EAGER
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.specs import specs
from narrowfuzz.draw.strategies import batches
from narrowfuzz.judge.judge import Judge
from narrowfuzz.machine.device import check_device
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format
from narrowfuzz.operators import BY_NAME
from narrowfuzz.operators.operator import Expected
from narrowfuzz.recipe.recipe import UNCONVERTED, Recipe, unknown
from narrowfuzz.report import terminal
from narrowfuzz.rules.expected import outside
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.session import SessionOptions, open_session

#: A bound of which never more than this share is used is loose: it detects little.
LOOSE = 0.01
#: Draws of the data of one Spec.
_DRAWS = 4


@dataclass(frozen=True)
class Used:
    """How much of a result's bound calls of one operator used, in one dtype, on one device."""

    operator: str
    result: str
    dtype: str
    device: str
    calls: int = 0
    #: Numbers of elements: those that must be exact; those with a bound of at most the last
    #: rounding, which hides how much of the bound they use; and those with a larger bound.
    exact: int = 0
    hidden: int = 0
    bounded: int = 0
    #: Number of calls with an element outside its bound: a finding, or a known issue.
    outside: int = 0
    #: Among bounded elements, the largest error before the result was rounded (the error less half
    #: a unit in the last place), as a share of the error that is allowed then.
    largest: float = 0.0
    #: The bound before rounding, as a share of the value: the median of calls' medians.
    width: float = 0.0

    @property
    def loose(self) -> bool:
        """True if the bound is hardly used, although it exceeds the last rounding of results."""
        return self.bounded > 0 and self.largest < LOOSE


def used(call: OperatorCall, name: str, may: Expected) -> Used:
    """How much of the bound of one of its results a call used."""
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
    """The totals over calls of one operator, result, dtype and device."""
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


@dataclass(frozen=True)
class TightnessOptions:
    """Options of ``narrowfuzz bounds``: the operators, and how many cases to draw."""

    operators: Sequence[str] = ()
    #: Cases of each model, with each recipe that converts nothing.
    cases: int = 24
    #: The least calls per result; more cases of models that call the operator are drawn, up to a
    #: limit, until there are as many.
    calls: int = 0
    device: str = "cpu"
    seed: int = 0


def measured(judge: Judge, recipes: Sequence[Recipe], options: TightnessOptions) -> list[Used]:
    """How much of each bound drawn cases used. Raises ValueError for a glob that matches no
    operator."""
    for glob in options.operators:
        if not fnmatch.filter(BY_NAME, glob):
            raise ValueError(unknown("operator", glob, BY_NAME))
    models = [name for name, model in MODELS.items() if model.kind != "linear"]
    sources = [_Source(r, m) for r, m in itertools.product(recipes, models) if r.takes(m)]
    found: defaultdict[_Key, list[Used]] = defaultdict(list)

    def measure(source: _Source, cases: int) -> None:
        for one in _calls(judge, source, cases, options):
            key = (one.operator, one.result, one.dtype, one.device)
            source.gave[key] += 1
            found[key].append(one)

    for source in sources:
        measure(source, options.cases)
    while few := _few(found, sources, options):
        for source, cases in few.items():
            measure(source, cases)
    return [together(found[key]) for key in sorted(found)]


#: An operator's result, in a dtype, on a device.
_Key = tuple[str, str, str, str]
#: The most cases of a model that are drawn before the numbers of calls are checked again.
_TURN = 500
#: A model gets no more cases once it has this many times those requested (or ``_TURN``, if more).
_PATIENCE = 200


@dataclass(eq=False)
class _Source:
    """One recipe and model: how many cases were drawn, and how often they called each operator."""

    recipe: Recipe
    model: str
    cases: int = 0
    gave: Counter[_Key] = field(default_factory=Counter)


def _few(
    found: Mapping[_Key, Sized], sources: Sequence[_Source], options: TightnessOptions
) -> dict[_Source, int]:
    """How many more cases to draw of which sources: for each result with too few calls, of the
    source whose cases call it most often."""
    more: dict[_Source, int] = {}
    for key, calls in found.items():
        lacking = options.calls - len(calls)
        best = max(sources, key=lambda source: source.gave[key] / source.cases)
        if lacking > 0 and best.cases < _PATIENCE * max(options.cases, _TURN):
            cases = math.ceil(lacking * best.cases / best.gave[key])
            more[best] = min(max(more.get(best, 0), cases), _TURN)
    return more


def _calls(judge: Judge, source: _Source, cases: int, options: TightnessOptions) -> Iterator[Used]:
    recipe, model = source.recipe, source.model
    drawn = batches(specs([recipe], models=(model,), linears=False), draws=_DRAWS)
    turn = f"/{source.cases}" if source.cases else ""
    number = random.Random(f"{options.seed}/{recipe.name}/{model}{turn}").getrandbits(64)
    source.cases += cases
    every = itertools.chain.from_iterable(examples(drawn, -(-cases // _DRAWS), number))
    for case in itertools.islice(every, cases):
        for trace in judge.observe(case, frozenset({EAGER.name}), repeat=False).traces.values():
            for call in trace.operators:
                yield from _uses(call, options.operators)


def _uses(call: OperatorCall, operators: Sequence[str]) -> Iterator[Used]:
    """How much of the bound of each of its results a call used; nothing for an operator that was
    not selected."""
    if operators and not any(fnmatch.fnmatch(call.operator, glob) for glob in operators):
        return
    try:
        expected = BY_NAME[call.operator].expected(call)
    except Unjudged:  # too large to be judged, as the rule reports
        return
    for name, may in expected.items():
        yield used(call, name, may)


def measure_requested(options: TightnessOptions) -> list[Used]:
    """The measurements of ``narrowfuzz bounds``. Raises ValueError for an unknown name."""
    check_device(options.device)
    session = open_session(
        SessionOptions(device=options.device, recipes=UNCONVERTED, ledger="none")
    )
    return measured(session.judge, tuple(session.prepared_recipes().values()), options)


def print_table(rows: Sequence[Used]) -> None:
    """Print a table, and sentences that explain it."""
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
