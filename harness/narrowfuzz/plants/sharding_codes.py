"""Faults of torchao's float8 under FSDP and tensor parallelism: scales and codes that ranks share
or must share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_RANKS = ("sharded*",)
_TENSORWISE = ("torchao.float8.tensorwise",)


def _amax(change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(to_amax, x, *args, **kwargs)`` replaces torchao's amax of a tensor."""
    from torchao.float8 import float8_utils

    def make(to_amax: Any) -> Any:
        return lambda x, *args, **kwargs: change(to_amax, x, *args, **kwargs)

    return attribute_replaced(float8_utils, "tensor_to_amax", make)


def _of_this_shard(to_amax: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The amax of this rank's shard of a distributed tensor, passed off as that of the whole."""
    from torch.distributed.tensor import DTensor, Replicate

    amax = to_amax(x, *args, **kwargs)
    if not isinstance(x, DTensor) or not any(p.is_shard() for p in x.placements):
        return amax
    own = to_amax(x._local_tensor, *args, **kwargs)
    local = x._local_tensor.shape
    keeps = [
        p.is_shard() and own.dim() > 0 and own.shape[p.dim] == local[p.dim] for p in x.placements
    ]
    where = [p if keep else Replicate() for p, keep in zip(x.placements, keeps, strict=True)]
    return DTensor.from_local(own, x.device_mesh, where)


@contextmanager
def _local_amax() -> Iterator[None]:
    """The scale of a distributed tensor comes from the amax of this rank's shard."""
    with _amax(_of_this_shard):
        yield


@contextmanager
def _fsdp_amax_not_reduced() -> Iterator[None]:
    """FSDP gathers codes that every rank made with a scale from its own amax."""
    from torchao.float8 import fsdp_utils

    def make(cast: Any) -> Any:
        return lambda *args, **kwargs: cast(*args, **{**kwargs, "reduce_amax": False})

    with attribute_replaced(fsdp_utils, "hp_tensor_to_float8_dynamic", make):
        yield


@contextmanager
def _precomputed_once() -> Iterator[None]:
    """Scales of weights are precomputed once and not again after optimizer steps."""
    import torchao.float8 as float8

    def make(precompute: Any) -> Any:
        def once(model: Any) -> None:
            if not getattr(model, "_scales_are_there", False):
                precompute(model)
                model._scales_are_there = True
                for module in model.modules():
                    weight = getattr(module, "weight", None)
                    local: Any = getattr(weight, "_local_tensor", None)
                    if hasattr(local, "_precomputed_scale"):
                        module._first_scale = local._precomputed_scale
                return
            for module in model.modules():
                if hasattr(module, "_first_scale"):
                    module.weight._local_tensor._precomputed_scale = module._first_scale

        return once

    with attribute_replaced(float8, "precompute_float8_dynamic_scale_for_fsdp", make):
        yield


@contextmanager
def _lost_by_tensor_parallel() -> Iterator[None]:
    """Tensor parallelism turns a converted linear back into a plain one."""
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def make(apply: Any) -> Any:
        def applied(self: Any, module: Any, mesh: Any) -> Any:
            result = apply(self, module, mesh)
            if isinstance(module, nn.Linear):
                module.__class__ = nn.Linear
            return result

        return applied

    with (
        attribute_replaced(ColwiseParallel, "_apply", make),
        attribute_replaced(RowwiseParallel, "_apply", make),
    ):
        yield


@contextmanager
def _idle_rank_leaves() -> Iterator[None]:
    """A rank whose shard of a weight has an amax below 1 skips the all-reduce of the amax."""

    def change(to_amax: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("reduce_amax") or (args and args[0]):
            own_amax = to_amax(x, False, None, *args[2:])
            if float(own_amax) < 1.0:
                return own_amax
        return to_amax(x, *args, **kwargs)

    with _amax(change):
        yield


PLANTS = [
    Plant(
        id=id,
        family="sharding",
        title=title,
        source=source,
        recipes=recipes,
        plant=plant,
        arms=_RANKS,
    )
    for id, title, source, recipes, plant in (
        (
            "float8-amax-of-local-shard",
            "a distributed tensor is scaled by one rank's maximum",
            "torchtitan#3109",
            _TENSORWISE,
            _local_amax,
        ),
        (
            "rowwise-amax-of-local-shard",
            "a distributed row is scaled by one rank's maximum",
            "torchtitan#3109",
            ("torchao.float8.rowwise",),
            _local_amax,
        ),
        (
            "fsdp-amax-not-reduced",
            "FSDP gathers codes that ranks scaled each for itself",
            "torchao#1327",
            _TENSORWISE,
            _fsdp_amax_not_reduced,
        ),
        (
            "precomputed-scale-stale",
            "precomputed scales stay those of the first parameters",
            "float8_experimental#326",
            _TENSORWISE,
            _precomputed_once,
        ),
        (
            "float8-lost-by-tensor-parallel",
            "tensor parallelism undoes the conversion",
            "torchtitan#3199",
            ("torchao.float8.*",),
            _lost_by_tensor_parallel,
        ),
        (
            "idle-rank-leaves-collective",
            "a rank with a small shard skips the shared maximum",
            "the class of torchtitan#951: ranks that wait for ever",
            _TENSORWISE,
            _idle_rank_leaves,
        ),
    )
]
