"""What an entry says to its library's maintainers: it is complete, it runs, it points rightly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import ends, forked
from ledger.test_ledger import entry
from narrowfuzz.ledger.by_patch import by_cause, counted, same_cause
from narrowfuzz.ledger.filed import Issue, Place
from narrowfuzz.ledger.ledger import KINDS, Entry, load_entries, stands
from narrowfuzz.report import listing
from narrowfuzz.report.known_issue import TE, Source, issue_body, line_number, release_of_te
from narrowfuzz.triage.verify import RunScript
from reproductions import about_gcc, alone, compiles, miscompiles, shown

ENTRIES = load_entries()
FILED = [e for e in ENTRIES if e.issue]
#: What a maintainer's script does without, and what is a word of ours.
NOT_FOR_MAINTAINERS = ("narrowfuzz", "te_on_cpu", "excepthook", "OMP_NUM_THREADS", "os._exit")
WORDS_OF_OURS = (
    "torchao.mxfp8",
    "torchao.float8.",
    "te.delayed",
    "te.mxfp8",
    "te.blockwise",
    "te.nvfp4",
    "arm ",
    "recipe wrapper",
)

SOURCE = """\
def cast(x):
    return x + 1


class Layer:
    def forward(self, x):
        y = x
        return x + 1
"""
ISSUE = {
    "title": "Layer adds one",
    "summary": "Layer adds one to its input. It should not.",
    "actual": "2 is wrong",
    "expected": "1",
    "cause": "It says so.",
    "places": [{"file": "lib/layer.py", "function": "Layer.forward", "line": "return x + 1"}],
    "fix": "Return x.",
}


# the source that is pointed at


def place(**changes: str) -> Place:
    return Place(**({"file": "lib/layer.py", "line": "return x + 1"} | changes))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "layer.py").write_text(SOURCE)
    return Source(tmp_path, "lib", "1.0")


def test_a_line_is_found_inside_its_function(source: Source) -> None:
    assert line_number(source, place(function="Layer.forward")) == 8
    assert line_number(source, place(function="cast")) == 2
    assert line_number(source, place()) == 2, "of several the first"


def test_a_line_that_moves_is_found_where_it_is(source: Source) -> None:
    (source.root / "lib" / "layer.py").write_text("# a line\n" + SOURCE)
    assert line_number(source, place(function="Layer.forward")) == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"line": "return x + 2"},
        {"function": "Layer.backward"},
        {"function": "cast", "line": "y = x"},
        {"file": "lib/gone.py"},
    ],
    ids=str,
)
def test_a_line_that_is_not_there_is_refused_by_name(
    source: Source, changes: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"lib 1\.0") as caught:
        line_number(source, place(**changes))
    assert changes.get("file", "lib/layer.py") in str(caught.value)


@pytest.mark.parametrize(
    ("shows", "output", "seen"),
    [
        ("", "a warning\n2 is [wrong]  \nmore\n", True),
        ("", "2 is w\n", False),
        ("*[1-9]* of 9 are wrong*", "3 of 9 are wrong\n", True),
        ("*[1-9]* of 9 are wrong*", "0 of 9 are wrong\n", False),
    ],
)
def test_what_is_printed_shows_the_bug_or_does_not(shows: str, output: str, seen: bool) -> None:
    import msgspec

    issue = msgspec.convert({**ISSUE, "actual": "2 is [wrong]", "shows": shows}, Issue)
    assert shown(issue, output) is seen


# entries and causes


def test_entries_of_one_cause_stand_together_and_are_counted() -> None:
    a = entry(id="a", cause="one", kind="bug")
    b = entry(id="b", kind="expected")
    c = entry(id="c", cause="one", kind="bug")
    assert {cause: [e.id for e in es] for cause, es in by_cause([a, b, c]).items()} == {
        "one": ["a", "c"],
        "b": ["b"],
    }
    assert same_cause(a, [a, b, c]) == ["c"] and same_cause(b, [a, b, c]) == []
    assert counted([a, b, c]).startswith("2 causes of 3 entries; 2 entries that a")
    assert counted([b]).startswith("1 cause of 1 entry; 0 entries that a")


def test_a_file_of_before_says_no_kind_and_no_cause() -> None:
    old = entry()
    assert (old.kind, old.cause, old.issue, old.one_cause) == ("", "", None, "an-entry")


@pytest.mark.parametrize(
    "changes", [{"kind": "bogus"}, {"issue": {**ISSUE, "surprise": 1}}, {"issue": {"title": "x"}}]
)
def test_a_kind_or_an_issue_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    import msgspec

    with pytest.raises(msgspec.ValidationError):
        entry(**changes)


def test_every_entry_here_says_what_kind_it_is() -> None:
    assert {e.kind for e in ENTRIES} == set(KINDS) - {""}


def test_a_cause_that_is_named_has_several_entries_and_one_library() -> None:
    for cause, entries in by_cause(ENTRIES).items():
        if entries[0].cause:
            assert len(entries) > 1, cause
            assert len({TE in e.versions for e in entries}) == 1, cause


# the commands


@pytest.fixture
def made_up(source: Source, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ledger(**changes): entries of a ledger of our own, about a library that is there."""
    (source.root / "lib" / "__init__.py").write_text("")
    told = source.root / "lib-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(source.root))

    def ledger(**changes: Any) -> Entry:
        import msgspec

        one = entry(**({"kind": "bug", "issue": ISSUE, "versions": {"lib": "==1.0"}} | changes))
        one = msgspec.structs.replace(one, folder=str(source.root))
        monkeypatch.setattr(listing, "load_entries", lambda folders=(): [one])
        return one

    return ledger


