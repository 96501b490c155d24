"""Checks of the simulated Hopper, run in a process of their own: it stays simulated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle

import msgspec
import pytest
import torch
from narrowfuzz.arms.model_names import ties
from narrowfuzz.case.spec import Case, DataSpec, Gemm, ModelName, Regime, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.machine.device import enter
from narrowfuzz.machine.environment import settle
from narrowfuzz.machine.simulated_memory import waits
from narrowfuzz.models.catalog import COMPOSED
from narrowfuzz.numerics.accumulator import CPU, HOPPER, Accumulators
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.plants.hopper import PLANTS
from narrowfuzz.plants.registry import planted
from narrowfuzz.power.effect import digest, draw
from narrowfuzz.recipe.recipe import Recipe, load_every, load_recipes, runnable
from narrowfuzz.rules import BY_NAME as RULES
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import run_script

settle()
DEVICE = enter("simulated")
SPECS = (
    Spec(recipe="torchao.float8.tensorwise", backend="real", m=32, k=64, n=32, dtype="fp32"),
    Spec(recipe="torchao.float8.rowwise", backend="real", m=32, k=256, n=16),
    Spec(recipe="torch.scaled_mm", backend="tensorwise", m=16, k=256, n=32, dtype="fp32"),
    Spec(recipe="torch.scaled_mm", backend="rowwise_v1", m=16, k=64, n=32),
)
#: Four tiles in the sums of each GEMM in turn; the shapes split K of some of them.
TALL = {"output": {"k": 512}, "grad_input": {"n": 512}, "grad_weight": {"m": 512}}
#: What a fault shows on, where it is no ladder: recipe, regime and the rule that sees it.
OTHERWISE: dict[str, tuple[str, Regime, str]] = {
    "hopper-product-lost": ("torchao.float8.tensorwise", "wild", "O15"),
    "hopper-scales-exchanged": ("torchao.float8.rowwise", "wild", "O5"),
}


def causes(
    spec: Spec, regime: Regime, table: Accumulators, gemm: Gemm = "output", seeds: int = 3
) -> set[str]:
    device = replace(DEVICE, accumulators=table)
    judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=device)
    found: set[str] = set()
    for seed in range(seeds):
        data = DataSpec(regime=regime, gemm=gemm, seed=seed)
        judgement = judge.judge(Case(spec=spec, data=data))
        assert judgement.ran
        found |= {verdict.rule for verdict in judgement.causes}
    return found


def check_the_device_is_cuda_and_a_hopper() -> None:
    assert (DEVICE.name, DEVICE.torch) == ("simulated", "cuda")
    assert DEVICE.accumulators == HOPPER
    assert torch.cuda.is_available() and torch.ones(2, device="cuda").is_cuda


def check_what_it_multiplies_is_within_hoppers_bounds_and_not_in_fp32s() -> None:
    for spec in SPECS:
        assert not causes(spec, "wild", HOPPER), spec
        assert causes(spec, "wild", CPU) & {"O5", "O15"}, spec


def check_lattices_are_exact() -> None:
    for spec in SPECS:
        assert not causes(spec, "lattice", HOPPER), spec


def check_ladders_are_what_hopper_adds_and_not_what_fp32_does() -> None:
    for spec in SPECS:
        for gemm in ROLES:
            tall = msgspec.structs.replace(spec, **TALL[gemm])
            assert not causes(tall, "ladder", HOPPER, gemm, 1), (tall, gemm)
            told = causes(tall, "ladder", CPU, gemm, 1)
            assert told & {"O5", "O15", "O23"}, (tall, gemm)


def check_every_fault_is_seen_while_it_is_planted() -> None:
    for fault in (p for p in PLANTS if not p.legal):
        of_ladder: tuple[str, Regime, str] = ("torchao.float8.tensorwise", "ladder", "O23")
        recipe, regime, rule = OTHERWISE.get(fault.id, of_ladder)
        judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=DEVICE)
        rules, data = [RULES[rule]], DataSpec(regime=regime, gemm="grad_input")
        cases = [  # of which one splits K
            Case(
                spec=Spec(recipe=recipe, backend="real", m=m, k=32, n=512, dtype="fp32"), data=data
            )
            for m in (16, 32)
        ]
        with fault.plant():
            assert any(judge.judge(case, rules).causes for case in cases), fault.id
        assert not any(judge.judge(case, rules).causes for case in cases), fault.id


def check_what_is_lost_with_a_ladder_is_seen_by_it_alone() -> None:
    """Bounds leave room for these: no rule sees them on ordinary data."""
    alone = {"hopper-never-promotes", "hopper-promotes-early", "hopper-bit-less",
             "hopper-aligns-to-nearest", "hopper-parts-in-bf16"}  # fmt: skip
    spec = Spec(recipe="torchao.float8.tensorwise", backend="real", m=16, k=32, n=512, dtype="bf16")
    for fault in (p for p in PLANTS if not p.legal):
        with fault.plant():
            assert fault.id not in alone or not causes(spec, "wild", HOPPER), fault.id


def check_unknown_accumulators_are_never_wrong() -> None:
    for spec in SPECS:
        assert not causes(spec, "wild", {}), spec
        assert not causes(spec, "ladder", {}), spec


def check_autocast_is_on_where_the_gpus_is() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() == torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled()


def check_it_rejects_what_cuda_rejects() -> None:
    def rejects(rows: int, inner: int, columns: int, dtype: torch.dtype, told: str) -> None:
        a = torch.ones(rows, inner).to(dtype)
        b = torch.ones(columns, inner).to(dtype).t()
        one = torch.tensor(1.0)
        with pytest.raises((RuntimeError, ValueError), match=told):
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rejects(16, 24, 16, e4m3, "divisible by 16")
    rejects(16, 16, 24, e4m3, "divisible by 16")
    rejects(16, 16, 16, e5m2, "two Float8_e5m2")


def check_recipes_state_the_rule() -> None:
    for recipe in load_recipes().values():
        if recipe.name.startswith("torchao.float8"):
            spec = Spec(recipe=recipe.name, backend="real", m=24)
            assert "multiple of 16" in recipe.refusal(spec, DEVICE.torch)
            assert recipe.refusal(spec, "cpu") == ""


def check_only_what_was_copied_to_the_host_becomes_numpy() -> None:
    t = torch.ones(3)
    with pytest.raises(TypeError, match="Use Tensor"):
        t.numpy()
    assert (t.bfloat16().cpu().float().cpu().numpy() == 1).all()
    assert t.cpu()[1:].numpy().shape == (2,)
    assert torch.ones(3, 0).half().cpu().numpy().shape == (3, 0)


def small(recipe: Recipe, model: ModelName = "linear") -> Case:
    spec = Spec(
        recipe=recipe.name, backend=recipe.backends[-1], model=model, m=32, k=64, n=64, heads=2,
        dtype=recipe.dtypes[0], batch=2,
    )  # fmt: skip
    return Case(spec=spec, data=DataSpec(seed=1))


def able() -> list[Recipe]:
    found = [runnable(recipe, DEVICE.torch) for recipe in load_recipes().values()]
    return [recipe for recipe in found if recipe is not None]


def check_every_recipe_and_model_runs_and_reads_the_device_by_copies_only() -> None:
    judge = Judge(load_recipes(), load_ledger(device="cpu"), frozenset({"eager"}), device=DEVICE)
    assert len(able()) >= 10
    others = cycle(able())  # each model with the next one
    pairs = [(recipe, "linear") for recipe in able()]
    pairs += [(next(others), model) for model in COMPOSED for _ in range(2)]
    for recipe, model in pairs:
        case = small(recipe, model)
        assert not recipe.refusal(case.spec, DEVICE.torch)
        judgement = judge.judge(case)
        told = [verdict.sentence() for verdict in judgement.causes]
        assert judgement.ran and not told, (recipe.name, model, told)


def check_a_linear_waits_for_the_device_four_times() -> None:
    for recipe in able():
        judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=DEVICE)
        case = small(recipe)
        judge.judge(case, [RULES["O1"], RULES["O2"], RULES["O5"]])  # builds it
        waits.clear()
        judge.judge(case, [RULES["O1"], RULES["O2"], RULES["O5"]])
        ours = waits["cpu"] + waits["synchronize"]
        assert ours <= 4, (recipe.name, waits)


def check_schedules_run() -> None:
    recipes = load_every()
    recipe = recipes["reference.delayed"]
    judge = Judge(recipes, Ledger([]), device=DEVICE)
    for case in draw([recipe], 8):
        assert not judge.judge(case).causes


def check_a_finding_has_a_script_that_shows_it_on_the_device() -> None:
    recipes = load_recipes()
    judge = Judge(recipes, Ledger([]), frozenset({"eager"}), device=DEVICE)
    plant = ("", "gemm-gain")
    scripts = partial(run_script, device=DEVICE.name)
    for case in (small(recipes["torchao.float8.rowwise"]),
                 small(recipes["torchao.float8.rowwise"], "mlp_swiglu")):  # fmt: skip
        with planted(*plant):
            (cause, *_) = judge.judge(case).causes
            found = triage(judge, case, cause, seconds=5.0, plant=plant, scripts=scripts)
        assert found.confirmed, found.finding.why_suspected
        assert found.finding.device == "simulated" and "cuda" in found.script


def check_what_the_ledger_knows_of_cuda_hides_nothing_else() -> None:
    ledger = load_ledger(device=DEVICE.torch)
    judge = Judge(load_recipes(), ledger, frozenset({"eager"}), device=DEVICE)
    spec = Spec(recipe="torchao.float8.tensorwise", backend="real", m=17, k=32, n=32)
    case, entry = Case(spec=spec, data=DataSpec()), "float8-cuda-shape-refusals"
    judgement = judge.judge(case)
    assert {v.explained_by for v in judgement.known} == {entry} and not judgement.causes
    neighbour = Case(spec=msgspec.structs.replace(spec, m=32), data=DataSpec())
    assert not judge.judge(neighbour).known
    with planted("", "backward-unsupported"):
        causes = judge.judge(neighbour).causes
    assert [verdict.symptom for verdict in causes] and not judge.judge(neighbour).causes
    with planted("", "backward-unsupported"):  # in the entry's own case it dies for another reason
        assert judge.judge(case).causes


def check_tied_weights_stay_tied() -> None:
    """Models are asked on the device "meta", by a context that knows torch's own factories."""
    spec = Spec(recipe="torch.fp32", model="tied_embedding", m=1, k=1, n=1)
    assert ties(spec) == {"head.weight": "embedding.weight"}
    judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=DEVICE)
    assert not judge.judge(Case(spec=spec, data=DataSpec())).causes


def check_a_backward_in_a_thread_of_its_own_is_seen_alike() -> None:
    """As CUDA's is: autograd runs it in a thread of the device."""
    recipes, plain = load_recipes(), torch.Tensor.backward

    def elsewhere(t: torch.Tensor, *args: object, **kwargs: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(plain, t, *args, **kwargs).result()

    for name in ("torch.bf16", "torchao.float8.rowwise", "torchao.mxfp8.rceil"):
        for model in ("linear", "mlp_swiglu"):
            judge = Judge(recipes, Ledger([]), frozenset({"eager"}), device=DEVICE)
            case = small(recipes[name], model)  # type: ignore[arg-type]
            here = digest(judge.run_arms(case))
            torch.Tensor.backward = elsewhere  # type: ignore[method-assign, assignment]
            try:
                there = digest(judge.run_arms(case))
            finally:
                torch.Tensor.backward = plain  # type: ignore[method-assign]
            assert here == there, (name, model)


if __name__ == "__main__":
    checks: dict[str, Callable[[], None]] = {
        name: check for name, check in globals().items() if name.startswith("check_")
    }
    for name in sys.argv[1:] or checks:
        checks[name]()
        print(name, "holds")
