"""Faults of a loss whose classes are shared among ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant


def _loss() -> Any:
    from torch.distributed.tensor.parallel import loss

    return loss


def _log_softmax(reduce: Callable[..., tuple[Any, Any]]) -> AbstractContextManager[None]:
    """``reduce(x, dim, over_ranks)`` computes the maximum and the sum of exponentials of each row
    from this rank's classes ``x``; ``over_ranks(part, how)`` is an all-reduce."""

    def make(run: Any) -> Any:
        def log_softmax(x: Any, dim: int, half_to_float: bool, mesh: Any, mesh_dim: int) -> Any:
            from torch.distributed._functional_collectives import all_reduce

            def over_ranks(part: Any, how: str) -> Any:
                return all_reduce(part, how, (mesh, mesh_dim))

            wide = x.float().contiguous()
            top, total = reduce(wide, dim, over_ranks)
            return (wide - top - total.log()).to(x.dtype)

        return log_softmax

    return attribute_replaced(_loss(), "_log_softmax", make)


def _own_maximum(x: Any, dim: int, over_ranks: Any) -> tuple[Any, Any]:
    """Each rank subtracts the maximum of its own classes, not of all classes."""
    top = x.amax(dim, keepdim=True)
    return top, over_ranks((x - top).exp().sum(dim, keepdim=True), "sum")


def _counted_by_each(x: Any, dim: int, over_ranks: Any) -> tuple[Any, Any]:
    """The sum over all classes is added up over the ranks once more."""
    top = over_ranks(x.amax(dim, keepdim=True), "max")
    total = over_ranks((x - top).exp().sum(dim, keepdim=True), "sum")
    return top, over_ranks(total, "sum")


def _offset_of_even_parts() -> AbstractContextManager[None]:
    """A target is looked up at offset ``rank * floor(classes / ranks)``; the shards of uneven
    classes begin at ``rank * ceil(classes / ranks)``."""
    import torch

    def make(partition: Any) -> Any:
        def of_even(self: Any, tensor: Any, mesh: Any, mesh_dim: int) -> Any:
            ranks, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            classes = int(self.offset_shape[self.offset_dim])
            each = -(-classes // ranks)
            here = max(min(each, classes - rank * each), 0)
            off = rank * (each - classes // ranks)
            moved = torch.where(tensor < classes, (tensor + off).clamp(max=classes - 1), tensor)
            return partition(self, moved if here else tensor, mesh, mesh_dim)

        return of_even

    return attribute_replaced(_loss()._MaskPartial, "_partition_value", make)


def _ignored_count() -> AbstractContextManager[None]:
    """The mean is over all rows, including ignored ones."""

    def make(forward: Any) -> Any:
        def counted(x: Any, target: Any, *args: Any) -> Any:
            result, weight = forward(x, target, *args)
            if args[2] != _loss().Reduction.MEAN.value:
                return result, weight
            every = weight.new_full((), target.numel())
            return result * weight / every, every

        return counted

    return attribute_replaced(_loss(), "_nll_loss_forward", make)


def _gradient_of_the_sum() -> AbstractContextManager[None]:
    """A mean has the gradient of the sum."""

    def make(backward: Any) -> Any:
        def of_sum(dy: Any, x: Any, target: Any, weight: Any, how: int, *args: Any) -> Any:
            return backward(dy, x, target, weight, _loss().Reduction.SUM.value, *args)

        return of_sum

    return attribute_replaced(_loss(), "_nll_loss_and_log_softmax_backward", make)


#: The first, simplest model of a loss that can share its classes among ranks.
_LOSS = next(name for name, model in MODELS.items() if model.classes)

PLANTS = [
    Plant(
        id=id,
        family="sharding",
        title=title,
        source=source,
        recipes=("torch.fp32", "torch.bf16"),
        plant=plant,
        arms=("sharded*",),
        models=(_LOSS,),
    )
    for id, title, source, plant in (
        (
            "classes-own-maximum",
            "ranks that share classes subtract each its own maximum",
            "the class of Megatron-LM#737: ranks have other losses",
            lambda: _log_softmax(_own_maximum),
        ),
        (
            "classes-counted-by-each",
            "the classes of a row are added up once for every rank",
            "Megatron-LM#7452: a loss that is too large by the logarithm of the ranks",
            lambda: _log_softmax(_counted_by_each),
        ),
        (
            "classes-offset-of-even-parts",
            "targets of classes that ranks share unevenly are looked up at another rank's offset",
            "the class of pytorch#141335: pieces of other sizes than was assumed",
            _offset_of_even_parts,
        ),
        (
            "classes-ignored-count",
            "the mean of a loss whose classes are shared counts ignored targets",
            "Megatron-LM#7452: losses over counts of tokens that are not all valid",
            _ignored_count,
        ),
        (
            "classes-gradient-of-the-sum",
            "the mean of a loss whose classes are shared has the gradient of the sum",
            "the class of verl#2165: a loss is normalised in one direction alone",
            _gradient_of_the_sum,
        ),
    )
]
