"""Causes and consequences: which of several divergences explains another.

Each rule's ``upstream`` names the rules that may explain it (``table.py``), except for the cases in
``root_of``; ``judge/fold.py`` applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from narrowfuzz.case.arm import EAGER, with_checkpoint
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.contract import ALLOWED
from narrowfuzz.rules.quantiser import LEVEL_B
from narrowfuzz.rules.rule import Rule
from narrowfuzz.trace.verdict import FOLLOWED, Verdict


def root_of(
    verdict: Verdict, roots: Sequence[Verdict], rules: Mapping[str, Rule], *, single: bool = False
) -> Verdict | None:
    """The cause, among those found so far, that this divergence is a consequence of; None if it is
    a cause itself. A known wrong output of a ``single`` linear explains none of its gradients."""
    rule = rules[verdict.rule]
    upstream = rule.upstream
    composed = verdict.at.what == "operator" and bool(OPERATORS[verdict.at.name].functions)
    for root in roots:
        if single and _apart(root, verdict):
            continue
        if root.symptom == ALLOWED and verdict.rule != "contract":
            continue  # "runs although it should be refused" explains no wrong number
        if (
            root.rule in ("O12", "O13")
            and root.rule != verdict.rule
            and _only_root_recomputes(root, verdict)
        ):
            continue
        if composed and root.at.what == "operator" and not OPERATORS[root.at.name].functions:
            if root.arm == verdict.arm and root.status != "known":
                return root  # a kernel that the function is composed of
            continue
        # no divergence, but a reference that follows a known deviation on this arm: it explains
        # that the recomputed run differs from the plain one, if no other arm followed it alike
        if root.role == FOLLOWED:
            if verdict.rule == "O12" and root.arm == verdict.arm and _only_there(root, roots):
                return root
            continue
        if root.at.what == "operator" and root.status == "known":
            explains = _gave(root, verdict) and root.rule in upstream
            if explains and not _on_both_arms(root, verdict, roots):
                return root
            continue
        if rule.scope == "case" and verdict.rule != "contract":
            again = root.rule == verdict.rule and root.symptom == verdict.symptom
            beneath = _beneath(root, verdict) or _on_ranks(root, verdict)
            if again or (beneath and root.rule in upstream):
                return root
        if root.at.layer != verdict.at.layer and rules[root.rule].scope == "layer":
            continue
        if root.at.what == "operator" and _gave(root, verdict) and root.rule in upstream:
            return root
        # a dequantised operand shows a wrong code or scale too, but cannot tell which it was
        symptoms = {verdict.symptom} if verdict.symptom != LEVEL_B else {root.symptom}
        same = root.rule == verdict.rule and root.symptom in symptoms
        alike = root.role == verdict.role or {root.role, verdict.role} <= rule.exchanged
        if alike and (same or root.rule in upstream):
            return root
        if root.rule == "contract" and root.arm == verdict.arm and root.status == "crashed":
            return root
    return None


def _gave(call: Verdict, verdict: Verdict) -> bool:
    """Can the wrong result of an operator's ``call`` have caused this verdict? If the call is no
    known issue, any verdict on its arm; if it is one, verdicts on its layer or on that layer's
    parameters, on any arm."""
    if call.status != "known":
        return call.arm == verdict.arm
    module = name_of(verdict.at.name).module
    return bool(call.at.layer) and call.at.layer in (verdict.at.layer, module)


def _on_both_arms(known: Verdict, verdict: Verdict, roots: Iterable[Verdict]) -> bool:
    """Does the verdict compare two arms on the same data, of which both make this layer's call with
    the known issue? Then the issue explains no difference between them."""
    if verdict.rule not in ("O8", "O9", "O12"):
        return False
    arms = {
        root.arm
        for root in roots
        if root.at.what == "operator"
        and (root.explained_by, root.at.layer) == (known.explained_by, known.at.layer)
    }
    return verdict.arm in arms and len(arms) > 1


def _beneath(root: Verdict, verdict: Verdict) -> bool:
    """Is the root cause on the same arm as the verdict, on eager, with which the verdict compares
    PyTorch's own kernels, or in the recompute of eager, when the verdict compares a compiled
    recompute of the same kind with eager?"""
    if root.arm == verdict.arm:
        return True
    if verdict.rule not in ("O8", "O9"):
        return False
    arm = BY_NAME[verdict.arm]
    if arm.native:
        return root.arm == EAGER.name
    if not arm.compiled or root.arm != with_checkpoint(EAGER, arm.checkpoint or "none").name:
        return False
    # what is known of the recompute in eager may hide another problem of the compiled one
    return root.rule in ("O12", "O13") and root.status != "known"


def _only_root_recomputes(root: Verdict, verdict: Verdict) -> bool:
    """Does a checkpoint of narrowfuzz's recompute something on the arm of the root cause, and none
    on that of the verdict?"""
    return bool(BY_NAME[root.arm].checkpoint) and not BY_NAME[verdict.arm].checkpoint


def _on_ranks(root: Verdict, verdict: Verdict) -> bool:
    """Is the root cause on an arm of one process, and this verdict on an arm of ranks?"""
    return BY_NAME[verdict.arm].sharded and not BY_NAME[root.arm].sharded


def _apart(root: Verdict, verdict: Verdict) -> bool:
    """Is the verdict about a gradient, and the root cause a known wrong output, found by other
    rules than those about recomputing?"""
    recomputed = root.rule in ("O12", "O13")
    output = root.status == "known" and root.role == "output" and not recomputed
    return output and verdict.role.startswith("grad_")


def _only_there(followed: Verdict, roots: Iterable[Verdict]) -> bool:
    """Was this deviation followed on no other arm in the same way?"""
    return not any(
        root.role == FOLLOWED
        and root.arm != followed.arm
        and (root.explained_by, root.why) == (followed.explained_by, followed.why)
        for root in roots
    )
