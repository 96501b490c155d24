"""How much of what was asked for a run has judged: a green end means as much as that.

A recipe, arm and model have been judged together once a rule about quantising or multiplying said
anything of them, "as promised" or not, or one that holds ranks to one process or to each other.
What cannot run here is not counted, it is listed apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import EAGER, REFERENCE, Arm
from narrowfuzz.case.events import Forward, Reload, Step
from narrowfuzz.case.ladder import LADDER
from narrowfuzz.case.layout import LAYOUTS, Layout, layouts
from narrowfuzz.case.spec import Case
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.machine.device import asked_here
from narrowfuzz.models.catalog import MODELS, of_kind
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.report.tally import counted
from narrowfuzz.rules import RULES
from narrowfuzz.trace.verdict import Verdict

#: The rules that look at a cast, or hold a multiply to its operands, or ranks to one process.
LOOKING = frozenset(
    rule.name
    for rule in RULES
    if not rule.reruns and (rule.level == "A" or rule.name.startswith("S"))
)
#: What the contract says of an arm that fails.
_HINDERED = frozenset({"not_applicable", "known", "crashed"})
JUDGED = frozenset({"ok", "diverged", "crashed", "known"})
#: What verdicts on calls of operators are about -> what was called, in words.
_OPERATORS = {
    operator.role(result): operator.words
    for operator in OPERATORS.values()
    for result in operator.results
}
#: The same, where nothing is known of the call, by its operator's name as well.
_WORDS = _OPERATORS | {operator.name: operator.words for operator in OPERATORS.values()}
#: Recipe, arm, model.
Combination = tuple[str, str, str]


@dataclass(frozen=True)
class Judged:
    """What was judged, and what was not, of all that can run here."""

    met: frozenset[Combination]
    never: tuple[Combination, ...]
    #: The layers that rules looked at one by one; of a compiled graph, others are multiplies of it.
    layers: Mapping[Combination, frozenset[str]] = field(default_factory=dict)
    #: The classes of values that any of it was judged on, the most steps in a row, and what else
    #: happened in a training, in words.
    values: frozenset[str] = frozenset()
    steps: int = 0
    events: tuple[str, ...] = ()
    #: Operators of which calls were judged, in words.
    operators: tuple[str, ...] = ()
    #: Operators, in words, and kernels, by name, of which no call was judged, and why.
    unjudged: Mapping[str, str] = field(default_factory=dict)
    #: Why some were never judged, where a case said so.
    why: Mapping[Combination, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Per cent; 100 where there is nothing to judge."""
        whole = len(self.met) + len(self.never)
        return 100.0 * len(self.met) / whole if whole else 100.0


def looked_at(verdicts: Iterable[Verdict], recipe: str, model: str) -> set[tuple[str, ...]]:
    """("judged", recipe, arm, model, layer) for each call of a layer that a rule judged; of a whole
    model, or one operator alone, the layer is ""."""
    alone, forbidden = model in of_kind("operator"), model in MODELS and MODELS[model].forbidden
    return {
        ("judged", recipe, verdict.arm, model, verdict.at.layer)
        for verdict in verdicts
        if verdict.status in JUDGED
        and (
            verdict.rule in LOOKING
            or (alone and verdict.role in _OPERATORS)
            or (forbidden and verdict.rule == "contract")
        )
    }


def hindered(verdicts: Iterable[Verdict], recipe: str, model: str) -> set[tuple[str, ...]]:
    """("hindered", recipe, arm, model, why) for each arm of which the contract says why it does not
    run."""
    return {
        ("hindered", recipe, verdict.arm, model, _hindrance(verdict))
        for verdict in verdicts
        if verdict.rule == "contract" and verdict.status in _HINDERED
    }


def _in_the_way(one: Combination, whys: Mapping[Combination, str]) -> str:
    """What stops this combination, or its eager run, without which nothing else is run."""
    recipe, _, model = one
    return whys.get(one) or whys.get((recipe, EAGER.name, model), "")


def _hindrance(verdict: Verdict) -> str:
    if verdict.status == "not_applicable":
        return verdict.why
    by = verdict.explained_by
    return known_issue(by) if by else "it fails: see findings"


def known_issue(entry: str) -> str:
    """What stops a case, where that is in the ledger."""
    return f"known issue {entry}"


#: What may happen in a training besides steps, and how a sentence says it.
_EVENTS = {"reload": "a reload", "eval": "an evaluation in between", "accumulated": "microbatches"}


