"""What an entry of the ledger says to its library's maintainers: the table ``[issue]`` of its file.

Everything that the text of an issue needs and that the rest of the entry does not say in their
words. The lines of source are quoted; on which line of which release they stand is looked up.
"""

from __future__ import annotations

import fnmatch
import glob

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a library's source."""

    #: Path from the folder that packages are installed in: torchao/float8/float8_linear.py.
    file: str
    #: Dotted name inside of the file: a function, Class.method, or "" for the module itself.
    function: str = ""
    #: The whole line, without its indentation; of several alike in the function the first is meant.
    line: str


class Issue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The words of one issue. Its reproduction is a file of its own: <entry>.issue.py."""

    #: In the library's own words: no recipe of ours.
    title: str
    #: What happens and to whom, in terms of the public API.
    summary: str
    #: What the reproduction prints, or the lines of it that matter, and what it should print.
    actual: str
    expected: str
    #: Glob of the output while the bug is there; left out: it holds ``actual`` word for word.
    shows: str = ""
    #: Why it happens, and where.
    cause: str
    places: tuple[Place, ...]
    fix: str
    #: Threads that are near, besides the links of the entry: address and what it is about.
    related: tuple[str, ...] = ()
    #: What the reader must do before: a compiler to choose, say.
    before: str = ""

    def seen_in(self, output: str) -> bool:
        """Does what the reproduction printed show the bug?"""
        lines = "\n".join(line.rstrip() for line in output.splitlines())
        return fnmatch.fnmatchcase(lines, self.shows or f"*{glob.escape(self.actual.strip())}*")
