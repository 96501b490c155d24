"""Checks of TransformerEngine 2.x on the emulated extension, for pytest in a process of its own."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from emulated_te_v2_reference import Seen, close, reference
from transformer_engine.common import recipe as recipes


def delayed(**options):
    return recipes.DelayedScaling(
        **{"fp8_format": recipes.Format.HYBRID, "amax_history_len": 4, **options}
    )


RECIPES = {
    "delayed": delayed,
    "current": recipes.Float8CurrentScaling,
    "mx": recipes.MXFP8BlockScaling,
}


def linear(**options):
    torch.manual_seed(1)
    module = te.Linear(64, 32, **{"params_dtype": torch.bfloat16, **options})
    with torch.no_grad():
        module.weight.copy_(torch.randn(32, 64) * 0.1)
    return module


def step(module, recipe, x, gradient, wrap=None):
    with te.autocast(enabled=True, recipe=recipe):
        y = module(x) if wrap is None else wrap(module, x)
    y.backward(gradient)
    return y


def check_linear_against_float64():
    for name, recipe in RECIPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            for bias in (True, False):
                module = linear(params_dtype=dtype, bias=bias)
                x = torch.randn(2, 32, 64, dtype=dtype, requires_grad=True)
                with Seen() as seen:
                    step(module, recipe(), x, torch.randn(2, 32, 32, dtype=dtype))
                assert [gemm.layout for gemm in seen.gemms] == ["TN", "NN", "NT"], name
                for gemm in seen.gemms:
                    offset = module.bias if bias and gemm.layout == "TN" else None
                    close(gemm.result, reference(gemm, offset), gemm)
                close(x.grad.view(64, 64), seen.gemms[1].result.view(64, 64).double())
                close(module.weight.grad, seen.gemms[2].result.double())


def check_delayed_scales_with_and_without_checkpoint():
    def checkpoint(reentrant):
        return lambda module, x: te.checkpoint(module, x, use_reentrant=reentrant)

    for wrap in (None, checkpoint(True), checkpoint(False)):
        module, scales = te.Linear(64, 64, params_dtype=torch.bfloat16), []
        for i in range(3):
            x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
            step(module, delayed(), x, torch.full((32, 64), i + 1.0, dtype=torch.bfloat16), wrap)
            scales.append(module.fp8_meta["scaling_bwd"].scale[0].item())
        torch.testing.assert_close(scales, [57344.0, 28672.0, 57344.0 / 3])
