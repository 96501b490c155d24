"""Checks of TransformerEngine 2.x on the emulated extension, for pytest in a process of its own."""

from __future__ import annotations

import functools
import io
import math
from contextlib import nullcontext

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from narrowfuzz.numerics import scales as rules
from narrowfuzz.numerics.formats import E4M3FN, E5M2, encode
from te_on_cpu.refusal import UnsupportedByEmulation
from te_on_cpu.v2_fp4 import hadamard, packed
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
    NVFP4,
    PRODUCTS_ARE_QUANTISED_AFTERWARDS,
    RECIPROCALS_ARE_BITS,
    RECIPROCALS_OF_ALL_MX_SCALES,
    TENSORS_ARE_FITTED,
    TRANSPOSES_MULTIPLY_ANYWHERE,
    installed_release,
)
from te_on_cpu_v2_older import Manager, autocast, multiply, quantized_model_init
from te_on_cpu_v2_reference import Seen, close, of_fp4, reference, spread
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

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


@REENTRANT
@pytest.mark.parametrize("unfused", ["0", "1"])
def check_delayed_scales(reentrant, unfused, monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
    module, scales = te.Linear(64, 64, params_dtype=BF16), []
    for i in range(3):
        x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
        gradient = torch.full((32, 64), i + 1.0, dtype=BF16)
        step(module, delayed(), x, gradient, wrapped(reentrant))
        scales.append(module.fp8_meta["scaling_bwd"].scale[0].item())
    torch.testing.assert_close(scales, [57344.0, 28672.0, 57344.0 / 3])


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [448.0 / 4, 448.0 / 4, 448.0 / 4]),
        ({"amax_compute_algo": "most_recent"}, [448.0 / 4, 448.0 / 2, 448.0]),
        ({"margin": 2}, [28.0, 28.0, 28.0]),
        ({"amax_history_len": 1}, [448.0 / 4, 448.0 / 2, 448.0]),
        ({"amax_compute_algo": lambda history: history[0] * 2}, [56.0, 112.0, 224.0]),
        ({"scaling_factor_compute_algo": lambda amax, scale, top, recipe: top / amax}, [112.0] * 3),
    ],
)
def check_delayed_options(options, want):
    module, scales = te.Linear(64, 64, params_dtype=BF16), []
    for largest in (4.0, 2.0, 1.0):
        x = torch.full((32, 64), largest, dtype=BF16, requires_grad=True)
        step(module, delayed(**options), x, torch.ones(32, 64, dtype=BF16))
        scales.append(module.fp8_meta["scaling_fwd"].scale[0].item())
    assert scales == want


def check_update_leaves_idle_slots_alone():
    history, scale = torch.tensor([[0.0, 2.0], [3.0, 1.0], [5.0, 7.0]]), torch.tensor([9.0, 9.0])
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([0.0, 2.0]), [history], [scale], "max", tex.DType.kFloat8E4M3, 0
    )
    assert history.tolist() == [[0.0, 0.0], [3.0, 7.0], [5.0, 2.0]]
    assert scale.tolist() == [9.0, 64.0]


@each_recipe
@REENTRANT
def check_checkpoint_repeats_the_forward(recipe, reentrant):
    """Recomputed or not: same output, same gradients, same state."""
    torch.manual_seed(3)
    xs, module = torch.randn(3, 32, 64, dtype=BF16), linear()
    twin = linear()
    twin.load_state_dict(module.state_dict())
    for x in xs:
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        gradient = torch.randn(32, 32, dtype=BF16)
        plain = step(module, recipe(), leaf, gradient)
        again = step(twin, recipe(), other, gradient, wrapped(reentrant))
        assert torch.equal(plain, again) and torch.equal(leaf.grad, other.grad)
        assert torch.equal(module.weight.grad, twin.weight.grad)
    state = getattr(Manager, "quantization_state", Manager)
    assert not any(state.fp8_tensors_recompute_buffer)


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
def check_evaluation_changes_no_state(recipe):
    module, x = linear(), torch.randn(32, 64, dtype=BF16)
    step(module, recipe(), x.clone().requires_grad_(), torch.randn(32, 32, dtype=BF16))
    before = {k: v for k, v in module.state_dict().items() if "extra" not in k}
    with torch.no_grad(), autocast(enabled=True, recipe=recipe()):
        first, second = module(x), module.eval()(x)
    assert torch.equal(first, second)
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    with torch.no_grad(), Seen() as seen, autocast(enabled=True, recipe=recipe()):
        module(x)
    assert not seen.updates


@each_recipe
def check_cached_weight_is_cast_once(recipe):
    module = linear()
    with Seen() as seen:
        for first in (True, False, False):
            x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
            step(module, recipe(), x, torch.randn(32, 32, dtype=BF16), is_first_microbatch=first)
    sides = 2 if KINDS[recipe] in ("mx", "fp4") else 1
    weights = [
        cast
        for cast in seen.casts
        if cast.input.shape == (32, 64) and cast.format in ("e4m3", "e2m1")
    ]
    assert sum(torch.equal(cast.input, module.weight) for cast in weights) == sides
    assert_gemms(seen, [module.bias] * 3)


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


