"""Under bf16 autocast each linear is held to what its library does there, and to nothing wider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe.recipe import runnable
from narrowfuzz.triage.layer import linear_of
from narrowfuzz.triage.script.model import of_model
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.verify import RunScript
from samples import recipes

FLOAT8 = ["torchao.float8.tensorwise", "torchao.float8.rowwise"]
GW_HP, MX = "torchao.float8.rowwise_gw_hp", "torchao.mxfp8.rceil"
PLACES = [
    (name, backend)
    for name, r in recipes().items()
    if name in (*FLOAT8, MX) and (able := runnable(r, "cpu"))
    for backend in able.backends
]


def case_of(recipe: str, model: str = "mlp_gelu", **changes: Any) -> Case:
    shape = {"m": 32, "k": 32, "n": 64, "dtype": "fp32", "autocast": True, "bias": True}
    return Case(spec=Spec(recipe=recipe, model=model, **(shape | changes)), data=DataSpec(seed=3))


def judged(case: Case, ledger: Ledger | None = None) -> Judgement:
    return Judge(recipes(), load_ledger() if ledger is None else ledger).judge(case)


@pytest.mark.parametrize(("recipe", "backend"), PLACES)
def test_a_layer_under_autocast_is_judged_and_clean(recipe: str, backend: str) -> None:
    # MX without bias: its wrapper drops it
    found = judged(case_of(recipe, backend=backend, bias="mxfp8" not in recipe))
    assert not found.causes
    passed = Counter(v.rule for v in found.verdicts if v.status == "ok" and v.at.layer)
    layers, operands, results = 2, 6, 3
    assert passed["O2"] == passed["O3"] == layers * operands
    assert passed["O5"] == layers and passed["O15"] == 2 * layers
    assert passed["O6"] == layers * results


def test_an_attention_under_autocast_feeds_bf16_to_the_next_linear() -> None:
    assert not judged(case_of(FLOAT8[1], "attention", heads=2)).causes


@contextmanager
def weights_rounded() -> Iterator[None]:
    """torchao.float8 casts from bf16 what it should cast from fp32."""
    from torchao.float8 import float8_linear

    def make(cast: Any) -> Any:
        def rounded(tensor: Any, *args: Any, **kw: Any) -> Any:
            return cast(tensor.to(torch.bfloat16), *args, **kw)

        return rounded

    with attribute_replaced(float8_linear, "hp_tensor_to_float8_dynamic", make):
        yield


@pytest.mark.parametrize("recipe", FLOAT8)
def test_a_cast_from_rounded_values_is_found(recipe: str) -> None:
    with weights_rounded():
        found = judged(case_of(recipe, "linear", backend="emulated"))
    assert {"O2", "O3", "O4"} & {cause.rule for cause in found.causes}


def test_what_is_found_there_is_shown_by_the_model_it_was_found_in(
    tmp_path: Path, scripts: RunScript
) -> None:
    """No single linear without autocast is that layer."""
    case = case_of(FLOAT8[0], "linear", backend="emulated")
    judge = Judge(recipes(), Ledger([]))
    assert linear_of(judge, case, "proj") is None
    assert linear_of(judge, case_of(FLOAT8[0], dtype="bf16", autocast=False), "up") is not None
    with weights_rounded():
        cause = next(c for c in judge.judge(case).causes if c.rule in ("O2", "O3", "O4"))
    recipe = recipes()[case.spec.recipe]
    path = tmp_path / "repro.py"
    path.write_text(write_played_script(of_model(case, cause, recipe, tensors_of(case, recipe))))
    assert scripts(path).code == 0


class TestTypes:
    """The contract: a converted linear returns autocast's type."""

    def test_mx_ignores_autocast_which_is_known(self) -> None:
        found = judged(case_of(MX, bias=False))
        assert not found.causes
        assert {v.explained_by for v in found.known} == {"mx-ignores-autocast"}

    def test_without_the_ledger_it_is_a_finding_with_a_script(
        self, tmp_path: Path, scripts: RunScript
    ) -> None:
        case = case_of(MX, "linear", bias=False)
        (cause,) = judged(case, Ledger([])).causes
        assert (cause.rule, cause.symptom) == ("contract", "type under autocast")
        recipe = recipes()[MX]
        path = tmp_path / "repro.py"
        path.write_text(
            write_played_script(of_model(case, cause, recipe, tensors_of(case, recipe)))
        )
        run = scripts(path)
        assert run.code == 1 and "torch.float32" in run.output

    def test_its_other_rules_stay_sharp(self) -> None:
        with builtin_faults()["mx-scale-byte-plus-one"].plant():
            assert judged(case_of(MX, bias=False)).causes

    def test_nn_linear_and_float8_return_it(self) -> None:
        for recipe in ("torch.fp32", FLOAT8[0]):
            verdicts = judged(case_of(recipe)).verdicts
            assert {v.status for v in verdicts if v.rule == "contract"} == {"ok"}
