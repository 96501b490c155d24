"""What a rule expects at an address, as data: sentences and scripts are made of it.

Numbers are kept as hexadecimal text, which JSON carries exactly, NaN and infinities included.
"""

from __future__ import annotations

from typing import Literal, SupportsFloat

import msgspec

from narrowfuzz.trace.address import At


class Is(msgspec.Struct, frozen=True, tag="is", forbid_unknown_fields=True):
    """One number and no other; NaN is NaN."""

    value: str
    #: A scale that is a byte, not a number.
    byte: bool = False
    #: The sign of a zero counts.
    signed: bool = False

    def __str__(self) -> str:
        value = read(self.value)
        return f"byte {int(value)}" if self.byte else number(value)


class Within(msgspec.Struct, frozen=True, tag="within", forbid_unknown_fields=True):
    """A number of a closed interval."""

    lo: str
    hi: str

    def __str__(self) -> str:
        if self == FINITE:
            return "a number"
        lo, hi = read(self.lo), read(self.hi)
        return number(lo) if lo == hi else f"between {number(lo)} and {number(hi)}"


def between(lo: SupportsFloat, hi: SupportsFloat) -> Within:
    """The interval of these ends."""
    return Within(bits(lo), bits(hi))


class OneOf(msgspec.Struct, frozen=True, tag="one_of", forbid_unknown_fields=True):
    """A number of one of several closed intervals."""

    ranges: tuple[Within, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.ranges))


class Same(msgspec.Struct, frozen=True, tag="same", forbid_unknown_fields=True):
    """The bits of another place, times a power of two; ``value`` is what they came to."""

    at: At
    value: str = ""
    times: float = 1.0

    def __str__(self) -> str:
        there = self.at.run or ("in its forward" if self.at.phase == "forward" else str(self.at))
        return f"{self.value} as {there}" if self.value else f"the same as {there}"


class Near(msgspec.Struct, frozen=True, tag="near", forbid_unknown_fields=True):
    """No farther from float64 than a multiple of eager's error, in root mean square, or, where that
    is larger, of what is ``usual`` of such results."""

    limit: str
    eager: str
    usual: str = ""

    def __str__(self) -> str:
        limit, eager = number(read(self.limit)), number(read(self.eager))
        usual = f", {number(read(self.usual))} is usual" if self.usual else ""
        return f"an error of at most {limit} (eager's is {eager}{usual})"


class Ordered(msgspec.Struct, frozen=True, tag="ordered", forbid_unknown_fields=True):
    """No smaller than the element before it, ``than``, in the order of what was quantised."""

    least: str
    than: At

    def __str__(self) -> str:
        return f"at least {number(read(self.least))}"


class Sum(msgspec.Struct, frozen=True, tag="sum", forbid_unknown_fields=True):
    """The sum of what the parts gave one by one."""

    of: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.value}, the sum of {self.of}"


class Runs(msgspec.Struct, frozen=True, tag="runs", forbid_unknown_fields=True):
    """A result. ``raised`` is the type of error that came instead, "" where the process ended."""

    raised: str = ""

    def __str__(self) -> str:
        return "a result or an exception" if not self.raised else "a result"


#: What a refusal lacks: it comes too late, or its message leaves something out.
Lacking = Literal["time", "rule", "shape", "layer", "clarity"]


class Refuses(msgspec.Struct, frozen=True, tag="refuses", forbid_unknown_fields=True):
    """An error at conversion or first call that names the layer, its shape and the rule."""

    rule: str = ""
    #: The type of the error that came, "" where none did, and what is wrong with it.
    raised: str = ""
    lacking: Lacking = "clarity"

    def __str__(self) -> str:
        return f"a refusal: {self.rule}" if self.rule else "a clear refusal"


class Present(msgspec.Struct, frozen=True, tag="present", forbid_unknown_fields=True):
    """Results that must be there."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        if all(name.endswith(".grad") or name.startswith("grad_") for name in self.names):
            return "a gradient for every parameter that requires one"
        return ", ".join(self.names)


class State(msgspec.Struct, frozen=True, tag="state", forbid_unknown_fields=True):
    """A slot's scale and window of maxima."""

    scale: str
    window: tuple[str, ...]

    def __str__(self) -> str:
        window = ", ".join(number(read(x)) for x in self.window)
        return f"scale {number(read(self.scale))} window [{window}]"


class Own(msgspec.Struct, frozen=True, tag="own", forbid_unknown_fields=True):
    """What the rule's own check states; ``limit`` is its number, if it has one."""

    text: str
    limit: str = ""

    def __str__(self) -> str:
        return self.text


class MadeBy(msgspec.Struct, frozen=True, tag="made_by", forbid_unknown_fields=True):
    """Codes that one of these casts made, with that cast's scale; ``value`` is what that is."""

    casts: tuple[At, ...]
    value: str = ""

    def __str__(self) -> str:
        return self.value or "codes of a cast of its own"


class Formats(msgspec.Struct, frozen=True, tag="formats", forbid_unknown_fields=True):
    """Operands in these formats, both of them; without any, in high precision."""

    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.names) or "high precision"


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
    #: How far off a backward is, a share of the slopes over all ``directions``, and may be; "" in
    #: findings of older releases.
    off: str = ""
    allowed: str = ""
    directions: int = 0
    #: Other arguments whose gradient is wrong, too.
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        error = f"{read(self.error):.1g}"
        return f"{read(self.slope):.4g}, measured to +- {error} by finite differences"

    def sentence(self, got: str) -> str:
        """How far off this backward is, and what it gives in the worst direction."""
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
    | Typed
    | DerivativeOf
    | Own
)


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that an expectation rests on, and where it was seen."""

    name: str
    at: At
    value: str

    def __str__(self) -> str:
        return f"{self.name} = {number(read(self.value))}"


def bits(x: SupportsFloat) -> str:
    """A number as exact text."""
    return float(x).hex()


def read(text: str) -> float:
    """The number that ``bits`` wrote. Raises ValueError if it is none."""
    return float.fromhex(text)


def share(x: float) -> str:
    """A share in per cent, in two digits."""
    return f"{x * 100:.2g} %" if x < 1 else f"{x * 100:.0f} %"


def number(x: float) -> str:
    """A number as a reader wants it: short, but never two different fp32 ones alike."""
    return f"{float(x):.9g}"


_LARGEST = (2.0 - 2.0**-23) * 2.0**127
#: Any number of fp32.
FINITE = Within(bits(-_LARGEST), bits(_LARGEST))
