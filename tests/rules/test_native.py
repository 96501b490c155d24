"""PyTorch's own CPU kernels in place of oneDNN's: what runs, who judges it, whose a fault is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from draws import drawn
from narrowfuzz.arms.available import natives
from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER_NATIVE
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Kernels, Spec, dump_case, load_case
from narrowfuzz.draw import specs
from narrowfuzz.draw.strategies import cases
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine import machine
from narrowfuzz.machine.machine import Machine
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.registry import builtin_faults, find_plant
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.whole import check_ratio, check_strict
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import recipes

pytestmark = pytest.mark.skipif(
    not natives(BY_NAME, "cpu"), reason="oneDNN cannot be switched off here"
)
RECIPES = recipes()
ROWWISE, TENSORWISE = "torchao.float8.rowwise", "torchao.float8.tensorwise"
#: K of several sums of eight, and data whose sums bf16 cannot hold.
WIDE = {"recipe": "torch.bf16", "m": 64, "k": 64}


def case_of(kernels: Kernels, *, lattice: bool = False, **fields: Any) -> Case:
    data = DataSpec(regime="lattice" if lattice else "wild", seed=3)
    return Case(spec=Spec(kernels=kernels, **{"recipe": ROWWISE, **fields}), data=data)


def judge() -> Judge:
    return Judge(RECIPES, Ledger([]))


def enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


@contextmanager
def wrong_with_onednn() -> Iterator[None]:
    """A linear's output is 3 % too large where oneDNN multiplies; its gradients are right."""

    def make(linear: Any) -> Any:
        def multiply(*args: Any) -> Any:
            result = linear(*args)
            return result + 0.03 * result.detach() if enabled() else result

        return multiply

    with attribute_replaced(torch.nn.functional, "linear", make):
        yield


@pytest.mark.parametrize("checkpoint", ["none", "full", "reentrant", "selective"])
def test_onednn_is_off_in_forward_backward_and_recompute(checkpoint: str) -> None:
    seen: list[bool] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(enabled())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(enabled())
            return grad

    def make(linear: Any) -> Any:
        return lambda *args: Spy.apply(linear(*args))

    case = case_of("native", recipe="torch.bf16", model="mlp_gelu", checkpoint=checkpoint)
    machine.machine()  # which multiplies, too
    with attribute_replaced(torch.nn.functional, "linear", make):
        judge().judge(case)
    assert len(seen) > 4 and not any(seen)
    assert enabled()


def test_onednn_is_on_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), without_onednn():
        _ = 1 / int(enabled())
    assert enabled()


@pytest.mark.parametrize(("error", "status"), [(2.0**-7, "ok"), (2.0**-5, "diverged")])
def test_a_large_row_may_round_by_its_own_size(error: float, status: str) -> None:
    """Where eager computes a gradient in fp32 that an arm computes in bf16."""
    case = case_of("both", recipe="torch.fp32", dtype="fp32", model="mlp_gelu", autocast=True)
    evidence = judge().observe(case)
    exact = {name: x.copy() for name, x in evidence.exact.items()}
    (name,) = (name for name in exact if name == "grad_input")
    exact[name].reshape(-1, exact[name].shape[-1])[2] *= 1e4
    given = {name: exact[name].astype(np.float32)}
    wrong = {name: given[name] * np.float32(1.0 + error)}
    traces = {
        arm: replace(trace, outputs=wrong if arm == "eager_native" else given)
        for arm, trace in evidence.traces.items()
    }
    (verdict,) = check_ratio(replace(evidence, traces=traces, twin=lambda: exact))
    assert verdict.status == status


