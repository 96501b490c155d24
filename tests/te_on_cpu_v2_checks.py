"""Checks of the modules of TransformerEngine 2.x on the emulated extension, for pytest in a process
of its own."""

from __future__ import annotations

import functools

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from narrowfuzz.numerics.formats import E4M3FN, E5M2, encode
from te_on_cpu.refusal import UnsupportedByEmulation
from te_on_cpu.v2_fp4 import hadamard, packed
from te_on_cpu.v2_releases import (
    NVFP4,
    PRODUCTS_ARE_QUANTISED_AFTERWARDS,
    installed_release,
)
from te_on_cpu_v2_older import Manager, autocast, quantized_model_init
from te_on_cpu_v2_reference import Seen, close, of_fp4, reference, spread
from transformer_engine.common import recipe as recipes

BF16 = torch.bfloat16
KEEPS_TRANSPOSES = torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def fresh():
    Manager.reset()
    torch.manual_seed(1)


def delayed(**options):
    return recipes.DelayedScaling(
        **{"fp8_format": recipes.Format.HYBRID, "amax_history_len": 4, **options}
    )


RECIPES = {
    "delayed": delayed,
    "delayed_e4m3": lambda: delayed(fp8_format=recipes.Format.E4M3),
    "current": recipes.Float8CurrentScaling,
    "mx": recipes.MXFP8BlockScaling,
    "block": recipes.Float8BlockScaling,
}
if installed_release() >= NVFP4:
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    RECIPES["fp4"] = functools.partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True)
    #: Of the Hadamard transform, a bit for each minus.
    SIGNS = NVFP4Quantizer().rht_matrix_random_sign_mask_t
KINDS = {recipe: kind for kind, recipe in RECIPES.items()}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))

REENTRANT = pytest.mark.parametrize("reentrant", [None, True, False])


def linear(**options):
    module = te.Linear(64, 32, **{"params_dtype": BF16, **options})
    with torch.no_grad():
        module.weight.copy_(torch.randn(32, 64) * 0.1)
        if module.use_bias:
            module.bias.copy_(torch.randn(32))
    return module


def wrapped(reentrant, checkpoint=te.checkpoint):
    if reentrant is None:
        return None
    return lambda module, x: checkpoint(module, x, use_reentrant=reentrant)


def step(module, recipe, x, gradient, wrap=None, **options):
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **options) if wrap is None else wrap(module, x)
    y.backward(gradient)
    return y


def assert_gemms(seen, biases=()):
    """Every GEMM is what its operands give; ``biases`` in the order of TN GEMMs."""
    biases = iter(biases)
    assert seen.gemms
    for gemm in seen.gemms:
        bias = next(biases, None) if gemm.layout == "TN" else None
        close(gemm.result, reference(gemm, bias), gemm)


@each_recipe
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def check_linear_against_float64(recipe, dtype, bias):
    if KINDS[recipe] == "fp4" and dtype != BF16:
        pytest.skip("its Hadamard transform is of bf16 alone")
    module = linear(params_dtype=dtype, bias=bias)
    x = torch.randn(2, 32, 64, dtype=dtype, requires_grad=True)
    with Seen() as seen:
        step(module, recipe(), x, torch.randn(2, 32, 32, dtype=dtype))
    assert [gemm.layout for gemm in seen.gemms] == ["TN", "NN", "NT"]
    # cuBLAS adds no fp32 bias to an FP8 product; the library casts it.
    assert_gemms(seen, [module.bias.bfloat16()] if bias else [])
    assert torch.equal(x.grad.view(64, 64), seen.gemms[1].result.view(64, 64))
    assert torch.equal(module.weight.grad, seen.gemms[2].result)


