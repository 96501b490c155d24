"""The random Hadamard transform of NVFP4 training: blocks of 16 along the contracted axis.

x -> x @ (diag(signs) H / 4) with Sylvester's H. That matrix is orthogonal: applied to both operands
it leaves their product unchanged and spreads an outlier over its block. Source: torchao 0.18
``nvfp4_training/hadamard_utils.py`` get_rht_matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowfuzz.numerics.formats import BF16, F32, F64, round_to

SIZE = 16
#: TransformerEngine's signs: 2.20.2, ``pytorch/tensor/nvfp4_tensor.py`` get_wgrad_sign_vector.
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def matrix(signs: Sequence[int]) -> F64:
    """diag(signs) H / 4. Raises ValueError unless there are 16 signs."""
    if len(signs) != SIZE:
        raise ValueError(f"a Hadamard sign vector has {SIZE} entries, got {len(signs)}")
    index = np.arange(SIZE)
    odd = np.bitwise_count(index[:, None] & index[None, :]) % 2
    return np.asarray(np.asarray(signs, dtype=np.float64)[:, None] * np.where(odd, -0.25, 0.25))


def transform(x: F32, signs: Sequence[int]) -> F32:
    """``x`` [rows, C] transformed and rounded to bf16, as the kernel does before it quantises.

    The kernel adds in fp32 in its own order, so an element may differ by one bf16 step.
    Raises ValueError if C is not a multiple of 16.
    """
    rows, contracted = x.shape
    if contracted % SIZE:
        raise ValueError(f"contracted dimension {contracted} is not a multiple of {SIZE}")
    with np.errstate(all="ignore"):
        turned = x.reshape(rows, -1, SIZE).astype(np.float64) @ matrix(signs)
    return round_to(turned.reshape(rows, contracted), BF16, overflow="ieee").astype(np.float32)