@pytest.mark.parametrize("model", ["linear", "llama_block"])
@pytest.mark.parametrize("recipe", ["torch.bf16", TENSORWISE])
def test_no_primitive_of_onednns_runs(recipe: str, model: str) -> None:
    """Attention and activations included; with oneDNN the same case runs many, where there are."""
    case = case_of("default", recipe=recipe, model=model)
    tensors, ran = tensors_of(case, RECIPES[recipe]), {}
    for name in ("eager", "eager_native"):
        program = Program(case.spec, RECIPES[recipe], BY_NAME[name])
        with machine._onednn_tells() as told:
            assert program.run(tensors, tap=False).error is None
        ran[name] = told().count(",exec,")
    assert ran["eager_native"] == 0
    # a float8 linear multiplies nothing else, and not every CPU has a kernel of oneDNN's for that
    kind = "fp8" if (recipe, model) == (TENSORWISE, "linear") else "bf16"
    if machine.machine().kernels[kind] != "torch":
        assert ran["eager"] > 0


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, {"contract", "census", "O1", "O2", "O3", "O4", "O5", "O15", "O6", "O7", "R4", "R5"}),
        ({"model": "llama_block"}, {"contract", "O1", "O2", "O3", "O4", "O5", "O15", "O6"}),
        ({"model": "used_twice"}, {"O21", "O5"}),
        ({"recipe": "torch.bf16", "model": "attention"}, {"O18", "O22", "O5"}),
        ({"checkpoint": "full"}, {"O12", "O13"}),
        ({"microbatches": 2}, {"R23"}),
    ],
    ids=["linear", "block", "used twice", "attention", "checkpoint", "microbatches"],
)
def test_every_rule_of_eager_arms_judges_in_its_place(
    fields: dict[str, Any], rules: set[str]
) -> None:
    found = judge().judge(case_of("native", lattice="model" not in fields, **fields))
    assert not found.causes
    passed = {v.rule for v in found.verdicts if v.status == "ok"}
    assert passed >= rules
    assert {v.arm.split("+")[0] for v in found.verdicts} == {"eager_native"}


@pytest.mark.parametrize("fields", [{}, {"model": "llama_block"}, {"checkpoint": "full"}], ids=str)
def test_beside_onednns_both_are_judged(fields: dict[str, Any]) -> None:
    found = judge().judge(case_of("both", **fields))
    assert not found.causes
    rules: dict[str, set[str]] = {"eager": set(), "eager_native": set()}
    for verdict in found.verdicts:
        if verdict.status == "ok" and not verdict.rule.startswith("R"):
            rules[verdict.arm.split("+")[0]].add(verdict.rule)
    only = {"census", "O8", "O9"}  # conversion is the same, and eager is what is compared with
    assert rules["eager"] - only == rules["eager_native"] - only
    assert {"O5", "O15", "O2"} <= rules["eager"]


@pytest.mark.parametrize("recipe", ["torch.bf16", TENSORWISE, ROWWISE, "torchao.mxfp8.floor"])
def test_exact_sums_have_the_same_bits_on_other_kernels(recipe: str) -> None:
    """O8, and the smallest difference breaks it."""
    evidence = judge().observe(case_of("both", recipe=recipe, lattice=True))
    assert [(v.arm, v.status) for v in check_strict(evidence)] == [("eager_native", "ok")]
    native = evidence.traces["eager_native"]
    other = {**native.outputs, "grad_input": native.outputs["grad_input"] * 1.01}
    traces = {**evidence.traces, "eager_native": replace(native, outputs=other)}
    (verdict,) = check_strict(replace(evidence, traces=traces))
    assert (verdict.status, verdict.role, verdict.arm) == ("diverged", "grad_input", "eager_native")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bias": True, "lattice": True}, "the bias may be fused"),
        ({}, "kernels sum in their own order"),
        ({"model": "mlp_gelu"}, "kernels sum in their own order"),
    ],
    ids=str,
)
def test_other_sums_need_not_have_the_same_bits(fields: dict[str, Any], why: str) -> None:
    evidence = judge().observe(case_of("both", **fields))
    assert [(v.status, v.why) for v in check_strict(evidence)] == [("not_applicable", why)]


