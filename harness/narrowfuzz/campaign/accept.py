"""``narrowfuzz compare --accept``: write intended changes into a file for ``--suppress``."""

from __future__ import annotations

import datetime
import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowfuzz.campaign.comparison import LETTERS, Comparison, Difference
from narrowfuzz.report.accepted import suppressions
from narrowfuzz.trace.words import plural

#: Days for which an intended change is accepted if --until is not given.
_DAYS = 90


@dataclass(frozen=True)
class Accepting:
    """Options: the file to write, the reason, and the day from which the change counts again."""

    file: Path | None = None
    reason: str = ""
    until: str = ""


def check_accepting(options: Accepting) -> None:
    """Raises ValueError for an acceptance without a reason, an invalid or past day, a file that
    cannot be extended, and for a reason or a day without a file."""
    if options.file is None:
        if options.reason or options.until:
            raise ValueError("--reason and --until say why and how long --accept FILE accepts")
        return
    if not options.reason.strip():
        raise ValueError(f"--accept {options.file}: say by --reason why the change is meant")
    _until(options)
    if options.file.exists():
        suppressions(options.file)
    elif not options.file.absolute().parent.is_dir():
        raise ValueError(f"--accept {options.file}: its folder does not exist")


def write_accepted(comparison: Comparison, options: Accepting) -> tuple[Comparison, Sequence[str]]:
    """Add the counting differences that only B shows to the file. Returns the comparison with these
    marked as accepted, and lines that report what was done. A divergence that only A shows is gone
    with B: accepting it would only hide its return."""
    if options.file is None:
        return comparison, ()
    until = _until(options)
    wanted = [one for one in comparison.counting if one.side == LETTERS[1]]
    before = options.file.read_text() if options.file.exists() else ""
    if wanted:
        text = "\n".join(_entry(one, options.reason, until) for one in wanted)
        options.file.write_text(f"{before.rstrip()}\n\n{text}" if before.strip() else text)
        suppressions(options.file)  # raises if it cannot be read back
    why = f"accepted until {until}: {options.reason}"
    differences = [replace(d, accepted=why) if d in wanted else d for d in comparison.differences]
    return replace(comparison, differences=differences), [
        f"accepted in {options.file}: {plural(len(wanted), 'difference')} that only B shows, until "
        f"{until}; pass --suppress {options.file} to compare or run"
    ]


def _until(options: Accepting) -> datetime.date:
    today = datetime.date.today()
    if not options.until:
        return today + datetime.timedelta(days=_DAYS)
    try:
        until = datetime.date.fromisoformat(options.until)
    except ValueError:
        raise ValueError(f"--until {options.until!r} is no day: write it like {today}") from None
    if until <= today:
        raise ValueError(f"--until {until} is not in the future: name a later day")
    return until


def _entry(one: Difference, reason: str, until: datetime.date) -> str:
    return (
        f"# {one.recipe}, {one.arm}: {_quoted(one.sentence)}\n"
        "[[suppress]]\n"
        f"fingerprint = {_quoted(glob.escape(one.fingerprint))}\n"
        f"reason = {_quoted(reason)}\n"
        f"until = {until}\n"
    )


def _quoted(text: str) -> str:
    """The text as a basic string of TOML: a JSON string, except that DEL is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
