"""What a finding needs and what makes it go away. ``narrowfuzz explain`` saves this in the
finding's folder, where the HTML page and ``narrowfuzz report`` read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

#: The file's name; ``explain.json`` beside it is the finding itself.
FILE = "causes.json"
#: Number of draws of data, each with its own seed, on which every question is answered.
DRAWS = 20

#: "nothing judged": after the change the rule has nothing to judge, as it is about a recompute or a
#: kernel that is not there then, and no other rule finds anything.
Role = Literal["needed", "not needed", "cannot say", "nothing judged"]


@dataclass(frozen=True)
class Count:
    """How often the divergence showed among ``of`` draws of data.

    ``judged`` is the number of draws on which the rule reached a verdict; ``otherwise`` the number
    on which the same rule found the same tensor wrong, but with another symptom.
    """

    shown: int
    judged: int
    of: int = DRAWS
    otherwise: int = 0

    @property
    def silent(self) -> bool:
        """True if the rule judged every draw and never found anything wrong."""
        return self.judged == self.of and not self.shown and not self.otherwise


@dataclass(frozen=True)
class Cost:
    """The price of a change of the case, on this machine. An error is the norm of a result's
    distance from the float64 run over the norm of that run."""

    #: The result whose error it is.
    result: str
    error: float
    error_before: float
    #: Running time with the change over that without it.
    times: float


@dataclass(frozen=True)
class Part:
    """What one step of the computation adds to the error of a result."""

    words: str
    #: What it adds to the budget's element.
    added: float
    #: Norm of what it adds to all elements, over the norm of the exact result.
    size: float


@dataclass(frozen=True)
class Budget:
    """Where the error of one result comes from, at the element that uses most of its bound."""

    #: output, grad_input or grad_weight of a linear, or the name of a model's result.
    result: str
    arm: str
    index: tuple[int, ...]
    #: The float64 result at that element, and how far a correct result may be from it; None if no
    #: bound is known.
    exact: float
    bound: float | None
    #: In the order of the computation.
    parts: tuple[Part, ...]
    #: The layer of a model; "" for a single linear and for a model's own results.
    layer: str = ""


@dataclass(frozen=True)
class Answer:
    """What happens to the divergence after one change of the case."""

    words: str
    count: Count
    role: Role
    #: Of a change that makes it go away; None if it is not known.
    cost: Cost | None = None
    #: The data on which this was counted, in words; "" is that of the case.
    data: str = ""
    #: What another rule finds after the change, where the divergence itself is gone: the bug may be
    #: there still, and show in another way.
    instead: str = ""


@dataclass(frozen=True)
class Explained:
    """What ``narrowfuzz explain`` has found out about a finding."""

    id: str
    sentence: str
    #: The unchanged case that every change starts from, in words.
    asked_of: str
    #: In how many of the draws the unchanged case shows the divergence.
    shows: Count
    needs: tuple[Answer, ...]
    #: Conditions that the divergence does not need one by one, though it is gone without all of
    #: them.
    needs_one_of: tuple[str, ...]
    #: Settings that a user could change, and what each does to the divergence.
    switches: tuple[Answer, ...]
    #: Where its first bad value is, and the known issue that it resembles, in sentences.
    first_bad: tuple[str, ...]
    nearest: str
    #: The changes that there was no time for.
    untried: tuple[str, ...]
    #: Where inside the compiler the divergence starts, in words; "" if that is not known.
    compiler: str = ""
    #: None: nothing was compared with an exact result.
    budget: Budget | None = None
    #: How often the unchanged case shows it with other data, by words for the data.
    by_data: dict[str, Count] = field(default_factory=dict)


def save(folder: Path, explained: Explained) -> None:
    """Write it to a finding's folder."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(asdict(explained))))


def load(folder: Path) -> Explained | None:
    """The explanation saved in a finding's folder; None if there is none. Raises ValueError naming
    the file if it holds something else."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Explained)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}; narrowfuzz explain {folder} writes it anew") from None


def saved_answer_lines(folder: Path) -> tuple[str, ...]:
    """The answers saved in a finding's folder, as lines for people; none if there are none."""
    explained = load(folder)
    return () if explained is None else tuple(answer_lines(explained))


def lines(explained: Explained) -> Iterator[str]:
    """The whole explanation as lines for people."""
    yield explained.sentence
    yield from answer_lines(explained)
    yield from explained.first_bad
    if explained.nearest:
        yield f"Known issues: {explained.nearest}"
    if explained.untried:
        yield f"No time for: {'; '.join(explained.untried)} (--seconds gives more)"


