"""Dependencies point one way, and what must start fast loads nothing heavy."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from fresh import python

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT / "harness"
MODULES = {
    ".".join(path.relative_to(HARNESS).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HARNESS.rglob("*.py"))
    if "_content" not in path.parts
}
HEAVY = ("torch", "numpy", "hypothesis", "torchao")

#: The import packages that harness/ holds.
OURS = {"narrowfuzz", "narrowfuzz_watch", "te_on_cpu", "triton_on_cpu"}
#: Every package, in order: each may import those before it, and no other.
ORDER = (
    "te_on_cpu", "triton_on_cpu", "narrowfuzz_watch", "numerics", "play", "models", "case", "trace",
    "operators",
    "rules", "machine", "recipe", "watch", "draw", "arms", "ledger", "judge", "own_models",
    "plants", "triage", "report", "bisect", "explain", "campaign", "power", "cli", "plugin",
    "__main__",
)  # fmt: skip
#: What imports less than the order allows: scripts and users' processes take it as it is, and what
#: runs a case knows no rule and draws nothing.
ALONE = {
    "arms": {"numerics", "play", "models", "case", "trace", "operators", "machine", "recipe"},
    "te_on_cpu": set(),
    "triton_on_cpu": set(),
    "narrowfuzz_watch": set(),
    "numerics": set(),
    "play": {"te_on_cpu", "triton_on_cpu"},
}


#: Of narrowfuzz_watch, what only its parent process imports.
WATCH_PARENT = {
    f"narrowfuzz_watch.{name}"
    for name in (
        "address",
        "against",
        "command",
        "folder",
        "merge",
        "read",
        "records",
        "removals",
        "votes",
        "words",
    )
}


def imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            found |= {
                full if (full := f"{base}.{alias.name}") in MODULES else base
                for alias in node.names
            }
    return found


def full_name(package: str) -> str:
    """The import name of one of our packages or modules."""
    return package if package in OURS else f"narrowfuzz.{package}"


def package_of(module: str) -> str:
    """The package, or loose module, that one of our modules is in; "" for the package's face."""
    first, *rest = module.split(".")
    return first if first != "narrowfuzz" else next(iter(rest), "")


def of(package: str) -> list[str]:
    """The modules of one of our packages (or the one module of that name)."""
    name = full_name(package)
    return [module for module in MODULES if module == name or module.startswith(f"{name}.")]


def ours(module: str) -> set[str]:
    return {name for name in imports(MODULES[module]) if name.split(".")[0] in OURS}


def libraries(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(MODULES[module])} - OURS


def inside(name: str, package: str) -> bool:
    whole = full_name(package)
    return name == whole or name.startswith(f"{whole}.")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    allowed = {package, *ALONE.get(package, ORDER[: ORDER.index(package)])}
    wrong = [
        f"{module} imports {name}"
        for module in of(package)
        for name in ours(module)
        if name != "narrowfuzz" and not any(inside(name, other) for other in allowed)
    ]
    assert of(package) and not wrong


def test_every_package_has_a_place_in_the_order() -> None:
    assert {name for module in MODULES for name in [package_of(module)] if name} == {*ORDER}


@pytest.mark.parametrize("package", ["numerics", "case", "trace", "operators", "rules", "draw"])
def test_rules_and_data_never_import_torch(package: str) -> None:
    assert not [m for m in of(package) if {"torch", "torchao"} & libraries(m)]


def test_numerics_needs_numpy_and_the_standard_library_only() -> None:
    used = set().union(*(libraries(module) for module in of("numerics")))
    assert used - set(sys.stdlib_module_names) == {"numpy"}


@pytest.mark.parametrize(
    "module",
    [
        "narrowfuzz",
        "narrowfuzz.plants.plant",
        "narrowfuzz.cli",
        "narrowfuzz_watch",
        "narrowfuzz_watch.command",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}").isdisjoint(HEAVY)


def test_who_compares_two_installations_loads_neither() -> None:
    """It only starts the two, which have a core each."""
    loaded = loaded_after("import narrowfuzz.campaign.compare")
    assert loaded.isdisjoint({"torch", "torchao", "hypothesis"})


def test_what_runs_in_a_watched_command_needs_torch_and_the_standard_library_only() -> None:
    """It runs in the user's Python, which may lack what narrowfuzz depends on."""
    modules = [module for module in of("narrowfuzz_watch") if module not in (*WATCH_PARENT,)]
    used = set().union(*(libraries(module) for module in modules))
    assert used - set(sys.stdlib_module_names) == {"torch"}
    wrong = [
        f"{module} imports {name}"
        for module in modules
        if module != "narrowfuzz_watch"  # at the end of a block
        for name in ours(module)
        if name in WATCH_PARENT
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["te_on_cpu", "triton_on_cpu", "narrowfuzz_watch"])
def test_it_imports_nothing_else_of_ours(package: str) -> None:
    assert {name.split(".")[0] for module in of(package) for name in ours(module)} == {package}


def test_strategies_load_neither_torch_nor_arms_nor_rules() -> None:
    loaded = loaded_after("import narrowfuzz.case.data, narrowfuzz.draw.strategies")
    assert loaded.isdisjoint({"torch", "torchao", "narrowfuzz.arms", "narrowfuzz.rules"})


def test_rules_load_neither_torch_nor_arms() -> None:
    loaded = loaded_after("import narrowfuzz.rules")
    assert loaded.isdisjoint({"torch", "torchao", "narrowfuzz.arms", "narrowfuzz.judge.judge"})


def test_the_plugin_is_light_until_a_fixture_is_used() -> None:
    assert loaded_after("import narrowfuzz.plugin").isdisjoint({"torch", "torchao", "numpy"})


def loaded_after(statement: str) -> set[str]:
    """Modules a fresh interpreter holds after the statement."""
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(python("-c", code, cwd=ROOT).stdout.split())


@pytest.mark.parametrize(
    "script", sorted((ROOT / "reports/known").glob("*.py")), ids=lambda path: path.stem
)
def test_known_scripts_import_nothing_of_ours(script: Path) -> None:
    """But for what stands in for a GPU, of TransformerEngine or of Triton."""
    names = imports(script)
    emulates = any(name.split(".")[0] == "transformer_engine" for name in names)
    entry = script.with_name(script.name.split(".")[0] + ".toml")
    of_triton = "in Triton's interpreter" in entry.read_text()
    ours = {name for name in names if name.split(".")[0] in OURS}
    allowed = [
        name
        for name in ours
        if (emulates and inside(name, "te_on_cpu")) or (of_triton and inside(name, "triton_on_cpu"))
    ]
    assert ours <= set(allowed)


@pytest.mark.parametrize("folder", ["recipes", "properties"])
def test_content_files_import_no_content_files(folder: str) -> None:
    """recipes/ and properties/ are loaded by path and have no import name of their own."""
    for path in (ROOT / folder).glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"recipes", "properties"}
