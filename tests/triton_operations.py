"""Kernels of one operation each, and operands that hold every number of a format, or its ends and a
spread: what they gave on an H200 is on record by digest (``triton_on_cpu_h200.json``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

TYPES = {
    "e4m3": (torch.float8_e4m3fn, tl.float8e4nv),
    "e5m2": (torch.float8_e5m2, tl.float8e5),
    "bf16": (torch.bfloat16, tl.bfloat16),
    "f16": (torch.float16, tl.float16),
    "f32": (torch.float32, tl.float32),
    "i32": (torch.int32, tl.int32),
}
TWO = ("add", "sub", "mul", "div", "max", "min", "gt", "eq", "ne", "clamp", "maxnan", "minnan",
       "div_rn", "fma", "clampnan", "clampvar", "le")  # fmt: skip
ONE = ("sqrt_rn", "floor", "ceil", "abs", "neg")
REDUCTIONS = ("rmax", "rmin", "ramax")


@triton.jit
def cast(x, y, dtype: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o).to(dtype))


@triton.jit
def cut(x, y, dtype: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o).to(dtype, fp_downcast_rounding="rtz"))


@triton.jit
def two(x, z, y, op: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + o)
    c = tl.load(z + o)
    if op == "add":
        r = a + c
    if op == "sub":
        r = a - c
    if op == "mul":
        r = a * c
    if op == "div":
        r = a / c
    if op == "max":
        r = tl.maximum(a, c)
    if op == "min":
        r = tl.minimum(a, c)
    if op == "gt":
        r = tl.where(a > c, a, c)
    if op == "eq":
        r = tl.where(a == c, a, c)
    if op == "ne":
        r = tl.where(a != c, a, c)
    if op == "clamp":
        r = tl.clamp(a, -1.0, 1.0)
    if op == "maxnan":
        r = tl.maximum(a, c, propagate_nan=tl.PropagateNan.ALL)
    if op == "minnan":
        r = tl.minimum(a, c, propagate_nan=tl.PropagateNan.ALL)
    if op == "div_rn":
        r = tl.div_rn(a, c)
    if op == "fma":
        r = tl.fma(a, c, a)
    if op == "clampnan":
        r = tl.clamp(a, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    if op == "clampvar":
        r = tl.clamp(a, tl.minimum(c, -c), tl.maximum(c, -c))
    if op == "le":
        r = tl.where(a <= c, a, c)
    tl.store(y + o, r)


@triton.jit
def one(x, y, op: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + o)
    if op == "sqrt_rn":
        r = tl.sqrt_rn(a)
    if op == "floor":
        r = tl.floor(a)
    if op == "ceil":
        r = tl.ceil(a)
    if op == "abs":
        r = tl.abs(a)
    if op == "neg":
        r = -a
    tl.store(y + o, r)


@triton.jit
def reduced(x, y, op: tl.constexpr):
    a = tl.load(x + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :])
    if op == "rmax":
        r = tl.max(a, axis=1)
    if op == "rmin":
        r = tl.min(a, axis=1)
    if op == "ramax":
        r = tl.max(tl.abs(a), axis=1)
    tl.store(y + tl.arange(0, 16), r)


def launched(kernel: Any, x: torch.Tensor, *more: Any) -> None:
    """Few programs of many numbers: each costs the interpreter milliseconds."""
    block = min(x.numel(), 8192)
    kernel[(x.numel() // block,)](x, *more, block)


def every(name: str) -> torch.Tensor:
    """All numbers of a format; of fp32 six for each number of bf16, around ties among them."""
    if name in ("e4m3", "e5m2"):
        return torch.arange(256).to(torch.uint8).view(TYPES[name][0])
    if name != "f32":
        return torch.from_numpy(np.arange(2**16, dtype=np.uint16)).view(TYPES[name][0])
    upper = np.arange(2**16, dtype=np.uint32) << 16
    halves = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    bits = np.concatenate([upper | np.uint32(half) for half in halves])
    return torch.from_numpy(bits.view(np.float32))


def operands(name: str) -> torch.Tensor:
    """256 numbers: ends, NaN of several bits, zeros, subnormal ones and a spread over all."""
    if name == "f32":
        bits = np.arange(256, dtype=np.uint32) * np.uint32(16843009) + np.uint32(0x12345)
        bits[:20] = [
            0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0xBF800000,
            0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF,
            0x7F800001, 0x00400000, 0x43E00000, 0x40400000,
        ]  # fmt: skip
        return torch.from_numpy(bits.view(np.float32))
    ends = [
        0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0xBF80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x8000,
        0x8001, 0xFF80, 0xFFC0, 0xFFFF, 0x7C00, 0x7C01, 0xFC00, 0x3C00, 0x0400, 0x03FF,
    ]  # fmt: skip
    few = np.unique([*range(0, 2**16, 293), *ends]).astype(np.uint16)
    more = np.arange(256 - len(few), dtype=np.uint16) * np.uint16(251) + np.uint16(7)
    return torch.from_numpy(np.concatenate([few, more])[:256]).view(TYPES[name][0])


def rows(name: str) -> torch.Tensor:
    """16 rows of 32, the first of ends and NaN, others of numbers, the last two with NaN."""
    ends = operands(name)
    m = torch.stack([ends.roll(13 * i) for i in range(16)])[:, :32].contiguous().float()
    m[4:8] = m[4:8].nan_to_num(3.0, 3.0, 3.0)
    m[8:] = torch.sin(torch.arange(8 * 32, dtype=torch.float64).view(8, 32) * 1.7).float()
    m[8, 3], m[9, :] = float("nan"), float("nan")
    return m.to(TYPES[name][0])


def results() -> Iterator[tuple[str, torch.Tensor]]:
    """Each operation's result on all of its operands, by name."""
    formats = ("bf16", "f16", "f32", "e4m3", "e5m2")
    for source in formats:
        x = every(source)
        targets = [t for t in (*formats, "i32") if t != source]
        if source.startswith("e"):  # Triton has no cast from FP8 to whole numbers, or to other FP8
            targets = ["bf16", "f16", "f32"]
        for target in targets:
            y = torch.empty(x.shape, dtype=TYPES[target][0])
            launched(cast, x, y, TYPES[target][1])
            yield f"cast {source} {target}", y
    x = every("f32")
    for target in ("bf16", "f16", "e5m2"):
        y = torch.empty(x.shape, dtype=TYPES[target][0])
        launched(cut, x, y, TYPES[target][1])
        yield f"rtz f32 {target}", y
    for name in ("bf16", "f16", "f32"):
        few = operands(name)
        a, c = few.repeat_interleave(256), few.repeat(256)
        for op in TWO:
            approximate = op == "div" and name == "f32"
            if approximate or (op == "div_rn" and name != "f32"):
                continue
            y = torch.empty_like(a)
            launched(two, a, c, y, op)
            yield f"{op} {name}", y
    low = (np.arange(2**16, dtype=np.uint32) * np.uint32(40503)) & np.uint32(0xFFFF)
    low[::3] = 0
    mixed = (np.arange(2**16, dtype=np.uint32) << 16) | low
    for name, x in (("f32", torch.from_numpy(mixed.view(np.float32))), ("bf16", every("bf16"))):
        for op in ONE if name == "f32" else ("abs", "neg"):
            y = torch.empty_like(x)
            launched(one, x, y, op)
            yield f"{op} {name}", y
    for name in ("bf16", "f32"):
        for op in REDUCTIONS:
            y = torch.empty(16, dtype=TYPES[name][0])
            reduced[(1,)](rows(name), y, op)
            yield f"{op} {name}", y
