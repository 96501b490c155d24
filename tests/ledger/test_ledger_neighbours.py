"""Beside each entry: the case it explains, run with an unrelated failure, is reported as new.

Compiled cases are in test_ledger_neighbours_compiled.py, those of TransformerEngine in
test_te_neighbours.py. The unrelated failure is a planted fault, or an error of the same type raised
in the same function of the library for another reason, so that the fingerprint is the entry's and
only its conditions tell the two apart.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from narrowfuzz.case.events import Backward, Close, Forward, Open, Reload, Step
from narrowfuzz.case.spec import Case, DataSpec, Sharding, Spec, Spike
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.facts import OF_MACHINE, Context, holds
from narrowfuzz.ledger.ledger import Entry, load_entries, load_ledger, stands
from narrowfuzz.machine.machine import machine
from narrowfuzz.plants.patching import replaced
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.play.processes import around
from narrowfuzz.recipe.recipe import load_recipes

_LOOK = Forward(mode="no_grad")
ENTRIES = {entry.id: entry for entry in load_entries()}


@dataclass(frozen=True)
class Neighbour:
    """A case of an entry, and a failure that is none of the entry's business."""

    spec: dict[str, Any]
    beside: Callable[[], AbstractContextManager[object]]
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case(
            spec=Spec(**({"m": 32, "k": 32, "n": 32} | self.spec)), data=DataSpec(**self.data)
        )


def fault(name: str) -> Callable[[], AbstractContextManager[object]]:
    return builtin_faults()[name].plant


def raising(
    where: str, error: str, says: str = "planted"
) -> Callable[[], AbstractContextManager[object]]:
    """``module:function``, or ``module:Class.method``, raises ``error``, named as it is and seen in
    the library's file."""

    @contextmanager
    def plant() -> Iterator[None]:
        module, _, path = where.partition(":")
        home = importlib.import_module(module)
        *of, name = path.split(".")
        owner: Any = getattr(home, of[0]) if of else home
        original = getattr(owner, name)
        source = f"def {name}(*args, **kwargs):\n    raise {error}({says!r})"
        scope: dict[str, Any] = {
            "UnpicklingError": importlib.import_module("pickle").UnpicklingError
        }
        exec(compile(source, str(home.__file__), "exec"), scope)
        raises = scope[name]
        with ExitStack() as stack:
            if of:
                stack.enter_context(replaced(owner, name, lambda _: staticmethod(raises)))
            else:  # each module that imported it holds it
                for holder in list(sys.modules.values()):
                    if getattr(holder, "__dict__", {}).get(name) is original:
                        stack.enter_context(replaced(holder, name, lambda _: raises))
            yield

    return plant


def on_ranks(
    plant: Callable[[], AbstractContextManager[object]],
) -> Callable[[], AbstractContextManager[object]]:
    """The same in the processes of ranks, which run what is compiled."""

    @contextmanager
    def planted() -> Iterator[None]:
        around.append(plant)
        try:
            with plant():
                yield
        finally:
            around.remove(plant)

    return planted


@contextmanager
def cast_sums_doubled() -> Iterator[None]:
    """A sum of codes, as the bias gradient behind a cast is one, comes out twice as large."""
    import torch
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE as table

    op = torch.ops.aten.sum.dim_IntList
    original = table[op]
    table[op] = lambda *args, **kwargs: 2 * original(*args, **kwargs)
    try:
        yield
    finally:
        table[op] = original


@contextmanager
def clone_negates() -> Iterator[None]:
    """A moment in FP8 has a clone, which calls what it has not."""
    import torch
    from torchao.optim.subclass_fp8 import OptimStateFp8

    table, clone = OptimStateFp8._ATEN_OP_TABLE[OptimStateFp8], torch.ops.aten.clone.default
    table[clone] = lambda func, types, args, kwargs: torch.ops.aten.neg.default(args[0])
    try:
        yield
    finally:
        del table[clone]


def reduced_wrong(change: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[object]]:
    """What a rank brings of each gradient to FSDP's sum is changed before it is added."""

    def make(copy_in: Any) -> Any:
        return lambda gradients, *args: copy_in([change(g) for g in gradients], *args)

    def plant() -> AbstractContextManager[object]:
        home = importlib.import_module(_REDUCE.partition(":")[0])
        return replaced(home, "foreach_reduce_scatter_copy_in", make)

    return plant


