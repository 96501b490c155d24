"""Turn a first cause into a finding: repeat, minimise, write its script, verify the script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case, Dtype, Spec
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.environment import describe
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules import rules_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import Rule
from narrowfuzz.trace.expect import Refuses
from narrowfuzz.trace.verdict import PLAIN_FAMILY, Verdict, fingerprint
from narrowfuzz.triage.avoid import avoided_by
from narrowfuzz.triage.effect import observed, worst_of
from narrowfuzz.triage.finding import (
    OUT_OF_TIME,
    Finding,
    Flake,
    Triaged,
    View,
    finding_id,
    reach_of,
    weighed_of,
)
from narrowfuzz.triage.forms import form_of
from narrowfuzz.triage.history import histories
from narrowfuzz.triage.known import known_issue
from narrowfuzz.triage.minimise import Minimised, minimise
from narrowfuzz.triage.needs import lacking_of, needless_of, needs_of
from narrowfuzz.triage.prove import Proof, never_shown, proven
from narrowfuzz.triage.script.recipe_source import conversion_of
from narrowfuzz.triage.verify import RunScript, run_script
from narrowfuzz.triage.view import view_of

_BUILDS = 14
#: A minimal case must exceed its bound by at least half the factor of the drawn case, or by this
#: factor if that is less.
_MARGIN = 8.0
#: How many times a case that does not show its divergence again is run twice, in search of results
#: that differ; and the seconds for minimising a case whose results do.
_REPEATS, _SHORT = 20, 10.0
#: How many times longer a fresh process takes if it also compiles the earlier cases.
_BUILDING = 3.0


def triage(
    judge: Judge,
    case: Case,
    verdict: Verdict,
    *,
    seconds: float = 40.0,
    plant: tuple[str, str] | None = None,
    scripts: RunScript = run_script,
    past: Sequence[Case] = (),
    files: Sequence[Path] = (),
    models: Sequence[str] = (),
    shown: Callable[[Triaged], None] = lambda found: None,
    unfiltered_ledger: Ledger | None = None,
) -> Triaged:
    """Reproduce a divergence, minimise its case and verify its script. If no script shows the
    divergence and repeated runs of the case differ, the finding is that nondeterminism, and it
    lists the divergence in ``seen_as``.

    ``shown`` is called with the finding as soon as the script of the drawn case shows it; the
    search for a smaller case, whose script must show it as well, takes up to ``seconds`` more.
    ``plant`` is the planted fault: the script must show the divergence with it and not without.
    ``past`` are the cases that ran before in this process, ``files`` the recipe files and
    ``models`` the user's models that it knows. ``unfiltered_ledger`` holds known issues that the
    judge does not know, so that the finding may turn out to be one of them.
    """
    confirm = partial(proven, judge, plant=plant, scripts=scripts)
    drawn = _drawn(judge, case, verdict, confirm)
    if not drawn.proof.why:
        shown(_triaged(judge, drawn, None))
    small = _smallest(judge, drawn, confirm, seconds)
    if not never_shown(small.proof.why):
        return _triaged(judge, small, unfiltered_ledger)
    if (chance := _differs_on_repeat(judge, case, verdict)) is not None:
        other = _drawn(judge, *chance, confirm)
        instead = _triaged(
            judge, _smallest(judge, other, confirm, min(seconds, _SHORT)), unfiltered_ledger
        )
        if instead.confirmed:
            part = _triaged(judge, small, None).finding
            seen_as = [f"{part.fingerprint}: {part.sentence}"]
            return replace(
                instead, finding=msgspec.structs.replace(instead.finding, seen_as=seen_as)
            )
    if past:
        names = [rule.name for rule in _rules(small.case, verdict)]
        compiled = ARMS[verdict.arm].compiled
        # the smaller case may depend on code that minimising has compiled in this process only
        base = drawn if compiled else small
        for longer, there in histories(
            judge,
            base.minimal,
            base.verdict,
            past,
            scripts,
            rules=names,
            plant=plant,
            files=files,
            models=models,
            seconds=seconds * (_BUILDING if compiled else 1),
        ):
            proof = confirm(longer, there)
            small = replace(small, minimal=longer, verdict=there, proof=proof)
            if not proof.why:
                break
    return _triaged(judge, small, unfiltered_ledger)


@dataclass(frozen=True)
class _Shown:
    """A divergence of ``case``, the smallest case so far that shows it, and the latter's script."""

    case: Case
    minimal: Case
    verdict: Verdict
    proof: Proof
    #: The process that saw the divergence saw it again.
    again: bool
    #: The divergence as ``case`` shows it.
    seen: Verdict
    #: The result of the search for a smaller case; None before it.
    search: Minimised | None = None
    #: The case whose conditions are reported as ``needs``. For a missing gradient its fingerprint
    #: may differ, as that gradient may have another name there.
    plainest: Case | None = None


