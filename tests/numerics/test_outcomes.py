"""What an accumulator may return, to the bit: nothing that a model of one returns is left out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mmaemu
import numpy as np
import pytest
import torch
from mmaemu.model.chain import dot
from mmaemu.model.presets import HOPPER
from narrowfuzz.case import ladder_data
from narrowfuzz.case.data import hash_bits
from narrowfuzz.numerics.accumulator import (
    FP32,
    HOPPER_FP8,
    HOPPER_FP8_FAST,
    TENSOR_CORE_16,
    UNKNOWN,
    Accumulator,
)
from narrowfuzz.numerics.formats import F64
from narrowfuzz.numerics.outcomes import MOST_STEPS, outcomes
from narrowfuzz.rules.ladder import MOST

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The smallest normal number of each format.
LEAST = {E4M3: 2.0**-6, E5M2: 2.0**-14}
BOTH = pytest.mark.parametrize("accumulator", [HOPPER_FP8_FAST, HOPPER_FP8], ids=lambda a: a.name)


def values(codes: torch.Tensor) -> F64:
    return codes.double().numpy()


def allowed(a: torch.Tensor, b: torch.Tensor, accumulator: Accumulator) -> F64:
    return outcomes(values(a), values(b), accumulator, (LEAST[a.dtype], LEAST[b.dtype]))


def sparse(of: random.Random, contracted: int, dtype: torch.dtype) -> torch.Tensor:
    """One row of codes of any kind, subnormal ones and all mantissas among them, that meet in at
    most so many steps as are told apart."""
    codes = torch.zeros(1, contracted, dtype=torch.uint8)
    steps = of.sample(range(contracted // 32), min(MOST_STEPS, contracted // 32))
    for step in steps:
        for _ in range(of.choice((1, 1, 2, 5))):
            # exponents far apart, so that something is cut
            code = of.choice((of.randrange(0x7C), of.randrange(0x10), 0x60 + of.randrange(0x18)))
            codes[0, step * 32 + of.randrange(32)] = code | of.choice((0, 0x80))
    return codes.view(dtype)


def dense(of: random.Random, contracted: int) -> torch.Tensor:
    codes = [of.randrange(0x7F) | of.choice((0, 0x80)) for _ in range(4 * contracted)]
    return torch.tensor(codes, dtype=torch.uint8).reshape(4, contracted).view(E4M3)


def chain(a: torch.Tensor, b: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    """These steps one after the other, as mmaemu's Hopper adds them."""
    columns = torch.tensor([step * 32 + i for step in steps for i in range(32)], dtype=torch.long)
    x, y = (t.view(torch.uint8)[:, columns].view(t.dtype) for t in (a, b))
    return dot(x.view(torch.uint8).expand(len(b), -1).view(a.dtype), y, preset=HOPPER)


