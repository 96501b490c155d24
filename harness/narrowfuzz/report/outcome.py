"""The results of a run that has ended, in sentences that terminal and Markdown share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import LADDER
from narrowfuzz.draw.coverage import Pair
from narrowfuzz.ledger.ledger import Entry, Ledger
from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import in_short
from narrowfuzz.report.accepted import Accepted
from narrowfuzz.report.glossary import new_and_known
from narrowfuzz.report.judged import Combination, Judged, known_issue
from narrowfuzz.report.nearest import looks_like, nearest
from narrowfuzz.report.own_functions import said_of_functions
from narrowfuzz.report.store import Store
from narrowfuzz.report.tally import Tally, counted
from narrowfuzz.trace.words import few, plural
from narrowfuzz.triage.finding import OUT_OF_TIME, Finding, known_words, replay_command

#: The largest number of gradients that a sentence lists.
_NAMED = 4
#: Why cases have not run where more time may not help: what the traceback says.
_BROKEN = "a worker ended with the traceback above"


@dataclass(frozen=True)
class Ended:
    """The results of a run, and the options they depend on."""

    tally: Tally
    store: Store
    ledger: Ledger
    #: Which of the requested combinations that can run here were judged.
    share: Judged
    #: Findings that do not make the run fail.
    accepted: Accepted
    #: All pairs of features that cases of the chosen recipes and arms could have.
    whole: frozenset[Pair] = frozenset()
    #: Options that a replay needs besides the finding's folder.
    options: Sequence[str] = ()
    #: The known issues that the requested recipes, arms and models may show, and the command that
    #: lists them; that command cannot select by model, so it lists more.
    applying: Sequence[Entry] = ()
    list_known: str = "narrowfuzz list known"
    #: True if the number of cases was given (--cases), so that another run can have the same cases.
    counted: bool = False
    #: The least per cent of the combinations that must be judged (--min-judged).
    min_judged: float = 0.0
    #: The user's model that the run is about, "" for none; and the number of its fixed first cases,
    #: which run before drawn ones.
    subject: str = ""
    first: int = 0
    #: False with --no-ledger: known issues are listed among the findings.
    filtered: bool = True
    #: The entries of the ledger that findings are compared with for resemblance.
    entries: Sequence[Entry] = ()

    @property
    def known(self) -> list[tuple[Entry, int]]:
        """The entries that explained a divergence, each with the number of times."""
        hits = hits_of(self.tally.counts)
        entries = (*self.ledger.entries, *self.ledger.unnamed)
        return [(entry, hits[entry.id]) for entry in entries if entry.id in hits]

    def how_often(self, entry: Entry) -> str:
        """How many times this known issue showed, and the circumstances that all of these have in
        common: ``3 times, each with autocast``."""
        counts = self.tally.counts
        found = [
            words
            for name, words in counted(counts, "known under")
            if name == entry.id and counts["known under", name, words] == counts["known", name]
        ]
        times = plural(counts["known", entry.id], "time")
        return f"{times}, each with {_listed(found)}" if found else times

    @property
    def not_shown(self) -> list[Entry]:
        """The applicable known issues that did not show in this run."""
        hits = hits_of(self.tally.counts)
        return [entry for entry in self.applying if entry.id not in hits]

    @property
    def notes(self) -> list[str]:
        """Sentences on what could not be done, and on outdated entries of the suppressions."""
        cut = ["cut off: not everything that was asked for was judged"] * self.tally.interrupted
        return [*cut, *self.tally.notes, *self.accepted.stale(self.seen)]

    @property
    def seen(self) -> list[Finding]:
        """All findings, reproduced and suspected."""
        return [*self.store.findings(), *self.store.suspected()]

    def replay(self, finding: Finding) -> str:
        """The command that replays a finding."""
        return replay_command(self.store.out / "findings" / finding.id, self.options)

    def soundness(self) -> str:
        """The run's result on the user's model: the problems found, or else what was compared
        without finding any, or else why too little was checked; "" without a model."""
        subject, counts = self.subject, self.tally.counts
        if not subject:
            return ""
        if found := self.accepted.counting(self.store.findings()):
            more = f"; and {len(found) - 1} more below" if len(found) > 1 else ""
            head = f"Found {plural(len(found), 'problem')} in {subject} ({_severities(found)})"
            rest = f". {self.compared()}" if self.share.met else ""
            return f"{head}: {found[0].sentence}{more}{rest}"
        if not counts["cases"]:
            more = "" if self.counted else ". Give it more --minutes"
            more = f": {_BROKEN}" if self.tally.broken else more
            return f"{subject}: nothing was checked{more}"
        if counts["first stopped"] and not (self.share.met and self.first_ran):
            # other cases are of a forward alone
            fails = "train" if any(counted(counts, "ran")) else "run"
            # unconverted it may run
            recipes = sorted({in_short(recipe) for recipe, *_ in counted(counts, "stopped")})
            which = f"{fails} with {_listed(recipes)}" if recipes else fails
            return f"{subject} does not {which}: {'; '.join(self.lacking)}"
        if self.lacking:
            more = f". {self.compared()}" if self.share.met else ""
            return f"No problems found in {subject} so far, but {'; '.join(self.lacking)}{more}"
        if self.store.findings():
            return f"No problems found in {subject} but those that are accepted. {self.compared()}"
        if hits := hits_of(counts):
            known = ", ".join(sorted(hits))
            return f"No problems found in {subject} but known ones ({known}). {self.compared()}"
        return f"No problems found in {subject}. {self.compared()}"

    @property
    def lacking(self) -> list[str]:
        """Reasons why a run without findings does not show that a user's model is right, each with
        a remedy; empty if enough was checked, or without a model."""
        counts, found = self.tally.counts, []
        if not self.subject:
            return []
        suspected = self.accepted.counting(self.store.suspected())
        if unstable := [one for one in suspected if one.rule == "O1"]:
            found.append(f"a second run gave another result: {unstable[0].sentence}")
        if late := [one for one in suspected if one.why_suspected == OUT_OF_TIME]:
            problems = plural(len(late), "possible problem")
            found.append(f"it ended before {problems} could be confirmed: {late[0].sentence}")
        if open_ones := [one for one in suspected if not one.answered]:
            problems = plural(len(open_ones), "possible problem")
            found.append(f"the script of {problems} gave no answer: {open_ones[0].sentence}")
        stopped = counts["first stopped"]
        if counts["first"] < self.first:
            more = "" if stopped and not self.first_ran else f": {self._more}"
            found.append(f"{_tried(counts['first'], self.first)}{more}")
        if stopped and (self.share.never or not self.first_ran):
            raised = f"{stopped} of its first {plural(self.first, 'case')} raised"
            # if rules judged calls before the error, no arm is unjudged and so none gives a reason
            whys = "; ".join(map(self._titled, self._errors()))
            found.append(raised if self.share.never else f"{raised}: {whys}")
        if counts["cases"] and not self.share.met and not self.share.why:
            found.append("no rule could judge any of it: narrowfuzz check -v says which tried")
        elif self.share.share < self.min_judged:
            found += self._never_judged()
        return found

    @property
    def first_ran(self) -> int:
        """The number of first cases that ran to their end; others raised, or there was no time."""
        return self.tally.counts["first"] - self.tally.counts["first stopped"]

    def _errors(self) -> list[str]:
        """Why first cases raised, the commonest reason first, from the rule "contract"; known
        issues only if that is all there is."""
        times = Counter[str]()
        for *one, why in counted(self.tally.counts, "stopped"):
            times[why] += self.tally.counts["stopped", *one, why]
        whys = [why for why, _ in sorted(times.items(), key=lambda item: (-item[1], item[0]))]
        return [why for why in whys if not why.startswith(known_issue(""))] or whys

    @property
    def _more(self) -> str:
        """What to do about cases that have not run, or what has kept them from running."""
        more = f"give it more --{'cases' if self.counted else 'minutes'}"
        return _BROKEN if self.tally.broken else more

    def _never_judged(self) -> Iterator[str]:
        """A sentence per reason and recipe, with the arms that were never judged for that reason;
        the recipe is named if there are others."""
        by_reason: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for one in self.share.never:
            by_reason[self.share.why.get(one, self._more), one[0]].add(one[1])
        several = len({recipe for recipe, _, _ in (*self.share.met, *self.share.never)}) > 1
        for (why, recipe), arms in sorted(by_reason.items()):
            which = f" with {recipe}" if several else ""
            yield f"never judged{which} on {', '.join(sorted(arms))}: {self._titled(why)}"

    def _titled(self, why: str) -> str:
        """The reason; if it is a known issue, with its title and what helps."""
        entry = next((e for e, _ in self.known if known_issue(e.id) == why), None)
        return why if entry is None else f"{why}: {entry.title}. What helps: {entry.workaround}"

    def compared(self) -> str:
        """Sentences on what of the user's model was compared, with what and on which data, and on
        what was not checked."""
        share = self.share
        own = [one for one in sorted(share.met) if MODELS[one[2]].by_default]
        arms = [arm for arm in LADDER if any(one[1] == arm.name for one in own)]
        recipes = ", ".join(dict.fromkeys(in_short(recipe) for recipe, _, _ in own))
        ways = [*dict.fromkeys(how for arm in arms for how in _ways(arm))]
        parts = []
        if not all(arm.sharded for arm in arms):
            parts += [_linears(share, own), *filter(None, [_of_elsewhere(own)])]
        if any(arm.sharded for arm in arms):
            parts.append("on ranks, with a batch for each, against one process")
        text = f"Checked with {recipes}: {'; '.join(parts)}"
        if share.operators:
            text += f"; call by call {_listed(share.operators)}"
        if ways:
            text += f"; {_listed(ways)}, against the eager run"
        text += f". On {plural(len(share.values), 'kind')} of data"
        trained = [f"over {plural(share.steps, 'step')}"] * (share.steps > 0)
        trained += [f"with {_listed(share.events)}"] if share.events else []
        if trained:  # a compiled arm may not have seen these
            text += f", eager runs also {', '.join(trained)}"
        if functions := said_of_functions(self.tally.counts):
            text += f". {functions}"
        others = "formulas of its own between the linears (norms, activations, masks, losses)"
        if share.operators or share.unjudged:
            composed = "formulas that combine these calls"
            others = "; ".join((*_unjudged(share.unjudged), composed))
        same = "an error there that is the same in every run is not found"
        return f"{text}. Not checked: {others}: {same}"

    def verdict(self) -> str:
        """The sentence on how many findings, known issues and suspected findings there are."""
        found, suspected = self.store.findings(), self.store.suspected()
        not_counting = sum(bool(self.accepted.why(finding)) for finding in self.seen)
        words = _severities(found)
        words = f" ({words})" if words else ""
        counted = f"New findings: {len(found)}{words}, known issues that showed: {len(self.known)}"
        if not self.filtered:
            counted = f"{plural(len(found), 'finding')}{words}: {new_and_known(found)}"
        return (
            f"{counted}; "
            f"suspected, without a script that shows them: {len(suspected)}."
            f"{f' {not_counting} of them do not count.' if not_counting else ''}"
        )

    def like(self, finding: Finding) -> str:
        """Words on the known issue that the finding is, or on the one that it resembles if it was
        not compared with known issues (--no-ledger only)."""
        if finding.known_issue:
            return known_words(finding.known_issue)
        unasked = not self.filtered and finding.known_issue is None
        known = looks_like(nearest(finding, self.entries)) if unasked else ""
        return f"looks like the known issue {known}" if known else ""

    def _too_little(self) -> str:
        enough = self.share.share >= self.min_judged
        return "" if enough else f", and --min-judged asks for {self.min_judged:g}"

    def judged(self) -> str:
        """The sentence on how many combinations were judged."""
        met, share = len(self.share.met), self.share
        text = (
            f"Judged: {met} of {met + len(share.never)} combinations of recipe, arm and model that "
            f"can run here ({share.share:.0f} %{self._too_little()})"
        )
        if self.subject:
            text += f"; {self.first_ran} of {plural(self.first, 'first case')} ran"
            if self.tally.counts["first stopped"] and (errors := self._errors()):
                text += f", others did not: {errors[0]}"
        shown = self.store.findings() or self.store.suspected() or hits_of(self.tally.counts)
        if met or shown:
            return text
        whys = [*self._never_judged()] if self.tally.counts["cases"] else []
        return "; ".join([f"Nothing was judged: this run has no result. {text}", *whys])


def hits_of(counts: Mapping[Any, int]) -> dict[str, int]:
    """Id of each known issue that explained a divergence -> the number of times."""
    return {entry: counts["known", entry] for (entry,) in counted(counts, "known")}


def _tried(tried: int, of: int) -> str:
    """Words on how many of the first cases were tried, fewer than all."""
    how_many = f"only {tried}" if tried else "none"
    return f"{how_many} of its first {plural(of, 'case')} {'were' if tried > 1 else 'was'} tried"


def _severities(findings: Sequence[Finding]) -> str:
    """The number of findings of each severity, in words: ``1 high, 2 low``."""
    counted = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counted[s]} {s}" for s in SEVERITIES if counted[s])


def _listed(words: Sequence[str]) -> str:
    """The words joined as ``one, two and three``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _ways(arm: Arm) -> Sequence[str]:
    """Words on what an arm does that an eager run does not, besides ranks; empty if nothing."""
    if arm.compiler:
        how = f" with {arm.checkpoint} checkpointing" if arm.checkpoint else ""
        return [f"compiled ({arm.stage}){how}"]
    return [f"recomputed ({arm.checkpoint})"] if arm.checkpoint else []


