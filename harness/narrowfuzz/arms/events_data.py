"""The tensors of a schedule: inputs, output gradients and parameters, each a function of the seed,
its own name and its position."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import nn

from narrowfuzz.case import Case, DataSpec
from narrowfuzz.data import gaussian, hash_bits
from narrowfuzz.numerics.formats import F64
from narrowfuzz.schedule.events import Backward, Forward, Stimulus

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: How far a spike stands out.
SPIKE = 2.0**12


def model_input(case: Case, number: int, event: Forward) -> torch.Tensor:
    """Input of forward ``number``, [M, K]."""
    values = _tensor(f"x{number}", (case.spec.m, case.spec.k), event.values, event.shift, case.data)
    return torch.from_numpy(values).to(_DTYPES[case.spec.dtype])


def gradient(
    case: Case, backward: int, forward: int, event: Backward, y: torch.Tensor
) -> torch.Tensor:
    """What the ``backward``-th backward sends into the output of a forward."""
    values = _tensor(f"g{backward}/{forward}", tuple(y.shape), event.values, event.shift, case.data)
    return torch.from_numpy(values).to(y.dtype)


def fill(model: nn.Module, data: DataSpec) -> None:
    """Set every parameter: weights scaled by about 1 / sqrt(fan-in), norms near 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = _tensor(name, shape, "gaussian", 0, data)
            if len(shape) > 1:
                values = np.ldexp(values, -(shape[-1].bit_length() // 2))
            elif name.endswith("bias"):
                values = 0.25 * values
            else:
                values = 1.0 + 0.125 * values
            parameter.copy_(torch.from_numpy(values).to(_plain(parameter)))


def _plain(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype


def _tensor(name: str, shape: tuple[int, ...], kind: Stimulus, shift: int, data: DataSpec) -> F64:
    cols = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    h = hash_bits(data.seed, name, rows, cols)
    x = gaussian(h).reshape(shape)
    if kind == "zero":
        return np.zeros_like(x)
    if kind in ("spike", "inf") and x.size:
        where = zlib.crc32(f"{name}/{data.seed}".encode()) % x.size
        x.flat[where] = np.inf if kind == "inf" else SPIKE * (1.0 + abs(x.flat[where]))
    return np.ldexp(x, shift) if shift else x
