"""Ranks that are threads find out together how DTensor lays an operator's results out.

That follows from the operator, its arguments, their layouts and the mesh's shape, whichever rank
asks, and takes torch much longer than the operator itself: it compares all combinations of layouts
over all dimensions of the mesh. torch remembers it for each thread. Here all ranks of one run
remember it together, where no argument need be moved for the operator and everything that it
depends on can be compared. No later run does, as another fault may be planted by then, and neither
do scripts of findings.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

#: Placements without a state of a rank's own, which the mask of a vocabulary's shards has.
_STATELESS = {Partial, Replicate, Shard, _StridedShard}
_OF_TORCH = {torch.dtype, torch.device, torch.layout, torch.memory_format}
#: Arguments beside tensors that are the same if their type and value are.
_PLAIN = {bool, int, float, str, type(None), *_OF_TORCH}
#: What torch's answer consists of; a torch whose answer has more is left alone.
_ANSWER = {
    "output_spec",
    "redistribute_schema",
    "needs_redistribute",
    "use_val_from_redistribute_schema",
}


class _OfOneRankError(Exception):
    """Something that need not be the same for all ranks."""


@contextmanager
def shared_propagation() -> Iterator[None]:
    """Inside it, what one rank finds out about an operator is known to all. Where torch is built in
    another way than from 2.11 to 2.13, each finds it out by itself."""
    try:
        from torch.distributed.tensor._op_schema import OutputSharding
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        own = ShardingPropagator.propagate_op_sharding_non_cached
    except (ImportError, AttributeError):
        yield
        return
    if {field.name for field in dataclasses.fields(OutputSharding)} != _ANSWER:
        yield
        return
    known: dict[Any, Any] = {}
    # Held by the rank that finds something out, which the others then need not. It waits for nobody
    # meanwhile; an operator may ask for those that it is made of.
    lock = threading.RLock()

    def propagate(propagator: Any, schema: Any) -> OutputSharding:
        meshes: list[DeviceMesh] = []
        try:
            key = schema.op, _shared((schema.args_schema, schema.kwargs_schema), meshes)
        except _OfOneRankError:
            return own(propagator, schema)
        shapes = tuple((m.device_type, tuple(m.shape), m.mesh_dim_names) for m in meshes)
        with lock:
            if (key, shapes) not in known:
                found = own(propagator, schema)
                if found.needs_redistribute or found.redistribute_schema is not None:
                    return found
                try:
                    result = _shared(found.output_spec, over := [*meshes])
                except _OfOneRankError:
                    return found
                if len(over) > len(meshes):
                    return found
                known[key, shapes] = result
            return OutputSharding(_own(known[key, shapes], meshes))

    ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = own  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Layout:
    """A DTensorSpec with its mesh's number."""

    mesh: int
    fields: tuple[tuple[str, Any], ...]


def _shared(x: Any, meshes: list[DeviceMesh]) -> Any:
    """The same for all ranks that say the same: layouts with the mesh's place in ``meshes``, to
    which a mesh that is not there is added; other values as text."""
    if type(x) is DTensorSpec:
        meta = x.tensor_meta
        sizes = () if meta is None else (*meta.shape, *meta.stride)
        if not {type(placement) for placement in x.placements} <= _STATELESS:
            raise _OfOneRankError
        if any(type(size) is not int for size in sizes):  # but a symbol, while a graph is made
            raise _OfOneRankError
        if all(mesh is not x.mesh for mesh in meshes):
            meshes.append(x.mesh)
        number = next(i for i, mesh in enumerate(meshes) if mesh is x.mesh)
        names = (field.name for field in dataclasses.fields(x) if field.name != "mesh")
        return _Layout(number, tuple((name, getattr(x, name)) for name in names))
    if type(x) in (tuple, list):
        return type(x), tuple(_shared(item, meshes) for item in x)
    if type(x) is dict:
        return dict, tuple((name, _shared(item, meshes)) for name, item in x.items())
    if type(x) not in _PLAIN:
        raise _OfOneRankError
    return repr(x)  # 1 equals 1.0 and True, and NaN does not equal itself


def _own(shared: Any, meshes: list[DeviceMesh]) -> Any:
    """A rank's own layouts again: one, several, or None where there is no tensor."""
    if isinstance(shared, _Layout):
        return DTensorSpec(meshes[shared.mesh], **dict(shared.fields))
    if isinstance(shared, str):
        return None
    kind, content = shared
    return kind(_own(item, meshes) for item in content)
