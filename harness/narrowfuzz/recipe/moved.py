"""Finds imports of modules of 0.1.0 in users' files, and states what to write instead.

Only ``narrowfuzz.__all__`` is promised to be stable, but users' files import more than that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from narrowfuzz.recipe.deprecated import GONE, NAMES

#: The source folder of a checkout. A file that imports it should import the package instead.
SOURCE = "harness"
_PACKAGE = "narrowfuzz"
#: (package in 0.1.0, package now) -> the modules, or names of a module, that kept their names.
_ALIKE = {
    ("", "case"): """
        arm data event_data ladder_data
    """,
    ("", "draw"): """
        choices coverage factors sharded_specs specs strategies trainings
    """,
    ("", "judge"): """
        fold judge observe_library programs
    """,
    ("", "ledger"): """
        advice exits facts filed ledger severity verified
    """,
    ("", "machine"): """
        device environment gpu machine overlay policy simulated simulated_memory
    """,
    ("", "recipe"): """
        content recipe stateful
    """,
    ("", "report"): """
        doctor document issue known_issue listing replay rule
    """,
    ("", "trace"): """
        address expect meaning trace verdict
    """,
    ("campaign", "report"): """
        accepted formats judged markdown nearest own_functions page plots store summary
    """,
    ("campaign.supervisor", "report.tally"): """
        Found Tally
    """,
    ("models", "recipe"): """
        delayed delayed_subject
    """,
    ("schedule", "case"): """
        altered events
    """,
    ("schedule", "draw"): """
        stimulus walk
    """,
    ("trainings", "case.trainings"): """
        check_events not_reentrant
    """,
}
#: Module of 0.1.0, or a name in one -> the module or name that replaces it.
MOVED = {
    f"{old}.{name}".lstrip("."): f"{new}.{name}"
    for (old, new), names in _ALIKE.items()
    for name in names.split()
} | {
    "arms.zoo": "arms.model_names",
    "campaign.ended": "report.outcome",
    "campaign.words": "report.glossary",
    "case": "case.spec",
    "catalog": "models.catalog",
    "causes": "ledger.by_patch",
    "controls.control": "plants.legacy",
    "cures": "ledger.mitigations",
    "drawn": "judge.batch",
    "faults.census": "plants.conversion",
    "faults.device": "plants.bit_flips",
    "faults.fault": "plants.legacy",
    "faults.kept": "plants.stale_state",
    "faults.patching.replaced": "plants.patching.attribute_replaced",
    "kept": "report.lookup",
    "ladders": "machine.accumulator_probe",
    "models.zoo": "arms.model_names",
    "moments": "trace.snapshots",
    "older_cases": "case.older",
    "oracles.ORACLES": "rules.RULES",
    "oracles.oracle": "rules.rule",
    "oracles.oracle.Oracle": "rules.rule.Rule",
    "oracles.reference": "operators.linear",
    "results": "trace.hashes",
    "schedule.carries": "recipe.carries",
    "schedule.draw": "draw.library_specs",
    "schedule.rules": "case.event_rules",
    "schedule.simplify": "triage.simplify",
    "schedule.story": "case.features",
    "schedule.text": "case.event_text",
    "sharding": "case.layout",
    "testing": "campaign.testing",
    "trials": "triage.trials",
    "vectors": "machine.isa",
}

#: Package of 0.1.0 whose other modules kept their names -> its new name.
PACKAGES = {"faults": "plants", "oracles": "rules"}


@lru_cache(maxsize=64)  # files of recipes are read again and again, and hardly ever change
def outdated(source: bytes) -> str:
    """The first outdated import of a source, and what to write instead; "" if none is outdated, or
    if the source is not valid Python, which executing it will report."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    return next(_outdated(tree), "")


def _outdated(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            written = f"from {node.module} import {', '.join(names)}"
            gone = [name for name in names if name in GONE and _is_ours(node.module)]
            if gone:
                yield f"{written!r}: {gone[0]} is gone, {GONE[gone[0]]}"
            elif instead := _instead(node.module, names):
                yield f"{written!r}: write {instead!r}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if "." in alias.name and (instead := _instead(alias.name, [])):
                    yield f"{f'import {alias.name}'!r}: write {instead!r}"


def _is_ours(module: str) -> bool:
    """Is or was this a module of ours? A user's project may have a package called harness."""
    first, _, rest = module.partition(".")
    return first == _PACKAGE or (first == SOURCE and _exists(_module(rest)))


def _instead(module: str, names: list[str]) -> str:
    """The statements that replace an import of these names from a module (of the module itself if
    there are none); "" where the import is right, or where the module is the user's own: a user's
    project may have a package called harness."""
    first, *rest = module.split(".")
    if first not in (SOURCE, _PACKAGE):
        return ""
    if first == SOURCE and rest[:1] == [_PACKAGE]:
        rest = rest[1:]
    old = ".".join(rest)
    if not names:
        new = _module(old)
        right = module == f"{_PACKAGE}.{new}" or not _exists(new)
        return "" if right else f"import {_PACKAGE}.{new}"
    if first == _PACKAGE and all(_stays(old, name) for name in names):
        return ""
    found: dict[str, list[str]] = {}
    for name in names:
        home, called = _home(old, name)
        if not _exists(home) or (first == SOURCE and not (home or _is_public(name))):
            return ""
        found.setdefault(f"{_PACKAGE}.{home}".rstrip("."), []).append(called)
    return "; ".join(f"from {home} import {', '.join(them)}" for home, them in found.items())


def _home(old: str, name: str) -> tuple[str, str]:
    """The module that now has a name of the module ``old``, "" for the package itself, and the text
    that imports the name from there."""
    full = f"{old}.{name}".lstrip(".")
    if _stays(old, name) and old:
        return old, name
    if _is_public(name):
        return "", name
    if full in MOVED:
        home, _, leaf = MOVED[full].rpartition(".")
        return home, leaf if leaf == name else f"{leaf} as {name}"
    return _module(old), name


def _stays(old: str, name: str) -> bool:
    """Is this name still in ``old``? A package may have the name of an old module, but other
    contents."""
    full = f"{old}.{name}".lstrip(".")
    return full in MOVED.values() or (full not in MOVED and _module(old) == old)


def _module(old: str) -> str:
    """The present name of a module of ours."""
    first, dot, rest = old.partition(".")
    return MOVED.get(old, f"{PACKAGES.get(first, first)}{dot}{rest}")


def _is_public(name: str) -> bool:
    from narrowfuzz import __all__ as public

    return name in public or name in NAMES


def _exists(module: str) -> bool:
    """Does this module of ours exist? "" is the package itself."""
    place = Path(__file__).resolve().parents[1].joinpath(*filter(None, module.split(".")))
    return place.with_suffix(".py").is_file() or place.is_dir()
