"""What is read of TransformerEngine's own extension, checked on the emulated one: the tensors that
come back tell the same as the kernels themselves."""

from __future__ import annotations

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from te_on_cpu.v2_native import _scale_of, listening_to_extension
from te_on_cpu.watch import Cast, Multiply, Update, listening
from te_on_cpu_v2_checks import BF16, RECIPES, linear, step
from te_on_cpu_v2_older import Manager, autocast
from te_on_cpu_v2_reference import copied
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer


def told(listening_how, train):
    Manager.reset()
    torch.manual_seed(4)
    events = []
    with listening_how(lambda seen: events.append(copied(seen))):
        train()
    return events


def of_linear(recipe):
    module = linear()
    for first in (True, False):
        x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
        step(module, recipe(), x, torch.randn(32, 32, dtype=BF16), is_first_microbatch=first)


def of_groups(recipe):
    module = te.GroupedLinear(3, 64, 32, params_dtype=BF16)
    x = torch.randn(96, 64, dtype=BF16, requires_grad=True)
    with autocast(enabled=True, recipe=recipe()):
        y = module(x, [32, 0, 64])
    y.backward(torch.randn(96, 32, dtype=BF16))


def of_recompute(recipe):
    module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with autocast(enabled=True, recipe=recipe()):
        y = te.checkpoint(module, x, use_reentrant=True)
    y.backward(torch.randn(32, 32, dtype=BF16))


def same(one, other):
    return one is other is None or torch.equal(one, other)


def alike(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, Update):
        return all(map(same, one.histories + one.scales, other.histories + other.scales))
    if isinstance(one, Cast):
        scales = same(one.input, other.input) and same(one.codes, other.codes)
        return scales and same(one.scale, other.scale) and one.format == other.format
    sides = ((one.a, other.a), (one.b, other.b))
    return one.layout == other.layout and all(
        a.format == b.format and same(a.scale_inv, b.scale_inv) and same(a.data, b.data)
        for a, b in sides
    )


@pytest.mark.parametrize("recipe", ["delayed", "delayed_e4m3", "current"])
@pytest.mark.parametrize("train", [of_linear, of_groups, of_recompute])
def check_extension_tells_what_kernels_tell(recipe, train):
    kernels = told(listening, lambda: train(RECIPES[recipe]))
    outside = told(listening_to_extension, lambda: train(RECIPES[recipe]))
    assert len(kernels) == len(outside) > 5
    assert any(isinstance(one, Multiply) for one in kernels)
    for one, other in zip(kernels, outside, strict=True):
        assert alike(one, other), (one, other)
    if recipe != "current":
        slots = [cast.amax is not None for cast in outside if isinstance(cast, Cast)]
        assert all(slots)


def check_mx_tells_formats():
    seen = told(listening_to_extension, lambda: of_linear(RECIPES["mx"]))
    assert {(g.a.format, g.a.scale_inv) for g in seen} == {("e4m3", None)}


def check_a_scale_that_is_not_the_inverse_is_told_as_it_is():
    quantizer, x = (
        Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu")),
        torch.ones(32, 64),
    )
    right, wrong = torch.tensor([1 / 448]), torch.tensor([1 / 256])
    assert _scale_of(right, quantizer, x).item() == 448.0
    assert _scale_of(wrong, quantizer, x).item() == 256.0
