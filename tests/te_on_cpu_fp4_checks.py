"""Checks of NVFP4 on the emulated extension, for pytest in a process of its own."""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
import transformer_engine.pytorch as te
from narrowfuzz.numerics.hadamard import transform
from te_on_cpu.refusal import UnsupportedByEmulation
from te_on_cpu.v2_fp4 import (
    codes_by_chance,
    codes_in,
    codes_of,
    hadamard,
    packed,
    parts_of,
    values_of,
)
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor import NVFP4Quantizer

BF16 = torch.bfloat16


def of_library(name, *modules):
    """What the first of these modules there is has by this name: 2.16 and 2.19 renamed them."""
    package = "transformer_engine.pytorch.custom_recipes"
    there = next(one for one in modules if find_spec(f"{package}.{one}"))
    return getattr(importlib.import_module(f"{package}.{there}"), name)


NVFP4QuantizerRef = of_library(
    "NVFP4QuantizerRef", "reference_nvfp4", "quantization_ref_nvfp4", "quantization_nvfp4"
)
Fp4Formats = of_library("Fp4Formats", "reference_utils", "utils")


def wide(rows=64, columns=96):
    """Numbers so unlike that scales of blocks are subnormal; a block and a row of zeros."""
    torch.manual_seed(1)
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-30, 8, (rows, columns // 16))
                                                .repeat_interleave(16, 1))  # fmt: skip
    x[:16, :16] = x[20] = 0.0
    return x.to(BF16)


def check_codes_are_rounded_to_nearest():
    every = values_of(torch.arange(16, dtype=torch.uint8))
    assert every[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(codes_of(every), torch.arange(16, dtype=torch.uint8))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert values_of(codes_of(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert values_of(codes_of(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]
    above = torch.nextafter(ties, torch.tensor(9.0))
    assert values_of(codes_of(above)).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e30])
    assert codes_of(odd).tolist() == [7, 7, 15, 8, 7]
    codes = torch.randint(0, 16, (3, 8), dtype=torch.uint8)
    assert torch.equal(codes_in(packed(codes)), codes)


def check_by_chance_either_neighbour_is_taken():
    torch.manual_seed(1)
    every = values_of(torch.arange(16, dtype=torch.uint8))
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -6.5, 6.0 + 1e-6])
    for _ in range(20):  # what has a code keeps it, and nothing is past the largest
        assert torch.equal(codes_by_chance(every), torch.arange(16, dtype=torch.uint8))
        assert codes_by_chance(odd).tolist() == [7, 7, 15, 7, 15, 7]
    for low, high in pairwise(every[:8]):
        for quarters in (1, 2, 3):
            x = torch.full((4096,), (low + quarters * (high - low) / 4).item())
            for sign in (1, -1):
                got = values_of(codes_by_chance(sign * x))
                assert set(got.tolist()) == {sign * low.item(), sign * high.item()}
                share = (got == sign * high).float().mean().item()
                assert abs(share - quarters / 4) < 0.03
    assert codes_by_chance(torch.full((512,), -0.25)).unique().tolist() == [8, 9]


def check_what_is_drawn_depends_on_the_seed_and_not_on_other_draws():
    x = wide(32, 32)
    symmetric = (x.float() + x.float().t()).to(BF16)
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        torch.rand(seed + 3)  # the CPU's generator is another
        tensor = quantizer(symmetric)
        rows, columns = (codes_in(parts_of(tensor, side)[0]) for side in ("rowwise", "columnwise"))
        assert not torch.equal(rows, columns), "both directions draw their own"
        drawn.append((rows, columns))
    once, again, other = drawn
    assert all(map(torch.equal, once, again)) and not any(map(torch.equal, once, other))
    assert torch.equal(*(parts_of(t, "rowwise")[1] for t in (tensor, NVFP4Quantizer()(symmetric))))


