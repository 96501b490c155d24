"""A defective device: at regular intervals it flips one bit of an operand or result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, mx_quantiser
from narrowfuzz.plants.plant import Plant

_LINK = "https://github.com/pytorch/torchtitan/issues/951"
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32"}


class _Flips:
    """Flips one bit of one element in every ``every``-th tensor."""

    def __init__(self, bit: int, every: int) -> None:
        self.bit, self.every, self.calls = bit, every, itertools.count(1)

    def __call__(self, x: Any) -> Any:
        import torch
        from torch._subclasses.fake_tensor import is_fake

        if torch.compiler.is_compiling() or is_fake(x) or not x.numel():
            return x
        call = next(self.calls)
        if call % self.every:
            return x
        flipped = x.contiguous().view(getattr(torch, _INTEGERS[x.element_size()])).clone()
        flipped.view(-1)[call * 40503 % x.numel()] ^= 1 << self.bit
        return flipped.view(x.dtype)


@contextmanager
def _code() -> Iterator[None]:
    flip = _Flips(bit=0, every=7)

    def change(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        scale, codes = to_mx(data, *args, **kwargs)
        return scale, flip(codes)

    with mx_quantiser(change):
        yield


@contextmanager
def _scale() -> Iterator[None]:
    from torchao.float8 import float8_utils

    flip = _Flips(bit=3, every=11)

    def make(to_scale: Any) -> Any:
        return lambda *args, **kwargs: flip(to_scale(*args, **kwargs))

    with attribute_replaced(float8_utils, "amax_to_scale", make):
        yield


@contextmanager
def _result() -> Iterator[None]:
    import torch

    flip = _Flips(bit=12, every=13)  # the third-highest exponent bit of a bf16

    def make(multiply: Any) -> Any:
        return lambda *args, **kwargs: flip(multiply(*args, **kwargs))

    with attribute_replaced(torch.nn.functional, "scaled_mm", make):
        yield


PLANTS = [
    Plant(
        "bit-of-code-flips",
        "bit flip",
        "one bit of one MX code in every seventh tensor",
        _LINK,
        ("torchao.mxfp8.*",),
        _code,
    ),
    Plant(
        "bit-of-scale-flips",
        "bit flip",
        "one bit of one fp32 scale in every eleventh tensor",
        _LINK,
        ("torchao.float8.*",),
        _scale,
    ),
    Plant(
        "bit-of-result-flips",
        "bit flip",
        "one bit of one element in every 13th product",
        _LINK,
        ("torch.scaled_mm",),
        _result,
    ),
]