def test_a_whole_models_error_is_held_to_eagers() -> None:
    evidence = judge().observe(case_of("both", recipe="torch.bf16", model="attention"))
    assert [(v.arm, v.status) for v in check_ratio(evidence)] == [("eager_native", "ok")]
    native = evidence.traces["eager_native"]
    far = {name: x * 2 for name, x in native.outputs.items()}
    traces = {**evidence.traces, "eager_native": replace(native, outputs=far)}
    (verdict,) = check_ratio(replace(evidence, traces=traces))
    assert verdict.status == "diverged"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", ["linear", "llama_block"])
@pytest.mark.parametrize("kernels", ["default", "both", "native"])
def test_what_only_pytorchs_kernels_do_is_theirs(kernels: Kernels, model: str) -> None:
    case = case_of(kernels, **WIDE, model=model)
    assert not judge().judge(case).causes
    with builtin_faults()["gemm-narrow-without-onednn"].plant():
        found = judge().judge(case).fingerprints()
    native = {"O5--output--eager_native--wrong value--torch"}
    assert found == (set() if kernels == "default" else native)


@pytest.mark.parametrize("model", ["linear", "llama_block"])
@pytest.mark.parametrize("kernels", ["default", "both", "native"])
def test_what_only_onednns_kernels_do_is_eagers(kernels: Kernels, model: str) -> None:
    with wrong_with_onednn():
        found = judge().judge(case_of(kernels, **WIDE, model=model)).fingerprints()
    assert found == (set() if kernels == "native" else {"O5--output--eager--wrong value--torch"})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        ("cast-truncates", {}),
        ("layer-gain", {}),
        ("recompute-drifts", {"checkpoint": "full"}),
        ("cast-rounds-upwards", {"model": "mlp_gelu"}),
        ("conversion-freezes", {}),
    ],
)
def test_what_both_show_has_one_name(fault: str, fields: dict[str, Any]) -> None:
    """A case of PyTorch's own kernels alone is then judged on oneDNN's, too."""
    with builtin_faults()[fault].plant():
        usual, both, native = (
            judge().judge(case_of(kernels, **fields)).fingerprints()
            for kernels in ("default", "both", "native")
        )
    assert usual and usual == both == native


@pytest.mark.heavy  # minimises, and runs each script with and without the fault
@pytest.mark.parametrize("model", ["linear", "llama_block"])
def test_its_finding_is_minimal_and_its_script_shows_it(model: str, scripts: RunScript) -> None:
    fault = builtin_faults()["gemm-narrow-without-onednn"]
    with fault.plant():
        found = judge().judge(case := case_of("native", **WIDE, model=model))
        verdict = found.causes[0]
        done = triage(judge(), case, verdict, plant=("", fault.id), scripts=scripts)
    assert done.confirmed and done.finding.arm == "eager_native"
    assert "torch.backends.mkldnn.enabled = False" in done.script
    assert done.finding.minimal.spec.kernels != "default" and not done.finding.needs


#: Where oneDNN is off, attention is 50 % too large.
WRONG_ATTENTION = """
from contextlib import contextmanager
from narrowfuzz import Plant
from narrowfuzz.plants.patching import attribute_replaced
from samples import recipes

@contextmanager
def plant():
    import torch
    from torch.nn import functional

    def make(attend):
        def attended(*args, **kwargs):
            y = attend(*args, **kwargs)
            return y if torch._C._get_mkldnn_enabled() else y * 1.5
        return attended

    with attribute_replaced(functional, "scaled_dot_product_attention", make):
        yield

PLANTS = [Plant("wrong-attention", "attention", "too large", "x", ("torch.bf16",), plant)]
"""


@pytest.mark.heavy
def test_a_whole_model_that_differs_from_onednns_has_a_script(tmp_path: Path) -> None:
    """What no linear shows; the script runs eager with oneDNN, the guilty one without."""
    file = tmp_path / "fault.py"
    file.write_text(WRONG_ATTENTION)
    case = case_of("both", recipe="torch.bf16", model="attention")
    with find_plant(str(file), "wrong-attention").plant():
        (verdict,) = judge().judge(case).causes
        assert (verdict.rule, verdict.arm) == ("O9", "eager_native")
        done = triage(judge(), case, verdict, plant=(str(file), "wrong-attention"), seconds=10.0)
    assert done.confirmed, done.finding.why_suspected
    # the guilty run alone is without oneDNN
    assert done.script.count("kernels='native')") == 1 < done.script.count("play(Trace()")


