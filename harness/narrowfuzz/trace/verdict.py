"""What a rule says about a case, and how verdicts become findings' identities."""

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
#: Role of a verdict that says which as-built deviation the reference followed.
FOLLOWED = "followed"
#: Symptom of a process whose device computes no more.
LOSES_DEVICE = "loses the device"
#: The family that a linear belongs to which no recipe converts.
PLAIN_FAMILY = "torch"
#: Statuses that are claims against the library under test.
BAD: frozenset[Status] = frozenset({"diverged", "crashed", "hung"})


@dataclass(frozen=True)
class OtherRun:
    """A run in eager besides the case's own that a rule asked for."""

    #: As an address names it.
    name: str
    spec: Spec
    tensors: Mapping[str, F32] = field(compare=False)
    #: What happens before it: steps, reload or reload_trusted.
    event: str = ""


@dataclass(frozen=True)
class Verdict:
    """One rule on one arm and role: where it looked, what is expected there and what came."""

    rule: str
    arm: str
    #: Class of place, part of the fingerprint.
    role: str
    status: Status
    #: Class of symptom, part of the fingerprint: no shapes, no values.
    symptom: str = ""
    #: The first bad element, or what else the rule is about.
    at: At = At()  # noqa: RUF009 - frozen
    got: str = ""
    #: None where nothing diverged.
    expect: Expect | None = None
    given: tuple[Given, ...] = ()
    #: The runs that addresses point into.
    runs: tuple[OtherRun, ...] = ()
    #: How far off, in units of what is allowed; of a pass, the share of it that is used.
    factor: float = 0.0
    #: Why nothing could be judged.
    why: str = ""
    #: Ledger entry or deviation that explains a ``known``.
    explained_by: str = ""
    #: What is known of it besides, in place of what its symptom means.
    remark: str = ""
    #: It is about a linear that conversion left alone: what is wrong there is PyTorch's.
    unconverted: bool = False
    #: Of what a conversion changed: all of it is at modules that it was asked to replace.
    swapped: bool = False
    #: What came, as its sentence says it, where ``got`` is only the begin of a message.
    reported: str = ""

    def known(self, by: str) -> Verdict:
        """This divergence, explained."""
        return replace(self, status="known", explained_by=by)

    def at_layer(self, layer: str, call: int, rank: int = 0) -> Verdict:
        """The same at a call of this layer of a model; "" is a single linear."""
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
        """What of a recipe a refusal was for; None of what is no refusal."""
        return self.expect.rule if isinstance(self.expect, Refuses) else None

    def of_linear(self) -> Verdict:
        """The same of a single linear that is what this verdict's layer was."""
        own = tuple(given for given in self.given if given.at.what != "tensor")
        return replace(self.at_layer("", 0), given=own)

    def sentence(self) -> str:
        """One line: what it means, where, what was expected and what came, how far off."""
        said = self.remark or meaning(self.role, self.symptom, self.at, self.expect)
        subject = f"{self.at.layer}: " if self.at.layer else ""
        if isinstance(self.expect, DerivativeOf) and self.got:
            return f"{subject}{said}: {self.expect.sentence(self.got)}"
        where = place(self.at, self.expect)
        # below 1 it says how near a bound was, not how far off the result is
        finite = self.factor > 1 and math.isfinite(self.factor)
        far = f"; the error is {times(self.factor)} times the tolerance" if finite else ""
        return f"{subject}{said}{f' {where}' if where else ''}{self._values()}{far}"

    @property
    def located(self) -> str:
        """The value that is judged and where it was seen."""
        return located(self.at)

    def _values(self) -> str:
        """What was expected, and what came instead."""
        came = self.reported or self.got or self.why
        if isinstance(self.expect, Present) and self.at.what == "result":
            return ""  # what is missing has been named
        values = [str(given) for given in self.given if given.at.what != "tensor"]
        given = f" ({', '.join(values)})" if values else ""
        if self.expect is None or isinstance(self.expect, Runs):
            return f": {came}{given}" if came and came != self.symptom else given
        if isinstance(self.expect, Refuses) and self.expect.rule:
            return f": {broken(self.expect.rule)}; got {came}{given}"
        return f": expected {self._expected()}, got {came}{given}"

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


#: In a family of fingerprints: what stands behind it is a user's own model.
OWN = " in "


def place_of(at: At) -> str:
    """The module that an address is in, "" for one of the whole model."""
    return at.layer or name_of(at.name).module


def fingerprint(verdict: Verdict, family: str) -> str:
    """Identity of a cause: rule, role, guilty rung, class of symptom, recipe family; in a user's
    own model the module, too.

    Quantiser rules judge operands, and the same cast serves all three GEMMs: their role is the
    operand, so one wrong cast is one finding. A compiled rung, and one on ranks, is named without
    its checkpointing, unless the rule is about recomputing: most causes do not care.
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
