"""O26: gradients are clipped by the norm of all of them, in one process and on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.numerics.formats import F32, FORMATS
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules.clipping import clipped, norm_between, unscaled
from narrowfuzz.rules.expected import outside
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.verify import RunScript
from samples import recipes

INFINITE = Spike("grad_output", row=0, col=3, bits="0x7f800000")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def judge() -> Judge:
    return Judge(recipes(), Ledger([]))


def case(recipe: str, spikes: tuple[Spike, ...] = (), **fields: Any) -> Case:
    dtype = "fp32" if recipe == "torch.fp32" else "bf16"
    return Case(spec=Spec(recipe=recipe, dtype=dtype, **{"steps": 3, **fields}),
                data=DataSpec(seed=5, spikes=spikes))  # fmt: skip


def statuses(judged: Any) -> set[tuple[str, str, str]]:
    return {(v.rule, v.role, v.status) for v in judged.verdicts}


def gradients(kind: str, dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    large = 3e4 if dtype == "fp16" else 1e30
    size = {"huge": large, "tiny": 1e-7 if dtype == "fp16" else 1e-39, "small": 2.0**-12}.get(kind)
    found = [
        torch.randn(shape, generator=generator).mul(size or 1.0).to(DTYPES[dtype])
        for shape in ((33, 17), (64,), (1,))
    ]
    if kind in ("inf", "nan"):
        found[0][3, 5] = float(kind)
    return found


@pytest.mark.parametrize("order", [2.0, np.inf])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", ["plain", "small", "huge", "tiny", "inf", "nan"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_clips_within_the_bound(dtype: str, kind: str, foreach: bool, order: float) -> None:
    """And what is told of it is known of most elements: a bound of everything is none."""
    before = gradients(kind, dtype)
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in before]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad.clone()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0, order, foreach=foreach))
    fmt, arrays = FORMATS[dtype], [g.float().numpy() for g in before]
    if kind in ("plain", "small") or (order == np.inf and kind in ("huge", "tiny")):
        lo, hi = norm_between([unscaled(x, 1.0, fmt) for x in arrays], dtype, 1, 1, order)
        assert lo <= norm <= hi <= 1.1 * lo
    for parameter, x in zip(parameters, arrays, strict=True):
        assert parameter.grad is not None
        may = clipped(*unscaled(x, 1.0, fmt), norm, fmt)
        got: F32 = parameter.grad.float().numpy()
        assert not outside(may, got).any() and not may.unknown.any()
        wrong = np.where(np.isfinite(got), got * 1.25 + 2 * fmt.min_normal, 0.0)
        assert outside(may, wrong.astype(np.float32)).all()


def test_a_norm_that_is_subnormal_is_rounded_by_half_of_the_smallest() -> None:
    smallest = FORMATS["fp16"].min_subnormal
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.full((2,), smallest, dtype=torch.float16)
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], 1.0))
    assert norm == smallest  # of 1.41 times it
    grads = [unscaled(parameter.grad.float().numpy(), 1.0, FORMATS["fp16"])]
    lo, hi = norm_between(grads, "fp16", 1, 1)
    assert lo <= norm <= hi < 6.0 * smallest


def test_a_gradient_that_need_not_be_clipped_stays_as_it_is() -> None:
    x = np.float32([0.125, -0.25, 2.0**-149])
    may = clipped(*unscaled(x, 1.0, FORMATS["fp32"]), 0.5, FORMATS["fp32"])
    assert np.array_equal(may.lo, x) and np.array_equal(may.hi, x)


@pytest.mark.parametrize("scaling", ["none", "grad_scaler"])
@pytest.mark.parametrize("clipping", ["norm", "norm_inf", "value"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam_fused", "adagrad_foreach"])
@pytest.mark.one_in(9)
def test_clipped_trainings_are_silent(optimizer: str, clipping: str, scaling: str) -> None:
    for spikes in ((), (INFINITE,)):
        drawn = case(
            "torch.fp32",
            spikes,
            model="mlp_gelu",
            optimizer=optimizer,
            clipping=clipping,
            loss_scaling=scaling,
        )
        judged = judge().judge(drawn)
        assert not judged.causes, [str(v.sentence()) for v in judged.causes]
        assert ("O26", "clipped", "ok") in statuses(judged)
        if clipping != "value" and not spikes:
            assert ("O26", "norm", "ok") in statuses(judged)
        if scaling != "none":
            assert ("R29", "output", "ok") in statuses(judged)


@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        ("clips-what-is-scaled", {"clipping": "norm", "loss_scaling": "grad_scaler"}),
        ("clipped-by-part-of-the-norm", {"clipping": "norm_inf", "model": "mlp_gelu"}),
    ],
)
def test_a_wrong_norm_has_a_script(fault: str, fields: dict[str, Any], scripts: RunScript) -> None:
    drawn, own = case("torch.fp32", **fields), judge()
    with builtin_faults()[fault].plant():
        verdict = next(v for v in own.judge(drawn).causes if v.rule == "O26")
        proof = proven(own, drawn, verdict, ("", fault), scripts)
    assert not proof.why, f"{proof.why}\n{proof.output}"


LAYOUTS: list[dict[str, Any]] = [
    {"data": 1}, {"data": 3}, {"tensor": 2}, {"data": 2, "tensor": 2},
    {"data": 2, "resumes": "same"}, {"data": 3, "resumes": "fewer"},
    {"data": 2, "resumes": "alone"}, {"data": 4, "experts": 2, "forces_sums": True},
]  # fmt: skip


@pytest.mark.parametrize("clipping", ["norm", "norm_inf"])
@pytest.mark.parametrize("sharding", LAYOUTS, ids=str)
@pytest.mark.one_in(8)
def test_ranks_clip_by_the_norm_of_the_whole(sharding: dict[str, Any], clipping: str) -> None:
    experts = {"model": "chosen_experts", "m": 64} if "experts" in sharding else {"m": 96}
    for spikes in ((), (INFINITE,)):
        drawn = case(
            "torch.bf16",
            spikes,
            sharding=Sharding(**sharding),
            clipping=clipping,
            loss_scaling="grad_scaler",
            optimizer="adamw",
            **experts,
        )
        judged = judge().judge(drawn)
        assert not judged.causes, [str(v.sentence()) for v in judged.causes]
        found = statuses(judged)
        assert ("O26", "clipped", "ok") in found and ("S14", "loss_scale", "ok") in found
        ranks = judge().run_arms(drawn)["sharded"].ranks
        # of those that are left behind the scale of the first step is the last
        scales = {float(ranks[0].outputs["loss_scale"])}
        assert scales == ({128.0} if spikes else {8192.0})


def test_a_rank_without_a_part_of_a_gradient_is_known_not_to_clip() -> None:
    drawn = case("torch.fp32", sharding=Sharding(data=2), n=1, m=96, clipping="norm_inf")
    judged = Judge(recipes(), load_ledger()).judge(drawn)
    assert not judged.causes
    assert {v.explained_by for v in judged.known} == {"clip-norm-inf-empty-shard"}


def test_the_largest_of_no_gradients_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of no inputs has no largest gradient, and torch says so. Others are reported."""
    nothing = case("torch.fp32", m=1, k=0, n=1, clipping="norm_inf")
    judged = judge().judge(nothing)
    assert ("contract", "backward", "ok") in statuses(judged) and not judged.causes

    def norm(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("numel() == 0")

    monkeypatch.setattr(torch.nn.utils.clip_grad, "_get_total_norm", norm)
    (verdict,) = judge().judge(nothing).causes
    assert verdict.symptom.startswith("unclear refusal of an empty dimension")
