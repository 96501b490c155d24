"""The ledger's scripts: stand-alone, short, and still showing what they say."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import codes, forked, python
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.ledger.facts import OF_MACHINE, Context, holds
from narrowfuzz.ledger.ledger import Entry, known_dir, load_entries, stands
from narrowfuzz.machine.machine import machine
from narrowfuzz.machine.overlay import folder_of
from narrowfuzz.triage.verify import CANNOT, RunScript, run_script
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from te_on_cpu.environment import ensure
from te_on_cpu.install import SUPPORTED

ENTRIES = load_entries()
ALLOWED = {"torch", "torchao"} | set(sys.stdlib_module_names)
#: Where no GPU is, TransformerEngine runs on an emulated extension.
EMULATES = {"transformer_engine", "te_on_cpu"}
#: And Triton's kernels run in its interpreter.
INTERPRETS = {"triton_on_cpu"}


def emulates(entry: Entry) -> bool:
    return "transformer_engine" in entry.versions


def interprets(entry: Entry) -> bool:
    return "import triton_on_cpu" in script(entry).read_text()


def script(entry: Entry) -> Path:
    return known_dir() / entry.script


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_a_script_is_short_and_stands_alone(entry: Entry) -> None:
    source = script(entry).read_text()
    allowed = ALLOWED | EMULATES if emulates(entry) else ALLOWED
    allowed |= INTERPRETS if interprets(entry) else set()
    # torch for CUDA brings it
    allowed |= {"triton"} if entry.devices == ("cuda",) else set()
    assert len(source.splitlines()) <= 60
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        wrong = [n for n in names if not any(f"{n}.".startswith(f"{a}.") for a in allowed)]
        assert not wrong


#: Scripts that take as long for other reasons.
LONG = {"float8-cuda-shape-refusals", "float8-styles-compiled-tangent"}


def by_cost() -> Iterator[Any]:
    """Scripts that generate code take up to minutes: `make nightly` runs those."""
    for entry in ENTRIES:
        if not emulates(entry):
            # those of Triton are tried together besides
            long = compiles(entry) or interprets(entry) or entry.id in LONG
            yield pytest.param(entry, id=entry.id, marks=[pytest.mark.heavy] * long)


def compiles(entry: Entry) -> bool:
    return "torch.compile(" in script(entry).read_text()


@pytest.mark.one_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("entry", by_cost())
def test_a_known_divergence_still_shows(entry: Entry, scripts: RunScript) -> None:
    """Fails when it no longer does: fixed upstream, remove the entry."""
    device = entry.devices[0]
    if stands(entry, device) != "named":
        pytest.skip("it names other versions")
    if interprets(entry):
        over = {"PYTHONPATH": str(folder_of("triton==3.6.0")), "TRITON_INTERPRET": "1"}
        python(script(entry), env=over, code=1)
        return
    if device == "cuda":  # as far as it goes without one
        result = run_script(script(entry), device="simulated")
    else:
        result = (run_script if compiles(entry) else scripts)(script(entry))
    if result.code == CANNOT and any(error in result.output for error in machine().lacks.values()):
        pytest.skip(machine().without("fp8"))
    if not result.shown and not here(entry):
        pytest.skip(f"another machine than it was seen on: {entry.when}")
    assert result.shown, result.output


def here(entry: Entry) -> bool:
    """Does this machine have what the entry's predicate asks of one?"""
    of_machine = {*OF_MACHINE, "device"}
    asks = {name: condition for name, condition in entry.when.items() if name in of_machine}
    case = Case(spec=Spec(recipe=""), data=DataSpec())
    return holds(asks, Context(case, machine(), entry.devices[0]))


def newest(entry: Entry) -> str:
    """The newest version of TransformerEngine that an entry holds for."""
    holds = SpecifierSet(entry.versions["transformer_engine"])
    return max(holds.filter(known.replace("*", "0") for known in SUPPORTED), key=Version)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "version",
    sorted({newest(e) for e in ENTRIES if emulates(e)}),
)
def test_known_divergences_of_transformer_engine_still_show(version: str) -> None:
    """The same, each script in a child of one process that has imported the library."""
    scripts = [script(e) for e in ENTRIES if emulates(e) and newest(e) == version]
    done = forked("transformer_engine", version, *scripts)
    assert codes(done) == dict.fromkeys(map(str, scripts), "1"), done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.xdist_group("triton")
def test_known_divergences_of_triton_kernels_still_show() -> None:
    """The same of what runs in Triton's interpreter."""
    scripts = [script(e) for e in ENTRIES if interprets(e) and stands(e, e.devices[0]) == "named"]
    done = forked("triton", "3.6.0", *scripts)
    assert codes(done) == dict.fromkeys(map(str, scripts), "1"), done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("entry", [e for e in ENTRIES if emulates(e)], ids=lambda e: e.id)
def test_a_known_divergence_of_transformer_engine_shows_alone(entry: Entry) -> None:
    ensure(newest(entry))
    result = run_script(script(entry))
    assert result.shown, result.output


def test_every_script_belongs_to_an_entry() -> None:
    scripts = {path.name for path in known_dir().glob("*.py")}
    of_issues = {entry.reproduction.name for entry in ENTRIES if entry.issue}
    assert scripts == {entry.script for entry in ENTRIES} | of_issues
