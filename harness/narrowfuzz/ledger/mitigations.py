"""Cures: contexts in which a known divergence does not happen. A ledger entry that names a cure
explains only findings that the same case no longer shows under it.

A miscompiled loop may break any rule, depending on its garbage. A predicate wide enough for all of
that would hide other bugs; the cure distinguishes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from narrowfuzz.ledger import compiler_mitigations as compiler


@contextmanager
def a_copy_of_what_is_written_through_an_unsafe_view() -> Iterator[None]:
    """A recompute gets the original value of a product that a selective checkpoint saved and into
    which the model has then written through an ``_unsafe_view``.

    Such a view shares the storage of the saved product but has a version counter of its own. That
    counter decides here: a write that no counter records, such as ``y.data *= 2``, is not undone.
    """
    from torch import _C, Tensor, ops
    from torch.utils import checkpoint
    from torch.utils._pytree import tree_map

    home: Any = checkpoint  # its private names
    mode = home._CachingTorchDispatchMode
    usual = mode.__torch_dispatch__

    class Watched(home._VersionWrapper):  # type: ignore[misc]
        """A saved product, and the view through which it may be overwritten."""

        def __init__(self, saved: Tensor, view: Tensor) -> None:
            super().__init__(saved)
            self.view, self.before, self.copy = view, view._version, saved.clone()

        def get_val(self, allow_cache_entry_mutation: bool) -> Any:
            if self.view._version == self.before:
                return super().get_val(allow_cache_entry_mutation)
            return home._VersionWrapper(self.copy).get_val(allow_cache_entry_mutation)

    def watched(one: Any, view: Tensor) -> Any:
        """The entry that replaces ``one`` in the checkpoint's cache if this view is of it."""
        saved = one.val if type(one) is home._VersionWrapper else None  # else it is recomputed
        aliased = isinstance(saved, Tensor) and _C._is_alias_of(saved, view)
        return Watched(saved, home._detach_helper(view)) if aliased else one

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = usual(self, func, types, args, kwargs)
        if func is ops.aten._unsafe_view.default:
            for entries in self.storage.values():
                entries.update(
                    {i: tree_map(partial(watched, view=out), entry) for i, entry in entries.items()}
                )
        return out

    with patch.object(mode, "__torch_dispatch__", dispatch):
        yield


@contextmanager
def a_mask_of_minus_infinity() -> Iterator[None]:
    """A boolean mask of attention is converted to 0 and -infinity in the queries' dtype."""
    import torch
    from torch.nn import functional

    usual = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *more: Any, **how: Any):  # type: ignore[no-untyped-def]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, -torch.inf)
        return usual(query, key, value, attn_mask, *more, **how)

    with patch.object(functional, "scaled_dot_product_attention", attention):
        yield


