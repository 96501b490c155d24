"""How much of what was requested a run has judged: a run without findings proves only that much.

A combination of recipe, arm and model counts as judged once one of these rules has passed or failed
on it: a rule about quantising or multiplying, or one that compares ranks with a single process or
with each other. Combinations that cannot run here are not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import EAGER, REFERENCE, Arm
from narrowfuzz.case.events import Forward, Reload, Step
from narrowfuzz.case.ladder import BY_NAME, LADDER
from narrowfuzz.case.layout import LAYOUTS, Layout, layouts
from narrowfuzz.case.spec import Case
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.machine.device import torch_name_before_begin
from narrowfuzz.models.catalog import MODELS, of_kind
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.operators.optimizer_steps import STEPS
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.report.tally import counted
from narrowfuzz.rules import RULES
from narrowfuzz.trace.meaning import shortened
from narrowfuzz.trace.verdict import PLAIN_FAMILY, Verdict

#: The rules whose verdict makes a combination count as judged: they check a cast, check a multiply
#: against its operands, or compare ranks with a single process.
COUNTING_RULES = frozenset(
    rule.name
    for rule in RULES
    if not rule.reruns and (rule.level == "A" or rule.name.startswith("S"))
)
#: Statuses that the rule "contract" gives to an arm that does not run.
_NOT_RUN = frozenset({"not_applicable", "inconclusive", "known", "crashed"})
JUDGED = frozenset({"ok", "diverged", "crashed", "known"})
#: Role of a verdict on a call of an operator -> the operator, in words.
_OPERATORS = {
    operator.role(result): operator.words
    for operator in OPERATORS.values()
    for result in operator.results
}
#: The same, and also operator's name -> words, for calls of which only the name is known.
_WORDS = _OPERATORS | {operator.name: operator.words for operator in OPERATORS.values()}
#: Roles of verdicts on products of matrices.
_PRODUCTS = frozenset(
    operator.role(result)
    for operator in OPERATORS.values()
    for result in operator.results
    if operator.of_linears
)
#: Recipe, arm, model.
Combination = tuple[str, str, str]


@dataclass(frozen=True)
class Judged:
    """Which of the combinations that can run here were judged, and which were not."""

    met: frozenset[Combination]
    never: tuple[Combination, ...]
    #: The layers that rules judged one by one; the other layers of a compiled graph appear only as
    #: multiplies of that graph.
    layers: Mapping[Combination, frozenset[str]] = field(default_factory=dict)
    #: The classes of input values of the judged cases, their largest number of training steps, and
    #: other events of a training (reloads, evaluations, microbatches), in words.
    values: frozenset[str] = frozenset()
    steps: int = 0
    events: tuple[str, ...] = ()
    #: Operators with at least one judged call, in words.
    operators: tuple[str, ...] = ()
    #: Operators (in words) and kernels (by name) without a judged call -> why; and "other ..." of
    #: those of which calls of another form were judged.
    unjudged: Mapping[str, str] = field(default_factory=dict)
    #: Combinations never judged -> why, where a case has shown the reason.
    why: Mapping[Combination, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Judged combinations in per cent; 100 if there is nothing to judge."""
        whole = len(self.met) + len(self.never)
        return 100.0 * len(self.met) / whole if whole else 100.0


def judged_layers(verdicts: Iterable[Verdict], recipe: str, model: str) -> set[tuple[str, ...]]:
    """("judged", recipe, arm, model, layer) for each call of a layer that a rule judged; the layer
    is "" for a verdict about a whole model or a model of a single operator. In an unconverted model
    products outside of nn.Linear count, as linears with a forward of their own make them."""
    one_operator = model in of_kind("operator")
    products = _PRODUCTS if recipe.startswith(f"{PLAIN_FAMILY}.") else frozenset()
    forbidden = model in MODELS and MODELS[model].forbidden
    also = MODELS[model].also if model in MODELS else {}
    return {
        ("judged", recipe, verdict.arm, model, also.get(verdict.at.layer, verdict.at.layer))
        for verdict in verdicts
        if verdict.status in JUDGED
        and (
            verdict.rule in COUNTING_RULES
            or (one_operator and verdict.role in _OPERATORS)
            or verdict.role in products
            or (forbidden and verdict.rule == "contract")
        )
    }


