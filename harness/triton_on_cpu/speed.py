"""Caches for Triton's interpreter, which otherwise describes the type of every value of a kernel
anew and searches the whole language at each call of a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import getmembers
from typing import Any


def install_caches() -> None:
    """Patch Triton until the process ends. No computed value changes."""
    from triton.language import core
    from triton.runtime import interpreter

    core.tuple.type = property(_type_of, _set_type)
    core.tuple.__init__ = _without_type
    core.block_type.__init__ = _named_once(core.block_type.__init__)
    core.tensor.__init__ = _measured_once(core)
    core.dtype.__eq__ = _of_same_name(core.dtype, core.constexpr)
    interpreter._get_np_dtype = _looked_up(interpreter._get_np_dtype)
    interpreter._patch_builtin = _patched(interpreter)
    # the overflow check of integers serves an assertion that is made only with ``debug``, and takes
    # half of the time
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _without_type(self: Any, args: Sequence[Any], type: Any = None) -> None:
    """``tuple.__init__`` that leaves the type to be made when it is read, which is rare."""
    from triton.language import core

    self.values = [*args]
    if type is not None and not isinstance(type, core.tuple_type):
        type = core.tuple_type(type)
    self._type = type


def _type_of(self: Any) -> Any:
    from triton.language import core

    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _set_type(self: Any, type: Any) -> None:
    self._type = type


def _named_once(begin: Callable[..., None]) -> Callable[..., None]:
    """``block_type.__init__`` that checks and names each type only once."""
    seen: dict[Any, Any] = {}

    def begin_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in seen:
            begin(self, element_ty, shape)
            seen[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = seen[key]

    return begin_block


def _measured_once(core: Any) -> Callable[..., None]:
    """``tensor.__init__`` in which tensors of one shape share its description."""
    seen: dict[tuple[int, ...], Any] = {}

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in seen:
            numel = core.constexpr(math.prod(sizes))
            seen[sizes] = numel, core.tuple([core.constexpr(size) for size in sizes])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = seen[sizes]

    return begin_tensor


def _of_same_name(dtype: Any, constexpr: Any) -> Callable[[Any, Any], bool]:
    """Equality of scalar types, by name only."""

    def same(self: Any, other: Any) -> bool:
        other = other.value if isinstance(other, constexpr) else other
        return isinstance(other, dtype) and self.name == other.name

    return same


def _looked_up(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_get_np_dtype``, numpy's dtype for a type of Triton, with a cache."""
    seen: dict[str, Any] = {}

    def answer(of: Any) -> Any:
        name = getattr(of, "element_ty", of).name if of.is_block() else of.name
        if name not in seen:
            seen[name] = ask(of)
        return seen[name]

    return answer


def _patched(interpreter: Any) -> Callable[[Any, Any, Any], None]:
    """A function that replaces the language's builtins in a module or class. Their names are looked
    up only once, here: it must be called before the first launch, when none is replaced yet."""
    tl = interpreter.tl
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    names = {
        place: [name for name, member in getmembers(place) if tl.core.is_builtin(member)]
        for place in places
    }

    def patch(place: Any, builder: Any, scope: Any) -> None:
        for name in names[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, builder, scope)

    return patch
