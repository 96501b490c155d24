"""Checks of a training of a library's own layers. Scripts are pasted from this module.

Each check returns a sentence that describes the result, and whether the divergence shows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from narrowfuzz.play.check import Sentence, equal
from narrowfuzz.play.library import Cast, Side
from narrowfuzz.play.player import Trace

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_NARROW = {"e4m3", "e5m2", "e2m1"}


@contextlib.contextmanager
def record_linear_tensors(layers: Any, record: Callable[[Any], None]) -> Iterator[None]:
    """Record what linears quantise, at their own boundary and not inside the library: input, weight
    and output gradient, whether they are quantised or not."""

    def before(name: str, layer: Any, args: Any) -> None:
        for i, x in enumerate((args[0], layer.weight)):
            record(Cast((name, "forward", i), x, None, None, ""))

    def after(name: str, layer: Any, args: Any, y: Any) -> None:
        if y.requires_grad:
            y.register_hook(lambda g: record(Cast((name, "backward", 0), g, None, None, "")))

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(before, name)).remove)
            stack.callback(layer.register_forward_hook(partial(after, name)).remove)
        yield


def seen_at(run: Trace, kind: Any, places: Collection[Any]) -> list[Any]:
    """Casts or products (``kind``) that were recorded at these (event, where)."""
    return [
        seen for event, at, seen in run.recorded if (event, at) in places and type(seen) is kind
    ]


def in_time(run: Trace, places: Collection[Any]) -> list[Any]:
    """Casts at these (event, where), except those of a forward's tensors that run in a backward."""
    found = []
    for event, where, seen in run.recorded:
        if type(seen) is Cast and (event, where) in places:
            late = where.phase == "backward" and seen.slot and seen.slot[1] == "forward"
            found += [] if late else [seen]
    return found


def maxima(run: Trace, slot: tuple[str, str, int], *, scales: bool) -> list[list[Any]]:
    """For each event, the maxima of what was quantised with a slot, recomputes excluded, and the
    scales that were used, None without ``scales``."""
    found: list[list[Any]] = [[] for _ in run.states]
    for event, where, seen in run.recorded:
        if type(seen) is Cast and seen.slot == slot and where.phase != "recompute":
            amax = seen.input.float().abs().nan_to_num(nan=0.0, posinf=math.inf).max()
            found[event].append((amax.cpu().numpy(), seen.scale.item() if scales else None))
    return found


def wrong_casts(casts: Sequence[Any], *, kind: str, rounding: str = "nearest") -> Sentence:
    """Codes that are not the saturating cast of tensor times scale, or with a ``rounding`` that is
    stochastic are neither neighbour or all rounded by a rule; and scales, where they are not a
    state, that are not those of the tensor (``kind`` current) or of its blocks (mx, block,
    nvfp4)."""
    scales = codes = 0
    for cast in casts:
        if kind == "nvfp4":
            wrong, scaled = of_fp4_blocks(cast)
            got = cast.codes.reshape(scaled.shape).long()
            other = by_chance(got, scaled) if rounding == "stochastic" else to_nearest(got, scaled)
            scales, codes = scales + wrong, codes + other
            continue
        fp8 = _FP8[cast.format]
        largest = torch.finfo(fp8).max
        x, scale = cast.input.float(), cast.scale
        if kind == "current":
            amax = x.abs().nan_to_num(nan=0.0, posinf=math.inf).max()
            right = torch.tensor(largest).div(amax).clamp(max=torch.finfo(torch.float32).max)
            scales += int((scale != torch.where((amax > 0) & amax.isfinite(), right, 1.0)).sum())
        if kind == "block":
            x = x.reshape(-1, x.shape[-1])
            wrong, scale = of_fp8_blocks(x, scale, largest)
            scales += wrong
        if kind == "mx":
            x, wrong, scale = of_blocks(x.reshape(-1, x.shape[-1]), scale, cast.format)
            scales += wrong
        want = (x * scale).clamp(-largest, largest).to(fp8)
        got = cast.codes.view(fp8).reshape(want.shape)
        other = want.view(torch.uint8) != got.view(torch.uint8)
        codes += int((other & ~(want.float().isnan() & got.float().isnan())).sum())
    sentence = (
        f"{len(casts)} casts: {scales} scales and {codes} codes differ from the expected cast"
    )
    return sentence, bool(scales or codes)


