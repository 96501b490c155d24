"""Records of live tensors arrive on the host as they are, and attention kernels by their names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from narrowfuzz.arms.transfer import on_host
from narrowfuzz.play.watches import AttentionWatch


@dataclass
class Record:
    name: str
    tensor: torch.Tensor
    more: Any = None


def test_every_dtype_shape_and_layout_arrives_bit_for_bit() -> None:
    tensors = [
        torch.randn(3, 5), torch.randn(4, 6).t(), torch.randn(7).bfloat16(), torch.tensor(2.5),
        torch.randn(2, 3).to(torch.float8_e4m3fn), torch.zeros(0, 4), torch.arange(5),
        torch.randn(3, 8)[:, ::2], torch.randn(3).double().requires_grad_(True),
    ]  # fmt: skip
    held = {"a": tensors[:3], "b": (Record("r", tensors[3], [tensors[4]]), *tensors[5:]), "c": 7}
    got = on_host(held)
    assert got["c"] == 7 and got["b"][0].name == "r"
    back = [*got["a"], got["b"][0].tensor, got["b"][0].more[0], *got["b"][1:]]
    for before, after in zip(tensors, back, strict=True):
        assert after.dtype == before.dtype and after.shape == before.shape
        assert not after.requires_grad and after is not before
        assert torch.equal(after.double(), before.detach().double())


def test_a_tensor_that_is_held_twice_is_copied_once() -> None:
    t = torch.randn(4)
    first, second = on_host([t, t])
    assert first is second


def test_nothing_to_copy_is_left_alone() -> None:
    held = {"a": 1, "b": [None]}
    assert on_host(held) is held


_SHAPE = (1, 2, 4, 8)
KERNELS = {
    "flash_attention_for_cpu": ((0.0, True), (0.0, True)),
    "flash_attention": ((0.0, True, False), (None, None, 4, 4, 0.0, True, None, None)),
    "efficient_attention": (
        (None, True, 0.0, True), (None, None, 0.0, [True] * 4, True),
    ),
    "cudnn_attention": ((None, True, 0.0, True, False),
                        (None, None, None, None, None, 4, 4, 0.0, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", ["rows", "column", "padded"])
def test_every_attention_kernel_is_seen(name: str, rows: str) -> None:
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward").default
    q, k, v, out, grad = (torch.randn(_SHAPE) for _ in range(5))
    lse = torch.randn(_SHAPE[:3])
    kept = {"rows": lse, "column": lse.unsqueeze(-1), "padded": torch.cat([lse, lse], -1)}[rows]
    watch, (flags, more) = AttentionWatch(), KERNELS[name]
    watch.note(forward, (q, k, v, *flags), {"scale": 0.25}, (out, kept, None))
    args = [grad, q, k, v, out, kept, *more]
    if name == "efficient_attention":  # the bias comes before what was kept
        args = [grad, q, k, v, None, out, kept, *more]
    watch.note(backward, tuple(args), {}, None)
    first, second = watch.attention
    assert (first.phase, second.phase) == ("forward", "backward")
    assert first.scale == 0.25 and second.scale == 8**-0.5
    for one in watch.attention:
        assert torch.equal(one.added, torch.full((4, 4), -math.inf).triu(1)) and not one.unknown
        for got, want in zip(
            (one.q, one.k, one.v, one.out, one.lse), (q, k, v, out, lse), strict=True
        ):
            assert torch.equal(got, want)


def test_what_masks_add_is_kept_with_what_being_causal_adds() -> None:
    watch, q = AttentionWatch(lambda: "layers.0"), torch.randn(_SHAPE)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    sees = torch.ones(1, 1, 4, 4).bool()
    sees[..., 0] = False
    number = torch.randn(1, 2, 4, 4).bfloat16()
    for mask, causal in ((sees, False), (number, False), (number, True), (None, False)):
        watch.note(kernel, (q, q, q, mask, True, 0.1, causal), {}, (q, torch.randn(_SHAPE[:3])))
    added = [one.added for one in watch.attention]
    future = torch.full((4, 4), -math.inf).triu(1)
    assert torch.equal(added[0], torch.zeros(1, 1, 4, 4).masked_fill(~sees, -math.inf))
    assert torch.equal(added[1], number.float()) and torch.equal(added[2], number.float() + future)
    assert added[3] is None and {one.module for one in watch.attention} == {"layers.0"}


def test_an_argument_that_nobody_here_knows_is_named() -> None:
    watch, q = AttentionWatch(), torch.randn(_SHAPE)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    watch.note(kernel, (q, q, q), {"window": 4}, (q, torch.randn(_SHAPE[:3])))
    assert watch.attention[0].unknown == "window"


def test_a_forward_that_keeps_nothing_for_a_backward_is_not_seen() -> None:
    watch, q = AttentionWatch(), torch.randn(_SHAPE)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    for kept in (torch.zeros(1, 2, 0), None):
        watch.note(kernel, (q, q, q, None, False), {}, (q, kept))
    assert not watch.attention
