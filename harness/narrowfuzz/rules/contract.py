"""The contract: a layer that conversion accepts runs forward and backward on every arm, and under
autocast returns autocast's dtype. A layer that is refused is refused at conversion or at its first
call, by an error that names the layer, its shape and the rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.whole import not_passed, role_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Lacking, Present, Refuses, Runs, Typed
from narrowfuzz.trace.meaning import shortened
from narrowfuzz.trace.trace import RunError, Trace
from narrowfuzz.trace.verdict import FOLLOWED, Verdict

#: Matches the words of a refusal that state the rule that was broken. A library's check that
#: something is there ("must not be None"), and Python's that a call has the arguments of a function
#: ("takes no keyword arguments"), state none.
RULE = re.compile(
    r"multipl|divisib|align|must (be|have)|(must not|should) be(?! None\b)|must not have"
    r"|only support|at least|only .{0,80}\bsupported|takes? only|takes? no (?!(keyword )?arguments)"
    r"|cannot be (empty|zero|0)\b|% ?\d+ ?[!=]= ?0",
    re.I,
)
#: The error that torch.utils.checkpoint.create_selective_checkpoint_contexts raises, as documented,
#: unless allow_cache_entry_mutation is set; and what it means to the author of the model.
_MUTATED = "Tensor cached during selective activation checkpoint has been mutated"
CHANGED_IN_PLACE = (
    "PyTorch refuses a selective checkpoint of this model, which changes in place a result that "
    "the checkpoint saves: compute out of place, as ReLU(inplace=False) does, or checkpoint in full"
)
#: The error that triton_on_cpu raises where a compiler traces a kernel, and what it means.
_UNTRACED = "Triton's interpreter takes no fake tensors"
_INTERPRETED = "without a GPU no compiler traces the Triton kernels that this model calls"
#: The error of torch's reentrant checkpoint for a block that is called by keyword.
_BY_KEYWORD = "Unexpected keyword arguments: "
_NO_KEYWORDS = (
    "torch's reentrant checkpoint takes no keyword arguments, by which this model calls its blocks"
)
#: Matches a refusal whose rule is not about sizes.
_NO_SIZE = re.compile(r"only .{0,80}\bsupported", re.I)
#: How torch refuses the norm of order infinity of gradients that have no elements: clearly.
_NO_NORM = "norm on an empty tensor because the operation does not have an identity"
#: Matches torch's errors about tensors without elements, such as those of an expert to which no row
#: is sent.
_EMPTY = re.compile(r"numel\(\) == 0|to have non-zero size|tensor of 0 elements")


#: Matches a floating-point number in a message. Whole numbers are sizes.
_VALUE = re.compile(r"[-+]?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\b(?:nan|inf)\b)", re.I)


#: The symptom of a run that is documented to raise and does not.
ALLOWED = "runs although it is documented to raise"


def check_contract(evidence: Evidence) -> Iterator[Verdict]:
    """Judges the error of every arm, or without an error whether it has all gradients. In eager,
    also judges the dtype that each linear returns under autocast."""
    base = evidence.traces.get(evidence.base)
    if evidence.spec.narrowed and base is not None and base.error is None:
        yield _narrowed(evidence, base)
    base_fails = base is not None and base.error is not None
    for arm, trace in evidence.traces.items():
        if trace.error is None:
            yield _allowed(evidence, arm) if evidence.forbidden else _complete(evidence, arm)
            continue
        if evidence.forbidden and trace.error.phase == "forward":
            yield plain("contract", arm, "forward", "ok")
            continue
        if arm != evidence.base and base_fails and evidence.refusal:
            yield plain("contract", arm, trace.error.phase, "not_applicable", "eager refuses too")
            continue
        why = _of_the_model(evidence, arm, trace.error, base_fails)
        if why := why or _before_a_refusal(evidence, trace, base_fails):
            yield plain("contract", arm, trace.error.phase, "not_applicable", why)
            continue
        problem = _problem(evidence, arm, trace.error, base_fails)
        if problem:
            error = trace.error
            words, lacking = problem
            expect = Refuses(evidence.refusal, error.type, lacking) if lacking else Runs(error.type)
            yield Verdict(
                "contract",
                arm,
                error.phase,
                "crashed",
                f"{words} ({error.type} in {error.where.rsplit('.', 1)[-1]})",
                At(what="error", layer=error.layer, phase=error.phase, name=error.where),
                f"{error.type}: {_first_line(error.message)}",
                expect,
                own_error=error.own,
            )
        else:
            yield plain("contract", arm, trace.error.phase, "ok", "clear refusal")


def _allowed(evidence: Evidence, arm: str) -> Verdict:
    """The divergence of a run that finished although it is documented to raise."""
    at, expect = At(what="error", phase="forward"), Refuses(evidence.forbidden)
    return diverged("contract", arm, "forward", ALLOWED, at, "a result", expect)


def _of_the_model(evidence: Evidence, arm: str, error: RunError, base_fails: bool) -> str:
    """Why this error is not a library's fault: torch refuses to checkpoint the user's model, as
    documented, the model raises the same error without conversion, or a compiler traces a kernel of
    Triton's interpreter, which does not support that. "" if it may be the library's fault."""
    if _UNTRACED in error.message:
        return _INTERPRETED
    changed = _MUTATED in error.message
    by_keyword = error.type == "ValueError" and error.message.startswith(_BY_KEYWORD)
    if by_keyword and BY_NAME[arm].checkpoint == "reentrant" and evidence.unconverted_error:
        return _NO_KEYWORDS
    if evidence.unconverted_error is None or not (base_fails or changed):
        return ""
    if _refuses_not_finite(evidence):
        return "the model itself refuses numbers that are not finite, which the case has"
    own = evidence.unconverted_error(arm)
    if own is None:
        return ""
    if changed and _MUTATED in own.message:
        return CHANGED_IN_PLACE
    if not _alike(own, error):
        return ""
    return f"the model itself, unconverted, raises {own.type}: {_first_line(own.message)}"


def _before_a_refusal(evidence: Evidence, trace: Trace, base_fails: bool) -> str:
    """Says that the model's own code raised, after a conversion that dropped something, where the
    library should have refused a size: that is no refusal of the library's, and whether it would
    refuse cannot be seen. "" if that is not so."""
    error, census = trace.error, trace.census
    if error is None or not (evidence.refusal and error.own and base_fails and census):
        return ""
    if error.phase != "forward" or not any(c.kind.endswith(" lost") for c in census.changes):
        return ""
    return (
        "after the conversion, which dropped something, the model's own code raises before the "
        f"library can refuse a size: {error.type}: {_first_line(error.message)}"
    )


def _refuses_not_finite(evidence: Evidence) -> bool:
    """Does a user's model fail outside of its linears on a case with infinities or NaN? A
    conversion may spread them: with one scale for a tensor, a single infinity makes all NaN."""
    base = evidence.traces[evidence.base].error
    if base is None or base.phase != "forward" or base.layer:
        return False
    given = (x for name, x in evidence.tensors.items() if not name.startswith("grad_output"))
    return not all(np.isfinite(x).all() for x in given)


def _alike(one: RunError, other: RunError) -> bool:
    """True if both are the same error, though a message may quote values that a conversion rounds:
    then the same line must have raised them, and the first lines of both say the same otherwise."""
    if one.type != other.type or one.message == other.message:
        return one.type == other.type
    texts = (_VALUE.sub("a value", _first_line(error.message)) for error in (one, other))
    return "" != one.line == other.line and len(set(texts)) == 1


def _complete(evidence: Evidence, arm: str) -> Verdict:
    expected = evidence.gradients | {"output"}
    absent = frozenset(expected - set(evidence.traces[arm].outputs))
    if absent and evidence.may_be_missing is not None:
        absent -= evidence.may_be_missing(absent)
    missing = sorted(absent)
    if missing and absent <= not_passed(evidence, arm):
        why = "a reentrant checkpoint passes no gradient to what is inside of lists, as documented"
        return plain("contract", arm, "backward", "not_applicable", why)
    census = evidence.traces[arm].census
    if missing and census and any(c.kind == "requires_grad changed" for c in census.changes):
        why = "conversion changed which parameters require one, which the census reports"
        return plain("contract", arm, "backward", "not_applicable", why)
    kinds = census.changes if missing and census else ()
    lost = {change.module for change in kinds if change.kind == "own forward lost"}
    if missing and lost.issuperset(name_of(name).module for name in missing):
        why = "conversion dropped the forward that uses them, which the census reports"
        return plain("contract", arm, "backward", "not_applicable", why)
    if not missing:
        return plain("contract", arm, "backward", "ok")
    first = MODELS[evidence.spec.model].tied_biases
    names = (f"{layer}.bias" for layer in evidence.layers)
    biases = {"grad_bias", *(f"{first.get(name, name)}.grad" for name in names)}
    if biases.issuperset(missing) and "bias_ignored" in evidence.deviations:
        known = evidence.deviations["bias_ignored"]
        return plain("contract", arm, "backward", "ok").known(known)
    symptom = f"no {' and no '.join(dict.fromkeys(role_of(name) for name in missing))}"
    at, got = At(name=missing[0]), f"None for {', '.join(missing)}"
    return diverged("contract", arm, "backward", symptom, at, got, Present(tuple(missing)))


def _narrowed(evidence: Evidence, base: Trace) -> Verdict:
    """Under autocast a linear must return autocast's dtype, as the nn.Linear it replaces does."""
    narrowed = evidence.spec.narrowed
    calls = [c for c in base.calls if c.phase == "forward" and c.forward in narrowed]
    if not calls:
        return plain("contract", evidence.base, "output", "not_applicable", "no linear was watched")
    wide = next((call for call in calls if call.dtype != "bf16"), None)
    if wide is None:
        return plain("contract", evidence.base, "output", "ok")
    if "autocast_ignored" in evidence.deviations:
        # every other rule then judges the layer by the dtype that it returns
        passed = plain("contract", evidence.base, FOLLOWED, "ok", "autocast_ignored")
        return passed.known(evidence.deviations["autocast_ignored"])
    at = At(what="result", name="output", layer=wide.module, call=wide.index, phase="forward")
    return diverged(
        "contract", evidence.base, "output", "type under autocast", at, wide.dtype, Typed("bf16")
    )


