"""Planted faults: each changes something, is lifted without a trace, and a drawn case shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import skip_unless_every_arm_runs
from narrowfuzz.case.spec import Case, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.plants.registry import builtin_faults
from samples import recipes

#: A case that shows each fault which no table of tests/rules or test_state_faults.py has,
#: as generation found it; docs/faults.md says which five are written by hand.
DRAWN = json.loads((Path(__file__).parents[1] / "fault_cases.json").read_text())
CASES = {name: load_case(json.dumps(case).encode()) for name, case in DRAWN.items()}
#: Faults of TransformerEngine run in processes of their own.
FAULTS = {
    id: fault
    for id, fault in builtin_faults().items()
    if not any(recipe.startswith("te.") for recipe in fault.recipes)
}


def owners() -> Iterator[Any]:
    """Modules, classes and tables that faults are planted in."""
    from narrowfuzz.machine import simulated
    from narrowfuzz.recipe import delayed
    from torch._dynamo.backends import registry
    from torch._functorch import partitioners
    from torch._inductor import decomposition, lowering
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.codegen import cpp
    from torch._inductor.graph import GraphLowering
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.checkpoint import filesystem, planner_helpers, state_dict
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
    )
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.pipelining import schedules
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer
    from torch.distributed.tensor.parallel import loss, style
    from torch.optim import optimizer
    from torch.utils import checkpoint
    from torchao import float8
    from torchao.float8 import (
        Float8LinearConfig,
        float8_linear,
        float8_ops,
        float8_scaling_utils,
        float8_training_tensor,
        float8_utils,
        fsdp_utils,
    )
    from torchao.prototype.moe_training import config, mxfp8_grouped_mm, mxfp8_linear, tensor
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER

    registry.lookup_backend("aot_eager")
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        yield import_module("torch.nn.modules.linear_cross_entropy")._ChunkContext
    for name in ("adam", "sgd", "adagrad", *(("_muon",) if hasattr(torch.optim, "Muon") else ())):
        yield import_module(f"torch.optim.{name}")
    yield from (_fsdp_collectives, _fsdp_param.FSDPParam, style.ColwiseParallel)
    yield from (AsyncCollectiveTensor, filesystem, state_dict, schedules, schedules.ScheduleGPipe)
    yield from (_fsdp_param_group, planner_helpers)
    for functional in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        assert functional.all_to_all_single  # kept as soon as it is asked for
        yield functional
    yield from (loss, loss._MaskPartial, torch.amp.GradScaler, ShardedGradScaler)
    yield from (DTensor, DTensor._op_dispatcher._custom_op_handlers)
    yield import_module("torch._higher_order_ops.flex_attention")
    yield from (_attention._SDPAMerger, _attention._AllGatherRotater)
    yield from (_load_balancer._HeadTailLoadBalancer, torch.nn.parallel.DistributedDataParallel)
    yield from (style.RowwiseParallel, registry._COMPILER_FNS, fsdp_utils, torch.nn.utils)
    yield torch.nn.utils.clip_grad
    yield from (torch, torch.Tensor, torch.autograd, torch.nn.functional, torch.optim.Optimizer)
    yield from (torch.optim.SGD, torch.optim.AdamW)
    yield mxfp8_grouped_mm
    yield from (checkpoint, checkpoint._CachedTorchDispatchMode, partitioners, GraphLowering)
    yield from (cpp.CppOverrides, cpp.CppVecOverrides, CppPythonBindingsCodeCache)
    yield from (lowering.lowerings, decomposition.decompositions)
    yield from (float8, Float8LinearConfig, float8_linear, float8_linear.Float8Linear, float8_ops)
    yield from (float8_ops.FLOAT8_OPS_TABLE, float8_scaling_utils, float8_training_tensor)
    yield from (float8_utils, config.MXFP8TrainingOpConfig, mxfp8_linear, tensor, mx_tensor)
    yield from (torch.nn.Linear, torch.autocast)
    yield from (_QUANTIZE_CONFIG_HANDLER, optimizer._global_optimizer_post_hooks)
    yield from (simulated, delayed, float8_linear.matmul_with_hp_or_float8_args)
    yield from (value for value in vars(delayed).values() if isinstance(value, type))


def snapshot() -> list[dict[Any, int]]:
    """What stands in every place that a fault may replace, by identity."""
    found = [
        {key: id(value) for key, value in (o if isinstance(o, dict) else vars(o)).items()}
        for o in owners()
    ]
    kernels = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "sum.dim_IntList",
        "native_layer_norm",
        "native_layer_norm_backward",
        "embedding_dense_backward",
        "nll_loss_forward",
        "nll_loss_backward",
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax_backward_data",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "rms_norm",
        "cross_entropy_loss",
        "mean.dim",
        "bmm",
        "topk",
        "sort.stable",
        "mm",
        "addmm",
        "_grouped_mm",
        "index_put",
        "_index_put_impl_",
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "gelu",
        "pow.Tensor_Scalar",
        "silu_backward",
        "tanh_backward",
        "sigmoid",
        "logsumexp",
        "linalg_vector_norm",
        "_amp_foreach_non_finite_check_and_unscale_",
        "_fused_sgd_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_adagrad_",
    )
    return [*found, {torch._C._dispatch_dump(f"aten::{kernel}"): 0 for kernel in kernels}]


@pytest.fixture(scope="module")
def before() -> list[dict[Any, int]]:
    return snapshot()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_planted_and_lifted_without_a_trace(
    name: str, before: list[dict[Any, int]]
) -> None:
    with FAULTS[name].plant():
        assert snapshot() != before
    assert snapshot() == before


def test_the_table_of_rows_names_faults_that_exist() -> None:
    told = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", told.partition("## Row by row")[2]))
    known = {entry.id for entry in load_ledger().entries}
    assert not named - set(builtin_faults()) - known
    assert not set(CASES) - named


def causes(case: Case) -> set[str]:
    return Judge(recipes(), load_ledger()).judge(case).fingerprints()


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.heavy] * (i % 2 or case.spec.compile != "none"))
        for i, (name, case) in enumerate(sorted(CASES.items()))
    ],
)
def test_the_case_shows_the_fault(name: str) -> None:
    case = CASES[name]
    skip_unless_every_arm_runs(case)
    clean = causes(case)
    with FAULTS[name].plant():
        assert causes(case) - clean, "no rule sees it"
