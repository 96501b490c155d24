"""Triton's interpreter describes every number of a kernel anew, and looks through the whole
language at each call of a function: what these find is found once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import getmembers
from typing import Any


def hasten() -> None:
    """Patch Triton for the rest of the process. Nothing that it computes becomes another."""
    from triton.language import core
    from triton.runtime import interpreter

    core.tuple.type = property(_type_of, _set_type)
    core.tuple.__init__ = _without_type
    core.block_type.__init__ = _named_once(core.block_type.__init__)
    core.tensor.__init__ = _measured_once(core)
    core.dtype.__eq__ = _of_same_name(core.dtype, core.constexpr)
    interpreter._get_np_dtype = _looked_up(interpreter._get_np_dtype)
    interpreter._patch_builtin = _patched(interpreter)
    # whether whole numbers overflow is computed for an assertion that only ``debug`` makes: half of
    # the time, for nothing
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _without_type(self: Any, args: Sequence[Any], type: Any = None) -> None:
    """Of a tuple: its type is made when someone asks for it, which hardly anyone does."""
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
    """Each type of a block is checked and named once."""
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
    """Tensors of one shape share what says it."""
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
    """Are two types of a number the same?"""

    def same(self: Any, other: Any) -> bool:
        other = other.value if isinstance(other, constexpr) else other
        return isinstance(other, dtype) and self.name == other.name

    return same


def _looked_up(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's dtype of a type of Triton's."""
    seen: dict[str, Any] = {}

    def answer(of: Any) -> Any:
        name = getattr(of, "element_ty", of).name if of.is_block() else of.name
        if name not in seen:
            seen[name] = ask(of)
        return seen[name]

    return answer


def _patched(interpreter: Any) -> Callable[[Any, Any, Any], None]:
    """Replaces what a module or a class has of the language, whose names are looked up once: before
    the first launch nothing is replaced."""
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