def happened(case: Case) -> set[tuple[Any, ...]]:
    """("met", (kind, what)) for what a case was judged on: its class of values, how many steps it
    took, and what else happened."""
    spec = case.spec
    found: list[tuple[str, Any]] = [
        ("values", case.data.values if case.data.regime == "wild" else case.data.regime)
    ]
    found.append(("steps", sum(isinstance(event, Step) for event in spec.training)))
    reloads = spec.lifecycle == "reload" or any(isinstance(e, Reload) for e in spec.training)
    evaluates = any(isinstance(e, Forward) and e.mode == "eval" for e in spec.training)
    kinds = {"reload": reloads, "eval": evaluates, "accumulated": spec.microbatches > 1}
    found += [("event", kind) for kind, there in kinds.items() if there]
    return {("met", one) for one in found}


def called(verdicts: Iterable[Verdict]) -> set[tuple[Any, ...]]:
    """("met", ("operator", words)) for each operator of which a rule judged a call, and ("met",
    ("unjudged", (what, why))) for each operator or kernel that no rule judges."""
    of_calls = [verdict for verdict in verdicts if verdict.rule == "O25"]
    return {
        ("met", ("operator", _OPERATORS[verdict.role]))
        for verdict in of_calls
        if verdict.status in JUDGED and verdict.role in _OPERATORS
    } | {
        ("met", ("unjudged", (_WORDS.get(verdict.role, verdict.role), verdict.why)))
        for verdict in of_calls
        if verdict.status in ("inconclusive", "not_applicable") and verdict.role not in ROLES
    }


def judged(
    counts: Collection[Any],
    recipes: Mapping[str, Recipe],
    arms: Collection[str],
    models: Collection[str],
    device: str,
) -> Judged:
    """Of these recipes and arms, and these models or all, what the counts say was judged."""
    seen: defaultdict[Combination, set[str]] = defaultdict(set)
    for *one, layer in counted(counts, "judged"):
        seen[tuple(one)].add(layer)
    met, layers = set(seen), {one: frozenset(names - {""}) for one, names in seen.items()}
    whole = set(_asked(recipes, arms, models, device))
    whys = {tuple(one): why for *one, why in counted(counts, "hindered")}
    with_what = [what for (what,) in counted(counts, "met")]
    operators = tuple(sorted(what for kind, what in with_what if kind == "operator"))
    unjudged: defaultdict[str, set[str]] = defaultdict(set)
    for what, why in (what for kind, what in with_what if kind == "unjudged"):
        if what not in operators:
            unjudged[what].add(why)
    return Judged(
        frozenset(met & whole),
        tuple(sorted(whole - met)),
        layers,
        values=frozenset(what for kind, what in with_what if kind == "values"),
        operators=operators,
        unjudged={what: " or ".join(sorted(whys)) for what, whys in sorted(unjudged.items())},
        steps=max((what for kind, what in with_what if kind == "steps"), default=0),
        events=tuple(_EVENTS[kind] for kind in _EVENTS if ("event", kind) in with_what),
        why={one: why for one in whole - met if (why := _in_the_way(one, whys))},
    )


def _laid_out(arm: Arm, ways: Collection[Layout]) -> bool:
    """Does one of these layouts run on this arm?"""
    if arm.stage in {layout.arm for layout in ways}:
        return True
    of_all = [lay for lay in ways if not lay.arm and (lay.compiles or not arm.compiler)]
    return bool(of_all) and arm.stage not in {layout.arm for layout in LAYOUTS}


def _asked(
    recipes: Mapping[str, Recipe], arms: Collection[str], models: Collection[str], device: str
) -> Iterable[Combination]:
    able = [a for a in LADDER if a != REFERENCE and a.name in arms and not unavailable(a, device)]
    for name, recipe in recipes.items():
        for model in recipe.models(models):
            if model in MODELS and not MODELS[model].by_default:
                continue  # a neighbour of what is asked for
            if model in MODELS and not MODELS[model].runs_on(asked_here(device), recipe.dtypes):
                continue
            mine = able if model in MODELS else [EAGER]
            if not recipe.compiles:
                mine = [arm for arm in mine if not arm.compiler]
            ways = layouts(model, recipe.shards) if model in MODELS else ()
            mine = [arm for arm in mine if not arm.sharded or _laid_out(arm, ways)]
            if not_reentrant(model, autocast=False):
                mine = [arm for arm in mine if arm.checkpoint != "reentrant"]
            yield from ((name, arm.name, model) for arm in mine)