def blocked_arms(verdicts: Iterable[Verdict], recipe: str, model: str) -> set[tuple[str, ...]]:
    """("blocked", recipe, arm, model, why) for each arm that does not run, with the reason from
    the rule "contract"."""
    return {
        ("blocked", recipe, verdict.arm, model, _why_blocked(verdict))
        for verdict in verdicts
        if verdict.rule == "contract" and verdict.status in _NOT_RUN
    }


def how_arms_ran(
    verdicts: Iterable[Verdict], recipe: str, model: str, asked: Collection[str]
) -> set[tuple[str, ...]]:
    """What this case's verdicts say of each arm: ("ran", recipe, arm, model) if it ran to its end,
    ("undecided", ..., why) for what no rule could decide, and what ``blocked_arms`` says. The arms
    that were ``asked`` for run only after eager: what stops that stops them."""
    verdicts = [*verdicts]
    blocked = blocked_arms(verdicts, recipe, model)
    whys = [why for _, _, arm, _, why in blocked if arm == EAGER.name]
    return (
        {
            ("ran", recipe, verdict.arm, model)
            for verdict in verdicts
            if verdict.rule == "contract" and verdict.status == "ok" and not verdict.why
        }
        | {
            ("undecided", recipe, verdict.arm, model, verdict.why)
            for verdict in verdicts
            if verdict.rule in COUNTING_RULES and verdict.status == "inconclusive" and verdict.why
        }
        | blocked
        | {("blocked", recipe, arm, model, why) for arm in asked for why in whys}
    )


def known_under(case: Case, known: Iterable[Verdict]) -> Iterator[tuple[str, str, str]]:
    """("known under", entry, words) for each verdict that a known issue explains, and each
    circumstance of its run that a user may not have."""
    for verdict in known:
        arm = BY_NAME[verdict.arm]
        circumstances = {
            "autocast": bool(case.spec.narrowed),
            "torch.compile": bool(arm.compiler),
            "checkpoints": bool(arm.checkpoint),
            "several ranks": bool(arm.sharded),
            "several threads": case.spec.threads > 1,
        }
        for words, there in circumstances.items():
            if there:
                yield "known under", verdict.explained_by, words


def commonest(counts: Mapping[Any, int], kind: str) -> dict[tuple[Any, ...], Any]:
    """Of the counts' keys of this kind, from all elements but the last to the last element that was
    counted most."""
    found: dict[tuple[Any, ...], Any] = {}
    for key in sorted(counted(counts, kind), key=lambda key: (counts[kind, *key], key)):
        found[key[:-1]] = key[-1]
    return found


def _mostly_blocked(counts: Mapping[Any, int]) -> dict[tuple[Any, ...], Any]:
    """The combinations that more cases did not run than ran, each with the commonest reason. A few
    cases may run where nearly all are stopped, such as those of a forward alone."""
    times = Counter[tuple[Any, ...]]()
    for *one, why in counted(counts, "blocked"):
        times[tuple(one)] += counts["blocked", *one, why]
    return {
        one: why
        for one, why in commonest(counts, "blocked").items()
        if times[one] > counts.get(("ran", *one), 0)
    }


def _in_the_way(one: Combination, whys: Mapping[Combination, str]) -> str:
    """What stops this combination, or its eager run (the other arms run only after it); "" if
    nothing is known to."""
    recipe, _, model = one
    return whys.get(one) or whys.get((recipe, EAGER.name, model), "")


def _why_blocked(verdict: Verdict) -> str:
    if verdict.status in ("not_applicable", "inconclusive"):
        return verdict.why
    by = verdict.explained_by
    return known_issue(by) if by else f"it fails: {shortened(verdict.got, 80)}"


def known_issue(entry: str) -> str:
    """The reason for a combination that a known issue stops."""
    return f"known issue {entry}"