@contextmanager
def buffers_that_a_recompute_leaves() -> Iterator[None]:
    """A module that is called inside a backward, as a checkpoint's recompute does, does not change
    its buffers and those of its children. They are restored without changing their version
    counters, as autograd may have saved one for backward."""
    from torch import _C, Tensor
    from torch.nn.modules import module as hooks
    from torch.utils._python_dispatch import _disable_current_modes as unseen

    # by module: on ranks that are threads, modules of several models are called at a time
    before: defaultdict[Any, list[dict[str, Tensor]]] = defaultdict(list)

    def recomputing(module: Any) -> bool:
        return _C._current_graph_task_id() != -1 and any(True for _ in module.buffers())

    def keep(module: Any, args: Any) -> None:
        if recomputing(module):
            with unseen():  # a selective checkpoint knows only operations that the forward ran
                before[module].append({n: b.clone() for n, b in module.named_buffers()})

    def restore(module: Any, args: Any, output: Any) -> None:
        if recomputing(module):
            with unseen():
                for name, buffer in before[module].pop().items():
                    module.get_buffer(name).data.copy_(buffer)

    handles = (
        hooks.register_module_forward_pre_hook(keep),
        hooks.register_module_forward_hook(restore, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attributes_that_parameters_keep() -> Iterator[None]:
    """torchao's wrapping of weights gives the new parameters the attributes of the old ones."""
    from torchao.prototype.moe_training import conversion_utils

    usual = conversion_utils._swap_params

    def swap(module: Any, **how: Any) -> Any:
        if not hasattr(module, "named_parameters"):  # a parameter alone
            return usual(module, **how)
        given = {name: vars(parameter) for name, parameter in module.named_parameters()}
        swapped = usual(module, **how)
        for name, parameter in swapped.named_parameters():
            vars(parameter).update(given.get(name, {}))
        return swapped

    with patch.object(conversion_utils, "_swap_params", swap):
        yield


@contextmanager
def linears_with_a_forward_of_their_own() -> Iterator[None]:
    """convert_to_float8_training leaves a subclass of nn.Linear alone that has its own forward."""
    from torch import nn
    from torchao.float8 import float8_linear_utils

    usual = float8_linear_utils.swap_linear_layers

    def swap(module: Any, convert: Any, *, module_filter_fn: Any = None) -> Any:
        def plain(layer: Any, name: str) -> bool:
            asked = module_filter_fn is None or module_filter_fn(layer, name)
            return asked and type(layer).forward is nn.Linear.forward

        return usual(module, convert, module_filter_fn=plain)

    with patch.object(float8_linear_utils, "swap_linear_layers", swap):
        yield


@contextmanager
def contiguous_fused_steps() -> Iterator[None]:
    """Fused kernels of optimizers update contiguous copies, which are then copied back."""
    import torch

    def on_copies(kernel: Any, *lists: Any, **how: Any) -> None:
        copies = [[t.contiguous() for t in tensors] for tensors in lists]
        kernel(*copies, **how)
        for tensors, stepped in zip(lists, copies, strict=True):
            for t, copy in zip(tensors, stepped, strict=True):
                if copy is not t:
                    t.copy_(copy)

    with ExitStack() as stack:
        for name in ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
            kernel = getattr(torch, name)
            stack.enter_context(patch.object(torch, name, partial(on_copies, kernel)))
        yield


@contextmanager
def infinities_of_all_ranks() -> Iterator[None]:
    """ShardedGradScaler checks for infinities on all ranks before a fused optimizer steps."""
    import torch.distributed as dist
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    usual = ShardedGradScaler._check_inf_per_device

    def check_all_ranks(scaler: Any, optimizer: Any) -> Any:
        found = usual(scaler, optimizer)
        for t in found.values():
            dist.all_reduce(t, op=dist.ReduceOp.MAX, group=scaler.process_group)
        return found

    with patch.object(ShardedGradScaler, "_check_inf_per_device", check_all_ranks):
        yield


@contextmanager
def infinities_counted_once() -> Iterator[None]:
    """The infinity flag that ShardedGradScaler reduces over all ranks is limited to 1."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    usual = ShardedGradScaler.unscale_

    def once(scaler: Any, optimizer: Any) -> None:
        usual(scaler, optimizer)
        for t in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            t.clamp_(max=1.0)

    with patch.object(ShardedGradScaler, "unscale_", once):
        yield


@contextmanager
def one_rank_that_divides_once() -> Iterator[None]:
    """FSDP on a mesh of one rank does not divide gradients before and after the reduction, as the
    code that copies the gradient already divides by the factor."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    usual = collectives._get_gradient_divide_factors

    def factors(group: Any, replicas: Any, dtype: Any, device: str, factor: Any, *more: Any) -> Any:
        before, after, *operations = usual(group, replicas, dtype, device, factor, *more)
        if factor is not None and (group is None or group.size() == 1):
            before = after = None
        return before, after, *operations

    with patch.object(collectives, "_get_gradient_divide_factors", factors):
        yield


@contextmanager
def optimizers_that_begin_at_zero() -> Iterator[None]:
    """State that torch.distributed.checkpoint creates for an optimizer before its first step is
    zero, as if no step had been made."""
    from torch import Tensor
    from torch.distributed.checkpoint import state_dict

    usual = state_dict._init_optim_state

    def begin(optimizer: Any) -> None:
        begun = bool(optimizer.state)
        usual(optimizer)
        for state in optimizer.state.values() if not begun else ():
            for moment in state.values():
                if isinstance(moment, Tensor):
                    moment.zero_()

    with patch.object(state_dict, "_init_optim_state", begin):
        yield


@contextmanager
def sharded_gradients_first() -> Iterator[None]:
    """GradScaler's infinity check gets sharded gradients before replicated ones, so that it is
    reduced over all ranks."""
    import torch
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    usual = handlers[unscale]

    def ordered(call: Any, args: Any, kwargs: Any) -> Any:
        grads, *rest = args
        whole = [sum(p.is_replicate() for p in grad.placements) for grad in grads]
        order = sorted(range(len(grads)), key=whole.__getitem__)
        return usual(call, ([grads[i] for i in order], *rest), kwargs)

    with patch.dict(handlers, {unscale: ordered}):
        yield


@contextmanager
def skipped_steps_without_momentum() -> Iterator[None]:
    """A skipped step of fused SGD creates no momentum buffers."""
    from torch.optim import sgd

    usual = sgd._fused_sgd

    def stepped(params: Any, grads: Any, buffers: list[Any], *, found_inf: Any, **how: Any) -> None:
        begins = all(buffer is None for buffer in buffers)
        usual(params, grads, buffers, found_inf=found_inf, **how)
        if begins and found_inf is not None and found_inf.item():
            buffers[:] = [None] * len(buffers)

    with patch.object(sgd, "_fused_sgd", stepped):
        yield


#: Name that an entry uses -> cure; it is entered around everything that builds and runs a case.
CURES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    cure.__name__: cure
    for cure in (
        a_copy_of_what_is_written_through_an_unsafe_view,
        a_mask_of_minus_infinity,
        attributes_that_parameters_keep,
        compiler.a_name_for_each_stored_reduction,
        compiler.alpha_in_patterns,
        buffers_that_a_recompute_leaves,
        contiguous_fused_steps,
        compiler.contiguous_operands_of_flex,
        compiler.emulated_precision_casts,
        compiler.gradients_with_the_strides_of_eager,
        compiler.masked_booleans_of_one_type,
        infinities_counted_once,
        infinities_of_all_ranks,
        linears_with_a_forward_of_their_own,
        one_rank_that_divides_once,
        optimizers_that_begin_at_zero,
        sharded_gradients_first,
        skipped_steps_without_momentum,
        compiler.specialized_floats,
        compiler.sums_in_fp32,
        compiler.without_slp_vectorizer,
    )
}
