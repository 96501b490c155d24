"""Faults of the compiler: in lowerings, decompositions, fusions, the partitioner and caches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from narrowfuzz.plants.patching import attribute_replaced, recompiled
from narrowfuzz.plants.plant import Plant

_PLAIN = ("torch.fp32", "torch.bf16")
#: With a scale per row the fault would not show: every result of a row with NaN is NaN anyway.
_TENSORWISE = ("torchao.float8.tensorwise",)
#: A floating-point constant in generated C++ code. Sizes have no such cast and do not match.
_CONSTANT = re.compile(r"static_cast<(?:float|double)>\([^()]*\)")


@contextmanager
def _lowered(names: tuple[str, ...], change: Callable[..., Any]) -> Iterator[None]:
    """``change(original, *args)`` replaces Inductor's lowering of the operators of these names."""
    import torch
    from torch._inductor import lowering

    def caller(original: Any) -> Any:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    packets = [getattr(torch.ops.aten, name) for name in names]
    ops = [op for packet in packets for op in (packet, packet.default)]
    table = lowering.lowerings
    with recompiled(), patch.dict(table, {o: caller(table[o]) for o in ops if o in table}):
        yield


def _without_nan(amax: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The maximum ignores NaN. It takes NaN for 0, as all operands here are magnitudes."""
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.virtualized import ops

    def number(value: Any) -> Any:
        return ops.where(ops.isnan(value), ops.constant(0.0, x.get_dtype()), value)

    return amax(make_pointwise(number)(x), *args, **kwargs)


def _bias_twice(addmm: Any, bias: Any, *args: Any, beta: float = 1, **kwargs: Any) -> Any:
    """The epilogue adds the bias that the kernel has already added."""
    return addmm(bias, *args, beta=2 * beta, **kwargs)


@contextmanager
def _approximate_rsqrt() -> Iterator[None]:
    """rsqrt has a relative error of 2^-12, like the processor's estimate instruction."""
    from torch._inductor.codegen import cpp

    error = 1.0 + 2.0**-12

    # wraps: the vectorised overrides look up the scalar ones by name
    def vector(original: Any) -> Any:
        return staticmethod(wraps(original)(lambda x: f"({original(x)} * decltype({x})({error}f))"))

    def scalar(original: Any) -> Any:
        return staticmethod(wraps(original)(lambda x: f"({original(x)} * {error}f)"))

    with ExitStack() as stack:
        stack.enter_context(recompiled())
        stack.enter_context(attribute_replaced(cpp.CppOverrides, "rsqrt", scalar))
        stack.enter_context(attribute_replaced(cpp.CppVecOverrides, "rsqrt", vector))
        yield


@contextmanager
def _decomposed(changes: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """``changes[name](original, *args)`` replaces Inductor's decomposition of that operator."""
    import torch
    from torch._inductor import decomposition

    def caller(change: Any, original: Any) -> Any:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    table = decomposition.decompositions
    entries = {
        op: caller(change, table[op])
        for op, change in ((getattr(torch.ops.aten, n).default, c) for n, c in changes.items())
    }
    with recompiled(), patch.dict(table, entries):
        decomposition.fast_random_decomps.cache_clear()  # it caches a copy of the table
        try:
            yield
        finally:
            decomposition.fast_random_decomps.cache_clear()


def _always_tanh(gelu: Any, x: Any, approximate: str = "none") -> Any:
    """The argument that chooses between erf and tanh is dropped."""
    return gelu(x, approximate="tanh")


@contextmanager
def _saved_in_bf16() -> Iterator[None]:
    """The partitioner saves fp32 activations for backward in bf16."""
    import torch
    from torch._functorch import partitioners

    convert = torch.ops.prims.convert_element_type.default

    def narrowed(graph: Any, node: Any, before: Any) -> Any:
        with graph.inserting_before(before):
            narrow = graph.call_function(convert, (node, torch.bfloat16))
            wide = graph.call_function(convert, (narrow, torch.float32))
        narrow.meta["val"] = node.meta["val"].to(torch.bfloat16)
        wide.meta.update(node.meta)
        return wide

    def make(extract: Any) -> Any:
        def extracted(*args: Any, **kwargs: Any) -> Any:
            forward, backward = extract(*args, **kwargs)
            (output,) = forward.graph.find_nodes(op="output")
            results = list(output.args[0])
            for i in range(kwargs["num_fwd_outputs"], len(results)):
                value = getattr(results[i], "meta", {}).get("val")
                wide = isinstance(value, torch.Tensor) and value.dtype is torch.float32
                if wide and results[i].op == "call_function":  # inputs are saved without a copy
                    results[i] = narrowed(forward.graph, results[i], output)
            output.args = (type(output.args[0])(results),)
            forward.recompile()
            return forward, backward

        return extracted

    with recompiled(), attribute_replaced(partitioners, "_extract_fwd_bwd_modules", make):
        yield


@contextmanager
def _constants_not_in_key() -> Iterator[None]:
    """Kernels that differ only in a constant share one entry of the code cache."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    loaded: dict[Any, Any] = {}

    def make(load: Any) -> Any:
        def cached(argtypes: Any, source: str, *args: Any, **kwargs: Any) -> Any:
            key = tuple(argtypes), _CONSTANT.sub("constant", source)
            if key not in loaded:
                loaded[key] = load(argtypes, source, *args, **kwargs)
            return loaded[key]

        return cached

    with ExitStack() as stack:
        stack.enter_context(recompiled())
        for name in ("load_pybinding", "load_pybinding_async"):
            stack.enter_context(attribute_replaced(CppPythonBindingsCodeCache, name, make))
        yield


PLANTS = [
    Plant("compiled-amax-passes-over-nan", "amax", "a compiled maximum is a number beside a NaN",
          "https://github.com/pytorch/ao/pull/4657", _TENSORWISE,
          lambda: _lowered(("amax", "max"), _without_nan), compiled=True),
    Plant("compiled-bias-twice", "fusion", "a compiled linear adds its bias twice",
          "https://github.com/ml-explore/mlx/pull/2578", _PLAIN,
          lambda: _lowered(("addmm",), _bias_twice), compiled=True),
    Plant("compiled-rsqrt-estimated", "lowering", "compiled rsqrt has 12 bits",
          "https://github.com/pytorch/pytorch/pull/25287", _PLAIN, _approximate_rsqrt,
          compiled=True),
    Plant("compiled-gelu-by-tanh", "decomposition", "compiled GELU is its tanh approximation",
          "https://github.com/tenstorrent/tt-metal/pull/46674", _PLAIN,
          lambda: _decomposed({"gelu": _always_tanh}), compiled=True),
    Plant("compiled-saves-in-bf16", "partitioner", "fp32 activations are kept for backward in bf16",
          "https://github.com/pytorch/pytorch/pull/148380", ("torch.fp32",), _saved_in_bf16,
          compiled=True),
    Plant("compiled-kernel-of-other-constant", "cache", "kernels are cached without constants",
          "https://github.com/pytorch/pytorch/pull/117888", _PLAIN, _constants_not_in_key,
          compiled=True),
]  # fmt: skip
