"""What a rule expects at an address, as data from which sentences and scripts are generated.

Numbers are stored as hexadecimal text, which survives JSON exactly, NaN and infinities included.
"""

from __future__ import annotations

from typing import Literal, SupportsFloat

import msgspec

from narrowfuzz.trace.address import At


class Is(msgspec.Struct, frozen=True, tag="is", forbid_unknown_fields=True):
    """Exactly this number; any NaN equals any other NaN."""

    value: str
    #: True: ``value`` is the byte of an E8M0 scale, not the number that the byte stands for.
    byte: bool = False
    #: True: 0.0 and -0.0 are different.
    signed: bool = False

    def __str__(self) -> str:
        value = read(self.value)
        return f"byte {int(value)}" if self.byte else number(value)


class Within(msgspec.Struct, frozen=True, tag="within", forbid_unknown_fields=True):
    """A number in a closed interval."""

    lo: str
    hi: str

    def __str__(self) -> str:
        if self == FINITE:
            return "a number"
        lo, hi = read(self.lo), read(self.hi)
        return number(lo) if lo == hi else f"between {number(lo)} and {number(hi)}"


def between(lo: SupportsFloat, hi: SupportsFloat) -> Within:
    """The closed interval from ``lo`` to ``hi``."""
    return Within(bits(lo), bits(hi))


class OneOf(msgspec.Struct, frozen=True, tag="one_of", forbid_unknown_fields=True):
    """A number in one of several closed intervals."""

    ranges: tuple[Within, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.ranges))


class Same(msgspec.Struct, frozen=True, tag="same", forbid_unknown_fields=True):
    """The bits found at another address, times a power of two; ``value`` is the result."""

    at: At
    value: str = ""
    times: float = 1.0

    def __str__(self) -> str:
        there = self.at.run or ("in its forward" if self.at.phase == "forward" else str(self.at))
        return f"{self.value} as {there}" if self.value else f"the same as {there}"


class Near(msgspec.Struct, frozen=True, tag="near", forbid_unknown_fields=True):
    """An error against the float64 reference (root mean square) of at most ``limit``, a multiple of
    eager's error or, where that is larger, of the error that is ``usual`` for such results."""

    limit: str
    eager: str
    usual: str = ""

    def __str__(self) -> str:
        limit, eager = number(read(self.limit)), number(read(self.eager))
        usual = f", {number(read(self.usual))} is usual" if self.usual else ""
        return f"an error of at most {limit} (eager's is {eager}{usual})"


class Ordered(msgspec.Struct, frozen=True, tag="ordered", forbid_unknown_fields=True):
    """A quantised value of at least ``least``, which is that of the element ``than``: the next
    smaller element before quantisation."""

    least: str
    than: At

    def __str__(self) -> str:
        return f"at least {number(read(self.least))}"


class Sum(msgspec.Struct, frozen=True, tag="sum", forbid_unknown_fields=True):
    """The sum of the results of the parts (``of``), each run separately."""

    of: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.value}, the sum of {self.of}"


class Runs(msgspec.Struct, frozen=True, tag="runs", forbid_unknown_fields=True):
    """A result. ``raised`` is the type of the exception that was raised instead, "" where the
    process ended without one."""

    raised: str = ""

    def __str__(self) -> str:
        return "a result or an exception" if not self.raised else "a result"


#: What is wrong with a refusal: it comes too late ("time"), or its message omits something.
Lacking = Literal["time", "rule", "shape", "layer", "clarity"]


class Refuses(msgspec.Struct, frozen=True, tag="refuses", forbid_unknown_fields=True):
    """An error, at conversion or at the first call, that names the layer, its shape and the rule
    that the shape breaks."""

    rule: str = ""
    #: The type of the error that was raised, "" where none was, and what is wrong with that error.
    raised: str = ""
    lacking: Lacking = "clarity"

    def __str__(self) -> str:
        return f"a refusal: {self.rule}" if self.rule else "a clear refusal"


