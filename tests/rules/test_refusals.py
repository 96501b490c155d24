"""Which words of a refusal state the rule that was broken."""

from __future__ import annotations

import pytest
from narrowfuzz.rules.contract import RULE


@pytest.mark.parametrize(
    "message",
    [
        "in_features must be a multiple of 16, got 33",
        "in_features should be divisible by 32",
        "the input must not be transposed",
        "Fp8Linear takes no empty tensor: [48, 0]",
        "scaled_mm takes only bfloat16",
        "a block cannot be empty",
        "need K % 128 == 0, got K = 100",
        "17 % 16 != 0",
    ],
)
def test_a_rule_is_stated(message: str) -> None:
    assert RULE.search(message)


@pytest.mark.parametrize(
    "message",
    [
        "unsupported",
        "cannot reshape tensor of 0 elements into shape [-1, 0] because the unspecified dimension "
        "size -1 can be any value and is ambiguous",
        "amax(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
        "reduction dim with the 'dim' argument.",
        "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic",
        "aten.clone.default with axiswise scaling is not supported yet",
        "weight tensor must not be None",
        "zero_point should be None when zero_point_domain is NONE",
        "Fp8Linear.forward() takes no keyword arguments",
        "element 0 of tensors does not require grad and does not have a grad_fn",
    ],
)
def test_no_rule_is_stated(message: str) -> None:
    assert not RULE.search(message)