@each_recipe
def check_save_and_load(recipe, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    module, twin = linear(), linear()
    for _ in range(2):
        x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
        step(module, recipe(), x, torch.randn(32, 32, dtype=BF16))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=False))
    x = torch.randn(32, 64, dtype=BF16)
    results = []
    for each in (module, twin):
        leaf = x.clone().requires_grad_()
        y = step(each, recipe(), leaf, torch.ones(32, 32, dtype=BF16))
        results.append((y, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def check_models_do_not_mix():
    """Two models, their own recipes, in turns: as if each were alone."""

    def train(modules):
        torch.manual_seed(5)
        for i in range(4):
            x = torch.randn(32, 64, dtype=BF16, requires_grad=True) * (i + 1)
            for module, recipe in modules:
                step(module, recipe, x.detach().requires_grad_(), torch.ones(32, 32, dtype=BF16))

    alone, beside, other = linear(), linear(), linear()
    beside.load_state_dict(alone.state_dict())
    train([(alone, delayed())])
    Manager.reset()
    train([(beside, delayed()), (other, delayed(margin=1))])
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(alone.fp8_meta[key].scale, beside.fp8_meta[key].scale)
        assert torch.equal(alone.fp8_meta[key].amax_history, beside.fp8_meta[key].amax_history)


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


# What the library itself does wrong, on any device.


def spike_scales(checkpointed):
    module = te.Linear(64, 64, params_dtype=BF16)
    wrap, scales = wrapped(True) if checkpointed else None, []
    for i in range(6):
        x = torch.full((32, 64), 30.5 if i == 1 else 3.453, dtype=BF16, requires_grad=True)
        step(module, delayed(amax_history_len=8), x, torch.ones(32, 64, dtype=BF16), wrap)
        scales.append(module.fp8_meta["scaling_fwd"].scale[0].item())
    return scales


def check_known_duplicate_updates(monkeypatch):
    """TE PR 3213: checkpointing updates twice a step; unfused, the spike is forgotten early."""
    assert spike_scales(False) == spike_scales(True)
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    plain, checkpointed = spike_scales(False), spike_scales(True)
    assert plain[5] == pytest.approx(14.69, rel=1e-3)
    assert checkpointed[5] == pytest.approx(129.74, rel=1e-3)


def check_known_update_counts():
    """Two bulk updates a step; checkpointed three, one of them repeated."""
    for reentrant, count in ((None, 2), (True, 3), (False, 3)):
        Manager.reset()
        module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
        with Seen() as seen:
            step(module, delayed(), x, torch.ones(32, 32, dtype=BF16), wrapped(reentrant))
        assert len(seen.updates) == count


def check_known_calibration():
    """calibrating=True sees nothing of a Linear and breaks GELU, whose product is quantised without
    a region: until 2.11 the next product fails, since then its calibration; other activations are
    seen. Until 2.7 no LayerNormMLP has a quantizer to calibrate."""
    x = torch.randn(32, 64, dtype=BF16)
    swiglu = te.LayerNormMLP(64, 64, params_dtype=BF16, activation="swiglu")
    if installed_release() < (2, 8):
        none = pytest.raises(AttributeError, match="no attribute 'calibrate'")
        with none, autocast(enabled=False, calibrating=True, recipe=delayed()):
            swiglu(x)
        return
    for module, calibrated in ((linear(), False), (swiglu, True)):
        with autocast(enabled=False, calibrating=True, recipe=delayed()):
            module(x)
        assert module.fp8_meta["scaling_fwd"].amax_history.any().item() == calibrated
    breaks = (
        pytest.raises(AttributeError, match="aminmax")
        if installed_release() >= (2, 12)
        else pytest.raises(RuntimeError, match="same kind of scaling")
    )
    with breaks, autocast(enabled=False, calibrating=True, recipe=delayed()):
        te.LayerNormMLP(64, 64, params_dtype=BF16, activation="gelu")(x)


def check_known_autocast_inside_checkpoint():
    """TE PR 3284: with the autocast opened inside, forward scales never move; until 2.18 it
    fails."""
    module = te.Linear(64, 64, params_dtype=BF16)

    def inside(module, x):
        with autocast(enabled=True, recipe=delayed()):
            return module(x)

    fails = pytest.raises(KeyError, match="fwd_recompute")
    for _ in range(3):
        x = torch.full((32, 64), 4.0, dtype=BF16, requires_grad=True)
        with nullcontext() if installed_release() >= (2, 19) else fails:
            te.checkpoint(inside, module, x, use_reentrant=True).sum().backward()
    if installed_release() < (2, 19):
        return
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == 1.0
    assert module.fp8_meta["scaling_bwd"].scale[0].item() != 1.0


@pytest.mark.parametrize("reentrant", [True, False])
def check_known_torch_checkpoint(reentrant):
    """torch's own checkpoint recomputes outside the autocast: in bf16, or with an error."""
    module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with Seen() as seen:
        if reentrant:
            step(
                module,
                delayed(),
                x,
                torch.ones(32, 32, dtype=BF16),
                wrapped(True, torch_checkpoint),
            )
            assert [g.a.format for g in seen.gemms] == ["e4m3", "bf16", "bf16", "bf16"]
        else:
            with pytest.raises(torch.utils.checkpoint.CheckpointError):
                step(
                    module,
                    delayed(),
                    x,
                    torch.ones(32, 32, dtype=BF16),
                    wrapped(False, torch_checkpoint),
                )


@pytest.mark.parametrize("reentrant", [True, False])
def check_torch_checkpoint_inside(reentrant):
    """With the autocast inside, torch's checkpoint recomputes in FP8."""
    module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)

    def inside(x):
        with autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
            return module(x)

    with Seen() as seen:
        torch_checkpoint(inside, x, use_reentrant=reentrant).sum().backward()
    assert [g.layout for g in seen.gemms] == ["TN", "TN", "NN", "NT"]
    assert torch.equal(seen.gemms[0].result, seen.gemms[1].result)
    assert_gemms(seen, [module.bias] * 2)
