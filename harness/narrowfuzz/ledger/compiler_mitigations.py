"""Cures of known divergences of Inductor: its own settings, and patches of its code.

A graph that was compiled under a patch must not be cached: the cache's key does not include the
patch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def without_slp_vectorizer() -> Iterator[None]:
    """Inductor's C++ code is compiled without GCC's vectoriser of straight-line code.

    Inductor has no setting for flags, so the compiler is replaced by a script that adds one. The
    script is called g++, as Inductor recognises GCC by its name. Its path is always the same, as it
    is part of the key under which a compiled kernel is cached.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    real = shutil.which(os.environ.get("CXX", "g++")) or "g++"
    script = Path(cache_dir()) / "without_slp_vectorizer" / "g++"
    text = f'#!/bin/sh\nexec "{real}" "$@" -fno-tree-slp-vectorize\n'
    if not script.exists() or script.read_text() != text:  # written for another compiler
        script.parent.mkdir(parents=True, exist_ok=True)
        fresh = script.with_name(f"g++.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(script)  # atomic: another worker may do the same
    with config.patch({"cpp.cxx": (None, str(script))}):
        yield


@contextmanager
def a_name_for_each_stored_reduction() -> Iterator[None]:
    """The value of a vectorised reduction gets a new name for each buffer to which it is stored.

    Inductor names a converted value by the original value only, whatever buffer it is for.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppVecKernel, DeferredLine

    usual = CppVecKernel.store_reduction

    def store_reduction(self: Any, name: str, index: Any, value: Any) -> None:
        own = re.sub(r"\W", "_", f"{value}_{name}")
        self.reduction_suffix.writeline(DeferredLine(name, f"auto {own} = {value};"))
        usual(self, name, index, own)

    with (
        patch.object(CppVecKernel, "store_reduction", store_reduction),
        config.patch(force_disable_caches=True),
    ):
        yield


@contextmanager
def emulated_precision_casts() -> Iterator[None]:
    """A fused chain is rounded after each operation, as eager rounds it."""
    from torch._inductor import config

    with config.patch(emulate_precision_casts=True):
        yield


@contextmanager
def specialized_floats() -> Iterator[None]:
    """A Python float is a constant of the graph, even where shapes are dynamic."""
    from torch._dynamo import config

    with config.patch(specialize_float=True):
        yield


@contextmanager
def contiguous_operands_of_flex() -> Iterator[None]:
    """FlexAttention on a CPU gets contiguous copies of its operands instead of views."""
    from torch._inductor import config
    from torch._inductor.ir import ExternKernel
    from torch._inductor.kernel.flex import flex_attention

    home: Any = flex_attention
    usual = home.lower_cpu

    def copied(operand: Any) -> Any:
        return ExternKernel.require_stride_order(ExternKernel.copy_input(operand), [3, 2, 1, 0])

    def lower(query: Any, key: Any, value: Any, *others: Any) -> Any:
        return usual(copied(query), copied(key), copied(value), *others)

    with patch.object(home, "lower_cpu", lower), config.patch(force_disable_caches=True):
        yield


@contextmanager
def masked_booleans_of_one_type() -> Iterator[None]:
    """In a vectorised loop, a masked load of booleans has the same type as the value for masked
    elements."""
    import torch
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppVecOverrides
    from torch._inductor.virtualized import V

    usual = CppVecOverrides.masked

    def masked(mask: Any, body: Any, other: Any) -> Any:
        def of_one_type() -> Any:
            result = body()
            if not result.is_vec or result.dtype != torch.bool:
                return result
            vectors = V.kernel._get_num_vectors(torch.float)
            cast = f"{result}.template cast<float, {vectors}>()"
            unified = V.kernel.cse.generate(V.kernel.compute, cast)
            unified.dtype, unified.is_vec = torch.bool, True
            return unified

        return usual(mask, of_one_type, other)

    with (
        patch.object(CppVecOverrides, "masked", staticmethod(masked)),
        config.patch(force_disable_caches=True),
    ):
        yield


@contextmanager
def sums_in_fp32() -> Iterator[None]:
    """index_add and scatter_add of bf16 and fp16 accumulate in fp32, and round once."""
    import torch
    from torch._inductor import config, decomposition

    table = decomposition.select_decomp_table()

    def in_fp32(operator: Any) -> Any:
        usual = table.get(operator, lambda *of, **how: NotImplemented)

        def summed(x: Any, dim: int, index: Any, source: Any, **how: Any) -> Any:
            if x.dtype not in (torch.bfloat16, torch.float16):
                return usual(x, dim, index, source, **how)
            return operator(x.float(), dim, index, source.float(), **how).to(x.dtype)

        return summed

    both = (torch.ops.aten.index_add.default, torch.ops.aten.scatter_add.default)
    with (
        patch.dict(table, {of: in_fp32(of) for of in both}),
        config.patch(force_disable_caches=True),
    ):
        yield


@contextmanager
def alpha_in_patterns() -> Iterator[None]:
    """A pattern of Inductor that does not name alpha matches no addition that scales an operand by
    one."""
    import torch
    from torch._inductor import config, pattern_matcher

    home: Any = pattern_matcher._TargetArgsExpr
    usual = home._match

    def match(self: Any, node: Any, context: Any) -> Any:
        added = getattr(node, "target", None) == torch.ops.aten.add.Tensor
        if added and "alpha" not in self.kwargs and node.kwargs.get("alpha", 1) != 1:
            return pattern_matcher.FailedMatch("scaled: {}", node)
        return usual(self, node, context)

    with patch.object(home, "_match", match), config.patch(force_disable_caches=True):
        yield


@contextmanager
def gradients_with_the_strides_of_eager() -> Iterator[None]:
    """While a graph is traced, gradients of activations and losses have the strides that their
    kernels will give them; those of the decompositions depend on other operands."""
    import torch
    from torch._decomp import meta_table
    from torch._inductor import config
    from torch._subclasses.fake_impls import op_implementations_dict
    from torch._subclasses.fake_tensor import FakeTensorMode

    aten = torch.ops.aten

    def elementwise(mode: Any, operator: Any, *given: Any, **named: Any) -> Any:
        grad, x = (t for t in (*given, *named.values()) if isinstance(t, torch.Tensor))
        with mode:
            return grad + x

    def contiguous(mode: Any, operator: Any, grad: Any, x: Any, *given: Any, **named: Any) -> Any:
        with mode:
            return torch.empty_like(x, memory_format=torch.contiguous_format)

    activations = (
        aten.elu_backward,
        aten.hardsigmoid_backward,
        aten.hardswish_backward,
        aten.hardtanh_backward,
        aten.logit_backward,
        aten.softplus_backward,
    )
    losses = (aten.huber_loss_backward, aten.mse_loss_backward, aten.smooth_l1_loss_backward)
    traced = {
        **{operator.default: elementwise for operator in activations},
        **{operator.default: contiguous for operator in losses},
    }
    with (
        patch.dict(op_implementations_dict, traced),
        patch.dict(meta_table, traced),  # what is there is not decomposed
        patch.object(FakeTensorMode, "cache", {}),  # of what was traced before
        config.patch(force_disable_caches=True),
    ):
        yield
