"""A snapshot of a model as plain data without tensors: everything that a conversion could change.

Shared objects are recognised by the first name under which they are registered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    *STATE_DICT_HOOKS,
)
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SIMPLE = (bool, int, float, str, type(None))
_INTERNAL = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class ModuleRecord:
    """A module under one of its registered names."""

    #: The first name under which the same object is registered; this one, unless it is shared.
    first: str
    type: str
    #: ``module.qualname`` of its forward, with "instance " before one that is set on the object.
    forward: str
    training: bool
    #: Kind of hook -> number of hooks.
    hooks: dict[str, int]
    #: Plain attributes set on the object -> repr of a simple value, else its type.
    attributes: dict[str, str]


@dataclass(frozen=True)
class TensorRecord:
    """A parameter or buffer under one of its registered names."""

    first: str
    type: str
    #: "" while a lazy module has not seen its input.
    shape: str
    dtype: str
    device: str
    requires_grad: bool
    #: Number of gradient hooks on the tensor itself.
    hooks: int
    #: Python attributes set on the tensor, as parallel and optimizer code does.
    attributes: frozenset[str]


@dataclass(frozen=True)
class Snapshot:
    """A model at one moment. Mappings are by name, in the model's own order."""

    modules: dict[str, ModuleRecord]
    parameters: dict[str, TensorRecord]
    buffers: dict[str, TensorRecord]
    #: Keys of the state_dict; None where a lazy parameter prevents making one.
    state_dict: tuple[str, ...] | None
    #: Names of the modules that satisfy the predicate ``choose``.
    chosen: frozenset[str]


def snapshot(model: nn.Module, choose: Callable[[Any, str], bool]) -> Snapshot:
    """The snapshot of ``model``; runs its state_dict hooks, as any checkpoint would."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lazy = any(is_lazy(p) for p in parameters.values())
    return Snapshot(
        modules=_named(modules, _module),
        parameters=_named(parameters, _tensor),
        buffers=_named(dict(model.named_buffers(remove_duplicate=False)), _tensor),
        state_dict=None if lazy else tuple(model.state_dict()),
        chosen=frozenset(name for name, module in modules.items() if choose(module, name)),
    )


def _named(objects: dict[str, Any], record: Callable[[Any, str], Any]) -> dict[str, Any]:
    first: dict[int, str] = {}
    return {
        name: record(item, first.setdefault(id(item), name))  # all are alive: ids are unique
        for name, item in objects.items()
    }


def _module(module: nn.Module, first: str) -> ModuleRecord:
    own = vars(module).get("forward")
    called = own if own is not None else type(module).forward
    return ModuleRecord(
        first=first,
        type=_qualified(type(module)),
        forward=("instance " if own is not None else "") + _qualified(called),
        training=module.training,
        hooks={kind: len(getattr(module, kind, ())) for kind in HOOKS},
        attributes={
            name: repr(value) if isinstance(value, _SIMPLE) else type(value).__name__
            for name, value in vars(module).items()
            if name not in _INTERNAL and name != "forward"
        },
    )


def _tensor(tensor: Any, first: str) -> TensorRecord:
    return TensorRecord(
        first=first,
        type=_qualified(type(tensor)),
        shape="" if is_lazy(tensor) else str(tuple(tensor.shape)),
        dtype=str(tensor.dtype),
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
        hooks=sum(len(getattr(tensor, kind, None) or ()) for kind in _PARAMETER_HOOKS),
        attributes=frozenset(vars(tensor)),
    )


def _qualified(item: Any) -> str:
    where = getattr(item, "__module__", "?")
    return f"{where}.{getattr(item, '__qualname__', type(item).__qualname__)}"
