"""An attention kernel that is wrong inside: its scale, its mask, the statistics it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.plant import Plant

_ALL = ("torch.fp32", "torch.bf16", "torchao.*")
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


@contextmanager
def _kernel(change: Callable[..., Any]) -> Iterator[None]:
    """``change(run, q, k, v, causal, **options)`` is the CPU's flash attention forward.

    It is put under the dispatcher, so that eager, compiled graphs and whoever watches operators
    call it; ``run(q, k, v, causal, **options)`` is torch's own. Reference runs are in float64.
    """
    import torch

    kernel = torch.library.get_kernel(f"aten::{_KERNEL}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(q: Any, k: Any, v: Any, causal: bool, dropout: float = 0.0, **options: Any) -> Any:
        return kernel.call_boxed(keys, q, k, v, dropout, causal, **options)

    def attend(
        q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **options: Any
    ) -> Any:
        if q.dtype is torch.float64:
            return run(q, k, v, causal, dropout, **options)
        return change(run, q, k, v, causal, **options)

    library = torch.library.Library("aten", "IMPL")
    library.impl(_KERNEL, attend, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _scale_of_padded_head(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """Heads are padded to a multiple of 64, and their scale is taken afterwards."""
    if options.get("scale") is None:
        options["scale"] = 1.0 / math.sqrt(-(-q.shape[-1] // 64) * 64)
    return run(q, k, v, causal, **options)


def _one_key_too_many(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """Every query sees the key behind its own."""
    import torch

    if causal and options.get("attn_mask") is None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(1)
        bias = q.new_zeros(seen.shape).masked_fill(~seen, float("-inf"))
        options["attn_mask"], causal = bias, False
    return run(q, k, v, causal, **options)


def _statistics_in_base_two(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """The softmax runs on exp2, and so does the log-sum-exp it leaves to backward."""
    out, statistics = run(q, k, v, causal, **options)
    return out, statistics / math.log(2.0)


PLANTS = [
    Plant(
        "attention-scale-padded",
        "attention",
        "scores are scaled for a padded head",
        "https://github.com/sgl-project/sglang/pull/28637",
        _ALL,
        lambda: _kernel(_scale_of_padded_head),
    ),
    Plant(
        "attention-sees-next-key",
        "attention",
        "the causal mask is off by one",
        "https://github.com/ml-explore/mlx/issues/2835",
        _ALL,
        lambda: _kernel(_one_key_too_many),
    ),
    Plant(
        "attention-statistics-base-two",
        "attention",
        "log-sum-exp is kept in base 2",
        "https://github.com/lightseekorg/tokenspeed/pull/571",
        _ALL,
        lambda: _kernel(_statistics_in_base_two),
    ),
]
