"""Is every number of a tensor an ordinary one? A sum tells at once; what it leaves open is counted.

A sum over NaN or infinity is never finite, so no bad value passes; a sum that is not finite, or
huge, may still come from ordinary numbers, and then the elements themselves are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from narrowfuzz_watch.operators import NO_NUMBERS

#: huge: larger than 2**64, as a flipped high bit of an exponent makes it, and nothing worse.
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
_LOOKED_AT = {*_WIDE, *_NARROW, *_COMPLEX, *([] if _SCALE is None else [_SCALE])}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def looked_at(tensor: torch.Tensor) -> bool:
    """Can the tensor hold a bad number, and can it be read?"""
    return (
        tensor.dtype in _LOOKED_AT
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and not isinstance(tensor, NO_NUMBERS)
    )


def total(tensor: torch.Tensor) -> torch.Tensor:
    """A sum that is finite only if every element is; it stays on the device."""
    dtype = tensor.dtype
    if dtype in _WIDE:
        return tensor.sum()
    return real(tensor).sum(dtype=torch.float32)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that has isnan."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype in _NARROW or tensor.dtype is _SCALE else tensor


def suspect(sum_: float) -> bool:
    """Does such a sum leave open whether all numbers are ordinary ones?"""
    return not abs(sum_) < _HUGE


def state(tensor: torch.Tensor) -> State:
    """What is worst in a tensor."""
    if not looked_at(tensor) or not suspect(float(total(tensor))):
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
    """What a report says of a tensor: shape, dtype, counts, the first bad element."""
    found: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if looked_at(tensor):
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
    """Changes if any one bit does: a sum of the bits taken as integers, with their place in it."""
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
