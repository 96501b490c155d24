"""What the machine is: probed, and what a CPU lacks is no finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh import python
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.machine import Machine, compiler, lacking_kernel, machine
from narrowfuzz.recipe.recipe import obstacles
from samples import every_recipe

LACK = "could not create a primitive descriptor for the matmul primitive. Run workload with"


def without_fp8() -> Machine:
    here = machine()
    lacks = {**here.lacks, "fp8": LACK}
    return Machine(here.cpu, here.onednn, {**here.kernels, "fp8": ""}, lacks)


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which nothing multiplies FP8 with one scale a tensor."""
    import torch

    multiply = torch._scaled_mm

    def refuse(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *rest: object, **kw: object):
        if x.numel() == 1:
            raise RuntimeError(f"{LACK}\nmore")
        return multiply(a, b, x, *rest, **kw)

    monkeypatch.setattr("narrowfuzz.machine.machine.machine", without_fp8)
    monkeypatch.setattr(torch, "_scaled_mm", refuse)


def test_the_probe_names_what_multiplies() -> None:
    here = machine()
    assert set(here.kernels) == {"fp32", "bf16", "fp8", "fp8_rowwise"}
    assert here.kernels["fp32"] and here.kernels["bf16"]
    assert all(kind in here.kernels for kind in here.lacks)


def test_an_error_that_ordinary_multiplies_do_not_raise_is_a_claim() -> None:
    assert lacking_kernel("the kernel is wrong") == ""


def test_what_a_cpu_lacks_is_unavailable_with_the_reason(
    lacking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no kernel of this CPU multiplies fp8" in lacking_kernel(f"{LACK}\nmore")
    recipe = every_recipe()["torch.scaled_mm"]
    monkeypatch.setitem(recipe.unavailable.__globals__, "machine", without_fp8)
    reasons = obstacles(recipe, "cpu")
    tensorwise = {"tensorwise", "tensorwise_v1"}
    assert tensorwise <= set(reasons)
    assert machine().without("fp8_rowwise") or set(reasons) == tensorwise
    assert all("could not create a primitive" in reasons[backend] for backend in tensorwise)


def test_of_an_assertion_inside_torch_its_own_words_are_told() -> None:
    error = (
        'a.numel() == 1 INTERNAL ASSERT FAILED at "a.cpp":5, please report a bug to PyTorch. '
        "One scale a tensor only."
    )
    here = Machine((), "", {"fp8_rowwise": ""}, {"fp8_rowwise": error})
    assert here.without("fp8_rowwise") == "this CPU has no kernel: One scale a tensor only"


def test_a_shape_that_a_cpu_lacks_is_never_a_finding(lacking: None) -> None:
    """One row and one column leave one scale each: the rowwise layer meets the missing kernel."""
    spec = Spec(recipe="torch.scaled_mm", backend="rowwise_v1", m=1, k=16, n=1)
    judgement = Judge(every_recipe(), Ledger([])).judge(Case(spec=spec, data=DataSpec()))
    assert not judgement.causes and not judgement.ran
    said = {v.why for v in judgement.verdicts if v.status == "inconclusive"}
    assert any("no kernel of this CPU" in reason for reason in said)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX512_CORE_BF16", "AVX2"])
def test_a_limited_onednn_is_seen(isa: str) -> None:
    code = "from narrowfuzz.machine.machine import machine; print(machine().kernels['bf16'])"
    assert "amx" not in python("-c", code, env={"ONEDNN_MAX_CPU_ISA": isa}).stdout


def compiler_of(cxx: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", str(cxx))
    compiler.cache_clear()
    try:
        return machine().compiler
    finally:
        compiler.cache_clear()


@pytest.mark.parametrize(
    ("names", "tunes", "expected"),
    [
        ("g++ (Debian) 12.2.0", "  -mtune=    generic", "g++ 12.2.0 -mtune=generic"),
        ("g++ (Debian) 12.2.0", "", "g++ 12.2.0"),
        ("Debian clang version 12.2.0", "", "clang 12.2.0"),
    ],
)
def test_what_compiles_is_named(
    names: str, tunes: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = tmp_path / "cxx"
    cxx.write_text(
        f"""#!/bin/sh
case "$1" in
  --version) echo '{names}' ;;
  -dumpfullversion) echo 12.2.0 ;;
  *) echo '{tunes}' ;;
esac
"""
    )
    cxx.chmod(0o755)
    assert compiler_of(cxx, monkeypatch) == expected


def test_a_machine_without_a_compiler_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler_of(tmp_path / "nothing", monkeypatch) == ""
    assert compiler_of(Path("/bin/false"), monkeypatch) == ""


GROWTH = """
import os, sys, torch
from pathlib import Path
from narrowfuzz.machine.environment import settle
torch.set_num_threads(1)
if sys.argv[1] == "settled":
    settle()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
for _ in range(8):  # glibc by itself maps no block of this size from here on
    torch.empty(7 * 2**20).fill_(0.0)
before, pins = resident(), []
for _ in range(40):
    large = torch.zeros(3200000)
    pins.append(torch.zeros(500))
    other = large.abs()
    pins.append(torch.zeros(3000))
    del large, other
print((resident() - before) // 2**20)
"""


@pytest.mark.heavy
def test_large_blocks_are_given_back() -> None:
    """Small blocks live between them: glibc below 2.38 would not use them again, and grows by
    three quarters of a gigabyte here."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("nothing here says how much memory is in use")
    assert int(python("-c", GROWTH, "settled").stdout.split()[-1]) < 64
