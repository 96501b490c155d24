"""``narrowfuzz compare``: what differs between two installations, by the same cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.campaign import compare
from narrowfuzz.campaign.compare import Side, compare_command, side_of

ROW = {
    "severity": "low",
    "status": "new",
    "sentence": "output wrong",
    "recipe": "r",
    "arm": "eager",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(of A, of B, digests, codes): the comparison of two runs that left these fingerprints."""

    def compared(*seen: set[str], digests: str = "xx", codes: tuple[int, int] = (1, 0)) -> int:
        sides = iter(zip(seen, digests, codes, strict=True))

        def left(side: Side, folder: Path, options: list[str]) -> int:
            names, digest, code = next(sides)
            assert options[:4] == ["--cases", "5", "--seed", "3"] and "--no-ledger" in options
            folder.mkdir(parents=True)
            lines = [json.dumps(ROW | {"fingerprint": name}) + "\n" for name in sorted(names)]
            (folder / "findings.jsonl").write_text("".join(lines))
            (folder / "summary.json").write_text(json.dumps({"cases_digest": digest}))
            return code

        monkeypatch.setattr(compare, "_run", left)
        here = str(tmp_path)
        return compare_command(
            here, here, cases=5, seed=3, workers=1, out=tmp_path / "out", more=["--recipe", "r"]
        )

    return compared


def test_equal_findings_are_no_difference(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"a", "b"}, {"a", "b"}, codes=(1, 1)) == 0
    assert "only A: 0" in (said := capsys.readouterr().out) and "both: 2" in said


def test_what_one_side_shows_alone_is_a_difference(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({"a", "b"}, {"b"}) == 1
    said = capsys.readouterr().out
    assert "only A: 1" in said and "only B: 0" in said and "did not judge the same" not in said


def test_other_cases_are_said(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(set(), set(), digests="xy", codes=(0, 0)) == 0
    assert "did not judge the same cases" in capsys.readouterr().out


def test_a_run_that_does_not_end_compares_nothing(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({"a"}, {"a"}, codes=(2, 0)) == 3
    assert "its run ended with 2" in capsys.readouterr().out


def test_a_side_is_a_python_an_environment_or_packages(tmp_path: Path) -> None:
    assert side_of(sys.executable).python == sys.executable
    assert side_of(str(tmp_path)) == Side(str(tmp_path), sys.executable, str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    assert side_of(str(tmp_path)).python == str(tmp_path / "bin" / "python")
    with pytest.raises(ValueError, match="is no Python, no environment, no folder"):
        side_of(str(tmp_path / "nothing"))


def test_a_folder_that_is_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is there already"):
        compare_command(
            sys.executable, sys.executable, cases=1, seed=1, workers=1, out=tmp_path, more=[]
        )


@pytest.mark.heavy
def test_another_conversion_is_found_on_one_side(tmp_path: Path) -> None:
    """A folder of packages with a torchao whose scales are doubled, over the one installed."""
    over = tmp_path / "over"
    over.mkdir()
    (over / "sitecustomize.py").write_text(
        "import torchao.float8.float8_utils as u\n"
        "right = u.amax_to_scale\n"
        "u.amax_to_scale = lambda *a, **k: right(*a, **k) * 2\n"
        "import torchao.float8.float8_scaling_utils as s\n"
        "s.amax_to_scale = u.amax_to_scale\n"
    )
    plain = tmp_path / "plain"
    plain.mkdir()
    code = compare_command(
        str(plain), str(over), cases=20, seed=1, workers=1, out=tmp_path / "out",
        more=["--recipe", "torchao.float8.tensorwise", "--arm", "eager"],
    )  # fmt: skip
    assert code == 1
    rows = [
        json.loads(line) for line in (tmp_path / "out/B/findings.jsonl").read_text().splitlines()
    ]
    assert any(row["rule"] in ("O2", "O3", "O10") for row in rows)
