"""Addresses of values in a run, for verdicts, findings and scripts.

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

#: The kind of value. result: an output, a gradient or a parameter. codes, scale, amax, values: the
#: observed parts of an operand. source: an operand before it is quantised. product: the result of
#: one kernel. tensor: a whole operand, by its checksum. significand: a code without its exponent.
#: attention: an argument of an attention kernel. state: scale and window of a slot. pending: data
#: that a library holds back for later. error: how a run ended. module: what a conversion made of a
#: model. function: an argument of an autograd.Function. operator: a result of a call of one of
#: torch's operators; ``call`` then counts the calls of that operator in the run.
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
    """A place in a run. ``str`` leaves out fields that have their default."""

    what: What = "result"
    #: The run, if it is not that of the verdict's arm on the case itself: another arm, or the title
    #: of another run; " + " between titles denotes the sum of these runs.
    run: str = ""
    rank: int = 0
    #: Index into the schedule; -1: none.
    event: int = -1
    #: Number of the training forward that it belongs to; -1: none.
    of: int = -1
    #: Dotted name of a module, and the number of its call, from 0.
    layer: str = ""
    call: int = 0
    phase: AtPhase = ""
    #: A result's or a GEMM's name (output, grad_input, grad_weight, <parameter>.grad), an
    #: operator's name, an argument of attention, the direction of a state, or the function that
    #: raised an error.
    name: str = ""
    #: Operand of a GEMM.
    side: Side = ""
    #: Name of an operator's result, if it has several.
    result: str = ""
    #: Index of an element; of a state, its slot.
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The address in one line, which ``parse`` reads."""
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
    """The address that ``str`` wrote. Raises ValueError if the text is not an address."""
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