def _differs_on_repeat(judge: Judge, case: Case, verdict: Verdict) -> tuple[Case, Verdict] | None:
    """Search for nondeterminism, which may break any rule that compares two runs: run the case, and
    the same case in fp32, again and again. Returns the case and the O1 verdict if two runs of it
    differ; None if none do, for a verdict of O1 itself, and where repeating is too expensive."""
    form = form_of(case.spec)
    if verdict.rule == "O1" or not form.one_process or ARMS[verdict.arm].compiler:
        return None
    plain = form.cheapest(case, verdict.arm)
    for dtype in dict.fromkeys((plain.spec.dtype, *_widest(judge, case.spec))):
        spec = msgspec.structs.replace(plain.spec, dtype=dtype)
        again = msgspec.structs.replace(plain, spec=spec)
        for _ in range(_REPEATS):
            causes = judge.judge(again, needed("O1", again.spec)).causes
            if found := next((v for v in causes if v.rule == "O1"), None):
                return again, found
    return None


def _widest(judge: Judge, spec: Spec) -> tuple[Dtype, ...]:
    """fp32, if the recipe takes it: it shows the last bits of a scale, which a narrower result
    rounds away."""
    return ("fp32",) if "fp32" in judge.recipe(spec).dtypes else ()


def _rules(case: Case, verdict: Verdict) -> tuple[Rule, ...]:
    if isinstance(verdict.expect, Refuses) and not verdict.expect.raised:
        every = rules_of(case.spec).values()
        # the verdict comes from whichever rule first needs a reference for the refused shape
        return tuple(rule for rule in every if not rule.reruns)
    return needed(verdict.rule, case.spec)


def _drawn(
    judge: Judge, case: Case, verdict: Verdict, confirm: Callable[[Case, Verdict], Proof]
) -> _Shown:
    """The case as it was drawn, without the rungs that are more expensive than the guilty one, and
    its script."""
    case = form_of(case.spec).cheapest(case, verdict.arm)
    again = _still(judge, case, verdict) is not None or _follows(judge, case, verdict)
    return _Shown(case, case, verdict, confirm(case, verdict), again, seen=verdict)


def _smallest(
    judge: Judge,
    drawn: _Shown,
    confirm: Callable[[Case, Verdict], Proof],
    seconds: float,
) -> _Shown:
    """The same divergence with a smaller case, unless only the drawn case's script shows it."""
    case, verdict = drawn.case, drawn.verdict
    least = min(verdict.factor / 2, _MARGIN)

    def shows(candidate: Case) -> bool:
        found = _still(judge, candidate, verdict)
        return found is not None and found.factor >= least

    search = minimise(
        case,
        shows,
        builds=_BUILDS if ARMS[verdict.arm].compiler else 0,
        seconds=seconds,
        hint=form_of(case.spec).hint(judge, case, verdict),
    )
    tried = replace(
        drawn, search=search, plainest=_plainest(judge, case, search.case, verdict, seconds)
    )
    found = _still(judge, search.case, verdict) if search.case != case else None
    if found is None:
        return tried
    proof = confirm(search.case, found)
    if proof.why and not drawn.proof.why:
        return tried
    return replace(tried, minimal=search.case, verdict=found, proof=proof, again=True)


def _still(judge: Judge, case: Case, verdict: Verdict) -> Verdict | None:
    """The divergence as a first cause of this case, judged now; None if it is not one."""
    wanted = fingerprint(verdict, judge.family(case.spec))
    return _shown_by(judge, case, verdict, lambda judgement: judgement.cause(wanted))


