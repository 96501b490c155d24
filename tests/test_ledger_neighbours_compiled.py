"""Beside each entry of compiled models: the case it explains, run with an unrelated failure, is
reported as new. As tests/test_ledger_neighbours.py, whose planted failures these are; compiling
takes minutes, so all but the quickest run at night."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from narrowfuzz.ledger import stands
from narrowfuzz.machine import compiler
from narrowfuzz.plants.patching import replaced
from test_ledger_neighbours import Neighbour, entry_of, fault, judged, raising

_COMPILED = {"compile": "inductor"}
_FLOOR = {"recipe": "torchao.mxfp8.floor", "backend": "linear", **_COMPILED}
_BITCAST = "torch._inductor.codegen.cpp:CppOverrides.to_dtype_bitcast"
_FLASH = {
    "recipe": "torch.bf16", "model": "attention", "attention": "flash", "heads": 2,
    "checkpoint": "selective", "memory_budget": 50,
}  # fmt: skip



@contextmanager
def refused_by_stride() -> Iterator[None]:
    """Inductor's check of strides refuses every product, in words of its own."""
    import torch
    from torch._inductor.kernel import mm

    def refuse(*_: object) -> None:
        torch._check(False, lambda: "planted")

    with replaced(mm, "check_supported_striding", lambda _: refuse):
        yield


NEIGHBOURS = {
    "inductor-gcc-transposed-reduction": Neighbour(
        {
            "recipe": "torch.fp32", "model": "llama_block", "dtype": "bf16", "m": 64, "k": 64,
            "n": 64, "input_layout": "transposed", **_COMPILED,
        },
        fault("compiled-rsqrt-estimated"),
    ),
    "inductor-recompute-drift": Neighbour(
        {
            "recipe": "torchao.float8.rowwise", "backend": "real", "model": "joined_blocks",
            "checkpoint": "selective", **_COMPILED,
        },
        fault("checkpoint-swaps-kept"),
    ),
    "mx-even-inductor-crash": Neighbour(
        _FLOOR | {"recipe": "torchao.mxfp8.even"},
        raising("torch._inductor.ir:DtypeView.make_reindexer", "NotImplementedError"),
    ),
    "mx-floor-inductor-crash": Neighbour(_FLOOR, raising(_BITCAST, "AssertionError")),
    "mx-rceil-inductor-crash": Neighbour(
        _FLOOR | {"recipe": "torchao.mxfp8.rceil"}, raising(_BITCAST, "AssertionError")
    ),
    "mx-rceil-selective-inductor-crash": Neighbour(
        _FLOOR | {"recipe": "torchao.mxfp8.rceil", "checkpoint": "selective", "n": 64},
        raising(_BITCAST, "AssertionError"),
    ),
    "partitioner-budget-recomputes-random": Neighbour(
        {"recipe": "torch.fp32", "model": "dropout", "memory_budget": 0, "bias": True, **_COMPILED},
        fault("compiled-bias-twice"),
    ),
    "partitioner-budget-saves-tuple": Neighbour(
        _FLASH | {"compile": "aot_eager"},
        raising(
            "torch._functorch._aot_autograd.runtime_wrappers:"
            "_AutogradSavedState.save_from_forward",
            "AssertionError",
        ),
    ),
    "real-single-token-inductor": Neighbour(
        {"recipe": "torchao.float8.rowwise", "backend": "real", "m": 1, **_COMPILED},
        refused_by_stride,
    ),
}  # fmt: skip
