"""repro.py of a model: stands alone, passes on a clean library, and looks where the rule looked."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from narrowfuzz.arms.available import unavailable
from narrowfuzz.arms.program import Program
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import climb
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.models.catalog import COMPOSED
from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.rules.kernels import WRONG_PRODUCT
from narrowfuzz.rules.repeat import AGAIN
from narrowfuzz.rules.whole import SMALL_RATIO, ratio_limit
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import (
    FINITE,
    Is,
    Near,
    Own,
    Present,
    Refuses,
    Runs,
    Same,
    State,
    Sum,
    Within,
    bits,
)
from narrowfuzz.trace.verdict import OtherRun, Verdict
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.verify import RunScript, run_script
from samples import recipes
from scripts_of_findings import assert_shows, standing_alone

FLOAT8 = "torchao.float8.rowwise"
GRADIENT = "layers.0.attention.wq.weight.grad"
_NEAR = Near(bits(1.0), bits(0.5))
#: Without its data: the model's source, the player, the recomputation's policy, the check.
MAX_LINES = 390
#: Rules that judge a model as a whole, as their verdicts would look.
RULES: dict[str, dict[str, Any]] = {
    "crash": {"rule": "contract", "role": "forward", "status": "crashed", "at": At(what="error"),
              "symptom": "fails although nothing forbids it (RuntimeError in f)",
              "expect": Runs("RuntimeError")},
    "missing": {"rule": "contract", "role": "backward", "status": "diverged",
                "symptom": "no grad_parameter", "expect": Present((GRADIENT,))},
    "O1": {"rule": "O1", "symptom": "differs on repeat",
           "expect": Same(At(name="output", index=(0, 0), run=AGAIN))},
    "O8": {"rule": "O8", "symptom": "differs from eager", "arm": "aot_eager",
           "expect": Same(At(name="output", index=(0, 0), run="eager"))},
    "O9": {"rule": "O9", "symptom": "error beyond eager's", "expect": _NEAR,
           "at": At(name="output"), "arm": "aot_eager_decomp_partition"},
    "O9 row": {"rule": "O9", "symptom": "error beyond eager's", "expect": _NEAR,
               "at": At(name="grad_input", index=(21,)),
               "arm": "aot_eager_decomp_partition"},
    "O9 finite": {"rule": "O9", "symptom": "not finite", "expect": FINITE,
                  "arm": "aot_eager_decomp_partition"},
    "O12": {"rule": "O12", "symptom": "differs from no checkpoint",
            "arm": "eager+checkpoint_selective",
            "expect": Same(At(name="output", index=(0, 0), run="eager"))},
    "O13": {"rule": "O13", "symptom": "codes differ in recompute",
            "arm": "aot_eager+checkpoint",
            "at": At(what="codes", name="output", side="a", phase="recompute", index=(0, 0)),
            "expect": Same(At(what="codes", name="output", side="a", phase="forward"))},
    "O18": {"rule": "O18", "symptom": "probabilities do not sum to 1",
            "expect": Own("1", bits(2.0**-10)), "at": At(what="attention")},
    "product": {"rule": "O15", "arm": "aot_eager", "role": "gradient", "symptom": WRONG_PRODUCT,
                "at": At(what="product")},
    "R23": {"rule": "R23", "symptom": "is not the sum of the microbatches'",
            "expect": Sum("the microbatches' gradients")},
}  # fmt: skip


#: Compressing the data of a large model is what writing its script takes.
SMALL = {"m": 4, "k": 8, "n": 16}


def spec_of(model: str, **changes: Any) -> Spec:
    fields = {"recipe": FLOAT8, "m": 32, "k": 32, "n": 64, "heads": 2, **changes}
    return Spec(model=model, **fields)


def verdict_of(rule: str, /, **changes: Any) -> Verdict:
    fields = {"arm": "eager", "role": "output", "status": "diverged", "got": "2",
              "at": At(name="output", index=(0, 0)), **RULES[rule], **changes}  # fmt: skip
    return Verdict(**fields)


def written(rule: str, spec: Spec, data: DataSpec | None = None, /, **changes: Any) -> str:
    case, recipe = Case(spec=spec, data=data or DataSpec(seed=3)), recipes()[spec.recipe]
    if rule == "R23":
        changes["runs"] = (OtherRun("microbatch 0 alone", spec, tensors_of(case, recipe)),)
    return script_of(case, verdict_of(rule, **changes), recipe)


def assert_stands_alone(text: str) -> None:
    assert text.isascii()
    literals = [n for n in ast.walk(standing_alone(text)) if isinstance(n, ast.Call)
                and getattr(n.func, "id", "") == "unpacked"]  # fmt: skip
    assert literals
    data = sum((n.end_lineno or 0) - n.lineno for n in literals)
    assert len(text.splitlines()) - data <= MAX_LINES


NAMES = [name for name in COMPOSED if name != "linear"]


@pytest.mark.one_in(27)
@pytest.mark.parametrize(("rule", "model"), itertools.product(RULES, NAMES))
def test_every_rules_script_stands_alone(rule: str, model: str) -> None:
    assert_stands_alone(written(rule, spec_of(model, **SMALL)))


RICH = {**SMALL, "batch": 2, "input_layout": "strided", "grad_layout": "expanded", "steps": 2,
        "microbatches": 2, "optimizer": "adamw", "lifecycle": "reload", "checkpoint": "selective",
        "compile": "inductor", "dynamic": True, "fullgraph": True,
        "memory_budget": 50}  # fmt: skip


#: Rules that are about compiled arms.
COMPILED = ("O8", "O9", "O9 row", "O9 finite", "O13", "product")


def judged_on() -> list[tuple[str, str]]:
    """Each rule and the arms that it may judge."""
    arms = [arm for arm in ARMS.values() if arm.name != "reference"]
    return [(r, a.name) for r in RULES for a in arms if a.compiler or r not in COMPILED]


@pytest.mark.one_in(48)
@pytest.mark.parametrize(("rule", "arm"), judged_on())
def test_every_rung_has_a_script(rule: str, arm: str) -> None:
    assert_stands_alone(written(rule, spec_of("two_blocks", **RICH), arm=arm))


def test_what_no_player_can_show_is_refused() -> None:
    for at in (At(what="pending"), At(what="codes", name="bias", layer="up", side="a")):
        with pytest.raises(ValueError, match="no eyes for"):
            written("O1", spec_of("mlp_gelu"), rule="O5", at=at, expect=Is(bits(1)))
    at = At(name="output", index=(0, 0), run="another life")
    with pytest.raises(ValueError, match="does not play 'another life'"):
        written("O1", spec_of("mlp_gelu"), rule="O5", at=at, expect=Is(bits(1)))
    with pytest.raises(ValueError, match="cannot check State"):
        written("O1", spec_of("mlp_gelu"), rule="O14", expect=State(bits(1), ()))


def test_a_layers_finding_is_shown_by_a_single_linear() -> None:
    layer = Spec(recipe=FLOAT8, m=2, k=32, n=3)
    tensors = {"input": np.ones((2, 32), np.float32), "weight": np.ones((3, 32), np.float32),
               "grad_output": np.ones((2, 3), np.float32)}  # fmt: skip
    verdict = verdict_of(
        "O1", rule="O5", at=At(name="output", layer="up", index=(1, 2)),
        expect=Within(bits(0), bits(1)),
    )  # fmt: skip
    case = Case(spec=layer, data=DataSpec())
    text = script_of(case, verdict.of_linear(), recipes()[FLOAT8], tensors)
    assert "class GeluMLP" not in text and "torch.nn.Linear(32, 3, False" in text
    assert len(text.splitlines()) <= 60


def played(text: str) -> dict[str, Any]:
    """The script's namespace before it judges."""
    namespace: dict[str, Any] = {}
    exec(compile(text[: text.rindex("sentence, shows = ")], "repro.py", "exec"), namespace)
    return namespace


