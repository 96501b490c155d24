"""``narrowfuzz replay``: runs one case again, and reports whether it still fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from narrowfuzz.arms.available import select_arms, unavailable
from narrowfuzz.arms.lost import DeviceLost
from narrowfuzz.case.ladder import BY_NAME, climb
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.machine.device import check_device
from narrowfuzz.machine.environment import prepare
from narrowfuzz.models.catalog import title_of
from narrowfuzz.own_models import known_as, source_of
from narrowfuzz.recipe.recipe import obstacles
from narrowfuzz.report.lifetime import Database, Kind, record_now
from narrowfuzz.report.lookup import OnDisk, lookup
from narrowfuzz.report.terminal import console
from narrowfuzz.trace.verdict import LOSES_DEVICE, Verdict, fingerprint
from narrowfuzz.triage.finding import Finding
from narrowfuzz.triage.session import SessionOptions, open_session

Outcome = Literal["fixed", "sound", "still failing", "diverges otherwise", "cannot tell"]
#: Exit codes.
CODES: dict[Outcome, int] = {
    "fixed": 0,
    "sound": 0,
    "still failing": 1,
    "diverges otherwise": 1,
    "cannot tell": 125,
}
#: The event that is recorded for a finding; none for the other outcomes. ``replay`` does not record
#: "gone" for a finding that does not reproduce every time.
_KINDS: dict[Outcome, Kind] = {"fixed": "gone", "still failing": "seen"}


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``narrowfuzz replay``."""

    #: A case file, a finding's folder or a finding's id.
    case: str
    arms: tuple[str, ...] = ()
    recipe_files: tuple[Path, ...] = ()
    te_version: str = ""
    #: "": the device on which the finding was found; for a case file, the CPU.
    device: str = ""
    #: The user's own models that the case is about.
    models: tuple[str, ...] = ()
    #: The database that records the outcome for a finding, a file or URL; "": the default one.
    database: str = ""


@dataclass(frozen=True)
class Replayed:
    """What a case shows now. Of several divergences this is the one of the finding that is
    replayed, or else the first."""

    case: str
    outcome: Outcome
    recipe: str = ""
    #: The divergence, as a sentence like a finding's; "" if there is none.
    sentence: str = ""
    rule: str = ""
    arm: str = ""
    fingerprint: str = ""
    #: The known issues that explain it, "" for none.
    entry: str = ""
    #: Its consequences, one a role and arm, each with the rules that fail.
    consequences: tuple[str, ...] = ()
    #: Why the outcome is "cannot tell"; if nothing diverges, the arms that ran.
    reason: str = ""
    #: The other divergences with a first cause of their own.
    others: tuple[Replayed, ...] = ()

    @property
    def code(self) -> int:
        return CODES[self.outcome]


def replay(options: ReplayOptions) -> Replayed:
    """Replay a case file, a finding's folder or a finding's id.

    Raises ValueError if ``options.case`` is none of these, the case is not valid, or there is no
    such arm or device here.
    """
    chosen = select_arms(options.arms)
    found = lookup(options.case)
    if not isinstance(found, OnDisk):
        return _replayed(found, None, options, chosen, options.device or "cpu")
    finding = found.finding
    device = options.device or finding.device
    records = Database.of(options.database, found.folder)
    replayed = _replayed(finding.minimal, finding, options, chosen, device)
    kind = _KINDS.get(replayed.outcome)
    by_chance = kind == "gone" and finding.flake != "always"
    if records is not None and kind is not None and not by_chance:
        record_now(records, found, device, kind)
    return replayed


def _replayed(
    case: Case,
    finding: Finding | None,
    options: ReplayOptions,
    chosen: frozenset[str],
    device: str,
) -> Replayed:
    check_device(device)
    prepare()
    if options.te_version:
        from te_on_cpu import environment as te

        te.choose(options.te_version)
    session_options = SessionOptions(
        device=device,
        recipes=case.recipes,
        recipe_files=options.recipe_files,
        arms=chosen,
        ledger="none",
    )
    session = open_session(session_options)
    judge = session.judge
    register_own(case, options.models)
    if obstacles := obstacles_to(judge, case, chosen):
        return Replayed(case.id, "cannot tell", reason=f"cannot run here: {obstacles[0]}")
    try:
        judgement = judge.judge(case)
    except DeviceLost as lost:
        same = finding is None or finding.symptom == LOSES_DEVICE
        outcome: Outcome = "still failing" if same else "diverges otherwise"
        return Replayed(case.id, outcome, case.spec.recipe, f"the case loses the device: {lost}")
    if judgement.causes:
        again = session.new_judge(session.ledger)
        return _diverged(again, judgement, finding.fingerprint if finding else "")
    if reason := _not_judged(judgement, finding):
        return Replayed(case.id, "cannot tell", reason=reason)
    outcome = "fixed" if finding else "sound"
    return Replayed(case.id, outcome, reason=f"no divergence on {_arms(judge, case)}")


