"""What running an operator again on the same operands shows, and the digests of its tensors."""

from __future__ import annotations

import pytest
import torch
from narrowfuzz_watch import screen
from narrowfuzz_watch.again import Again, again
from narrowfuzz_watch.operators import operator


@pytest.mark.parametrize(
    ("first", "how"),
    [([1.0, 2.0], "same"), ([float("nan"), 2.0], "clean")],
    ids=["the same bits", "ordinary numbers the second time"],
)
def test_an_operator_is_run_again(first: list[float], how: str) -> None:
    operand = torch.tensor([-1.0, 2.0])
    assert _again(operand, torch.tensor(first)) == Again(how)  # type: ignore[arg-type]


def test_another_bad_number_is_not_called_ordinary() -> None:
    operand = torch.tensor([float("-inf"), 2.0])
    assert _again(operand, torch.tensor([float("nan"), 2.0])) == Again("other")


def _again(operand: torch.Tensor, first: torch.Tensor) -> Again:
    func = torch.ops.aten.abs.default
    return again(operator(func), func, (operand,), {}, {}, [first])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_a_digest_shows_each_bit(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2, 3]).to(dtype)
    size = tensor.element_size()
    found = {screen.digest([tensor])}
    for bit in range(8 * size):
        other = tensor.clone()
        other.view(torch.uint8)[size + bit // 8] ^= 1 << bit % 8
        found.add(screen.digest([other]))
    assert len(found) == 8 * size + 1
