"""Wrong scales and wrong amaxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, mx_quantiser
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_MX = ("torchao.mxfp8.*",)


@contextmanager
def _doubled() -> Iterator[None]:
    from torchao.float8 import float8_utils

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs) * 2

    with attribute_replaced(float8_utils, "amax_to_scale", make):
        yield


@contextmanager
def _bf16_scale() -> Iterator[None]:
    import torch
    from torchao.float8 import float8_utils

    def make(original: Any) -> Any:
        return lambda *a, **kw: original(*a, **kw).to(torch.bfloat16).to(torch.float32)

    with attribute_replaced(float8_utils, "amax_to_scale", make):
        yield


@contextmanager
def _signed_amax() -> Iterator[None]:
    from torchao.float8 import float8_utils

    def make(original: Any) -> Any:
        return lambda x, *args, **kwargs: original(x.clamp(min=0), *args, **kwargs)

    with attribute_replaced(float8_utils, "tensor_to_amax", make):
        yield


@contextmanager
def _large_eps() -> Iterator[None]:
    from torchao.float8 import float8_utils

    with attribute_replaced(float8_utils, "EPS", lambda original: 0.5):
        yield


@contextmanager
def _mx_off_by_one() -> Iterator[None]:
    def change(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        scale, codes = to_mx(data, *args, **kwargs)
        byte = scale.view(torch.uint8)
        return torch.where(byte < 254, byte + 1, byte).view(scale.dtype), codes

    with mx_quantiser(change):
        yield


@contextmanager
def _mx_neighbour_row() -> Iterator[None]:
    """The scale of each block is computed from the block and the one in the row above."""

    def change(to_mx: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        scale, _ = to_mx(torch.maximum(data.abs(), data.abs().roll(1, 0)), *args, **kwargs)
        factor = torch.exp2(scale.view(torch.uint8).float() - 127).repeat_interleave(32, 1)
        return scale, (data.float() / factor).to(torch.float8_e4m3fn)

    with mx_quantiser(change):
        yield


PLANTS = [
    Plant("scale-doubled", "scale", "scale twice what the rule says",
          "https://github.com/ROCm/TransformerEngine/pull/485", _FLOAT8, _doubled),
    Plant("scale-through-bf16", "scale", "scale rounded through bf16",
          "https://github.com/pytorch/pytorch/issues/136181", _FLOAT8, _bf16_scale),
    Plant("amax-ignores-negatives", "amax", "amax of max(x, 0) instead of |x|",
          "https://github.com/NVIDIA/TransformerEngine/pull/2589", _FLOAT8, _signed_amax),
    Plant("eps-too-large", "scale", "EPS of 0.5: small granules lose their range",
          "https://github.com/pytorch/ao/issues/3356", _FLOAT8, _large_eps),
    Plant("mx-scale-byte-plus-one", "scale", "E8M0 byte one too large",
          "https://github.com/vllm-project/vllm/pull/43557", _MX, _mx_off_by_one),
    Plant("mx-block-leaks-rows", "granule", "a block's scale also sees the row above",
          "https://github.com/DeepWok/mase/pull/321", _MX, _mx_neighbour_row),
]  # fmt: skip
