"""The device of a run: names, GPUs that are not there, who gets which, and how it adds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from fresh import python
from hypothesis import given, settings
from narrowfuzz.arms.available import (
    approximate,
    keeps_generators,
    natives,
    on_ranks,
    options_on,
    unavailable,
)
from narrowfuzz.campaign import server
from narrowfuzz.case.arm import (
    EAGER_NATIVE,
    INDUCTOR,
    SHARDED,
    SHARDED_GRAPHS,
    SHARDED_PROCESSES,
    Arm,
)
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.sharded_specs import sharded_specs
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine import device, gpu
from narrowfuzz.machine.accumulator_probe import measure, measured
from narrowfuzz.machine.device import Device, choose, default_workers, forks, torch_name
from narrowfuzz.machine.gpu import ALL, NEEDED, Gpu, Gpus, problem
from narrowfuzz.numerics.accumulator import (
    CPU,
    HOPPER,
    HOPPER_FP8,
    UNKNOWN,
    Accumulator,
    MeasuredAccumulator,
    disagrees,
    reconciled,
    wider,
)
from narrowfuzz.play.watches import KernelWatch, let_rng_pass
from narrowfuzz.rules import BY_NAME as RULES
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.trace.trace import Seen
from samples import every_recipe

FREE = Gpu("H100", (9, 0), 79 * 2**30, 80 * 2**30)
TWO = Gpus("13.0", (FREE, FREE), driver="13.0")


@pytest.mark.parametrize(
    ("name", "found", "workers", "told"),
    [
        ("cuda", Gpus(""), 1, "built without CUDA"),
        ("cuda", Gpus("13.0", error="Found no NVIDIA driver"), 1, "no NVIDIA driver"),
        ("cuda", Gpus("13.0", error="The NVIDIA driver on your system is too old"), 1, "too old"),
        ("cuda", Gpus("13.0"), 1, "sees no GPU"),
        ("cuda:7", TWO, 1, "no such GPU, only cuda:0, cuda:1"),
        ("cuda:1", Gpus("13.0", (FREE, replace(FREE, free=2**28))), 1, "cuda:1 has 0.2 of 80.0"),
        ("cuda", Gpus("13.0", (replace(FREE, free=2 * NEEDED),)), 3, "3 workers on it need 4.5"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_a_sentence(
    name: str, found: Gpus, workers: int, told: str
) -> None:
    assert told in problem(name, found, workers)


@pytest.mark.parametrize(
    ("name", "workers"), [("cuda", 1), ("cuda", 8), ("cuda:0", 2), ("cuda:1", 2)]
)
def test_a_gpu_with_room_is_no_problem(name: str, workers: int) -> None:
    assert problem(name, TWO, workers) == ""


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], str]:
    for module in (device, gpu):
        monkeypatch.setattr(module, "ask", lambda: TWO)
    monkeypatch.delenv(ALL, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def visible(name: str, worker: int) -> str:
        choose(name, worker)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    return visible


def test_workers_share_the_gpus_one_each(visible: Callable[[str, int], str]) -> None:
    assert [visible("cuda", worker) for worker in range(4)] == ["0", "1", "0", "1"]
    assert visible("cuda:1", 0) == "1"
    assert default_workers("cuda") == 2 and default_workers("cuda:1") == 1


def test_workers_choose_among_the_gpus_that_the_user_made_visible(
    visible: Callable[[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible("cuda", 1) == "6"
    assert visible("cuda", 0) == "4"  # once more, in a process that has chosen
    assert visible("cuda:1", 0) == "6"


def test_the_cpu_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name in ("cpu", "simulated"):
        choose(name, 1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3" and forks(name)
    assert not forks("cuda:1") and torch_name("cuda:1") == torch_name("simulated") == "cuda"


def test_rungs_ask_for_what_their_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"gcc": "/bin/gcc"}.get
    monkeypatch.setattr("narrowfuzz.arms.available.shutil.which", there)
    monkeypatch.setattr("narrowfuzz.arms.available.importlib.util.find_spec", lambda name: None)
    assert "install g++" in unavailable(INDUCTOR, "cpu")
    assert "pip install triton" in unavailable(INDUCTOR, "cuda")
    monkeypatch.setattr("narrowfuzz.arms.available.importlib.util.find_spec", lambda name: name)
    assert not unavailable(INDUCTOR, "cuda:1")
    assert unavailable(EAGER_NATIVE, "cuda") and not natives({EAGER_NATIVE.name}, "cuda")


@pytest.mark.parametrize(
    ("arm", "device", "visible", "why"),
    [
        (SHARDED_PROCESSES, "cuda", "0,1", ""),
        (SHARDED_GRAPHS, "cuda:1", "4,6", ""),
        (SHARDED_PROCESSES, "cuda", "0", "a GPU for each rank, of at least two: there is 1"),
        (SHARDED, "cuda", "0,1", "threads are no ranks"),
        (SHARDED_PROCESSES, "simulated", "", "no simulated GPU"),
        (SHARDED, "cpu", "", ""),
        (SHARDED_PROCESSES, "cpu", "", ""),
    ],
)
def test_ranks_on_gpus_are_processes_that_have_one_each(
    monkeypatch: pytest.MonkeyPatch, arm: Arm, device: str, visible: str, why: str
) -> None:
    monkeypatch.setenv(ALL, visible)
    said = unavailable(arm, device)
    assert (why in said) if why else not said
    assert on_ranks({arm.name}, device) == (not why)


@given(sharded_specs([every_recipe()["torch.bf16"]], gpus=2))
@settings(max_examples=60)
def test_no_more_ranks_are_drawn_than_there_are_gpus(spec: Spec) -> None:
    assert 1 <= spec.sharding.ranks <= 2
    assert spec.sharding.processes or layout_of(spec).single_group


def test_this_cpu_adds_as_fp32() -> None:
    seen = measure("cpu")
    assert all(
        one.problem or (one.fraction_bits, one.nearest) == (23, True) for one in seen.values()
    )
    assert not seen["bf16"].problem and reconciled(CPU, seen) == CPU
    assert not Device(seen=seen).disagreements()
    cut = Device(seen={"bf16": replace(seen["bf16"], fraction_bits=10)})
    assert {*cut.disagreements()} == {"bf16"}
    assert "bf16 ACCUMULATES DIFFERENTLY THAN EXPECTED" in cut.profile()[-1]


def narrow(bits: int, *, cut: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A multiply whose sums keep so many fraction bits, one product after the other."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(a), len(b), dtype=torch.float64)
        for k in range(min(a.shape[1], 64)):
            total += torch.outer(a[:, k], b[:, k]).double()
            mantissa, exponent = torch.frexp(total)
            scaled = mantissa * 2.0 ** (bits + 1)
            total = torch.ldexp(scaled.trunc() if cut else scaled.round(), exponent - bits - 1)
        return total.float()

    return multiply


@pytest.mark.parametrize("bits", [8, 13, 19])
@pytest.mark.parametrize("cut", [True, False])
def test_a_narrower_accumulator_is_recognised(bits: int, cut: bool) -> None:
    seen = measured(narrow(bits, cut=cut))
    assert (seen.fraction_bits, seen.nearest) == (bits, not cut)
    assert f"{bits} fraction bits, 23 expected" in disagrees(CPU["bf16"], seen)
    used = wider(CPU["bf16"], seen)
    assert used.fraction_bits == bits and not used.ieee
    told = Device(seen={"bf16": seen}).profile()
    assert len(told) == 2 and "bf16 ACCUMULATES DIFFERENTLY THAN EXPECTED" in told[1]


@pytest.mark.parametrize(
    ("expected", "seen", "used"),
    [
        (HOPPER_FP8, MeasuredAccumulator(13, False, 128), HOPPER_FP8),
        (HOPPER_FP8, MeasuredAccumulator(13, False, None), HOPPER_FP8),  # nothing contradicts it
        (HOPPER_FP8, MeasuredAccumulator(23, True, None), HOPPER_FP8),  # better than expected
        (UNKNOWN, MeasuredAccumulator(13, False, 0), UNKNOWN),
        (HOPPER_FP8, MeasuredAccumulator(13, False, 64), HOPPER_FP8),
    ],
)  # fmt: skip
def test_what_agrees_with_the_table_leaves_it(
    expected: Accumulator, seen: MeasuredAccumulator, used: Accumulator
) -> None:
    assert wider(expected, seen) is used and disagrees(expected, seen) == ""


def test_what_was_not_measured_is_known_by_a_bound_only() -> None:
    used = reconciled(HOPPER, {"fp8": MeasuredAccumulator(problem="no such kernel")})
    assert used["fp8"] == replace(HOPPER_FP8, to_the_bit=False)
    rows = reconciled(HOPPER, {"fp8 rowwise": MeasuredAccumulator(problem="no such kernel")})
    assert rows["fp8"] is HOPPER_FP8  # where rows are not multiplied, nothing hangs on them


def test_sums_that_are_not_promoted_widen_the_table() -> None:
    used = reconciled(HOPPER, {"fp8 rowwise": MeasuredAccumulator(13, False, 0)})
    assert used["fp8"].promotes == 0 and used["fp8 fast"] == HOPPER["fp8 fast"]
    assert HOPPER["fp8"].to_the_bit and not used["fp8"].to_the_bit
    used = reconciled(HOPPER, {"fp8": MeasuredAccumulator(12, False, 128)})
    assert (used["fp8"].fraction_bits, used["fp8"].promotes) == (12, 128)


def test_the_strict_rung_divides_exactly_where_triton_would_not() -> None:
    strict, usual = BY_NAME["inductor_strict"], BY_NAME["inductor+checkpoint"]
    assert options_on(strict, "cpu") == {"emulate_precision_casts": True}
    assert options_on(strict, "cuda")["eager_numerics.division_rounding"] is True
    assert options_on(usual, "cuda") == {}
    assert approximate(strict, "cuda") and not approximate(EAGER_NATIVE, "cuda")
    assert approximate(usual, "cuda") and not approximate(strict, "cpu")
    assert not approximate(usual, "cpu")


def said_of(
    off: Callable[[Evidence, Seen], Seen], spec: Spec, approximates: bool
) -> dict[str, list[str]]:
    """What the rules of operands say where the first one that an eager run multiplies is off."""
    judge = Judge(every_recipe(), Ledger([]), frozenset({"eager"}))
    evidence = judge.observe(Case(spec=spec, data=DataSpec()), repeat=False)
    trace = evidence.traces["eager"]
    first, *others = trace.sites
    moved = replace(first, a=off(evidence, first.a))
    evidence.traces["eager"] = replace(trace, sites=(moved, *others))
    arms = frozenset({"eager"} if approximates else ())
    seen = replace(evidence, approximate=arms)
    return {name: [v.status for v in RULES[name].check(seen)] for name in ("O2", "O3")}


@pytest.mark.parametrize(
    ("error", "approximates", "status"),
    [(2.0**-23, True, "ok"), (2.0**-23, False, "diverged"), (2.0**-12, True, "diverged")],
)
def test_a_dequantised_value_may_be_as_far_off_as_an_approximate_division(
    error: float, approximates: bool, status: str
) -> None:
    def off(evidence: Evidence, seen: Seen) -> Seen:  # as a compiled graph shows it
        values = evidence.reference.values("output", "a") * (1.0 + error)
        return Seen(values=values.astype(np.float32))

    spec = Spec(recipe="torchao.float8.tensorwise", backend="emulated", m=32, k=32, n=32)
    found = said_of(off, spec, approximates)["O2"]
    assert status in found and (status == "diverged" or "diverged" not in found)


def test_graphs_of_a_gpu_keep_generators_of_their_own() -> None:
    selective = BY_NAME["aot_eager_decomp_partition+checkpoint_selective"]
    random = Spec(recipe="torch.bf16", model="dropout", checkpoint="selective")
    assert keeps_generators(selective, random, "cuda")
    assert not keeps_generators(selective, random, "cpu")
    assert not keeps_generators(selective, msgspec.structs.replace(random, model="linear"), "cuda")
    plain = BY_NAME["aot_eager_decomp_partition"]
    assert not keeps_generators(plain, random, "cuda")
    assert keeps_generators(plain, msgspec.structs.replace(random, memory_budget=50), "cuda")
    assert not keeps_generators(BY_NAME["eager+checkpoint_selective"], random, "cuda")


@pytest.mark.parametrize(
    ("units", "approximates", "status"),
    [(2, True, "ok"), (2, False, "diverged"), (40, True, "diverged"), (0, False, "ok")],
)
def test_a_scale_may_be_as_far_off_as_an_approximate_division(
    units: int, approximates: bool, status: str
) -> None:
    def off(evidence: Evidence, seen: Seen) -> Seen:
        scale = seen.scale
        for _ in range(units):
            scale = np.nextafter(scale, np.float32(np.inf))
        return replace(seen, scale=scale)

    spec = Spec(recipe="torchao.float8.rowwise", backend="emulated", m=16, k=32, n=16)
    found = said_of(off, spec, approximates)
    assert status in found["O3"] and (status == "diverged" or "diverged" not in found["O3"])
    assert ("inconclusive" in found["O2"]) is approximates


@pytest.mark.parametrize(("config", "number"), [({"workerid": "gw3"}, 3), (None, 0)])
def test_a_worker_of_xdist_has_the_gpu_of_its_number(config: Any, number: int) -> None:
    from narrowfuzz.plugin import _number

    told = SimpleNamespace() if config is None else SimpleNamespace(workerinput=config)
    assert _number(told) == number  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"]
)
def test_random_operators_that_are_recomputed_run_under_a_tap(name: str) -> None:
    from torch._prims import rng_prims

    let_rng_pass()
    operator = getattr(rng_prims, name)
    watch, bernoulli = KernelWatch(), torch.ops.aten.bernoulli.default
    args: tuple[Any, ...] = (bernoulli, torch.full((64,), 0.5))
    if name == "run_with_rng_state":
        args = (torch.get_rng_state(), *args)
    if name.startswith("graphsafe"):  # torch's own rule is reached: that one is CUDA's
        with (
            watch,
            pytest.raises((AssertionError, AttributeError), match=r"(?i)graphsafe|rng|device"),
        ):
            operator(*args, rng_state=None)
        return
    state = torch.get_rng_state()
    results = []
    for _ in range(2):
        torch.set_rng_state(state)
        with watch:
            results.append(operator(*args))
    first, again = (one if isinstance(one, tuple) else (one,) for one in results)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


SPY = """
import sys, torch
asked = []
def spied(name):
    original = getattr(torch.cuda, name)
    def spy(*args, **kwargs):
        asked.append(name)
        return original(*args, **kwargs)
    setattr(torch.cuda, name, spy)
