"""``cases`` and ``check``: a user's own model in the user's own tests."""

from __future__ import annotations

import re
from pathlib import Path

import narrowfuzz
import pytest
from draws import ONCE
from fresh import python
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from own_models.test_own_models import ANOTHER_IN_RECOMPUTE, EXAMPLES, HEAD


def test_a_sound_model_passes_on_drawn_cases() -> None:
    block = narrowfuzz.cases(f"{EXAMPLES / 'llama.py'}:block", ["torchao.float8.tensorwise"])
    seen = []

    @settings(ONCE, max_examples=3)
    @given(block)
    def passes(case: narrowfuzz.Case) -> None:
        assert case.spec.model.startswith("llama.py:block#")
        assert (case.spec.tokens, case.spec.k) == (64, 64)
        narrowfuzz.check(case)
        seen.append(case)

    passes()
    assert len(seen) == 3


TEST = """
from hypothesis import Phase, given, settings
from mine import build
from narrowfuzz import cases, check
@settings(max_examples=12, phases=[Phase.generate], deadline=None, database=None, derandomize=True)
@given(cases(build))
def test_mine(case):
    check(case, seconds=3)
"""


@pytest.mark.heavy
def test_a_bug_of_ones_own_fails_with_its_layer_and_a_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + ANOTHER_IN_RECOMPUTE)
    (tmp_path / "test_mine.py").write_text(TEST)
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    ran = python(*pytest, cwd=tmp_path, seconds=200, code=1)
    scripts = sorted((tmp_path / "narrowfuzz-runs" / "pytest" / "findings").glob("*/repro.py"))
    assert scripts and any(str(s.relative_to(tmp_path)) in ran.stdout for s in scripts), ran.stdout
    assert "model." in ran.stdout and "smallest example:" in ran.stdout
    (replay, *_) = re.findall("replay: narrowfuzz (replay .*)", ran.stdout)
    assert replay.endswith(f"--model {tmp_path / 'mine.py'}:build")
    python("-m", "narrowfuzz", *replay.split(), cwd=tmp_path, seconds=100, code=1)


def build_here() -> None:
    """In the file that asks for its cases."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model", "recipes", "says"),
    [
        ("no_such.py:build", (), "there is no file no_such.py"),
        (lambda: None, (), "is no function of a file"),
        (build_here, (), "into a file of its own"),
        ((1, 2), (), "the model is a tuple: give the function that builds it, without calling it"),
        (f"{EXAMPLES / 'llama.py'}:block", "torch.fp23", "did you mean 'torch.fp32'?"),
        (f"{EXAMPLES / 'llama.py'}:block", ("torch.fp23",), "did you mean 'torch.fp32'?"),
        (f"{EXAMPLES / 'llama.py'}:block", ("te.delayed",), "unknown recipe 'te.delayed'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    model: object, recipes: str | tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        narrowfuzz.cases(model, recipes)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_compiler_that_does_not_exist_is_refused_before_any_case_is_drawn() -> None:
    with pytest.raises(ValueError, match="did you mean 'inductor'"):
        narrowfuzz.cases(f"{EXAMPLES / 'llama.py'}:block", compile="inducto")  # type: ignore[arg-type]


def test_what_is_no_case_is_not_checked() -> None:
    with pytest.raises(ValueError, match="takes a case that"):
        narrowfuzz.check(build_here)  # type: ignore[arg-type]


@pytest.mark.heavy
def test_a_test_whose_cases_all_stop_does_not_pass(tmp_path: Path) -> None:
    (file := tmp_path / "narrow.py").write_text(
        HEAD + "def build(): return nn.Sequential(nn.Linear(40, 40)), torch.ones(24, 40)\n"
    )
    refused = narrowfuzz.cases(f"{file}:build", "torchao.mxfp8.rceil", files=[])

    @settings(ONCE, max_examples=2, suppress_health_check=list(HealthCheck))
    @given(refused)
    def passes(case: narrowfuzz.Case) -> None:
        narrowfuzz.check(case)

    says = r"nothing of a case of narrow.py:build with torchao.mxfp8.rceil was checked: known issue"
    with pytest.warns(UserWarning, match=says), pytest.raises(Unsatisfiable):
        passes()