AGREE: list[tuple[str, dict[str, Any]]] = [
    ("two_blocks", {"checkpoint": "selective"}),
    ("two_blocks", {"checkpoint": "reentrant", "steps": 2}),
    ("mlp_gelu", {"steps": 3, "microbatches": 2, "optimizer": "adamw", "bias": True}),
    ("mlp_gelu", {"lifecycle": "reload"}),
    ("mlp_gelu", {"lifecycle": "deepcopy"}),
    ("tied_embedding", {"input_layout": "transposed", "checkpoint": "full"}),
    ("tied_embedding", {"input_layout": "strided", "batch": 2, "steps": 2}),
    ("attention", {"input_layout": "transposed", "grad_layout": "transposed", "batch": 2,
                   "recipe": "torch.bf16"}),
    ("attention", {"attention": "math", "grad_layout": "expanded"}),
    ("dropout", {"bias": True, "checkpoint": "full"}),
    ("hooked", {"grad_mode": "inference", "recipe": "torch.bf16"}),
    ("frozen_first", {"grad_mode": "no_grad"}),
    ("used_twice", {"input_layout": "strided", "grad_layout": "expanded", "batch": 2}),
    ("mlp_swiglu", {"recipe": "torch.fp32", "dtype": "fp32", "autocast": True}),
    ("linear", {"steps": 2, "bias": True}),
    ("linear", {"weight_layout": "strided", "bias": True, "recipe": "torch.bf16"}),
    ("tied_embedding", {"weight_layout": "transposed", "steps": 2}),
    ("linear", {"lifecycle": "reload", "bias": True}),
    ("linear", {"m": 0, "grad_layout": "expanded", "lifecycle": "deepcopy",
                "recipe": "torch.bf16"}),
    ("linear", {"m": 0, "k": 0, "lifecycle": "deepcopy", "recipe": "torch.bf16"}),
]  # fmt: skip


