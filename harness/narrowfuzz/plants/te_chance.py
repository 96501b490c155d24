"""TransformerEngine's NVFP4 with wrong stochastic rounding.

The quantizer of its Python asks for another rounding, or the extension rounds in another way while
it runs; no report of such a bug is known, so the link is the definition that is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.te_scales import FP4_QUANTIZER, RECIPE, with_attribute


def _one_too_far(kernel: Any, scaled: Any) -> Any:
    """What is rounded away from zero goes one code further."""
    codes = kernel.codes_by_chance(scaled)
    beyond = kernel.values_of(codes).abs() > scaled.abs()
    return codes + (beyond & (codes & 7 < 7)).to(codes.dtype)


def _noise_then_nearest(kernel: Any, scaled: Any) -> Any:
    """Random bits are added, and the sum is rounded to nearest instead of toward zero, so that also
    a value that has a code moves."""
    import torch

    size = scaled.abs()
    step = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5))
    generator = torch.cuda.default_generators[0]
    noise = torch.rand(scaled.shape, generator=generator) * step
    return kernel.codes_of((size + noise).copysign(scaled))


def _drawn(draw: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """``draw(randint, high, shape, generator)`` gives the random bits of all elements."""

    def codes(kernel: Any, scaled: Any) -> Any:
        import torch

        with patch.object(torch, "randint", partial(draw, torch.randint)):
            return kernel.codes_by_chance(scaled)

    return codes


def _ones(randint: Any, high: int, shape: Any, generator: Any) -> Any:
    return randint(high - 1, high, shape, generator=generator)


def _one_number(randint: Any, high: int, shape: Any, generator: Any) -> Any:
    return randint(high, (1,), generator=generator).expand(shape)


def _kernel(rounds: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """``rounds(kernel, scaled)`` stands for the extension's stochastic rounding."""

    def quantize(original: Any, quantizer: Any, tensor: Any) -> Any:
        from te_on_cpu import v2_fp4

        before = v2_fp4.codes_by_chance

        def codes(scaled: Any) -> Any:
            with patch.object(v2_fp4, "codes_by_chance", before):
                return rounds(v2_fp4, scaled)

        with patch.object(v2_fp4, "codes_by_chance", codes):
            return original(quantizer, tensor)

    return quantize


_PTX = "https://docs.nvidia.com/cuda/parallel-thread-execution/"


def _fault(id: str, title: str, link: str, change: Callable[..., Any]) -> Plant:
    plant = partial(te_calls, {FP4_QUANTIZER: change})
    return Plant(id, "rounding mode", title, link, ("te.nvfp4.stochastic",), plant)


PLANTS = [
    _fault(
        "te-fp4-forward-by-chance",
        "inputs and weights are rounded stochastically, too",
        RECIPE,
        with_attribute("stochastic_rounding", True),
    ),
    _fault(
        "te-fp4-gradient-to-nearest",
        "gradients are rounded to nearest, not stochastically",
        RECIPE,
        with_attribute("stochastic_rounding", False),
    ),
    _fault(
        "te-fp4-one-too-far",
        "what is rounded away from zero goes one code too far",
        _PTX,
        _kernel(_one_too_far),
    ),
    _fault(
        "te-fp4-noise-then-nearest",
        "random bits are added, and the sum is rounded to nearest",
        _PTX,
        _kernel(_noise_then_nearest),
    ),
    _fault(
        "te-fp4-away-from-zero",
        "all random bits are ones: gradients are rounded away from zero",
        _PTX,
        _kernel(_drawn(_ones)),
    ),
    _fault(
        "te-fp4-one-number",
        "all elements of a cast are rounded by one random number",
        _PTX,
        _kernel(_drawn(_one_number)),
    ),
]
