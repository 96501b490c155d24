"""Where modules of 0.1.0 are now: a file that a user wrote is told what to write instead.

Only ``narrowfuzz.__all__`` is promised, yet files import more than that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from narrowfuzz.recipe.deprecated import GONE, NAMES

#: The folder of the source. A file that imports it means the package.
SOURCE = "harness"
_PACKAGE = "narrowfuzz"
#: Module of 0.1.0, or a name in one, -> where it is now.
MOVED = {
    "address": "trace.address",
    "advice": "ledger.advice",
    "arm": "case.arm",
    "campaign.accepted": "report.accepted",
    "campaign.formats": "report.formats",
    "campaign.judged": "report.judged",
    "campaign.markdown": "report.markdown",
    "campaign.nearest": "report.nearest",
    "campaign.page": "report.page",
    "campaign.plots": "report.plots",
    "campaign.store": "report.store",
    "campaign.summary": "report.summary",
    "campaign.ended": "report.outcome",
    "campaign.own_functions": "report.own_functions",
    "campaign.supervisor.Found": "report.tally.Found",
    "campaign.supervisor.Tally": "report.tally.Tally",
    "campaign.words": "report.glossary",
    "case": "case.spec",
    "catalog": "models.catalog",
    "causes": "ledger.causes",
    "choices": "draw.choices",
    "content": "recipe.content",
    "controls.control": "plants.older",
    "coverage": "draw.coverage",
    "cures": "ledger.mitigations",
    "data": "case.data",
    "device": "machine.device",
    "doctor": "report.doctor",
    "document": "report.document",
    "drawn": "judge.batch",
    "environment": "machine.environment",
    "event_data": "case.event_data",
    "exits": "ledger.exits",
    "expect": "trace.expect",
    "factors": "draw.factors",
    "facts": "ledger.facts",
    "faults.fault": "plants.older",
    "filed": "ledger.filed",
    "fold": "judge.fold",
    "gpu": "machine.gpu",
    "issue": "report.issue",
    "judge": "judge.judge",
    "kept": "report.lookup",
    "known_issue": "report.known_issue",
    "ladder_data": "case.ladder_data",
    "ladders": "machine.ladders",
    "ledger": "ledger.ledger",
    "listing": "report.listing",
    "machine": "machine.machine",
    "meaning": "trace.meaning",
    "models.delayed": "recipe.delayed",
    "models.delayed_subject": "recipe.delayed_subject",
    "models.zoo": "arms.zoo",
    "moments": "trace.snapshots",
    "observe_library": "judge.observe_library",
    "older_cases": "case.older",
    "oracles.reference": "operators.linear",
    "oracles.ORACLES": "rules.RULES",
    "oracles.oracle": "rules.rule",
    "oracles.oracle.Oracle": "rules.rule.Rule",
    "overlay": "machine.overlay",
    "policy": "machine.policy",
    "programs": "judge.programs",
    "recipe": "recipe.recipe",
    "replay": "report.replay",
    "results": "trace.hashes",
    "rule": "report.rule",
    "schedule.altered": "case.altered",
    "schedule.carries": "recipe.carries",
    "schedule.draw": "draw.events",
    "schedule.events": "case.events",
    "schedule.rules": "case.event_rules",
    "schedule.simplify": "triage.simplify",
    "schedule.stimulus": "draw.stimulus",
    "schedule.story": "case.features",
    "schedule.text": "case.event_text",
    "schedule.walk": "draw.walk",
    "severity": "ledger.severity",
    "sharded_specs": "draw.sharded_specs",
    "sharding": "case.layout",
    "simulated": "machine.simulated",
    "simulated_memory": "machine.simulated_memory",
    "specs": "draw.specs",
    "stateful": "recipe.stateful",
    "strategies": "draw.strategies",
    "testing": "campaign.testing",
    "trace": "trace.trace",
    "trainings.check_events": "case.trainings.check_events",
    "trainings.not_reentrant": "case.trainings.not_reentrant",
    "trainings": "draw.trainings",
    "trials": "triage.trials",
    "vectors": "machine.isa",
    "verdict": "trace.verdict",
    "verified": "ledger.verified",
}

#: Package of 0.1.0 whose other modules kept their names -> what it is called.
PACKAGES = {"faults": "plants", "oracles": "rules"}


def outdated(source: bytes) -> str:
    """The first import that is no longer right, and what to write instead; "" if all are right, or
    if the file is no Python, which says so itself when it is executed."""
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
    """Is it, or was it, a module of ours? A user's project may have a package called harness."""
    first, _, rest = module.partition(".")
    return first == _PACKAGE or (first == SOURCE and _exists(_module(rest)))


def _instead(module: str, names: list[str]) -> str:
    """The statements to write for one that imports these names from a module; "" where it is right,
    or where the module is the user's own, whose project may have a package called harness."""
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
    """The module that has a name which was imported from ``old``, "" for the package itself, and
    how it is imported from there."""
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
    """Is this name where it was? A package may be called as a module was, and have others."""
    full = f"{old}.{name}".lstrip(".")
    return full in MOVED.values() or (full not in MOVED and _module(old) == old)


def _module(old: str) -> str:
    """Where a module of ours is now."""
    first, dot, rest = old.partition(".")
    return MOVED.get(old, f"{PACKAGES.get(first, first)}{dot}{rest}")


def _is_public(name: str) -> bool:
    from narrowfuzz import __all__ as public

    return name in public or name in NAMES


def _exists(module: str) -> bool:
    """Is there such a module of ours? The package itself is ""."""
    place = Path(__file__).resolve().parents[1].joinpath(*filter(None, module.split(".")))
    return place.with_suffix(".py").is_file() or place.is_dir()
