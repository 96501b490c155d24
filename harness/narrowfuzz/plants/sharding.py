"""Faults in what ranks exchange: gradients, activations, parameters, norms, saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_ALL = ("torch.fp32", "torch.bf16", "torchao.float8.*")
_RANKS = ("sharded*",)


def _divide_factors(change: Callable[[int], tuple[Any, ...]]) -> AbstractContextManager[None]:
    """``change(ranks)`` replaces FSDP's divisors before and after a reduction of gradients, and its
    two reduce operations."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def make(original: Any) -> Any:
        return lambda group, *args, **kwargs: change(1 if group is None else group.size())

    return attribute_replaced(_fsdp_collectives, "_get_gradient_divide_factors", make)


@contextmanager
def _divided_twice() -> Iterator[None]:
    """The mean over ranks is divided by the number of ranks once more."""
    from torch.distributed import ReduceOp

    op = ReduceOp.AVG
    with _divide_factors(lambda ranks: (None, float(ranks), op, op)):
        yield


@contextmanager
def _never_divided() -> Iterator[None]:
    """Gradients are the sum over ranks instead of the mean."""
    from torch.distributed import ReduceOp

    with _divide_factors(lambda ranks: (None, None, ReduceOp.SUM, ReduceOp.SUM)):
        yield


def _copied_in(change: Callable[[list[Any], Any, int], None]) -> AbstractContextManager[None]:
    """``change(gradients, buffer, ranks)`` may alter ``buffer``, a rank's input to the
    reduction."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def make(copy_in: Any) -> Any:
        def changed(gradients: list[Any], buffer: Any, ranks: int) -> None:
            copy_in(gradients, buffer, ranks)
            change(gradients, buffer, ranks)

        return changed

    return attribute_replaced(_fsdp_collectives, "foreach_reduce_scatter_copy_in", make)


@contextmanager
def _last_rank_lost() -> Iterator[None]:
    """Gradients of the last rank do not reach the sum."""
    import torch.distributed as dist

    def change(gradients: list[Any], buffer: Any, ranks: int) -> None:
        if ranks > 1 and dist.get_rank() == dist.get_world_size() - 1:
            buffer.zero_()

    with _copied_in(change):
        yield


@contextmanager
def _uneven_shards_shifted() -> Iterator[None]:
    """If the rows of a gradient are no multiple of the ranks, they are shifted by one row before
    the reduction."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def make(copy_in: Any) -> Any:
        def changed(gradients: list[Any], buffer: Any, ranks: int) -> None:
            shifted = [g.roll(1, 0) if g.shape[0] % ranks else g for g in gradients]
            copy_in(shifted, buffer, ranks)

        return changed

    with attribute_replaced(_fsdp_collectives, "foreach_reduce_scatter_copy_in", make):
        yield


@contextmanager
def _reduced_in_bf16() -> Iterator[None]:
    """Gradients are reduced in bf16, whatever dtype was requested."""
    import torch

    def change(gradients: list[Any], buffer: Any, ranks: int) -> None:
        # only the terms are rounded: sums of so few terms in bf16 would differ little from that
        buffer.copy_(buffer.to(torch.bfloat16).to(buffer.dtype))

    with _copied_in(change):
        yield


@contextmanager
def _gathered_once() -> Iterator[None]:
    """Every forward uses the parameters that were gathered for the first one, without later
    steps."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def make(gather_inputs: Any) -> Any:
        def stale(self: Any) -> Any:
            fresh = gather_inputs.fget(self)
            if any(t.dtype.itemsize == 1 for t in fresh):  # FP8 codes must match their scales
                return fresh
            if not hasattr(self, "_gathered_first"):
                self._gathered_first = [t.clone() for t in fresh]
            return self._gathered_first

        return property(stale)

    stored = vars(FSDPParam)["all_gather_inputs"]
    FSDPParam.all_gather_inputs = make(stored)
    try:
        yield
    finally:
        FSDPParam.all_gather_inputs = stored


@contextmanager
def _last_backward_alone() -> Iterator[None]:
    """The gradient of a backward replaces those of earlier backwards instead of being added."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def make(reduce: Any) -> Any:
        def forgetting(params: Any, *args: Any, **kwargs: Any) -> Any:
            for param in params:
                param.sharded_param.grad = None
            return reduce(params, *args, **kwargs)

        return forgetting

    with attribute_replaced(_fsdp_param_group, "foreach_reduce", make):
        yield