@each_recipe
def check_casts_tell_codes_and_scales(recipe):
    module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with Seen() as seen:
        step(module, recipe(), x, torch.randn(32, 32, dtype=BF16))
    # a weight's blocks of 128 x 128 are cast once for both directions
    many = {"mx": 6, "fp4": 6, "block": 5}.get(KINDS[recipe], 3)
    assert len(seen.casts) == many
    for cast in seen.casts:
        assert cast.codes.dtype == torch.uint8 and cast.codes.shape == cast.input.shape
        if KINDS[recipe] == "fp4":
            transformed = cast.scale.shape[1] == cast.codes.shape[1]
            x = hadamard(cast.input.t(), SIGNS).t() if transformed else cast.input
            found = of_fp4(cast.codes, cast.scale)
            assert (found - x).abs().le(x.abs().max() / 5).all()
            continue
        if cast.scale.dtype == torch.float32:
            assert many > 3 or cast.amax.item() == cast.input.float().abs().max().item()
            scaled = cast.input.float() * spread(cast.scale, cast.input)
        else:
            axis = 1 if cast.scale.shape[0] == cast.input.shape[0] else 0
            scaled = cast.input / torch.exp2(cast.scale.double() - 127).repeat_interleave(32, axis)
        fmt = {"e4m3": E4M3FN, "e5m2": E5M2}[cast.format]
        assert (cast.codes.numpy() == encode(scaled.double().numpy(), fmt)).all()


@each_recipe
@pytest.mark.parametrize("frozen", ["weight", "input", "bias"])
def check_frozen(recipe, frozen):
    module = linear()
    x = torch.randn(32, 64, dtype=BF16, requires_grad=frozen != "input")
    if frozen != "input":
        getattr(module, frozen).requires_grad_(False)
    with Seen() as seen:
        step(module, recipe(), x, torch.randn(32, 32, dtype=BF16))
    layouts = {"weight": ["TN", "NN"], "input": ["TN", "NT"], "bias": ["TN", "NN", "NT"]}
    assert [gemm.layout for gemm in seen.gemms] == layouts[frozen]
    assert_gemms(seen, [module.bias])


@each_recipe
def check_quantised_parameters_train(recipe):
    with quantized_model_init(enabled=True, recipe=recipe()):
        module = te.Linear(64, 32, params_dtype=BF16, bias=False)
    assert type(module.weight).__name__ in (
        "Float8Tensor",
        "MXFP8Tensor",
        "Float8BlockwiseQTensor",
        "NVFP4Tensor",
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)
    for _ in range(2):
        before = module.weight.detach().dequantize()
        x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
        with Seen() as seen:
            step(module, recipe(), x, torch.randn(32, 32, dtype=BF16))
        assert_gemms(seen)
        wanted = before.float() - 0.001 * module.weight.grad.float()
        with Seen() as seen:
            optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(seen.casts[0].input.float(), wanted, rtol=2**-7, atol=3e-5)
        data = "_rowwise_data" if hasattr(module.weight, "_rowwise_data") else "_data"
        codes = seen.casts[0].codes
        codes = packed(codes) if KINDS[recipe] == "fp4" else codes
        assert torch.equal(getattr(module.weight, data), codes)


def check_quantised_output():
    """An FP8 output is cast from the sum by delayed scaling, from the rounded output otherwise, but
    not until 2.7."""
    afterwards = installed_release() >= PRODUCTS_ARE_QUANTISED_AFTERWARDS
    for recipe in (delayed(), recipes.Float8CurrentScaling()):
        module, x = linear(bias=False), torch.randn(32, 64, dtype=BF16)
        if not (recipe.delayed() or afterwards):
            refused = pytest.raises(UnsupportedByEmulation, match="whose result is written by")
            with refused, torch.no_grad(), autocast(enabled=True, recipe=recipe):
                module(x, fp8_output=True)
            continue
        with torch.no_grad(), autocast(enabled=True, recipe=recipe):
            plain, fp8 = module(x), module(x, fp8_output=True)
        error = (fp8.dequantize().float() - plain.float()).abs()
        assert (error <= plain.float().abs() / 16 + 2.0**-9).all()


