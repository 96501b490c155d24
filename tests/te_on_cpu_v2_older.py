"""What the checks of TransformerEngine 2.x call, by whatever name the installed release has it."""

from __future__ import annotations

import importlib
import inspect

import torch
import transformer_engine.pytorch as te
from te_on_cpu.v2_releases import installed_release

#: The modules of quantised training: until 2.8 and since then.
_QUANTIZATION = "fp8" if installed_release() < (2, 9) else "quantization"
Manager = importlib.import_module(
    f"transformer_engine.pytorch.{_QUANTIZATION}"
).FP8GlobalStateManager


def autocast(enabled=True, recipe=None, **options):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, **options)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, **options)


def quantized_model_init(enabled=True, recipe=None):
    make = getattr(te, "quantized_model_init", None) or te.fp8_model_init
    return make(enabled=enabled, recipe=recipe)


def multiply(a, b, **options):
    """The product of a GEMM; until 2.9 it is given its workspace."""
    call = te.cpp_extensions.general_gemm
    if "workspace" in inspect.signature(call).parameters:
        options["workspace"] = torch.empty(1, dtype=torch.uint8)
    return call(a, b, out_dtype=torch.bfloat16, **options)[0]