def of_blocks(x: torch.Tensor, scale: torch.Tensor, form: str) -> tuple[Any, int, Any]:
    """The matrix, the number of scale bytes that are not the smallest power of two that holds their
    block of 32, and the factor that multiplies each element."""
    along = scale.shape == (x.shape[0], x.shape[1] // 32)  # rows, not columns
    lines, bytes_ = (x, scale) if along else (x.t(), scale.t())
    amax = lines.abs().nan_to_num(nan=0.0, posinf=math.inf)
    amax = amax.reshape(len(lines), -1, 32).amax(2)

    def byte(amax: Any) -> Any:
        m, e = amax.frexp()  # m * 2^e, and the largest code is 0.875 * 2^9 or 2^16
        rounded = e - {"e4m3": 9, "e5m2": 16}[form] + (m > 0.875).int()
        rounded = torch.where(amax > 0, rounded + 127, 0).clamp(0, 254)
        return torch.where(amax.isinf(), 254, rounded)

    # kernels multiply by a rounded reciprocal
    other = (bytes_ < byte(amax * (1 - 2**-22))) | (bytes_ > byte(amax * (1 + 2**-22)))
    factor = torch.exp2(127.0 - bytes_.float()).repeat_interleave(32, 1)
    return x, int(other.sum()), factor if along else factor.t()


def of_fp8_blocks(x: torch.Tensor, scale: torch.Tensor, largest: float) -> tuple[int, Any]:
    """The number of scales that are not the largest power of two at which their block of 1 x 128,
    128 x 1 or 128 x 128 stays within the format, and the factor that multiplies each element. The
    last blocks may be incomplete."""
    rows, columns = x.shape
    high, wide = (1 if n == size else 128 for n, size in zip(scale.shape, x.shape, strict=True))
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=math.inf)
    padded = torch.nn.functional.pad(magnitude, (0, -columns % wide, 0, -rows % high))
    amax = padded.reshape(scale.shape[0], high, scale.shape[1], wide).amax((1, 3))
    _, exponent = (largest / amax).clamp(max=torch.finfo(torch.float32).max).frexp()
    right = torch.exp2(exponent.float() - 1)
    right = torch.where((amax > 0) & amax.isfinite(), right, 1.0)
    factor = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    return int((scale != right).sum()), factor


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rows after TransformerEngine's transform of each 16 elements; exact sums, rounded once."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    four = torch.kron(two, two)
    matrix = torch.tensor(signs)[:, None] * torch.kron(four, four) / 4
    exact = (x.double().reshape(-1, 16) @ matrix).reshape(x.shape)
    near = exact.float()  # rounded to an odd number, which bf16 rounds as it would the exact one
    bits = near.view(torch.int32) - (near.abs().double() > exact.abs()).int()
    odd = torch.where(near.isfinite() & (near.double() != exact), bits | 1, near.view(torch.int32))
    return odd.view(torch.float32).bfloat16().float()


