"""FlexAttention behind a mask of numbers, as scripts call it."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def flexed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """flex_attention; the mask [batch or 1, heads or 1, rows, columns] is 0, or minus infinity
    where a query does not see a key."""
    block = None
    if mask is not None:
        seen = (mask == 0).expand(*query.shape[:2], -1, -1)
        sizes = (*seen.shape, query.device)
        block = create_block_mask(lambda b, h, i, j: seen[b, h, i, j], *sizes)
    shared = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, block_mask=block, scale=scale, enable_gqa=shared)
