"""Ranks that are threads find out together how DTensor lays an operator's results out.

That depends on the operator, on the layouts and shapes of its arguments and on the mesh's shape,
not on the rank, and takes torch much longer than the operator itself, because it compares all
combinations of layouts over all dimensions of the mesh. torch remembers it for each thread and for
each mesh; here all ranks and meshes of one run remember it together, and no later run does: another
fault may be planted by then.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

#: Placements that hold no state of a rank's own, as that of a vocabulary's shards does.
_STATELESS = {Partial, Replicate, Shard, _StridedShard}


class _OfOneRankError(Exception):
    """Something that need not be the same for all ranks."""


@contextmanager
def shared_propagation() -> Iterator[None]:
    """Inside it, what one rank finds out about an operator is known to all. Where torch is built in
    another way than from 2.11 to 2.13, each finds it out by itself."""
    own = getattr(ShardingPropagator, "propagate_op_sharding_non_cached", None)
    if own is None or "_comparison_key" not in OpSchema.__annotations__:
        yield
        return
    known: dict[Any, OutputSharding] = {}
    # Held by the rank that finds something out, which the others then need not. It waits for nobody
    # meanwhile; an operator may ask for those that it is made of.
    lock = threading.RLock()

    def propagate(propagator: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        if detect_fake_mode() is not None:  # while a graph is made, sizes may be symbols
            return own(propagator, schema)
        with lock:
            return _propagated(lambda: own(propagator, schema), schema, known)

    ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = own  # type: ignore[method-assign]


def _propagated(
    find: Callable[[], OutputSharding], schema: OpSchema, known: dict[Any, OutputSharding]
) -> OutputSharding:
    meshes: list[DeviceMesh] = []
    numbers: dict[int, int] = {}  # of meshes, by identity

    def layout(spec: DTensorSpec) -> tuple[Any, ...]:
        if not {type(placement) for placement in spec.placements} <= _STATELESS:
            raise _OfOneRankError
        if id(spec.mesh) not in numbers:
            numbers[id(spec.mesh)] = len(meshes)
            meshes.append(spec.mesh)
        fields = {name: x for name, x in vars(spec).items() if name not in ("mesh", "_hash")}
        return numbers[id(spec.mesh)], *sorted(fields.items())

    try:
        compared = _mapped(schema._comparison_key, layout)  # by torch's own cache
        shapes = [(mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names) for mesh in meshes]
        key = schema.op, compared, *shapes
        hash(key)
    except (_OfOneRankError, TypeError):  # what is compared may be without a hash
        return find()
    if key not in known:
        found = find()
        if found.use_val_from_redistribute_schema:  # these are sizes of the rank's part
            return found
        known[key] = _moved(found, lambda mesh: numbers[id(mesh)])
    return _moved(known[key], meshes.__getitem__)


def _moved(found: OutputSharding, mesh_of: Callable[[Any], Any]) -> OutputSharding:
    """The same over other meshes."""

    def moved(spec: DTensorSpec) -> DTensorSpec:
        spec = copy.copy(spec)
        spec.mesh = mesh_of(spec.mesh)
        return spec

    schema = found.redistribute_schema
    if schema is not None:
        schema = copy.copy(schema)
        schema.args_schema = _mapped(schema.args_schema, moved)
        schema.kwargs_schema = _mapped(schema.kwargs_schema, moved)
        schema._recompute_comparison_key()
    return OutputSharding(_mapped(found.output_spec, moved), schema, found.needs_redistribute)


def _mapped(x: Any, change: Callable[[DTensorSpec], Any]) -> Any:
    """The same with every layout in it changed."""
    if isinstance(x, DTensorSpec):
        return change(x)
    if type(x) in (tuple, list):
        return type(x)(_mapped(item, change) for item in x)
    if type(x) is dict:
        return {name: _mapped(item, change) for name, item in x.items()}
    return x
