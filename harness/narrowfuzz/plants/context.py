"""Faults of context parallelism, in which ranks share the rows of each sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant


def _ring() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _merged_alike() -> AbstractContextManager[None]:
    """Results for parts of the keys are merged with equal weights, whatever their log-sum-exp."""

    def make(merge: Any) -> Any:
        def merged(self: Any, out: Any, lse: Any, partial: bool) -> None:
            if self._lse is not None:  # give the new part the weight of the accumulated one
                held = self._lse.reshape(self._lse.shape[: lse.dim()])
                lse = held.chunk(2, self._seq_dim)[1] if partial else held
            merge(self, out, lse.clone(), partial)

        return merged

    return attribute_replaced(_ring()._SDPAMerger, "_merge_one", make)


def _rows_as_they_came() -> AbstractContextManager[None]:
    """Rows that were permuted for load balance are not put back in order."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    def make(generate: Any) -> Any:
        def indices(self: Any, restore: bool = False) -> Any:
            found = generate(self, restore)
            return found.sort().values if restore else found

        return indices

    return attribute_replaced(_load_balancer._HeadTailLoadBalancer, "_generate_indices", make)


def _own_keys_again() -> AbstractContextManager[None]:
    """In every round of the ring a rank gets its own keys and values, not a neighbour's."""

    def make(next_buffer: Any) -> Any:
        def own(self: Any) -> Any:
            self._idx = 0
            return next_buffer(self)

        return own

    return attribute_replaced(_ring()._AllGatherRotater, "next_buffer", make)


PLANTS = [
    Plant(
        id=id,
        family="sharding",
        title=title,
        source=source,
        recipes=("torch.fp32", "torch.bf16"),
        plant=plant,
        arms=("sharded_context*",),
        needs="attention",
    )
    for id, title, source, plant in (
        (
            "context-merged-alike",
            "parts of a sequence's keys are merged by equal weights",
            "ring-flash-attention#34: how parts are merged",
            _merged_alike,
        ),
        (
            "context-rows-out-of-order",
            "rows that ranks were dealt are not put back in order",
            "the class of pytorch#152261: what is put together is another",
            _rows_as_they_came,
        ),
        (
            "context-own-keys-again",
            "a rank meets its own keys instead of its neighbour's",
            "Automodel#3157: a ring that keeps to the keys it began with",
            _own_keys_again,
        ),
    )
]
