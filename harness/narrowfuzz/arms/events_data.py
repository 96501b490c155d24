"""The tensors for a training of a library's layers: inputs, output gradients and parameters. Each
element is a function of the seed, the tensor's name and the element's position."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from narrowfuzz.case.data import gaussian, hash_bits
from narrowfuzz.case.events import Backward, Event, Forward, numbered
from narrowfuzz.case.spec import Case
from narrowfuzz.numerics.formats import F64
from narrowfuzz.play.dtypes import DTYPES

#: Magnitude of a spike; the other values are about normal.
SPIKE = 2.0**12


def stimuli(case: Case) -> dict[str, torch.Tensor]:
    """Inputs input@<forward> and output gradients grad_output@<backward>/<forward> of a training of
    a library's layers, each [M, K]."""
    spec = case.spec
    return {
        name: stimulus(
            drawn,
            values=event.values,
            shift=event.shift,
            seed=case.data.seed,
            shape=(spec.m, spec.k),
            dtype=DTYPES[spec.dtype],
        )
        for number, event in numbered(spec.training)
        if isinstance(event, Forward | Backward)
        for name, drawn in names_of(event, number)
    }


def of_rank(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's tensors: those of rank 0, each multiplied by a power of two (2^-3 to 2^3) that
    depends on its name and the rank, so that different ranks have the largest values."""
    ends = {name: zlib.crc32(f"{name}/{rank}".encode()) % 7 if rank else 3 for name in tensors}
    return {name: t * 2.0 ** (ends[name] - 3) for name, t in tensors.items()}


def names_of(event: Event, number: int) -> list[tuple[str, str]]:
    """For each tensor that a forward or backward takes: its name, and the name that is hashed to
    draw its values."""
    if isinstance(event, Backward):
        return [(f"grad_output@{number}/{f}", f"g{number}/{f}") for f in event.of]
    return [(f"input@{number}", f"x{number}")]


def stimulus(
    name: str, *, values: str, shift: int, seed: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Normal values, or zeros, times 2^shift; for ``values`` "spike" or "inf", one element is a
    spike or an infinity."""
    x = normal(name, shape, seed=seed)
    if values == "zero":
        x = np.zeros_like(x)
    if values in ("spike", "inf") and x.size:
        i = zlib.crc32(f"{name}/{seed}".encode()) % x.size
        x.flat[i] = np.inf if values == "inf" else SPIKE * (1.0 + abs(x.flat[i]))
    return torch.from_numpy(np.ldexp(x, shift)).to(dtype)


def filled(layers: Any, *, seed: int) -> Any:
    """The same layers with all parameters set."""
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(value(name, parameter, seed=seed))
    return layers


def value(name: str, parameter: torch.Tensor, *, seed: int) -> torch.Tensor:
    """A parameter's value: weights scaled by about 1 / sqrt(fan-in), biases small, norms near 1."""
    x = normal(name, tuple(parameter.shape), seed=seed)
    if x.ndim > 1:
        x = np.ldexp(x, -(x.shape[-1].bit_length() // 2))
    else:
        x = x / 4 if name.endswith("bias") else 1 + x / 8
    return torch.from_numpy(x).to(parameter.dtype)


def normal(name: str, shape: tuple[int, ...], *, seed: int) -> F64:
    """Approximately normal values, hashed from the seed, the tensor's name and the position."""
    return gaussian(hash_bits(seed, name, math.prod(shape[:-1]), shape[-1])).reshape(shape)
