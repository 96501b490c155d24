"""judge(case) -> verdicts: run a case on its arms, apply every rule, fold consequences.

The only place that applies rules to runs. pytest, campaign, replay and the minimiser all call
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from narrowfuzz.arms.modules import at_its_module
from narrowfuzz.case.kind import kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.judge.fold import Judgement, fold
from narrowfuzz.judge.observe import Observer, tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.ledger.mitigations import CURES
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.reference import Undivided
from narrowfuzz.rules import BY_NAME, RULES, rules_of
from narrowfuzz.rules.applied import checks
from narrowfuzz.rules.contract import accepted
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import Rule, plain
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import BAD, OWN, Verdict, fingerprint

FRESH_DRAWS, FEW_DRAWS = 20, 3
#: Rules that compare a run with another run of the same model on the same tensors.
_RUN_TO_RUN_RULES = frozenset({"O1", "O12", "O13"})
#: How often a case is judged with a cure, and without it, before the cure is believed.
_CURE_TRIES = 3


@dataclass
class Judge(Observer):
    """Observes cases and judges them by rules."""

    rules: Sequence[Rule] = RULES
    #: Called with each case that is judged, and the traces of its arms by name.
    observed: Callable[[Case, Mapping[str, Trace]], None] = lambda case, traces: None
    #: Cure -> the judge that is used while the cure is in force, with programs of its own.
    _under: dict[str, Judge] = field(default_factory=dict)
    #: (case, rule, arm, cure) -> does the cure help? Cached while a case's verdicts are folded.
    _answers: dict[tuple[Case, str, str, str], bool] = field(default_factory=dict)

    def judge(
        self,
        case: Case,
        rules: Sequence[Rule] | None = None,
        only: frozenset[str] | None = None,
        *,
        focus: int | None = None,
        repeat: bool = True,
        confirm: bool = True,
    ) -> Judgement:
        """Run and judge one case, on all its rungs, or only on those named in ``only``.

        If a run with PyTorch's own kernels in place of oneDNN's diverges, the case is judged with
        oneDNN's kernels, too: what these show as well is not attributed to PyTorch's own.

        With a ``focus`` only the linear of a model with this number (modulo the number of linears)
        is checked, and a part of other things: the cheap way to judge many draws of one Spec.
        ``repeat`` runs every rung a second time if rule O1 is requested. A ratio rule's divergence
        counts only if each of FRESH_DRAWS other draws of the Spec shows it (``confirm``), else it
        is inconclusive. The same holds for a gradient that a user's model lacks, with FEW_DRAWS. A
        difference between two runs of a user's model is placed at the module that makes it. The
        cases of ``case.history`` run first. Raises ValueError if the case's recipe or backend does
        not exist.
        """
        for earlier in case.history:
            self.run_arms(earlier)
            self.programs.clear()  # no later case uses its models
        candidates = self.rules if rules is None else rules
        kind = kind_of(case.spec)
        chosen = [rule for rule in candidates if kind in rule.cases]
        repeat = repeat and any(rule.name == "O1" for rule in chosen)
        family = self.family(case.spec)
        evidence = self.observe(case, only, focus=focus, repeat=repeat)
        self.observed(case, evidence.traces)
        verdicts, ran = self._placed(case, _judged(evidence, chosen)), evidence.ran
        judgement = self._fold(case, verdicts, ran)
        if judgement.causes and base_of(case.spec).native:
            spec = msgspec.structs.replace(case.spec, kernels="default")
            usual = msgspec.structs.replace(case, spec=spec)
            others = _judged(self.observe(usual, focus=focus, repeat=repeat), chosen)
            verdicts += self._placed(usual, others)
            judgement = self._fold(case, verdicts, ran)
        while confirm:
            doubted = [(v, n) for v in judgement.causes if (n := self._draws(case, v))]
            chance = next((v for v, n in doubted if not self._holds(case, v, family, n)), None)
            if chance is None:
                break
            verdicts = [replace(v, status="inconclusive") if v == chance else v for v in verdicts]
            judgement = self._fold(case, verdicts, ran)
        return judgement

    def _placed(self, case: Case, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts. For a user's own model, a difference between two eager runs that should be
        equal is placed at the module whose own output differs first."""
        model = MODELS.get(case.spec.model)

        def elsewhere(verdict: Verdict) -> bool:
            # with a side it is about a cast
            compares_runs = verdict.rule in _RUN_TO_RUN_RULES and not verdict.at.side
            return verdict.status == "diverged" and compares_runs and not ARMS[verdict.arm].compiled

        if model is None or not model.own or not any(map(elsewhere, verdicts)):
            return list(verdicts)
        tensors = tensors_of(case, self.recipe(case.spec))
        return [
            at_its_module(self.programs.of(case.spec, ARMS[v.arm]), tensors, v)
            if elsewhere(v)
            else v
            for v in verdicts
        ]

    def _draws(self, case: Case, verdict: Verdict) -> int:
        """How many other draws must show this divergence before it counts. A ratio may be exceeded
        by chance, and a gradient may be missing by chance, if a user's own router sends nothing to
        an expert."""
        if verdict.at.what == "function":
            return 0  # it was judged on freshly drawn directions, not on the case's data
        if BY_NAME[verdict.rule].strength == "ratio":
            return FRESH_DRAWS
        model = MODELS.get(case.spec.model)
        own = model is not None and model.own
        return FEW_DRAWS if own and isinstance(verdict.expect, Present) else 0

    def _holds(self, case: Case, verdict: Verdict, family: str, draws: int) -> bool:
        """True if each of this number of other draws, of the same Spec and class of values, shows
        the divergence."""
        wanted, base = fingerprint(verdict, family), base_of(case.spec)
        arms = frozenset({base.name, verdict.arm})
        rule = [rules_of(case.spec)[verdict.rule]]
        for seed in range(1000, 1000 + draws):
            data = msgspec.structs.replace(case.data, seed=seed)
            other = msgspec.structs.replace(case, data=data)
            again = self.judge(other, rule, arms, focus=1, repeat=False, confirm=False)
            if again.cause(wanted) is None:
                return False
        return True

    def _fold(self, case: Case, verdicts: Iterable[Verdict], ran: bool) -> Judgement:
        family = self.family(case.spec)
        self._answers.clear()
        return fold(case, family, verdicts, ran, known_as=partial(self.known_as, case))

    def known_as(self, case: Case, verdict: Verdict) -> str:
        """Id of the ledger's entry that explains the divergence, or ""."""
        name = fingerprint(verdict, self.recipe(case.spec).family)
        known, cured = self.as_known(case, verdict), partial(self._cured, case, verdict)
        return self.ledger.match(name, known, verdict, cured)

    def _cured(self, case: Case, verdict: Verdict, cure: str) -> bool:
        """True if the verdict's rule is broken in each of several tries, on the verdict's arm, but
        in none while the cure is in force: anything would seem to cure what comes and goes by
        chance. A run that failed need only finish under the cure. The answer is cached for the
        other verdicts of the case."""
        question = case, verdict.rule, verdict.arm, cure
        if question not in self._answers:
            self._answers[question] = self._cures(case, verdict, cure)
        return self._answers[question]

    def _cures(self, case: Case, verdict: Verdict, cure: str) -> bool:
        arms = frozenset({base_of(case.spec).name, verdict.arm})
        rule = [rules_of(case.spec)[verdict.rule]]
        question, crashed = (verdict.rule, verdict.arm), verdict.status == "crashed"

        def holds(judge: Judge) -> bool:
            again = judge.judge(case, rule, arms, confirm=False)
            found = {v.status for v in again.verdicts if (v.rule, v.arm) == question}
            if crashed:  # how it goes on is judged by itself, and may be known
                return "crashed" not in found and bool(found & {"ok", "known", "diverged"})
            return "ok" in found and not again.causes

        others = self.ledger.without_cures()  # what they explain is not asked here
        usual = self.with_ledger(others)
        if any(holds(usual) for _ in range(_CURE_TRIES)):
            return False
        under = self._under.setdefault(
            cure, Judge(self.recipes, others, self.arms, device=self.device)
        )
        from narrowfuzz.play.processes import entered_by_ranks

        with entered_by_ranks(CURES[cure]), CURES[cure]():
            return all(holds(under) for _ in range(_CURE_TRIES))

    def with_ledger(self, ledger: Ledger) -> Judge:
        """A judge with this ledger in place of its own, which runs the same programs."""
        other = Judge(
            self.recipes, ledger, self.arms, device=self.device, before_rerun=self.before_rerun
        )
        other.programs = self.programs
        return other

    def family(self, spec: Spec) -> str:
        """The group whose findings share fingerprints: the recipe's family, and, for a user's own
        model, this model only."""
        family, model = self.recipe(spec).family, MODELS.get(spec.model)
        return f"{family}{OWN}{model.title}" if model is not None and model.own else family


def _judged(evidence: Evidence, rules: Sequence[Rule]) -> list[Verdict]:
    """The verdicts of every rule, also if there is nothing that it could check."""
    verdicts = [
        plain(rule.name, arm, "output", "inconclusive", reason)
        for arm, reason in evidence.unusable_because.items()
        for rule in rules
    ]
    if not evidence.ran:
        mute = [rule for rule in rules if not rule.unfinished]
        verdicts += [plain(o.name, evidence.base, "output", "not_applicable") for o in mute]
    try:
        verdicts += verdicts_of(evidence, rules)
    except Undivided as error:
        verdicts.append(accepted(evidence.base, evidence.spec.model, str(error)))
    return verdicts


def verdicts_of(evidence: Evidence, rules: Sequence[Rule]) -> Iterator[Verdict]:
    """The verdicts of every rule on everything that it applies to."""
    for place, check, seen in checks(evidence, rules):
        for verdict in check(seen):
            if seen.unconverted:
                verdict = replace(verdict, unconverted=True)
            if place.layer:
                verdict = verdict.at_layer(place.layer, place.call, place.rank)
                if verdict.status in BAD:
                    given = seen.given(verdict.at.name)
                    verdict = replace(verdict, given=(*verdict.given, *given))
            yield verdict
