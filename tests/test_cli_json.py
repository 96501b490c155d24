"""``--json``: one document on standard output, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.case.spec import dump_case
from narrowfuzz.report.tally import Tally
from test_cli import CLEAN, KINDS, NO_BIAS, Run, here, nf
from test_cli_replay import kept

__all__ = ["here", "nf"]  # fixtures


class TestJson:
    """One document on standard output, and nothing else."""

    @pytest.mark.parametrize("kind", [*KINDS, "controls"])
    def test_list_has_a_record_for_each_row(self, nf: Run, kind: str) -> None:
        code, out, err = nf("list", kind, "--json")
        assert (code, err) == (0, "")
        records = json.loads(out)
        assert records and all(record["id"] for record in records)
        assert len({record["id"] for record in records}) == len(records)

    def test_what_is_known_has_all_that_a_program_asks_for(self, nf: Run) -> None:
        records = json.loads(nf("list", "known", "--json")[1])
        names = {"id", "severity", "recipes", "title", "workaround", "links"}
        names |= {"kind", "cause", "same_cause"}
        assert all(set(record) == names for record in records)
        assert {record["severity"] for record in records} == {"high", "medium", "low"}

    def test_what_cannot_run_has_its_reason(
        self, nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(here))
        arms = {record["id"]: record for record in json.loads(nf("list", "arms", "--json")[1])}
        assert arms["eager"]["here"] == "available" and "g++" in arms["inductor"]["here"]
        doctor = json.loads(nf("doctor", "--json")[1])
        assert {"id": "inductor", "here": arms["inductor"]["here"]} in doctor["arms"]
        assert doctor["g++"] == "" and doctor["problems"] == []

    def test_doctor(self, nf: Run) -> None:
        code, out, _ = nf("doctor", "--json")
        assert code == 0
        report = json.loads(out)
        assert report["versions"]["torch"] != "absent" and report["machine"]["policies"]
        assert report["ledger"]["entries"] > 50 and report["verified"]["records"]
        assert bool(report["verified"]["remedy"]) is not report["verified"]["these_versions"]

    def test_replay_of_each_outcome(self, nf: Run, here: Path) -> None:
        (here / "clean.json").write_bytes(dump_case(CLEAN))
        (here / "fails.json").write_bytes(dump_case(NO_BIAS))
        kept(here / "abc1", NO_BIAS)
        kept(here / "abc2", CLEAN)
        told = {}
        for target in ("clean.json", "fails.json", "abc1", "abc2"):
            code, out, _ = nf("replay", target, "--json")
            told[target] = json.loads(out)
            assert code == (1 if told[target]["sentence"] else 0)
        assert {name: one["outcome"] for name, one in told.items()} == {
            "clean.json": "sound", "fails.json": "still failing", "abc1": "diverges otherwise",
            "abc2": "fixed",
        }  # fmt: skip
        fails = told["fails.json"]
        assert fails["case"] == NO_BIAS.id and fails["arm"] == "eager" and fails["rule"]
        assert fails["fingerprint"].startswith(f"{fails['rule']}--")
        assert "bias" in fails["entry"], "the ledger knows it"
        assert told["clean.json"]["reason"] == "no divergence on eager"
        kept(here / "abc3", CLEAN, rule="O8", arm="aot_eager")
        code, out, _ = nf("replay", "abc3", "--arm", "eager", "--json")
        cannot = json.loads(out)
        assert (code, cannot["outcome"]) == (125, "cannot tell")
        assert "no verdict of O8 on aot_eager" in cannot["reason"]

    def test_run_prints_its_summary_whatever_workers_print(
        self, nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
    ) -> None:
        from narrowfuzz.campaign import supervisor

        def run_campaign(config: Any, store: Any, progress: Any) -> Tally:
            print("a line of a model's")
            os.write(1, b"a line of a library's\n")
            return Tally(notes=["a note"])

        monkeypatch.setattr(supervisor, "run_campaign", run_campaign)
        code, out, err = nf("run", "--out", "new", "--recipe", "torch.fp32", "--json")
        assert code == 0 and out == (here / "new" / "summary.json").read_text()
        assert json.loads(out)["notes"] == ["a note"]
        for text in ("a line of a model's", "a line of a library's", "New findings: 0"):
            assert text in err
        assert nf("run", "--out", "new", "--json")[:2] == (2, "")

    def test_what_is_refused_leaves_no_document(self, nf: Run) -> None:
        assert nf("list", "zzz", "--json")[:2] == (2, "")
        assert nf("list", "models", "--json")[0] == 0, "standard output is back"
