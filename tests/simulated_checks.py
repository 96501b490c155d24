"""Checks of the simulated Hopper, run in a process of their own: it stays simulated."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
import pytest
import torch
from narrowfuzz.case import Case, DataSpec, Gemm, Regime, Spec
from narrowfuzz.device import accumulators, enter
from narrowfuzz.environment import settle
from narrowfuzz.faults.hopper import FAULTS
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import Ledger
from narrowfuzz.numerics.accumulator import CPU, HOPPER, Accumulators
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.oracles import BY_NAME
from narrowfuzz.recipe import load_recipes

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
    judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=DEVICE)
    assert judge.accumulators is HOPPER
    judge.accumulators = table
    found: set[str] = set()
    for seed in range(seeds):
        data = DataSpec(regime=regime, gemm=gemm, seed=seed)
        judgement = judge.judge(Case(spec=spec, data=data))
        assert judgement.ran
        found |= {verdict.oracle for verdict in judgement.causes}
    return found


def check_the_device_is_cuda_and_a_hopper() -> None:
    assert DEVICE == "cuda" and accumulators(DEVICE) is HOPPER
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
    for fault in FAULTS:
        of_ladder: tuple[str, Regime, str] = ("torchao.float8.tensorwise", "ladder", "O23")
        recipe, regime, rule = OTHERWISE.get(fault.id, of_ladder)
        judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=DEVICE)
        rules, data = [BY_NAME[rule]], DataSpec(regime=regime, gemm="grad_input")
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
    for fault in FAULTS:
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
        with pytest.raises(RuntimeError, match=told):
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rejects(16, 24, 16, e4m3, "divisible by 16")
    rejects(16, 16, 24, e4m3, "divisible by 16")
    rejects(16, 16, 16, e5m2, "two Float8_e5m2")


def check_recipes_state_the_rule() -> None:
    for recipe in load_recipes().values():
        if recipe.name.startswith("torchao.float8"):
            spec = Spec(recipe=recipe.name, backend="real", m=24)
            assert "multiple of 16" in recipe.refusal(spec, DEVICE)
            assert recipe.refusal(spec, "cpu") == ""


if __name__ == "__main__":
    checks: dict[str, Callable[[], None]] = {
        name: check for name, check in globals().items() if name.startswith("check_")
    }
    for name in sys.argv[1:] or checks:
        checks[name]()
        print(name, "holds")
