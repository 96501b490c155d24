"""Watching a model's linears: nothing changes, and what is recorded is what that call computed."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from kernels import skip_without_backend
from narrowfuzz.arms.layers import is_linear, layers_of
from narrowfuzz.arms.model_names import linear_names
from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER, with_checkpoint
from narrowfuzz.case.spec import Case, Checkpoint, DataSpec, Spec
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.models.catalog import COMPOSED, MODELS
from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.numerics.plan import HIGH_PRECISION, GemmPlan
from narrowfuzz.play.layers import LayerWatch
from narrowfuzz.play.player import Training
from narrowfuzz.recipe.recipe import runnable
from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.trace.trace import LayerCall, Trace
from samples import recipes

PLAIN, ROWWISE = "torch.bf16", "torchao.float8.rowwise"
RECIPES = {n: able for n, r in recipes().items() if (able := runnable(r, "cpu"))}
MODES: tuple[Checkpoint, ...] = get_args(Checkpoint)
PLACES = [
    (name, mode)
    for name in COMPOSED
    for mode in MODES
    if (name, mode) != ("tied_embedding", "reentrant")  # token ids carry no gradient
]
#: A scheduled linear is watched as a model is.
SCHEDULED = {"linear": {"microbatches": 2}}


def spec_of(recipe: str, model: str, **changes: Any) -> Spec:
    fields = {"m": 16, "k": 32, "n": 48, "bias": recipe == PLAIN, "heads": 2}
    return Spec(recipe=recipe, model=model, **{**fields, **SCHEDULED.get(model, {}), **changes})


def ran(spec: Spec, mode: str, *, tap: bool = True, focus: int | None = None) -> Trace:
    recipe = RECIPES[spec.recipe]
    program = Program(spec, recipe, with_checkpoint(EAGER, mode))
    trace = program.run(tensors_of(Case(spec=spec, data=DataSpec(seed=5)), recipe), tap=tap,
                        focus=focus)  # fmt: skip
    assert trace.error is None, trace.error
    return trace


@cache
def tapped(recipe: str, model: str, mode: str) -> Trace:
    return ran(spec_of(recipe, model), mode)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("recipe", [PLAIN, ROWWISE])
@pytest.mark.parametrize(("model", "mode"), PLACES)
def test_watching_changes_no_bit(recipe: str, model: str, mode: str) -> None:
    seen, unseen = tapped(recipe, model, mode), ran(spec_of(recipe, model), mode, tap=False)
    assert set(seen.outputs) == set(unseen.outputs)
    for name, values in seen.outputs.items():
        assert same_bits(values, unseen.outputs[name]).all(), name
    assert bool(seen.calls) == bool(model != "own_forward" or recipe != PLAIN)
    assert not unseen.calls


@pytest.mark.parametrize("changes", [{"steps": 3, "optimizer": "adamw"}, {"batch": 2},
                                     {"grad_mode": "inference"}, {"lifecycle": "reload"},
                                     {"grad_layout": "expanded", "input_layout": "strided"}],
                         ids=lambda c: "-".join(c))  # fmt: skip
@pytest.mark.parametrize("model", ["linear", "llama_block", "hooked"])
def test_watching_changes_no_bit_of_any_schedule(model: str, changes: dict[str, Any]) -> None:
    spec = spec_of(PLAIN, model, **changes)
    seen, unseen = ran(spec, "none"), ran(spec, "none", tap=False)
    assert set(seen.outputs) == set(unseen.outputs)
    assert all(same_bits(t, unseen.outputs[name]).all() for name, t in seen.outputs.items())


def test_autocast_is_watched_without_a_change() -> None:
    spec = spec_of("torch.fp32", "mlp_gelu", dtype="fp32", autocast=True)
    seen, unseen = ran(spec, "none"), ran(spec, "none", tap=False)
    assert all(same_bits(t, unseen.outputs[name]).all() for name, t in seen.outputs.items())
    assert {call.dtype for call in seen.calls} == {"bf16"}


def names(model: str) -> tuple[str, ...]:
    """The linears of a model that have nn.Linear's own forward."""
    module = MODELS[model].build(spec_of(PLAIN, model), dtype=torch.float32, device="meta")  # type: ignore[index]
    return tuple(n for n in linear_names(module) if model != "own_forward")


CALLED = [name for name in COMPOSED if name != "own_forward"]


@pytest.mark.parametrize("model", CALLED)
def test_every_linear_is_seen_and_every_call_of_it(model: str) -> None:
    calls = [c for c in tapped(PLAIN, model, "none").calls if c.phase == "forward"]
    assert {c.module for c in calls} == set(names(model))
    times = 2 if model in ("used_twice", "linear") else 1
    for name in names(model):
        assert [c.index for c in calls if c.module == name] == list(range(times))


