"""Cures: where a case still diverges under one, the entry that names it explains nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.compiler_mitigations import without_slp_vectorizer
from narrowfuzz.ledger.ledger import Entry, Ledger, load_entries
from narrowfuzz.own_models import register
from narrowfuzz.plants.patching import attribute_replaced, float8_mm
from narrowfuzz.recipe.recipe import load_recipes
from test_ledger import FIELDS

CASE = Case(
    spec=Spec(recipe="torchao.float8.rowwise", backend="real", m=16, k=16, n=16), data=DataSpec()
)
ENTRY = msgspec.convert(FIELDS | {"recipes": ["*"], "matches": [{"fingerprints": ["*"]}]}, Entry)


def judged(monkeypatch: pytest.MonkeyPatch, gain_under_the_cure: float) -> Judgement:
    """A case whose products come out 3 % too large, and under the cure as much as is said."""
    gain = [1.03]

    @contextmanager
    def cure() -> Iterator[None]:
        usual, gain[0] = gain[0], gain_under_the_cure
        yield
        gain[0] = usual

    monkeypatch.setattr("narrowfuzz.judge.judge.CURES", {"it": cure})
    ledger = Ledger([msgspec.structs.replace(ENTRY, cure="it")])
    with float8_mm(lambda a, b, result, role: result * gain[0]):
        return Judge(load_recipes(), ledger, frozenset({"eager"})).judge(CASE)


def test_what_is_gone_under_the_cure_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    judgement = judged(monkeypatch, 1.0)
    assert not judgement.causes
    assert {verdict.explained_by for verdict in judgement.known} == {"an-entry"}


@pytest.mark.parametrize("gain", [1.03, 1.5, float("nan")])
def test_what_still_diverges_under_the_cure_is_a_finding(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = judged(monkeypatch, gain)
    assert judgement.causes and not judgement.known


def test_what_goes_away_by_itself_is_not_taken_for_cured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of as many multiplies as one judging makes, under a cure that does nothing."""
    monkeypatch.setattr("narrowfuzz.judge.judge.CURES", {"it": nullcontext})
    ledger = Ledger([msgspec.structs.replace(ENTRY, cure="it")])
    left = [10**6]

    def judgement() -> Judgement:
        def product(a: object, b: object, result: torch.Tensor, role: str) -> torch.Tensor:
            left[0] -= 1
            return result * 1.5 if left[0] >= 0 else result

        with float8_mm(product):
            return Judge(load_recipes(), ledger, frozenset({"eager"})).judge(CASE)

    monkeypatch.setattr("narrowfuzz.judge.judge._CURE_TRIES", 0)
    assert judgement().known, "asked no further, anything is cured"
    made = 10**6 - left[0]
    monkeypatch.undo()
    monkeypatch.setattr("narrowfuzz.judge.judge.CURES", {"it": nullcontext})
    left[0] = made
    found = judgement()
    assert found.causes and not found.known and left[0] < 0


def test_the_slp_vectorizer_is_switched_off_by_a_compiler_that_inductor_takes_for_gcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import _is_gcc

    real = tmp_path / "g++-of-here"
    real.write_text('#!/bin/sh\necho "$@"\n')
    real.chmod(0o755)
    monkeypatch.setenv("CXX", str(real))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    usual = config.cpp.cxx
    for _ in range(2):  # the script is written once, and stays
        with without_slp_vectorizer():
            script = config.cpp.cxx[1]
    assert config.cpp.cxx == usual and _is_gcc(script)
    ran = subprocess.run([script, "-O3", "a b.cpp"], capture_output=True, text=True, check=True)
    assert ran.stdout == "-O3 a b.cpp -fno-tree-slp-vectorize\n"
    monkeypatch.setenv("CXX", "/bin/echo")
    with without_slp_vectorizer():
        assert "/bin/echo" in Path(script).read_text(), "of the compiler that is asked for now"
    assert os.listdir(Path(script).parent) == ["g++"]


STORED_TWICE = """
import torch


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(32, 32, bias=False)

    def forward(self, x):
        y = self.proj(x)
        return y * y.amax(0) + y.amax(0, keepdim=True)


def build():
    return Twice().bfloat16(), torch.zeros(32, 32, dtype=torch.bfloat16)
"""


@pytest.fixture
def stored_twice(tmp_path: Path) -> Case:
    """A model that stores one reduction to two buffers, compiled."""
    (tmp_path / "twice.py").write_text(STORED_TWICE)
    (model,) = register(f"{tmp_path / 'twice.py'}:build")
    recipe = load_recipes()["torch.bf16"]
    spec = fixed(Spec(recipe=recipe.name, model=model.name, dtype="bf16"), recipe)
    return Case(spec=msgspec.structs.replace(spec, compile="inductor"), data=DataSpec())


def of_the_ledger(case: Case, id: str) -> Judgement:
    ledger = Ledger([entry for entry in load_entries() if entry.id == id])
    return Judge(load_recipes(), ledger, frozenset({"eager", "inductor"})).judge(case)


@pytest.mark.heavy
def test_a_reduction_that_is_stored_twice_is_known(stored_twice: Case) -> None:
    judgement = of_the_ledger(stored_twice, "inductor-reduction-stored-twice")
    assert not judgement.causes
    assert {v.explained_by for v in judgement.known} == {"inductor-reduction-stored-twice"}


@pytest.mark.heavy
def test_other_code_that_does_not_compile_is_not_taken_for_it(stored_twice: Case) -> None:
    """The same error in the same function: Inductor writes something else that is no C++."""
    from torch._inductor.codegen.cpp import CppVecKernel, DeferredLine

    def with_another_fault(usual: object) -> object:
        def store_reduction(self: CppVecKernel, name: str, index: object, value: object) -> None:
            self.reduction_suffix.writeline(DeferredLine(name, "planted planted;"))
            usual(self, name, index, value)  # type: ignore[operator]

        return store_reduction

    with attribute_replaced(CppVecKernel, "store_reduction", with_another_fault):
        judgement = of_the_ledger(stored_twice, "inductor-reduction-stored-twice")
    assert not judgement.known
    assert [v.symptom for v in judgement.causes] == [
        "fails only under compile (InductorError in _run_compile_cmd)"
    ]


def test_the_name_of_a_stored_reduction_is_its_own_and_the_cure_leaves_no_trace() -> None:
    from narrowfuzz.ledger.compiler_mitigations import a_name_for_each_stored_reduction
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppVecKernel

    usual, disabled = CppVecKernel.store_reduction, config.force_disable_caches
    with a_name_for_each_stored_reduction():
        assert CppVecKernel.store_reduction is not usual and config.force_disable_caches
    assert CppVecKernel.store_reduction is usual and config.force_disable_caches == disabled
