"""Parameters that should be the same on several ranks after a step: those replicated over a device
mesh, and those of DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from narrowfuzz_watch import screen
from narrowfuzz_watch.place import Place


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def replicated(
    optimizer: torch.optim.Optimizer, place: Place
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(name, ranks, digest) of each parameter that several ranks hold."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    everyone = _data_parallel(optimizer, place.roots)
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        groups = _meshes(parameter) or ([everyone] if everyone else [])
        if groups:
            name = place.parameter(parameter) or f"parameter {number}"
            found = screen.digest([local(parameter.detach())])
            yield from ((name, ranks, found) for ranks in groups)


def _meshes(parameter: torch.Tensor) -> list[tuple[int, ...]]:
    """The ranks that hold the same shard of a distributed tensor, for each dimension of its device
    mesh over which it is replicated."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return []
    mesh: Any = parameter.device_mesh
    return [
        tuple(torch.distributed.get_process_group_ranks(mesh.get_group(dimension)))
        for dimension, placement in enumerate(placements)
        if placement.is_replicate() and mesh.size(dimension) > 1
    ]


def _data_parallel(
    optimizer: torch.optim.Optimizer, roots: list[torch.nn.Module]
) -> tuple[int, ...]:
    """The ranks of DistributedDataParallel, if a module of the program is one and it holds the
    optimizer's parameters."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    active = getattr(parallel, "DistributedDataParallel", None) if parallel else None
    if active is None:
        return ()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in roots:
        if isinstance(module, active) and any(id(p) in held for p in module.parameters()):
            return tuple(torch.distributed.get_process_group_ranks(module.process_group))
    return ()
