"""Expert parallelism: each rank has some of the experts, and gets the rows of all ranks for these.

As in trainers, ranks exchange rows before the experts and again behind them. Scripts contain the
source of these functions, with the values of a job substituted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.func import functional_call

from narrowfuzz.play.layers import whole_sum
from narrowfuzz.play.player import Trace

#: The dimension of each weight of the experts that holds their hidden features, which
#: tensor-parallel ranks shard.
HIDDEN = {"w1": 1, "w2": 2, "w3": 1}


def in_groups(mesh: Any, experts: int) -> Any:
    """The mesh with its data-parallel ranks in groups of ``experts`` ranks, which share experts."""
    # DTensor's cache for operators holds the groups of an earlier, equal mesh
    _clear_sharding_prop_cache()
    groups = mesh["data"].size() // experts
    data = mesh.mesh_dim_names.index("data")  # torch 2.11 refuses each name that there is
    parts = mesh._unflatten(data, (groups, experts), ("groups", "experts"))
    shared = [name for name in parts.mesh_dim_names if name != "replicas"]
    parts[tuple(shared)]._flatten()  # for sums over all of these ranks at once
    return parts


def share_experts(model: nn.Module, mesh: Any) -> None:
    """Shard a model's experts over the ranks of a mesh, equally many consecutive ones on each; a
    second, tensor-parallel dimension of the mesh shards the hidden features of each expert."""
    exchange = Exchange()
    distribute_module(
        model.get_submodule("experts"), mesh, shard_parameters, exchange.sends, exchange.returns
    )


def shard_parameters(name: str, module: nn.Module, mesh: Any) -> None:
    """Shard each parameter along its experts and, if the mesh is 2-D, along its hidden features."""
    for key, parameter in [*module.named_parameters(recurse=False)]:
        pieces = [Shard(0), Shard(HIDDEN[key])][: mesh.ndim]
        laid = distribute_tensor(parameter.data, mesh, pieces)
        module.register_parameter(key, nn.Parameter(laid))


class Exchange:
    """Sends rows to the ranks that have their experts, and the results back."""

    def sends(self, module: nn.Module, given: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
        """From this rank's rows, sorted by expert, and the ends of the rows of each of all experts,
        to the rows of all ranks for the experts of this rank, and their ends."""
        rows, offs = given
        if mesh.ndim > 1:  # every shard of an expert adds a summand to these rows' gradient
            whole = DTensor.from_local(rows, mesh["tensor"], [Replicate()])
            rows = whole.to_local(grad_placements=[Partial()])
        ranks, group = mesh["experts"].size(), mesh["experts"].get_group()
        counts = rows_of_each(offs)
        # the number of rows from each rank for each expert here
        received = all_to_all_single(counts, None, None, group).reshape(ranks, -1)
        self.sent = counts.reshape(ranks, -1).sum(1).tolist()
        self.received = received.sum(1).tolist()
        rows = all_to_all_single_autograd(rows, self.received, self.sent, group)
        self.order, ends = by_expert(received)
        return rows[self.order], ends

    def returns(self, module: nn.Module, products: torch.Tensor, mesh: Any) -> torch.Tensor:
        """Send the experts' outputs back to the ranks that their rows came from."""
        products, group = products[self.order.argsort()], mesh["experts"].get_group()
        products = all_to_all_single_autograd(products, self.sent, self.received, group)
        if mesh.ndim > 1:
            parts = DTensor.from_local(products, mesh["tensor"], [Partial()])
            products = whole_sum(parts).to_local()
        return products


def rows_of_each(offs: torch.Tensor) -> torch.Tensor:
    """The number of rows in each group, from the ends of all groups."""
    return offs.diff(prepend=offs.new_zeros(1))


