"""Checks of the state that TransformerEngine 2.x keeps between steps, on the emulated extension."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from te_on_cpu.v2_releases import (
    installed_release,
)
from te_on_cpu_v2_checks import (
    BF16,
    KINDS,
    REENTRANT,
    assert_gemms,
    delayed,
    each_recipe,
    fresh,  # noqa: F401 - a fixture that each check uses
    linear,
    step,
    wrapped,
)
from te_on_cpu_v2_older import Manager, autocast
from te_on_cpu_v2_reference import Seen
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformer_engine.common import recipe as recipes


@REENTRANT
@pytest.mark.parametrize("unfused", ["0", "1"])
def check_delayed_scales(reentrant, unfused, monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
    module, scales = te.Linear(64, 64, params_dtype=BF16), []
    for i in range(3):
        x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
        gradient = torch.full((32, 64), i + 1.0, dtype=BF16)
        step(module, delayed(), x, gradient, wrapped(reentrant))
        scales.append(module.fp8_meta["scaling_bwd"].scale[0].item())
    torch.testing.assert_close(scales, [57344.0, 28672.0, 57344.0 / 3])


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [448.0 / 4, 448.0 / 4, 448.0 / 4]),
        ({"amax_compute_algo": "most_recent"}, [448.0 / 4, 448.0 / 2, 448.0]),
        ({"margin": 2}, [28.0, 28.0, 28.0]),
        ({"amax_history_len": 1}, [448.0 / 4, 448.0 / 2, 448.0]),
        ({"amax_compute_algo": lambda history: history[0] * 2}, [56.0, 112.0, 224.0]),
        ({"scaling_factor_compute_algo": lambda amax, scale, top, recipe: top / amax}, [112.0] * 3),
    ],
)
def check_delayed_options(options, want):
    module, scales = te.Linear(64, 64, params_dtype=BF16), []
    for largest in (4.0, 2.0, 1.0):
        x = torch.full((32, 64), largest, dtype=BF16, requires_grad=True)
        step(module, delayed(**options), x, torch.ones(32, 64, dtype=BF16))
        scales.append(module.fp8_meta["scaling_fwd"].scale[0].item())
    assert scales == want


def check_update_leaves_idle_slots_alone():
    history, scale = torch.tensor([[0.0, 2.0], [3.0, 1.0], [5.0, 7.0]]), torch.tensor([9.0, 9.0])
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([0.0, 2.0]), [history], [scale], "max", tex.DType.kFloat8E4M3, 0
    )
    assert history.tolist() == [[0.0, 0.0], [3.0, 7.0], [5.0, 2.0]]
    assert scale.tolist() == [9.0, 64.0]


@each_recipe
@REENTRANT
def check_checkpoint_repeats_the_forward(recipe, reentrant):
    """Recomputed or not: same output, same gradients, same state."""
    torch.manual_seed(3)
    xs, module = torch.randn(3, 32, 64, dtype=BF16), linear()
    twin = linear()
    twin.load_state_dict(module.state_dict())
    for x in xs:
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        gradient = torch.randn(32, 32, dtype=BF16)
        plain = step(module, recipe(), leaf, gradient)
        again = step(twin, recipe(), other, gradient, wrapped(reentrant))
        assert torch.equal(plain, again) and torch.equal(leaf.grad, other.grad)
        assert torch.equal(module.weight.grad, twin.weight.grad)
    state = getattr(Manager, "quantization_state", Manager)
    assert not any(state.fp8_tensors_recompute_buffer)


@each_recipe
def check_evaluation_changes_no_state(recipe):
    module, x = linear(), torch.randn(32, 64, dtype=BF16)
    step(module, recipe(), x.clone().requires_grad_(), torch.randn(32, 32, dtype=BF16))
    before = {k: v for k, v in module.state_dict().items() if "extra" not in k}
    with torch.no_grad(), autocast(enabled=True, recipe=recipe()):
        first, second = module(x), module.eval()(x)
    assert torch.equal(first, second)
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    with torch.no_grad(), Seen() as seen, autocast(enabled=True, recipe=recipe()):
        module(x)
    assert not seen.updates


@each_recipe
def check_cached_weight_is_cast_once(recipe):
    module = linear()
    with Seen() as seen:
        for first in (True, False, False):
            x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
            step(module, recipe(), x, torch.randn(32, 32, dtype=BF16), is_first_microbatch=first)
    sides = 2 if KINDS[recipe] in ("mx", "fp4") else 1
    weights = [
        cast
        for cast in seen.casts
        if cast.input.shape == (32, 64) and cast.format in ("e4m3", "e2m1")
    ]
    assert sum(torch.equal(cast.input, module.weight) for cast in weights) == sides
    assert_gemms(seen, [module.bias] * 3)


@each_recipe
def check_save_and_load(recipe, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    module, twin = linear(), linear()
    for _ in range(2):
        x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
        step(module, recipe(), x, torch.randn(32, 32, dtype=BF16))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=False))
    x = torch.randn(32, 64, dtype=BF16)
    results = []
    for each in (module, twin):
        leaf = x.clone().requires_grad_()
        y = step(each, recipe(), leaf, torch.ones(32, 32, dtype=BF16))
        results.append((y, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def check_models_do_not_mix():
    """Two models, their own recipes, in turns: as if each were alone."""

    def train(modules):
        torch.manual_seed(5)
        for i in range(4):
            x = torch.randn(32, 64, dtype=BF16, requires_grad=True) * (i + 1)
            for module, recipe in modules:
                step(module, recipe, x.detach().requires_grad_(), torch.ones(32, 32, dtype=BF16))

    alone, beside, other = linear(), linear(), linear()
    beside.load_state_dict(alone.state_dict())
    train([(alone, delayed())])
    Manager.reset()
    train([(beside, delayed()), (other, delayed(margin=1))])
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(alone.fp8_meta[key].scale, beside.fp8_meta[key].scale)
        assert torch.equal(alone.fp8_meta[key].amax_history, beside.fp8_meta[key].amax_history)


def spike_scales(checkpointed):
    module = te.Linear(64, 64, params_dtype=BF16)
    wrap, scales = wrapped(True) if checkpointed else None, []
    for i in range(6):
        x = torch.full((32, 64), 30.5 if i == 1 else 3.453, dtype=BF16, requires_grad=True)
        step(module, delayed(amax_history_len=8), x, torch.ones(32, 64, dtype=BF16), wrap)
        scales.append(module.fp8_meta["scaling_fwd"].scale[0].item())
    return scales


def check_known_duplicate_updates(monkeypatch):
    """TE PR 3213: checkpointing updates twice a step; unfused, the spike is forgotten early."""
    assert spike_scales(False) == spike_scales(True)
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    plain, checkpointed = spike_scales(False), spike_scales(True)
    assert plain[5] == pytest.approx(14.69, rel=1e-3)
    assert checkpointed[5] == pytest.approx(129.74, rel=1e-3)


def check_known_update_counts():
    """Two bulk updates a step; checkpointed three, one of them repeated."""
    for reentrant, count in ((None, 2), (True, 3), (False, 3)):
        Manager.reset()
        module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
        with Seen() as seen:
            step(module, delayed(), x, torch.ones(32, 32, dtype=BF16), wrapped(reentrant))
        assert len(seen.updates) == count


def check_known_calibration():
    """calibrating=True sees nothing of a Linear and breaks GELU, whose product is quantised without
    a region: until 2.11 the next product fails, since then its calibration; other activations are
    seen. Until 2.7 no LayerNormMLP has a quantizer to calibrate."""
    x = torch.randn(32, 64, dtype=BF16)
    swiglu = te.LayerNormMLP(64, 64, params_dtype=BF16, activation="swiglu")
    if installed_release() < (2, 8):
        none = pytest.raises(AttributeError, match="no attribute 'calibrate'")
        with none, autocast(enabled=False, calibrating=True, recipe=delayed()):
            swiglu(x)
        return
    for module, calibrated in ((linear(), False), (swiglu, True)):
        with autocast(enabled=False, calibrating=True, recipe=delayed()):
            module(x)
        assert module.fp8_meta["scaling_fwd"].amax_history.any().item() == calibrated
    breaks = (
        pytest.raises(AttributeError, match="aminmax")
        if installed_release() >= (2, 12)
        else pytest.raises(RuntimeError, match="same kind of scaling")
    )
    with breaks, autocast(enabled=False, calibrating=True, recipe=delayed()):
        te.LayerNormMLP(64, 64, params_dtype=BF16, activation="gelu")(x)


def check_known_autocast_inside_checkpoint():
    """TE PR 3284: with the autocast opened inside, forward scales never move; until 2.18 it
    fails."""
    module = te.Linear(64, 64, params_dtype=BF16)

    def inside(module, x):
        with autocast(enabled=True, recipe=delayed()):
            return module(x)

    fails = pytest.raises(KeyError, match="fwd_recompute")
    for _ in range(3):
        x = torch.full((32, 64), 4.0, dtype=BF16, requires_grad=True)
        with nullcontext() if installed_release() >= (2, 19) else fails:
            te.checkpoint(inside, module, x, use_reentrant=True).sum().backward()
    if installed_release() < (2, 19):
        return
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == 1.0
    assert module.fp8_meta["scaling_bwd"].scale[0].item() != 1.0


@pytest.mark.parametrize("reentrant", [True, False])
def check_known_torch_checkpoint(reentrant):
    """torch's own checkpoint recomputes outside the autocast: in bf16, or with an error."""
    module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with Seen() as seen:
        if reentrant:
            step(
                module,
                delayed(),
                x,
                torch.ones(32, 32, dtype=BF16),
                wrapped(True, torch_checkpoint),
            )
            assert [g.a.format for g in seen.gemms] == ["e4m3", "bf16", "bf16", "bf16"]
        else:
            with pytest.raises(torch.utils.checkpoint.CheckpointError):
                step(
                    module,
                    delayed(),
                    x,
                    torch.ones(32, 32, dtype=BF16),
                    wrapped(False, torch_checkpoint),
                )


@pytest.mark.parametrize("reentrant", [True, False])
def check_torch_checkpoint_inside(reentrant):
    """With the autocast inside, torch's checkpoint recomputes in FP8."""
    module, x = linear(), torch.randn(32, 64, dtype=BF16, requires_grad=True)

    def inside(x):
        with autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
            return module(x)

    with Seen() as seen:
        torch_checkpoint(inside, x, use_reentrant=reentrant).sum().backward()
    assert [g.layout for g in seen.gemms] == ["TN", "TN", "NN", "NT"]
    assert torch.equal(seen.gemms[0].result, seen.gemms[1].result)
    assert_gemms(seen, [module.bias] * 2)
