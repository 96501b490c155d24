"""The player: it leaves what the arms leave, bit for bit, and its source makes scripts."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kernels import skip_without_kernel
from narrowfuzz.arms.available import unavailable
from narrowfuzz.arms.jobs import job_of, with_model_names
from narrowfuzz.arms.model_names import ties
from narrowfuzz.arms.program import Program
from narrowfuzz.arms.tensors import fp32_array
from narrowfuzz.case.ladder import BY_NAME, climb
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.play.converted import play
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.job import Taps
from narrowfuzz.play.player import Trace, in_memory
from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.rules.layers import given_of
from narrowfuzz.trace.expect import Within, bits
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.layer import call_of, first_of
from narrowfuzz.triage.script.model import of_model
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows

HERE = Path(__file__).parents[1]
CASES = {
    name: case
    for name, raw in json.loads((HERE / "fault_cases.json").read_text()).items()
    if (case := load_case(json.dumps(raw).encode())).spec.layer == ""
}


#: What memory holds that nobody wrote is another thing each time.
UNSTEADY = {"empty-gemm-unwritten", "rows-unwritten"}


def played(case: Case, arm: str, trace: Trace) -> Trace:
    """The case, by the player."""
    spec, recipe = case.spec, recipes()[case.spec.recipe]
    tensors = with_model_names(spec, tensors_of(case, recipe))

    def make() -> torch.nn.Module:
        plain = MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device="cpu")
        return recipe.convert(in_memory(plain, spec.weight_layout), spec)

    return play(
        trace,
        make,
        {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in tensors.items()},
        job=replace(job_of(spec, BY_NAME[arm], "cpu"), tied=ties(spec)),
        taps=Taps(),
    )


def of_arm(case: Case, arm: str) -> dict[str, Any]:
    """The same by the arm, or how it failed."""
    recipe = recipes()[case.spec.recipe]
    trace = Program(case.spec, recipe, BY_NAME[arm]).run(tensors_of(case, recipe), tap=False)
    if trace.error is not None:
        return {"error": trace.error.phase}
    names = {"grad_weight": "proj.weight.grad", "grad_bias": "proj.bias.grad"}
    return {names.get(name, name): x for name, x in trace.outputs.items()}


def params() -> list[Any]:
    return [
        pytest.param(
            name, arm.name, marks=[pytest.mark.heavy] * (i % 2 or arm.compiler == "inductor")
        )
        for i, (name, case) in enumerate(sorted(CASES.items()))
        for arm in climb(case.spec)
    ]


@pytest.mark.one_in(21)
@pytest.mark.parametrize("planted", [False, True], ids=["clean", "planted"])
@pytest.mark.parametrize(("name", "arm"), params())
def test_player_and_arm_agree_bit_for_bit(name: str, arm: str, planted: bool) -> None:
    case = CASES[name]
    if unavailable(BY_NAME[arm]):
        pytest.skip(unavailable(BY_NAME[arm]))
    if planted and name in UNSTEADY:
        pytest.skip("what memory holds that nobody wrote is another thing each time")
    skip_without_kernel(case)

    def plant() -> AbstractContextManager[object]:
        """Anew for each run: what a fault counts starts again."""
        torch._dynamo.reset()
        return builtin_faults()[name].plant() if planted else nullcontext()

    with plant():
        want = of_arm(case, arm)
    trace = Trace()
    with plant():
        if "error" in want:
            with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the library raises
                played(case, arm, trace)
            assert trace.phase == want["error"]
            return
        found = played(case, arm, trace).results
    assert set(found) == set(want)
    for result, x in want.items():
        assert same_bits(fp32_array(found[result]).reshape(x.shape), x).all(), result


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rule", "arm"),
    [
        ("scale-doubled", "O3", "eager"),
        ("cast-truncates", "O2", "eager"),
        ("amax-ignores-negatives", "O4", "eager"),
        ("gemm-gain", "O5", "eager"),
        ("recompute-drifts", "O13", "eager+checkpoint"),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        "linear",
        *(
            pytest.param(m, marks=pytest.mark.heavy)
            for m in ("used_twice", "mlp_swiglu", "two_blocks")
        ),
    ],
)
def test_a_played_script_shows_what_is_planted_and_nothing_else(
    model: str, fault: str, rule: str, arm: str, tmp_path: Path, scripts: RunScript
) -> None:
    """In the second step of a copied model, which a single linear would not show."""
    spec = Spec(
        recipe="torchao.float8.rowwise", backend="emulated", model=model, m=16, k=32, n=48,  # type: ignore[arg-type]
        steps=2, checkpoint="full", lifecycle="deepcopy",
    )  # fmt: skip
    case, judge = Case(spec=spec, data=DataSpec(seed=3)), Judge(recipes(), Ledger([]))
    with builtin_faults()[fault].plant():
        verdict = _cause(judge, case, rule, arm)
        text = _written(case, first_of(judge, case, verdict))
    path = tmp_path / "repro.py"
    path.write_text(text)
    assert_shows(scripts, path, ("", fault))


def _cause(judge: Judge, case: Case, rule: str, arm: str) -> Verdict:
    found = judge.judge(case).verdicts
    return next(v for v in found if (v.rule, v.arm, v.status) == (rule, arm, "diverged"))


def _written(case: Case, verdict: Verdict) -> str:
    recipe = recipes()[case.spec.recipe]
    return write_played_script(of_model(case, verdict, recipe, tensors_of(case, recipe)))


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "spec"),
    [
        ("torch.bf16", {"model": "used_twice"}),
        ("torchao.float8.tensorwise", {"model": "used_twice", "backend": "emulated"}),
        ("torchao.mxfp8.floor", {"microbatches": 2, "model": "mlp_gelu"}),
    ],
)
def test_a_weight_used_twice_has_a_script_of_its_gradient(
    recipe: str, spec: dict[str, Any], tmp_path: Path, scripts: RunScript
) -> None:
    case = Case(spec=Spec(recipe=recipe, k=32, n=32, **spec), data=DataSpec(seed=2))
    fault = "gradient-accumulated-twice" if "microbatches" in spec else "tied-gradient-doubled"
    with builtin_faults()[fault].plant():
        verdict = _cause(Judge(recipes(), Ledger([])), case, "O21", "eager")
        (path := tmp_path / "repro.py").write_text(_written(case, verdict))
    assert_shows(scripts, path, ("", fault))


def test_a_script_whose_layer_is_given_something_else_cannot_tell(
    tmp_path: Path, scripts: RunScript
) -> None:
    spec = Spec(recipe="torch.fp32", model="mlp_gelu", dtype="fp32", m=4, k=8, n=8)
    case, judge = Case(spec=spec, data=DataSpec()), Judge(recipes(), Ledger([]))
    verdict = next(v for v in judge.judge(case).verdicts if v.rule == "O5" and v.at.layer == "down")
    call = call_of(judge, case, "down")
    assert call is not None
    at = msgspec.structs.replace(verdict.at, name="output", index=(0, 0))
    wrong = Verdict(
        "O5", "eager", "output", "diverged", "", at, "2", Within(bits(5), bits(6)),
        given_of(call, "output"),
    )  # fmt: skip
    path = tmp_path / "repro.py"
    path.write_text(_written(case, wrong))
    assert scripts(path).shown
    # as if another version's first layer rounded otherwise
    path.write_text(path.read_text().replace("F.gelu(", "1.5 * F.gelu("))
    moved = scripts(path)
    assert moved.code == 125 and "rests on another down input" in moved.output