def by_expert(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The permutation from rows by rank, then expert, to rows by expert, then rank, and where the
    rows of each expert end; ``counts`` of rows are [ranks, experts]."""
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    order = expert.repeat_interleave(counts.flatten()).argsort(stable=True)
    return order, counts.sum(0).cumsum(0).to(torch.int32)


class CopyWithGradient(torch.autograd.Function):
    """A copy whose gradient is a copy, too: the order in which products are summed may depend on
    where a tensor begins in memory, and a slice begins elsewhere than a rank's own tensor."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor) -> Any:
        return piece.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.clone()


def copied_with_gradient(piece: torch.Tensor) -> torch.Tensor:
    """A copy of the piece in memory of its own."""
    return CopyWithGradient.apply(piece)  # type: ignore[no-any-return]


class ExpertParallelReference(nn.Module):
    """The training of ranks that share experts, in one process: one model for the rows of each
    rank, all with the experts of the first, each cut into one part per tensor-parallel rank."""

    def __init__(self, model: nn.Module, ranks: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.models = nn.ModuleList([model, *(copy.deepcopy(model) for _ in range(ranks - 1))])
        for other in self.models[1:]:
            other.experts = model.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        models: Any = self.models
        chunks = x.chunk(len(models))
        pieces = [copied_with_gradient(rows.reshape(-1, x.shape[-1])) for rows in chunks]
        routed = [model.routed(rows) for model, rows in zip(models, pieces, strict=True)]
        counts = torch.stack([rows_of_each(offs) for _, offs, *_ in routed])
        order, _ = by_expert(counts)
        sent, products, begin = torch.cat([rows for rows, *_ in routed]), [], 0
        # cut as ranks have them: a kernel's result for an element may depend on its position
        for rank, share in enumerate(counts.chunk(len(models), 1)):
            here = order[begin : (begin := begin + int(share.sum()))]
            which = slice(rank * share.shape[1], (rank + 1) * share.shape[1])
            products.append(self.products(sent[here], by_expert(share)[1], which))
        parts = torch.cat(products)[order.argsort()].split(counts.sum(1).tolist())
        each = zip(models, pieces, parts, routed, strict=True)
        y = [
            copied_with_gradient(model.combined(rows, part, *back))
            for model, rows, part, (_, _, *back) in each
        ]
        return torch.cat(y).reshape(x.shape)

    def products(self, rows: torch.Tensor, offs: torch.Tensor, which: slice) -> torch.Tensor:
        """The outputs of the experts ``which``: the sums of the outputs of their parts."""
        experts: Any = self.models.get_submodule("0.experts")
        weights = {key: w[which] for key, w in experts.named_parameters()}
        if self.parts == 1:
            return functional_call(experts, weights, (rows, offs))  # type: ignore[no-any-return]
        pieces = {key: w.chunk(self.parts, HIDDEN[key]) for key, w in weights.items()}
        return sum(  # type: ignore[return-value]
            functional_call(
                experts,
                {key: copied_with_gradient(w[part]) for key, w in pieces.items()},
                (copied_with_gradient(rows), offs),
            )
            for part in range(self.parts)
        )


def rolled_inputs(
    tensors: Mapping[str, torch.Tensor], ranks: int, forwards: int
) -> dict[str, torch.Tensor]:
    """The inputs of ``ExpertParallelReference`` for all ``forwards``: from one forward to the next,
    each rank rolls its own rows by one more."""
    rows = tensors["input"].chunk(ranks)
    later = {f"input@{n}": torch.cat([r.roll(n, 0) for r in rows]) for n in range(1, forwards)}
    return {**tensors, **later}


def split_by_rank(trace: Trace, ranks: int) -> list[Trace]:
    """Each rank's part of the trace of ``ExpertParallelReference``: its rows, its calls, the
    gradients of its own parameters and of all those of the experts."""
    traces = [Trace() for _ in range(ranks)]
    for key, t in trace.results.items():
        pieces = t.chunk(ranks) if t.ndim else [t] * ranks
        for rank, one in enumerate(traces):
            if not key.startswith("models."):
                one.results[key] = pieces[rank].clone()
            elif key.startswith((f"models.{rank}.", "models.0.experts.")):
                one.results[key.split(".", 2)[2]] = t
    for call in trace.calls:
        _, rank, call.module = call.module.split(".", 2)
        traces[int(rank)].calls.append(call)
    return traces
