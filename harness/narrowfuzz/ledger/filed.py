"""The text of an issue for the library's maintainers: the table ``[issue]`` of a ledger entry.

It has everything that such an issue needs and that the rest of the entry does not state in the
maintainers' terms. Lines of source are quoted; their line numbers in a release are looked up.
"""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a library's source."""

    #: Path relative to site-packages: torchao/float8/float8_linear.py.
    file: str
    #: Dotted name inside of the file: a function, Class.method, or "" for the module itself.
    function: str = ""
    #: The whole line, without its indentation; if the function has several equal ones, the first.
    line: str


class Issue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text of one issue. Its reproduction is a file of its own: <entry>.issue.py."""

    #: In the library's own words: no recipe of ours.
    title: str
    #: What happens and who is affected, in terms of the public API.
    summary: str
    #: The output of the reproduction, or its relevant lines, and what it should print.
    actual: str
    expected: str
    #: A glob that the output matches while the bug exists; "": the output contains ``actual``.
    shows: str = ""
    #: Why it happens, and where.
    cause: str
    places: tuple[Place, ...]
    fix: str
    #: Related threads besides the links of the entry: URL and topic.
    related: tuple[str, ...] = ()
    #: What the reader must do first, such as choosing a compiler.
    before: str = ""
