"""Where modules of 0.1.0 are now: a file that a user wrote is told what to write instead.

Only ``narrowfuzz.__all__`` is promised (docs/compatibility.md), yet files import more than that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

#: The folder of the source. A file that imports it means the package.
_SOURCE = "harness"
_PACKAGE = "narrowfuzz"
#: Module of 0.1.0 -> its module now.
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
    "campaign.words": "report.glossary",
    "case": "case.spec",
    "catalog": "models.catalog",
    "causes": "ledger.causes",
    "choices": "draw.choices",
    "content": "recipe.content",
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
    "trainings": "draw.trainings",
    "trials": "triage.trials",
    "vectors": "machine.isa",
    "verdict": "trace.verdict",
    "verified": "ledger.verified",
}


def outdated(source: bytes) -> tuple[str, str] | None:
    """The first import that is no longer right, and what to write instead; None if all are right,
    or if the file is no Python, which says so itself when it is executed."""
    if _SOURCE.encode() not in source and _PACKAGE.encode() not in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    return next(_outdated(tree), None)


def _outdated(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            written = f"from {node.module} import {', '.join(names)}"
            if instead := _instead(node.module, names):
                yield written, instead
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if "." in alias.name and (instead := _instead(alias.name, [])):
                    yield f"import {alias.name}", instead


def _instead(module: str, names: list[str]) -> str:
    """The statement to write for one that imports these names from a module; "" where it is right,
    or where the module is the user's own, whose project may have a package called harness."""
    from narrowfuzz import __all__ as public

    first, *rest = module.split(".")
    if first not in (_SOURCE, _PACKAGE):
        return ""
    if first == _SOURCE and rest[:1] == [_PACKAGE]:
        rest = rest[1:]
    old = ".".join(rest)
    new = "rules" + old.removeprefix("oracles") if rest[:1] == ["oracles"] else MOVED.get(old, old)
    if names and set(names) <= set(public):
        right = module == _PACKAGE or (first == _PACKAGE and new == old)
        return "" if right else f"from {_PACKAGE} import {', '.join(names)}"
    # a package may be called as a module was: what it holds is imported from it still
    inside = {f"{old}.{name}" for name in names} & {*MOVED.values()}
    if new == old or inside:
        return ""
    target = f"{_PACKAGE}.{new}"
    return f"from {target} import {', '.join(names)}" if names else f"import {target}"