@each_recipe
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def check_layernorm_linear(recipe, normalization):
    module = te.LayerNormLinear(64, 32, params_dtype=BF16, normalization=normalization, bias=False)
    with torch.no_grad():
        module.layer_norm_weight.uniform_(0.5, 1.5)
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with Seen() as seen:
        step(module, recipe(), x, torch.randn(32, 32, dtype=BF16))
    assert_gemms(seen)
    exact = x.detach().double().requires_grad_()
    weight = module.layer_norm_weight.detach().double().requires_grad_()
    if normalization == "LayerNorm":
        bias = module.layer_norm_bias.detach().double()
        normed = torch.nn.functional.layer_norm(exact, (64,), weight, bias, module.eps)
    else:
        normed = torch.nn.functional.rms_norm(exact, (64,), weight, module.eps)
    normed.backward(seen.gemms[1].result.double().view(32, 64))
    cast = next(cast for cast in seen.casts if cast.input.shape == x.shape)
    fused = isinstance(recipe(), recipes.DelayedScaling)
    assert cast.input.dtype == (torch.float32 if fused else BF16)
    torch.testing.assert_close(cast.input.double(), normed, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-7, atol=2e-2)
    torch.testing.assert_close(
        module.layer_norm_weight.grad.double(), weight.grad, rtol=2**-7, atol=2e-2
    )


@each_recipe
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "relu", "geglu", "qgelu", "srelu"])
def check_mlp(recipe, activation):
    module = te.LayerNormMLP(64, 64, params_dtype=BF16, activation=activation, bias=True)
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    gradient = torch.randn(32, 64, dtype=BF16)
    with Seen() as seen:
        y = step(module, recipe(), x, gradient)
    assert_gemms(seen, [module.fc1_bias, module.fc2_bias])
    leaf = x.detach().clone().requires_grad_()
    grads = [p.grad.float() for p in module.parameters()]
    module.zero_grad()
    plain = step(module, None, leaf, gradient)
    for fp8, full in [
        (y, plain),
        (x.grad, leaf.grad),
        *zip(grads, (p.grad for p in module.parameters()), strict=True),
    ]:
        error = (fp8.float() - full.float()).norm() / full.float().norm()
        assert error < (0.4 if KINDS[recipe] == "fp4" else 0.25), error


def check_mlp_in_full_precision():
    """GELU in the GEMM's epilogue against float64."""
    module = te.LayerNormMLP(64, 64, params_dtype=torch.float32, activation="gelu")
    x = torch.randn(32, 64, requires_grad=True)
    y = module(x)
    y.sum().backward()
    exact = x.detach().double().requires_grad_()
    normed = torch.nn.functional.layer_norm(
        exact, (64,), module.layer_norm_weight.double(), module.layer_norm_bias.double(), 1e-5
    )
    hidden = torch.nn.functional.gelu(
        normed @ module.fc1_weight.double().t() + module.fc1_bias.double(), approximate="tanh"
    )
    want = hidden @ module.fc2_weight.double().t() + module.fc2_bias.double()
    want.sum().backward()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@each_recipe
@pytest.mark.parametrize("splits", [[32, 64], [96, 0]])
def check_grouped_linear(recipe, splits):
    """As a loop of linears, empty experts included."""
    grouped = te.GroupedLinear(2, 64, 32, params_dtype=BF16)
    x = torch.randn(96, 64, dtype=BF16, requires_grad=True)
    gradient = torch.randn(96, 32, dtype=BF16)
    with autocast(enabled=True, recipe=recipe()):
        y = grouped(x, splits)
    y.backward(gradient)
    Manager.reset()
    start = 0
    for i, size in enumerate(splits):
        if size == 0:
            assert not getattr(grouped, f"weight{i}").grad.any()
            continue
        part = x.detach()[start : start + size].requires_grad_()
        single = linear()
        with torch.no_grad():
            single.weight.copy_(getattr(grouped, f"weight{i}"))
            single.bias.copy_(getattr(grouped, f"bias{i}"))
        alone = step(single, recipe(), part, gradient[start : start + size])
        assert torch.equal(alone, y[start : start + size])
        assert torch.equal(part.grad, x.grad[start : start + size])
        assert torch.equal(single.weight.grad, getattr(grouped, f"weight{i}").grad)
        assert torch.equal(single.bias.grad, getattr(grouped, f"bias{i}").grad)
        start += size


def block(**options):
    return te.TransformerLayer(
        64, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, **options
    )