_FLOAT8 = {"recipe": "torchao.float8.tensorwise", "backend": "emulated"}
_ROWWISE = {"recipe": "torchao.float8.rowwise", "backend": "emulated"}
_GW_HP = {"recipe": "torchao.float8.rowwise_gw_hp", "backend": "emulated"}
_FLOOR = {"recipe": "torchao.mxfp8.floor", "backend": "linear"}
_RCEIL = {"recipe": "torchao.mxfp8.rceil", "backend": "linear", "dtype": "fp32"}
_WRAPPER = {"recipe": "torchao.mxfp8.floor", "backend": "wrapper"}
_TO_MX = "torchao.prototype.mx_formats.mx_tensor:to_mx"
_GATHER = "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_all_gather"
_REDUCE = "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce"
_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard:fully_shard"
_DISTRIBUTE = "torch.distributed.tensor._api:distribute_tensor"
_TANGENT = (
    "torch._functorch._aot_autograd.runtime_wrappers:AOTDispatchAutograd.process_runtime_tangent"
)
_AXIS = "torchao.float8.float8_ops:_assert_tensorwise_scale"
_HUGE = "0x64800000"  # 2^74

NEIGHBOURS = {
    "attention-mask-and-causal": Neighbour(
        {"recipe": "torch.fp32", "model": "sdpa_mask_and_causal", "m": 5, "k": 16, "n": 8},
        fault("attention-statistics-base-two"),
    ),
    "autocast-inference-mode": Neighbour(
        _FLOAT8 | {"dtype": "fp32", "autocast": True, "grad_mode": "inference"},
        raising("torchao.float8.float8_utils:tensor_to_amax", "NotImplementedError"),
    ),
    "attention-block-sums": Neighbour(
        {"recipe": "torch.bf16", "dtype": "bf16", "model": "attention", "m": 128, "k": 16},
        fault("attention-scale-padded"),
        {"seed": 4},
    ),
    "attention-large-mask": Neighbour(
        {"recipe": "torch.fp32", "model": "sdpa_finite", "m": 5, "k": 16, "n": 8},
        fault("attention-statistics-base-two"),
    ),
    "embedding-narrow-sums": Neighbour(
        {"recipe": "torch.bf16", "dtype": "bf16", "model": "tied_embedding", "m": 64},
        fault("embedding-gradient-loses-repeats"),
    ),
    "index-add-narrow-sums": Neighbour(
        {
            "recipe": "torch.bf16",
            "dtype": "bf16",
            "model": "index_add_flat",
            "m": 33,
            "k": 33,
            "n": 4,
        },
        fault("index-add-drops-ragged-tail"),
    ),
    "index-put-narrow-sums": Neighbour(
        {"recipe": "torch.bf16", "dtype": "bf16", "model": "indexed", "m": 64, "n": 4},
        fault("index-put-adds-first-alone"),
    ),
    "layer-norm-narrow-sums": Neighbour(
        {"recipe": "torch.bf16", "dtype": "bf16", "model": "layernorm_linear", "m": 37},
        fault("layer-norm-gradient-drops-rows"),
    ),
    "float8-empty-dimensions": Neighbour(
        _FLOAT8 | {"k": 0}, raising("torchao.float8.float8_utils:tensor_to_amax", "RuntimeError")
    ),
    "float8-gather-scale-of-shard": Neighbour(
        _FLOAT8 | {"sharding": Sharding(data=2, tensor=2, gathers="codes")}, fault("scale-doubled")
    ),
    "float8-gather-uneven-shards": Neighbour(
        _FLOAT8 | {"n": 33, "sharding": Sharding(data=2, gathers="codes")},
        raising(_GATHER, "RuntimeError"),
    ),
    "float8-gather-uneven-shards, empty": Neighbour(
        _FLOAT8 | {"n": 2, "m": 33, "sharding": Sharding(data=3, gathers="codes")},
        raising(_SHARD, "RuntimeError"),
    ),
    "float8-gather-uneven-shards, resumed": Neighbour(
        _FLOAT8
        | {
            "m": 48,
            "n": 64,
            "steps": 2,
            "sharding": Sharding(data=4, gathers="precomputed", resumes="fewer"),
        },
        raising(_GATHER, "RuntimeError"),
    ),
    "float8-gather-unties-weights": Neighbour(
        _FLOAT8 | {"model": "tied_embedding", "sharding": Sharding(data=2, gathers="codes")},
        raising(_REDUCE, "RuntimeError"),
    ),
    "float8-gather-unties-weights, another parameter": Neighbour(
        _FLOAT8 | {"model": "tied_embedding", "sharding": Sharding(data=2, gathers="codes")},
        reduced_wrong(lambda gradient: gradient / 2 if gradient.ndim == 1 else gradient),
    ),
    "float8-gather-unties-weights, first step": Neighbour(
        _FLOAT8
        | {
            "model": "tied_embedding",
            "steps": 2,
            "sharding": Sharding(data=1, gathers="codes"),
        },
        reduced_wrong(lambda gradient: gradient / 2 if gradient.ndim == 1 else gradient),
    ),
    "float8-gw-hp-cpu-autocast": Neighbour(
        _GW_HP | {"dtype": "fp32", "autocast": True},
        raising("torchao.float8.float8_ops:preprocess_addmm", "RuntimeError"),
    ),
    "float8-swap-drops-module-state": Neighbour(
        _FLOAT8 | {"model": "hooked"}, fault("conversion-freezes")
    ),
    "float8-swap-drops-own-forward": Neighbour(
        _FLOAT8 | {"model": "own_forward"}, fault("conversion-freezes")
    ),
    "float8-styles-bias-gradient": Neighbour(
        _FLOAT8 | {"bias": True, "sharding": Sharding(tensor=2, narrow_styles=True)},
        cast_sums_doubled,
    ),
    "float8-styles-compiled-tangent": Neighbour(
        _FLOAT8
        | {
            "compile": "aot_eager",
            "sharding": Sharding(data=1, tensor=1, narrow_styles=True, units="each"),
        },
        on_ranks(raising(_TANGENT, "RuntimeError")),
    ),
    "dtensor-view-single-feature": Neighbour(
        {
            "recipe": "torch.bf16",
            "m": 1,
            "k": 1,
            "n": 16,
            "batch": 2,
            "sharding": Sharding(tensor=1, style="rowwise"),
        },
        raising(_DISTRIBUTE, "RuntimeError"),
    ),
    "dtensor-empty-weight-step": Neighbour(
        {"recipe": "torch.fp32", "n": 0, "steps": 2, "sharding": Sharding(tensor=1)},
        raising(_DISTRIBUTE, "RuntimeError"),
    ),
    "fsdp-empty-parameter": Neighbour(
        {"recipe": "torch.bf16", "n": 0, "sharding": Sharding(data=2)},
        raising(_REDUCE, "RuntimeError"),
    ),
    "low-bit-state-cannot-be-copied": Neighbour(
        {
            "recipe": "torch.bf16",
            "dtype": "bf16",
            "model": "step_adamw_fp8",
            "optimizer": "adamw_fp8",
            "m": 1,
            "k": 1,
            "n": 1,
            "events": (Forward(mode="train"), Backward(of=(0,)), Step(), Reload()),
        },
        clone_negates,
    ),
    "mx-byte0-floor": Neighbour(
        _FLOOR | {"dtype": "fp32"}, fault("mx-scale-byte-plus-one"), {"values": "subnormal"}
    ),
    "mx-byte0-rceil": Neighbour(_RCEIL, fault("mx-scale-byte-plus-one"), {"values": "subnormal"}),
    "mx-even-tensor-parallel": Neighbour(
        _FLOOR | {"recipe": "torchao.mxfp8.even", "k": 64, "n": 64, "sharding": Sharding(tensor=2)},
        raising(_DISTRIBUTE, "RuntimeError"),
    ),
    "mx-even-tensor-parallel, in backward": Neighbour(
        _FLOOR
        | {
            "recipe": "torchao.mxfp8.even",
            "k": 64,
            "n": 64,
            "sharding": Sharding(tensor=1, style="rowwise"),
        },
        raising(_DISTRIBUTE, "RuntimeError"),
    ),
    "mx-even-tensor-parallel, a mask": Neighbour(
        _FLOOR
        | {
            "recipe": "torchao.mxfp8.even",
            "k": 64,
            "n": 64,
            "sharding": Sharding(tensor=2, style="rowwise"),
        },
        raising(_DISTRIBUTE, "IndexError"),
    ),
    "mx-even-tensor-parallel, resumed": Neighbour(
        _FLOOR
        | {
            "recipe": "torchao.mxfp8.even",
            "m": 64,
            "k": 64,
            "n": 64,
            "steps": 2,
            "sharding": Sharding(data=1, resumes="swapped"),
        },
        raising(_DISTRIBUTE, "RuntimeError"),
    ),
    "mx-ignores-autocast": Neighbour(
        _RCEIL | {"model": "mlp_gelu", "autocast": True}, fault("mx-scale-byte-plus-one")
    ),
    "mx-noncontiguous-input": Neighbour(
        _FLOOR | {"input_layout": "transposed"}, raising(_TO_MX, "AssertionError")
    ),
    "mx-rceil-scale-one-too-small": Neighbour(
        _RCEIL, fault("mx-scale-to-nearest"), {"values": "binade_edges"}
    ),
    "mx-shape-refusals": Neighbour(
        _FLOOR | {"k": 40}, raising(_TO_MX, "AssertionError", "40 must be another number")
    ),
    "mx-wrapper-drops-bias": Neighbour(_WRAPPER | {"bias": True}, fault("mx-scale-byte-plus-one")),
    "mx-wrapper-state-not-loadable": Neighbour(
        _WRAPPER, raising("torch.serialization:load", "UnpicklingError")
    ),
    "mx-wrapper-state-not-loadable, on ranks": Neighbour(
        _WRAPPER | {"m": 128, "steps": 2, "sharding": Sharding(data=2, resumes="same")},
        raising("torch.distributed.checkpoint:load", "UnpicklingError"),
    ),
    "float8-gather-unties-weights, resumed": Neighbour(
        _FLOAT8
        | {
            "model": "tied_embedding",
            "steps": 2,
            "optimizer": "adamw",
            "sharding": Sharding(data=2, gathers="codes", resumes="alone"),
        },
        fault("second-moment-not-loaded"),
    ),
    "mx-wrapper-tensor-parallel": Neighbour(
        _WRAPPER | {"k": 64, "n": 64, "sharding": Sharding(tensor=2)},
        raising(_DISTRIBUTE, "RuntimeError"),
    ),
    "mx-wrapper-uneven-shards": Neighbour(
        _WRAPPER | {"m": 96, "n": 64, "sharding": Sharding(data=3)},
        raising(_GATHER, "AssertionError"),
    ),
    "mx-wrapper-unties-weights": Neighbour(
        _WRAPPER | {"model": "tied_embedding"}, fault("mx-scale-byte-plus-one")
    ),
    "onednn-amx-row-leak": Neighbour(
        {"recipe": "torch.bf16", "m": 33, "k": 33, "microbatches": 2},
        fault("gradient-accumulated-twice"),
        {"spikes": (Spike(tensor="input", row=1, col=0, bits="0x7f800000"),)},
    ),
    "rowwise-inference-mode": Neighbour(
        _ROWWISE | {"grad_mode": "inference"}, raising(_AXIS, "AssertionError")
    ),
    "rowwise-inverse-scale-overflow": Neighbour(
        _ROWWISE | {"backend": "real", "m": 16, "k": 16, "n": 16},
        fault("gemm-gain"),
        {
            "spikes": (
                Spike(tensor="grad_output", row=0, col=0, bits=_HUGE),
                Spike(tensor="weight", row=1, col=0, bits=_HUGE),
            )
        },
    ),
    "rowwise-inverse-scale-overflow, in a sum": Neighbour(
        _ROWWISE | {"backend": "real", "model": "used_twice", "m": 16, "k": 16, "n": 16},
        fault("tied-gradient-doubled"),
        {
            "spikes": (
                Spike(tensor="input", row=0, col=0, bits=_HUGE),
                Spike(tensor="grad_output", row=1, col=0, bits=_HUGE),
            )
        },
    ),
    "rowwise-noncontiguous-3d": Neighbour(
        _ROWWISE | {"batch": 2, "input_layout": "transposed"}, raising(_AXIS, "AssertionError")
    ),
    "rowwise-pow2-scale-rounds-up": Neighbour(
        _ROWWISE | {"dtype": "fp32"}, fault("scale-doubled"), {"values": "binade_edges"}
    ),
    "sac-autocast-cached-cast": Neighbour(
        {
            "recipe": "torch.fp32",
            "model": "mlp_gelu",
            "dtype": "fp32",
            "checkpoint": "selective",
            "events": (Open(), _LOOK, Forward(), Close(), Backward(of=(1,))),
        },
        fault("region-keeps-graphless-cast"),
    ),
    "sac-around-fsdp": Neighbour(
        {
            "recipe": "torch.bf16",
            "model": "joined_blocks",
            "checkpoint": "selective",
            "sharding": Sharding(data=2, units="each"),
        },
        raising(_GATHER, "RuntimeError"),
    ),
    "scaled-mm-empty-drops-bias": Neighbour(
        {"recipe": "torch.scaled_mm", "backend": "rowwise", "k": 0, "bias": True},
        fault("gemm-rows-unwritten"),
    ),
    "scaled-mm-empty-uninitialised": Neighbour(
        {
            "recipe": "torch.scaled_mm",
            "backend": "tensorwise_v1",
            "k": 0,
            "bias": True,
            "microbatches": 2,
        },
        fault("gradient-accumulated-twice"),
    ),
}


