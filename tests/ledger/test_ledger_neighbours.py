"""Beside each entry: the case it explains, run with an unrelated failure, is reported as new.

Both are rows of tests/neighbours.json; those of TransformerEngine are in test_te_neighbours.py.
Compiling takes long, so what is compiled runs at night.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.facts import OF_MACHINE, Context, holds
from narrowfuzz.ledger.ledger import Entry, load_entries, load_ledger, stands
from narrowfuzz.machine import machine
from neighbours import NEIGHBOURS
from samples import every_recipe

ENTRIES = {entry.id: entry for entry in load_entries()}


@cache
def judge() -> Judge:
    return Judge(every_recipe(), load_ledger())


def judged(case: Case) -> Judgement:
    return Judge(judge().recipes, judge().ledger).judge(case)


def entry_of(name: str) -> Entry:
    """The entry whose id stands before the comma: a rule may meet it in a second kind of case."""
    return ENTRIES[name.partition(",")[0]]


@cache
def void(name: str) -> str:
    """Why nothing runs its case here, or ""."""
    return next(
        iter(judge().observe(NEIGHBOURS[name].case, repeat=False).unusable_because.values()), ""
    )


def needs_what_it_was_seen_on(name: str) -> None:
    """Skip where this machine has another kernel or compiler than the entry asks for, or none."""
    neighbour, entry = NEIGHBOURS[name], entry_of(name)
    if stands(entry) != "named":
        pytest.skip("it names other versions")
    of_machine = {f: entry.when[f] for f in OF_MACHINE if f in entry.when}
    if not holds(of_machine, Context(neighbour.case, machine.machine())):
        pytest.skip(f"another machine than it was seen on: {of_machine}")
    if neighbour.compiled:
        # what the cure does not cure is tests/ledger/test_cures.py's
        of_a_compiler = "gcc" in name
        if of_a_compiler and not machine.compiler().startswith(("g++ 11.", "g++ 12.")):
            pytest.skip(f"another compiler than it was seen on: {machine.compiler()}")
        return
    if neighbour.case.spec.sharded:  # these arms run wherever PyTorch does
        return
    if why := void(name):
        pytest.skip(why)


def _compiled_anew(stack: ExitStack, compiler: Path | None) -> None:
    """Nothing is taken from a cache, which knows of no fault; and what one compiler makes of a
    kernel is asked of that ``compiler``."""
    from torch._inductor import config

    torch._dynamo.reset()
    stack.enter_context(config.patch(force_disable_caches=True))
    if compiler:
        compiler.write_text('#!/bin/sh\nexec /usr/bin/env g++ "$@" -mtune=generic\n')
        compiler.chmod(0o755)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("CXX", str(compiler))
        stack.callback(machine.compiler.cache_clear)
        machine.compiler.cache_clear()
        stack.enter_context(config.patch({"cpp.cxx": (None, str(compiler))}))


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.heavy] * (neighbour.case.spec.compile != "none"))
        for name, neighbour in NEIGHBOURS.items()
    ]
)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A neighbour that can be shown here."""
    with ExitStack() as stack:
        if NEIGHBOURS[request.param].compiled:
            _compiled_anew(stack, tmp_path / "g++" if "gcc" in request.param else None)
        needs_what_it_was_seen_on(request.param)
        yield request.param


@pytest.mark.one_in(6)
def test_the_entry_explains_its_case(name: str) -> None:
    found = judged(NEIGHBOURS[name].case)
    assert not found.causes
    assert entry_of(name).id in {verdict.explained_by for verdict in found.known}


@pytest.mark.one_in(6)
def test_another_failure_of_that_case_is_reported(name: str) -> None:
    with NEIGHBOURS[name].beside():
        assert judged(NEIGHBOURS[name].case).causes


def explaining(where: str) -> set[str]:
    """The entries that explain something and whose cases run ``here``, ``compiled``, ``emulated``
    or ``simulated``, or are of a user's model, ``own`` (tests/own_models): each is of exactly
    one."""

    def of(entry: Entry) -> str:
        globs = [glob for match in entry.matches for glob in match.fingerprints]
        if "transformer_engine" in entry.versions:
            return "emulated"
        if "cpu" not in entry.devices:  # tests/simulated_checks.py
            return "simulated"
        if entry.matches and all(match.when.get("model") == "*:*" for match in entry.matches):
            return "own"
        arms = [glob.split("--")[2] for glob in globs]
        compilers = ("inductor", "aot_eager")
        some = any(arm.startswith(compilers) for arm in arms)
        others = [arm for arm in arms if not arm.startswith((*compilers, "sharded_"))]
        return "compiled" if some and not others else "here"

    explain = [entry for entry in ENTRIES.values() if entry.matches or entry.deviation]
    return {entry.id for entry in explain if of(entry) == where}


#: Shown by a user's model alone, with what is not theirs beside it: tests/own_models.
OF_USERS = {"float8-linear-registered-twice"}


#: Shown by calls that few cases make, or none: tests/operators has what is not theirs beside them.
OF_CALLS = {
    "attention-nan-swallowed",
    "fused-sgd-skips-blocks",
    "linear-cross-entropy-nothing-counts",
    "low-bit-adam-moment-lost",
    "nll-loss-narrow-sums",
    "smoothed-cross-entropy-overflows",
    "sum-narrow-parts",
}
#: A call that must raise, of which nothing else can be wrong: tests/rules/test_classes.py.
OF_REFUSALS = {"loss-parallel-target-outside"}
#: Shown over Triton's interpreter: tests/triton_on_cpu_checks.py has a wrong kernel beside them.
OF_TRITON = {
    "blockwise-nan-hidden",
    "blockwise-noncontiguous-input",
    "blockwise-shape-refusals",
    "blockwise-swap-drops-module-state",
    "blockwise-swap-drops-own-forward",
    "fp8-grouped-nan-hidden",
    "fp8-groups-by-average",
    "fp8-groups-by-columns-mask",
    "fp8-groups-by-rows-stride",
    "mx-byte0-triton",
    "mx-dim1-tiles-outside",
    "mx-floor-triton-nan",
    "mx-permute-padding-row",
    "mx-rearrange-power-of-two",
    "mx-triton-refusals",
    "nvfp4-shape-refusals",
    "nvfp4-swap-drops-module-state",
    "nvfp4-swap-drops-own-forward",
}
#: Shown by ranks in processes: tests/ledger/test_ledger_predicates.py has others beside it.
OF_PROCESSES = {"gloo-max-drops-nan"}
#: Shown by a user's model that is compiled: tests/ledger/test_cures.py has another error beside it.
OF_CURES = {"inductor-reduction-stored-twice"}


def test_every_entry_that_explains_something_here_has_a_neighbour() -> None:
    have = {entry_of(name).id for name, one in NEIGHBOURS.items() if not one.compiled}
    assert explaining("here") - OF_USERS - OF_CALLS - OF_TRITON - OF_REFUSALS - OF_PROCESSES == have


def test_every_entry_of_compiled_models_has_a_neighbour() -> None:
    have = {name for name, one in NEIGHBOURS.items() if one.compiled}
    assert explaining("compiled") - OF_CURES == have
