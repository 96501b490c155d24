"""What of a user's model the known issues may affect: its modules, parameters and calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from narrowfuzz.arms.model_names import other_names, tied_names
from narrowfuzz.arms.model_snapshot import snapshot
from narrowfuzz.models.model import (
    COMPUTED,
    FINITE_MASK,
    HOOKED,
    SEVERAL_NAMES,
    TIED,
    WRITTEN_PRODUCT,
)
from narrowfuzz.operators import BY_KERNEL, BY_NAME
from narrowfuzz.own_models.calls import observe_call
from narrowfuzz.play.own import tensors_in
from narrowfuzz.play.watches import by_name, mask_of

#: Kernels that copy masks, and that make one of a boolean mask.
_COPIES = ("aten::clone", "aten::repeat", "aten::_to_copy")
_FILLS = ("aten::where", "aten::masked_fill", "aten::masked_fill_")
#: Kernels that linears, and ``x @ weight``, end with; and all that multiply matrices.
_OF_LINEARS = ("aten::mm", "aten::addmm")
_PRODUCTS = (*_OF_LINEARS, "aten::bmm", "aten::mv")


class Products(TorchDispatchMode):
    """Calls a function before each product of matrices."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in _PRODUCTS:
            self.call()
        return func(*args, **(kwargs or {}))


class _Affected(TorchDispatchMode):
    """Records the deviations that may affect the kernels that run inside it, attention with a
    finite mask, and products that a forward writes to in place."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        #: By storage, the masks of zeros that stand for boolean ones, which exclude nothing here.
        self.open: dict[int, torch.Tensor] = {}
        #: The storages of products of linears.
        self.products: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.name()
        if operator := BY_KERNEL.get(name):
            given, returned = tensors_in([args, kwargs]), tensors_in(made)
            self.names |= {d.name for d in operator.deviations if d.may_affect(given, returned)}
        kernel = name.partition(".")[0]
        copied = kernel in _COPIES and _storage(args[0]) in self.open
        if (copied or (kernel in _FILLS and _excludes(args))) and not made.any():
            self.open[_storage(made)] = made
        if kernel in _OF_LINEARS:
            self.products.add(StorageWeakRef(made.untyped_storage()))
        elif torch._C._current_graph_task_id() == -1 and self._writes_to_product(
            func, by_name(func, args, kwargs)
        ):
            self.names.add(WRITTEN_PRODUCT)
        if "scaled_dot_product" in name:
            mask = mask_of(by_name(func, args, kwargs))
            if mask is not None and _may_add(mask, is_open=_storage(mask) in self.open):
                self.names.add(FINITE_MASK)
        return made

    def _writes_to_product(self, func: Any, named: Mapping[str, Any]) -> bool:
        arguments = [
            a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        written = [named[name] for name in arguments if name in named]
        return any(
            StorageWeakRef(x.untyped_storage()) in self.products
            for x in tensors_in(written)
            if x.layout == torch.strided
        )


def _storage(x: torch.Tensor) -> int:
    """Identifies the storage of a tensor; 0 where it has none."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else 0


def _excludes(args: Sequence[Any]) -> bool:
    """Is minus infinity one of these arguments?"""
    scalars = (x.item() if isinstance(x, torch.Tensor) and not x.ndim else x for x in args)
    return any(isinstance(x, float) and x == -inf for x in scalars)


def _may_add(mask: torch.Tensor, *, is_open: bool) -> bool:
    """May a mask add finite numbers to scores, where a boolean mask leaves them or excludes them?
    One of zeros may for other batches, unless it ``is_open``: it is often the padding times a large
    number."""
    excluded = mask == -inf
    leaves = not mask.masked_fill(excluded, 0.0).any()
    return mask.dtype != torch.bool and not (leaves and (is_open or bool(excluded.any())))


def affected(
    model: nn.Module, call: Callable[[], Any], operators: Collection[str], *, autocast: bool
) -> frozenset[str] | None:
    """The names of the deviations that may affect a forward and backward of the model, of those of
    the ``operators`` that it calls, and the CALLS that it makes. ``autocast``: it may also run
    under autocast. None if it raises there, or in backward."""
    composed = (BY_NAME[name] for name in operators if BY_NAME[name].functions)
    kernels = _Affected()
    kernels.names |= {deviation.name for one in composed for deviation in one.deviations}
    try:
        for narrowed in (False, True)[: 1 + autocast]:
            with kernels:
                with torch.autocast("cpu", torch.bfloat16) if narrowed else nullcontext():
                    floats = observe_call(model, call).floats
                ends = [t for t in floats if t.requires_grad]
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception:  # noqa: BLE001 - the judge runs it again, and what it raises is a finding
        return None
    return frozenset(kernels.names)


def parts_of(model: nn.Module) -> frozenset[str]:
    """Names of the classes of its modules and of their bases; ``subclass of Linear`` for a class
    that is not torch's own and is derived from torch's of that name; and those of ``PARTS`` that it
    has."""
    parameters = snapshot(model, lambda module, name: False).parameters.values()
    special = {
        SEVERAL_NAMES: bool(other_names(model)),
        TIED: bool(tied_names(model)),
        HOOKED: any(p.hooks or p.attributes for p in parameters),
        COMPUTED: any(
            has_computed_weight(one) for one in model.modules() if isinstance(one, nn.Linear)
        ),
    }
    every = {base for part in model.modules() for base in type(part).__mro__}
    derived = {base for one in every if not _of_torch(one) for base in one.__mro__[1:]}
    return (
        frozenset(base.__name__ for base in every)
        | {name for name, has in special.items() if has}
        | {f"subclass of {base.__name__}" for base in derived if _of_torch(base)}
    )


def has_computed_weight(linear: nn.Linear) -> bool:
    """Is its weight no parameter, but computed from some: by a parametrization, or by a hook before
    each forward, as that of ``torch.nn.utils.weight_norm``?"""
    return "weight" not in linear._parameters and "weight" not in linear._buffers


def _of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")
