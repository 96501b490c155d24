"""Checks of single casts and kernels of TransformerEngine 2.x on the emulated extension."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from narrowfuzz.numerics import scales as rules
from narrowfuzz.numerics.formats import E4M3FN, encode
from te_on_cpu.refusal import UnsupportedByEmulation
from te_on_cpu.v2_releases import (
    ACTIVATIONS_FIND_AMAX,
    BIAS_GRADIENTS_WITHOUT_TRANSPOSES,
    BLOCKS_HAVE_ONE_LAYOUT,
    BLOCKS_HEED_THE_FLAG,
    BLOCKS_MAY_BE_COMPACT,
    EVERY_QUANTIZER_HAS_A_PATH,
    GATED_TRANSPOSE_IS_WRITTEN,
    MX_ACTIVATIONS_ARE_ROUNDED,
    NORMS_FIND_AMAX,
    NORMS_ROUND_BEFORE_AMAX,
    RECIPROCALS_ARE_BITS,
    RECIPROCALS_OF_ALL_MX_SCALES,
    TENSORS_ARE_FITTED,
    TRANSPOSES_MULTIPLY_ANYWHERE,
    installed_release,
)
from te_on_cpu_v2_checks import (
    BF16,
    KEEPS_TRANSPOSES,
    block,
    delayed,
    fresh,  # noqa: F401 - a fixture that each check uses
    step,
)
from te_on_cpu_v2_older import multiply
from te_on_cpu_v2_reference import Seen, close, spread
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer


def check_the_smallest_and_the_largest_mx_scale():
    x = torch.full((32, 64), 2.0**-127)
    x[:, 32:] = torch.inf
    tensor = MXFP8Quantizer(tex.DType.kFloat8E4M3, columnwise=False)(x)
    assert tensor._rowwise_scale_inv[:32, :2].unique(dim=0).tolist() == [[0, 254]]
    # 1 and 448; before, times 1, which is too small for E4M3, and inf times 0
    first = 0x38 if installed_release() >= RECIPROCALS_OF_ALL_MX_SCALES else 0
    zero = RECIPROCALS_ARE_BITS <= installed_release() < RECIPROCALS_OF_ALL_MX_SCALES
    assert tensor._rowwise_data[0, ::32].tolist() == [first, 0x7F if zero else 0x7E]


def check_activations_in_mxfp8():
    """They cast what they round; until 2.5 what they would round."""
    x = torch.randn(32, 128, dtype=BF16)
    with Seen() as seen:
        tex.swiglu(x, MXFP8Quantizer(tex.DType.kFloat8E4M3))
        tex.gelu(x, MXFP8Quantizer(tex.DType.kFloat8E4M3))
    rounded = installed_release() >= MX_ACTIVATIONS_ARE_ROUNDED
    assert {cast.input.dtype for cast in seen.casts} == {BF16 if rounded else torch.float32}


@pytest.mark.parametrize("quantizer", ["delayed", "current", "mx", "block"])
def check_noop_keeps_everything(quantizer):
    """But for FP8 blocks until 2.7."""
    made = {
        "block": Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True),
        "delayed": Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3),
        "current": Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu")),
        "mx": MXFP8Quantizer(tex.DType.kFloat8E4M3),
    }[quantizer]
    tensor = made(torch.randn(32, 32))
    before = tensor.dequantize()
    made.update_quantized(torch.randn(32, 32), tensor, noop_flag=torch.ones(1))
    kept = quantizer != "block" or installed_release() >= BLOCKS_HEED_THE_FLAG
    assert torch.equal(before, tensor.dequantize()) == kept
    made.update_quantized(torch.full((32, 32), 2.0), tensor, noop_flag=torch.zeros(1))
    assert torch.equal(tensor.dequantize(), torch.full((32, 32), 2.0))


@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def check_amax_of_norms(normalization):
    """Current scaling is by the rounded output of a norm; from 2.7 to 2.9 by what it rounds."""
    x, weight = torch.randn(32, 64, dtype=BF16), torch.ones(64, dtype=BF16)
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    biases = (weight * 0,) if normalization == "layernorm" else ()
    norm = getattr(tex, f"{normalization}_fwd")
    one = norm(x, weight, *biases, 1e-5, None, quantizer, tex.DType.kBFloat16, 0, False)[0]
    exact = norm(x, weight, *biases, 1e-5, None, None, tex.DType.kFloat32, 0, False)[0]
    found = NORMS_FIND_AMAX <= installed_release() < NORMS_ROUND_BEFORE_AMAX
    by = exact if found else exact.bfloat16()
    assert exact.abs().max() != exact.bfloat16().abs().max()
    scale = torch.tensor(448.0) / by.float().abs().max()
    assert one._scale_inv.item() == scale.reciprocal().item()
    codes = encode((exact.bfloat16().float() * scale).double().numpy(), E4M3FN)
    assert (one._data.numpy() == codes).all()


@pytest.mark.parametrize("name", ["gelu", "swiglu", "dgelu"])
def check_the_amax_of_an_activation(name):
    """From 2.7 on that of its fp32 values, whose rounded ones are cast."""
    if name == "dgelu" and installed_release() < EVERY_QUANTIZER_HAS_A_PATH:
        pytest.skip("refused there")
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    function, x = getattr(tex, name), torch.randn(64, 64, dtype=BF16)
    inputs = [torch.randn(64, 64, dtype=BF16), x] if name == "dgelu" else [x]
    exact = function(*(one.float() for one in inputs), None)
    one = function(*inputs, quantizer)
    by = exact if installed_release() >= ACTIVATIONS_FIND_AMAX else exact.bfloat16()
    assert exact.abs().max() != exact.bfloat16().abs().max()
    scale = torch.tensor(448.0) / by.float().abs().max()
    assert one._scale_inv.item() == scale.reciprocal().item()
    codes = encode((exact.bfloat16().float() * scale).double().numpy(), E4M3FN)
    assert (one._data.numpy() == codes).all()


def check_mx_codes_follow_the_numerics_rules():
    x = torch.randn(64, 64) * torch.logspace(-20, 20, 64)[:, None]
    x[3, :32], x[5, 40] = 0.0, 448.0 * 2**5
    tensor = MXFP8Quantizer(tex.DType.kFloat8E4M3)(x)
    for side, axis in (("rowwise", 1), ("columnwise", 0)):
        view = x.numpy() if axis else x.numpy().T
        amax = abs(view).reshape(64, 2, 32).max(2)
        want = rules.mx_scale(amax, E4M3FN, "rceil", inf_byte=254)
        scale = getattr(tensor, f"_{side}_scale_inv")
        got = scale[:64, :2].numpy() if axis else scale[:2, :64].numpy().T
        assert (got == want).all()
        factor = rules.mx_factor(want).repeat(32, 1)
        codes = getattr(tensor, f"_{side}_data").numpy()
        assert ((codes if axis else codes.T) == encode(view / factor, E4M3FN)).all()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def check_block_scales_are_those_of_their_blocks(dim, side, dtype):
    """Of complete and incomplete blocks; the library's own Python then reads the tensor."""
    x = (torch.randn(144, 272) * torch.randn(144, 1).exp()).to(dtype)
    x[0], x[:, 3], x[1, 5], x[:, 7] = 0.0, 1e-37, torch.nan, 1e-30
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=side == "rowwise",
        columnwise=side == "columnwise",
        block_scaling_dim=dim,
    )
    high, wide = (128, 128) if dim == 2 else (1, 128) if side == "rowwise" else (128, 1)
    with Seen() as seen:
        made = tex.quantize(x, quantizer)
    (cast,) = seen.casts
    largest = torch.finfo(dtype).max
    for i in range(-(-144 // high)):
        for j in range(-(-272 // wide)):
            amax = x[i * high : (i + 1) * high, j * wide : (j + 1) * wide].float().abs()
            amax = amax.nan_to_num(0.0).max()
            scale = min(448 / amax.item(), largest) if amax > 0 else 1.0
            assert cast.scale[i, j] == 2.0 ** math.floor(math.log2(scale)), (i, j)
    scaled = x.float() * spread(cast.scale, x)
    codes = encode(scaled.double().numpy(), E4M3FN)
    nan = x.isnan().numpy()
    assert ((cast.codes.numpy() == codes) | nan).all()
    back, exact = made.dequantize().float(), x.float()
    near = (back - exact).abs() <= exact.abs() * 2.0**-3 + 2.0**-10 / spread(cast.scale, x)
    assert (near | x.isnan()).all() and back[1, 5].isnan()


def check_block_scales_may_be_no_powers_of_two():
    x = torch.randn(16, 16)
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=False
    )
    with Seen() as seen:
        tex.quantize(x, quantizer)
    assert seen.casts[0].scale.item() == (torch.tensor(448.0) / x.abs().max()).item()


def check_block_operands_that_cannot_be_multiplied():
    def quantised(rows, columns, dim=1):
        quantizer = Float8BlockQuantizer(
            tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
        )
        return tex.quantize(torch.randn(rows, columns, dtype=BF16), quantizer)

    assert multiply(quantised(24, 32, 2), quantised(8, 32)).shape == (8, 24)
    for a, b, message in (
        (quantised(24, 24), quantised(8, 24), "multiple of 16"),
        (quantised(24, 32), quantised(4, 32), "multiple of 8"),
        (quantised(24, 32, 2), quantised(8, 32, 2), "128 x 128"),
    ):
        with pytest.raises(RuntimeError, match=message):
            multiply(a, b)
    told = BLOCKS_MAY_BE_COMPACT <= installed_release() < BLOCKS_HAVE_ONE_LAYOUT
    mixed = (
        pytest.raises(AttributeError, match="_data_format")
        if told
        else pytest.raises(RuntimeError, match="same kind of scaling")
    )
    with mixed:
        multiply(quantised(24, 32), torch.randn(8, 32, dtype=BF16))


def check_bias_gradients_without_transposes():
    """Hopper has no kernel for them in delayed scaling, which is called until 2.7."""
    quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E5M2)
    quantizer.set_usage(rowwise=True, columnwise=False)
    gradient = torch.randn(32, 64, dtype=BF16)
    if KEEPS_TRANSPOSES and installed_release() < BIAS_GRADIENTS_WITHOUT_TRANSPOSES:
        with pytest.raises(RuntimeError, match="no kernel"):
            tex.bgrad_quantize(gradient, quantizer)
        return
    bias, _ = tex.bgrad_quantize(gradient, quantizer)
    close(bias, gradient.double().sum(0), gradient)


def check_gated_activations_write_transposes():
    """Since 2.12; before, the transpose is what the memory held."""
    if not KEEPS_TRANSPOSES:
        pytest.skip("this device has no transposes")
    one = torch.ones(1)
    quantizer = Float8Quantizer(one, torch.zeros(1), tex.DType.kFloat8E4M3)
    x = torch.randn(32, 64, dtype=BF16)
    for result in (
        tex.swiglu(x, quantizer),
        tex.dswiglu(torch.randn(32, 32, dtype=BF16), x, quantizer),
    ):
        written = torch.equal(result._transpose, result._data.t())
        assert written == (installed_release() >= GATED_TRANSPOSE_IS_WRITTEN)
        assert written or (result._transpose == 0x7F).all()


def check_buffers_of_a_tensor_that_is_quantised_into():
    """Those of the quantizer; until 2.6 those that it has."""
    if not KEEPS_TRANSPOSES:
        pytest.skip("this device has no transposes")
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    quantizer.set_usage(rowwise=True, columnwise=False)
    made = quantizer(torch.randn(32, 64))
    assert made._transpose is None
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.update_quantized(torch.randn(32, 64), made)
    assert (made._transpose is not None) == (installed_release() >= TENSORS_ARE_FITTED)


def check_activations_in_blocks():
    """Until 2.6 they fail, and gradients by current scaling are refused."""
    x, gradient = torch.randn(32, 256, dtype=BF16), torch.randn(32, 128, dtype=BF16)
    blocks = Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    current = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    have = installed_release() >= EVERY_QUANTIZER_HAS_A_PATH
    with nullcontext() if have else pytest.raises(RuntimeError, match="blockwise quantization"):
        tex.swiglu(x, blocks)
    with nullcontext() if have else pytest.raises(UnsupportedByEmulation, match="gradient"):
        tex.dswiglu(gradient, x, current)
    with nullcontext() if have else pytest.raises(RuntimeError, match="no kernel"):
        tex.bgrad_quantize(gradient, blocks)


def check_layouts_of_blocks():
    """From 2.5 to 2.11 a tensor of FP8 blocks is told its layout; that of all-gathers is
    refused."""
    if not BLOCKS_MAY_BE_COMPACT <= installed_release() < BLOCKS_HAVE_ONE_LAYOUT:
        pytest.skip("blocks have one layout")
    for internal in (False, True):
        quantizer = Float8BlockQuantizer(
            tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
        )
        quantizer.internal = internal
        tensor = tex.quantize(torch.randn(32, 64, dtype=BF16), quantizer)
        assert tensor._data_format == tex.Float8BlockScaleTensorFormat.GEMM_READY
        quantizer.all_gather_usage = True
        with pytest.raises(UnsupportedByEmulation, match="all-gather"):
            tex.quantize(torch.randn(32, 64, dtype=BF16), quantizer)


def check_special_values():
    """inf and NaN under current scaling and MXFP8."""
    current = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    x = torch.ones(32, 32)
    x[0, 0] = torch.inf
    tensor = current(x)
    assert tensor._scale_inv.item() == 1.0 and tensor.dequantize()[0, 0] == 448.0
    x[0, 0] = torch.nan
    tensor = current(x)
    assert tensor._scale_inv.item() == pytest.approx(1 / 448) and tensor._data[0, 0] == 0x7F
    assert current(torch.zeros(32, 32))._scale_inv.item() == 1.0
    tiny = current(torch.full((32, 32), 1e-44))
    assert tiny._scale_inv.item() == pytest.approx(1 / torch.finfo(torch.float32).max)
    x[0, 0] = torch.inf
    assert MXFP8Quantizer(tex.DType.kFloat8E4M3)(x)._rowwise_scale_inv[0, 0] == 254
    powers = Float8CurrentScalingQuantizer(
        tex.DType.kFloat8E4M3, torch.device("cpu"), force_pow_2_scales=True, amax_epsilon=4.0
    )
    assert powers(torch.ones(32, 32))._scale_inv.item() == 1 / 64


def check_missing_operands_are_errors():
    for quantizer, x in (
        (
            Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu")),
            torch.ones(32, 32),
        ),
        (MXFP8Quantizer(tex.DType.kFloat8E4M3), torch.ones(32, 32)),
    ):
        quantizer.set_usage(rowwise=True, columnwise=False)
        rows = quantizer(x)
        multiply(rows, rows, layout="TN")
        if KEEPS_TRANSPOSES or isinstance(quantizer, MXFP8Quantizer):
            with pytest.raises(RuntimeError, match="lacks col"):
                multiply(rows, rows, layout="NN")


def check_transposes_in_place_of_rows():
    """A device that keeps no transposes reads one where it is all there is: since 2.10."""
    if KEEPS_TRANSPOSES:
        pytest.skip("this device reads what the layout asks for")
    current = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    tensor = current(torch.randn(32, 32))
    want = multiply(tensor, tensor, layout="NN")
    tensor._transpose, tensor._transpose_invalid = tensor._data.t().contiguous(), False
    tensor._data = None
    if installed_release() >= TRANSPOSES_MULTIPLY_ANYWHERE:
        assert torch.equal(multiply(tensor, tensor, layout="NN"), want)
        return
    with pytest.raises(RuntimeError, match="lacks row-wise data"):
        multiply(tensor, tensor, layout="NN")


def check_refusals():
    with pytest.raises(UnsupportedByEmulation, match="fused_qkv_rope_forward"):
        tex.fused_qkv_rope_forward()
    with pytest.raises(UnsupportedByEmulation, match="CommOverlapHelper"):
        tex.CommOverlapHelper()
    if hasattr(te.distributed, "pad_columnwise_scale_inv"):  # since 2.8
        with pytest.raises(UnsupportedByEmulation, match="pad_columnwise"):
            te.distributed.pad_columnwise_scale_inv()
    with pytest.raises(UnsupportedByEmulation, match="attention in FP8"):
        step(block(), delayed(fp8_dpa=True), torch.randn(32, 2, 64, dtype=BF16), None)
    assert not hasattr(tex, "__path__") and not hasattr(tex, "flash_attention")
