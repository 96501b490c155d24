"""``make history``: which release no longer shows what a campaign on an older one found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from narrowfuzz.bisect.script import Script
from narrowfuzz.bisect.search import VersionAnswer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import history

TORCHAO = history.PACKAGES["torchao"]
EVERY = ["0.9.0", "0.10.0", "0.11.0", "0.12.0", "0.13.0"]


def finding(out: Path, release: str, fingerprint: str, known: str | None = "") -> None:
    folder = out / release / "findings" / fingerprint.replace("/", "-")
    folder.mkdir(parents=True)
    told = {
        "fingerprint": fingerprint,
        "sentence": f"{fingerprint} | is wrong",
        "severity": "low",
        "flake": "always",
    }
    (folder / "explain.json").write_text(json.dumps({**told, "known_issue": known}))
    file = out / release / "summary.json"
    before = json.loads(file.read_text())["findings"] if file.is_file() else []
    findings = [*before, {"id": folder.name}]
    summary = {"seconds": 61.0, "cases": 7, "findings": findings, "suspected": []}
    file.write_text(json.dumps(summary))


def answering(monkeypatch: pytest.MonkeyPatch, **answers: str) -> list[str]:
    """A script that answers so, release by release; which were asked."""
    asked: list[str] = []

    def ask(package: history.Package, script: Script, version: str) -> VersionAnswer:
        asked.append(version)
        return VersionAnswer(version, answers[f"v{version.replace('.', '_')}"])  # type: ignore[arg-type]

    monkeypatch.setattr(history, "ask", ask)
    monkeypatch.setattr(history, "script_of", lambda target, runs: Script(Path(target), "it"))
    return asked


@pytest.mark.parametrize(
    ("answers", "fate"),
    [
        (("shows", "shows", "gone", "cannot tell", "gone"), "fixed in 0.11.0"),
        (("shows", "shows", "shows", "cannot tell", "shows"), "stands in 0.13.0"),
        (
            ("shows", "shows", "gone", "cannot tell", "cannot tell"),
            "fixed in 0.11.0; 0.12.0 and later cannot tell",
        ),
        (("gone", "gone", "gone", "gone", "gone"), "not shown again: its script passes"),
    ],
)
def test_what_became_of_it(
    answers: tuple[str, ...], fate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finding(tmp_path, "0.9.0", "O3--torchao.mxfp8")
    (row,) = history.rows(tmp_path, ["0.9.0"])
    of = {f"v{v.replace('.', '_')}": a for v, a in zip(EVERY, answers, strict=True)}
    answering(monkeypatch, **of)
    assert history.fate(TORCHAO, row, EVERY) == fate


def test_a_symptom_of_two_releases_is_one_row_and_torchs_own_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finding(tmp_path, "0.9.0", "O25--torch", "embedding-narrow-sums")
    finding(tmp_path, "0.11.0", "O25--torch", "embedding-narrow-sums")
    finding(tmp_path, "0.11.0", "O2--torchao.float8", None)
    asked = answering(monkeypatch, v0_11_0="shows", v0_12_0="gone", v0_13_0="gone")
    found = history.rows(tmp_path, ["0.9.0", "0.11.0"])
    told = list(history.every_fate(TORCHAO, found, EVERY, tmp_path / "fates.json"))
    assert [(row.fate, row.releases) for row in told] == [
        ("torch's own", ("0.9.0", "0.11.0")),
        ("fixed in 0.12.0", ("0.11.0",)),
    ]
    assert (
        asked and list(history.every_fate(TORCHAO, found, EVERY, tmp_path / "fates.json")) == told
    )
    assert asked.count("0.11.0") == 1  # the second time it is read
    text = "\n".join(history.table(told, tmp_path, ["0.9.0", "0.11.0"]))
    assert "| 0.11.0 | 1 | 7 | 2 | 0 |" in text
    assert r"\| is wrong | low | 0.11.0 | fixed in 0.12.0 |" in text
    assert text.index("fixed in 0.12.0") < text.index("torch's own")


def test_rows_of_releases_that_are_not_searched_again_stay() -> None:
    runs, found = (
        "| release | minutes | cases | findings | suspected |",
        "| found | s | in | x | k |",
    )
    line = "| --- | --- | --- | --- | --- |"
    before = [
        *(runs, line, "| 1.9 | 5 | 90 | 3 | 0 |", "| 1.10 | 5 | 70 | 2 | 0 |", "", found, line),
        r"| a \| b | low | 1.9, 1.10 | stands in 1.10 | one |",
        "| only there | low | 1.10 | stands in 1.10 |  |",
        "| old | low | 1.9 | fixed in 1.10 |  |",
    ]
    new = [
        *(runs, line, "| 1.10 | 5 | 80 | 1 | 0 |", "| 1.11 | 5 | 60 | 1 | 0 |", "", found, line),
        r"| a \| b | low | 1.10, 1.11 | stands in 1.11 | one |",
    ]
    assert history.merged(before, new) == [
        *(runs, line, "| 1.9 | 5 | 90 | 3 | 0 |"),
        *("| 1.10 | 5 | 80 | 1 | 0 |", "| 1.11 | 5 | 60 | 1 | 0 |", "", found, line),
        "| old | low | 1.9 | fixed in 1.10 |  |",
        r"| a \| b | low | 1.9, 1.10, 1.11 | stands in 1.11 | one |",
    ]


def test_every_package_has_a_table_on_the_page_and_chooses_its_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "history.md"
    page.write_text(history.PAGE.read_text())
    monkeypatch.setattr(history, "PAGE", page)
    for package in history.PACKAGES.values():
        above, _, below = page.read_text().partition(package.begin)
        rest = below.split(history.END, 1)[1]
        searched = re.findall(r"^\| (\d[\d.]+) \|", below.split(history.END, 1)[0], re.MULTILINE)
        runs = [f"| {one} | 1 | 1 | 0 | 0 |" for one in searched]
        history.write(package, ["a", *runs])  # of all releases, so that nothing stays
        text = "\n".join(["a", *runs])
        assert page.read_text() == f"{above}{package.begin}\n\n{text}\n\n{history.END}{rest}"
    assert history.PACKAGES["transformer_engine"].options("1.10.0") == [
        "--recipe", "te.*", "--te-version", "1.10.0",
    ]  # fmt: skip
    assert TORCHAO.options("0.9.0")[-2:] == ["--with", "torchao==0.9.0"]
    assert history.PACKAGES["torchtitan"].options("0.1.0")[-4:] == [
        "--with", "torchtitan==0.1.0", "--with", "torchao==0.11.0",
    ]  # fmt: skip


def test_a_torch_is_chosen_by_the_path_of_the_campaign_and_of_scripts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(history.releases, "release_folder", lambda *asked: tmp_path / asked[1])
    monkeypatch.setattr(history.subprocess, "run", lambda c, env, check: ran.append((c, env)))
    torch = history.PACKAGES["torch"]
    for package, version in ((torch, "2.12.1"), (TORCHAO, "0.9.0")):
        history.campaign(package, version, 5.0, tmp_path)
    (torchs, environment), (_, inherited) = ran
    assert not {"--with", "--te-version"} & {*torchs} and "torchao.float8.*" in torchs
    assert environment["PYTHONPATH"].startswith(str(tmp_path / "2.12.1"))
    assert inherited == dict(history.os.environ)
    row = history.Row("O25--torch", "", "low", "", tmp_path, ("2.12.1",))
    answering(monkeypatch, v2_12_1="shows", v2_13_0="gone")
    assert history.fate(torch, row, ["2.12.1", "2.13.0"]) == "fixed in 2.13.0"
