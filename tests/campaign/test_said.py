"""What a run says while it goes on and at its end, and what it leaves unsaid unless asked."""

from __future__ import annotations

import io
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from fresh import python
from narrowfuzz.campaign.campaign import _print_head, _print_probed
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.live import progress
from narrowfuzz.campaign.server import quieten_tracker
from narrowfuzz.campaign.supervisor import CONFIRMING
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.advice import applying
from narrowfuzz.ledger.ledger import load_entries
from narrowfuzz.machine.machine import machine
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.tally import Tally
from narrowfuzz.trace.words import plural
from narrowfuzz.triage.effect import Effect, _excess_of
from rich.console import Console

CONFIG = Config(out=Path("out"), minutes=2.0, workers=1, seed=1, recipes=("torch.bf16",))


def test_a_line_says_that_a_finding_is_confirmed_and_counts_in_the_singular() -> None:
    tally = Tally(ready=1.0)
    tally.counts["cases"] = 1
    assert "1 case (" in progress(tally, CONFIG) and "0 findings" in progress(tally, CONFIG)
    tally.confirming[0] = (CONFIRMING, time.monotonic() - 5)
    tally.compiling[0] = ("torch.bf16 linear", time.monotonic())
    line = progress(tally, CONFIG)
    assert f"{CONFIRMING}, 5 s" in line and "compiling: torch.bf16 linear, 0 s" in line
    assert "Spec" not in line


def test_before_a_worker_is_ready_it_says_so() -> None:
    assert progress(Tally(), CONFIG).endswith("starting")


@pytest.mark.parametrize(("n", "text"), [(0, "0 cases"), (1, "1 case"), (2, "2 cases")])
def test_one_is_no_plural(n: int, text: str) -> None:
    assert plural(n, "case") == text


def test_what_is_probed_is_said_where_it_is_asked_for_alone() -> None:
    environment = {
        "versions": {"narrowfuzz": "0", "torch": "2", "torchao": "0"}, "checkouts": {},
        "policies": {"e4m3": "saturates"},
    }  # fmt: skip
    said = io.StringIO()
    _print_head(Console(file=said, soft_wrap=True), CONFIG, environment, [])
    assert "saturates" not in said.getvalue()
    _print_probed(Console(file=said, soft_wrap=True), environment, ["fp32: 23 bits"])
    assert "saturates" in said.getvalue() and "23 bits" in said.getvalue()


def test_a_run_in_one_process_is_not_told_of_issues_of_several_ranks() -> None:
    recipes = [load_recipes()["torchao.mxfp8.rceil"]]
    alone = {e.id for e in applying(load_entries(), recipes, [BY_NAME["eager"]], machine())}
    ranks = {e.id for e in applying(load_entries(), recipes, [BY_NAME["sharded"]], machine())}
    assert "mx-wrapper-drops-bias" in alone
    assert "dtensor-empty-weight-step" in ranks - alone
    # an entry that matches nothing is known for other reasons than a run's
    matching = {entry.id for entry in load_entries() if entry.matches}
    assert not [name for name in alone & matching if name.startswith(("dtensor-", "fsdp-"))]


def test_an_effect_of_infinities_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = np.array([1.0, np.inf])
        assert _excess_of(got, np.array([1.0, np.inf]), np.array([1.0, np.inf])) == Effect()


LEAKS = """
import sys
from narrowfuzz.campaign.server import quieten_tracker
if sys.argv[1:]: quieten_tracker()
import multiprocessing, os
kept = multiprocessing.get_context("spawn").Semaphore()
os._exit(0)
"""


def test_a_worker_that_is_ended_leaves_no_line_of_the_tracker() -> None:
    def said(*args: str) -> str:
        return python("-c", LEAKS, *args, env={"PYTHONWARNINGS": None}).stderr

    assert "leaked semaphore" in said()
    assert "leaked semaphore" not in said("quiet")


def test_the_tracker_is_quietened_beside_what_a_user_asks_of_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")
    quieten_tracker()
    quieten_tracker()
    asked, *ours = os.environ["PYTHONWARNINGS"].split(",")
    assert asked == "error::DeprecationWarning" and len(ours) == 1
