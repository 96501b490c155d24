"""How far a tensor core may be from the sum: the proven radius against a bit-exact model of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mmaemu.model.chain import dot
from mmaemu.model.presets import HOPPER
from narrowfuzz.numerics.accumulator import (
    FP32,
    HOPPER_FP8,
    HOPPER_FP8_FAST,
    Accumulator,
    gamma,
    sum_radius,
)
from narrowfuzz.numerics.formats import F64

E4M3 = torch.float8_e4m3fn
#: The smallest normal number of E4M3.
LEAST = 2.0**-6


def operands(kind: str, rows: int, contracted: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of A [rows, K] and B [rows, K] that strain an accumulator."""
    of = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, contracted, generator=of) * 30.0 for _ in range(2))
    if kind == "positive":
        a, b = a.abs(), b.abs()
    if kind == "cancelling":
        half = contracted // 2
        b[:, half : 2 * half] = -b[:, :half]
        a[:, half : 2 * half] = a[:, :half]
    if kind == "falling":
        a = a * 2.0 ** -torch.linspace(0, 12, contracted)
    if kind == "subnormal":
        a, b = a / 2**13, b / 2**13
    if kind == "outlier":
        a[:, 0], b[:, 0] = 448.0, 448.0
        a[:, 1:], b[:, 1:] = 0.4 * a[:, 1:].sign(), 0.4
    return a.clamp(-448, 448).to(E4M3), b.clamp(-448, 448).to(E4M3)


KINDS = ("gaussian", "positive", "cancelling", "falling", "subnormal", "outlier")


def added(a: torch.Tensor, b: torch.Tensor, promotes: int, order: torch.Tensor) -> F64:
    """A @ B^T as Hopper adds it, products in this order."""
    a, b = (t.view(torch.uint8)[:, order].view(E4M3) for t in (a, b))
    every = a.view(torch.uint8).repeat_interleave(len(b), 0).view(E4M3)
    of_all = b.view(torch.uint8).repeat(len(a), 1).view(E4M3)
    run = promotes or a.shape[1]
    total = torch.zeros(len(a) * len(b))
    for start in range(0, a.shape[1], run):
        some = slice(start, start + run)
        part = dot(every[:, some], of_all[:, some], preset=HOPPER)
        total = total + part if promotes else part
    return total.reshape(len(a), len(b)).numpy().astype(np.float64)


def share(a: torch.Tensor, b: torch.Tensor, accumulator: Accumulator, order: torch.Tensor) -> float:
    """The largest share of the radius that the accumulator uses."""
    left, right = (t.float().numpy().astype(np.float64) for t in (a, b))
    least = (np.full(len(a), LEAST), np.full(len(b), LEAST))
    radius = sum_radius(left, right, accumulator, 0, least)
    off = np.abs(added(a, b, accumulator.promotes, order) - left @ right.T)
    return float((off / radius).max())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contracted", [16, 32, 100, 128, 256, 1024])
@pytest.mark.parametrize("accumulator", [HOPPER_FP8_FAST, HOPPER_FP8], ids=lambda a: a.name)
def test_hopper_stays_within_in_any_order(
    kind: str, contracted: int, accumulator: Accumulator
) -> None:
    for seed in range(3):
        a, b = operands(kind, 4, contracted, seed)
        size = a.float().abs().mean(0)
        orders = (torch.arange(contracted), size.argsort(), size.argsort(descending=True))
        for order in orders:
            assert share(a, b, accumulator, order) <= 1.0


def test_the_radius_is_no_wider_than_its_worst_case_by_far() -> None:
    """Ones behind a large first product: each loses its last bits, all in one direction."""
    a = torch.full((1, 1024), 1.0 + 7 / 8)
    b = torch.full((1, 1024), 1.0 + 7 / 8)
    a[0, 0], b[0, 0] = 256.0, 256.0
    order = torch.arange(1024)
    assert share(a.to(E4M3), b.to(E4M3), HOPPER_FP8_FAST, order) > 0.3


@pytest.mark.parametrize("accumulator", [HOPPER_FP8_FAST, HOPPER_FP8], ids=lambda a: a.name)
def test_fp32s_radius_is_too_narrow_for_it(accumulator: Accumulator) -> None:
    """Else a tensor core would need no radius of its own."""
    narrow = 0
    for seed in range(10):
        a, b = operands("gaussian", 8, 128, seed)
        left, right = (t.float().numpy().astype(np.float64) for t in (a, b))
        off = np.abs(added(a, b, accumulator.promotes, torch.arange(128)) - left @ right.T)
        radius = sum_radius(left, right, FP32, 0, (np.zeros(8), np.zeros(8)))
        narrow += int((off > radius).sum())
    assert narrow > 200


def test_fp32_is_what_it_was() -> None:
    a, b = (np.abs(np.random.default_rng(0).normal(size=(5, 37))) for _ in range(2))
    nothing = (np.zeros(5), np.zeros(5))
    want = gamma(36 + 3) * (1.0 + 2.0**-20) * (a @ b.T)
    assert (sum_radius(a, b, FP32, 3, nothing) == want).all()


@pytest.mark.parametrize("contracted", [32, 160, 512])
def test_sums_below_its_limit_are_exact(contracted: int) -> None:
    """Small integers: the tensor core returns the sum itself, in any order."""
    of = torch.Generator().manual_seed(contracted)
    a, b = (torch.randint(-4, 5, (6, contracted), generator=of).to(E4M3) for _ in range(2))
    left, right = (t.float().numpy().astype(np.float64) for t in (a, b))
    assert (np.abs(left) @ np.abs(right).T).max() < HOPPER_FP8_FAST.exact_below
    for order in (torch.arange(contracted), torch.randperm(contracted, generator=of)):
        assert (added(a, b, 0, order) == left @ right.T).all()


def test_a_sum_beyond_its_limit_is_not() -> None:
    a, b = (torch.ones(1, 64) for _ in range(2))
    a[0, 0], b[0, 0] = 128.0, 128.0
    left = np.array([[2.0**14 + 63.0]])
    assert left.max() >= HOPPER_FP8_FAST.exact_below
    assert (added(a.to(E4M3), b.to(E4M3), 0, torch.arange(64)) != left).all()