def reference(x: Any, y: Any, got: Any, bias: Any = None) -> None:
    """``got`` is x @ y^T (+ bias) in bf16 within bound 3.2, computed in float64."""
    a, b = x.astype(np.float64), y.astype(np.float64)
    gemm = GemmPlan(HIGH_PRECISION, HIGH_PRECISION, scale_roundings=0)
    radius = bounds.gemm_radius(a, b, gemm)
    centre = a @ b.T
    if bias is None:
        lo, hi = bounds.interval(centre, radius, gemm, "bf16")
    else:  # added before or after the product is rounded: two roundings of what is largest
        centre = centre + bias.astype(np.float64)
        reach = np.abs(centre) + np.abs(a) @ np.abs(b).T + np.abs(bias)
        slack = radius + 2 * FORMATS["bf16"].unit_roundoff * reach
        lo, hi = centre - slack, centre + slack
    assert bounds.contains(lo, hi, got).all()


def check(call: LayerCall) -> set[str]:
    """Hold every result of a call to the reference; returns which there were."""
    got, x, w = call.outputs, call.tensors["input"], call.tensors["weight"]
    reference(x, w, got["output"], call.tensors.get("bias"))
    if "grad_output" in call.tensors:
        g = call.tensors["grad_output"]
        if "grad_input" in got:
            reference(g, w.T, got["grad_input"])
        if "grad_weight" in got:
            reference(g.T, x.T, got["grad_weight"])
        if "grad_bias" in got:
            total = g.astype(np.float64).sum(axis=0)
            reach = np.abs(g.astype(np.float64)).sum(axis=0)
            assert (np.abs(got["grad_bias"] - total) <= 2.0**-7 * reach).all()
    return set(got)


#: The reentrant checkpoint runs a backward of its own through what it recomputed; the others put
#: what they recompute into the first graph.
WITH_GRADIENT = {m: "recompute" if m == "reentrant" else "forward" for m in MODES}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("model", "mode"), [p for p in PLACES if p[0] != "own_forward"])
def test_a_calls_results_follow_from_what_it_got(model: str, mode: str) -> None:
    """Not from what another call of the same module, or the same call's recompute, got."""
    calls = tapped(PLAIN, model, mode).calls
    for call in calls:
        check(call)
    backward = [c for c in calls if "grad_output" in c.tensors]
    assert {c.module for c in backward} == set(names(model))
    assert {c.phase for c in backward} == {WITH_GRADIENT[mode]}


@pytest.mark.parametrize("mode", MODES)
def test_the_input_gradient_reaches_every_layer_and_the_weights_those_that_train(mode: str) -> None:
    calls = [c for c in tapped(PLAIN, "frozen_first", mode).calls if "grad_output" in c.tensors]
    found = {c.module: check(c) for c in calls}
    assert found["first"] == {"output", "grad_input"}
    assert found["second"] == {"output", "grad_input", "grad_weight", "grad_bias"}


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_used_twice_has_no_weight_gradient_of_one_call(mode: str) -> None:
    """autograd adds both up before anybody may look."""
    calls = [c for c in tapped(PLAIN, "used_twice", mode).calls if "grad_output" in c.tensors]
    assert [(c.module, c.index) for c in calls] == [("proj", 0), ("proj", 1)]
    assert all("grad_weight" not in c.outputs and "grad_bias" not in c.outputs for c in calls)
    first, second = calls
    assert not np.array_equal(first.tensors["input"], second.tensors["input"])


def test_a_shared_weight_has_no_gradient_of_one_layer() -> None:
    calls = {c.module: c for c in tapped(PLAIN, "tied_embedding", "none").calls}
    assert "grad_weight" not in calls["head"].outputs
    assert "grad_weight" in calls["proj"].outputs


def test_each_microbatch_has_a_gradient_of_its_own() -> None:
    calls = tapped(PLAIN, "linear", "none").calls
    assert len(calls) == 2 and all("grad_weight" in c.outputs for c in calls)
    total = tapped(PLAIN, "linear", "none").outputs["proj.weight.grad"]
    parts = sum(c.outputs["grad_weight"].astype(np.float64) for c in calls)
    assert (np.abs(total - parts) <= 2.0**-8 * np.abs(parts) + 1e-30).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", [PLAIN, ROWWISE])
