"""What a campaign says of its workers while they compile or run a case, and what journals hold."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from narrowfuzz.campaign.compiling import Compiles
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.journal import Journal, Writing
from narrowfuzz.campaign.live import progress
from narrowfuzz.campaign.messages import Compiled, Compiling, Message
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.judge.programs import Programs
from narrowfuzz.report.tally import Tally
from samples import every_recipe
from test_found import supervisor

pytestmark = pytest.mark.xdist_group("campaign")


def test_what_torch_compiles_is_told_as_it_begins_and_as_it_ends() -> None:
    sent: list[Message] = []
    compiles = Compiles(sent.append, lambda: "mine mlp_gelu")
    programs = Programs(every_recipe(), "cpu")
    programs.listen = compiles.listen
    for features in (16, 32):  # the second forgets what was compiled first, and who listened
        spec = Spec(recipe="torch.fp32", dtype="fp32", k=features, compile="aot_eager")
        case = Case(spec=spec, data=DataSpec())
        program = programs.of(spec, BY_NAME["aot_eager"])
        tensors = tensors_of(case, every_recipe()["torch.fp32"])
        for first in (True, False):
            sent.clear()
            programs.tapped(program, tensors, spec, None)
            kinds = [type(one) for one in sent]
            assert kinds == [Compiling, Compiled] * (len(kinds) // 2)
            assert bool(kinds) is first
            begun = [one.what for one in sent if isinstance(one, Compiling)]
            assert {*begun} == ({"mine mlp_gelu"} if first else set())
    torch._dynamo.reset()


def test_what_is_compiled_of_another_spec_is_forgotten_though_its_program_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo caches by code object: of many Specs it would give up compiling."""
    forgotten: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: forgotten.append(1))
    programs = Programs(every_recipe(), "cpu")
    specs = [
        Spec(recipe="torch.fp32", dtype="fp32", k=k, compile="aot_eager") for k in (16, 16, 32, 48)
    ]
    for spec, times in zip(specs, (0, 0, 1, 2), strict=True):
        programs.of(spec, BY_NAME["aot_eager"])
        assert len(forgotten) == times
        programs.clear()


def test_what_compiles_is_said_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    config = Config(out=tmp_path)
    workers, tally = supervisor(config)
    first, second = workers.handles
    now = time.monotonic()
    workers.take(Compiling("mine llama_block", now - 2), first)
    assert progress(tally, config).endswith("compiling: mine llama_block, 2 s")
    workers.take(Compiling("mine [own].py:build", now - 23), second)
    assert progress(tally, config).endswith("compiling: mine [own].py:build, 23 s and 1 more")
    workers.take(Compiled(), second)
    assert progress(tally, config).endswith("compiling: mine llama_block, 2 s")
    workers.take(Compiled(), first)
    assert "compiling" not in progress(tally, config)


def test_a_case_that_takes_long_is_said_with_its_arm_and_its_seconds(tmp_path: Path) -> None:
    case, journal = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec()), Journal.of(tmp_path, 0)
    journal.file.parent.mkdir()
    writing = Writing(journal)
    assert journal.running() is None and str(journal) == "no case begun"
    writing.begin(case)
    writing.note_arm("eager+checkpoint")
    assert journal.running() is None and case.id in str(journal)
    os.utime(journal.file, (time.time() - 34, time.time() - 34))
    long = journal.running()
    assert long is not None
    tally, config = Tally(ready=1.0, running={0: long}), Config(out=tmp_path)
    tally.started -= 40
    tally.counts["cases"] = 3
    assert "/s)" not in progress(tally, config)
    words = BY_NAME["eager+checkpoint"].words
    assert progress(tally, config).endswith(f"running: torch.fp32 linear, {words}, 34 s")
    tally.compiling[0] = ("mine llama_block", time.monotonic())
    assert "running" not in progress(tally, config)


def test_what_a_journal_says_is_whole_whatever_was_written_before(tmp_path: Path) -> None:
    journal = Journal.of(tmp_path, 3)
    journal.file.parent.mkdir()
    long = Case(spec=Spec(recipe="torch.fp32", model="llama_block", m=97), data=DataSpec(seed=9))
    short = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
    writing = Writing(journal)
    assert journal.case is None and not journal.silent
    for case in (long, short, long):
        writing.begin(case)
        assert journal.case == case
    Writing(journal).begin(short)  # the next process of its place
    assert journal.case == short
    assert json.loads(journal.file.read_bytes())["spec"]["recipe"] == "torch.fp32"
    lost = journal.lose(short)
    assert journal.case is None and load_case(lost.read_bytes()) == short