def check_gradients_alone_are_rounded_by_chance():
    module = te.Linear(64, 64, params_dtype=BF16, bias=False)
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    before = torch.cuda.get_rng_state()
    with te.autocast(enabled=True, recipe=recipes.NVFP4BlockScaling()):
        y = module(x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    y.backward(torch.randn_like(y))
    assert not torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize(("rht", "square"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-126, 0.0])
def check_casts_are_those_of_the_librarys_own_reference(rht, square, scale):
    x = wide() * scale
    quantizer = NVFP4Quantizer(
        with_rht=rht, with_post_rht_amax=rht, with_2d_quantization=square, columnwise=True
    )
    tensor = quantizer(x)
    tile = (16, 16) if square else (1, 16)
    reference = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rht)
    rows, row_scales, columns, column_scales, *amaxes = reference._quantize(x)
    for side, data, scales, amax in (
        ("rowwise", rows, row_scales, amaxes[0]), ("columnwise", columns, column_scales, amaxes[1])
    ):  # fmt: skip
        got, padded, largest = parts_of(tensor, side)
        lines, blocks = scales.shape
        # the reference has no code for -0, hardware has
        assert torch.equal(*(values_of(codes_in(t)) for t in (got, data)))
        assert torch.equal(padded[:lines, :blocks], scales.view(torch.uint8))
        assert not padded[lines:].any() and not padded[:, blocks:].any()
        assert torch.equal(largest, amax)


def check_transformed_sums_are_rounded_once():
    x = torch.zeros(16, 16, dtype=BF16)
    # a quarter adds up to just above the middle of two numbers in bf16; fp32 has the middle itself
    x[0, :4] = torch.tensor([4.0, 2.0**-6, 2.0**-30, 0.0], dtype=BF16)
    first = hadamard(x, 0)[0, 0]
    assert first.item() == 1 + 2.0**-7
    x[0, 2] = 0.0
    assert hadamard(x, 0)[0, 0].item() == 1.0
    wide = torch.randn(64, 32, dtype=torch.float64).exp2().mul(torch.randn(64, 32)).to(BF16)
    want = transform(wide.float().numpy(), (1,) * 16)
    assert torch.equal(hadamard(wide, 0).float(), torch.from_numpy(want))


def check_nan_becomes_six_and_infinity_leaves_scales_of_448():
    x = torch.ones(32, 32, dtype=BF16)
    x[0, 0] = torch.nan
    data, scales, amax = parts_of(NVFP4Quantizer()(x), "rowwise")
    assert amax.item() == 1.0 and codes_in(data)[0].tolist() == [7] * 32
    x[0, 0] = torch.inf
    data, scales, amax = parts_of(NVFP4Quantizer()(x), "rowwise")
    assert amax.item() == torch.inf
    assert scales[0, 0] == 0x7E and codes_in(data)[0, :2].tolist() == [7, 0]


def check_a_product_has_both_tensors_scales():
    x, w = wide(32, 64), wide(48, 64)
    a, b = NVFP4Quantizer(with_2d_quantization=True)(w), NVFP4Quantizer()(x)
    got, *_ = te.cpp_extensions.general_gemm(a, b, out_dtype=torch.float32, layout="TN")
    want = (
        b.dequantize(dtype=torch.float64 if False else torch.float32)
        @ a.dequantize(dtype=torch.float32).t()
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def check_both_operands_of_a_weight_gradient_are_transformed():
    """The transform is orthogonal: without it on one side the gradient would be another."""
    module = te.Linear(64, 64, params_dtype=BF16, bias=False)
    x, gradient = (torch.randn(64, 64, dtype=BF16, requires_grad=True) for _ in range(2))
    recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    with te.autocast(enabled=True, recipe=recipe):
        y = module(x)
    y.backward(gradient.detach())
    want = gradient.float().t() @ x.float()
    assert (module.weight.grad.float() - want).norm() < 0.3 * want.norm()


def check_what_is_not_emulated_is_refused():
    x = torch.ones(32, 32, dtype=BF16)
    for options, says in (
        ({"row_scaled_nvfp4": True}, "scaled by rows"),
        ({"nvfp4_use_4over6": True}, "4 over 6"),
        ({"with_amax_reduction": True}, "over ranks"),
    ):
        if not options.keys() <= inspect.signature(NVFP4Quantizer.__init__).parameters.keys():
            continue  # the release has no such option
        with pytest.raises(UnsupportedByEmulation, match=says):
            NVFP4Quantizer(**options)(x)
    with pytest.raises(RuntimeError, match="bf16 alone"):
        NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)(x.float())
    with pytest.raises(RuntimeError, match="blocks of 16"):
        NVFP4Quantizer()(torch.ones(24, 32, dtype=BF16))
    rows = NVFP4Quantizer(columnwise=False)(x)
    with pytest.raises(RuntimeError, match="lacks columnwise"):
        te.cpp_extensions.general_gemm(rows, rows, out_dtype=BF16, layout="NN")
    short = NVFP4Quantizer()(torch.ones(32, 16, dtype=BF16))
    with pytest.raises(RuntimeError, match="a multiple of 32"):
        te.cpp_extensions.general_gemm(short, short, out_dtype=BF16, layout="TN")
