"""Checks whether a tensor has bad values: NaN, infinities or huge numbers. A sum is enough to rule
out NaN and infinity.

A sum over NaN or infinity is never finite, so none of these passes. A sum that is huge or not
finite may still come from ordinary numbers; then the elements themselves are checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from narrowfuzz_watch.operators import NO_NUMBERS

#: The worst value in a tensor. huge: at least 2**64, as after a flip of a high exponent bit.
State = Literal["ok", "huge", "inf", "nan"]
WORST: tuple[State, ...] = ("ok", "huge", "inf", "nan")
_HUGE = 2.0**64

_WIDE = {torch.float32, torch.float64, torch.bfloat16}
_NARROW = {
    dtype
    for name in ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
}
_SCALE = getattr(torch, "float8_e8m0fnu", None)
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_CHECKABLE = {*_WIDE, *_NARROW, *_COMPLEX, *([] if _SCALE is None else [_SCALE])}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_checkable(tensor: torch.Tensor) -> bool:
    """True if the tensor can hold a bad value, and can be read."""
    return (
        tensor.dtype in _CHECKABLE
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and not isinstance(tensor, NO_NUMBERS)
    )


def total(tensor: torch.Tensor) -> torch.Tensor:
    """A sum, on the tensor's device, that is finite only if every element is."""
    dtype = tensor.dtype
    if dtype in _WIDE:
        return tensor.sum()
    return real(tensor).sum(dtype=torch.float32)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a real dtype that supports isnan."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype in _NARROW or tensor.dtype is _SCALE else tensor


def suspect(sum_: float) -> bool:
    """True if a tensor with this sum may have bad values."""
    return not abs(sum_) < _HUGE


def state(tensor: torch.Tensor) -> State:
    """The state of a tensor's worst element."""
    if not is_checkable(tensor) or not suspect(float(total(tensor))):
        return "ok"
    least, most = ends(tensor)
    if math.isnan(most):
        return "nan"
    if math.isinf(most) or math.isinf(least):
        return "inf"
    # scales are powers of two up to 2**127
    huge = tensor.dtype in _WIDE and max(abs(least), abs(most)) >= _HUGE
    return "huge" if huge else "ok"


def ends(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the largest element, both NaN if one is."""
    found = torch.aminmax(real(tensor))
    return float(found.min), float(found.max)


def worst(states: Sequence[State]) -> State:
    return max(states, key=WORST.index, default="ok")


def described(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    """The fields of ``records.Tensor`` that describe a tensor."""
    found: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if is_checkable(tensor):
        numbers = real(tensor)
        nan, inf = torch.isnan(numbers), torch.isinf(numbers)
        found |= {"nan": int(nan.sum()), "inf": int(inf.sum())}
        finite = numbers[~(nan | inf)]
        found |= {"zeros": int((finite == 0).sum()), "count": numbers.numel()}
        if finite.numel():
            least, most = ends(finite)
            found |= {"least": least, "most": most, "largest": max(abs(least), abs(most))}
        bad = nan | inf if found["nan"] or found["inf"] else numbers.abs() >= _HUGE
        if bool(bad.any()):
            first = int(bad.reshape(-1).to(torch.uint8).argmax())
            found["index"] = _unravelled(first, list(numbers.shape))[: tensor.dim()]
    maker = tensor.grad_fn
    if maker is not None:
        found["maker"] = maker.name()
    return found


def _unravelled(flat: int, shape: list[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return index[::-1]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers."""
    plain = tensor.detach().contiguous()
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain.resolve_conj()).contiguous()
    return plain if plain.dtype is torch.bool else plain.view(_BITS[plain.element_size()])


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """A sum of the elements' bits taken as integers, combined over the tensors in order.

    It changes if a single bit does, except for the highest bit of an 8-byte element; it does not
    change if elements of one tensor are exchanged.
    """
    found = 0
    for place, tensor in enumerate(tensors, 1):
        if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel():
            # 2^64: the sign of a float64 must count, too
            found = (found * 31 + place + int(bits(tensor).sum(dtype=torch.int64))) % (1 << 64)
    return found


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in zip(first, second, strict=True)
    )
