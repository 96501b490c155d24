"""Finds the known issues that may affect a configuration, before anything runs."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping

from narrowfuzz.case.arm import COMPILED, Arm
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.facts import OF_MACHINE, OF_RANKS, Fact, may_hold
from narrowfuzz.ledger.ledger import Entry, installed_package, stands
from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.machine.machine import Machine
from narrowfuzz.models.model import CALLS, Model
from narrowfuzz.operators import BY_NAME as BY_OPERATOR
from narrowfuzz.operators import DEVIATIONS, OPERATORS_OF
from narrowfuzz.operators.operator import Deviation
from narrowfuzz.recipe.recipe import Recipe

#: The facts of a configuration that name the operators that its models call, the classes of their
#: modules, and the deviations that may affect their calls.
OPERATORS, MODULES, AFFECTED = "operators", "modules", "affected"
#: The beginning of a symptom that only runs on several ranks show.
_ON_RANKS = "fails only on ranks"


def applying(
    entries: Iterable[Entry],
    recipes: Iterable[Recipe],
    arms: Iterable[Arm],
    machine: Machine,
    device: str = "cpu",
    configuration: Mapping[str, Fact] = {},
) -> list[Entry]:
    """The entries that some case of these recipes may show on these arms, the most severe first.

    Conditions of an entry on data, model or shape are assumed to be met by some case, except where
    the ``configuration`` has a fact that contradicts them; its cases are compiled as it says, or
    not at all, though they also run on the lower arms of their ladder. Conditions on the machine
    and the device must hold, and the library must be installed. Its version may be one that the
    entry does not name, but not one in which the issue is known to be absent.
    """
    here = {name: read(machine) for name, read in OF_MACHINE.items()}
    compiled = configuration.get("compile")
    known = [
        {**here, "device": device, **configuration, **facts}
        for recipe in recipes
        for arm in arms
        if _runs_on(recipe, arm)
        for facts in _facts(recipe, arm)
        if compiled is None or {facts["compile"], arm.compiler or "none"} <= {"none", compiled}
    ]
    by_recipe: dict[str, list[dict[str, Fact]]] = {}
    for facts in known:
        by_recipe.setdefault(str(facts["recipe"]), []).append(facts)
    there = functools.cache(installed_package)  # all entries name the same few packages
    found = [
        entry
        for entry in entries
        if stands(entry, device, there) != "absent"
        and any(
            _may_show(entry, facts)
            for recipe, some in by_recipe.items()
            if entry.about(recipe)
            for facts in some
        )
    ]
    return sorted(found, key=lambda entry: (SEVERITIES.index(entry.severity), entry.id))


def of_models(models: Collection[Model]) -> dict[str, Fact]:
    """Facts that every case of these models has: fields of the Spec that they all fix to the same
    value, and the operators that they call, the classes of their modules and the deviations that
    may affect their calls, if known for all of them."""
    if not models:
        return {}
    first, *others = models
    facts: dict[str, Fact] = {
        field: value
        for field, value in first.fixed.items()
        if all(field in model.fixed and model.fixed[field] == value for model in others)
    }
    if {model.name for model in others} <= {first.name}:
        facts["model"], facts["changes_buffers"] = first.name, first.changes_buffers_again
        facts["second_derivative"] = first.gradients.twice
    for name in (OPERATORS, MODULES, AFFECTED):
        sets = [found for model in models if (found := getattr(model, name)) is not None]
        if len(sets) == len(models):
            facts[name] = frozenset().union(*sets)
    return facts


def _runs_on(recipe: Recipe, arm: Arm) -> bool:
    """May the recipe run on this arm: is it compiled, or on ranks, if the arm is?"""
    on_ranks = recipe.shards or recipe.carries().ranks
    return bool((recipe.compiles or not arm.compiler) and (on_ranks or not arm.sharded))


def _facts(recipe: Recipe, arm: Arm) -> Iterator[dict[str, Fact]]:
    """The facts of every case that includes the arm, one set for each value of ``Spec.compile`` and
    each of the recipe's names (its own and that of its base). Facts about ranks are None where the
    arm runs in one process."""
    without_ranks: dict[str, Fact] = {} if arm.sharded else dict.fromkeys(OF_RANKS)
    backends = frozenset(recipe.backends or ("",))
    rungs: list[str] = [
        rung for rung, stages in COMPILED.items() if arm.stage in {a.name for a in stages}
    ]
    for name in dict.fromkeys((recipe.name, recipe.based_on or recipe.name)):
        for rung in rungs or [arm.compiler or "none"]:  # on ranks the compiler is the rung
            checkpoint = arm.checkpoint or "none"
            how = {"arm": arm.name, "compile": rung, "checkpoint": checkpoint}
            whose: dict[str, Fact] = {"family": recipe.family, "backends": backends}
            yield {"recipe": name, **whose, **how, **without_ranks}


def _may_show(entry: Entry, facts: dict[str, Fact]) -> bool:
    backends = facts["backends"]
    assert isinstance(backends, frozenset)
    if not any(fnmatch.fnmatchcase(one, glob) for one in backends for glob in entry.backends):
        return False
    if entry.shown_by and not _has(facts, entry.shown_by):
        return False
    if entry.deviation in DEVIATIONS and not _runs(DEVIATIONS[entry.deviation], facts):
        return False
    # the cases run on the lower arms of their ladder as well, and may show the issue there
    cases = {name: fact for name, fact in facts.items() if name != "arm"}
    if not may_hold(entry.when, cases):
        return False
    everywhere = bool(entry.deviation) or not entry.matches
    arm = BY_NAME[str(facts["arm"])]
    return everywhere or any(
        may_hold(match.when, facts)
        and any(_on(arm, glob) and _calls(facts, glob) for glob in match.fingerprints)
        for match in entry.matches
    )


def _has(facts: dict[str, Fact], needed: Collection[str]) -> bool:
    """May a model with these facts call one of these operators, have a module of one of these
    classes, or make a call of one of these kinds?"""
    for name in needed:
        of_calls = AFFECTED if name in CALLS else MODULES
        has = facts.get(OPERATORS if name in BY_OPERATOR else of_calls)
        of_kernels = name in BY_OPERATOR or name in CALLS
        unknown = of_kernels and facts["device"] != "cpu"  # models are tried on a CPU
        if unknown or not isinstance(has, frozenset) or name in has:
            return True
    return False


def _calls(facts: dict[str, Fact], fingerprint: str) -> bool:
    """May the operator be called that this fingerprint is about, by a recipe of its family? True if
    it is about none."""
    rule, role, *_, family = fingerprint.split("--")
    if not fnmatch.fnmatchcase(str(facts["family"]), family):
        return False
    name, called = role.partition(".")[0], facts.get(OPERATORS)
    if rule == "O18":
        rule, name = "O25", "attention"
    if rule != "O25" or name not in BY_OPERATOR or facts["device"] != "cpu":
        return True  # models are tried on a CPU
    return not isinstance(called, frozenset) or name in called


def _runs(kernels: Deviation, facts: dict[str, Fact]) -> bool:
    """Can the kernels of this deviation run in a case with these facts?"""
    called, affected = facts.get(OPERATORS), facts.get(AFFECTED)
    if facts["device"] not in kernels.devices:
        return False
    if facts["device"] != "cpu":  # models are tried on a CPU
        return True
    if isinstance(affected, frozenset):
        return kernels.name in affected
    return not isinstance(called, frozenset) or not OPERATORS_OF[kernels.name].isdisjoint(called)


def _on(arm: Arm, fingerprint: str) -> bool:
    """Can cases of this arm show this fingerprint? An arm in one process cannot show a failure that
    only ranks have."""
    rule, _, arms, symptom, *_ = fingerprint.split("--")
    if not arm.sharded and (symptom.startswith(_ON_RANKS) or rule.startswith("S")):
        return False
    # the cases run on the lower arms of their ladder as well
    return any(fnmatch.fnmatch(a.name, arms) for a in BY_NAME.values() if _below(a, arm))


def _below(other: Arm, arm: Arm) -> bool:
    """May a case that runs on the arm run on the other as well, before that?"""
    compilers = [[a.stage for a in stages] for stages in COMPILED.values()]
    before = {s for some in compilers if arm.stage in some for s in some[: some.index(arm.stage)]}
    return (
        other.sharded <= arm.sharded
        and other.checkpoint in ("", arm.checkpoint)
        and (not other.compiler or other.stage in {arm.stage, *before})
    )
