"""``torch.nn.attention.flex_attention.flex_attention`` with a ``block_mask``, forward. Calls with a
``score_mod`` have no reference, because it may change scores in any way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.operators.fused_attention import forward_of, settings_of
from narrowfuzz.operators.large_attention import some_of
from narrowfuzz.operators.operator import TORCH_DTYPE, Operator, Read
from narrowfuzz.trace.trace import OperatorCall


def _read(named: Mapping[str, Any], result: Any) -> Read:
    if named["score_mod"] is not None:
        raise Unjudged("flex_attention with a score_mod")
    output = result[0] if isinstance(result, tuple) else result
    tensors = {name: named[name] for name in ("query", "key", "value")}
    if any(t.dtype != output.dtype for t in tensors.values()):
        raise Unjudged("flex_attention of operands that autocast narrows inside of it")
    settings = settings_of(named)
    if named["block_mask"] is not None:
        seen = _seen(named["block_mask"].mask_mod, tensors["query"], tensors["key"])
        tensors["mask"] = seen.float().log()  # 0, or minus infinity
    return Read(tensors, {"output": output}, settings)


def _seen(mask_mod: Any, query: Any, key: Any) -> Any:
    """Mask of the keys that each query attends to, [batch, heads, rows, columns], with 1 for batch
    or heads where all are alike."""
    sizes = (*query.shape[:3], key.shape[2])
    places = [query.new_ones(size).long().cumsum(0) - 1 for size in sizes]
    b, h, i, j = (at.view([-1 if d == n else 1 for d in range(4)]) for n, at in enumerate(places))
    return mask_mod(b, h, i, j).expand(-1, -1, *sizes[2:])


def _title(call: OperatorCall) -> str:
    q, k = call.tensors["query"], call.tensors["key"]
    masked = " behind a block_mask" if "mask" in call.tensors else ""
    return (
        f"flex_attention{masked} of {TORCH_DTYPE[call.dtypes['query']]} queries of "
        f"{list(q.shape)} and keys of {list(k.shape)}"
    )


OPERATOR = Operator(
    name="flex_attention",
    words="calls of flex_attention",
    read=_read,
    expected=partial(some_of, forward_of),
    expression="flexed(query, key, value, mask, {scale})",
    title=_title,
    library=("torch.nn.attention.flex_attention:flex_attention",),
    optional=("mask",),
    compiles=True,
    helper="flexed",
)
