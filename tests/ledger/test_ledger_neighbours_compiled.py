"""Beside each entry of compiled models: the case it explains, run with an unrelated failure, is
reported as new. As test_ledger_neighbours.py, whose planted failures these are; compiling takes
minutes, so all but the quickest run at night."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from narrowfuzz.ledger.ledger import stands
from narrowfuzz.machine import machine
from narrowfuzz.plants.patching import replaced
from test_ledger_neighbours import Neighbour, entry_of, explaining, fault, judged, raising

pytestmark = pytest.mark.heavy

_COMPILED = {"compile": "inductor"}
_FLOOR = {"recipe": "torchao.mxfp8.floor", "backend": "linear", **_COMPILED}
_BITCAST = "torch._inductor.codegen.cpp:CppOverrides.to_dtype_bitcast"
_FLASH = {
    "recipe": "torch.fp32", "model": "attention", "attention": "flash", "heads": 1, "m": 16,
    "k": 16, "n": 16, "batch": 2, "dtype": "fp32", "checkpoint": "selective", "memory_budget": 50,
}  # fmt: skip


@contextmanager
def refused_by_stride() -> Iterator[None]:
    """Inductor's check of strides refuses every product, in words of its own."""
    from torch._inductor.kernel import mm

    def refuse(*_: object) -> None:
        torch._check(False, lambda: "planted")

    with replaced(mm, "check_supported_striding", lambda _: refuse):
        yield


NEIGHBOURS = {
    # what the cure does not cure is tests/ledger/test_cures.py's
    "inductor-gcc-transposed-reduction": Neighbour(
        {
            "recipe": "torch.fp32", "model": "llama_block", "dtype": "bf16", "m": 64, "k": 64,
            "n": 64, "input_layout": "transposed", **_COMPILED,
        },
        raising("torch._inductor.codegen.cpp:CppVecOverrides.rsqrt", "AssertionError"),
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
        raising("torch._functorch.partitioners:choose_saved_values_set", "AssertionError"),
    ),
    "partitioner-budget-saves-tuple": Neighbour(
        _FLASH | {"compile": "aot_eager_decomp_partition"},
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


@pytest.fixture(autouse=True)
def _compiled_anew(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Nothing is taken from a cache, which knows of no fault; and what one compiler makes of a
    kernel is asked of that compiler."""
    from torch._inductor import config

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(config.patch(force_disable_caches=True))
        if "gcc" in request.node.name:
            tuned = tmp_path / "g++"
            tuned.write_text('#!/bin/sh\nexec /usr/bin/env g++ "$@" -mtune=generic\n')
            tuned.chmod(0o755)
            monkeypatch.setenv("CXX", str(tuned))
            stack.callback(machine.compiler.cache_clear)
            machine.compiler.cache_clear()
            stack.enter_context(config.patch({"cpp.cxx": (None, str(tuned))}))
        yield


def needs_what_it_was_seen_on(name: str) -> None:
    entry = entry_of(name)
    if stands(entry) != "named":
        pytest.skip("it names other versions")
    if entry.cure and not machine.compiler().startswith(("g++ 11.", "g++ 12.")):
        pytest.skip(f"another compiler than it was seen on: {machine.compiler()}")


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_entry_explains_its_case(name: str) -> None:
    needs_what_it_was_seen_on(name)
    found = judged(NEIGHBOURS[name].case)
    assert not found.causes
    assert name in {verdict.explained_by for verdict in found.known}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_another_failure_of_that_case_is_reported(name: str) -> None:
    needs_what_it_was_seen_on(name)
    with NEIGHBOURS[name].beside():
        assert judged(NEIGHBOURS[name].case).causes


def test_every_entry_of_compiled_models_has_a_neighbour() -> None:
    assert explaining("compiled") == set(NEIGHBOURS)
