"""Plain data: the records that ranks write, and the report that is made of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from narrowfuzz_watch.address import At

Bad = Literal["ok", "huge", "inf", "nan"]
#: Where a bad value is from. made: the operator made it of operands that were less bad. given: it
#: came in with an operand, and no operator that was seen had made it. crossed: it came out of a
#: collective into which this rank sent ordinary numbers.
Made = Literal["made", "given", "crossed"]
#: The cause as far as it could be shown. not seen: code that is not watched, such as a compiled
#: graph, made the value. unknown: nothing could be shown.
Cause = Literal["hardware or race", "software or data", "data", "not seen", "unknown"]


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """An operand or a result of an operator."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    inf: int = 0
    #: Of its finite elements: the largest magnitude, the least and the largest value.
    largest: float = 0.0
    least: float = 0.0
    most: float = 0.0
    #: Number of zeros, and of all elements.
    zeros: int = 0
    count: int = 0
    #: Index of the first bad element.
    index: tuple[int, ...] = ()
    #: Name of the autograd node that made it.
    maker: str = ""
    state: Bad = "ok"
    #: True if its memory is uninitialised (from ``empty``), and was not written as a whole since.
    unwritten: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A bad value that a rank had not seen before."""

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
    #: The outcome of running the operator again at once on the same operands (``Again``); "": it
    #: was not, ``why`` is the reason.
    again: Literal["same", "clean", "other", ""] = ""
    why: str = ""
    #: The lines of Python that called the operator, the innermost first; none if its results were
    #: checked later (on a GPU).
    lines: tuple[str, ...] = ()
    during: str = ""
    group: tuple[int, ...] = ()
    seq: int = 0


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part in a collective, which is number ``seq`` of its group, from 1."""

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
    """The digests of an operator's operands and results."""

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
    """How many operators of a rank ran and were checked, and the seconds that took."""

    rank: int
    step: int
    ran: int
    checked: int = msgspec.field(name="looked")
    backward: int
    own_seconds: float
    seconds: float


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient had a bad value when the optimizer received it."""

    rank: int
    step: int
    name: str
    bad: Bad


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that several ranks hold: (name, these ranks, digest)."""

    rank: int
    step: int
    held: tuple[tuple[str, tuple[int, ...], int], ...]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The loss that a backward pass began with was NaN, for the first time."""

    rank: int
    step: int


class Scaler(msgspec.Struct, frozen=True, kw_only=True):
    """A loss scaler checked for infinities itself in this step."""

    rank: int
    step: int


class Rank(msgspec.Struct, kw_only=True):
    """All records of one thread of training."""

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
    """The place of the first bad value (or difference), and its cause as far as it was shown."""

    at: At
    bad: Literal["huge", "inf", "nan", "differs"]
    made: Made
    operands: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    cause: Cause = "unknown"
    #: The evidence for the cause, in words.
    because: str = ""
    #: The first collective that took the bad value to other ranks.
    through: Consequence | None = None
    consequences: tuple[Consequence, ...] = ()
    #: Other ranks on which the same operator independently made a bad value.
    also: tuple[int, ...] = ()
    #: The lines of Python that called the operator, the innermost first.
    lines: tuple[str, ...] = ()


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the first bad value came in a run with one thing changed."""

    change: str
    #: unknown: the run failed before the bad value's step, or was no training.
    came: Literal["gone", "still there", "unknown"]
    #: The place of its first bad value, or why the outcome is unknown.
    detail: str = ""
    #: Deprecated, to go in 0.2.0: the same.
    told: str = ""


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A group of ranks that should hold the same numbers and do not. ``sick`` is the minority,
    empty if no digest has a majority."""

    what: str
    step: int
    group: tuple[int, ...]
    sick: tuple[int, ...]


class Report(msgspec.Struct, kw_only=True):
    """The report on a run, as in first_bad.json."""

    first: FirstBad | None = None
    #: True if ``first`` is a finding; False if, for example, it reached no gradient.
    counts: bool = False
    #: The first NaN, if another kind of bad value came before it; and the first step whose loss was
    #: NaN.
    first_nan: At | None = None
    loss_nan: int | None = None
    #: The first divergence from another run.
    divergence: FirstBad | None = None
    votes: tuple[Vote, ...] = ()
    #: Runs with one thing changed each; the first is unchanged.
    reruns: tuple[Rerun, ...] = ()
    #: Sentences: which ranks wait in a collective, which never entered it, and where ranks ran
    #: different collectives.
    stuck: tuple[str, ...] = ()
    trained: bool = False
    ranks: tuple[int, ...] = ()
    steps: int = 0
    #: Operators whose results were checked.
    operators: int = 0
    #: Deprecated, to go in 0.2.0: the same.
    looked: int = 0
    #: The share of the run's time that watching took in its own code.
    overhead: float = 0.0
    exit_code: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """True if there is anything for which ``--fail`` fails."""
        bad = (self.first is not None and self.counts) or self.divergence is not None
        return bad or bool(self.votes)