@each_recipe
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("tokens", [16, 32])
def check_transformer_layer(recipe, mask, tokens):
    """16 keys take torch's softmax, 32 the extension's; both near the layer in bf16."""
    module = block(self_attn_mask_type=mask)
    x = torch.randn(tokens, 2, 64, dtype=BF16, requires_grad=True)
    gradient = torch.randn(tokens, 2, 64, dtype=BF16)
    with Seen() as seen:
        y = step(module, recipe(), x, gradient)
    assert_gemms(seen, [p for n, p in module.named_parameters() if n.endswith("bias")][1::2][:0])
    leaf = x.detach().clone().requires_grad_()
    plain = step(module, None, leaf, gradient)
    assert (y.float() - plain.float()).norm() / plain.float().norm() < 0.1
    assert (x.grad.float() - leaf.grad.float()).norm() / leaf.grad.float().norm() < 0.2


def check_attention_is_causal():
    module, x = block(self_attn_mask_type="causal"), torch.randn(32, 2, 64, dtype=BF16)
    changed = x.clone()
    changed[20:] += 1
    with torch.no_grad():
        assert torch.equal(module(x)[:20], module(changed)[:20])
        assert not torch.equal(module(x)[20:], module(changed)[20:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def check_rotary_embedding(interleaved, layout):
    """The fused kernel against the library's own composition of torch operations."""
    shape = (32, 2, 4, 16) if layout == "sbhd" else (2, 32, 4, 16)
    freqs = te.RotaryPositionEmbedding(16, rotary_percent=0.5, interleaved=interleaved)(32)
    results = []
    for fused in (True, False):
        torch.manual_seed(2)
        x = torch.randn(shape).to(torch.float32 if fused else torch.float64).requires_grad_()
        y = te.attention.rope.apply_rotary_pos_emb(
            x, freqs, layout, fused=fused, interleaved=interleaved
        )
        y.backward(torch.linspace(-1, 1, y.numel()).view(shape).to(y.dtype))
        results.append((y.double(), x.grad.double()))
    for fused, composed in zip(*results, strict=True):
        torch.testing.assert_close(fused, composed, rtol=1e-5, atol=1e-6)


@each_recipe
def check_no_tokens(recipe):
    module, x = linear(), torch.randn(0, 64, dtype=BF16, requires_grad=True)
    y = step(module, recipe(), x, torch.zeros(0, 32, dtype=BF16))
    assert y.shape == (0, 32) and x.grad.shape == x.shape
    assert not module.weight.grad.any() and not module.bias.grad.any()


def check_gradient_accumulates_into_main_grad():
    module = linear(fuse_wgrad_accumulation=True, bias=False)
    module.weight.main_grad = torch.ones(32, 64)
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with Seen() as seen:
        step(module, recipes.Float8CurrentScaling(), x, torch.ones(32, 32, dtype=BF16))
    exact, magnitude = reference(seen.gemms[2])
    assert (module.weight.main_grad.double() - 1 - exact).abs().le(magnitude * 1e-5).all()


def check_autocast_of_torch():
    """Neither CUDA nor CPU autocast reaches into the emulated kernels."""
    for device in ("cuda", "cpu"):
        module = te.Linear(64, 32)
        x = torch.randn(32, 64, requires_grad=True)
        with Seen() as seen, torch.autocast(device, dtype=BF16):
            y = step(
                module, delayed(), x, torch.ones(32, 32, dtype=BF16 if device == "cuda" else None)
            )
        assert y.dtype == (BF16 if device == "cuda" else torch.float32)
        assert_gemms(seen, [module.bias])


def check_masked_softmax():
    x, mask = torch.randn(2, 2, 8, 32, dtype=BF16), torch.rand(2, 1, 8, 32) < 0.5
    mask[0, 0, 0] = True
    y = tex.scaled_masked_softmax_forward(x, mask, 0.5)
    assert not y[0, :, 0].any()
    want = torch.softmax((x.double() * 0.5).masked_fill(mask, -torch.inf), -1).nan_to_num(0)
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-6)


# What the library itself does wrong, on any device.
