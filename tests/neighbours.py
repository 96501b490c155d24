"""The neighbours of ledger entries, one a line of neighbours.json: a case that an entry explains,
and a failure beside it that is none of the entry's business.

The failure is a planted fault, an error of the same type raised in the same function of the library
for another reason (``ERROR in module:function``), so that the fingerprint is the entry's and only
its conditions tell the two apart, or one of ``BY_NAME``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

from narrowfuzz.case.spec import SCHEMA, Case, load_case
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.play.processes import entered_by_ranks
from torch._inductor.exc import CppCompileError

Plantable = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Neighbour:
    """A case of an entry, and a failure that is none of the entry's business."""

    case: Case
    beside: Plantable

    @property
    def compiled(self) -> bool:
        """Does one process compile it, which takes minutes?"""
        return self.case.spec.compile != "none" and not self.case.spec.sharded


@contextmanager
def raising(where: str, error: str, says: str, always: bool) -> Iterator[None]:
    """``module:function``, or ``module:Class.method``, raises ``error``, named as it is and seen in
    the library's file: always, or where it raises that by itself."""
    module, _, path = where.partition(":")
    home = importlib.import_module(module)
    *of, name = path.split(".")
    owner: Any = getattr(home, of[0]) if of else home
    original = getattr(owner, name)
    source = f"def {name}(*args, **kwargs):\n    " + (
        f"raise {error}({says!r})"
        if always
        else "try:\n        return original(*args, **kwargs)\n"
        f"    except {error}:\n        raise {error}({says!r}) from None"
    )
    errors = {
        "UnpicklingError": UnpicklingError,
        "CppCompileError": partial(CppCompileError, ["g++"]),
    }
    scope = {**vars(home), **errors, "original": original}
    exec(compile(source, str(home.__file__), "exec"), scope)
    bound = hasattr(original, "__self__")  # a class method, which asks for no other self
    raises: Any = staticmethod(scope[name]) if bound else scope[name]
    # a function is held by each module that imported it
    held = [] if of else [m for m in list(sys.modules.values()) if m is not home]
    others = [m for m in held if getattr(m, "__dict__", {}).get(name) is original]
    with ExitStack() as stack:
        for holder in (owner, *others):
            stack.enter_context(attribute_replaced(holder, name, lambda _: raises))
        yield


@contextmanager
def on_ranks(plant: Plantable) -> Iterator[None]:
    """The same in the processes of ranks, which run what is compiled."""
    with entered_by_ranks(plant), plant():
        yield


@contextmanager
def sharded_scale_stays() -> Iterator[None]:
    """The scale of a ShardedGradScaler never changes."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def forget(scaler: Any, new_scale: Any = None) -> None:
        scaler._per_optimizer_states.clear()

    with patch.object(ShardedGradScaler, "update", forget):
        yield


@contextmanager
def cast_sums_doubled() -> Iterator[None]:
    """A sum of codes, as the bias gradient behind a cast is one, comes out twice as large."""
    import torch
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE as table

    op = torch.ops.aten.sum.dim_IntList
    original = table[op]
    table[op] = lambda *args, **kwargs: 2 * original(*args, **kwargs)
    try:
        yield
    finally:
        table[op] = original


@contextmanager
def clone_negates() -> Iterator[None]:
    """A moment in FP8 has a clone, which calls what it has not."""
    import torch
    from torchao.optim.subclass_fp8 import OptimStateFp8

    table, clone = OptimStateFp8._ATEN_OP_TABLE[OptimStateFp8], torch.ops.aten.clone.default
    table[clone] = lambda func, types, args, kwargs: torch.ops.aten.neg.default(args[0])
    try:
        yield
    finally:
        del table[clone]


def gradients_of_biases_halved() -> AbstractContextManager[object]:
    """What a rank brings of them to FSDP's sum is halved before it is added."""

    def make(copy_in: Any) -> Any:
        return lambda gradients, *args: copy_in(
            [gradient / 2 if gradient.ndim == 1 else gradient for gradient in gradients], *args
        )

    home = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    return attribute_replaced(home, "foreach_reduce_scatter_copy_in", make)


def refused_by_stride() -> AbstractContextManager[object]:
    """Inductor's check of strides refuses every product, in words of its own."""
    import torch
    from torch._inductor.kernel import mm

    def refuse(*_: object) -> None:
        torch._check(False, lambda: "planted")

    return attribute_replaced(mm, "check_supported_striding", lambda _: refuse)


def compiler_refuses() -> AbstractContextManager[object]:
    """The C++ compiler refuses whatever Inductor hands it, in words of its own."""
    return raising(
        "torch._inductor.cpp_builder:_run_compile_cmd", "CppCompileError", "planted", True
    )


def flex_scores_doubled() -> AbstractContextManager[object]:
    """Compiled FlexAttention multiplies its scores by twice the scale."""
    from torch._inductor.kernel.flex import flex_attention

    def make(lower: Any) -> Any:
        return lambda q, k, v, graph, mask, scale, *more: lower(
            q, k, v, graph, mask, 2 * scale, *more
        )

    return attribute_replaced(flex_attention, "lower_cpu", make)


def compiled_exponentials_halved() -> AbstractContextManager[object]:
    """A vectorised exponential is half of what it should be."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    def make(exp: Any) -> Any:
        return staticmethod(lambda x: f"({exp(x)} * decltype({x})(0.5f))")

    return attribute_replaced(CppVecOverrides, "exp", make)


def added_rows_doubled() -> AbstractContextManager[object]:
    """A compiled index_add adds each row twice."""
    from torch._inductor import decomposition

    def make(index_add: Any) -> Any:
        return lambda x, dim, index, rows, **how: index_add(x, dim, index, 2 * rows, **how)

    return attribute_replaced(decomposition, "_index_add", make)


@contextmanager
def items_unresolved() -> Iterator[None]:
    """Inductor's lowering of an item lacks a function that it calls."""
    from torch._inductor import lowering

    with patch.object(lowering, "resolve_unbacked_bindings"):
        del lowering.resolve_unbacked_bindings
        yield


#: Failures that are neither a planted fault nor an error in a function.
BY_NAME: dict[str, Plantable] = {
    "added rows doubled": added_rows_doubled,
    "cast sums doubled": cast_sums_doubled,
    "clone negates": clone_negates,
    "compiled exponentials halved": compiled_exponentials_halved,
    "compiler refuses": compiler_refuses,
    "flex scores doubled": flex_scores_doubled,
    "gradients of biases halved": gradients_of_biases_halved,
    "items unresolved": items_unresolved,
    "refused by stride": refused_by_stride,
    "sharded scale stays": sharded_scale_stays,
}


def failure(name: str, says: str = "planted", always: bool = True) -> Plantable:
    """What a row names as its failure."""
    if name in BY_NAME:
        return BY_NAME[name]
    error, _, where = name.partition(" in ")
    if where:
        return lambda: raising(where, error, says, always)
    return builtin_faults()[name].plant


def _neighbour(row: dict[str, Any]) -> Neighbour:
    case = {"spec": row["spec"], "data": row.get("data", {}), "schema": SCHEMA}
    plant = failure(row["beside"], row.get("says", "planted"))
    beside = (lambda: on_ranks(plant)) if row.get("on_ranks") else plant
    return Neighbour(load_case(json.dumps(case).encode()), beside)


#: Entry, and after a comma what else of it a case shows -> its neighbour.
NEIGHBOURS = {
    row["name"]: _neighbour(row)
    for row in json.loads(Path(__file__).with_suffix(".json").read_text())
}
