"""Dependencies point one way, and what must start fast loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT / "harness"
MODULES = {
    ".".join(path.relative_to(HARNESS).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HARNESS.rglob("*.py"))
    if "_content" not in path.parts
}
HEAVY = ("torch", "numpy", "hypothesis", "torchao")

#: What a package or module may import of ours: itself, and the ones named here.
LOW = {
    "address",
    "case",
    "content",
    "expect",
    "meaning",
    "verdict",
    "numerics",
    "plants.plant",
    "machine",
}
LOW |= {"arm", "catalog", "severity"}
#: The import packages that harness/ holds.
OURS = {"narrowfuzz", "te_on_cpu"}
DATA = LOW | {
    "schedule",
    "stateful",
    "moments",
    "trace",
    "recipe",
    "data",
    "specs",
    "strategies",
    "ledger",
    "environment",
    "policy",
    "event_data",
    "trainings",
    "sharding",
    "sharded_specs",
}
JUDGED = DATA | {
    "play",
    "models",
    "arms",
    "oracles",
    "fold",
    "judge",
    "observe_library",
    "device",
    "programs",
}
MAY_IMPORT = {
    "numerics": set(),
    "address": set(),
    "expect": {"address"},
    "meaning": {"address", "expect", "numerics"},
    "play": set(),
    "catalog": {"play"},
    "older_cases": {"catalog", "schedule.events"},
    "case": {"catalog", "older_cases", "schedule.events"},
    "arm": {"case"},
    "choices": set(),
    "schedule": {"case", "catalog", "choices"},
    "stateful": {"case", "numerics", "schedule"},
    "content": {"__init__"},
    "verdict": {"address", "arm", "case", "expect", "meaning", "numerics"},
    "policy": set(),
    "environment": {"machine"},
    "machine": {"play"},  # what switches kernels: it asks both
    "severity": set(),
    "facts": {"case", "catalog", "machine", "schedule", "verdict"},
    "verified": {"content"},
    "trials": {"ledger", "machine", "triage"},
    "moments": {"address", "numerics"},
    "trace": {"address", "moments", "numerics"},
    "sharding": {"case", "catalog", "schedule"},
    "sharded_specs": LOW | {"choices", "recipe", "schedule", "sharding", "specs"},
    "recipe": LOW | {"sharding", "stateful", "trace", "trainings"},
    "ladder_data": {"numerics"},
    "data": {"case", "ladder_data", "numerics"},
    "event_data": {"case", "numerics", "schedule"},
    "trainings": {"case", "catalog", "schedule"},
    "specs": LOW | {"choices", "recipe", "schedule", "trainings"},
    "strategies": LOW | {"choices", "schedule", "specs", "stateful", "trace", "recipe"},
    "cures": set(),
    "filed": set(),
    "ledger": LOW | {"cures", "environment", "facts", "filed"},
    "causes": {"ledger"},
    "known_issue": {"environment", "filed", "ledger", "te_on_cpu"},
    "models": {"case", "catalog", "numerics", "play", "schedule", "stateful"},
    "factors": LOW | {"trainings", "recipe", "schedule", "specs", "stateful", "strategies"},
    "coverage": LOW
    | {"sharding", "trainings", "recipe", "schedule", "specs", "stateful", "strategies"},
    "vectors": {"environment"},
    "arms": DATA | {"models", "play", "vectors", "gpu"},
    # play.attention: what a kernel sums, of scripts' tensors as of the rules' arrays
    "oracles": (DATA - {"recipe", "specs", "strategies", "ledger"}) | {"play.attention"},
    "oracles.state": {
        "moments",
        "case",
        "arm",
        "expect",
        "numerics",
        "oracles.oracle",
        "oracles.library.evidence",
    }
    | {"schedule", "trace", "verdict"},
    # models: the host of state faults; te_on_cpu: what the library's own are planted on; simulated:
    # what a GPU's are
    "plants": {
        "content",
        "case",
        "recipe",
        "models",
        "stateful",
        "schedule",
        "numerics",
        "play",  # what is planted is planted on ranks, too
        "policy",
        "catalog",
        "device",
        "te_on_cpu",
        "simulated",
        "vectors",
    },
    "simulated_memory": set(),
    "simulated": {"simulated_memory", "te_on_cpu"},
    "gpu": set(),
    "ladders": {"numerics", "play"},
    "device": {"gpu", "ladders", "numerics", "simulated"},
    "observe_library": DATA | {"arms", "oracles"},
    "programs": DATA | {"arms"},
    "drawn": {"case", "numerics", "oracles"},
    "fold": DATA | {"oracles"},
    "judge": DATA
    | {
        "cures",
        "fold",
        "models",
        "arms",
        "oracles",
        "drawn",
        "observe_library",
        "device",
        "programs",
    },
    "overlay": {"te_on_cpu"},
    "triage": JUDGED | {"overlay", "own_models", "plants", "vectors", "watch"},
    "watch": {"__init__", "address", "content", "exits"},
    "own_models": {"case", "catalog", "environment", "meaning", "play"},
    "results": {"trace"},
    "campaign": JUDGED
    | {
        "results",
        "__init__",
        "gpu",
        "facts",
        "own_models",
        "overlay",
        "advice",
        "exits",
        "trials",
        "plants",
        "triage",
        "coverage",
        "te_on_cpu",
    },
    "power": JUDGED | {"plants", "campaign", "coverage"},
}


#: Of watch, what only its parent process imports.
WATCH_PARENT = {
    f"narrowfuzz.watch.{name}"
    for name in ("records", "merge", "votes", "against", "read", "words", "command", "removals")
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
    if package == "__init__":
        return "narrowfuzz"
    return package if package in OURS else f"narrowfuzz.{package}"


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
    return name == whole or (package != "__init__" and name.startswith(f"{whole}."))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below_it(package: str) -> None:
    allowed = {*MAY_IMPORT[package], package}
    wrong = [
        f"{module} imports {name}"
        for module in of(package)
        for name in ours(module)
        if not any(inside(name, other) for other in allowed)
    ]
    assert of(package) and not wrong


@pytest.mark.parametrize(
    "package", ["numerics", "oracles", "case", "schedule", "data", "strategies", "coverage"]
)
def test_rules_and_data_never_import_torch(package: str) -> None:
    assert not [m for m in of(package) if {"torch", "torchao"} & libraries(m)]


def test_numerics_needs_numpy_and_the_standard_library_only() -> None:
    used = set().union(*(libraries(module) for module in of("numerics")))
    assert used - set(sys.stdlib_module_names) == {"numpy"}


def test_only_the_judge_and_what_sits_on_it_sees_arms_and_oracles() -> None:
    both = {
        module
        for module in MODULES
        if any(inside(name, "arms") for name in ours(module))
        and any(inside(name, "oracles") for name in ours(module))
    }
    sits_on_judge = (
        "judge",
        "observe_library",
        "triage",
        "campaign",
        "replay",
        "plugin",
        "cli",
        "listing",
        "power",
    )
    assert "narrowfuzz.judge" in both
    assert not [m for m in both if not any(inside(m, package) for package in sits_on_judge)]


@pytest.mark.parametrize(
    "module",
    [
        "narrowfuzz",
        "narrowfuzz.plants.plant",
        "narrowfuzz.cli",
        "narrowfuzz.watch",
        "narrowfuzz.watch.command",
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
    modules = [module for module in of("watch") if module not in (*WATCH_PARENT,)]
    used = set().union(*(libraries(module) for module in modules))
    assert used - set(sys.stdlib_module_names) == {"torch"}
    wrong = [
        f"{module} imports {name}"
        for module in modules
        if module != "narrowfuzz.watch"  # at the end of a block
        for name in ours(module)
        if name in WATCH_PARENT
    ]
    assert not wrong


def test_the_emulated_extension_imports_nothing_of_ours() -> None:
    assert {name.split(".")[0] for module in of("te_on_cpu") for name in ours(module)} == {
        "te_on_cpu"
    }


def test_strategies_load_neither_torch_nor_arms_nor_oracles() -> None:
    loaded = loaded_after("import narrowfuzz.data, narrowfuzz.strategies")
    assert loaded.isdisjoint({"torch", "torchao", "narrowfuzz.arms", "narrowfuzz.oracles"})


def test_oracles_load_neither_torch_nor_arms() -> None:
    loaded = loaded_after("import narrowfuzz.oracles")
    assert loaded.isdisjoint({"torch", "torchao", "narrowfuzz.arms", "narrowfuzz.judge"})


def test_the_plugin_is_light_until_a_fixture_is_used() -> None:
    assert loaded_after("import narrowfuzz.plugin").isdisjoint({"torch", "torchao", "numpy"})


def loaded_after(statement: str) -> set[str]:
    """Modules a fresh interpreter holds after the statement."""
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "script", sorted((ROOT / "reports/known").glob("*.py")), ids=lambda path: path.stem
)
def test_known_scripts_import_nothing_of_ours(script: Path) -> None:
    """But for the emulated extension, where they are about TransformerEngine."""
    names = imports(script)
    emulates = any(name.split(".")[0] == "transformer_engine" for name in names)
    ours = {name for name in names if name.split(".")[0] in OURS}
    allowed = [name for name in ours if emulates and inside(name, "te_on_cpu")]
    assert ours <= set(allowed)


@pytest.mark.parametrize("folder", ["recipes", "properties"])
def test_content_files_import_no_content_files(folder: str) -> None:
    """recipes/ and properties/ are loaded by path and have no import name of their own."""
    for path in (ROOT / folder).glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"recipes", "properties"}
