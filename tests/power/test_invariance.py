"""Whether a row alone has the bits that it has in a batch: what is invariant by definition, what is
not, and an operator that is made to hang on something."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fresh import ends
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.power import invariance
from narrowfuzz.power.invariance import BATCH, Measured, measure, measured
from samples import every_recipe

ABOUT = Measured("made", "here", "fp32", (8,))


def of(call: Callable[[torch.Tensor], torch.Tensor]) -> Measured:
    return measure(ABOUT, lambda dtype, device: call, EAGER, "cpu")


def test_what_looks_at_each_element_alone_is_invariant() -> None:
    found = of(lambda x: x * 2.0)
    assert found.alone and (found.equal_from, found.differs) == (1, 0.0)
    assert not (found.layout or found.threads or found.problem)


def test_what_hangs_on_the_other_rows_is_seen() -> None:
    found = of(lambda x: x / x.abs().max())
    assert found.others and not found.alone


def test_from_how_many_rows_on_and_by_how_much() -> None:
    found = of(lambda x: x * (1.5 if len(x) < 4 else 1.0))
    assert (found.equal_from, found.others, found.alone) == (4, False, False)
    assert 0.1 < found.differs <= 0.5
    assert of(lambda x: x * (1.0 if len(x) == BATCH else 1.5)).equal_from == 0


def test_what_hangs_on_the_layout_or_on_threads_is_seen() -> None:
    assert of(lambda x: x + (0.0 if x.is_contiguous() else 1.0)).layout
    assert of(lambda x: x + (torch.get_num_threads() - 1.0)).threads
    assert torch.get_num_threads() == 1, "put back"


def test_what_raises_is_said() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("rows must be 64\nand more")

    assert of(refuses).problem == "rows must be 64"


@pytest.mark.parametrize(("recipe", "others"), [("tensorwise", True), ("rowwise", False)])
def test_one_scale_for_the_batch_makes_a_row_hang_on_the_others(
    recipe: str, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariance, "_LINEAR", ((64, 32),))  # its own shapes take ten seconds
    chosen = every_recipe()[f"torchao.float8.{recipe}"]
    rows = [*measured((chosen,), ("linear",), EAGER, "cpu")]
    assert rows and all(row.problem or row.others is others for row in rows)
    assert not all(row.problem for row in rows)


def test_an_arm_that_is_no_way_to_run_an_operator_is_refused() -> None:
    for name in ("eager+checkpoint", "sharded"):
        with pytest.raises(ValueError, match="neither recomputed nor sharded"):
            next(measured((), (), BY_NAME[name], "cpu"))
    with pytest.raises(ValueError, match="unknown operator 'softmix': did you mean 'softmax'"):
        next(measured((), ("softmix",), EAGER, "cpu"))


@pytest.mark.heavy
def test_every_number_of_rows_is_compiled() -> None:
    rows = [*measured((), ("softmax",), BY_NAME["inductor"], "cpu")]
    assert rows and not [row.problem for row in rows if row.problem]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    return ends("invariance", *words), capsys.readouterr().out


def test_the_command_prints_a_table_and_the_same_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--operator", "soft*", "--operator", "linear", "--recipe", "torch.bf16")
    code, text = run(capsys, *words)
    assert code == 0 and "a row alone has the bits that it has in a batch of 64" in text
    code, text = run(capsys, *words, "--json")
    document: Any = json.loads(text)
    rows = document if isinstance(document, list) else document["records"]
    assert {row["operator"] for row in rows} == {"softmax", "linear"}
