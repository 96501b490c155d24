"""``narrowfuzz replay``: what has become of a case or finding, and what is listed of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import INDUCTOR
from narrowfuzz.case.spec import SCHEMA, Case, DataSpec, Spec, dump_case
from narrowfuzz.machine.environment import versions
from narrowfuzz.machine.machine import machine
from narrowfuzz.report.replay import Replayed, print_replayed
from test_cli import CLEAN, NO_BIAS, Refused, Run, here, nf, refused

__all__ = ["here", "nf", "refused"]  # fixtures


def finding(case: Case) -> dict[str, Any]:
    """explain.json of a finding that no verdict of today has."""
    words = ("recipe", "rule", "arm", "role", "symptom", "sentence", "strength")
    return dict.fromkeys(words, "x") | {
        "rule": "O5",
        "arm": "eager",
        "id": case.id,
        "fingerprint": "O5--output--eager--wrong value--torch",
        "severity": "high",
        "reach": "gaussian",
        "case": json.loads(dump_case(case)),
        "minimal": json.loads(dump_case(case)),
        "flake": "always",
    }


def kept(folder: Path, case: Case, /, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "explain.json").write_text(json.dumps(finding(case) | fields))


class TestFindingFolder:
    @pytest.mark.parametrize(
        "raw", [None, b"", b"{}", b"\xff\x00", b"[" * 100_000, dump_case(CLEAN)],
        ids=("missing", "empty", "no fields", "binary", "deep", "a case"),
    )  # fmt: skip
    def test_a_folder_that_is_no_finding_is_refused(
        self, refused: Refused, here: Path, raw: bytes | None
    ) -> None:
        (here / "abc").mkdir()
        if raw is not None:
            (here / "abc" / "explain.json").write_bytes(raw)
        assert "abc" in refused("replay", "abc")

    def test_a_finding_of_a_later_version_is_refused(self, refused: Refused, here: Path) -> None:
        kept(here / "abc", CLEAN, minimal=json.loads(dump_case(CLEAN)) | {"schema": SCHEMA + 1})
        assert "schema" in refused("replay", "abc")

    def test_an_id_that_fits_two_findings_is_refused(self, refused: Refused, here: Path) -> None:
        for name in ("abc1", "abc2"):
            kept(here / f"narrowfuzz-runs/run/findings/{name}", CLEAN)
        assert "abc1" in (said := refused("replay", "abc")) and "abc2" in said

    def test_an_id_that_two_runs_hold_is_refused_by_their_folders(
        self, refused: Refused, here: Path
    ) -> None:
        for run in ("one", "two"):
            kept(here / f"narrowfuzz-runs/{run}/findings/abc1", CLEAN)
        said = refused("replay", "abc1")
        assert "one/findings/abc1" in said and "two/findings/abc1" in said

    def test_the_start_of_an_id_is_enough(self, nf: Run, here: Path) -> None:
        kept(here / "narrowfuzz-runs/run/findings/abc123", CLEAN)
        kept(here / "narrowfuzz-runs/run/findings/def456", NO_BIAS)
        code, out, _ = nf("replay", "abc")
        assert code == 0 and "fixed" in out


def test_replay_of_a_divergence_says_still_failing(nf: Run, here: Path) -> None:
    (here / "case.json").write_bytes(dump_case(NO_BIAS))
    code, out, err = nf("replay", "case.json")
    assert (code, err) == (1, "")
    assert "still failing" in out and "torchao.mxfp8.rceil" in out and "bias" in out


def test_a_finding_of_an_older_campaign_is_replayed(nf: Run, here: Path) -> None:
    """Its case names what happened to a library's layers in the words of then, and what is called
    a rule now was an oracle."""
    events = [{"type": "open"}, {"type": "forward"}, {"type": "close"}]
    backward = {"type": "backward", "of": [0]}
    schedule = {"events": [*events, backward, {"type": "step"}], "checkpoint": "whole"}
    older = {"schema": 4, "data": {}, "spec": {"recipe": "reference.delayed", "schedule": schedule}}
    kept(here / "abc1", CLEAN, case=older, minimal=older, rule="", oracle="O14")
    code, out, err = nf("replay", "abc1")
    assert (code, err) == (0, "") and "fixed" in out and "eager+checkpoint" in out
    kept(here / "abc1", CLEAN, case=older, minimal=older, rule="")
    code, _, err = nf("replay", "abc1")
    assert code == 2 and "names no `rule`" in err
    kept(here / "abc1", CLEAN, case=older, minimal=3, rule="O14")
    assert nf("replay", "abc1")[0] == 2


def test_what_replays_say_is_listed(nf: Run, here: Path) -> None:
    """Beside the runs for a finding that lies there, in the database that is named for others."""
    assert nf("list", "findings")[1].strip() == "no run has recorded a finding"
    (here / "case.json").write_bytes(dump_case(NO_BIAS))
    name = json.loads(nf("replay", "case.json", "--json")[1])["fingerprint"]
    mine = "narrowfuzz-runs/1/findings/abc1"
    kept(here / mine, NO_BIAS, fingerprint=name, recipe=NO_BIAS.spec.recipe)
    assert nf("replay", mine)[0] == 1
    (one,) = json.loads(nf("list", "findings", "--json")[1])
    assert (one["state"], one["times_seen"]) == ("open", 2)  # by its run, and now
    assert nf("list", "findings", "--json", "--recipe", "torch.*")[1].strip() == "[]"
    nothing = nf("list", "findings", "--recipe", "torch.*")[1].strip()
    assert nothing == "no finding has such a recipe and arm"

    where = {"versions": versions(), "machine": machine().describe()}
    kept(here / "abc2", CLEAN, environment=where)
    assert nf("replay", "abc2")[0] == 0  # recorded nowhere
    assert len(json.loads(nf("list", "findings", "--json")[1])) == 1
    assert nf("replay", "abc2", "--database", "other.db")[0] == 0
    code, out, err = nf("list", "findings", "--database", "other.db")
    assert (code, err) == (0, "") and CLEAN.id in out and "1 fixed" in out
    assert "no file" in nf("list", "findings", "--database", "none.db")[2]

    kept(here / "abc3", CLEAN, environment=where, flake="flaky")  # chance may have it gone
    assert nf("replay", "abc3", "--database", "chance.db")[0] == 0
    assert json.loads(nf("list", "findings", "--json", "--database", "chance.db")[1]) == []


def test_replay_of_a_clean_case_says_sound(nf: Run, here: Path) -> None:
    (here / "case.json").write_bytes(dump_case(CLEAN))
    code, out, err = nf("replay", "case.json")
    assert (code, err) == (0, "")
    assert out.startswith("sound") and CLEAN.id in out and "eager" in out
    assert [path.name for path in here.iterdir()] == ["case.json"]


def test_replay_of_what_cannot_run_here_says_why(
    nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    assert unavailable(INDUCTOR)
    case = Case(spec=Spec(recipe="torch.fp32", dtype="fp32", compile="inductor"), data=DataSpec())
    (here / "case.json").write_bytes(dump_case(case))
    code, out, _ = nf("replay", "case.json")
    assert code == 125
    assert "cannot run here" in out and "g++" in out
    assert nf("replay", "case.json", "--arm", "eager*")[0] == 0


def test_replay_of_a_recipe_whose_library_is_absent_says_so(
    nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "torchao" else find_spec(name, *a),
    )
    (here / "case.json").write_bytes(dump_case(NO_BIAS))
    code, out, _ = nf("replay", "case.json")
    assert code == 125
    assert "pip install 'torchao>=" in out


def test_a_replay_breaks_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal, 80 columns are taken for one."""
    recipe = "a.recipe.with.a.name.of.which.a.line.of.eighty.columns.is.almost.full"
    print_replayed(Replayed("c", "still failing", recipe, "wrong", "O5", "eager", "f", recipe))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and said[1].endswith("narrowfuzz rule O5")


def test_a_replay_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_replayed(Replayed("c", "diverges otherwise", "torch.bf16", "wrong", "O3", "eager"))
    assert capsys.readouterr().out.startswith("diverges otherwise now: wrong\n")
    print_replayed(Replayed("c", "cannot tell", reason="no verdict of O8"))
    assert capsys.readouterr().out == "cannot tell: no verdict of O8\n"


def test_a_replay_says_what_follows_from_a_cause(capsys: pytest.CaptureFixture[str]) -> None:
    follows = ("O5, O6 on output, eager", "O6 on grad_input, eager")
    print_replayed(
        Replayed("c", "still failing", "torch.bf16", "wrong", "O3", "eager", "f", "", follows)
    )
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "  consequences: O5, O6 on output, eager; O6 on grad_input, eager"
