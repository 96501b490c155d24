"""What shows only after other cases of its process: kept in the case file and in the script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import builtin_faults, load_plants
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.history import fewest, histories
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.script.operator import call_of
from narrowfuzz.triage.triage import needed, triage
from narrowfuzz.triage.verify import RunScript, run_script
from samples import recipes
from scripts_of_findings import assert_shows

FAULT = "codes-of-dead-weights"
FLOAT8 = Spec(recipe="torchao.float8.rowwise", backend="emulated", m=4, k=16, n=8)


def case_of(seed: int, **changes: object) -> Case:
    return Case(spec=msgspec.structs.replace(FLOAT8, **changes), data=DataSpec(seed=seed))


#: One of them has a weight of the last case's shape.
PAST = (case_of(1, n=24), case_of(2), case_of(3, k=32), case_of(4, n=40))


def test_a_case_file_keeps_what_ran_before() -> None:
    case = msgspec.structs.replace(case_of(9), history=PAST)
    assert load_case(dump_case(case)) == case
    assert case.id != case_of(9).id
    assert b"history" not in dump_case(case_of(9))


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (b"3", "Expected `array`"),
        (b'[{"spec": {}, "data": {}}]', "missing required field `recipe`"),
        (b'[{"spec": {"recipe": "a"}, "data": {}, "history": [{"spec": {"recipe": "b"}, '
         b'"data": {}}]}]', "has none of its own"),
        (b"[" + b",".join([b'{"spec": {"recipe": "a"}, "data": {}}'] * 65) + b"]", "<= 64"),
    ],
)  # fmt: skip
def test_a_history_that_is_none_is_refused(history: bytes, why: str) -> None:
    raw = b'{"schema": 3, "spec": {"recipe": "a"}, "data": {}, "history": ' + history + b"}"
    with pytest.raises(ValueError, match=why):
        load_case(raw)


@pytest.mark.parametrize("needed", [(3,), (0, 7), (1, 2, 6), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_as_few_cases_as_needed_are_kept(needed: tuple[int, ...]) -> None:
    cases = [case_of(i) for i in range(8)]

    def shows(some: Sequence[Case]) -> bool:
        return all(cases[i] in some for i in needed)

    assert fewest(cases, shows, until=float("inf")) == [cases[i] for i in needed]
    assert fewest(cases, shows, until=0.0) == cases


def test_a_judge_runs_the_history_first() -> None:
    judge = Judge(recipes(), Ledger([]))
    with builtin_faults()[FAULT].plant():
        alone = judge.judge(case_of(9))
        after = judge.judge(msgspec.structs.replace(case_of(9), history=PAST))
    assert not alone.causes and after.causes


@pytest.mark.slow
@pytest.mark.heavy
def test_what_a_dead_model_left_is_confirmed_with_what_ran_before(
    tmp_path: Path, scripts: RunScript
) -> None:
    with builtin_faults()[FAULT].plant():
        judge = Judge(recipes(), Ledger([]))
        (cause, *_) = judge.judge(msgspec.structs.replace(case_of(9), history=PAST)).causes
        found = triage(
            judge, case_of(9), cause, seconds=30.0, plant=("", FAULT), scripts=scripts, past=PAST
        )
    assert found.confirmed, found.finding.why_suspected
    assert len(found.finding.minimal.history) == 1
    path = tmp_path / "repro.py"
    path.write_text(found.script)
    assert_shows(scripts, path, ("", FAULT))


@pytest.mark.heavy
def test_what_needs_no_history_gets_none_of_the_past(scripts: RunScript) -> None:
    with builtin_faults()["scale-doubled"].plant():
        judge = Judge(recipes(), Ledger([]))
        (cause, *_) = judge.judge(case_of(9)).causes
    rules = [rule.name for rule in needed(cause.rule, case_of(9).spec)]

    def some(plant: tuple[str, str] | None) -> list[tuple[Case, Verdict]]:
        return list(histories(judge, case_of(9), cause, PAST, scripts, rules=rules, plant=plant))

    (alone,) = some(("", "scale-doubled"))  # what an arm may leave to another, and nothing of PAST
    assert alone[0].history == (case_of(10),)
    assert some(None) == []  # nothing shows it


def test_a_script_has_one_recipe() -> None:
    judge = Judge(recipes(), Ledger([]))
    with builtin_faults()["scale-doubled"].plant():
        (cause, *_) = judge.judge(case_of(9)).causes
    other = case_of(1, recipe="torch.bf16", backend="")
    case = msgspec.structs.replace(case_of(9), history=(other,))
    with pytest.raises(ValueError, match=r"torch.bf16 ran before, and a script has one recipe"):
        script_of(case, cause, recipes()[case.spec.recipe])


OWN = """
import torch
from torch import nn
class Drifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
    def forward(self, x):
        again = torch._C._current_autograd_node() is not None  # in backward, so recomputed
        return self.proj(x * 1.01 if again else x)