def _shown_by(
    judge: Judge,
    case: Case,
    verdict: Verdict,
    of: Callable[[Judgement], Verdict | None],
) -> Verdict | None:
    """The verdict that ``of`` picks from a new judgement of the case by the verdict's rule and the
    rules that may explain it. To save compiles, the guilty stage and the rungs that compile nothing
    run first; only if ``of`` finds something there do the other rungs beneath the guilty one run,
    one of which may be the first to show it."""
    spec = case.spec
    if not _playable(judge, spec) or verdict.rule not in rules_of(spec):
        return None
    rules = _rules(case, verdict)
    stage, beneath = ARMS[verdict.arm].stage, judge.beneath(spec, verdict.arm)
    if not beneath:
        return None
    cheap = frozenset(n for n in beneath if ARMS[n].stage == stage or not ARMS[n].compiler)
    if cheap < beneath and of(judge.judge(case, rules, cheap, confirm=False)) is None:
        return None
    return of(judge.judge(case, rules, beneath))


def _plainest(judge: Judge, drawn: Case, minimal: Case, verdict: Verdict, seconds: float) -> Case:
    """The case that shows the same divergence under the fewest conditions: ``minimal``, unless a
    gradient is missing. A missing gradient has another name in a model than in a single linear, so
    its fingerprint differs; that makes the model no condition. The search starts from the ``drawn``
    case, because the minimal one may be too small to become a single linear."""
    lacking = lacking_of(verdict)
    if not lacking or not needs_of(minimal, verdict):
        return minimal

    def same(judgement: Judgement) -> Verdict | None:
        place = verdict.rule, verdict.arm, verdict.status
        causes = (v for v in judgement.causes if (v.rule, v.arm, v.status) == place)
        return next((v for v in causes if lacking_of(v) == lacking), None)

    builds = _BUILDS if ARMS[verdict.arm].compiler else 0
    search = minimise(
        drawn,
        lambda candidate: _shown_by(judge, candidate, verdict, same) is not None,
        builds=builds,
        seconds=min(seconds, _SHORT),
    )
    return min((minimal, search.case), key=lambda case: len(needs_of(case, verdict)))


def _follows(judge: Judge, case: Case, verdict: Verdict) -> bool:
    """Does the case show the divergence again, possibly as a consequence of another one? When it
    was drawn, only one of its linears was judged; now all of them are."""
    wanted = fingerprint(verdict, judge.family(case.spec))
    shown = _shown_by(judge, case, verdict, lambda now: verdict if now.shows(wanted) else None)
    return shown is not None


def _triaged(judge: Judge, shown: _Shown, unfiltered_ledger: Ledger | None) -> Triaged:
    proof = shown.proof
    if proof.why and not shown.again:
        why = f"it did not happen again in the same process; {proof.why}"
        proof = replace(proof, why=why)
    flake: Flake = "always" if shown.again else "flaky" if proof.why else "per process"
    found = Triaged(_finding(judge, shown, flake, proof), proof.script)
    return (
        found
        if unfiltered_ledger is None or proof.why
        else _as_known(judge, shown, found, unfiltered_ledger)
    )


def _as_known(judge: Judge, shown: _Shown, found: Triaged, ledger: Ledger) -> Triaged:
    """The finding with the id and severity of the known issue that explains it, if any."""
    case, verdict = shown.minimal, shown.verdict
    entry = known_issue(judge, ledger, case, verdict, _rules(case, verdict))
    if entry is None:
        return replace(found, finding=msgspec.structs.replace(found.finding, known_issue=""))
    why = f"that of the known issue {entry.id}: {entry.weighed.why}"
    finding = msgspec.structs.replace(
        found.finding, known_issue=entry.id, severity=entry.severity, why_severity=why
    )
    return replace(found, finding=finding)


def unconfirmed(judge: Judge, case: Case, verdict: Verdict) -> Triaged:
    """The finding of a divergence that triage has not run on, for when the run ends first."""
    return Triaged(_unproven(judge, case, case, verdict), "")