#: Events of a training besides steps -> their words in a sentence.
_EVENTS = {"reload": "a reload", "eval": "an evaluation in between", "accumulated": "microbatches"}


def happened(case: Case) -> set[tuple[Any, ...]]:
    """("met", (kind, what)) for the circumstances in which a case was judged: its class of values,
    its number of steps, and other events of its training."""
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
    """("met", ("operator", words)) for each operator with a call that was judged, and ("met",
    ("unjudged", (what, why))) for each operator or kernel with a call that could not be judged:
    "unjudged" for its data, "uncovered" for its form, whatever the data."""
    kinds = {"inconclusive": "unjudged", "not_applicable": "uncovered"}
    of_calls = [verdict for verdict in verdicts if verdict.rule == "O25"]
    return {
        ("met", ("operator", _OPERATORS[verdict.role]))
        for verdict in of_calls
        if verdict.status in JUDGED and verdict.role in _OPERATORS
    } | {
        ("met", (kinds[verdict.status], (_WORDS.get(verdict.role, verdict.role), verdict.why)))
        for verdict in of_calls
        if verdict.status in kinds and verdict.role not in ROLES
    }


def judged(
    counts: Mapping[Any, int],
    recipes: Mapping[str, Recipe],
    arms: Collection[str],
    models: Collection[str],
    device: str,
) -> Judged:
    """Which combinations of these recipes, arms and models were judged according to the counts of
    a run; an empty ``models`` selects all."""
    seen: defaultdict[Combination, set[str]] = defaultdict(set)
    for *one, layer in counted(counts, "judged"):
        seen[tuple(one)].add(layer)
    met, layers = set(seen), {one: frozenset(names - {""}) for one, names in seen.items()}
    whole = set(_asked(recipes, arms, models, device))
    undecided, ran = commonest(counts, "undecided"), {*counted(counts, "ran")}
    blocked = _mostly_blocked(counts)
    whys = {
        one: (undecided.get(one, "") if one in ran else "") or _in_the_way(one, blocked)
        for one in whole
    }
    with_what = [what for (what,) in counted(counts, "met")]
    operators = tuple(sorted(what for kind, what in with_what if kind == "operator"))
    unjudged: defaultdict[str, set[str]] = defaultdict(set)
    steps = any(what.startswith("steps of") for what in operators)
    for kind, what in with_what:
        if kind in ("unjudged", "uncovered"):
            name, why = what
            if name not in operators and not (name == STEPS and steps):
                unjudged[name].add(why)
            elif kind == "uncovered":
                unjudged[f"other {name}"].add(why)
    return Judged(
        frozenset(met & whole),
        tuple(sorted(whole - met)),
        layers,
        values=frozenset(what for kind, what in with_what if kind == "values"),
        operators=operators,
        unjudged={what: " or ".join(sorted(whys)) for what, whys in sorted(unjudged.items())},
        steps=max((what for kind, what in with_what if kind == "steps"), default=0),
        events=tuple(_EVENTS[kind] for kind in _EVENTS if ("event", kind) in with_what),
        why={one: why for one in whole - met if (why := whys[one])},
    )


def _laid_out(arm: Arm, ways: Collection[Layout]) -> bool:
    """True if one of these layouts runs on this arm."""
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
                continue  # a variant (other sizes) of a requested model
            if model in MODELS and not MODELS[model].runs_on(
                torch_name_before_begin(device), recipe.dtypes
            ):
                continue
            mine = able if model in MODELS else [EAGER]
            if not (recipe.compiles and (model not in MODELS or MODELS[model].compiled)):
                mine = [arm for arm in mine if not arm.compiler]
            ways = layouts(model, recipe.shards) if model in MODELS else ()
            mine = [arm for arm in mine if not arm.sharded or _laid_out(arm, ways)]
            if not_reentrant(model, autocast=False):
                mine = [arm for arm in mine if arm.checkpoint != "reentrant"]
            yield from ((name, arm.name, model) for arm in mine)
