"""Facts about an operator that are known before it runs, from its schema and its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

#: skip: not checked, as its output is a view or no numbers. unwritten: it returns memory that is
#: not written yet. plain: its results are checked. collective: several ranks take part. wait: the
#: result of a functional collective is complete after it. scaler: a loss scaler's check for
#: infinities.
Kind = Literal["skip", "unwritten", "plain", "collective", "wait", "scaler"]

#: Tensor classes without numbers, used while shapes are inferred or a graph is made.
NO_NUMBERS = (FakeTensor, FunctionalTensor)

_UNWRITTEN = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
#: Operators that write their first operand without reading it.
_OVERWRITES = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "_foreach_copy_",
    "_foreach_zero_",
    "trunc_normal_",
    "geometric_",
    "log_normal_",
    "cauchy_",
}
#: Views whose schema does not declare them as views, operators without results to check, and FSDP's
#: copy into a buffer whose rest is not written yet.
_SKIPPED = {
    "_unsafe_view",
    "_reshape_alias",
    "set_",
    "resize_",
    "_local_scalar_dense",
    "all_gather_copy_in",
    "record_stream",
}
_COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's name, its kind, and which of its arguments it writes."""

    name: str
    kind: Kind
    #: (position, name) of the arguments that it writes.
    writes: tuple[tuple[int, str], ...] = ()
    #: True if it writes its arguments without reading them.
    overwrites: bool = False
    #: True if it reads the arguments that it writes.
    rewrites: bool = False
    random: bool = False
    #: The names of all its arguments, in order.
    names: tuple[str, ...] = ()


#: Cache: id of an operator -> the operator itself (so that the id stays valid) and its facts. The
#: key is the id because an ``OpOverload``'s hash is slow, being written in Python.
_KNOWN: dict[int, tuple[Any, Operator]] = {}


def operator(func: Any) -> Operator:
    """The facts about an ``OpOverload`` or a higher-order operator."""
    known = _KNOWN.get(id(func))
    if known is None:
        known = _KNOWN[id(func)] = (func, _facts(func))
    return known[1]


def _facts(func: Any) -> Operator:
    if isinstance(func, HigherOrderOperator):  # flex_attention: it has no schema
        return Operator(func.name(), "plain")
    schema = func._schema
    namespace, _, rest = schema.name.partition("::")
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    out = any(argument.is_out for argument in schema.arguments)
    overwrites = out or rest in _OVERWRITES or rest == "split_with_sizes_copy"
    kind = _kind(namespace, rest, schema, writes)
    return Operator(
        name=str(func).removesuffix(".default"),
        kind=kind,
        writes=writes,
        overwrites=overwrites,
        rewrites=bool(writes) and not overwrites and kind == "plain",
        random=torch.Tag.nondeterministic_seeded in func.tags,
        names=tuple(argument.name for argument in schema.arguments),
    )


def _kind(namespace: str, name: str, schema: Any, writes: tuple[tuple[int, str], ...]) -> Kind:
    if namespace in _COLLECTIVES:
        if name == "wait_tensor":
            return "wait"
        return "skip" if name.startswith("_wrap") or name == "barrier" else "collective"
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return "scaler"
    if name in _UNWRITTEN:
        return "unwritten"
    if name in _SKIPPED or namespace in ("prim", "profiler", "prims"):
        return "skip"
    # a list of views (split, chunk) aliases its operand just as a single view does
    views = [item.alias_info for item in schema.returns if item.alias_info is not None]
    is_view = bool(views) and not writes and len(views) == len(schema.returns)
    return "skip" if is_view else "plain"


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors(item)]


def read_by(what: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among its arguments, without those that it overwrites."""
    if not what.overwrites:
        return tensors((args, kwargs))
    positions, names = zip(*what.writes, strict=True)
    here = [value for position, value in enumerate(args) if position not in positions]
    return tensors([here, {name: v for name, v in kwargs.items() if name not in names}])


def has_infinite_scalar(args: Any, kwargs: Any) -> bool:
    """True if a scalar argument is NaN, infinite or at least 2**64 in magnitude, as the -inf of a
    mask: the operator is then meant to make such values."""
    return any(_extraordinary(item) for item in (*args, *kwargs.values()))


def _extraordinary(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return any(map(_extraordinary, item))
    return isinstance(item, float) and not abs(item) < 2.0**64
