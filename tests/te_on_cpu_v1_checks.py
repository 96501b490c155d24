"""Checks for a pytest process of its own, with TransformerEngine 1.x on the path.

Every check trains real TransformerEngine layers on the emulated extension.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from te_on_cpu.install import install

VERSION = install()
SINCE = tuple(int(part) for part in VERSION.split(".")[:2])

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from te_on_cpu.kernels import LARGEST, NAN_CODE  # noqa: E402
from te_on_cpu.refusal import UnsupportedByEmulation  # noqa: E402
from te_on_cpu.watch import Cast, Multiply, Operand, Seen, Update, listening  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.checkpoint import checkpoint as torch_checkpoint  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: E402
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # noqa: E402

BF16 = torch.bfloat16
FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def recipe(**options: Any) -> DelayedScaling:
    return DelayedScaling(**{"fp8_format": Format.HYBRID, "amax_history_len": 4, **options})


# ---- everything that passes is checked against ml_dtypes and float64


def judge_cast(cast: Cast) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = cast.input.detach().float().numpy() * np.float32(cast.scale.item())
    largest = np.float32(LARGEST[cast.format])
    codes = np.clip(scaled, -largest, largest).astype(FORMATS[cast.format]).view(np.uint8)
    np.testing.assert_array_equal(
        cast.codes.numpy(), np.where(np.isnan(scaled), np.uint8(NAN_CODE), codes)
    )
    if cast.amax is not None:
        assert cast.amax.item() >= cast.input.detach().float().abs().max().item()


def exact(operand: Operand) -> np.ndarray:
    if operand.scale_inv is None:
        return operand.data.detach().double().numpy()
    values = operand.data.numpy().view(FORMATS[operand.format]).astype(np.float64)
    return values * float(operand.scale_inv)


def judge_multiply(product: Multiply) -> None:
    a, b = exact(product.a), exact(product.b)
    a = a.T if product.layout == "TN" else a
    b = b.T if product.layout == "NT" else b
    steps = (a.shape[0] + 3) * 2.0**-24
    radius = steps / (1 - steps) * (abs(b) @ abs(a))
    unit = ROUNDING[product.result.dtype]
    error = abs(product.result.detach().double().numpy() - b @ a)
    # One rounding of what was summed, and half the smallest number of the dtype.
    assert (error <= radius + unit * (abs(b @ a) + radius) + 2.0**-25).all()


@contextmanager
def judged() -> Iterator[list[Seen]]:
    """Judge what passes, with no bias but zeros; the list says what did."""
    seen: list[Seen] = []

    def listen(event: Seen) -> None:
        seen.append(event)
        if isinstance(event, Cast):
            judge_cast(event)
        elif isinstance(event, Multiply):
            judge_multiply(event)

    with listening(listen):
        yield seen


# ---- training


def run(function: Callable[..., Tensor], x: Tensor, mode: str, **options: Any) -> Tensor:
    """Call as it is, or checkpointed by TransformerEngine or torch, reentrant or not."""
    if mode == "plain":
        return function(x, **options)
    if mode.startswith("te"):
        return te.checkpoint(function, x, use_reentrant=mode == "te_reentrant", **options)
    return torch_checkpoint(function, x, use_reentrant=mode == "torch_reentrant", **options)


def state(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Scales, inverses and histories of both directions, copied."""
    return {
        f"{key}.{name}": getattr(layer.fp8_meta[key], name).clone()
        for key in ("scaling_fwd", "scaling_bwd")
        for name in ("scale", "scale_inv", "amax_history")
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=0, msg=f"{name} differs")


def make(kind: type[torch.nn.Module], *, primary: bool = False, **options: Any) -> torch.nn.Module:
    """A seeded layer 64 -> 32 in a fresh FP8 state; ``primary``: fp8_model_init."""
    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=primary):
        return kind(64, 32, **{"params_dtype": BF16, **options})


def train(
    layer: torch.nn.Module,
    steps: int = 3,
    mode: str = "plain",
    scaling: DelayedScaling | None = None,
    input_grad: bool = True,
    first: int = 0,
    dtype: torch.dtype = BF16,
    inside: bool = False,
) -> list[Tensor]:
    """Outputs and gradients, step by step. ``inside``: autocast within what is checkpointed."""
    scaling = scaling or recipe()
    seen: list[Tensor] = []

    def within(x: Tensor) -> Tensor:
        with te.fp8_autocast(fp8_recipe=scaling):
            return layer(x)

    for step in range(first, first + steps):
        torch.manual_seed(step)
        x = torch.randn(32, 64, dtype=dtype, requires_grad=input_grad)
        with nullcontext() if inside else te.fp8_autocast(fp8_recipe=scaling):
            y = run(within if inside else layer, x, mode)
        if y.requires_grad:
            (y.float().square().sum() * (step + 1)).backward()
        gradients = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
        seen += [y.detach(), *(g.clone() for g in gradients)]
        layer.zero_grad()
    return seen