def test_where_the_switch_stays_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowfuzz.arms.program.onednn_stays", lambda: "it stays on")
    found = judge().judge(case_of("native"))
    assert not found.causes and not found.ran
    assert {v.why for v in found.verdicts if v.status == "inconclusive"} == {"it stays on"}


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("torch.backends.mkldnn.is_available", False, "no oneDNN"),
        ("torch._C._get_mkldnn_enabled", False, "off already"),
        ("torch.backends.flags_frozen", True, "disable_global_flags"),
    ],
)
def test_why_onednn_cannot_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: bool, reason: str
) -> None:
    assert machine.onednn_stays() == ""
    monkeypatch.setattr(attribute, lambda: value)
    assert reason in machine.onednn_stays()


def test_what_pytorchs_kernels_lack_is_void_on_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no claim: oneDNN's results are judged as ever."""
    multiply = torch._scaled_mm

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if not enabled():
            raise RuntimeError("no such kernel. Run it elsewhere")
        return multiply(*args, **kwargs)

    machine.native_lacks.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    monkeypatch.setattr(machine, "machine", lambda: Machine((), "", {}, {}))
    try:
        fields = {"recipe": "torch.scaled_mm", "backend": "tensorwise_v1"}
        found = judge().judge(case_of("both", **fields))
    finally:
        machine.native_lacks.cache_clear()
    assert not found.causes and found.ran
    void = {(v.arm, v.why) for v in found.verdicts if v.status == "inconclusive"}
    ((arm, why),) = void
    assert arm == "eager_native" and "no kernel of this CPU multiplies fp8" in why


def shares(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, kernel: str) -> dict[str, float]:
    here = Machine((), "", {"fp8": kernel}, {})
    monkeypatch.setattr(specs, "machine", lambda: here)
    found = Counter(case.spec.kernels for case in drawn(cases([recipe]), 100))
    return {kernels: n / found.total() for kernels, n in found.items()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("recipe", "kernel", "usual"),
    [
        ("torch.scaled_mm", "brg_matmul:avx10_2_512", "default"),
        ("torch.scaled_mm", "ref:any", "native"),
        ("torch.bf16", "ref:any", "default"),
        ("torchao.mxfp8.floor", "ref:any", "default"),  # multiplied in high precision
    ],
)
def test_where_onednn_crawls_most_draws_leave_it_out(
    monkeypatch: pytest.MonkeyPatch, recipe: str, kernel: str, usual: str
) -> None:
    of_tensors = replace(RECIPES[recipe], backends=RECIPES[recipe].backends[:1])
    found = shares(of_tensors, monkeypatch, kernel)
    assert set(found) == {"default", "both", "native"}
    assert max(found, key=found.__getitem__) == usual and found[usual] > 0.5


def test_nothing_is_drawn_where_the_switch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "onednn_stays", lambda: "it stays on")
    assert set(shares(RECIPES["torch.bf16"], monkeypatch, "ref:any")) == {"default"}


def test_a_case_that_says_nothing_of_kernels_means_what_it_did() -> None:
    raw = json.dumps({"schema": 3, "spec": {"recipe": "torch.bf16"}, "data": {}}).encode()
    case = load_case(raw)
    assert case.spec.kernels == "default" and b"kernels" not in dump_case(case)
    assert case.id == "faeeef1d77b4"  # from before there was such a field
    told = load_case(dump_case(case_of("native")))
    assert told.spec.native and told.id != case_of("default").id
    assert not msgspec.structs.replace(told.spec, compile="aot_eager").native


def test_the_arm_says_what_it_is() -> None:
    assert EAGER_NATIVE.title == "eager, PyTorch's own kernels in place of oneDNN's"
