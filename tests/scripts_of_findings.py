"""What must hold of every script of a finding."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import planted
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.script.ranks import of_ranks
from narrowfuzz.triage.verify import RunScript

Plant = tuple[str, str]


def standing_alone(text: str) -> ast.Module:
    """Its syntax: it compiles, says by its exit code what it saw, and imports nothing of ours."""
    tree = ast.parse(text)
    compile(tree, "repro.py", "exec")
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= {*sys.stdlib_module_names, "torch", "torchao"}
    assert "sys.exit(" in text
    return tree


def assert_shows(run: RunScript, path: Path, plant: Plant, without: Plant | None = None) -> str:
    """It shows what is planted, and without that it says that nothing is wrong: in these words."""
    planted, clean = run(path, plant=plant), run(path, plant=without)
    assert planted.shown, planted
    assert clean.code == 0, clean
    return clean.output


def script_on_ranks(shown: Case, fault: str, recipe: Recipe, folder: Path) -> Path:
    """The script of what a case on ranks shows first, where a fault is planted."""
    with planted("", fault):
        verdict = Judge({recipe.name: recipe}, Ledger([])).judge(shown).causes[0]
    text = write_played_script(of_ranks(shown, verdict, recipe, tensors_of(shown, recipe)))
    (path := folder / "repro.py").write_text(text)
    return path
