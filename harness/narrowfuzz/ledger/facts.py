"""Named facts about a case, a verdict and the machine, and predicates on them.

A predicate is a table ``fact = condition``; it holds if every condition does. A predicate that
names an unknown fact is refused when it is loaded, so that none is silently never true.

A condition is ``true`` or ``false``, a number, or a text: a glob, ``!=`` before a glob, ``<N <=N >N
>=N``, ``odd``, ``even``, ``not multiple of N``. A list holds if any of its conditions does. For a
fact that is a set (features, events, cpu), ``"x"`` requires a member that matches, ``"!x"`` that no
member does, and a list holds if all of its conditions do.

A case that resumes has two layouts of ranks, and each has facts of its own: a predicate holds for
the case if it holds for one of them.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, get_args

import msgspec

from narrowfuzz.case.events import Event, Settings
from narrowfuzz.case.features import FEATURES, features
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.machine.machine import Machine
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.trace.verdict import Verdict

Fact = str | int | float | bool | frozenset[str] | None
Condition = str | int | float | bool | list[str | int | float | bool]
#: fact -> condition.
Predicate = Mapping[str, Condition]


@dataclass(frozen=True)
class Context:
    """The things that a predicate is about."""

    case: Case
    machine: Machine
    device: str = "cpu"
    #: None where a predicate is only about the case, as for a deviation of the reference.
    verdict: Verdict | None = None


def _of_library(read: Callable[[Spec], Fact]) -> Callable[[Context], Fact]:
    """A fact that only cases of a library's own layers have; None for others."""
    return lambda context: read(context.case.spec) if context.case.spec.layer else None


def _of_sharding(read: Callable[[Spec], Fact]) -> Callable[[Context], Fact]:
    """A fact that only cases on ranks have; None for others."""
    return lambda context: read(context.case.spec) if context.case.spec.sharded else None


