"""What ranks have written down, and what is said of it: plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from narrowfuzz_watch.address import At

Bad = Literal["ok", "huge", "inf", "nan"]
#: made: all operands were ordinary. given: it came in with an operand, and no operator that was
#: seen had made it. crossed: it came out of a collective into which this rank sent ordinary
#: numbers.
Made = Literal["made", "given", "crossed"]
#: What was shown of the cause; unknown: nothing was.
Cause = Literal["hardware or race", "software or data", "data", "not seen", "unknown"]


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """An operand or a result of an operator."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    inf: int = 0
    #: The largest magnitude of its finite elements, and from where to where they go.
    largest: float = 0.0
    least: float = 0.0
    most: float = 0.0
    #: How many elements are zero, and how many there are.
    zeros: int = 0
    count: int = 0
    #: The first bad element.
    index: tuple[int, ...] = ()
    #: The graph node that it came from.
    maker: str = ""
    state: Bad = "ok"
    #: Its memory came from an operator that leaves it empty, and was not written as a whole since.
    unwritten: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A bad value where it was new to a rank."""

    n: int
    rank: int
    time: float
    step: int
    phase: str
    layer: str
    op: str
    bad: Bad
    made: Made
    operands: tuple[Tensor, ...] = ()
    output: Tensor
    #: What came when the operator was run again at once on the same operands; "": see why.
    again: Literal["same", "clean", "other", ""] = ""
    why: str = ""
    #: The lines of Python that called the operator, the innermost first; none where it was looked
    #: at later.
    lines: tuple[str, ...] = ()
    during: str = ""
    group: tuple[int, ...] = ()
    seq: int = 0


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part in a collective: the seq-th of this group."""

    n: int
    rank: int
    step: int
    op: str
    group: tuple[int, ...]
    seq: int
    during: str = ""
    layer: str = ""
    numel: int = 0
    dtype: str = ""
    came: Literal["ok", "bad"] = "ok"
    went: Bad = "ok"
    left: bool = False
    slot: int = -1
    digest: int | None = None
    sent: int | None = None

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return self.group, self.seq


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's digests, of what it read and of what it made."""

    n: int
    rank: int
    time: float
    step: int
    phase: str
    layer: str
    op: str
    read: int
    digest: int


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a rank was looked at, and the seconds that took."""

    rank: int
    step: int
    ran: int
    looked: int
    backward: int
    own_seconds: float
    seconds: float


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A bad value stood in a gradient when the optimizer got it."""

    rank: int
    step: int
    name: str
    bad: Bad


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that other ranks hold, too: name, those ranks, digest."""

    rank: int
    step: int
    held: tuple[tuple[str, tuple[int, ...], int], ...]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What a backward pass began with was NaN, for the first time."""

    rank: int
    step: int


class Scaler(msgspec.Struct, frozen=True, kw_only=True):
    """A loss scaler has looked for infinities itself in this step."""

    rank: int
    step: int


class Rank(msgspec.Struct, kw_only=True):
    """All that one thread of training has written."""

    rank: int
    source: str = ""
    events: list[Event] = []
    collectives: list[Collective] = []
    ops: list[Op] = []
    reached: list[Reached] = []
    held: list[Held] = []
    scaled: list[Scaler] = []
    losses: list[Loss] = []
    tally: Tally | None = None


class Consequence(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose first bad value came out of a collective."""

    rank: int
    op: str
    group: tuple[int, ...]
    seq: int
    step: int


class FirstBad(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first bad value stood, and what was shown of its cause."""

    at: At
    bad: Literal["huge", "inf", "nan", "differs"]
    made: Made
    operands: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    cause: Cause = "unknown"
    #: What the cause rests on.
    because: str = ""
    #: The first collective that took the bad value to other ranks.
    through: Consequence | None = None
    consequences: tuple[Consequence, ...] = ()
    #: Other ranks on which the same operator made one by itself.
    also: tuple[int, ...] = ()
    #: The lines of Python that called the operator, the innermost first.
    lines: tuple[str, ...] = ()


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the first bad value in a run with one thing changed."""

    change: str
    #: unknown: it ended before the step in which the bad value had come.
    came: Literal["gone", "still there", "unknown"]
    #: Its place then, or why nothing is known.
    told: str = ""


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that should hold the same and do not. ``sick`` is the minority, empty if there is
    none."""

    what: str
    step: int
    group: tuple[int, ...]
    sick: tuple[int, ...]


class Report(msgspec.Struct, kw_only=True):
    """What a run was, as first_bad.json holds it."""

    first: FirstBad | None = None
    #: Is it a finding, or did it pass without reaching a gradient?
    counts: bool = False
    #: The first NaN, where another bad value came before it; and the step from which on the loss
    #: was NaN.
    first_nan: At | None = None
    loss_nan: int | None = None
    #: The first divergence from another run.
    divergence: FirstBad | None = None
    votes: tuple[Vote, ...] = ()
    #: Runs with one thing changed each; the first is unchanged.
    reruns: tuple[Rerun, ...] = ()
    #: Who waits where, who has not come, which ranks disagree on the program.
    stuck: tuple[str, ...] = ()
    trained: bool = False
    ranks: tuple[int, ...] = ()
    steps: int = 0
    looked: int = 0
    #: Of the run's time, the share that watching took in its own code.
    overhead: float = 0.0
    exit_code: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Is there anything that ``--fail`` fails for?"""
        bad = (self.first is not None and self.counts) or self.divergence is not None
        return bad or bool(self.votes)