@cache
def judge() -> Judge:
    return Judge(load_recipes(), load_ledger())


def judged(case: Case) -> Judgement:
    return Judge(judge().recipes, judge().ledger).judge(case)


def entry_of(name: str) -> Entry:
    """The entry whose id stands before the comma: a rule may meet it in a second kind of case."""
    return ENTRIES[name.partition(",")[0]]


def needs_what_it_was_seen_on(name: str) -> None:
    """Skip where this machine has another kernel than the entry asks for, or none."""
    case, entry = NEIGHBOURS[name].case, entry_of(name)
    if stands(entry) != "named":
        pytest.skip("it names other versions")
    of_machine = {f: entry.when[f] for f in OF_MACHINE if f in entry.when}
    if not holds(of_machine, Context(case, machine())):
        pytest.skip(f"another machine than it was seen on: {of_machine}")
    if case.spec.sharded:  # these arms run wherever PyTorch does
        return
    if void := judge().observe(case, repeat=False).void:
        pytest.skip(next(iter(void.values())))


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_entry_explains_its_case(name: str) -> None:
    needs_what_it_was_seen_on(name)
    found = judged(NEIGHBOURS[name].case)
    assert not found.causes
    assert entry_of(name).id in {verdict.explained_by for verdict in found.known}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_another_failure_of_that_case_is_reported(name: str) -> None:
    needs_what_it_was_seen_on(name)
    with NEIGHBOURS[name].beside():
        assert judged(NEIGHBOURS[name].case).causes


