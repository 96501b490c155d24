"""How results are laid out is found out once for all ranks, and each has it over its own mesh."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from narrowfuzz.arms import sharded
from narrowfuzz.arms.propagation import shared_propagation
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.play.ranks import on_ranks
from narrowfuzz.power.effect import digest, draw_on_ranks
from samples import every_recipe

SHAPE = {"data": 2, "tensor": 2}


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
        results = a + a, b.sum(0), b * distribute_tensor(whole, mesh, [Replicate()] * 2)
        assert {t.device_mesh for t in results} == {mesh}
        assert results[0].device_mesh._thread_id == threading.get_ident()
        assert any(isinstance(p, Partial) for p in results[1].placements)
        return tuple((t.placements, t.full_tensor()) for t in results)

    apart = on_ranks(SHAPE, main)
    alone = found.count("aten.add.Tensor torch.Size([8, 6])")
    for _ in range(2):  # a later run knows nothing of an earlier one
        found.clear()
        with shared_propagation():
            together = on_ranks(SHAPE, main)
        for one, other in zip(apart, together, strict=True):
            for (where, t), (there, u) in zip(one, other, strict=True):
                assert where == there and torch.equal(t, u)
        assert alone == 4 and found.count("aten.add.Tensor torch.Size([8, 6])") == 1


def test_what_need_not_be_the_same_is_found_out_by_each() -> None:
    """Numbers of other types, defaults that are left out, and ids outside of a rank's vocabulary,
    which DTensor keeps in the layout."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    whole, ids = torch.arange(48).reshape(8, 6), torch.tensor([[7, 0, 3], [1, 6, 5]])

    def main(rank: int, mesh: Any) -> list[torch.Tensor]:
        _clear_sharding_prop_cache()
        a = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        weight = distribute_tensor(whole.double(), mesh, [Replicate(), Shard(0)])
        if rank % 2:  # of what a rank calls before, torch itself compares no dtype
            a.sum(1)
        sums = a.sum(0), a.sum(1, dtype=torch.float64), a.sum(1, keepdim=True)
        found = [(t._spec.tensor_meta, t.full_tensor()) for t in (a + 1, a + 1.0, a + True, *sums)]
        for batch in (ids, ids.flip(1), ids):
            given = distribute_tensor(batch, mesh, [Shard(0), Replicate()])
            rows = torch.nn.functional.embedding(given, weight).detach()
            torch.distributed.barrier()  # all have looked up, none has added
            found.append((rows._spec.tensor_meta, rows.full_tensor()))
        return found

    apart = on_ranks(SHAPE, main)
    with shared_propagation():
        together = on_ranks(SHAPE, main)
    for one, other in zip(apart, together, strict=True):
        for (meta, t), (says, u) in zip(one, other, strict=True):
            assert meta == says and torch.equal(t, u)
    assert torch.equal(apart[0][-1][1], whole.double()[ids])


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(4))
def test_runs_are_what_they_are_apart(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = every_recipe()
    chosen = [recipes[name] for name in ("torch.fp32", "torch.bf16", "torchao.float8.rowwise")]
    judge = Judge(recipes, Ledger([]), frozenset({"eager", "sharded"}))
    for case in draw_on_ranks(chosen, 160)[part::4]:
        together = judge.run_arms(case)
        if any(trace.error for trace in together.values()):  # which rank raises first is random
            continue
        with monkeypatch.context() as patched:
            patched.setattr(sharded, "shared_propagation", nullcontext)
            apart = judge.run_arms(case)
        assert digest(together) == digest(apart), case
