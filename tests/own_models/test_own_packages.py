"""Models in packages, and in modules that a user's test has imported before: a script finds them in
a fresh process, under the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import narrowfuzz
import pytest
from fresh import python
from narrowfuzz.campaign import testing
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register, source_of
from narrowfuzz.play.own import imported
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.rules import BY_NAME
from narrowfuzz.triage.triage import triage
from own_models.test_own_models import HEAD, Own, case_of, own

__all__ = ["own"]
LAYERS = (
    HEAD
    + """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()
    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0].cos()
class Block(nn.Linear):
    def forward(self, x):
        return Scaled.apply(super().forward(x))
"""
)
BUILD = "def build(): return nn.Sequential(Block(32, 32)), torch.ones(32, 32)\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package ``mine_packed``, whose ``models.py`` imports its neighbour."""
    folder = tmp_path / "mine_packed"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "models.py").write_text(HEAD + "from .layers import Block\n" + BUILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [one for one in sys.modules if one.partition(".")[0] == "mine_packed"]:
        del sys.modules[name]


@pytest.mark.heavy
def test_a_script_finds_a_package_that_only_this_process_searches(
    package: Path, tmp_path: Path
) -> None:
    """As that of ``check package.module:build`` in its folder, or of a test of the package."""
    (model,) = register("mine_packed.models:build")
    assert model.name.startswith("mine_packed.models:build#")
    recipes = load_recipes()
    case = case_of(model, "torch.fp32", dtype="fp32")
    judge = Judge(recipes, Ledger([]), frozenset({"eager"}))
    (cause,) = judge.judge(case, (BY_NAME["O24"],)).causes
    assert "mine_packed.layers.Scaled" in str(cause)
    found = triage(judge, case, cause, seconds=0.0)
    assert found.confirmed, found.finding.why_suspected
    (script := tmp_path / "repro.py").write_text(found.script)
    python(script, cwd="/", env={"PYTHONPATH": None}, code=1)


def test_a_command_names_the_folder_of_a_package_that_it_would_not_search(package: Path) -> None:
    narrowfuzz.cases("mine_packed.models:build", ["torch.fp32"])
    named = f"{package}:mine_packed.models:build"
    assert named in testing._NAMED.values()
    sys.path.remove(str(package))
    assert source_of(named) == source_of("mine_packed.models:build")


def test_build_of_a_package_is_called_as_its_module_says(package: Path) -> None:
    build = importlib.import_module("mine_packed.models").build
    narrowfuzz.cases(build, ["torch.fp32"])
    assert [n for n in MODELS if "models:build" in n or "models.py:build" in n] == [
        f"mine_packed.models:build#{source_of('mine_packed.models:build').hash}"
    ]
    where = source_of("mine_packed.models:build").where
    assert where == f"{package}:mine_packed.models" and imported(where).build is build


def test_a_package_that_is_a_link_is_found_by_the_links_name(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := package / "links").mkdir()
    (there / "mine_linked").symlink_to(package / "mine_packed")
    monkeypatch.syspath_prepend(str(there))
    where = source_of("mine_linked.models:build").where
    del sys.modules["mine_linked"]
    assert where == f"{there}:mine_linked.models"


def test_an_installed_package_needs_no_folder() -> None:
    assert source_of("torch.nn.functional:linear").where == "torch.nn.functional"
    assert source_of("json.tool:main").where == "json.tool"


def test_a_file_of_a_package_is_refused_with_the_name_to_use(package: Path) -> None:
    with pytest.raises(ValueError, match=r"relative import.*: mine_packed.models:build$"):
        register(f"{package}/mine_packed/models.py:build")


def test_a_file_that_a_test_has_imported_is_not_executed_again(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy would have other names than in the script, and defining an operator of
    ``torch.library`` a second time raises."""
    monkeypatch.syspath_prepend(str(tmp_path))
    where, _, _ = own(LAYERS + BUILD, name="mine_imported.py").rpartition(":")
    before = importlib.import_module("mine_imported")
    assert imported(where) is before
    del sys.modules["mine_imported"]


def test_a_file_that_raised_raises_again(own: Own) -> None:
    """What it defined before must not pass for the module."""
    text = own(LAYERS + BUILD + "raise OSError('no data')", name="mine_raising.py")
    for _ in range(2):
        with pytest.raises(ValueError, match="importing it raised OSError: no data"):
            register(text)


def test_a_function_has_the_same_name_where_a_module_has_the_files_name(own: Own) -> None:
    """Its module is called otherwise there, but perhaps not in the script's process."""
    (model,) = register(own(LAYERS + BUILD, name="statistics.py"))
    judge = Judge(load_recipes(), Ledger([]), frozenset({"eager"}))
    case = case_of(model, "torch.fp32", dtype="fp32")
    (cause,) = judge.judge(case, (BY_NAME["O24"],)).causes
    assert "of statistics.Scaled" in str(cause)
