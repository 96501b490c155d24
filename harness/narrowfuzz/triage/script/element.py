"""Translates an address into an expression of a played script that gives the number there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from narrowfuzz.arms.model_names import ties
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import E2M1
from narrowfuzz.numerics.plan import ROLES, Plan, Role
from narrowfuzz.numerics.reference import granule
from narrowfuzz.numerics.two_level import TwoLevelScale
from narrowfuzz.trace.address import At
from narrowfuzz.triage.script.parts import SLOT

#: Kinds of values that only a tap shows.
TAPPED = ("codes", "scale", "amax", "values", "significand")


@dataclass(frozen=True)
class Places:
    """What the translation of addresses depends on: the script's Spec and plan; its variables by
    the names of the runs that they hold; and whether the case's own run is compiled, so that only
    calls of kernels are seen."""

    spec: Spec
    plan: Plan
    runs: Mapping[str, str]
    compiled: bool

    def run(self, name: str) -> str:
        """The variable that holds a run. Raises ValueError if the script does not play the run."""
        if name not in self.runs:
            raise ValueError(f"a player does not play {name!r}")
        return self.runs[name]

    def call(self, at: At) -> str:
        """An expression for the call of a linear. Gradients belong to the call in forward."""
        phase = "recompute" if at.phase == "recompute" else "forward"
        return f"call_of({self.run(at.run)}, {at.layer!r}, {at.call}, {phase!r})"

    def element(self, at: At) -> str:
        """An expression for the number at an address; for a sum of runs, the sum of their numbers.
        Raises ValueError for an address whose value the player does not record."""
        if " + " in at.run:
            parts = (msgspec.structs.replace(at, run=name) for name in at.run.split(" + "))
            return " + ".join(map(self.element, parts))
        index = list(at.index) or ""
        if at.what == "result" and not at.layer:
            result = f"{self.run(at.run)}.results[{at.name!r}]"
            whole = f"{result}.float()" if len(at.index) > 2 else f"rows({result})"
            return f"{whole}{index}.item()"
        if at.what in TAPPED and self.compiled and not at.run:
            return self._of_operand(at, self._product(at))
        if at.what in TAPPED:
            return self._of_operand(at, self._gemm(at))
        if not at.layer or self.compiled or at.side:
            raise ValueError(f"a player has no eyes for {at}")
        if at.what == "result":
            return f"rows({self.call(at)}.outputs[{at.name!r}]){index}.item()"
        if at.what == "source":  # a tensor that the layer was given
            return f"rows({self.call(at)}.held({at.name!r})){index}.item()"
        raise ValueError(f"a player has no eyes for {at}")

    def _shown(self) -> list[Role]:
        """The roles whose GEMMs a tap sees, in their order."""
        ran = ROLES if self.spec.trains else ROLES[:1]
        return [role for role in ran if self.plan.gemms[role].quantised]

    def _gemm(self, at: At) -> str:
        """An expression for the GEMM that a tap saw, of a layer's call or of a single linear. The
        GEMMs of a single linear, which nothing recomputes, are counted from the end."""
        shown = self._shown()
        if at.name not in shown or not at.side:
            raise ValueError(f"a player has no eyes for {at}")
        if not at.layer:
            return f"{self.run(at.run)}.gemms[{shown.index(at.name) - len(shown)}]"
        if at.name == "output":
            return f"{self.call(at)}.forward_gemms[0]"
        backward = [role for role in shown if role != "output"]
        return f"{self.call(at)}.backward_gemms[{backward.index(at.name)}]"

    def _product(self, at: At) -> str:
        """An expression for the operands that a kernel inside compiled code was given. Products of
        a single linear are counted from the end, past any recompute; in a model it is the product
        with the layer's weight."""
        if self.spec.direct:
            index = ROLES.index(at.name)  # type: ignore[arg-type]
            product = f"watch.products[{index - len(ROLES) if index and self.spec.trains else 0}]"
        elif at.layer and (at.name, at.side) == ("output", "b"):
            weight = f"{at.layer}.weight"
            weight = ties(self.spec).get(weight, weight)
            product = f"of_weight(watch.products, tensors[{weight!r}])"
        else:
            raise ValueError(f"compiled code shows no {at}")
        return f"{product}.operands()"

    def _of_operand(self, at: At, gemm: str) -> str:
        """An expression for the number at an address in an operand of the ``gemm``."""
        named = self.plan.gemms[at.name]  # type: ignore[index]
        operand, index = named.a if at.side == "a" else named.b, list(at.index)
        code = f"{gemm}[{SLOT[at.side]}].float(){index}.item()"
        if operand.format == E2M1:  # codes, two in a byte, are recorded one by one as integers
            code = f"{tuple(E2M1.table.tolist())}[int({code})]"
        if at.what == "codes" or (at.what == "values" and self.compiled and not at.run):
            return code  # a kernel that is given values gets no scale
        if at.what == "significand":
            return f"math.frexp({code})[0]"
        if at.what == "amax":
            return f"{gemm}[{4 + (at.side == 'b')}].float(){index or ''}.item()"
        if at.what == "scale":
            level = "[0]" if isinstance(operand.scale, TwoLevelScale) else ""
            return _scale(gemm, at.side, at.index, level)
        if operand.scale is not None and operand.scale.value_text:
            scale = _scale(gemm, at.side, granule(at.index, operand))
            return operand.scale.value_text.format(code=code, scale=scale)
        raise ValueError(f"a player has no eyes for {at}")


def _scale(gemm: str, side: str, index: tuple[int, ...], level: str = "") -> str:
    """An expression for a scale. ``level`` indexes scales of two levels: block, then tensor."""
    got = f"{gemm}[{SLOT[side] + 1}]{level}"
    byte = f"({got}.view(torch.uint8) if {got}.element_size() == 1 else {got})"
    return f"{byte}{list(index) or ''}.item()"
