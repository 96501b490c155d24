"""What commands print to the terminal is printed as it is."""

from __future__ import annotations

import pytest
from narrowfuzz.report.terminal import console


@pytest.mark.parametrize("markup", [True, False])
def test_the_name_of_a_model_is_no_symbol(markup: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console(markup=markup).print("mine.py:loop: 17 linears")
    assert capsys.readouterr().out == "mine.py:loop: 17 linears\n"
