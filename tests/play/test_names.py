"""Names of results are taken apart in one place, as they are made."""

from __future__ import annotations

import pytest
import torch
from narrowfuzz.play.names import Name, name_of
from narrowfuzz.play.player import Kept, in_order


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("output", ("", "output", "")),
        ("output@0", ("", "output", "0")),
        ("grad_output@2/1", ("", "grad_output", "2/1")),
        ("w1.weight.grad@7", ("", "w1.weight.grad", "7")),
        ("resumed:w1.weight", ("resumed", "w1.weight", "")),
        ("afresh:output@3", ("afresh", "output", "3")),
        ("at::native::sum", ("", "at::native::sum", "")),
        ("", ("", "", "")),
    ],
)
def test_a_name_has_three_parts(text: str, parts: tuple[str, str, str]) -> None:
    assert name_of(text) == Name(*parts)


def test_what_it_is_of_follows() -> None:
    gradient = name_of("resumed:layers.0.w1.weight.grad@2")
    assert gradient.gradient_of == "layers.0.w1.weight" and gradient.module == "layers.0.w1"
    assert not gradient.by_rows
    parameter = name_of("layers.0.w1.weight")
    assert parameter.module == "layers.0.w1" and not parameter.gradient_of
    assert name_of("grad_input@1").by_rows and not name_of("grad_input@1").module


def test_names_that_the_player_makes_are_read_again() -> None:
    kept = [Kept("output", i, i, torch.tensor(float(i))) for i in range(3)]
    names = list(in_order(kept))
    assert names == ["output@0", "output@1", "output"]
    assert [name_of(name).number for name in names] == ["0", "1", ""]
