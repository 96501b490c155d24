"""Cures: where a case still diverges under one, the entry that names it explains nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import eq
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.spec import Case, DataSpec, Dtype, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.compiler_mitigations import (
    alpha_in_patterns,
    gradients_with_the_strides_of_eager,
    without_slp_vectorizer,
)
from narrowfuzz.ledger.ledger import Entry, Ledger, load_entries
from narrowfuzz.own_models import register
from narrowfuzz.plants.patching import attribute_replaced, float8_mm
from neighbours import compiled_exponentials_halved
from samples import every_recipe
from test_ledger import FIELDS
from torch._decomp import meta_table
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

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
        return Judge(every_recipe(), ledger, frozenset({"eager"})).judge(CASE)


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
            return Judge(every_recipe(), ledger, frozenset({"eager"})).judge(CASE)

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


def compiled(file: Path, source: str, by: Compile, dtype: Dtype = "fp32") -> Case:
    """The model of a source, compiled."""
    file.write_text(source)
    (model,) = register(f"{file}:build")
    recipe = every_recipe()[f"torch.{dtype}"]
    spec = fixed(Spec(recipe=recipe.name, model=model.name, dtype=dtype), recipe)
    return Case(spec=msgspec.structs.replace(spec, compile=by), data=DataSpec())


@pytest.fixture
def stored_twice(tmp_path: Path) -> Case:
    """A model that stores one reduction to two buffers, compiled."""
    return compiled(tmp_path / "twice.py", STORED_TWICE, "inductor", "bf16")


def of_the_ledger(case: Case, id: str) -> Judgement:
    ledger = Ledger([entry for entry in load_entries() if entry.id == id])
    return Judge(every_recipe(), ledger, frozenset({"eager", case.spec.compile})).judge(case)


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


AVERAGED = """
import torch


class Averaged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(32, 32, bias=False)
        self.register_buffer("average", torch.ones(32, 32))

    def forward(self, x):
        y = self.proj(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.T @ y, alpha=0.1)
        return y.tanh().exp()


def build():
    return Averaged(), torch.zeros(32, 32)
"""


@pytest.fixture
def averaged(tmp_path: Path) -> Case:
    """A model with a moving average of a product, compiled."""
    return compiled(tmp_path / "averaged.py", AVERAGED, "inductor")


@pytest.mark.heavy
def test_a_product_that_is_added_without_its_alpha_is_known(averaged: Case) -> None:
    judgement = of_the_ledger(averaged, "inductor-alpha-dropped")
    assert not judgement.causes
    assert {v.explained_by for v in judgement.known} == {"inductor-alpha-dropped"}


@pytest.mark.heavy
def test_other_wrong_numbers_are_not_taken_for_a_dropped_alpha(averaged: Case) -> None:
    with compiled_exponentials_halved():
        judgement = of_the_ledger(averaged, "inductor-alpha-dropped")
    assert judgement.causes and not judgement.known


ACTIVATED = """
import torch


class Activated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 16)).transpose(0, 1) for f in (self.q, self.k))
        q, k = torch.nn.functional.elu(q), torch.nn.functional.gelu(k)
        return (q.cumsum(1) * k.cumsum(1)).transpose(0, 1).flatten(-2)


def build():
    return Activated(), torch.zeros(32, 32)
"""


@pytest.fixture
def activated(tmp_path: Path) -> Case:
    """A model with activations of transposed views, compiled."""
    return compiled(tmp_path / "activated.py", ACTIVATED, "aot_eager")


@contextmanager
def gelu_traced_with_other_strides() -> Iterator[None]:
    """Traced, the gradient of GELU has the strides of its input."""

    def traced(mode: Any, operator: object, grad: Any, x: Any, **how: object) -> Any:
        with mode:
            return x + grad

    gelu = {torch.ops.aten.gelu_backward.default: traced}
    with (
        patch.dict(op_implementations_dict, gelu),
        patch.dict(meta_table, gelu),
        patch.object(FakeTensorMode, "cache", {}),
    ):
        yield


@pytest.mark.heavy
def test_an_activation_that_is_traced_with_other_strides_is_known(activated: Case) -> None:
    judgement = of_the_ledger(activated, "aot-eager-gradient-strides")
    assert not judgement.causes
    assert {v.explained_by for v in judgement.known} == {"aot-eager-gradient-strides"}


@pytest.mark.heavy
def test_other_strides_that_are_traced_wrongly_are_not_taken_for_it(activated: Case) -> None:
    """The same error in the same function, of an operator that the cure does not mend."""
    with gelu_traced_with_other_strides():
        judgement = of_the_ledger(activated, "aot-eager-gradient-strides")
    assert not judgement.known
    assert [v.symptom for v in judgement.causes] == [
        "fails only under compile (RuntimeError in __call__)"
    ]


def test_patterns_heed_alpha_and_the_cure_leaves_no_trace() -> None:
    from torch._inductor.pattern_matcher import Arg, CallFunction, Match

    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(aten.add.Tensor, (x, x))
    once = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 1})
    scaled = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2})
    pattern = CallFunction(aten.add.Tensor, Arg(), Arg())

    def matched() -> list[bool]:
        found = [pattern.match(node) for node in (plain, once, scaled)]
        return [isinstance(one, Match) for one in found]

    with alpha_in_patterns():
        assert matched() == [True, True, False]
    assert matched() == [True, True, True]


def test_gradients_are_traced_with_the_strides_of_their_kernels_under_the_cure() -> None:
    aten = torch.ops.aten
    gradient, x = torch.ones(2, 3, 4), torch.ones(3, 2, 4).transpose(0, 1)
    calls = [
        lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
        lambda g, x: aten.hardsigmoid_backward(g, x),
        lambda g, x: aten.hardswish_backward(g, x),
        lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0),
        lambda g, x: aten.logit_backward(g, x),
        lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
        lambda g, x: aten.huber_loss_backward(g, x, x, 0, 1.0),
        lambda g, x: aten.mse_loss_backward(g, x, x, 0),
        lambda g, x: aten.smooth_l1_loss_backward(g, x, x, 0, 1.0),
    ]

    def traced() -> list[tuple[int, ...]]:
        with FakeTensorMode() as mode:
            given = mode.from_tensor(gradient), mode.from_tensor(x)
            return [call(*given).stride() for call in calls]

    kernels = [call(gradient, x).stride() for call in calls]
    before = traced()
    with gradients_with_the_strides_of_eager():
        assert traced() == kernels
    assert traced() == before
    assert not any(map(eq, before, kernels))