def check_backward_scales_over_three_iterations() -> None:
    right = [57344.0, 28672.0, 19114.67]
    for kind in (te.Linear, te.LayerNormLinear):
        for mode in ("plain", "te_reentrant", "te"):
            layer, scales = make(kind), []
            for gradient in (1.0, 2.0, 3.0):
                x = torch.ones(32, 64, dtype=BF16, requires_grad=True)
                with te.fp8_autocast(fp8_recipe=recipe()):
                    y = run(layer, x, mode)
                y.backward(torch.full_like(y, gradient))
                scales.append(round(layer.fp8_meta["scaling_bwd"].scale[0].item(), 2))
            # Fixed in 1.12: the recompute took the flag that makes backward update its scales.
            lost = mode == "te_reentrant" and SINCE < (1, 12)
            assert scales == ([1.0] * 3 if lost else right), (kind, mode, scales)


def check_every_combination_trains_and_is_judged() -> None:
    for kind in (te.Linear, te.LayerNormLinear):
        norms = [{"normalization": "RMSNorm"}, {"zero_centered_gamma": True}]
        options = [{}, {"bias": False}, {"params_dtype": torch.float32}, {"primary": True}]
        for option in options + (norms if kind is te.LayerNormLinear else []):
            for mode in ("plain", "te_reentrant", "te"):
                layer = make(kind, **option)
                with judged() as seen:
                    train(layer, 1, mode, dtype=option.get("params_dtype", BF16))
                kinds = [type(event).__name__ for event in seen]
                # Whatever is recomputed, every GEMM but the output's runs once, every update too,
                # except the backward one that versions before 1.12 lose.
                lost = mode == "te_reentrant" and SINCE < (1, 12)
                assert kinds.count("Multiply") == (3 if mode == "plain" else 4), kinds
                assert kinds.count("Update") == (1 if lost else 2), kinds


def check_one_step_is_told_in_order() -> None:
    layer = make(te.Linear)
    with judged() as seen:
        train(layer, 1)
    casts = [event for event in seen if isinstance(event, Cast)]
    assert [c.format for c in casts] == ["e4m3", "e4m3", "e5m2"]
    meta = layer.fp8_meta
    slots = [meta["scaling_fwd"].amax_history[0, 1], meta["scaling_fwd"].amax_history[0, 0]]
    slots.append(meta["scaling_bwd"].amax_history[0, 0])
    told = [c.amax.data_ptr() for c in casts if c.amax is not None]
    assert told == [slot.data_ptr() for slot in slots]
    products = [event for event in seen if isinstance(event, Multiply)]
    assert [p.layout for p in products] == ["TN"] * 3  # FP8 has no other layout in 1.x
    assert [(p.a.format, p.b.format) for p in products] == [
        ("e4m3", "e4m3"),
        ("e4m3", "e5m2"),
        ("e4m3", "e5m2"),
    ]
    updates = [event for event in seen if isinstance(event, Update)]
    assert [u.scales[0].numel() for u in updates] == [3, 2]


def check_bias_and_its_gradient() -> None:
    layer, without = make(te.Linear), make(te.Linear)
    with torch.no_grad():
        layer.bias.copy_(torch.randn(32))
    x = torch.randn(32, 64, dtype=BF16)
    with te.fp8_autocast(fp8_recipe=recipe()):
        got, product = layer(x), without(x)
    error = (got.float() - (product.float() + layer.bias.float())).abs()
    assert (error <= 2.0**-8 * (product.float().abs() + got.float().abs())).all()
    gradient = torch.randn(32, 32, dtype=BF16)
    got.backward(gradient)
    torch.testing.assert_close(layer.bias.grad, gradient.float().sum(0).to(BF16))


def check_checkpointed_equals_plain() -> None:
    for kind in (te.Linear, te.LayerNormLinear):
        plain = make(kind)
        expected = train(plain)
        modes = ["te"] if SINCE < (1, 12) else ["te", "te_reentrant"]
        for mode in modes:
            layer = make(kind)
            for got, want in zip(train(layer, mode=mode), expected, strict=True):
                assert torch.equal(got, want), (kind, mode)
            same(state(layer), state(plain))


def check_torch_checkpoint_with_the_autocast_inside_runs() -> None:
    for mode in ("torch_reentrant", "torch"):
        outputs = train(make(te.Linear), 2, mode, inside=True)
        assert all(t.isfinite().all() for t in outputs)


def check_fused_and_unfused_updates_agree() -> None:
    fused = make(te.Linear)
    train(fused)
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
    try:
        unfused = make(te.Linear)
        with judged() as seen:
            train(unfused)
    finally:
        del os.environ["NVTE_UNFUSED_FP8_UPDATE"]
    assert not any(isinstance(event, Update) for event in seen)
    called = make(te.Linear)
    train(called, scaling=recipe(amax_compute_algo=lambda history: history.amax(0)))
    for layer in (unfused, called):
        # Only the output slots differ: the kernel leaves what never ran, Python divides by 0.
        for key, used in (("scaling_fwd", [0, 1]), ("scaling_bwd", [0])):
            for name in ("scale", "scale_inv"):
                got, want = (getattr(m.fp8_meta[key], name)[used] for m in (layer, fused))
                assert torch.equal(got, want), (key, name)


