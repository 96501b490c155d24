"""What must hold of every script of a finding."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

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