@pytest.mark.one_in(162)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("model", "changes"), AGREE)
def test_a_script_runs_what_the_arm_ran(model: str, changes: dict[str, Any]) -> None:
    """Same results, bit for bit, as the case left on the arm; else it shows another thing."""
    spec = spec_of(model, **changes)
    case, recipe = Case(spec=spec, data=DataSpec(seed=7)), recipes()[spec.recipe]
    arm = climb(spec)[-1]
    trace = Program(spec, recipe, arm).run(tensors_of(case, recipe), tap=False)
    assert trace.error is None, trace.error
    rng = torch.get_rng_state()
    excepthook = sys.excepthook
    found = played(written("O1", spec, case.data, arm=arm.name))["trace"].results
    sys.excepthook = excepthook
    torch.set_rng_state(rng)
    ours = {_OF_LINEAR.get(name, name): values for name, values in trace.outputs.items()}
    assert set(found) == set(ours)
    if model == "dropout":  # the script's build draws first: other numbers, the same names
        return
    for name, values in ours.items():
        theirs = found[name].detach().float().numpy()
        assert same_bits(theirs.reshape(values.shape), values).all(), name


_OF_LINEAR = {"grad_weight": "proj.weight.grad", "grad_bias": "proj.bias.grad"}


def test_the_float64_run_is_neither_converted_nor_narrowed() -> None:
    spec = spec_of("mlp_gelu", recipe="torch.fp32", dtype="fp32", autocast=True, batch=2)
    excepthook = sys.excepthook
    runs = played(written("O9 row", spec))
    sys.excepthook = excepthook
    assert runs["exact"].results["output"].dtype == torch.float64
    assert runs["eager"].results["output"].dtype == torch.bfloat16
    assert tuple(runs["eager"].results["grad_input"].shape) == (64, 32)


