"""Rounding to narrow dtypes, as sums that are rounded at every row do it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from narrowfuzz.operators.sum import rounded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_rounds_as_torch_does(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    halfway = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)
    x = np.concatenate([bits, halfway, halfway + np.uint32(1), halfway - np.uint32(1)])
    values = x.view(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        got = rounded(values, dtype)
    want = torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()
    assert (got.view(np.uint32) == want.view(np.uint32)).all()
