"""What a finding needs and what makes it go away: ``narrowfuzz explain`` leaves it in the finding's
folder, where the page and ``report`` read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

#: Beside ``explain.json``, which is the finding itself.
FILE = "causes.json"
#: Draws of data, each of another seed, that every question is asked on.
DRAWS = 20

Role = Literal["needed", "not needed", "cannot say"]


@dataclass(frozen=True)
class Count:
    """Of so many draws: in how many it showed, in how many the rule judged at all, and in how many
    that found another thing wrong with the same result."""

    shown: int
    judged: int
    of: int = DRAWS
    otherwise: int = 0

    @property
    def silent(self) -> bool:
        """Judged on each draw, and never wrong."""
        return self.judged == self.of and not self.shown and not self.otherwise


@dataclass(frozen=True)
class Answer:
    """What a change of the case makes of the divergence."""

    words: str
    count: Count
    role: Role


@dataclass(frozen=True)
class Explained:
    """What is known of a finding once its questions have been asked."""

    id: str
    sentence: str
    #: The case that is asked about, in words.
    asked_of: str
    #: In how many of the draws the case itself shows it.
    shows: Count
    needs: tuple[Answer, ...]
    #: Conditions none of which it needs by itself, though it is gone without all of them.
    needs_one_of: tuple[str, ...]
    #: What a user could switch, and what that makes of it.
    switches: tuple[Answer, ...]
    #: Where its first bad value stands, and the known issue that it resembles, in sentences.
    first_bad: tuple[str, ...]
    nearest: str
    #: What there was no time for.
    untried: tuple[str, ...]
    #: Where inside the compiler it starts, in words; "" where that is not known.
    compiler: str = ""


def save(folder: Path, explained: Explained) -> None:
    """Keep it in a finding's folder."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(asdict(explained))))


def load(folder: Path) -> Explained | None:
    """What was kept there; None where nobody has asked. Raises ValueError naming the file if it is
    something else."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Explained)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}; narrowfuzz explain {folder} writes it anew") from None


def asked_in(folder: Path) -> tuple[str, ...]:
    """The answers that are kept there, for people; none where nobody has asked."""
    explained = load(folder)
    return () if explained is None else tuple(asked(explained))


def lines(explained: Explained) -> Iterator[str]:
    """For people."""
    yield explained.sentence
    yield from asked(explained)
    yield from explained.first_bad
    if explained.nearest:
        yield f"Known issues: {explained.nearest}"
    if explained.untried:
        yield f"No time for: {'; '.join(explained.untried)} (--seconds gives more)"


def asked(explained: Explained) -> Iterator[str]:
    """The answers alone."""
    own = explained.shows
    asked_of = explained.asked_of[0].upper() + explained.asked_of[1:]
    yield f"{asked_of} shows it with {own.shown} of {own.of} random seeds."
    yield from _list("It needs", explained.needs, "needed", "without it ")
    if explained.needs_one_of:
        yield f"It needs one of these, any of them: {'; '.join(explained.needs_one_of)}"
    else:
        yield from _list("It does not need", explained.needs, "not needed", "without it ")
    yield from _list("Whether it needs this is open", explained.needs, "cannot say", "without it ")
    if explained.compiler:
        yield f"By PyTorch's CompilerBisector it starts in {explained.compiler}"
    yield from _list("It goes away with", explained.switches, "needed")
    yield from _list("It stays with", explained.switches, "not needed")
    yield from _list("What this changes is open", explained.switches, "cannot say")


def _list(head: str, answers: Iterable[Answer], said: str, how: str = "") -> Iterator[str]:
    rows = [f"  {a.words}: {how}{_counted(a.count)}" for a in answers if a.role == said]
    if rows:
        yield f"{head}:"
        yield from rows


def _counted(count: Count) -> str:
    judged = "" if count.judged == count.of else f", judged on {count.judged}"
    other = f", something else wrong on {count.otherwise}" if count.otherwise else ""
    return f"shown on {count.shown} of {count.of}{judged}{other}"