def test_the_text_has_all_that_is_filed(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one = made_up()
    one.reproduction.write_text("print(2, 'is wrong')\n")
    assert ends("known", one.id, "--issue") == 0
    text = capsys.readouterr().out
    assert text.startswith("# Layer adds one\n")
    for wanted in (
        "print(2, 'is wrong')", "2 is wrong", "`lib/layer.py`, line 8 in `Layer.forward` (lib 1.0)",
        "Return x.", "https://example.org/1", "- torch: ",
    ):  # fmt: skip
        assert wanted in text
    assert "emulation" not in text


def test_a_link_that_is_explained_stands_once(made_up: Any) -> None:
    one = made_up(issue={**ISSUE, "related": ["https://example.org/1: the same of another layer"]})
    one.reproduction.write_text("print(2, 'is wrong')\n")
    body = issue_body(one)
    assert body.count("https://example.org/1") == 1
    assert "- https://example.org/1: the same of another layer" in body


def test_a_library_that_is_not_here_is_said(
    made_up: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [{"file": "no_such_lib/layer.py", "line": "return x"}]
    one = made_up(issue={**ISSUE, "places": places})
    one.reproduction.write_text("print(2, 'is wrong')\n")
    assert ends("known", one.id, "--issue") == 2
    assert "no_such_lib is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"issue": None}, "[issue]"),
        ({"issue": None, "kind": "expected"}, KINDS["expected"]),
        ({"issue": None, "cured": "0.19"}, "cured in 0.19"),
        ({}, "an-entry.issue.py"),  # no such file
    ],
    ids=str,
)
def test_an_entry_that_lacks_something_says_what(
    made_up: Any, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], names: str
) -> None:
    assert ends("known", made_up(**changes).id, "--issue") == 2
    told = capsys.readouterr()
    assert names in told.err and len(told.err.strip().splitlines()) == 1 and not told.out


@pytest.mark.parametrize("more", [(), ("--issue",)])
def test_report_sends_an_entrys_id_to_the_command_that_shows_it(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    assert ends("report", FILED[0].id, *more) == 2
    command = " ".join(["narrowfuzz known", FILED[0].id, *more])
    assert capsys.readouterr().err.strip().count(command) == 1


# what is shipped


def shipped() -> Iterator[Any]:
    for e in FILED:
        marks = [pytest.mark.slow] * (TE in e.versions)  # it may have to be installed
        yield pytest.param(e, id=e.id, marks=marks)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("one", shipped())
def test_an_issue_points_at_lines_that_are_there(one: Entry) -> None:
    if TE not in one.versions and stands(one, one.devices[0]) != "named":
        pytest.skip("it names other versions")
    body = issue_body(one)
    assert one.issue and body.count(", line ") >= len(one.issue.places)


@pytest.mark.parametrize("one", FILED, ids=lambda e: e.id)
def test_an_issue_is_in_the_librarys_words_and_short(one: Entry) -> None:
    assert one.issue
    source = one.reproduction.read_text()
    assert len(source.splitlines()) <= 25
    assert not [word for word in NOT_FOR_MAINTAINERS if word in source]
    ast.parse(source)
    said = f"{one.issue.title} {one.issue.summary}"
    assert not [word for word in WORDS_OF_OURS if word in said]
    assert len(one.issue.summary.strip().splitlines()) <= 3


def test_what_is_filed_is_a_bug_and_has_no_cure_in_a_release() -> None:
    for one in FILED:
        assert one.kind == "bug" and not one.cured, one.id


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        pytest.param(e, id=e.id, marks=[pytest.mark.heavy] * compiles(e))
        for e in FILED
        if TE not in e.versions
    ],
)
def test_a_reproduction_shows_what_it_says(one: Entry, scripts: RunScript, tmp_path: Path) -> None:
    assert one.issue
    if stands(one, one.devices[0]) != "named":
        pytest.skip("it names other versions")
    if about_gcc(one) and not miscompiles():
        pytest.skip("another compiler, or CPU, than those it is about")
    fresh = compiles(one)  # by the compiler that the entry is about
    result = alone(one.reproduction, one, tmp_path) if fresh else scripts(one.reproduction)
    assert result.code == 0 and shown(one.issue, result.output), result.output


@pytest.mark.heavy
def test_reproductions_of_transformer_engine_show_what_they_say() -> None:
    """Each in a child of one process that has imported the library."""
    of_te = [e for e in FILED if TE in e.versions]
    for version in {release_of_te(e) for e in of_te}:
        ours = [e for e in of_te if release_of_te(e) == version]
        done = forked("transformer_engine", version, *(one.reproduction for one in ours))
        rest = done.stdout
        for one in ours:
            output, ended, rest = rest.partition(f"{one.reproduction} 0\n")
            assert one.issue and ended and shown(one.issue, output), done.stdout + done.stderr
