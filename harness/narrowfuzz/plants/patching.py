"""How faults are planted: attributes or table entries are replaced, and restored afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from narrowfuzz.machine import isa as vectors

_INHERITED = object()


@contextmanager
def attribute_replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``make(original)`` inside the context. Modules that are first imported
    inside it and copy the name get the original back as well."""
    # vars, not getattr: getattr unwraps static methods and returns inherited attributes
    stored, loaded = vars(owner).get(name, _INHERITED), set(sys.modules)
    made = make(getattr(owner, name))
    setattr(owner, name, made)
    try:
        yield
    finally:
        if stored is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)
            for module in (sys.modules[new] for new in sys.modules.keys() - loaded):
                if getattr(module, "__dict__", {}).get(name) is made:
                    setattr(module, name, stored)


@contextmanager
def delayed_calls(changes: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """``change(original, *args)`` replaces each named function or method of
    ``narrowfuzz.recipe.delayed``; a key is for example ``DelayedLinear.stage``."""
    from narrowfuzz.recipe import delayed

    def caller(change: Callable[..., Any], original: Any) -> Any:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    with ExitStack() as stack:
        for path, change in changes.items():
            *of, name = path.split(".")
            owner = getattr(delayed, of[0]) if of else delayed
            stack.enter_context(attribute_replaced(owner, name, partial(caller, change)))
        yield


@contextmanager
def te_calls(changes: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """``change(original, *args)`` replaces each named function or method of TransformerEngine
    2.x's Python code; a key is for example ``module.base:TransformerEngineBaseModule.end_forward``.

    From then on this process counts as one that tests TransformerEngine. Raises ValueError if the
    selected version is 1.x.
    """
    from te_on_cpu.environment import DEFAULT, chosen_version, enter

    if chosen_version().startswith("1."):
        raise ValueError(
            f"this fault is planted in the code of TransformerEngine 2.x, not {chosen_version()}; "
            f"run it with --te-version {DEFAULT}"
        )
    enter()

    def caller(owner: Any, name: str, change: Callable[..., Any], original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        # getattr returns class and static methods bound: do not bind them again to instances
        bound = isinstance(vars(owner).get(name), classmethod | staticmethod)
        return staticmethod(call) if bound else call

    with ExitStack() as stack:
        for path, change in changes.items():
            module, _, parts = path.partition(":")
            owner: Any = importlib.import_module(f"transformer_engine.pytorch.{module}")
            *of, name = parts.split(".")
            for part in of:
                owner = getattr(owner, part)
            stack.enter_context(
                attribute_replaced(owner, name, partial(caller, owner, name, change))
            )
        yield


@contextmanager
def float8_mm(change: Callable[[Any, Any, Any, str], Any]) -> Iterator[None]:
    """``change(a, b, result, role)`` replaces the result of every float8 mm of torchao."""
    with float8_products(lambda multiply, a, b, role: change(a, b, multiply(a, b), role)):
        yield


@contextmanager
def float8_products(change: Callable[[Any, Any, Any, str], Any]) -> Iterator[None]:
    """``change(multiply, a, b, role)`` replaces every float8 mm of torchao."""
    import torch
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import GemmInputRole

    op = torch.ops.aten.mm.default
    original = FLOAT8_OPS_TABLE[op]

    def role_of(a: Any, b: Any) -> str:
        if a._gemm_input_role is GemmInputRole.INPUT:
            return "output"
        return "grad_input" if b._gemm_input_role is GemmInputRole.WEIGHT else "grad_weight"

    def multiply(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
        a, b = args
        return change(lambda x, y: original(aten_op, (x, y), kwargs), a, b, role_of(a, b))

    FLOAT8_OPS_TABLE[op] = multiply
    try:
        yield
    finally:
        FLOAT8_OPS_TABLE[op] = original


@contextmanager
def float8_cast(change: Callable[[Any], Any]) -> Iterator[None]:
    """``change(x)`` is applied to the scaled data directly before torchao casts it to FP8."""
    from torchao.float8 import float8_training_tensor

    def make(original: Any) -> Any:
        return lambda x, dtype: original(change(x), dtype)

    with attribute_replaced(float8_training_tensor, "to_fp8_saturated", make):
        yield


@contextmanager
def float8_operand(role: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """``change(x)`` is applied to the high-precision operand of this role before quantisation."""
    from torchao.float8 import float8_linear

    def make(original: Any) -> Any:
        def cast(x: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs["gemm_input_role"].value == role
            return original(change(x) if wanted else x, *args, **kwargs)

        return cast

    with attribute_replaced(float8_linear, "hp_tensor_to_float8_dynamic", make):
        yield


@contextmanager
def float8_casts(change: Callable[..., Any]) -> Iterator[None]:
    """``change(cast, x, *args, **kwargs)`` replaces every dynamic cast of a float8 linear."""
    from torchao.float8 import float8_linear

    def make(cast: Any) -> Any:
        return lambda x, *args, **kwargs: change(cast, x, *args, **kwargs)

    with attribute_replaced(float8_linear, "hp_tensor_to_float8_dynamic", make):
        yield


@contextmanager
def float8_forward(change: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """``change(forward, layer, input)`` replaces Float8Linear's forward."""
    from torchao.float8.float8_linear import Float8Linear

    def make(original: Any) -> Any:
        return lambda self, input: change(original, self, input)

    with attribute_replaced(Float8Linear, "forward", make):
        yield


@contextmanager
def mx_quantiser(change: Callable[..., Any]) -> Iterator[None]:
    """``change(to_mx, data, *args)`` replaces torchao's MX quantiser."""
    from torchao.prototype.mx_formats import mx_tensor

    def make(original: Any) -> Any:
        return lambda data, *args, **kwargs: change(original, data, *args, **kwargs)

    with attribute_replaced(mx_tensor, "to_mx", make):
        yield


@contextmanager
def mx_products(change: Callable[..., Any]) -> Iterator[None]:
    """``change(multiply, a, b, *args)`` replaces every multiply of two MX tensors of torchao."""
    from torchao.prototype.mx_formats import mx_tensor

    def make(original: Any) -> Any:
        return lambda a, b, *args, **kwargs: change(original, a, b, *args, **kwargs)

    with attribute_replaced(mx_tensor, "_addmm_mx_dispatch", make):
        yield


def in_backward() -> bool:
    """True while autograd runs a backward, including recomputation."""
    import torch

    return torch._C._current_graph_task_id() != -1


@contextmanager
def recompiled() -> Iterator[None]:
    """A context that shares no compiled code with the outside, in either direction.

    No cache key of torch.compile covers monkey patches of a library: neither Dynamo's (code objects
    and guards) nor those of the graphs on disk. Kernels are cached by their source and the
    compiler's command, so each is compiled once inside the context.
    """
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    try:
        with (
            fresh_cache(dir=cache_dir()),
            inductor.patch(fx_graph_cache=False),
            functorch.patch(enable_autograd_cache=False),
        ):
            vectors.copy_cache_to(Path(cache_dir()))
            yield
    finally:
        torch._dynamo.reset()
