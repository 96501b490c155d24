"""Broken contracts: late refusals without a reason, ignored parameters, dying processes."""

from __future__ import annotations

import os
from typing import Any

import torch

from narrowfuzz.plants.patching import float8_forward, float8_mm
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)


def _unsupported(a: Any, b: Any, result: Any, role: str) -> Any:
    assert role == "output", "unsupported"
    return result


def _forgets_bias(forward: Any, layer: Any, input: Any) -> Any:
    bias, layer.bias = layer.bias, None
    try:
        return forward(layer, input)
    finally:
        layer.bias = bias


def _aborts(a: Any, b: Any, result: Any, role: str) -> Any:
    """Abort the process, as a kernel that writes out of bounds does."""
    if role == "grad_weight" and result.shape[0] >= 64:
        os.abort()
    return result


def _loses_the_device(a: Any, b: Any, result: Any, role: str) -> Any:
    """Raise the error of a GPU kernel after which the CUDA context is unusable."""
    if role == "grad_weight" and result.shape[0] >= 64:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    return result


PLANTS = [
    Plant(
        "backward-unsupported",
        "contract",
        "backward dies with a bare 'unsupported'",
        "https://github.com/pytorch/torchtitan/issues/1200",
        _FLOAT8,
        lambda: float8_mm(_unsupported),
    ),
    Plant(
        "bias-forgotten",
        "contract",
        "the bias never takes part",
        "https://github.com/pytorch/ao/pull/1306",
        _FLOAT8,
        lambda: float8_forward(_forgets_bias),
    ),
    Plant(
        "kernel-aborts",
        "crash",
        "the process is aborted for 64 and more output features",
        "https://github.com/pytorch/pytorch/issues/133334",
        _FLOAT8,
        lambda: float8_mm(_aborts),
    ),
    Plant(
        "device-lost",
        "crash",
        "the device is lost for 64 and more output features",
        "https://github.com/pytorch/pytorch/issues/133334",
        _FLOAT8,
        lambda: float8_mm(_loses_the_device),
    ),
]
