"""``cases`` and ``check``: a user's own model in the user's own tests."""

from __future__ import annotations

from pathlib import Path

import narrowfuzz
import pytest
from draws import ONCE
from fresh import python
from hypothesis import given, settings
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


def build_here() -> None:
    """In the file that asks for its cases."""


@pytest.mark.parametrize(
    ("model", "recipes", "says"),
    [
        ("no_such.py:build", (), "there is no file no_such.py"),
        (lambda: None, (), "is no function of a file"),
        (build_here, (), "into a file of its own"),
        (f"{EXAMPLES / 'llama.py'}:block", ("torch.fp23",), "did you mean 'torch.fp32'?"),
        (f"{EXAMPLES / 'llama.py'}:block", ("te.delayed",), "unknown recipe 'te.delayed'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    model: object, recipes: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        narrowfuzz.cases(model, recipes)  # type: ignore[arg-type]
    assert says in str(caught.value)