def print_replayed(replayed: Replayed) -> None:
    """Print the outcome for people."""
    page = console(markup=False)
    if not replayed.sentence:
        of = "" if replayed.outcome == "cannot tell" else f"case {replayed.case} shows "
        page.print(f"{replayed.outcome}: {of}{replayed.reason}")
    for one in (replayed, *replayed.others) if replayed.sentence else ():
        now = " now" if one.outcome == "diverges otherwise" else ""
        page.print(f"{one.outcome}{now}: {one.sentence}")
        if one.rule:
            words = BY_NAME[one.arm].words
            found_by = f"found by: narrowfuzz rule {one.rule}"
            page.print(f"  {one.recipe}, {words}; {found_by}")
            page.print(f"  fingerprint: {one.fingerprint}")
        if one.consequences:
            page.print(f"  consequences: {'; '.join(one.consequences)}")
        if one.entry:
            page.print(f"  known issue: {one.entry}")


def _diverged(judge: Judge, judgement: Judgement, wanted: str) -> Replayed:
    """The divergences, first the one with the fingerprint ``wanted``; ``judge`` uses the ledger."""
    again = judge.judge(judgement.case)  # here known issues are not causes
    explained = ", ".join(sorted({v.explained_by for v in again.known}))
    unknown = again.fingerprints()
    found = {fingerprint(v, judgement.family): v for v in judgement.causes}
    case = judgement.case
    first, *others = (
        Replayed(
            case.id,
            "diverges otherwise" if wanted and name != wanted else "still failing",
            case.spec.recipe,
            verdict.sentence(),
            verdict.rule,
            verdict.arm,
            name,
            judge.known_as(case, verdict) or ("" if name in unknown else explained),
            _consequences(judgement, verdict),
        )
        for name, verdict in sorted(found.items(), key=lambda item: item[0] != wanted)
    )
    return replace(first, others=tuple(others))


def _consequences(judgement: Judgement, cause: Verdict) -> tuple[str, ...]:
    """The consequences of this cause in words, with the rules on one role and arm together."""
    found: dict[tuple[str, str], list[str]] = {}
    for verdict, root in judgement.consequences:
        if root == cause:
            found.setdefault((verdict.role, verdict.arm), []).append(verdict.rule)
    return tuple(
        f"{', '.join(dict.fromkeys(rules))} on {role}, {BY_NAME[arm].words}"
        for (role, arm), rules in found.items()
    )


def _not_judged(judgement: Judgement, finding: Finding | None) -> str:
    """Why a case without a divergence proves nothing: the finding's rule reached no verdict on the
    finding's arm or, for a case file, no rule reached any; "" if one did."""
    place = (finding.rule, finding.arm) if finding else None
    mine = [v for v in judgement.verdicts if place in (None, (v.rule, v.arm))]
    if any(v.status in ("ok", "known") for v in mine):
        return ""
    reasons = dict.fromkeys(v.why for v in mine if v.why)
    what = f"{finding.rule} on {finding.arm}" if finding else "any rule"
    return f"no verdict of {what}: {'; '.join(reasons) or 'it was not judged'}"


def _arms(judge: Judge, case: Case) -> str:
    return ", ".join(arm.name for arm in judge.rungs(case.spec))


def obstacles_to(judge: Judge, case: Case, chosen: frozenset[str]) -> list[str]:
    """Why a case cannot run here on these arms, in sentences."""
    recipe = judge.recipe(case.spec)
    lacking = obstacles(recipe, judge.device.torch)
    if not lacking:
        recipe.provide()
    backend = recipe.backend(case.spec)
    found = [f"{recipe.name} {reason}" for name, reason in lacking.items() if name == backend]
    for arm in climb(case.spec):
        if arm.name in chosen and (reason := unavailable(arm, judge.device.name)):
            found.append(f"{arm.name}: {reason}")
    return found


def register_own(case: Case, models: tuple[str, ...]) -> None:
    """Register the user's models of a case and its history, as far as the command line names them.
    Their files are used as they are now, and may have changed since the case was found.

    Raises ValueError if the command line names only other models."""
    named = {source_of(text).title: text for text in models}
    for name in {spec.model for spec in (case.spec, *(c.spec for c in case.history))}:
        title = title_of(name)
        if title in named:
            known_as(name, named[title])
        elif title and named:
            raise ValueError(f"the case is about {title}, not about {', '.join(named)}")