def check_frozen_weights_and_inputs_without_gradient() -> None:
    for kind in (te.Linear, te.LayerNormLinear):
        layer = make(kind)
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        train(layer)
        assert layer.weight.grad is None and layer.fp8_meta["scaling_bwd"].scale[0] != 1
        idle = make(kind)
        for parameter in idle.parameters():
            parameter.requires_grad_(False)
        train(idle, input_grad=False)
        assert layer.fp8_meta["scaling_fwd"].scale[0] != 1
        assert idle.fp8_meta["scaling_bwd"].scale[0] == 1
        train(make(kind), input_grad=False)


def check_cached_weight() -> None:
    layer = make(te.Linear)
    x = torch.randn(32, 64, dtype=BF16)
    with te.fp8_autocast(fp8_recipe=recipe()):
        with judged() as first:
            before = layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.mul_(2)
        with judged() as second:
            cached = layer(x, is_first_microbatch=False)
        fresh = layer(x, is_first_microbatch=True)
    assert [len([e for e in seen if isinstance(e, Cast)]) for seen in (first, second)] == [2, 1]
    assert torch.equal(before, cached) and not torch.equal(before, fresh)


def check_saved_and_loaded_training_continues() -> None:
    for primary in (False, True):
        layer = make(te.Linear, primary=primary)
        train(layer, 2)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        expected = train(layer, 2, first=2)
        file.seek(0)
        loaded = make(te.Linear, primary=primary)
        loaded.load_state_dict(torch.load(file, weights_only=False))
        got = train(loaded, 2, first=2)
        same(state(loaded), state(layer))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def check_inference_and_high_precision() -> None:
    for kind in (te.Linear, te.LayerNormLinear):
        layer = make(kind)
        x = torch.randn(32, 64, dtype=BF16)
        with torch.no_grad():
            high = layer(x)
            with te.fp8_autocast(fp8_recipe=recipe()):
                low = layer(x)
        assert 0 < (high - low).float().norm() < 0.1 * high.float().norm()
    layer = make(te.Linear)
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    layer(x).float().square().sum().backward()
    plain = torch.nn.functional.linear(x.detach(), layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain)
    torch.testing.assert_close(layer.bias.grad, (2 * plain.float()).sum(0).to(BF16))


def check_calibration_then_fp8() -> None:
    layer = make(te.Linear)
    x = torch.full((32, 64), 3.0, dtype=BF16)
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe()):
        layer(x)
    assert layer.fp8_meta["scaling_fwd"].amax_history[0, 0] == 3
    train(layer, 1)


def check_a_scale_holds_at_the_time_of_the_cast() -> None:
    layer = make(te.Linear)
    with judged() as seen:
        train(layer, 2)
    scales = [e.scale.item() for e in seen if isinstance(e, Cast) and e.format == "e5m2"]
    assert scales[0] == 1 and scales[1] == state(make_one_step())["scaling_bwd.scale"][0]


def make_one_step() -> torch.nn.Module:
    layer = make(te.Linear)
    train(layer, 1)
    return layer


def check_an_inverse_is_written_by_the_cast_since_1_11() -> None:
    from transformer_engine_torch import DType, cast_to_fp8

    inverse = torch.zeros(2)
    scale = torch.tensor([1.0, 4.0])
    cast_to_fp8(torch.ones(1), scale[1:], torch.zeros(1), inverse[1:], DType.kFloat8E4M3)
    assert inverse.tolist() == ([0.0, 0.25] if SINCE >= (1, 11) else [0.0, 0.0])


def check_an_empty_batch_clears_the_bias_before_1_12() -> None:
    layer = make(te.Linear)
    with torch.no_grad():
        layer.bias.fill_(1)
        layer(torch.empty(0, 64, dtype=BF16))
    assert layer.bias.unique().tolist() == ([1.0] if SINCE >= (1, 12) else [0.0])


def check_what_is_not_carried_is_refused_by_name() -> None:
    x = torch.randn(32, 64, dtype=BF16)
    heads = torch.randn(8, 2, 4, 16, dtype=BF16)
    grouped = te.GroupedLinear(2, 64, 32, params_dtype=BF16)
    mlp = te.LayerNormMLP(64, 64, params_dtype=BF16)
    adam = te.optimizers.FusedAdam([torch.nn.Parameter(x)])
    adam.param_groups[0]["params"][0].grad = x
    # since 1.10 a grouped layer casts in one call, before only its products are one
    cast = "fused_multi_cast_transpose_alloc" if SINCE >= (1, 10) else "te_grouped_gemm_ts"
    for name, call in {
        cast: lambda: grouped(x, [16, 16]),
        "gelu_ts": lambda: mlp(x),
        "get_fused_attn_backend": lambda: te.DotProductAttention(4, 16)(heads, heads, heads),
        "multi_tensor_adam": adam.step,
    }.items():
        with te.fp8_autocast(), pytest.raises(UnsupportedByEmulation, match=name):
            call()
