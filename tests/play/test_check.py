"""What scripts ask of whole runs: each check has something that it sees and something that it
leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from narrowfuzz.play.check import (
    beyond,
    different,
    missing,
    not_the_sum,
    own_backward,
    recomputed_otherwise,
    statistics,
    wrong_products,
)
from narrowfuzz.play.watches import Attended, Product

ONE, TWO = torch.ones(2, 2), 2 * torch.ones(2, 2)


def attended(phase: str) -> Attended:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    future = torch.full((8, 8), -math.inf).triu(1)
    scores = q @ k.transpose(-1, -2) / 2.0 + future
    return Attended(phase, q, k, v, scores.softmax(-1) @ v, scores.logsumexp(-1), future, 0.5)


FORWARD, BACKWARD = attended("forward"), attended("backward")
NAN = torch.full_like(FORWARD.lse, math.nan)


@pytest.mark.parametrize(
    ("seen", "shows"),
    [
        ((FORWARD, BACKWARD), False),
        ((replace(FORWARD, lse=NAN), replace(BACKWARD, lse=NAN)), False),  # no number to compare
        ((FORWARD, replace(BACKWARD, lse=BACKWARD.lse + 1)), True),
        ((FORWARD, replace(BACKWARD, out=BACKWARD.out + 1)), True),
        ((FORWARD, replace(BACKWARD, v=BACKWARD.v * 2)), True),
        ((replace(FORWARD, q=NAN, lse=FORWARD.lse + 1), FORWARD, BACKWARD), False),
        ((replace(FORWARD, lse=FORWARD.lse + 1), replace(BACKWARD, lse=BACKWARD.lse + 1)), True),
    ],
)
def test_statistics_are_held_to_their_own_forward(seen: tuple[Attended, ...], shows: bool) -> None:
    told, shown = statistics(seen, 2.0**-10)
    assert shown is shows, told
    assert told.startswith("1 attention backwards")


def test_results_are_compared_by_name_and_bits() -> None:
    assert different({"x": ONE}, {"x": ONE.clone()}) == ("different: nothing", False)
    assert different({"x": ONE}, {"x": TWO, "y": ONE}) == ("different: x, y", True)
    assert different({"x": ONE}, {"x": ONE}, {"x": TWO})[1]
    assert not different({"x": ONE * math.nan}, {"x": -ONE * math.nan})[1]
    assert missing({"x": ONE}, ("x", "y")) == ("no gradient of: y", True)
    assert not missing({"x": ONE}, ("x",))[1]


def test_gradients_add_up_in_their_own_dtype() -> None:
    parts = [{"w.grad": ONE.bfloat16() / 3, "output": ONE}, {"w.grad": ONE.bfloat16() / 5}]
    total = parts[0]["w.grad"] + parts[1]["w.grad"]
    assert not not_the_sum({"w.grad": total, "output": TWO}, *parts)[1]
    assert not_the_sum({"w.grad": total * 2}, *parts)[1]
    assert not_the_sum({}, *parts)[1]


def test_an_error_is_held_to_eagers() -> None:
    exact = torch.zeros(4).double()
    assert not beyond(exact, exact + 1, exact + 9, usual=0.0, ratio=10.0, floor=0.0)[1]
    assert beyond(exact, exact + 1, exact + 11, usual=0.0, ratio=10.0, floor=0.0)[1]
    assert not beyond(exact, exact, exact + 1, usual=0.0, ratio=10.0, floor=2.0)[1]
    assert beyond(exact, exact + 1, exact * math.nan, usual=0.0, ratio=10.0, floor=0.0)[1]


def test_a_backward_belongs_to_its_forward() -> None:
    torch.manual_seed(0)
    h, weight, g = torch.randn(8, 4), torch.randn(3, 4), torch.randn(8, 3)
    results = {"output": h @ weight.t(), "w.weight.grad": g.t() @ h}
    tensors = {"w.weight": weight, "grad_output": g}
    assert not own_backward(results, tensors, "w", 2.0**-12, 1e30, 2.0**-126)[1]
    results["w.weight.grad"] = g.t() @ (h * 1.5)
    assert own_backward(results, tensors, "w", 2.0**-12, 1e30, 2.0**-126)[1]


def product(phase: str, scale: float = 1.0) -> Product:
    torch.manual_seed(1)
    a, b = torch.randn(4, 8) * scale, torch.randn(3, 8)
    return Product(phase, a, b, None, None, None, a @ b.t())


def test_a_product_that_is_computed_again_has_the_same_operands() -> None:
    first = product("forward")
    assert not recomputed_otherwise([first, product("backward")])[1]
    assert recomputed_otherwise([first, product("backward", 1.5)])[1]
    other = replace(product("backward", 1.5), b=first.b * 2)
    assert recomputed_otherwise([first, other])[0].startswith("0 products")
    scaled = replace(first, scale_a=torch.ones(1), scale_b=torch.ones(1))
    again = replace(scaled, phase="backward", scale_a=torch.ones(1) * 2)
    assert recomputed_otherwise([scaled, again])[1]


def test_a_product_is_held_to_what_any_order_of_sums_allows() -> None:
    first = product("forward")
    assert not wrong_products([first])[1]
    assert wrong_products([replace(first, result=first.result * 1.01)])[1]
    assert wrong_products([replace(first, bias=torch.ones(3))])[1]
    assert not wrong_products([replace(first, bias=torch.ones(3), result=first.result + 1)])[1]
    assert not wrong_products([])[1]
