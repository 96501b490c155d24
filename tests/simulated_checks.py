"""Checks of the simulated Hopper, run in a process of their own: it stays simulated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from narrowfuzz.case import Case, DataSpec, Spec
from narrowfuzz.device import enter
from narrowfuzz.environment import settle
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import Ledger
from narrowfuzz.numerics.accumulator import CPU, HOPPER, Accumulators
from narrowfuzz.recipe import load_recipes

settle()
DEVICE = enter("simulated")
SPECS = (
    Spec(recipe="torchao.float8.tensorwise", backend="real", m=32, k=64, n=32, dtype="fp32"),
    Spec(recipe="torchao.float8.rowwise", backend="real", m=32, k=256, n=16),
    Spec(recipe="torch.scaled_mm", backend="tensorwise", m=16, k=256, n=32, dtype="fp32"),
    Spec(recipe="torch.scaled_mm", backend="rowwise_v1", m=16, k=64, n=32),
)


def causes(spec: Spec, regime: str, table: Accumulators) -> set[str]:
    device = replace(DEVICE, accumulators=table)
    judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}), device=device)
    found: set[str] = set()
    for seed in range(3):
        judgement = judge.judge(Case(spec=spec, data=DataSpec(regime=regime, seed=seed)))  # type: ignore[arg-type]
        assert judgement.ran
        found |= {verdict.oracle for verdict in judgement.causes}
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


def check_unknown_accumulators_are_never_wrong() -> None:
    for spec in SPECS:
        assert not causes(spec, "wild", {}), spec


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
            assert "multiple of 16" in recipe.refusal(spec, DEVICE.torch)
            assert recipe.refusal(spec, "cpu") == ""


if __name__ == "__main__":
    checks: dict[str, Callable[[], None]] = {
        name: check for name, check in globals().items() if name.startswith("check_")
    }
    for name in sys.argv[1:] or checks:
        checks[name]()
        print(name, "holds")
