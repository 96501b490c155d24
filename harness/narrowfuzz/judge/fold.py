"""Sorts the bad verdicts of a case into first causes, which are reported, known issues and
consequences, each with its cause (``rules/causes.py`` decides which verdict explains which)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from narrowfuzz.case.kind import MESHES, kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.play.names import name_of
from narrowfuzz.rules import rules_of
from narrowfuzz.rules.causes import root_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import BAD, Verdict, fingerprint


@dataclass(frozen=True)
class Judgement:
    """All verdicts of one case; ``causes`` are the first causes among the bad ones, and
    ``consequences`` the others, each with its cause."""

    case: Case
    family: str
    verdicts: tuple[Verdict, ...]
    causes: tuple[Verdict, ...]
    known: tuple[Verdict, ...]
    #: False: the eager arm raised, and will on every data draw of this Spec.
    ran: bool = True
    consequences: tuple[tuple[Verdict, Verdict], ...] = ()

    def fingerprints(self) -> set[str]:
        return {fingerprint(v, self.family) for v in self.causes}

    def cause(self, wanted: str) -> Verdict | None:
        """The first cause with this fingerprint."""
        for verdict in self.causes:
            if fingerprint(verdict, self.family) == wanted:
                return verdict
        return None

    def shows(self, wanted: str) -> bool:
        """Is this fingerprint among the bad verdicts, as a first cause or as a consequence?"""
        return any(v.status in BAD and fingerprint(v, self.family) == wanted for v in self.verdicts)


def fold(
    case: Case,
    family: str,
    verdicts: Iterable[Verdict],
    ran: bool,
    *,
    known_as: Callable[[Verdict], str],
) -> Judgement:
    """Keep first causes: a verdict explained by one upstream of it is its consequence.
    ``known_as`` names the ledger's entry that explains a first cause, or ""."""
    rules = rules_of(case.spec)
    rung = {name: i for i, name in enumerate(ARMS)}
    rank = {name: i for i, name in enumerate(rules)}
    single = case.spec.model == "linear"
    ordered = sorted(verdicts, key=lambda v: (rung.get(v.arm, 0), rank[v.rule]))
    roots: list[Verdict] = []
    folded: list[Verdict] = []
    consequences: list[tuple[Verdict, Verdict]] = []
    for verdict in ordered:
        if verdict.status == "known":
            roots.append(verdict)
        elif verdict.status in BAD:
            root = root_of(verdict, _above(verdict, roots, case.spec), rules, single=single)
            if root is None:
                entry = known_as(verdict)
                verdict = verdict.known(entry) if entry else verdict
                roots.append(verdict)
            elif root.status == "known":
                verdict = verdict.known(root.explained_by)
            else:
                consequences.append((verdict, root))
        folded.append(verdict)
    causes = tuple(v for v in roots if v.status in BAD)
    known = tuple(v for v in roots if v.status == "known")
    return Judgement(case, family, tuple(folded), causes, known, ran, tuple(consequences))


def _above(verdict: Verdict, roots: Sequence[Verdict], spec: Spec) -> Sequence[Verdict]:
    """The first causes and known issues that this verdict may be a consequence of. On ranks a known
    issue of one parameter, or of its gradient, does not explain the same rule's divergence of
    another parameter: each is looked up in the ledger separately."""
    if kind_of(spec) not in MESHES or verdict.rule == "contract":
        return roots

    def of_another(root: Verdict) -> bool:
        known = (root.status, root.rule) == ("known", verdict.rule)
        return known and _subject(root.at) != _subject(verdict.at)

    return [root for root in roots if not of_another(root)]


def _subject(at: At) -> str:
    """What the address is about: the layer; or the result; or the parameter, also for its gradients
    and steps."""
    name = name_of(at.name)
    return at.layer or (at.name if name.by_rows else name.gradient_of or name.kind)
