"""How results are laid out is found out once for all ranks, and each has it over its own mesh."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from narrowfuzz.arms.propagation import shared_propagation
from narrowfuzz.play.ranks import on_ranks


def test_ranks_find_out_once_and_have_their_own_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    own, found = ShardingPropagator.propagate_op_sharding_non_cached, list[str]()

    def noted(propagator: Any, schema: Any) -> Any:
        found.append(f"{schema.op} {schema.args_spec[0].tensor_meta.shape}")
        return own(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", noted)
    whole = torch.arange(48.0).reshape(8, 6)

    def main(rank: int, mesh: Any) -> tuple[Any, ...]:
        _clear_sharding_prop_cache()
        a, b = (distribute_tensor(whole, mesh, [Shard(0), Shard(dim)]) for dim in (0, 1))
        results = a + b, b.sum(0), b @ distribute_tensor(whole.T.clone(), mesh, [Replicate()] * 2)
        assert {t.device_mesh for t in results} == {mesh}
        assert results[0].device_mesh._thread_id == threading.get_ident()
        assert any(isinstance(p, Partial) for p in results[1].placements)
        return tuple((t.placements, t.full_tensor()) for t in results)

    shape = {"data": 2, "tensor": 2}
    apart = on_ranks(shape, main)
    alone = {*found}
    for _ in range(2):  # a later run knows nothing of an earlier one
        found.clear()
        with shared_propagation():
            together = on_ranks(shape, main)
        for one, other in zip(apart, together, strict=True):
            for (where, t), (there, u) in zip(one, other, strict=True):
                assert where == there and torch.equal(t, u)
        assert sorted(found) == sorted(alone)