def _unproven(judge: Judge, case: Case, minimal: Case, verdict: Verdict) -> Finding:
    recipe, name = judge.recipe(case.spec), fingerprint(verdict, judge.family(case.spec))
    return finding_of(verdict, case, minimal, recipe, judge.device.describe(), name)


def finding_of(
    verdict: Verdict,
    case: Case,
    minimal: Case,
    recipe: Recipe,
    device: Mapping[str, Any],
    name: str = "",
) -> Finding:
    """The finding of a divergence whose script has not been run. Its fingerprint is ``name``, by
    default the verdict's in the recipe's family."""
    weight, name = weighed_of(verdict, minimal, 0.0), name or fingerprint(verdict, recipe.family)
    backend = (
        "" if minimal.spec.single_operator else recipe.backend_words.get(minimal.spec.backend, "")
    )
    return Finding(
        id=finding_id(name, minimal),
        fingerprint=name,
        severity=weight.severity,
        why_severity=weight.why,
        recipe=case.spec.recipe,
        scaled=not (verdict.unconverted or recipe.family == PLAIN_FAMILY),
        backend_words=backend,
        device=device["name"],
        rule=verdict.rule,
        arm=verdict.arm,
        role=verdict.role,
        symptom=verdict.symptom,
        sentence=verdict.sentence(),
        at=verdict.at,
        got=verdict.got,
        expect=verdict.expect,
        given=verdict.given,
        strength=rules_of(case.spec)[verdict.rule].strength,
        reach=reach_of(minimal),
        case=case,
        minimal=minimal,
        flake="flaky",
        why_suspected=OUT_OF_TIME,
        environment={**describe(), "device": device},
    )


def _finding(judge: Judge, shown: _Shown, flake: Flake, proof: Proof) -> Finding:
    case, minimal, verdict, search = shown.case, shown.minimal, shown.verdict, shown.search
    plainest = shown.plainest or minimal
    evidence = observed(judge, minimal, verdict)
    effect, form = worst_of(evidence, verdict), form_of(minimal.spec)
    weight = weighed_of(verdict, minimal, effect.share)
    return msgspec.structs.replace(
        _unproven(judge, case, minimal, verdict),
        severity=weight.severity,
        why_severity=weight.why,
        flake=flake,
        attempts=search.attempts if search else 0,
        untried=search.untried if search else [],
        script_output=proof.output,
        effect=effect.share if math.isfinite(effect.share) else str(effect.share),
        came=effect.came,
        why_suspected=proof.why,
        answered=proof.answered,
        # the fields of a case that was not minimised are not all conditions of the divergence
        needs=needs_of(plainest, verdict) if search else [],
        needless=needless_of(case, plainest, verdict) if search else [],
        avoided=avoided_by(judge, minimal, verdict) if search else [],
        conversion=conversion_of(judge.recipe(minimal.spec), minimal.spec),
        story=form.story(evidence, verdict),
        view=_view(judge, shown, evidence) if form.one_process else None,
    )


def _view(judge: Judge, shown: _Shown, evidence: Evidence) -> View | None:
    """The view of the case as it was drawn, whose larger tensors show more of a pattern. A compiled
    arm is not run once more for it: its view is of the smallest case, from its ``evidence``."""
    if shown.case != shown.minimal and not ARMS[shown.verdict.arm].compiled:
        drawn = observed(judge, shown.case, shown.seen)
        if (view := view_of(drawn, shown.seen)) is not None:
            return msgspec.structs.replace(view, drawn=True)
    return view_of(evidence, shown.verdict)


def _playable(judge: Judge, spec: Spec) -> bool:
    """Can the recipe run this Spec? It may refuse even simpler events."""
    try:
        judge.recipe(spec).check(spec)
    except ValueError:
        return False
    return True


def needed(name: str, spec: Spec) -> tuple[Rule, ...]:
    """The rule itself and the rules whose divergence could explain its own: fewer reruns per
    attempt than all rules, and the same first causes."""
    rules = rules_of(spec)
    wanted = {name, "contract"} | rules[name].upstream
    return tuple(rule for rule in rules.values() if rule.name in wanted)
