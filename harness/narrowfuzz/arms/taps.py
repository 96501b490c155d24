"""What watches (``play/watches.py``) saw, as plain data, and the watch inside every artefact that
a compiler makes.

In eager, linears have the recipe's own tap, and attention and other operators ``OperatorWatch``
(``operators.py``), which ``program.py`` enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from narrowfuzz.arms.operators import GraphWatch
from narrowfuzz.arms.tensors import DTYPE_NAME, fp8_codes, fp32_array
from narrowfuzz.machine import isa as vectors
from narrowfuzz.numerics.two_level import TWO_LEVEL
from narrowfuzz.play.watches import Attended, Product, let_rng_pass
from narrowfuzz.trace.trace import AttentionCall, Multiplied, Seen

_FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
#: Innermost last: the taps whose programs are running now.
_recording: list[CompiledTap] = []


def multiplied_of(products: Iterable[Product]) -> tuple[Multiplied, ...]:
    """Every multiply that was seen whose result has a dtype that rules know."""
    return tuple(_multiplied(p) for p in products if p.result.dtype in DTYPE_NAME)


def _multiplied(product: Product) -> Multiplied:
    bias = None if product.bias is None else fp32_array(product.bias)
    a, b = _seen(product.a, product.scale_a), _seen(product.b, product.scale_b)
    dtype = DTYPE_NAME[product.result.dtype]
    return Multiplied(product.phase, a, b, fp32_array(product.result), dtype, bias)  # type: ignore[arg-type]


def _seen(operand: torch.Tensor, inverse: torch.Tensor | None) -> Seen:
    if inverse is None:
        return Seen(values=fp32_array(operand))
    assert operand.dtype in _FP8, operand.dtype
    return Seen(
        fp8_codes(operand), fp32_array(inverse), scale_is_inverse=True, format=_FP8[operand.dtype]
    )


def seen_of(gemm: tuple[Any, ...], *, inverse: bool) -> tuple[Seen, Seen]:
    """Both operands of a GEMM as a recipe's tap emits it; its scales may be ``inverse``."""
    a, a_scale, b, b_scale, a_amax, b_amax = gemm
    return _tapped(a, a_scale, a_amax, inverse), _tapped(b, b_scale, b_amax, inverse)


def _tapped(codes: torch.Tensor, scale: Any, amax: Any, inverse: bool) -> Seen:
    """E8M0 scales as their bytes, a pair of block scales and amax as one record."""
    held: Any
    if isinstance(scale, tuple):
        blocks = fp8_codes(scale[0])
        held = np.empty(blocks.shape, dtype=TWO_LEVEL)
        held["block"], held["amax"] = blocks, fp32_array(scale[1]).reshape(())
    else:
        held = fp8_codes(scale) if scale.element_size() == 1 else fp32_array(scale)
    largest = None if amax is None else fp32_array(amax)
    return Seen(fp8_codes(codes), held, scale_is_inverse=inverse, amax=largest)


def attention_of(attention: Iterable[Attended]) -> tuple[AttentionCall, ...]:
    """Every attention kernel that was seen."""
    return tuple(_attention(one) for one in attention)


def _attention(one: Attended) -> AttentionCall:
    q, k, v, out, lse = (fp32_array(t) for t in (one.q, one.k, one.v, one.out, one.lse))
    added = None if one.added is None else fp32_array(one.added)
    return AttentionCall(
        one.phase,  # type: ignore[arg-type]
        q,
        k,
        v,
        out,
        lse,
        added,
        one.scale,
        DTYPE_NAME[one.q.dtype],
        one.module,
        one.unknown,
    )


class CompiledTap:
    """Switch and store of one program's compiled artefacts."""

    def __init__(self) -> None:
        self.watch = GraphWatch()
        self._on = False
        self.calls = 0

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        self.watch, self._on, self.calls = GraphWatch(), on, 0
        _recording.append(self)
        try:
            yield
        finally:
            _recording.pop()
            self._on = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context to run a compiled artefact in."""
        self.calls += 1
        with ExitStack() as stack:
            if self._on:
                stack.enter_context(self.watch)
            yield


def tapped_backend(compiler: str, tap: CompiledTap, memory_budget: float) -> Any:
    """The torch.compile backend of that name, with ``tap`` inside every artefact it makes."""
    from torch._functorch import config as functorch_config

    let_rng_pass(GraphWatch)
    if compiler == "inductor":
        _watch_inductor()
        vectors.ask()

    def backend(graph: Any, example_inputs: Any, *, options: Any = None) -> Any:
        # a budget of 1 is the default: then what a user has set holds
        limited = {"activation_memory_budget": memory_budget} if memory_budget < 1 else {}
        with functorch_config.patch(limited):
            if compiler == "inductor":
                from torch._inductor.compile_fx import compile_fx

                return compile_fx(graph, example_inputs, config_patches=dict(options or {}))
            return _eager_graphs(compiler, tap)(graph, example_inputs)

    return backend


def _eager_graphs(compiler: str, tap: CompiledTap) -> Any:
    """AOT autograd with graphs that run eagerly, as torch's own backends of these names do."""
    from functorch.compile import make_boxed_func

    def run_inside(graph: Any, example_inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            with tap.inside():
                return graph(*args)

        return make_boxed_func(call)

    return _GRAPHS[compiler](run_inside)


def _traced(run: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    return partial(aot_eager, fw_compiler=run, bw_compiler=run)


def _partitioned(run: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import select_decomp_table

    return aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


#: By the compiler's name, given what runs a graph: what makes forward and backward graphs.
_GRAPHS: dict[str, Callable[[Any], Any]] = {
    "aot_eager": _traced,
    "aot_eager_decomp_partition": _partitioned,
}


def _watch_inductor() -> None:
    """Let CompiledFxGraph.__call__ run inside the tap that is recording, if any. Idempotent."""
    from torch._inductor.output_code import CompiledFxGraph

    plain: Callable[..., Any] = CompiledFxGraph.__call__
    if getattr(plain, "_narrowfuzz", False):
        return

    def call(self: Any, inputs: Any) -> Any:
        tap = _recording[-1] if _recording else None
        if tap is None:
            return plain(self, inputs)
        with tap.inside():
            return plain(self, inputs)

    call._narrowfuzz = True  # type: ignore[attr-defined]
    CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