def _shards(spec: Spec) -> set[tuple[int, int]]:
    """(rows, ranks) for the weights that FSDP divides by rows among ranks, after tensor parallelism
    has divided some of them by output features. A weight of a wide linear has n rows. Other models
    have a linear back to k, so they have weights with k rows as well. Experts' weights are divided
    by experts: all of them, or those of one rank where ranks share experts, over the groups of such
    ranks."""
    model, sharding = MODELS.get(spec.model), spec.sharding
    if model is None or not sharding.data:  # a library's own layers, which no rank shares
        return set()
    if model.own:
        return {(rows, sharding.data) for rows in model.linear_rows}
    ranks = max(sharding.tensor, 1) if model.shared else 1
    experts = model.experts // max(sharding.experts, 1)
    own = {(experts, sharding.groups)} if model.experts else set()
    if not model.wide or model.takes_ids:
        return {(spec.n // ranks, sharding.data), (spec.k, sharding.data), *own}
    rows = spec.n // ranks if "colwise" in model.styles(spec).values() else spec.n
    return {(rows, sharding.data)}


def _uneven(spec: Spec) -> bool:
    """Does a linear have a number of rows that FSDP's ranks do not divide?"""
    return any(rows % ranks for rows, ranks in _shards(spec))


def _empty_shard(spec: Spec) -> bool:
    """Does one of FSDP's ranks get no row of a linear? Every rank gets rows / ranks, rounded up,
    until all rows are given out: of 4 rows the third of three ranks gets none."""
    return any(
        ranks > 1 and -(-rows // ranks) * (ranks - 1) >= rows for rows, ranks in _shards(spec)
    )


def _empty_classes(spec: Spec) -> bool:
    """Does one of the ranks that share classes get none? They are divided as FSDP divides rows."""
    ranks = spec.sharding.classes
    return ranks > 1 and -(-spec.k // ranks) * (ranks - 1) >= spec.k


def _of_model(read: Callable[[Model], Fact]) -> Callable[[Context], Fact]:
    """A fact of the case's model; None where that model is not known here."""

    def fact(context: Context) -> Fact:
        model = MODELS.get(context.case.spec.model)
        return None if model is None else read(model)

    return fact


def _of_verdict(read: Callable[[Verdict], Fact]) -> Callable[[Context], Fact]:
    return lambda context: None if context.verdict is None else read(context.verdict)


def _computes_weight(context: Context) -> Fact:
    """Is the verdict about a linear whose weight is computed, and about no other linear?"""
    model, verdict = MODELS.get(context.case.spec.model), context.verdict
    if model is None or verdict is None:
        return None
    return model.computes_weight(verdict.at.layer or verdict.at.name)


def _of_machine(read: Callable[[Machine], Fact]) -> Callable[[Context], Fact]:
    return lambda context: read(context.machine)


#: Bits of the smallest fp32 number that bf16, and so autocast, rounds to infinity; and of 2^64,
#: whose square overflows fp32.
_INFINITE_IN_BF16, _SQUARE_IS_INFINITE = 0x7F7F8000, 0x5F800000


def _may_be_non_finite(case: Case) -> bool:
    """True if the data contain an infinity or a NaN, or values so large that a model may produce
    one: attention's backward overflows where the error of a score is large in an exponential."""
    data = case.data
    linear_only = case.spec.model == "linear"
    near = data.values in ("inf_nan", "near_max", "scale_ends")
    grows = not linear_only and data.values in ("outlier", "outlier_rows", "heavy_tail", "aligned")
    least = _INFINITE_IN_BF16 if linear_only else _SQUARE_IS_INFINITE
    special = any((int(s.bits, 16) & 0x7FFFFFFF) >= least for s in data.spikes)
    return near or grows or special


def _kind(event: Event | type[Event]) -> str:
    """The name of this kind of event in a case file."""
    return str(event.__struct_config__.tag)


#: Fact that is a set -> the names that it may contain.
_NAMES = {"features": frozenset(FEATURES), "events": frozenset(map(_kind, get_args(Event)))}

_SPEC = (
    "recipe",
    "backend",
    "model",
    "m",
    "k",
    "n",
    "tokens",
    "batch",
    "bias",
    "dtype",
    "input_layout",
    "grad_layout",
    "weight_layout",
    "heads",
    "attention",
    "grad_mode",
    "steps",
    "microbatches",
    "optimizer",
    "loss_scaling",
    "clipping",
    "lifecycle",
    "checkpoint",
    "compile",
    "dynamic",
    "fullgraph",
    "memory_budget",
    "kernels",
    "threads",
    "region",
    "reentrant",
)
#: Fact -> the field of Sharding.
_OF_SHARDING = {
    {"data": "fsdp_ranks", "tensor": "tensor_ranks"}.get(name, name): name
    for name in Sharding.__struct_fields__
}
#: Facts that only a case on ranks has.
OF_RANKS = (*_OF_SHARDING, "uneven", "empty_shard", "empty_classes")
_OF_LIBRARY = ("layer", "layout", "depth", "checkpoint_by", "quantized_init")

OF_MACHINE: dict[str, Callable[[Machine], Fact]] = {
    "cpu": lambda machine: frozenset(machine.cpu),
    "compiler": attrgetter("compiler"),
    "onednn": attrgetter("onednn"),
    "bf16_kernel": lambda machine: machine.kernels.get("bf16", ""),
    "fp8_kernel": lambda machine: machine.kernels.get("fp8", ""),
}

_OF_CASE: dict[str, Callable[[Context], Fact]] = {
    **{name: attrgetter(f"case.spec.{name}") for name in _SPEC},
    "autocast": lambda context: bool(context.case.spec.narrowed),
    "regime": attrgetter("case.data.regime"),
    "values": attrgetter("case.data.values"),
    "non_finite": lambda context: _may_be_non_finite(context.case),
    **{name: _of_library(attrgetter(name)) for name in _OF_LIBRARY},
    **{name: _of_library(attrgetter(f"settings.{name}")) for name in Settings.__struct_fields__},
    **{name: _of_sharding(attrgetter(f"sharding.{of}")) for name, of in _OF_SHARDING.items()},
    "uneven": _of_sharding(_uneven),
    "empty_shard": _of_sharding(_empty_shard),
    "empty_classes": _of_sharding(_empty_classes),
    "features": lambda context: features(context.case.spec),
    #: The kinds of events in the schedule, at any place.
    "events": lambda context: frozenset(map(_kind, context.case.spec.events)),
    #: The model calls attention, or is a user's and may call it.
    "attends": _of_model(attrgetter("attends")),
    #: The model is a user's, and what a checkpoint recomputes of its forward changes a buffer.
    "changes_buffers": _of_model(lambda model: model.changes_buffers_again),
    #: The model is a user's, and its forward takes gradients that have gradients of their own.
    "second_derivative": _of_model(attrgetter("gradients.twice")),
    #: The model's forward draws random numbers.
    "random": _of_model(attrgetter("random")),
}
FACTS: dict[str, Callable[[Context], Fact]] = {
    **_OF_CASE,
    "arm": _of_verdict(attrgetter("arm")),
    "message": _of_verdict(attrgetter("got")),
    #: The result that the verdict is about: output, embedding.weight.grad@1.
    "result": _of_verdict(attrgetter("at.name")),
    #: The additional run whose result it is about, as in "the negated grad_output"; "" for the
    #: case's own run.
    "other_run": _of_verdict(attrgetter("at.run")),
    #: All changes of this kind by a conversion are at modules that it was to replace.
    "swapped": _of_verdict(attrgetter("swapped")),
    #: The model is a user's, and the weight of the linear that the verdict is about is computed.
    "computed_weight": _computes_weight,
    #: The model's own code raised the error, not a library that is tested.
    "own_error": _of_verdict(attrgetter("own_error")),
    #: The recipe's rule that an expected refusal enforces, in the recipe's words.
    "rule": _of_verdict(attrgetter("requirement")),
    #: The operand of a product that the verdict is about, a or b.
    "side": _of_verdict(attrgetter("at.side")),
    "device": attrgetter("device"),
    **{name: _of_machine(read) for name, read in OF_MACHINE.items()},
}

_COMPARED = re.compile(r"(<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)\Z")
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_MULTIPLE = re.compile(r"not multiple of (\d+)\Z")


def check_predicate(predicate: Predicate) -> None:
    """Raises ValueError naming a fact, a feature or a kind of event that does not exist."""
    for name, condition in predicate.items():
        if name not in FACTS:
            raise ValueError(f"unknown fact {name!r}: known are {', '.join(sorted(FACTS))}")
        if name in _NAMES:
            conditions = condition if isinstance(condition, list) else [condition]
            for one in conditions:
                if str(one).removeprefix("!") not in _NAMES[name]:
                    raise ValueError(f"unknown {name.removesuffix('s')} {one!r} of a schedule")


def holds(predicate: Predicate, context: Context) -> bool:
    """True if every condition of the predicate holds for one of the case's layouts."""
    return any(
        all(_meets(FACTS[name](laid_out), wanted) for name, wanted in predicate.items())
        for laid_out in _layouts(context)
    )


def unmet(predicate: Predicate, context: Context) -> list[str]:
    """The conditions on the case itself that do not hold, in words; for a case that resumes, those
    of the layout with the fewest."""
    wanted_of_case = {name: wanted for name, wanted in predicate.items() if name in _OF_CASE}
    return min(
        (
            [
                f"{name} is {_in_words(_OF_CASE[name](laid_out), ', ')}, not {_in_words(wanted)}"
                for name, wanted in wanted_of_case.items()
                if not _meets(_OF_CASE[name](laid_out), wanted)
            ]
            for laid_out in _layouts(context)
        ),
        key=len,
    )


def _in_words(value: Any, between: str = " or ") -> str:
    """A fact's value, or what a predicate wants of it."""
    if isinstance(value, list | tuple | frozenset):
        return between.join(sorted(map(str, value))) or "none"
    return str(value)


def _layouts(context: Context) -> Iterator[Context]:
    """The context with the case's first layout and, if the case resumes, with that of the
    resume."""
    yield context
    spec = context.case.spec
    if spec.sharding.resumes:
        spec = msgspec.structs.replace(spec, sharding=spec.sharding.resumed)
        yield replace(context, case=msgspec.structs.replace(context.case, spec=spec))


def may_hold(predicate: Predicate, known: Mapping[str, Fact]) -> bool:
    """False only if a condition on one of the ``known`` facts does not hold."""
    return all(_meets(known[name], wanted) for name, wanted in predicate.items() if name in known)


def _meets(fact: Fact, wanted: Condition) -> bool:
    if fact is None:
        return False
    if isinstance(fact, frozenset):
        values = wanted if isinstance(wanted, list) else [wanted]
        return all(_has(fact, str(one)) for one in values)
    if isinstance(wanted, list):
        return any(_meets(fact, one) for one in wanted)
    if isinstance(wanted, bool) or isinstance(fact, bool):
        return fact is wanted
    if isinstance(wanted, int | float):
        return fact == wanted
    return _fits(fact, wanted)


def _has(members: frozenset[str], wanted: str) -> bool:
    if wanted.startswith("!"):
        return not _has(members, wanted[1:])
    return any(fnmatch.fnmatchcase(member, wanted) for member in members)


def _fits(fact: str | int | float, wanted: str) -> bool:
    if wanted.startswith("!="):
        return not fnmatch.fnmatchcase(str(fact), wanted[2:].strip())
    if isinstance(fact, int | float):
        if wanted in ("odd", "even"):
            return fact % 2 == (wanted == "odd")
        if found := _MULTIPLE.match(wanted):
            return bool(fact % int(found.group(1)))
        if found := _COMPARED.match(wanted):
            return bool(_COMPARE[found.group(1)](fact, float(found.group(2))))
    return fnmatch.fnmatchcase(str(fact), wanted)