def answer_lines(explained: Explained) -> Iterator[str]:
    """Only the answers, without the finding's sentence, its first bad value and known issues."""
    own = explained.shows
    asked_of = explained.asked_of[0].upper() + explained.asked_of[1:]
    yield f"{asked_of} shows it with {own.shown} of {own.of} random seeds."
    yield from _list("It needs", explained.needs, "needed", "without it ")
    if explained.needs_one_of:
        yield f"It needs one of these, any of them: {'; '.join(explained.needs_one_of)}"
    else:
        yield from _list("It does not need", explained.needs, "not needed", "without it ")
    about = (
        "It is about this, without which the rule has nothing to judge and no rule finds anything"
    )
    yield from _names(about, explained.needs)
    yield from _list("Whether it needs this is open", explained.needs, "cannot say", "without it ")
    yield from _data_lines(explained)
    if explained.compiler:
        yield f"By PyTorch's CompilerBisector it starts in {explained.compiler}"
    if explained.budget is not None:
        yield from budget_lines(explained.budget)
    yield from _list("It goes away with", explained.switches, "needed")
    avoided = "With this the rule has nothing to judge, and no rule finds anything"
    yield from _names(avoided, explained.switches)
    yield from _list("It stays with", explained.switches, "not needed")
    yield from _list("What this changes is open", explained.switches, "cannot say")


def budget_lines(found: Budget) -> Iterator[str]:
    """The error budget, a line for each part."""
    of = f"{found.layer}.{found.result}" if found.layer else found.result
    if found.bound is None:
        yield f"Error of {of} on {found.arm}, over all elements, of the norm of the float64 result:"
        yield from (f"  {part.words}: {part.size:.3g}" for part in found.parts)
        return
    at = f" at {list(found.index)}" if found.index else ""
    most = f"at most {found.bound:.3g} from it (the bound)" if found.bound else "exactly that"
    yield (
        f"Error of {of}{at} on {found.arm}, where the exact result is {found.exact:.6g} and a"
        f" correct one {most}:"
    )
    total = sum(part.added for part in found.parts)
    sign = 1 if total >= 0 else -1
    for part in found.parts:
        share = _share(sign * part.added, found.bound)
        yield f"  {part.words}: {share}; over all elements {part.size:.2%} of the norm of {of}"
    yield f"  all together: {_share(abs(total), found.bound)}"


def _share(added: float, bound: float) -> str:
    """An error in units of its bound; itself if a correct result has none."""
    if not bound:
        return f"{added:.3g}"
    share = added / bound
    if abs(share) >= 10:
        return f"{share:,.0f} times the bound"
    return f"{round(share, 3) + 0.0:.1%} of the bound"  # no -0.0%


def _data_lines(explained: Explained) -> Iterator[str]:
    """With which data it shows, and with which it does not."""
    shown = {words: count for words, count in explained.by_data.items() if count.shown}
    silent = [words for words, count in explained.by_data.items() if count.silent]
    if shown and len(shown) == len(explained.by_data):
        yield "It shows with data of every kind that was tried"
    elif shown:
        counts = (f"{words} ({count.shown} of {count.of})" for words, count in shown.items())
        yield f"It shows with data that is {', '.join(counts)}"
    if silent:
        yield f"It does not show with data that is {', '.join(silent)}"


def _list(head: str, answers: Iterable[Answer], role: str, how: str = "") -> Iterator[str]:
    rows = [f"  {a.words}: {how}{_ended(a)}{_costs(a.cost)}" for a in answers if a.role == role]
    if rows:
        yield f"{head}:"
        yield from rows


def _names(head: str, answers: Iterable[Answer]) -> Iterator[str]:
    """The words of the answers after which nothing is judged."""
    rows = [f"  {answer.words}" for answer in answers if answer.role == "nothing judged"]
    if rows:
        yield f"{head}:"
        yield from rows


def _ended(answer: Answer) -> str:
    data = f" with data that is {answer.data}" if answer.data else ""
    instead = f"; another rule finds: {answer.instead}" if answer.instead else ""
    return f"{_counted(answer.count)}{data}{instead}"


def _counted(count: Count) -> str:
    judged = "" if count.judged == count.of else f", judged on {count.judged}"
    other = f", something else wrong on {count.otherwise}" if count.otherwise else ""
    return f"shown on {count.shown} of {count.of}{judged}{other}"


def _costs(cost: Cost | None) -> str:
    if cost is None:
        return ""
    error = f"relative error of {cost.result} {cost.error:.2g} in place of {cost.error_before:.2g}"
    return f"; {error}; runs {cost.times:.1f} times as long on this machine"
