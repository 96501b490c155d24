"""The benchmark's plain tests: loud faults they find, quiet ones not, and they invent none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.float8  # noqa: F401  what forked tests start with
from kernels import needs_fp8
from narrowfuzz.plants.patching import attribute_replaced, float8_forward
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import builtin_faults

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import baselines
import plain_tests

_FLOAT8 = ("torchao.float8.rowwise",)


def _on(recipe: str, name: str) -> Plant:
    return replace(builtin_faults()[name], recipes=(recipe,))


@pytest.mark.heavy
def test_suite_finds_a_loud_fault() -> None:
    result = baselines.suite(_on(*_FLOAT8, "layer-gain"), 1.0, 1)
    assert result.found and not result.false_alarm
    assert "dB" in result.why


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("torchao.float8.rowwise", "state-half-loaded"),
        ("reference.delayed", "history-never-rolls"),
    ],
)
def test_suite_misses_a_state_fault(recipe: str, name: str) -> None:
    result = baselines.suite(_on(recipe, name), 1.0, 1)
    assert not result.found and not result.false_alarm
    assert result.cases


def test_suite_has_no_test_of_plain_torch() -> None:
    result = baselines.suite(_on("torch.bf16", "compiled-norm-in-bf16"), 1.0, 1)
    assert not result.found and result.why.startswith("not applicable")


@contextmanager
def _fatal() -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield


@pytest.mark.heavy
def test_a_process_that_dies_has_found_the_fault() -> None:
    fault = Plant("fatal", "crash", "", "", _FLOAT8, _fatal)
    result = baselines.suite(fault, 1.0, 1)
    assert result.found and "SIGKILL" in result.why


def test_a_test_that_fails_without_the_fault_finds_nothing() -> None:
    def alarmed(*_: Any) -> plain_tests.Outcome:
        return plain_tests.Outcome(1, "always")

    result = baselines._found(alarmed, _on(*_FLOAT8, "layer-gain"), 1.0, 1)
    assert result.false_alarm and not result.found


def test_planted_run_takes_the_cases_that_passed() -> None:
    seen = []

    def counts(recipes: Any, seconds: float, seed: int, most: int) -> plain_tests.Outcome:
        seen.append(most)
        return plain_tests.Outcome(7)

    # in this process: what a child notes down is lost
    with attribute_replaced(baselines, "_apart", lambda _: lambda work, *rest: work()):
        result = baselines._found(counts, _on(*_FLOAT8, "layer-gain"), 1.0, 1)
    assert seen == [plain_tests.MOST_EXAMPLES, 7] and result.cases == 7


@contextmanager
def _compiled_gain() -> Iterator[None]:
    def gain(forward: Any, layer: Any, x: Any) -> Any:
        out = forward(layer, x)
        return out * 1.25 if torch.compiler.is_compiling() else out

    with float8_forward(gain):
        yield


@pytest.mark.heavy
@needs_fp8
def test_hypothesis_finds_what_only_compiled_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # what is traced is wrong, whoever generates code from it
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    fault = Plant("compiled-gain", "gain", "", "", _FLOAT8, _compiled_gain)
    result = baselines.hypothesis(fault, 1.0, 1)
    assert result.found and not result.false_alarm
    assert "not close" in result.why


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param("torchao.float8.rowwise", marks=needs_fp8), "reference.delayed"]
)
def test_hypothesis_is_silent_without_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    outcome = baselines._without(plain_tests.compiled, (name,), 0.0, 1)
    assert outcome == plain_tests.Outcome(1)


def test_hypothesis_draws_the_same_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plain_tests, "_eager_and_compiled", lambda r, s, n: drawn.append((s, n)))
    recipes = [baselines._recipes()[_FLOAT8[0]]]
    plain_tests.compiled(recipes, 60.0, 3, 20)
    plain_tests.compiled(recipes, 60.0, 3, 5)
    assert len(drawn) == 25 and drawn[20:] == drawn[:5]