def build():
    return Drifts(), torch.zeros(4, 8)
"""


@pytest.mark.heavy
def test_a_users_model_is_there_in_the_process_that_runs_the_past(tmp_path: Path) -> None:
    (tmp_path / "drifts.py").write_text(OWN)
    text = f"{tmp_path / 'drifts.py'}:build"
    (model,) = register(text)
    spec = Spec(recipe="torch.fp32", model=model.name, checkpoint="full", **model.fixed)
    case = Case(spec=spec, data=DataSpec(seed=9))
    past = [msgspec.structs.replace(case, data=DataSpec(seed=i)) for i in range(12)]
    judge = Judge(recipes(), Ledger([]))
    cause = next(v for v in judge.judge(case).causes if v.rule == "O13")
    rules = [rule.name for rule in needed("O13", spec)]

    def some(*models: str) -> list[tuple[Case, Verdict]]:
        found = histories(
            judge, case, cause, past, run_script, rules=rules, models=models, seconds=20.0
        )
        return list(found)

    ((longer, there),) = some(text)
    assert len(longer.history) == 1 and there.symptom == cause.symptom
    # nobody names its file: each process raises, on a line as long as the past, and shows nothing
    assert some() == []


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([2, 2, 2], [0, 1, 2]),
        ([2] * 9, [3, 4, 5, 6, 7, 8]),
        ([2, 2**20, 2], [2]),  # together too many
        ([2, 2**20 - 2, 2], [1, 2]),
        ([2, 2**20 + 1], []),
        ([], []),
    ],
)
def test_a_script_makes_few_and_small_calls_before(sizes: list[int], kept: list[int]) -> None:
    case = Case(spec=Spec(recipe="torch.fp32", model="softmax"), data=DataSpec(seed=1))
    judge = Judge(recipes(), Ledger([]))
    (made,) = observed(judge, case)
    calls = [
        replace(made, index=i, tensors={"input": np.zeros(size, np.float32)})
        for i, size in enumerate([*sizes, 2**21])
    ]
    verdict = SimpleNamespace(
        arm="eager", at=SimpleNamespace(name="softmax", call=len(sizes), result="")
    )
    remade: Any = SimpleNamespace(
        observe=lambda *a, **k: SimpleNamespace(traces={"eager": SimpleNamespace(operators=calls)})
    )
    call, earlier = call_of(remade, case, verdict)  # type: ignore[arg-type]
    assert call.index == len(sizes)
    assert [one.index for one in earlier] == kept


def observed(judge: Judge, case: Case) -> list[OperatorCall]:
    """The calls of softmax in a run of the case."""
    trace = judge.observe(case, frozenset({"eager"}), repeat=False).traces["eager"]
    return [call for call in trace.operators if call.operator == "softmax"]


FORGETTING = """
from contextlib import contextmanager
from narrowfuzz import Plant
from narrowfuzz.plants.operators import kernel_replaced

def first_result():
    kept = {}
    def make(run):
        def of_shape(x, *how):
            return kept.setdefault(tuple(x.shape), run(x, *how)).clone()
        return of_shape
    return kernel_replaced("_softmax", make)

PLANTS = [Plant("first-result-kept", "operators", "softmax returns its first result of a shape",
                "https://github.com/NVIDIA/TransformerEngine/issues/2908", ("torch.fp32",),
                first_result)]
"""


@pytest.mark.slow
def test_an_operator_that_remembers_is_shown_by_its_calls_before(
    tmp_path: Path, scripts: RunScript
) -> None:
    file = tmp_path / "plants.py"
    file.write_text(FORGETTING)
    spec = Spec(recipe="torch.fp32", model="softmax", m=3, k=8, dtype="fp32", steps=2)
    case, judge = Case(spec=spec, data=DataSpec(seed=1)), Judge(recipes(), Ledger([]))
    with load_plants(file)["first-result-kept"].plant():
        (verdict,) = [v for v in judge.judge(case).causes if v.at.name == "softmax"]
        assert (verdict.rule, verdict.at.call) == ("O25", 1)
        proof = proven(judge, case, verdict, (str(file), "first-result-kept"), scripts)
    assert proof.why == "" and proof.script.count("torch.softmax(input, ") == 2
