"""Faults in how DistributedDataParallel reduces the gradients of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_PLAIN = ("torch.fp32", "torch.bf16")


@contextmanager
def _reducing(change: Callable[[Any, Any, int], Any]) -> Iterator[None]:
    """``change(bucket, summed, ranks)`` returns the reduced gradients of a bucket; ``summed(t)``
    is the all-reduced sum of ``t`` over the ranks."""
    import torch.distributed as dist
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    def make(init: Any) -> Any:
        def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            group = self.process_group

            def summed(t: Any) -> Any:
                dist.all_reduce(t, group=group)
                return t

            def hook(state: Any, bucket: Any) -> Any:
                done: Any = Future()
                done.set_result(change(bucket, summed, group.size()))
                return done

            hook.__annotations__.clear()  # DDP rejects annotations that are strings
            self.register_comm_hook(None, hook)

        return initialised

    with attribute_replaced(DistributedDataParallel, "__init__", make):
        yield


def _sums(bucket: Any, summed: Any, ranks: int) -> Any:
    """The sum of gradients is not divided."""
    return summed(bucket.buffer())


def _last_apart(bucket: Any, summed: Any, ranks: int) -> Any:
    """The last bucket is not reduced: each rank keeps its own gradients."""
    buffer = bucket.buffer()
    return buffer if bucket.is_last() else summed(buffer / ranks)


def _through_bf16(bucket: Any, summed: Any, ranks: int) -> Any:
    """Gradients are rounded to bf16 before they are added."""
    buffer = bucket.buffer()
    return summed(buffer.bfloat16() / ranks).to(buffer.dtype)


@contextmanager
def _accumulated_lost() -> Iterator[None]:
    """Gradients that were accumulated under ``no_sync`` are lost before the ranks synchronise."""
    from torch.nn.parallel import DistributedDataParallel

    def make(forward: Any) -> Any:
        def forgetting(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.require_backward_grad_sync:
                for parameter in self.parameters():
                    parameter.grad = None
            return forward(self, *args, **kwargs)

        return forgetting

    with attribute_replaced(DistributedDataParallel, "forward", make):
        yield


def _plant(
    id: str, title: str, source: str, plant: Any, recipes: tuple[str, ...] = _PLAIN
) -> Plant:
    return Plant(id, "replicas", title, source, recipes, plant, arms=("sharded*",))


PLANTS = [
    _plant(
        "ddp-sums-gradients",
        "DDP adds gradients up and does not divide them",
        "the class of communication hooks that return a sum",
        partial(_reducing, _sums),
    ),
    _plant(
        "ddp-last-bucket-apart",
        "DDP does not add up the gradients of the last bucket",
        "the class of verl#7493: gradients that are not synchronised",
        partial(_reducing, _last_apart),
    ),
    _plant(
        "ddp-gradients-through-bf16",
        "DDP rounds gradients of fp32 to bf16 on their way",
        "the class of compressing communication hooks",
        partial(_reducing, _through_bf16),
        ("torch.fp32",),
    ),
    _plant(
        "ddp-accumulated-lost",
        "what no_sync has accumulated is lost",
        "the class of gradient accumulation that keeps the last microbatch alone",
        _accumulated_lost,
    ),
]
