"""Faults that show only under torch.compile: a recompute that is rounded differently, and lost
precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, recompiled
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_PLAIN = ("torch.*",)


@contextmanager
def _backward_drift() -> Iterator[None]:
    """Backward graphs write every value that is read twice to memory; forward graphs fuse it.

    A value that is written to memory is rounded to its declared dtype, one that is fused into its
    readers is not. So backward's recompute is rounded at other places than the forward.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(self: Any, *args: Any) -> Any:
            if not self.is_backward:
                return run(self, *args)
            with config.patch(realize_reads_threshold=1):
                return run(self, *args)

        return lowered

    with recompiled(), attribute_replaced(GraphLowering, "run", make):
        yield


@contextmanager
def _under_compile(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """``change(original, *args)`` is traced by the compiler in place of ``owner.name``; eager code
    calls the original."""

    def make(original: Any) -> Any:
        import torch

        def called(*args: Any, **kwargs: Any) -> Any:
            # in torch 2.11 is_compiling() is False where AOTAutograd traces an autograd function
            if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get():
                return change(original, *args, **kwargs)
            return original(*args, **kwargs)

        return called

    with recompiled(), attribute_replaced(owner, name, make):
        yield


@contextmanager
def _scale_through_bf16() -> Iterator[None]:
    import torch
    from torchao.float8 import float8_utils

    def change(to_scale: Any, *args: Any, **kwargs: Any) -> Any:
        return to_scale(*args, **kwargs).to(torch.bfloat16).to(torch.float32)

    with _under_compile(float8_utils, "amax_to_scale", change):
        yield


@contextmanager
def _narrow_norm() -> Iterator[None]:
    import torch
    import torch.nn.functional as F

    def change(norm: Any, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        narrow = None if weight is None else weight.to(torch.bfloat16)
        return norm(x.to(torch.bfloat16), shape, narrow, eps).to(x.dtype)

    with _under_compile(F, "rms_norm", change):
        yield


PLANTS = [
    Plant(
        "inductor-backward-drift",
        "recompute",
        "Inductor fuses a recomputed chain otherwise than forward did",
        "https://github.com/pytorch/pytorch/issues/150859",
        (*_FLOAT8, "torch.bf16"),
        _backward_drift,
        compiled=True,
    ),
    Plant(
        "compiled-scale-through-bf16",
        "scale",
        "scale rounded through bf16 when compiled",
        "https://github.com/pytorch/pytorch/issues/136181",
        _FLOAT8,
        _scale_through_bf16,
        compiled=True,
    ),
    Plant(
        "compiled-norm-in-bf16",
        "accumulator",
        "compiled RMSNorm computes in bf16",
        "https://github.com/pytorch/torchtitan/issues/497",
        _PLAIN,
        _narrow_norm,
        compiled=True,
    ),
]
