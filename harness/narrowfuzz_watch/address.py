"""The one way to point at something that a run left: in a verdict, a finding, a script.

>>> at = At(layer="layers.0.wq", phase="recompute", what="codes", name="output", side="a",
...         index=(3, 4))
>>> str(at)
'layer layers.0.wq, recompute, codes output/a[3, 4]'
>>> parse(str(at)) == at
True
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

#: result: an output, a gradient or a parameter. codes, scale, amax, values: what is seen of an
#: operand. source: an operand before it is quantised. product: what one kernel returned.
#: tensor: all of an operand, by its checksum. significand: of a code, without its exponent.
#: attention: an argument of an attention kernel. state: scale and window of a slot. pending: what a
#: library set aside. error: how a run ended. module: what a conversion made of a model.
#: function: an argument of an autograd.Function. operator: a result of a call of an operator of
#: torch, ``call`` being that operator's how many-th in the run.
What = Literal[
    "result",
    "codes",
    "scale",
    "amax",
    "values",
    "significand",
    "source",
    "tensor",
    "product",
    "attention",
    "state",
    "cast",
    "pending",
    "error",
    "module",
    "function",
    "operator",
]
AtPhase = Literal["", "convert", "forward", "recompute", "backward", "collective", "optimizer"]
Side = Literal["", "a", "b"]


class At(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A place in a run. What is left at its default is not said."""

    what: What = "result"
    #: The run, where it is not the verdict's arm on the case itself: another arm, or another run by
    #: its title; " + " between titles is their sum.
    run: str = ""
    rank: int = 0
    #: Index into the schedule; -1: none.
    event: int = -1
    #: The training forward that it belongs to; -1: none.
    of: int = -1
    #: Dotted name of a module, and how many-th call of it.
    layer: str = ""
    call: int = 0
    phase: AtPhase = ""
    #: A result's or a GEMM's name: output, grad_input, grad_weight, <parameter>.grad; an operator's
    #: name; of attention its argument; of state its direction; of an error the function that
    #: raised it.
    name: str = ""
    side: Side = ""
    #: Which of an operator's results, where it has several.
    result: str = ""
    #: An element; of state its slot.
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The whole address in one line that ``parse`` reads."""
        parts = [f"rank {self.rank}"] if self.rank else []
        parts += [f"event {self.event}"] if self.event >= 0 else []
        if self.layer:
            parts.append(f"layer {self.layer}" + (f" call {self.call}" if self.call else ""))
        parts += [self.phase] if self.phase else []
        parts += [f"of y{self.of}"] if self.of >= 0 else []
        side = f"/{self.side}" if self.side else ""
        name = (f" {self.name}" if self.name else "") + f" -> {self.result}" * bool(self.result)
        parts.append(f"{self.what}{name}{side}{list(self.index) if self.index else ''}")
        return (f"{self.run}: " if self.run else "") + ", ".join(parts)


_TEXT = re.compile(
    r"(?:(?P<run>[^:]+): )?"
    r"(?:rank (?P<rank>\d+), )?"
    r"(?:event (?P<event>\d+), )?"
    r"(?:layer (?P<layer>[^, ]+)(?: call (?P<call>\d+))?, )?"
    rf"(?:(?P<phase>{'|'.join(filter(None, get_args(AtPhase)))}), )?"
    r"(?:of y(?P<of>\d+), )?"
    rf"(?P<what>{'|'.join(get_args(What))})(?: (?P<name>[^/\[\]]+?))?"
    r"(?: -> (?P<result>\w+))?"
    r"(?:/(?P<side>[ab]))?(?:\[(?P<index>\d+(?:, \d+)*)\])?"
)


def parse(text: str) -> At:
    """The address that ``str`` wrote. Raises ValueError if it is none."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no address: write it as {At(name='output', index=(0, 3))}")
    parts = {name: value for name, value in found.groupdict().items() if value is not None}
    fields: dict[str, object] = dict(parts)
    for name in ("rank", "event", "of", "call"):
        if name in parts:
            fields[name] = int(parts[name])
    if "index" in parts:
        fields["index"] = tuple(map(int, parts["index"].split(", ")))
    return msgspec.convert(fields, At)