def kernel(a: torch.Tensor, b: torch.Tensor, of: random.Random, accumulator: Accumulator) -> F64:
    """A kernel of its own: tiles shared out among parts, steps and sums in any order."""
    tiles = list(range(-(-a.shape[1] // 128)))
    parts: list[list[int]] = [[] for _ in range(of.randint(1, len(tiles)))]
    for tile in tiles:
        of.choice(parts).append(tile)
    runs = [[tile] for tile in tiles] if accumulator.promotes else parts
    sums = []
    for run in runs:
        steps = [s for t in run for s in range(4 * t, min(4 * t + 4, a.shape[1] // 32))]
        of.shuffle(steps)
        sums.append(chain(a, b, steps) if steps else torch.zeros(len(b)))
    of.shuffle(sums)
    total = torch.zeros(len(b))
    for one in sums:
        total = total + one
    return total.double().numpy()


@pytest.mark.one_in(8)
@BOTH
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.one_in(8)
@pytest.mark.parametrize("contracted", [128, 32, 512, 384])
def test_whatever_a_kernel_chooses_is_among_them(
    contracted: int, dtype: torch.dtype, accumulator: Accumulator
) -> None:
    of, known, inexact = random.Random(contracted), 0, 0
    for _ in range(60):
        a, b = sparse(of, contracted, dtype), dense(of, contracted)
        found = allowed(a, b, accumulator)[:, 0]
        told = ~np.isnan(found).any(axis=0)
        known += told.sum()
        inexact += (told & ~(found == values(b) @ values(a)[0]).any(axis=0)).sum()
        for _ in range(4):
            got = kernel(a, b, of, accumulator)
            assert ((found == got).any(axis=0) | ~told).all()
    assert known > 100 and inexact > 20


@pytest.mark.one_in(3)
@BOTH
@pytest.mark.parametrize("contracted", [16, 32, 100, 160, 256, 272, 384, 512, 1024])
def test_hoppers_gemm_is_among_them_on_ladder_data_and_mostly_alone(
    contracted: int, accumulator: Accumulator
) -> None:
    fast = not accumulator.promotes
    for seed in range(3):
        h = [hash_bits(seed, name, 24, 1)[:, 0] for name in ("input", "weight")]
        a = torch.from_numpy(ladder_data.placed(h[0], contracted, 448.0)).to(E4M3)
        b = torch.from_numpy(ladder_data.sized(h[1], contracted, 448.0)).to(E4M3)
        found = allowed(a, b, accumulator)
        assert not np.isnan(found).any()
        for split in range(1, min(4, max(1, contracted // 128)) + 1):
            got = mmaemu.accumulate(
                a, b, use_fast_accum=fast, profile="hopper",
                splitk=1 if split == 1 else (split, "contiguous"),
            )  # fmt: skip
            assert (found == values(got)).any(axis=0).all()
        choices = 1 + (np.diff(np.sort(found, axis=0), axis=0) != 0.0).sum(axis=0)
        assert (choices == 1).mean() > 0.6 and (choices <= MOST).mean() > 0.9


def one_row(contracted: int, products: dict[int, float]) -> tuple[F64, F64]:
    """Operands with these products, by column."""
    a = np.zeros((1, contracted))
    for column, product in products.items():
        a[0, column] = product
    return a, np.ones((1, contracted))


def results(
    products: dict[int, float], accumulator: Accumulator, contracted: int = 512
) -> set[float]:
    found = outcomes(*one_row(contracted, products), accumulator, (2.0**-60, 2.0**-60))
    return set(found[:, 0, 0].tolist())


FINE = 2.0**-13


@BOTH
def test_the_last_fraction_bit_is_kept_and_the_next_is_cut(accumulator: Accumulator) -> None:
    assert results({0: 1.0, 1: FINE}, accumulator) == {1.0 + FINE}
    assert results({0: 1.0, 1: FINE / 2}, accumulator) == {1.0}
    assert results({0: 1.0, 1: 1.5 * FINE}, accumulator) == {1.0 + FINE}
    assert results({0: 1.0, 1: -1.5 * FINE}, accumulator) == {1.0 - FINE}
    # each is cut by itself
    assert results({0: 1.0, **dict.fromkeys(range(1, 5), FINE / 2)}, accumulator) == {1.0}
    assert results({0: 1.0, 1: -1.0, 2: FINE / 2, 3: FINE}, accumulator) == {FINE}


def test_another_run_counts_promotions_and_splits() -> None:
    small = FINE / 2
    assert results({0: 1.0, 130: small}, HOPPER_FP8) == {1.0 + small}
    assert results({0: 1.0, 130: small}, HOPPER_FP8_FAST) == {1.0, 1.0 + small}
    assert results({0: 1.0, 70: small}, HOPPER_FP8) == {1.0}
    assert results({0: 1.0, 70: small}, HOPPER_FP8_FAST) == {1.0}
    # what is small adds up before it meets what is large, or does not
    several = {0: 1.0, **dict.fromkeys(range(40, 44), small)}
    assert results(several, HOPPER_FP8) == {1.0, 1.0 + 2 * FINE}


def test_fp32_and_what_is_known_by_its_bound_only_return_exact_sums() -> None:
    small = 2.0**-20
    for accumulator in (FP32, TENSOR_CORE_16):
        assert results({0: 1.0, 9: small, 300: 2.0}, accumulator) == {3.0 + small}
        assert np.isnan(list(results({0: 1.0, 9: 2.0**-24}, accumulator))).all()


def test_of_an_unknown_accumulator_nothing_is_said() -> None:
    assert np.isnan(list(results({0: 1.0}, UNKNOWN))).all()


@BOTH
def test_nothing_is_said_where_too_many_steps_meet(accumulator: Accumulator) -> None:
    spread = {32 * i: 1.0 for i in range(MOST_STEPS + 1)}
    assert results(spread, accumulator) == {MOST_STEPS + 1.0}  # exact in any order
    assert np.isnan(list(results(spread | {1: FINE / 2}, accumulator))).all()


def test_nothing_is_said_where_fp32_rounds_the_sum_of_runs() -> None:
    assert np.isnan(list(results({0: 1.0, 130: 2.0**-25}, HOPPER_FP8))).all()


def test_operands_without_rows_or_products_have_their_shape() -> None:
    for rows, contracted in ((0, 8), (2, 0)):
        a, b = np.zeros((rows, contracted)), np.zeros((3, contracted))
        assert outcomes(a, b, HOPPER_FP8, (1.0, 1.0)).shape[1:] == (rows, 3)