@contextmanager
def _rate_times_ranks() -> Iterator[None]:
    """A step multiplies the learning rate of distributed parameters by the size of their mesh."""
    from torch.optim import SGD, AdamW

    def make(step: Any) -> Any:
        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                mesh = getattr(group["params"][0], "device_mesh", None)
                group["lr"] *= 1 if mesh is None else mesh.size()
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate

        return stepping

    with attribute_replaced(SGD, "step", make), attribute_replaced(AdamW, "step", make):
        yield


@contextmanager
def _norm_of_local_shards() -> Iterator[None]:
    """Gradients are clipped by the norm of this rank's shards only."""
    import torch

    def make(total_norm: Any) -> Any:
        return lambda grads, *args, **kwargs: total_norm(
            [getattr(g, "_local_tensor", g) for g in grads], *args, **kwargs
        )

    with (
        attribute_replaced(torch.nn.utils, "get_total_norm", make),
        attribute_replaced(torch.nn.utils.clip_grad, "_get_total_norm", make),
    ):
        yield


def _prepared(style: str, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(result, layouts, module, mesh)`` is applied to the input or output of a linear after
    a tensor-parallel style has prepared it."""
    from torch.distributed.tensor.parallel import style as styles

    def make(original: Any) -> Any:
        def changed(layouts: Any, other: Any, module: Any, tensors: Any, mesh: Any) -> Any:
            return change(original(layouts, other, module, tensors, mesh), layouts, module, mesh)

        return staticmethod(changed)

    return attribute_replaced(getattr(styles, style), name, make)


@contextmanager
def _bias_of_every_rank() -> Iterator[None]:
    """After a row-sharded linear every rank adds the whole bias to the sum."""

    def change(output: Any, layouts: Any, module: Any, mesh: Any) -> Any:
        if module.bias is None or mesh.size() < 2:
            return output
        more = (mesh.size() - 1) * module.bias
        return output + (more if hasattr(output, "placements") else more.to_local())

    with _prepared("RowwiseParallel", "_prepare_output_fn", change):
        yield


@contextmanager
def _input_gradient_not_added() -> Iterator[None]:
    """The input gradient of a column-sharded linear is not reduced: it is this rank's part of the
    sum."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    class Unreduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            if not any(placement.is_partial() for placement in grad.placements):
                return grad
            whole = [Replicate()] * len(grad.placements)
            return DTensor.from_local(grad._local_tensor, grad.device_mesh, whole)

    def change(x: Any, layouts: Any, module: Any, mesh: Any) -> Any:
        return Unreduced.apply(x)

    with _prepared("ColwiseParallel", "_prepare_input_fn", change):
        yield


@contextmanager
def _sequence_out_of_order() -> Iterator[None]:
    """The gathered pieces of a sequence are in rotated order: they start with the last rank's."""
    from torch.distributed.tensor import DTensor

    def change(x: Any, layouts: Any, module: Any, mesh: Any) -> Any:
        placement = layouts[0]
        if not placement.is_shard() or mesh.size() < 2:
            return x
        local = x.to_local()
        turned = local.roll(local.shape[placement.dim] // mesh.size(), placement.dim)
        return DTensor.from_local(turned, mesh, x.placements)

    with _prepared("ColwiseParallel", "_prepare_input_fn", change):
        yield


@contextmanager
def _bias_gradient_of_one_rank() -> Iterator[None]:
    """One rank doubles the gradient of a bias that all ranks hold."""
    from torch.distributed.tensor.parallel import RowwiseParallel

    def make(apply: Any) -> Any:
        def applied(self: Any, module: Any, mesh: Any) -> Any:
            result = apply(self, module, mesh)
            if module.bias is not None and mesh.get_local_rank() == 1:
                module.bias.register_hook(lambda grad: grad * 2)
            return result

        return applied

    with attribute_replaced(RowwiseParallel, "_apply", make):
        yield


@contextmanager
def _not_waited_for() -> Iterator[None]:
    """The result of a collective is used without waiting for its end."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    def make(wait: Any) -> Any:
        return lambda tensor: tensor.elem

    with attribute_replaced(AsyncCollectiveTensor, "trigger_wait", make):
        yield


@contextmanager
def _graphs_of_rank_0() -> Iterator[None]:
    """Graphs that ranks other than the first trace return half of their floating-point results."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.backends import registry

    def make(backend: Any) -> Any:
        def compiling(graph: Any, inputs: Any, **kwargs: Any) -> Any:
            compiled = backend(graph, inputs, **kwargs)

            def run(*args: Any) -> Any:
                results = compiled(*args)
                if not dist.is_initialized() or dist.get_rank() == 0:
                    return results
                return [
                    t * 0.5 if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                    for t in results
                ]

            return run

        return compiling

    registry.lookup_backend("aot_eager")
    backends = registry._COMPILER_FNS
    stored = backends["aot_eager"]
    backends["aot_eager"] = make(stored)
    try:
        yield
    finally:
        backends["aot_eager"] = stored


@contextmanager
def _microbatches_reversed() -> Iterator[None]:
    """The first pipeline stage takes the microbatches in reverse order, the loss its targets in the
    right one."""
    from torch.distributed.pipelining import schedules

    def make(split: Any) -> Any:
        def splitting(*args: Any, **kwargs: Any) -> Any:
            positional, by_name = split(*args, **kwargs)
            return positional[::-1], by_name

        return splitting

    with attribute_replaced(schedules, "split_args_kwargs_into_chunks", make):
        yield


@contextmanager
def _microbatches_averaged() -> Iterator[None]:
    """A pipeline always divides its gradients by the number of microbatches."""
    from torch.distributed.pipelining import schedules

    def make(begin: Any) -> Any:
        def beginning(*args: Any, **kwargs: Any) -> None:
            begin(*args, **{**kwargs, "scale_grads": True})

        return beginning

    with (
        attribute_replaced(schedules.ScheduleGPipe, "__init__", make),
        attribute_replaced(schedules.Schedule1F1B, "__init__", make),
    ):
        yield


@contextmanager
def _read_a_row_off() -> Iterator[None]:
    """Loading for another layout reads those parts of saved tensors that do not begin at 0 one row
    too early."""
    from torch.distributed.checkpoint import filesystem

    def make(narrow: Any) -> Any:
        def read(saved: Any, offsets: Any, sizes: Any) -> Any:
            return narrow(saved.roll(1, 0) if any(offsets) else saved, offsets, sizes)

        return read

    with attribute_replaced(filesystem, "narrow_tensor_by_index", make):
        yield


@contextmanager
def _scaler_of_own_shards() -> Iterator[None]:
    """GradScaler checks only this rank's shards of the gradients for Inf and NaN."""
    import torch
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.tensor import DTensor

    def local(call: Any, args: Any, kwargs: Any) -> None:
        grads, *rest = args
        call([getattr(grad, "_local_tensor", grad) for grad in grads], *rest)

    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    with (
        patch.dict(DTensor._op_dispatcher._custom_op_handlers, {unscale: local}),
        attribute_replaced(
            ShardedGradScaler, "unscale_", lambda unscale: torch.amp.GradScaler.unscale_
        ),
    ):
        yield


@contextmanager
def _second_moment_not_loaded() -> Iterator[None]:
    """AdamW's second moment is loaded as zeros."""
    from torch.distributed.checkpoint import state_dict

    def make(load: Any) -> Any:
        def loading(model: Any, optimizers: Any, loaded: Any, info: Any) -> None:
            for state in loaded.get("state", {}).values():
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"].zero_()
            load(model, optimizers, loaded, info)

        return loading

    with attribute_replaced(state_dict, "_load_optim_state_dict", make):
        yield


@contextmanager
def _nan_on_second_rank() -> Iterator[None]:
    """The first element of every linear's result on rank 1 is NaN."""
    import torch
    import torch.distributed as dist

    def make(linear: Any) -> Any:
        def sick(*args: Any, **kwargs: Any) -> Any:
            result = linear(*args, **kwargs)
            local = getattr(result, "_local_tensor", result).detach()
            if dist.is_initialized() and dist.get_rank() == 1 and local.numel():
                first = local.view(-1)[:1]
                first.copy_((-first.abs() - 1).log())
            return result

        return sick

    with attribute_replaced(torch.nn.functional, "linear", make):
        yield


PLANTS = [
    Plant(
        id=id, family="sharding", title=title, source=source, recipes=recipes, plant=plant,
        arms=_RANKS, models=models,
    )
    for id, title, source, recipes, plant, models in (
        (
            "fsdp-mean-divided-twice", "FSDP divides the mean gradient by the ranks once more",
            "DeepSpeed#7837", _ALL, _divided_twice, (),
        ),
        (
            "fsdp-sum-for-mean", "FSDP leaves the sum of gradients where the mean is asked for",
            "DeepSpeed#7718", _ALL, _never_divided, (),
        ),
        (
            "fsdp-last-rank-lost", "gradients of the last rank do not reach the sum",
            "the class of TransformerEngine#600", _ALL, _last_rank_lost, (),
        ),
        (
            "fsdp-uneven-shards-shifted", "uneven shards get gradients of the row before",
            "the class of torchao#590: padding of uneven shards", _ALL, _uneven_shards_shifted, (),
        ),
        (
            "fsdp-reduces-in-bf16", "gradients are reduced in bf16 where fp32 is asked for",
            "torchtitan#3109: the precision of reductions", ("torch.fp32", "torchao.float8.*"),
            _reduced_in_bf16, (),
        ),
        (
            "fsdp-gathers-once", "parameters that a step has changed are not gathered again",
            "the class of torchao#1327", _ALL, _gathered_once, (),
        ),
        (
            "fsdp-keeps-last-backward", "of several backwards before a step the last one counts",
            "flame#20: gradients that are to add up are lost", _ALL, _last_backward_alone, (),
        ),
        (
            "rate-times-ranks", "the rate of a step is multiplied by the ranks of the mesh",
            "the class of DeepSpeed#7718: a factor of the ranks", _ALL, _rate_times_ranks, (),
        ),
        (
            "norm-of-local-shards", "gradients are clipped by the norm of this rank's shards",
            "DeepSpeed#7837: the norm hangs on the layout", _ALL, _norm_of_local_shards, (),
        ),
        (
            "bias-added-by-every-rank", "a row-sharded linear adds its bias once a rank",
            "the class of TransformerEngine#738", _ALL, _bias_of_every_rank, ("linear",),
        ),
        (
            "input-gradient-not-added", "a column-sharded linear sends back its part of the sum",
            "the class of TransformerEngine#600", _ALL, _input_gradient_not_added, (),
        ),
        (
            "sequence-out-of-order", "gathered pieces of a sequence stand in a wrong order",
            "the class of TransformerEngine#2637", _ALL, _sequence_out_of_order, (),
        ),
        (
            "bias-gradient-of-one-rank", "one rank doubles the gradient of a shared bias",
            "torchtitan#951: one rank's values differ", _ALL, _bias_gradient_of_one_rank,
            ("linear",),
        ),
        (
            "rank-makes-nan", "one rank's linears begin their results with a NaN",
            "torchtitan#951: NaN in the first step, and nobody knows which rank's",
            ("torch.fp32", "torch.bf16"), _nan_on_second_rank, (),
        ),
        (
            "collective-not-waited-for", "what a collective still makes is read before it has",
            "pytorch#180614: nobody waits for an AsyncCollectiveTensor", _ALL, _not_waited_for,
            ("linear",),
        ),
        (
            "pipeline-microbatches-reversed", "a pipeline's microbatches meet others' targets",
            "DeepSpeed#5729: outputs and labels of different batches", _ALL,
            _microbatches_reversed, (),
        ),
        (
            "pipeline-gradients-averaged", "a pipeline divides gradients by its microbatches",
            "torchtitan#1733: scale_grads of a schedule", _ALL,
            _microbatches_averaged, (),
        ),
        (
            "resharded-a-row-off", "other layouts read later parts of saved tensors a row off",
            "Megatron-LM#5077: read from the wrong offset", _ALL, _read_a_row_off, (),
        ),
        (
            "second-moment-not-loaded", "the optimizer's second moment is not loaded",
            "Fast-LLM#436: state is lost where ranks change", _ALL, _second_moment_not_loaded, (),
        ),
        (
            "scaler-of-own-shards", "GradScaler steps on ranks whose own shards are finite",
            "pytorch#115710: other ranks do not learn of an infinity", ("torch.fp32", "torch.bf16"),
            _scaler_of_own_shards, (),
        ),
        (
            "graphs-of-other-ranks", "graphs that other ranks than the first trace are wrong",
            "the class of pytorch#175306: regions mixed up", ("torch.bf16",), _graphs_of_rank_0,
            (),
        ),
    )
]  # fmt: skip