class Present(msgspec.Struct, frozen=True, tag="present", forbid_unknown_fields=True):
    """Results that must exist."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        if all(name.endswith(".grad") or name.startswith("grad_") for name in self.names):
            return "a gradient for every parameter that requires one"
        return ", ".join(self.names)


class State(msgspec.Struct, frozen=True, tag="state", forbid_unknown_fields=True):
    """A slot's scale and its window (amax history)."""

    scale: str
    window: tuple[str, ...]

    def __str__(self) -> str:
        window = ", ".join(number(read(x)) for x in self.window)
        return f"scale {number(read(self.scale))} window [{window}]"


class Own(msgspec.Struct, frozen=True, tag="own", forbid_unknown_fields=True):
    """An expectation that the rule words itself; ``limit`` is the number in it, if it has one."""

    text: str
    limit: str = ""

    def __str__(self) -> str:
        return self.text


class MadeBy(msgspec.Struct, frozen=True, tag="made_by", forbid_unknown_fields=True):
    """Codes that one of these casts produced, dequantised with the scale of that cast; ``value`` is
    this inverse scale as text, "" where no scale is at fault."""

    casts: tuple[At, ...]
    value: str = ""

    def __str__(self) -> str:
        return self.value or "codes of a cast of its own"


class Formats(msgspec.Struct, frozen=True, tag="formats", forbid_unknown_fields=True):
    """A product whose two operands are in these formats; in high precision if none is named."""

    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.names) or "high precision"


class Blocks(msgspec.Struct, frozen=True, tag="blocks", forbid_unknown_fields=True):
    """An operand with a scale for each block of this many rows and columns."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"a scale for each {self.rows} x {self.columns}"


class Typed(msgspec.Struct, frozen=True, tag="typed", forbid_unknown_fields=True):
    """A tensor of this dtype."""

    dtype: str

    def __str__(self) -> str:
        return self.dtype


class DerivativeOf(msgspec.Struct, frozen=True, tag="derivative", forbid_unknown_fields=True):
    """The slope of a user's ``autograd.Function`` along its worst direction, by finite differences
    in float64, and their error."""

    function: str
    slope: str
    error: str
    #: How far off the backward is and how far it may be, both relative to the slopes over all
    #: ``directions``; "" in findings of older releases.
    off: str = ""
    allowed: str = ""
    directions: int = 0
    #: Other arguments whose gradients are wrong, too.
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        error = f"{read(self.error):.1g}"
        return f"{read(self.slope):.4g}, measured to +- {error} by finite differences"

    def sentence(self, got: str) -> str:
        """How far off the backward is, and its value ``got`` in the worst direction."""
        off = allowed = ""
        if self.off:
            off = f"off by {share(read(self.off))} over {self.directions} directions "
            allowed = f"(allowed: {share(read(self.allowed))}); "
        more = f"; the gradient of {' and of '.join(self.others)} is wrong, too"
        worst = f"in the worst one the slope is {self}, and backward gives {float(got):.4g}"
        return f"{off}{allowed}{worst}{more * bool(self.others)}"


Expect = (
    Is
    | Within
    | OneOf
    | Same
    | Near
    | Ordered
    | Sum
    | Runs
    | Refuses
    | Present
    | State
    | MadeBy
    | Formats
    | Blocks
    | Typed
    | DerivativeOf
    | Own
)


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value from which an expectation was derived, and the address where it was recorded."""

    name: str
    at: At
    value: str

    def __str__(self) -> str:
        return f"{self.name} = {number(read(self.value))}"


def bits(x: SupportsFloat) -> str:
    """A number as exact text."""
    return float(x).hex()


def read(text: str) -> float:
    """The number in a text from ``bits``. Raises ValueError if the text is not a number."""
    return float.fromhex(text)


def share(x: float) -> str:
    """A fraction in per cent, with two digits."""
    return f"{x * 100:.2g} %" if x < 1 else f"{x * 100:.0f} %"


def number(x: float) -> str:
    """A number as short decimal text that still differs for any two different fp32 numbers."""
    return f"{float(x):.9g}"


_LARGEST = (2.0 - 2.0**-23) * 2.0**127
#: Any finite fp32 number.
FINITE = Within(bits(-_LARGEST), bits(_LARGEST))
