"""The recordings of taps and watches (``play/watches.py``) as plain data: numpy arrays.

In eager runs ``program.py`` records linears through the recipe's tap, and attention and other
operators through ``EagerWatch`` (``operators.py``), in the runs that ``_watches_operators`` there
selects; attention's q, k, v and log-sum-exp are copied in ``AttentionWatch.note``. In compiled
code all are recorded by the tap of ``compilers.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from narrowfuzz.arms.tensors import DTYPE_NAME, fp8_codes, fp32_array
from narrowfuzz.numerics.two_level import TWO_LEVEL
from narrowfuzz.play.watches import Attended, Product
from narrowfuzz.trace.trace import AttentionCall, Multiplied, Seen

_FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}


def multiplied_of(products: Iterable[Product]) -> tuple[Multiplied, ...]:
    """Every recorded multiply whose result has a dtype that rules know."""
    return tuple(_multiplied(p) for p in products if p.result.dtype in DTYPE_NAME)


def _multiplied(product: Product) -> Multiplied:
    bias = None if product.bias is None else fp32_array(product.bias)
    a, b = _seen(product.a, product.scale_a), _seen(product.b, product.scale_b)
    dtype = DTYPE_NAME[product.result.dtype]
    return Multiplied(product.phase, a, b, fp32_array(product.result), dtype, bias)  # type: ignore[arg-type]


def _seen(operand: torch.Tensor, inverse: torch.Tensor | None) -> Seen:
    if inverse is None:
        return Seen(values=fp32_array(operand))
    assert operand.dtype in _FP8, operand.dtype
    return Seen(
        fp8_codes(operand), fp32_array(inverse), scale_is_inverse=True, format=_FP8[operand.dtype]
    )


def seen_of(gemm: tuple[Any, ...], *, inverse: bool) -> tuple[Seen, Seen]:
    """Both operands of a GEMM from a recipe's tap; ``inverse``: its scales are 1 / scale."""
    a, a_scale, b, b_scale, a_amax, b_amax = gemm
    return _tapped(a, a_scale, a_amax, inverse), _tapped(b, b_scale, b_amax, inverse)


def _tapped(codes: torch.Tensor, scale: Any, amax: Any, inverse: bool) -> Seen:
    """An operand; E8M0 scales are stored as bytes, a pair of block scales and amax as one record
    array."""
    held: Any
    if isinstance(scale, tuple):
        blocks = fp8_codes(scale[0])
        held = np.empty(blocks.shape, dtype=TWO_LEVEL)
        held["block"], held["amax"] = blocks, fp32_array(scale[1]).reshape(())
    else:
        held = fp8_codes(scale) if scale.element_size() == 1 else fp32_array(scale)
    largest = None if amax is None else fp32_array(amax)
    return Seen(fp8_codes(codes), held, scale_is_inverse=inverse, amax=largest)


def attention_of(attention: Iterable[Attended]) -> tuple[AttentionCall, ...]:
    """Every recorded call of an attention kernel."""
    return tuple(_attention(one) for one in attention)


def _attention(one: Attended) -> AttentionCall:
    q, k, v, out, lse = (fp32_array(t) for t in (one.q, one.k, one.v, one.out, one.lse))
    added = None if one.added is None else fp32_array(one.added)
    return AttentionCall(
        one.phase,  # type: ignore[arg-type]
        q,
        k,
        v,
        out,
        lse,
        added,
        one.scale,
        DTYPE_NAME[one.q.dtype],
        one.module,
        one.unknown,
    )
