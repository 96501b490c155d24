"""How much of its bound an operator uses: measured of calls that are made up, and of torch's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fresh import ends
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import BF16
from narrowfuzz.operators.operator import Expected
from narrowfuzz.power import tightness
from narrowfuzz.power.tightness import Used, together, used
from narrowfuzz.trace.trace import OperatorCall


def call(got: list[float], dtype: str = "fp32") -> OperatorCall:
    x = np.array(got, np.float32)
    dtypes = {"input": dtype, "output": dtype}
    return OperatorCall("sum", "forward", 0, {}, {"output": x}, dtypes, {}, {})


def allowed(radius: float, centre: float = 1.0) -> Expected:
    at = np.array([centre])
    off = np.array([radius])
    return Expected(at, off, at - off - 2.0**-8, at + off + 2.0**-8, np.array([False]))


def test_the_share_is_of_what_is_allowed_before_the_last_rounding() -> None:
    assert used(call([1.25]), "output", allowed(0.5)).largest == pytest.approx(0.5)
    # 1.0078125 is the bf16 number next to 1: half of the step may be the rounding's
    one = used(call([1.0078125], "bf16"), "output", allowed(0.0078125))
    assert one.largest == pytest.approx(0.5) and (one.bounded, one.hidden) == (1, 0)


def test_what_the_last_rounding_hides_makes_no_bound_loose() -> None:
    """Half a unit of bf16 is 2^-8 at 1: a bound of 2^-10 cannot be seen to be used."""
    one = used(call([1.0], "bf16"), "output", allowed(2.0**-10))
    assert (one.hidden, one.bounded, one.loose) == (1, 0, False)


def test_a_result_that_is_handed_on_in_a_wider_dtype_was_rounded_to_the_narrower() -> None:
    may = Expected.within(np.array([1.0]), np.array([2.0**-20]), BF16, np.array([False]))
    assert may.rounds_to is BF16
    one = used(call([1.0]), "output", may)
    assert (one.hidden, one.bounded) == (1, 0)


def test_exact_elements_use_no_bound_and_those_outside_count_as_such() -> None:
    exact = used(call([1.0]), "output", allowed(0.0))
    assert (exact.exact, exact.bounded, exact.loose) == (1, 0, False)
    left = used(call([2.0]), "output", allowed(0.5))
    assert (left.outside, left.bounded, left.largest) == (1, 0, 0.0)


def test_calls_are_put_together_and_a_bound_that_nothing_uses_is_loose() -> None:
    near = used(call([1.001]), "output", allowed(0.5))
    half = used(call([1.25]), "output", allowed(0.5))
    assert near.loose and not half.loose
    both = together([near, half])
    assert (both.calls, both.bounded, both.largest, both.width) == (2, 2, half.largest, 0.5)
    assert not together([Used("sum", "output", "fp32", "cpu", calls=1, outside=1)]).loose


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.heavy)], ids=["few", "all"])
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of one operator and two of many, or all."""
    if not request.param:
        return
    few = ("mlp_gelu", "looped_experts", "softmax", "topk")
    monkeypatch.setattr(tightness, "MODELS", {name: MODELS[name] for name in few})


@pytest.mark.usefixtures("models")
def test_the_command_measures_torchs_own_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--operator", "sum", "--operator", "softmax"]
    assert ends("bounds", "--cases", "1", *chosen, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"softmax", "sum"} <= {row["operator"] for row in rows}
    assert all(row["calls"] and row["largest"] <= 1.0 for row in rows)
    assert ends("bounds", "--cases", "1", "--operator", "sum") == 0
    assert "bounds are never used by more than 1%" in capsys.readouterr().out


def test_an_operator_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends("bounds", "--operator", "summ") == 2
    assert "did you mean 'sum'?" in capsys.readouterr().err


@pytest.mark.usefixtures("models")
def test_more_cases_are_drawn_until_each_result_was_measured_often_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ("bounds", "--cases", "2", "--operator", "topk", "--json")
    assert ends(*chosen) == 0
    few = json.loads(capsys.readouterr().out)
    assert min(row["calls"] for row in few) < 20
    assert ends(*chosen, "--calls", "20") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= len(few) and min(row["calls"] for row in rows) >= 20
