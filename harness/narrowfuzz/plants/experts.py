"""Faults of ranks that share experts and of ranks that are replicas: in the rows that they exchange
and in how FSDP reduces their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_PLAIN = ("torch.fp32", "torch.bf16")
_WITH_EXPERTS = tuple(name for name, model in MODELS.items() if model.experts)


@contextmanager
def _exchanged(change: Callable[[Any], Any]) -> Iterator[None]:
    """``change(rows)`` is applied to the rows that an all-to-all returns, for both of torch's
    functional operators: the plain one and the one that autograd differentiates."""
    import torch

    ops = torch.ops

    def make(exchange: Any) -> Any:
        def exchanging(rows: Any, *how: Any) -> Any:
            rows_in = exchange(rows, *how)
            return change(ops._c10d_functional.wait_tensor(rows_in)) if rows.dim() > 1 else rows_in

        return exchanging

    with (
        attribute_replaced(ops._c10d_functional, "all_to_all_single", make),
        attribute_replaced(ops._c10d_functional_autograd, "all_to_all_single", make),
    ):
        yield


@contextmanager
def _last_row_lost() -> Iterator[None]:
    """The last row that an exchange returns is zero."""
    import torch

    def change(rows: Any) -> Any:
        if len(rows) < 2:
            return rows
        return torch.cat([rows[:-1], torch.zeros_like(rows[-1:])])

    with _exchanged(change):
        yield


@contextmanager
def _gradient_of_first_row_lost() -> Iterator[None]:
    """The gradient of the first row that an exchange returns is zero."""
    import torch

    class Unlearnt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any) -> Any:
            return rows.view_as(rows)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            grad = grad.clone()
            grad[:1] = 0
            return grad

    with _exchanged(Unlearnt.apply):
        yield


def _reductions(change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """``change(arguments)`` may alter the arguments of FSDP's reduction of gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def make(reduce: Any) -> Any:
        signature = inspect.signature(reduce)

        def reducing(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            change(given.arguments)
            return reduce(*given.args, **given.kwargs)

        return reducing

    return attribute_replaced(_fsdp_param_group, "foreach_reduce", make)


@contextmanager
def _factor_of_one_rank_ignored() -> Iterator[None]:
    """On a mesh of one rank, FSDP ignores ``gradient_divide_factor``."""

    def change(arguments: dict[str, Any]) -> None:
        if arguments["reduce_scatter_group"].size() == 1:
            arguments["gradient_divide_factor"] = None

    with _reductions(change):
        yield


@contextmanager
def _replicas_apart() -> Iterator[None]:
    """Gradients are added over the shards of each replica but not over the replicas."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["all_reduce_group"] = None

    with _reductions(change):
        yield


@contextmanager
def _saved_as_plain_shards() -> Iterator[None]:
    """Experts that are sharded over two meshes are saved as if their pieces lay in rank order."""
    from torch.distributed.checkpoint import planner_helpers
    from torch.distributed.tensor import Shard

    def make(place: Any) -> Any:
        def placed(shape: Any, mesh: Any, placements: Any) -> Any:
            plain = [Shard(p.dim) if hasattr(p, "split_factor") else p for p in placements]
            return place(shape, mesh, plain)

        return placed

    with attribute_replaced(planner_helpers, "compute_local_shape_and_global_offset", make):
        yield


@contextmanager
def _norm_of_experts_inflated() -> Iterator[None]:
    """The norm of gradients on the experts' mesh is multiplied by the number of its ranks."""
    import torch

    def make(total_norm: Any) -> Any:
        def norm(grads: Any, *args: Any, **kwargs: Any) -> Any:
            names = getattr(getattr(grads[0], "device_mesh", None), "mesh_dim_names", ()) or ()
            found = total_norm(grads, *args, **kwargs)
            return found * grads[0].device_mesh.size() if "experts" in names else found

        return norm

    with attribute_replaced(torch.nn.utils, "get_total_norm", make):
        yield


@contextmanager
def _gradient_parts_taken_for_whole() -> Iterator[None]:
    """``to_local`` ignores ``grad_placements``: a gradient that is this rank's part of a sum is
    taken for the whole."""
    from torch.distributed.tensor import DTensor

    def make(to_local: Any) -> Any:
        def local(tensor: Any, *, grad_placements: Any = None) -> Any:
            return to_local(tensor)

        return local

    with attribute_replaced(DTensor, "to_local", make):
        yield


@contextmanager
def _wrapper_lost() -> Iterator[None]:
    """The parts of a wrapped weight that ranks receive are plain tensors: nobody quantises them."""
    import torch
    from torchao.prototype.moe_training import tensor

    wrapped = tensor._ops_to_preserve_subclass
    kept = wrapped - {torch.ops.aten.split.Tensor}
    with attribute_replaced(tensor, "_ops_to_preserve_subclass", lambda _: kept):
        yield


PLANTS = [
    Plant(
        id=id, family="experts on ranks", title=title, source=source, recipes=_PLAIN, plant=plant,
        arms=("sharded*",), models=models,
    )
    for id, title, source, plant, models in (
        (
            "exchange-loses-last-row", "the last row of an exchange between experts is zero",
            "the class of transformers#45621: rows that nobody writes", _last_row_lost,
            _WITH_EXPERTS,
        ),
        (
            "exchange-loses-first-gradient", "the first row of an exchange has no gradient",
            "the class of marin#7665: an exchange that cuts gradients", _gradient_of_first_row_lost,
            _WITH_EXPERTS,
        ),
        (
            "fsdp-one-rank-ignores-factor", "FSDP on one rank ignores the factor of its gradients",
            "pytorch#167178: experts whose ranks are all in one group",
            _factor_of_one_rank_ignored, _WITH_EXPERTS,
        ),
        (
            "hsdp-replicas-apart", "gradients are not added over replicas",
            "the class of verl#7493: gradients that are not synchronised", _replicas_apart, (),
        ),
        (
            "norm-of-experts-inflated", "the norm of experts' gradients is too large",
            "Megatron-LM#6489: a norm over gradients of two meshes", _norm_of_experts_inflated,
            _WITH_EXPERTS,
        ),
        (
            "experts-saved-as-plain-shards", "experts on two meshes are saved in another order",
            "the class of Megatron-LM#5077: read from the wrong offset", _saved_as_plain_shards,
            _WITH_EXPERTS,
        ),
        (
            "expert-parts-send-no-sum", "a part of an expert sends back its own rows' gradient",
            "torchtitan#1805, torchtitan#2387: to_local without grad_placements",
            _gradient_parts_taken_for_whole, _WITH_EXPERTS,
        ),
    )
]  # fmt: skip
PLANTS.append(
    Plant(
        "experts-shared-unquantised",
        "experts on ranks",
        "experts are no longer quantised once ranks share them",
        "the class of torchtitan#3199: parallelism that undoes a conversion",
        ("torchao.mxfp8.*",),
        _wrapper_lost,
        arms=("sharded*",),
        models=_WITH_EXPERTS,
    )
)
