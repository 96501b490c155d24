"""The tensors of a training of a library's layers: inputs, output gradients and parameters, each a
function of the seed, its own name and its position."""

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

#: How far a spike stands out.
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
    """A rank's own: those of the first, each times a power of two of its own, so that now one rank
    has the largest values and now another."""
    ends = {name: zlib.crc32(f"{name}/{rank}".encode()) % 7 if rank else 3 for name in tensors}
    return {name: t * 2.0 ** (ends[name] - 3) for name, t in tensors.items()}


def names_of(event: Event, number: int) -> list[tuple[str, str]]:
    """Of each tensor that a forward or backward takes its name, and the one that it is drawn by."""
    if isinstance(event, Backward):
        return [(f"grad_output@{number}/{f}", f"g{number}/{f}") for f in event.of]
    return [(f"input@{number}", f"x{number}")]


def stimulus(
    name: str, *, values: str, shift: int, seed: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Normal values, or zeros, times 2^shift; with a spike or an infinity somewhere."""
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
    """A parameter's: weights scaled by about 1 / sqrt(fan-in), norms near 1."""
    x = normal(name, tuple(parameter.shape), seed=seed)
    if x.ndim > 1:
        x = np.ldexp(x, -(x.shape[-1].bit_length() // 2))
    else:
        x = x / 4 if name.endswith("bias") else 1 + x / 8
    return torch.from_numpy(x).to(parameter.dtype)


def normal(name: str, shape: tuple[int, ...], *, seed: int) -> F64:
    """About normal values: a hash of the seed, the tensor's name and the position."""
    return gaussian(hash_bits(seed, name, math.prod(shape[:-1]), shape[-1])).reshape(shape)