def _unjudged(reasons: Mapping[str, str]) -> Iterator[str]:
    """``cos and silu (no reference)``, ``attention (dropout ...)``."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for what, why in reasons.items():
        by_reason[why].append(what)
    yield from (f"{_listed(names)} ({why})" for why, names in by_reason.items())


def _linears(share: Judged, own: Sequence[Combination]) -> str:
    """Words on how many linears of a user's model were judged one by one."""
    every = {name: MODELS[name].linears for _, _, name in own}
    seen = {(name, layer) for one in own for name in one[2:] for layer in share.layers.get(one, ())}
    known = [layer for name, layers in every.items() for layer in layers if (name, layer) in seen]
    whole = plural(sum(map(len, every.values())), "linear")
    return f"{len(known)} of {whole} one by one, their casts and products"


def _of_elsewhere(own: Sequence[Combination]) -> str:
    """Words on the called linears with gradients that are not those of their products alone; "" if
    there are none."""
    models = [MODELS[name] for _, _, name in own]
    called = {product.layer for model in models for product in model.products}
    found = (n.rpartition(".")[0] for model in models for n in model.gradients.elsewhere)
    layers = dict.fromkeys(layer for layer in found if layer in called)
    if not layers:
        return ""
    which = few([layer.removeprefix("model.") for layer in layers], _NAMED)
    count = plural(len(layers), "linear")
    return f"gradients of {count} ({which}) between runs only, as other functions add to them"