for name in ("_lazy_init", "current_device", "get_device_capability", "get_device_properties"):
    spied(name)
torch.cuda.is_available = lambda: True
try:
    for name in sys.argv[1:]:
        __import__("narrowfuzz.campaign." + name)
except (AssertionError, RuntimeError):
    pass  # it asked for a GPU, and there is none
print(*asked)
"""


def preloaded(device: str) -> list[str]:
    """The modules that the server of forks imports before it makes the first one."""
    modules: list[str] = []
    context = SimpleNamespace(set_forkserver_preload=modules.extend)
    with (
        patch.object(server.mp, "get_context", lambda kind: context),
        patch.object(server.forkserver, "ensure_running"),
    ):
        server.start_server(device)
    return modules


@pytest.mark.heavy
def test_what_workers_on_gpus_are_forked_from_never_asks_for_cuda() -> None:
    def asked(*modules: str) -> list[str]:
        return python("-c", SPY, *modules).stdout.split()

    modules = [name.removeprefix("narrowfuzz.campaign.") for name in preloaded("cuda")]
    assert modules == ["preload", "worker"] and asked(*modules) == []
    assert asked("preload_torchao")  # what the guard is for


def test_workers_on_the_cpu_are_forked_with_torchao() -> None:
    assert "narrowfuzz.campaign.preload_torchao" in preloaded("simulated")


@pytest.mark.parametrize(
    ("device", "has_torch", "starts"),
    [
        ("cpu", False, True),
        ("simulated", False, True),
        ("cuda", False, False),
        ("cpu", True, False),
    ],
)
def test_the_fork_server_starts_early_where_that_saves_time_and_no_gpu_is_chosen_first(
    device: str, has_torch: bool, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    modules = {name: m for name, m in sys.modules.items() if has_torch or name != "torch"}
    monkeypatch.setattr(server, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(server, "prepare", lambda plant: done.append(f"prepare {plant}"))
    monkeypatch.setattr(server, "start_server", lambda device: done.append(f"start {device}"))
    server.start_early(device, "a-plant")
    assert done == (["prepare a-plant", f"start {device}"] if starts else [])