def explaining(where: str) -> set[str]:
    """The entries that explain something and whose cases run ``here``, ``compiled``, ``emulated``
    or ``simulated``, or are of a user's model, ``own`` (tests/own_models): each is of exactly
    one."""

    def of(entry: Entry) -> str:
        globs = [glob for match in entry.matches for glob in match.fingerprints]
        if "transformer_engine" in entry.versions:
            return "emulated"
        if "cpu" not in entry.devices:  # tests/simulated_checks.py
            return "simulated"
        if entry.matches and all(match.when.get("model") == "*:*" for match in entry.matches):
            return "own"
        arms = [glob.split("--")[2] for glob in globs]
        compiled = arms and all(arm.startswith(("inductor", "aot_eager")) for arm in arms)
        return "compiled" if compiled else "here"

    explain = [entry for entry in ENTRIES.values() if entry.matches or entry.deviation]
    return {entry.id for entry in explain if of(entry) == where}


#: Shown by a user's model alone, with what is not theirs beside it: tests/own_models.
OF_USERS = {"float8-linear-registered-twice"}


#: Shown by calls that few cases make, or none: tests/operators has what is not theirs beside them.
OF_CALLS = {
    "attention-nan-swallowed",
    "fused-sgd-skips-blocks",
    "linear-cross-entropy-nothing-counts",
    "low-bit-adam-moment-lost",
    "nll-loss-narrow-sums",
    "smoothed-cross-entropy-overflows",
}


def test_every_entry_that_explains_something_here_has_a_neighbour() -> None:
    assert explaining("here") - OF_USERS - OF_CALLS == {entry_of(name).id for name in NEIGHBOURS}
