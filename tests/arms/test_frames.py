"""A frame belongs to a library wherever that library lies: installed, or a checkout on the path."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from traceback import extract_tb

import pytest
import torch
from narrowfuzz.arms.frames import in_libraries, module_of, of_the_model
from narrowfuzz.arms.operators import OperatorWatch
from narrowfuzz.arms.program import run_error
from narrowfuzz.trace.trace import message_of


def a_library(root: Path) -> Path:
    """A package whose function raises, in a folder that is on nobody's list."""
    package = root / "scaling" / "float9"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    file = package / "casts.py"
    file.write_text("def cast(x):\n    raise ValueError('no')\n")
    return file


def raised_in(file: Path, function: str) -> bool:
    """Does an error of this function count as one of the model's own code?"""
    names: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    try:
        names[function]("3")  # type: ignore[operator]
    except ValueError as error:
        return of_the_model(extract_tb(error.__traceback__))
    raise AssertionError("it has not raised")


def test_whose_code_has_raised(tmp_path: Path) -> None:
    """A user's file, a package that is not tested, or what these call of Python's own; not torch,
    whoever calls it."""
    (mine := tmp_path / "mine.py").write_text(
        "import json\ndef unpacks(x): y, z = x\ndef parses(x): json.loads('{')\n"
    )
    assert raised_in(mine, "unpacks") and raised_in(mine, "parses")
    assert raised_in(a_library(tmp_path), "cast")
    (torchs := tmp_path / "torch" / "optim.py").parent.mkdir()
    (torchs.parent / "__init__.py").touch()
    torchs.write_text("def step(x): raise ValueError(x)\n")
    assert not raised_in(torchs, "step")
    (mine := tmp_path / "narrowfuzz" / "mine.py").parent.mkdir()
    mine.write_text("def unpacks(x): y, z = x\n")
    assert raised_in(mine, "unpacks"), "a folder of that name is not our package"


@pytest.mark.parametrize("home", ["site-packages", "checkout", "deep/src"])
def test_a_crash_has_one_name_wherever_the_library_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    file = a_library(tmp_path / home)
    assert module_of(str(file)) == "scaling.float9.casts"
    source = compile(file.read_text(), str(file), "exec")
    names: dict[str, object] = {}
    exec(source, names)
    with pytest.raises(ValueError, match="no") as caught:
        names["cast"](1)  # type: ignore[operator]
    assert run_error(caught.value, "forward").where == "scaling.float9.casts.cast"


def test_what_is_ours_or_the_standard_librarys_is_no_library() -> None:
    for module in (json, textwrap, sys.modules["narrowfuzz.arms.frames"]):
        assert module_of(str(module.__file__)) == ""
    assert module_of(__file__) == "" and module_of("<string>") == ""
    assert module_of(torch.nn.functional.__file__) == "torch.nn.functional"


def test_an_error_that_no_library_raised_has_no_frame_of_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 4)
    assert in_libraries(list(extract_tb(caught.value.__traceback__))) == []
    assert run_error(caught.value, "forward").where == "?"


@pytest.mark.parametrize(
    ("fails", "where"),
    [
        (lambda: torch.nn.Linear(3, 2)(torch.ones(2, 4)), "torch.nn.modules.linear.forward"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 4), "?"),
    ],
)
def test_an_error_is_where_it_is_whether_or_not_kernels_are_watched(
    fails: Callable[[], object], where: str
) -> None:
    for watch in (nullcontext(), OperatorWatch()):
        with pytest.raises(RuntimeError) as caught, watch:
            fails()
        assert run_error(caught.value, "forward").where == where


def test_what_colours_a_terminal_is_no_part_of_a_message() -> None:
    said = "Weights only load failed, \x1b[1mdo those steps only if you trust it\x1b[0m\n\x07"
    error = ValueError(said)
    assert message_of(error) == "Weights only load failed, do those steps only if you trust it\n"
    assert run_error(error, "forward").message == message_of(error)