def of_fp4_blocks(cast: Any) -> tuple[int, torch.Tensor]:
    """The number of scales that are not NVFP4's of their block of 1 x 16, 16 x 1 or 16 x 16 and of
    the tensor, and what is rounded to codes under these scales."""
    x = cast.input.float().reshape(-1, cast.input.shape[-1])
    if cast.scale.shape[1] == x.shape[1]:
        x = hadamard(x.t()).t()
    one, largest = torch.tensor(1.0), torch.finfo(torch.float32).max
    high, wide = (1 if n == size else 16 for n, size in zip(cast.scale.shape, x.shape, strict=True))
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=math.inf)
    amax = magnitude.reshape(len(x) // high, high, -1, wide).amax((1, 3))
    whole = amax.max()
    encode = torch.tensor(2688.0).div(whole).clamp(max=largest)
    encode = encode if 0 < whole < math.inf else one
    byte = (amax * (encode * (one / 6))).clamp(max=448).to(torch.float8_e4m3fn)
    right = (whole.view(torch.int32).long() << 8) | byte.view(torch.uint8).long()
    factor = one / ((cast.scale & 255).byte().view(torch.float8_e4m3fn).float() * (one / encode))
    factor = factor.clamp(max=largest).repeat_interleave(high, 0).repeat_interleave(wide, 1)
    scaled = (x * factor).nan_to_num(nan=6.0, posinf=math.inf, neginf=-math.inf)
    return int((cast.scale != right).sum()), scaled


def to_nearest(got: torch.Tensor, scaled: torch.Tensor) -> int:
    """The number of codes of E2M1 that are not those of the nearest values."""
    size, halves = scaled.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    up, down = (torch.bucketize(size, halves, right=upper) for upper in (True, False))
    want = torch.where(up % 2 == 0, up, down) + 8 * scaled.signbit()  # a tie to the even code
    return int((got != want).sum())


def by_chance(got: torch.Tensor, scaled: torch.Tensor) -> int:
    """The number of codes of E2M1 that are neither neighbour. If there are none, the number of
    those between two codes if these were rounded by a rule: up, down, or away from zero above one
    place between the codes. Right rounding does that with a chance below 2^-64, even if the random
    bits, 8 of each, of every four depend on each other."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    size, sign = scaled.abs().double().clamp(max=6), 8 * scaled.signbit()
    near, far = torch.bucketize(size, values, right=True) - 1, torch.bucketize(size, values)
    wrong = int(((got != near + sign) & (got != far + sign)).sum())
    part = (size - values[near]) / (values[far] - values[near])  # the chance of ``far``
    judged = (near != far) & (part != 0.5)
    part, away = part[judged], (got == far + sign)[judged]
    up = away == (scaled[judged] > 0)
    chance = (torch.where(away, part, 1 - part) + 2**-8).clamp(max=1)
    never = chance.log2().sum() / 4 + math.log2(len(part) + 3) < -64
    place = max(part[~away], default=0.0) < min(part[away], default=1.0)
    return wrong or (len(part) if never and (place or up.all() or not up.any()) else 0)


def not_made(products: Sequence[Any], side: str, casts: Sequence[Any], *, own: bool) -> Sentence:
    """Operands that none of these casts made, or with another scale. With ``own`` False, one that
    no cast made passes: parameters in the narrow format were made before the schedule."""
    wrong = 0
    for operand in (getattr(product, side) for product in products):
        if operand.inverse is None:
            continue
        made = [cast for cast in casts if same_codes(cast.codes, operand.codes)]
        right = [cast for cast in made if same_inverse(cast.scale, operand.inverse)]
        wrong += not right and (own or bool(made))
    return f"{len(products)} products, {wrong} of another cast or another scale", bool(wrong)


def same_codes(made: torch.Tensor, got: torch.Tensor) -> bool:
    """True if the codes are the same, as they are or transposed."""
    a, b = (t.view(torch.uint8).reshape(-1, t.shape[-1]) for t in (made, got))
    return any(a.shape == c.shape and torch.equal(a, c) for c in (b, b.t()))


def same_inverse(scale: torch.Tensor, inverse: torch.Tensor) -> bool:
    """True if ``inverse`` is 1 / scale or, for scales of blocks, holds the same scales."""
    if scale.dtype != torch.float32:
        return torch.equal(scale.flatten(), inverse.view(scale.dtype).flatten())
    return scale.numel() == inverse.numel() and torch.equal(1 / scale.flatten(), inverse.flatten())


def recomputed_with(again: Sequence[Any], first: Sequence[Any]) -> Sentence:
    """Products of a recompute whose operands, or their scales, are not those of the forward."""

    def same(x: Any, y: Any) -> bool:
        return x is y is None or (x is not None and y is not None and torch.equal(x, y))

    wrong = []
    for i, product in enumerate(again):
        for side in ("a", "b"):
            got = getattr(product, side)
            want = getattr(first[i % len(first)], side) if first else Side(None, None, "nothing")
            if got.format != want.format or not same(got.inverse, want.inverse):
                wrong.append(
                    f"{got.format} (1/scale {got.inverse}) for {want.format} "
                    f"(1/scale {want.inverse})"
                )
            elif got.inverse is not None and not same_codes(want.codes, got.codes):
                wrong.append("other codes")
    return f"{len(again)} products computed again; {'; '.join(wrong) or 'all alike'}", bool(wrong)


def other_formats(products: Sequence[Any], due: tuple[str, ...]) -> Sentence:
    """Products whose operands do not have the formats ``due``; if none is due, products in
    FP8 or FP4."""
    ran = [tuple(sorted({product.a.format, product.b.format})) for product in products]
    wrong = [r for r in ran if (set(r) & _NARROW if not due else r != tuple(sorted(due)))]
    return f"expected {due or 'high precision'}, got {ran}", bool(wrong)


def other_blocks(products: Sequence[Any], side: str, block: tuple[int, int]) -> Sentence:
    """Operands that have no scale for each block of this many rows and columns."""
    operands = [operand for p in products if (operand := getattr(p, side)).inverse is not None]
    sizes = [(tuple(o.codes.shape), tuple(o.inverse.shape)) for o in operands]
    wrong = [
        f"{scales} of {shape}"
        for shape, scales in sizes
        if scales != tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
    ]
    return f"scales for other blocks than {block}: {wrong or 'none'}", bool(wrong)


def weight_not_cast(run: Trace, event: int) -> Sentence:
    """True if no weight was quantised in this forward."""
    casts = [
        s for e, at, s in run.recorded if e == event and type(s) is Cast and at.phase == "forward"
    ]
    slots = [cast.slot for cast in casts]
    known = [slot for slot in slots if slot is not None]
    shows = bool(known) and not any(slot[1:] == ("forward", 1) for slot in known)
    return f"event {event} quantised for {slots}", shows


def left_over(pending: Mapping[str, int]) -> Sentence:
    """The library's pending counts that should be 0 but are not."""
    found = {name: n for name, n in pending.items() if n}
    return f"left over: {found or 'nothing'}", bool(found)


def other_bits(got: Any, want: Any) -> Sentence:
    """A result, or a slot's scale and window, that differs from the other run's; NaN equals NaN."""
    if got is None or isinstance(got, torch.Tensor):
        got, want = (got,), (want,)
    shows = any(x is None or not equal(x, y) for x, y in zip(got, want, strict=True))
    return f"expected {want}, got {got}", shows