@pytest.mark.parametrize(("rule", "large"), [("O9", True), ("O9 row", False)])
def test_a_ratios_script_has_the_rules_own_limit(rule: str, large: bool) -> None:
    spec = spec_of("mlp_gelu")
    text = written(rule, spec)
    assert f"ratio=3.0 if exact.results[{'output' if large else 'grad_input'!r}]" in text
    assert f"and not {not large} else 10.0" in text and SMALL_RATIO == 10.0
    assert ratio_limit(spec)[0] == 3.0 and f"floor={ratio_limit(spec)[1]!r} *" in text


def test_a_missing_gradient_of_one_linear_goes_by_its_parameters_name() -> None:
    spec = spec_of("linear", lifecycle="deepcopy")
    text = written("missing", spec, expect=Present(("grad_bias", "grad_weight")))
    assert "('proj.bias.grad', 'proj.weight.grad')" in text


def test_a_refusal_that_comes_to_name_its_layer_is_gone() -> None:
    spec = spec_of("linear", lifecycle="deepcopy")
    text = written("crash", spec, expect=Refuses("", "AssertionError", "layer"))
    assert 'int("proj" not in text) if type(error).__name__ == "AssertionError" else 125' in text


@pytest.mark.slow
@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    "rule",
    RULES,  # each is a process that compiles
)
def test_on_a_clean_library_it_exits_0(tmp_path: Path, scripts: RunScript, rule: str) -> None:
    spec = spec_of("two_blocks", batch=2, m=16, checkpoint="selective",
                   compile="aot_eager_decomp_partition")  # fmt: skip
    path = tmp_path / "repro.py"
    if rule == "R23":
        spec = msgspec.structs.replace(spec, microbatches=1)  # its one part is the whole
    path.write_text(written(rule, spec))
    ended = scripts(path, timeout=120)
    assert ended.code == 0, ended
    assert ended.output


@pytest.mark.heavy
@pytest.mark.skipif(bool(unavailable(ARMS["inductor"])), reason="no C++ compiler")
@pytest.mark.parametrize("rule", ["O9", "O18"])
def test_on_a_clean_inductor_it_exits_0(tmp_path: Path, rule: str) -> None:
    spec = spec_of("attention", compile="inductor")
    path = tmp_path / "repro.py"
    path.write_text(written(rule, spec, arm="inductor"))
    ended = run_script(path, timeout=180)
    assert ended.code == 0, ended
    assert "1 attention backwards" in ended.output or rule == "O9"


WRONG_MM = """
import contextlib, torch
from narrowfuzz import Plant
@contextlib.contextmanager
def plant():
    library = torch.library.Library("aten", "IMPL")
    def wrong(a, b):
        gain = 1.0 if a.dtype == torch.float64 else 1.125  # not of what judges it
        return torch.addmm(torch.zeros(1, dtype=a.dtype), a, b) * gain
    library.impl("mm", wrong, "CPU")
    yield
PLANTS = [Plant("wrong-mm", "gain", "aten::mm an eighth too large", "", ("*",), plant)]
"""


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(("rule", "role"), [("O5", "output"), ("O15", "gradient")])
def test_a_product_inside_a_compiled_graph_has_a_script(
    tmp_path: Path, scripts: RunScript, rule: str, role: str
) -> None:
    """Its own check: exits 0 on a clean library and 1 where the kernel multiplies wrongly."""
    spec = spec_of("mlp_swiglu", recipe="torch.bf16", compile="aot_eager")
    at = At(what="product", phase="forward" if rule == "O5" else "backward")
    wrong = Verdict(rule, "aot_eager", role, "diverged", WRONG_PRODUCT, at, "2")
    path, faults = tmp_path / "repro.py", tmp_path / "faults.py"
    path.write_text(script_of(Case(spec=spec, data=DataSpec()), wrong, recipes()["torch.bf16"]))
    faults.write_text(WRONG_MM)
    assert "the worst of" in assert_shows(scripts, path, (str(faults), "wrong-mm"))
