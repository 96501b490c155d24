"""Releases of a package: which there are, where one runs, and what is said of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fresh import ends
from narrowfuzz.bisect import command, releases
from narrowfuzz.bisect.command import Question, bisect
from narrowfuzz.bisect.releases import ReleaseEnvironment
from narrowfuzz.bisect.script import FLAKY_RUNS, script_of
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case

VERSIONS = ["0.9.0", "0.10.0", "0.11.0", "0.12.0", "0.13.0", "0.14.0"]


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A package whose releases, each in a folder of its own, hold one number."""

    def offer(numbers: Sequence[int | None], installed: str = VERSIONS[-1]) -> Path:
        def environment(package: str, version: str, others: Sequence[str]) -> ReleaseEnvironment:
            number = numbers[VERSIONS.index(version)]
            if number is None:
                raise ValueError("pip could not install it: no wheel")
            folder = tmp_path / version
            (folder / "thing").mkdir(parents=True, exist_ok=True)
            (folder / "thing" / "__init__.py").write_text(f"number = {number}\n")
            return ReleaseEnvironment((folder,))

        monkeypatch.setattr(releases, "releases", lambda package: VERSIONS)
        monkeypatch.setattr(releases, "here", lambda package: installed)
        monkeypatch.setattr(command, "release_environment", environment)
        script = tmp_path / "script.py"
        script.write_text("import sys, thing\nsys.exit(thing.number)\n")
        return script

    return offer


def test_where_it_came_and_where_it_went_again(index: Any) -> None:
    script = index([0, 0, 1, 1, 1, 0], installed="0.12.0")
    found = bisect(Question(str(script), "thing"))
    assert [one.appears for one in found.changes] == [True, False]
    assert found.sentences[:2] == (
        "thing 0.11.0 is the first that shows it, 0.10.0 the last that does not",
        "thing 0.14.0 no longer shows it, 0.13.0 is the last that does",
    )
    assert found.code == 0


def test_ends_may_be_given_in_either_order(index: Any) -> None:
    script = index([0, 0, 0, 1, 1, 1])
    for good, bad in (("0.9", "0.14.0"), ("0.14", "0.9.0")):
        (change,) = bisect(Question(str(script), "thing", good, bad)).changes
        assert (change.before.version, change.after.version) == ("0.11.0", "0.12.0")


def test_releases_that_cannot_tell_are_named(index: Any) -> None:
    script = index([None, 0, 125, 125, 1, 1])
    found = bisect(Question(str(script), "thing"))
    assert found.sentences[0].startswith("thing 0.13.0 is the first that shows it, 0.10.0")
    assert found.sentences[1] == "could not be tested in between: 0.11.0, 0.12.0"


def test_what_every_release_shows_is_said(index: Any) -> None:
    script = index([None, None, 1, 1, 1, 1])
    found = bisect(Question(str(script), "thing"))
    assert found.changes == ()
    assert found.sentences == (
        "no older release without it was found; the oldest with it is thing 0.11.0",
    )
    assert found.code == 0


@pytest.mark.parametrize(
    ("numbers", "good", "bad", "why"),
    [
        ([0, 0, 0, 0, 0, 0], "", "", "0.14.0 does not show it; name a version that shows it"),
        ([0, 0, 0, 0, 0, 125], "", "", "0.14.0 cannot tell: no output; name"),
        ([1, 1, 1, 1, 1, 1], "0.9.0", "0.14.0", "both show it: name two that differ"),
        ([0, 0, 1, 1, 1, 1], "1.0", "0.14.0", "the index has no thing 1.0: it has 0.9.0"),
        ([0, 0, 1, 1, 1, 1], "newest", "0.14.0", "'newest' is no version"),
    ],
)
def test_what_cannot_be_answered_is_said(
    index: Any, numbers: list[int], good: str, bad: str, why: str
) -> None:
    script = index(numbers)
    with pytest.raises(ValueError, match=why):
        bisect(Question(str(script), "thing", good, bad))


def test_a_traceback_is_no_divergence(index: Any) -> None:
    script = index([0, 0, 1, 1, 1, 1])
    script.write_text("import thing\nassert thing.number, 'gone'\nraise SystemExit(1)\n")
    with pytest.raises(ValueError, match="cannot tell: AssertionError: gone"):
        bisect(Question(str(script), "thing", "0.9.0", "0.14.0"))


def test_the_index_is_asked_by_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = "Available versions: 1.10.0+cpu, 1.10.0, 1.9.1, 1.9.0rc1, 1.2, junk"
    said = f"thing (1.2)\n{offered}\n  INSTALLED: 1.2\n"

    def run(code: int, out: str, err: str = "") -> Any:
        return lambda *args, **how: subprocess.CompletedProcess(args, code, out, err)

    monkeypatch.setattr(subprocess, "run", run(0, said))
    assert releases.releases("thing") == ["1.2", "1.9.1", "1.10.0"]
    monkeypatch.setattr(subprocess, "run", run(1, "", "ERROR: No matching distribution"))
    with pytest.raises(ValueError, match=r"the index offers no release of it .*No matching"):
        releases.releases("thing")


def test_a_release_that_is_installed_needs_no_folder() -> None:
    assert (
        releases.release_environment("torchao", releases.here("torchao"), ())
        == ReleaseEnvironment()
    )
    with pytest.raises(ValueError, match="does not support transformer_engine"):
        releases.release_environment("transformer_engine", "1.6.0", ())
    assert releases.here("no-such-package") == ""
    compared = releases.compared("torchao", "0.17.0", "0.18.0")
    assert compared.endswith("/ao/compare/v0.17.0...v0.18.0")


def test_a_triton_beside_a_release_runs_in_its_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def folder(package: str, version: str) -> Path:
        made = tmp_path / f"{package}-{version}"
        made.mkdir(exist_ok=True)
        if package != "torchao":
            (made / "triton").mkdir(exist_ok=True)
        return made

    monkeypatch.setattr(releases, "release_folder", folder)
    monkeypatch.setattr(releases, "folder_of", lambda text: folder(*text.split("==")))
    for package, others, interprets in (
        ("torchao", (), False),
        ("torchao", ("triton==3.6.0",), True),
        ("torchtitan", ("torchao==0.11.0",), True),
        ("torch", (), False),  # its Triton is that of GPUs
    ):
        found = releases.release_environment(package, "0.1.0", others)
        assert found.folders[0].name == f"{package}-0.1.0"
        assert bool(found.variables) is interprets


def test_what_is_asked_about(tmp_path: Path) -> None:
    entry = script_of("mx-byte0-floor")
    assert entry.path.name == "mx-byte0-floor.py" and entry.runs == 1
    (file := tmp_path / "case.json").write_bytes(
        dump_case(Case(spec=Spec(recipe="torch.bf16"), data=DataSpec()))
    )
    with pytest.raises(ValueError, match="a case without a script"):
        script_of(str(file))
    with pytest.raises(ValueError, match="is no case file"):
        script_of("mx-byte0-flor")
    assert FLAKY_RUNS == 10


def test_the_command(index: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = index([0, 0, 1, 1, 1, 1])
    assert ends("bisect", script, "--package", "thing") == 0
    said = capsys.readouterr().out
    assert "thing 0.11.0 is the first that shows it, 0.10.0 the last that does not" in said
    assert ends("bisect", script, "--package", "thing", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][0]["after"] == {"version": "0.11.0", "answer": "shows", "why": ""}
    assert ends("bisect", script, "--package", "thing", "--good", "9") == 2