@pytest.mark.parametrize("mode", [m for m in MODES if m != "none"])
@pytest.mark.parametrize("model", ["mlp_swiglu", "two_blocks", "used_twice", "linear"])
def test_a_recomputed_call_repeats_a_forward_call(recipe: str, mode: str, model: str) -> None:
    calls = tapped(recipe, model, mode).calls
    forward = {(c.module, c.index): c for c in calls if c.phase == "forward"}
    again = {(c.module, c.index): c for c in calls if c.phase == "recompute"}
    assert set(forward) == set(again)
    for key, call in again.items():
        for name in ("input", "weight"):
            assert np.array_equal(call.tensors[name], forward[key].tensors[name]), (key, name)
        assert np.array_equal(call.outputs["output"], forward[key].outputs["output"]), key
        with_gradient = [c.phase for c in (forward[key], call) if "grad_output" in c.tensors]
        assert with_gradient == [WITH_GRADIENT[mode]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["mlp_gelu", "llama_block", "two_blocks", "used_twice"])
def test_the_gemms_of_a_call_are_its_own_though_a_recompute_interrupts_its_backward(
    model: str, mode: str
) -> None:
    """Operands name their call by their shapes and values: codes times 1/scale give the tensors."""
    calls = tapped(ROWWISE, model, mode).calls
    backward = [c for c in calls if "grad_output" in c.tensors]
    assert {c.module for c in backward} == set(names(model))
    for call in backward:
        roles = [s.site.role for s in call.sites]
        assert roles == ["output", "grad_input", "grad_weight"], (call.module, call.unobserved)
        x, w, g = (call.tensors[n] for n in ("input", "weight", "grad_output"))
        for site, (a, b) in zip(call.sites, ((x, w), (g, w.T), (g.T, x.T)), strict=True):
            assert close(site.a, a) and close(site.b, b), (call.module, site.site)


def close(seen: Any, values: Any) -> bool:
    """The operand is that tensor, but for the rounding to fp8."""
    from narrowfuzz.numerics.formats import decode

    shown = decode(seen.codes, FORMATS["e4m3fn"])
    if shown.shape != values.shape:
        return False
    scale = np.abs(values).max(axis=1, keepdims=True)
    factor = np.maximum(np.abs(shown).max(axis=1, keepdims=True), 1e-9)
    return bool((np.abs(shown / factor - values / np.maximum(scale, 1e-30)) < 0.2).all())


def test_the_check_of_operands_can_tell_two_calls_apart() -> None:
    calls = tapped(ROWWISE, "used_twice", "none").calls
    assert close(calls[0].sites[0].a, calls[0].tensors["input"])
    assert not close(calls[0].sites[0].a, calls[1].tensors["input"])


QUANTISED = sorted(name for name, r in RECIPES.items() if r.plan(Spec(recipe=name)).quantised)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("recipe", QUANTISED)
@pytest.mark.parametrize("focus", range(8))
def test_focus_limits_to_one_layer_in_turn(recipe: str, focus: int) -> None:
    """And that layer's GEMMs stay its own, though nobody watches the others'."""
    skip_without_backend(Spec(recipe=recipe))
    trace = ran(spec_of(recipe, "llama_block", m=32, n=64), "none", focus=focus)
    ordered = sorted(names("llama_block"))
    assert {c.module for c in trace.calls} == {ordered[focus % len(ordered)]}
    one = trace.calls[0]
    same = next(c for c in whole_block(recipe).calls if c.module == one.module)
    assert all(np.array_equal(same.outputs[n], t) for n, t in one.outputs.items())
    assert [s.site for s in one.sites] == [s.site for s in same.sites]
    assert len(one.sites) >= 1 and not one.unobserved
    for mine, theirs in zip(one.sites, same.sites, strict=True):
        for side in ("a", "b"):
            x, y = getattr(mine, side), getattr(theirs, side)
            seen = [(s.codes is not None, s.values is not None) for s in (x, y)]
            assert seen[0] == seen[1] != (False, False)
            assert np.array_equal(x.codes, y.codes) and np.array_equal(x.values, y.values)


@cache
def whole_block(recipe: str) -> Trace:
    return ran(spec_of(recipe, "llama_block", m=32, n=64), "none")


def test_a_linear_with_a_forward_of_its_own_is_no_linear_to_judge() -> None:
    model = MODELS["own_forward"].build(spec_of(PLAIN, "own_forward"), dtype=torch.float32,
                                        device="cpu")  # fmt: skip
    assert linear_names(model) == ("proj",)
    assert not is_linear(model.proj)
    patched = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    patched[0].forward = lambda x: x  # type: ignore[method-assign]
    assert [is_linear(linear) for linear in patched] == [False, True]


def test_nothing_stays_attached() -> None:
    model = MODELS["llama_block"].build(spec_of(PLAIN, "llama_block"), dtype=torch.float32,
                                        device="cpu")  # fmt: skip
    watch = LayerWatch(Training(model, model))
    with watch.recording():
        watch.follow(layers_of(model, linear_names(model), None))
        model(torch.zeros(4, 32))
    seen = len(watch.calls)
    model(torch.zeros(4, 32))
    assert len(watch.calls) == seen == 7
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())
