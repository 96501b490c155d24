"""What kernels are handed, in eager runs and inside what a compiler makes, as live tensors.

A dispatch mode entered inside a compiled artefact's call sees the kernels that are called with
their operands, and the generated code stays as it was. (A mode around torch.compile would change
what is traced.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from narrowfuzz.play.layers import in_backward


@dataclass
class Product:
    """One matrix multiply: a [m, k] times b [n, k] transposed; scales are inverse, None for plain
    values."""

    phase: str
    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    bias: torch.Tensor | None
    result: torch.Tensor

    def operands(self) -> list[Any]:
        """Both operands and their scales, as a recipe's tap emits them."""
        return [self.a, self.scale_a, self.b, self.scale_b]


@dataclass
class Attended:
    """One attention kernel: ``out`` and ``lse`` as the forward returned them or as the backward got
    them back."""

    phase: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    causal: bool
    scale: float


#: Scaled multiplies and the names of their positional arguments.
SCALED = {
    "_scaled_mm": ("a", "b", "scale_a", "scale_b", "bias"),
    "_scaled_mm_v2": (
        "a", "b", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias",
    ),
}  # fmt: skip
_ATTENTION = "_scaled_dot_product_flash_attention"


class AttentionWatch(TorchDispatchMode):
    """Records the arguments of attention kernels, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[Attended] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(a) for a in args if isinstance(a, torch.Tensor)):
            return NotImplemented  # the library's own tensor comes first
        result = func(*args, **(kwargs or {}))
        self.note(func.overloadpacket.__name__, args, kwargs or {}, result)
        return result

    def note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """One kernel that was called."""
        if not name.startswith(_ATTENTION):
            return
        if name.endswith("_backward"):
            # the CPU operator has no block of sequence lengths before its flags
            causal = bool(args[7] if name.endswith("for_cpu_backward") else args[11])
            phase, qkv, kept = "backward", args[1:4], args[4:6]
        else:
            causal = bool(args[4] if len(args) > 4 else kwargs.get("is_causal", False))
            phase, qkv, kept = "forward", args[:3], result[:2]
        scale = float(kwargs.get("scale") or qkv[0].shape[-1] ** -0.5)
        q, k, v, out, lse = (copied(t) for t in (*qkv, *kept))
        self.attention.append(Attended(phase, q, k, v, out, lse, causal, scale))


class KernelWatch(AttentionWatch):
    """Records every matrix multiply as well."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        # operands first: compiled code may let the result overwrite them, and reuses its buffers as
        # soon as the GEMM has read them
        seen = operands(name, args, kwargs) if func.namespace == "aten" else None
        held: Any = [None if t is None else copied(t) for t in seen or ()]
        result = func(*args, **kwargs)
        if seen is not None and result.is_floating_point():
            phase = "backward" if in_backward() else "forward"
            a, b, scale_a, scale_b, bias = held
            self.products.append(Product(phase, a, b, scale_a, scale_b, bias, copied(result)))
        self.note(name, args, kwargs, result)
        return result


def operands(name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any, Any] | None:
    """a, b, their inverse scales and the bias of a multiply; None for another kernel."""
    if name in SCALED:
        named = dict(zip(SCALED[name], args, strict=False)) | kwargs
        # version 2 takes lists; two-level formats, which pass two scales, do not run compiled yet
        scales = [named[role] for role in ("scale_a", "scale_b")]
        scale_a, scale_b = (s[0] if isinstance(s, list) else s for s in scales)
        return named["a"], named["b"].t(), scale_a, scale_b.t(), named.get("bias")
    if name in ("mm", "addmm") and not {"alpha", "beta"} & set(kwargs):
        a, b = args[:2] if name == "mm" else args[1:3]
        if a.is_floating_point():
            return a, b.t(), None, None, args[0] if name == "addmm" else None
    return None


def copied(t: Any) -> Any:
    """A tensor's values now. Looking is not the model's doing: selective checkpointing counts
    operators, and would miss ours when it recomputes."""
    with unseen():
        return t.detach().clone()


def unseen() -> AbstractContextManager[Any]:
    """Operators in here are seen by no dispatch mode."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _disable_current_modes()


@contextmanager
def inside(watch: TorchDispatchMode, *, compiler: str) -> Iterator[None]:
    """Whatever the compiler makes until the context ends runs inside ``watch``."""

    def run(made: Any, inputs: Any) -> Any:
        with watch:
            return made(inputs)

    if compiler == "inductor":
        from torch._inductor.output_code import CompiledFxGraph

        place, name, plain = CompiledFxGraph, "__call__", CompiledFxGraph.__call__
        make: Any = lambda graph, inputs: run(partial(plain, graph), inputs)  # noqa: E731
    else:
        from torch._dynamo.backends import debugging

        place, name, plain = debugging, "boxed_nop", debugging.boxed_nop

        def make(graph: Any, inputs: Any) -> Any:
            call = partial(run, plain(graph, inputs))
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

    setattr(place, name, make)
    try:
        yield
    finally:
        setattr(place, name, plain)


@cache
def let_rng_pass() -> None:
    """Under a mode, torch's operators around recomputed random ones need a rule: run inside it."""
    from torch._prims import rng_prims

    @rng_prims.run_and_save_rng_state.py_impl(KernelWatch)
    def save(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return torch.get_rng_state(), op(*args, **kwargs)

    @rng_prims.run_with_rng_state.py_impl(KernelWatch)
    def restore(mode: Any, state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        with mode:
            result = op(*args, **kwargs)
        torch.set_rng_state(now)
        return result
