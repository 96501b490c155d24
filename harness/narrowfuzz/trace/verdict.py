"""The verdict of a rule on a case, and the fingerprint that identifies a finding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import msgspec

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.names import name_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import (
    DerivativeOf,
    Expect,
    Given,
    Ordered,
    Present,
    Refuses,
    Runs,
    Same,
)
from narrowfuzz.trace.meaning import broken, located, meaning, place, times

Status = Literal[
    "ok", "diverged", "crashed", "hung", "unsupported", "inconclusive", "not_applicable", "known"
]
Strength = Literal["exact", "bound", "ratio"]
#: Role of a verdict that records a known deviation of the library which the reference imitated.
FOLLOWED = "followed"
#: Symptom of a process whose device stopped working.
LOSES_DEVICE = "loses the device"
#: Recipe family of a linear that no recipe converts.
PLAIN_FAMILY = "torch"
#: Statuses that are claims against the library under test.
BAD: frozenset[Status] = frozenset({"diverged", "crashed", "hung"})


@dataclass(frozen=True)
class OtherRun:
    """An additional eager run that a rule requested besides the runs of the case."""

    #: The run's title in an address (``At.run``).
    name: str
    spec: Spec
    tensors: Mapping[str, F32] = field(compare=False)
    #: What is done before the run: "steps", "reload" or "reload_trusted"; "" for nothing.
    event: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of one rule for one arm and role: the place checked, the expected value and the
    actual one."""

    rule: str
    arm: str
    #: Which tensor: output, grad_weight, scale ...; part of the fingerprint.
    role: str
    status: Status
    #: Class of symptom, part of the fingerprint: no shapes, no values.
    symptom: str = ""
    #: The first bad element, or whatever else the rule judges.
    at: At = At()  # noqa: RUF009 - frozen
    got: str = ""
    #: None where nothing diverged.
    expect: Expect | None = None
    given: tuple[Given, ...] = ()
    #: The additional runs that the addresses refer to.
    runs: tuple[OtherRun, ...] = ()
    #: The error as a multiple of the tolerance; at most 1 for a pass.
    factor: float = 0.0
    #: Why nothing could be judged.
    why: str = ""
    #: The ledger entry or deviation that explains a verdict with status "known".
    explained_by: str = ""
    #: A more precise description that the sentence uses instead of the symptom's meaning.
    remark: str = ""
    #: The verdict is about a linear that was not converted, so the bug is PyTorch's.
    unconverted: bool = False
    #: For the census: every change of this kind is at a module that was to be converted.
    swapped: bool = False
    #: For a run that failed: the model's own code raised the error, not a library that is tested.
    own_error: bool = False
    #: The actual value as the sentence shows it, where ``got`` is only the beginning of a message.
    reported: str = ""

    def known(self, by: str) -> Verdict:
        """This verdict with status "known", explained by this ledger entry or deviation."""
        return replace(self, status="known", explained_by=by)

    def at_layer(self, layer: str, call: int, rank: int = 0) -> Verdict:
        """The same verdict, with addresses at a call of this layer of a model; "" is a single
        linear."""
        if self.status not in BAD and self.at == At() and self.expect is None and not self.factor:
            return _passed_at(self, layer, call)

        def placed(at: At) -> At:
            return msgspec.structs.replace(at, layer=layer, call=call, rank=rank)

        expect = self.expect
        if isinstance(expect, Same):
            expect = msgspec.structs.replace(expect, at=placed(expect.at))
        if isinstance(expect, Ordered):
            expect = msgspec.structs.replace(expect, than=placed(expect.than))
        return replace(self, at=placed(self.at), expect=expect)

    @property
    def requirement(self) -> str | None:
        """The recipe's rule that the expected refusal enforces; None if no refusal is expected."""
        return self.expect.rule if isinstance(self.expect, Refuses) else None

    def of_linear(self) -> Verdict:
        """The same verdict for a single linear that stands for this verdict's layer."""
        own = tuple(given for given in self.given if given.at.what != "tensor")
        return replace(self.at_layer("", 0), given=own)

    def sentence(self) -> str:
        """One line: the meaning, the place, the expected and the actual value, and the error."""
        text = self.remark or meaning(self.role, self.symptom, self.at, self.expect)
        subject = f"{self.at.layer}: " if self.at.layer else ""
        if isinstance(self.expect, DerivativeOf) and self.got:
            return f"{subject}{text}: {self.expect.sentence(self.got)}"
        where = place(self.at, self.expect)
        # below 1 it shows how near a bound was, not how far off the result is
        finite = self.factor > 1 and math.isfinite(self.factor)
        far = f"; the error is {times(self.factor)} times the tolerance" if finite else ""
        return f"{subject}{text}{f' {where}' if where else ''}{self._values()}{far}"

    @property
    def located(self) -> str:
        """Words for the judged value and its complete address."""
        return located(self.at)

    def _values(self) -> str:
        """The end of the sentence: the expected and the actual value."""
        actual = self.reported or self.got or self.why
        if isinstance(self.expect, Present) and self.at.what == "result":
            return ""  # the meaning already names what is missing
        values = [str(given) for given in self.given if given.at.what != "tensor"]
        given = f" ({', '.join(values)})" if values else ""
        if self.expect is None or isinstance(self.expect, Runs):
            return f": {actual}{given}" if actual and actual != self.symptom else given
        if isinstance(self.expect, Refuses) and self.expect.rule:
            return f": {broken(self.expect.rule)}; got {actual}{given}"
        return f": expected {self._expected()}, got {actual}{given}"

    def _expected(self) -> str:
        expect = self.expect
        if not isinstance(expect, Same) or expect.at.run:
            return str(expect)
        if self.at.run:
            return f"{expect.value} as without that change"
        if expect.at.phase == "forward":
            return str(expect)
        return f"{expect.value or 'the same'} as {located(expect.at)}"


@lru_cache(4096)  # most verdicts are the same few
def _passed_at(verdict: Verdict, layer: str, call: int) -> Verdict:
    return replace(verdict, at=At(layer=layer, call=call))


#: Separates the recipe family from the name of a user's own model in a fingerprint's family.
OWN = " in "


def place_of(at: At) -> str:
    """The module that contains an address, "" if it concerns the whole model."""
    return at.layer or name_of(at.name).module


def fingerprint(verdict: Verdict, family: str) -> str:
    """The identity of a cause: rule, role, guilty arm, class of symptom, recipe family; in a user's
    own model the module, too.

    Quantiser rules judge operands, and the same cast serves all three GEMMs: their role is the
    operand, so one wrong cast is one finding. A compiled arm, and one on ranks, is named without
    its checkpointing, unless the rule is about recompute: most causes do not depend on it.
    """
    arm = verdict.arm
    if (BY_NAME[arm].compiled or BY_NAME[arm].sharded) and verdict.rule not in (
        "O12",
        "O13",
        "O18",
    ):
        arm = BY_NAME[arm].stage
    role = "operand" if verdict.rule in ("O2", "O3", "O4") else verdict.role
    if OWN in family:  # a model has one bug here and another there
        family += f" {place_of(verdict.at)}" if place_of(verdict.at) else ""
    elif verdict.unconverted:
        family = PLAIN_FAMILY
    return "--".join((verdict.rule, role, arm, verdict.symptom or "value", family))