#: Errors of triton_on_cpu about memory that a kernel writes -> their symptoms. They are never
#: refusals.
_OF_MEMORY = {
    "OutsideError": "memory written outside",
    "WrittenTwiceError": "memory written twice",
}
#: What is wrong, in words, and what the refusal lacks; "" if it should not refuse at all.
_Problem = tuple[str, Lacking | Literal[""]]


def _problem(evidence: Evidence, arm: str, error: RunError, base_fails: bool) -> _Problem | None:
    """What is wrong with this refusal; None if it is as clear as it should be."""
    spec = evidence.spec
    if error.type in _OF_MEMORY:
        return _OF_MEMORY[error.type], ""
    if arm != evidence.base and not base_fails:
        other = "under compile" if evidence.compiled(arm) else "in recompute"
        stage = evidence.traces.get(BY_NAME[arm].stage)
        native = evidence.native(arm) and (stage is None or stage.error is not None)
        return f"fails only {'on other kernels' if native else other}", ""
    if spec.clipping == "norm_inf" and _NO_NORM in error.message:
        return None
    states_rule = RULE.search(error.message)
    empty = 0 in (spec.tokens, spec.k, spec.n) or _EMPTY.search(error.message)
    if empty and not (evidence.refusal and states_rule):
        return "unclear refusal of an empty dimension", "clarity"
    if not evidence.refusal:
        return "fails although nothing forbids it", ""
    if error.phase == "backward" and evidence.layers:  # a bare function may be called only there
        return "refused only in backward", "time"
    if not states_rule:
        return "refusal states no rule", "rule"
    refused = error.sizes if error.sizes is not None else (spec.k, spec.n, spec.tokens)
    sizes = rf"(?<!\d)({'|'.join(map(str, refused))})(?!\d)"
    if not (_NO_SIZE.search(error.message) or re.search(sizes, error.message)):
        return "refusal names no shape", "shape"
    layers = map(_called, evidence.layers)
    if evidence.layers and not any(name in error.message for name in layers):
        return "refusal names no layer", "layer"
    return None


def _called(layer: str) -> str:
    """The name by which a message may refer to a linear. The number of a linear in a list means
    nothing without the name of the list."""
    *_, parent, name = "", *layer.split(".")
    return f"{parent}.{name}" if name.isdecimal() and parent else name


def accepted(arm: str, case: str, rule: str) -> Verdict:
    """The divergence of a library that ran a shape which its plan's blocks do not divide. Nothing
    else of that run can be judged."""
    symptom, at = "accepts what its blocks do not divide", At(what="error", name=case)
    return diverged("contract", arm, "output", symptom, at, "a result", Refuses(rule))


def _first_line(message: str) -> str:
    return shortened((message.strip() or "(no message)").splitlines()[0], 200)
