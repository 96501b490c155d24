"""What explains a divergence: of a compiled recompute, and of exchanged gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.causes import root_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict

#: A compiled run with a selective checkpoint differs from eager.
COMPILED = Verdict("O8", "aot_eager+checkpoint_selective", "grad_input", "diverged")
RECOMPUTED = Verdict("O13", "eager+checkpoint_selective", "output", "diverged", at=At(layer="up"))


def test_the_same_recompute_in_eager_explains_it() -> None:
    assert root_of(COMPILED, [RECOMPUTED], BY_NAME) == RECOMPUTED
    by_ratio = replace(COMPILED, rule="O9", arm="inductor+checkpoint_selective")
    assert root_of(by_ratio, [RECOMPUTED], BY_NAME) == RECOMPUTED


@pytest.mark.parametrize(
    ("compiled", "root"),
    [
        (COMPILED, replace(RECOMPUTED, arm="eager+checkpoint")),  # another kind of checkpoint
        (COMPILED, replace(RECOMPUTED, status="known")),  # which may hide something else
        (replace(COMPILED, arm="aot_eager"), RECOMPUTED),  # nothing is recomputed there
        (replace(COMPILED, arm="aot_eager", role="output"), RECOMPUTED),
        (replace(COMPILED, arm="aot_eager", role="output"), replace(RECOMPUTED, status="known")),
        (COMPILED, replace(RECOMPUTED, rule="O5")),  # a product may be wrong in eager alone
        (COMPILED, replace(RECOMPUTED, arm="sharded+checkpoint_selective")),
    ],
)
def test_another_one_does_not(compiled: Verdict, root: Verdict) -> None:
    assert root_of(compiled, [root], BY_NAME) is None


@pytest.mark.parametrize(
    ("rule", "role", "of", "explained"),
    [
        ("R11", "grad_weight", "grad_input", True),
        ("R11", "grad_input", "grad_weight", True),
        ("R11", "output", "grad_input", False),
        ("R11", "grad_weight", "output", False),
        ("R9", "grad_weight", "grad_input", False),
    ],
)
def test_where_input_and_weight_are_exchanged_so_are_their_gradients(
    rule: str, role: str, of: str, explained: bool
) -> None:
    root = Verdict("O15", "eager", of, "diverged")
    found = root_of(Verdict(rule, "eager", role, "diverged"), [root], BY_NAME)
    assert (found == root) is explained
