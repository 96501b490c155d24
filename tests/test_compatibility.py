"""What docs/compatibility.md promises is still there: ``promised.json`` is the inventory.

python tests/test_compatibility.py --write                 records what is new
python tests/test_compatibility.py --write --drop NAME     and gives NAME up, or its older sense
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
import narrowfuzz
import pytest
import typer
from fresh import command
from narrowfuzz.recipe.deprecated import NAMES, Deprecated

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROMISED = HERE / "promised.json"
COMMAND = "python tests/test_compatibility.py --write"
#: A name of something promised, "section: name", -> what is promised of it.
Inventory = dict[str, str]


def parameters(name: str, value: Any) -> Inventory:
    """A public name, and the parameters it is called with. Of those that may be given by position
    the position counts, so new ones come last."""
    if not callable(value) or get_args(value):
        return {name: "value"}
    found = {name: "called"}
    for at, one in enumerate(inspect.signature(value).parameters.values()):
        needed = "required" if one.default is one.empty else "optional"
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            needed = "optional"
        place = f" {at}" if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) else ""
        found[f"{name}({one.name})"] = needed + place
    return found


def names() -> Inventory:
    """The public names, and the older ones that still work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Deprecated)
        values = {name: getattr(narrowfuzz, name) for name in (*narrowfuzz.__all__, *NAMES)}
    values["watch"] = narrowfuzz.watch.watched  # what calling the module calls
    found = {}
    for name, value in values.items():
        found |= parameters(f"narrowfuzz: {name}", value)
    return found


def imported() -> Iterator[tuple[str, str]]:
    """What shipped recipes and examples import of ours, for these are what users copy."""
    for folder in ("recipes", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                ours = isinstance(node, ast.ImportFrom) and not node.level
                if ours and node.module and node.module.split(".")[0] == "narrowfuzz":
                    yield from ((node.module, alias.name) for alias in node.names)


def copied(promised: Collection[str]) -> Inventory:
    """Of these, and of those that were promised before, what can be imported."""
    heading = "imports of recipes: "
    before = {
        tuple(one.removeprefix(heading).split("(")[0].rsplit(".", 1))
        for one in promised
        if one.startswith(heading)
    }
    found = {}
    for module, name in sorted({*imported(), *before}):
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        found |= parameters(f"{heading}{module}.{name}", value)
    return found


def struct(name: str, kind: type) -> Inventory:
    """Fields of a file or a document."""
    return {
        f"{name}{field.encode_name}": "required" if field.required else "optional"
        for field in msgspec.structs.fields(kind)
    }


def files() -> Inventory:
    """What the files of users may say; fields of recipes and plants are parameters of their
    records."""
    from narrowfuzz.ledger.facts import FACTS
    from narrowfuzz.ledger.filed import Issue
    from narrowfuzz.ledger.ledger import (
        DEVIATIONS,
        KINDS,
        LAYER_DEVIATIONS,
        STATE_DEVIATIONS,
        Entry,
        Match,
    )
    from narrowfuzz.ledger.mitigations import CURES
    from narrowfuzz.ledger.severity import DATA, SEVERITIES, Symptom, Use
    from narrowfuzz.operators import DEVIATIONS as OPERATOR_DEVIATIONS
    from narrowfuzz.recipe.deprecated import LISTS
    from narrowfuzz.report.accepted import Suppression

    words = {
        "recipe file: defines": ["RECIPES"],
        "plants file: defines": ["PLANTS", *LISTS],
        "ledger entry: fact of when": FACTS,
        "ledger entry: deviation": {
            **DEVIATIONS,
            **LAYER_DEVIATIONS,
            **STATE_DEVIATIONS,
            **OPERATOR_DEVIATIONS,
        },
        "ledger entry: cure": CURES,
        "ledger entry: kind": filter(None, KINDS),
        "ledger entry: data": DATA,
        "ledger entry: symptom": get_args(Symptom),
        "ledger entry: use": get_args(Use),
        "severity": SEVERITIES,
    }
    found = {f"{what} {word}": "read" for what, every in words.items() for word in every}
    found |= struct("ledger entry: ", Entry) | struct("ledger entry: matches[].", Match)
    found |= struct("ledger entry: issue.", Issue)
    del found["ledger entry: folder"]  # the loader's to say
    return found | struct("accepted: suppress[].", Suppression)


def command_line() -> Inventory:
    """Commands, options, arguments, what ``list`` takes, and the options of pytest."""
    from narrowfuzz.cli import app
    from narrowfuzz.plugin import PROFILES, pytest_addoption
    from narrowfuzz.recipe.deprecated import LISTINGS
    from narrowfuzz.report.listing import _KINDS

    found = {}
    for name, typed in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found[f"command: {name}"] = "runs"
        places = 0
        for one in typed.params:
            needed = "required" if one.required else "optional"
            if one.param_type_name == "argument":
                found[f"command: {name} {one.name}"] = f"{needed} {places}"
                places += 1
            elif not one.hidden:
                takes = "flag" if one.is_flag else "repeats" if one.multiple else "value"
                found |= {f"command: {name} {text}": f"{needed} {takes}" for text in one.opts}
    found |= {f"list: {kind}": "listed" for kind in (*_KINDS, *LISTINGS)}
    parser = pytest.Parser(_ispytest=True)
    pytest_addoption(parser)
    (group,) = (one for one in parser._groups if one.name == "narrowfuzz")
    found |= {f"pytest: {text}": "option" for one in group.options for text in one.names()}
    return found | {f"pytest: --nf-profile {name}": "option" for name in PROFILES}


def codes() -> Inventory:
    """Exit codes, rules, and what schemas are read and written."""
    from narrowfuzz.campaign import comparison_words
    from narrowfuzz.case import spec
    from narrowfuzz.ledger import exits
    from narrowfuzz.power import record
    from narrowfuzz.report import formats, replay
    from narrowfuzz.rules import RULES
    from narrowfuzz.triage import verify

    found = {
        f"exit code: {name.lower()}": str(getattr(exits, name))
        for name in ("CLEAN", "FOUND", "USAGE", "OURS", "TOO_LITTLE", "INTERRUPTED")
    }
    found |= {f"exit code: replay, {name}": str(code) for name, code in replay.CODES.items()}
    for name in ("SHOWN", "GONE", "CANNOT"):
        found[f"exit code: script, {name.lower()}"] = str(getattr(verify, name))
    found |= {f"rule: {one.name}": "judges" for one in RULES}
    for file in sorted((HERE / "older" / "cases").glob("*.json")):
        case = json.loads(file.read_bytes())
        spec.load_case(file.read_bytes())
        found[f"schema: case {case['schema']}"] = "read"
    for name, schema in (
        ("findings.jsonl", formats.SCHEMA),
        ("compare.json", comparison_words.SCHEMA),
        ("score", record.SCHEMA),
    ):
        found[f"schema: {name}"] = str(schema)
    return found


def keys(name: str, document: Any, **inside: str) -> Inventory:
    """The keys of a document, and of what stands ``inside`` of some of them: "" a record, "[]" a
    list of records, "{}" a mapping to records. A document that is a list has the keys of each."""
    records = {"": [document]} if isinstance(document, Mapping) else {"[]": document}
    for key, kind in inside.items():
        values = document[key]
        every = values if kind == "[]" else values.values() if kind == "{}" else [values]
        assert every, f"{name} has nothing in {key}"
        records[f"{key}{kind}"] = every
    return {
        f"{name}: {f'{place}.' if place else ''}{key}": "written"
        for place, every in records.items()
        for record in every
        for key in record
    }


MODEL = """
import torch


def build():
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return net, (torch.randn(4, 8),)
"""


def of_a_run(folder: Path) -> Inventory:
    """Documents of a run with findings: of a fault that a user planted, in a model of their own."""
    (folder / "tiny.py").write_text(MODEL)
    fault = f"{HERE / 'older' / 'plants.py'}:larger"
    options = ("--cases", "2", "--seed", "1", "--workers", "1", "--out", "out", "--json")
    options += ("--arm", "eager", "--arm", "eager+*")
    done = command("check", "tiny.py:build", "--plant", fault, *options, cwd=folder, code=1)
    summary = json.loads(done.stdout)
    out = folder / "out"
    found = keys(
        "summary.json", summary, findings="[]", judged="", first_cases="", linears_judged="[]",
        found="{}",
    )  # fmt: skip
    found |= keys("env.json", json.loads((out / "env.json").read_bytes()))
    lines = (out / "findings.jsonl").read_text().splitlines()
    found |= keys("findings.jsonl", [json.loads(line) for line in lines])
    shown = out / "findings" / json.loads(lines[0])["id"]
    found |= keys("explain.json", json.loads((shown / "explain.json").read_bytes()))
    found |= keys("case.json", json.loads((shown / "case.json").read_bytes()))
    files = {f"run: {one.name}" for one in out.iterdir() if one.suffix}
    files |= {f"run: findings/ID/{one.name}" for one in shown.iterdir()}
    return found | dict.fromkeys(files, "written")


def of_two_runs(folder: Path) -> Inventory:
    """``compare.json`` of two runs with a difference, a common finding and a known issue."""
    from campaign.test_compare import left, seen
    from narrowfuzz.campaign.comparison import compared, side_run
    from narrowfuzz.campaign.comparison_words import as_json

    left(folder / "A", [seen("1", shows=["x"], known=["entry"])], {"x": {}})
    left(folder / "B", [seen("1", shows=["x", "y"], known=["entry"])], {"x": {}, "y": {}})
    runs = [side_run(side, folder / side) for side in "AB"]
    document = json.loads(json.dumps(as_json(compared(*runs)) | {"exit_code": 1}))
    return keys(
        "compare.json", document, sides="[]", cases="", bits="", differences="[]", both="[]",
        known="[]",
    )  # fmt: skip


def documents() -> Inventory:
    """The keys of the JSON that programs read, of documents as the code writes them."""
    from narrowfuzz.power.record import Controlled, Hunted, Score
    from narrowfuzz.power.report import summary_json
    from narrowfuzz.report.doctor import examine
    from narrowfuzz.report.lifetime import Event, Lifetime
    from narrowfuzz.report.listing import listed
    from narrowfuzz.report.replay import Replayed
    from narrowfuzz_watch.records import FirstBad, Report

    with tempfile.TemporaryDirectory() as folder:
        found = of_a_run(Path(folder)) | of_two_runs(Path(folder))
    for kind in ("recipes", "models", "arms", "rules", "faults", "controls", "known"):
        found |= keys(f"list {kind}", listed(kind).records)
    now = datetime.now(UTC)
    life = Lifetime((Event(now, "seen", "", "", "", False, "low", "", "", "", "", {}, ""),))
    found |= keys("list findings", [life.record()])
    found |= keys("doctor", examine())
    score = Score(
        versions={}, seed=0, seconds=1.0, compiled_seconds=1.0, faults=(), controls=()
    )  # fmt: skip
    written = msgspec.to_builtins(score) | summary_json(score)
    found |= keys("score", written, summary="")
    kinds: dict[str, Any] = {
        "score: faults[].": Hunted, "score: controls[].": Controlled,
        "first_bad.json: ": Report, "first_bad.json: first.": FirstBad,
    }  # fmt: skip
    for name, kind in kinds.items():
        found |= dict.fromkeys(struct(name, kind), "written")
    fields = (field.name for field in dataclasses.fields(Replayed))
    return found | {f"replay: {name}": "written" for name in fields}


def inventory(promised: Collection[str]) -> Inventory:
    """All there is now."""
    return {
        **names(), **copied(promised), **files(), **command_line(), **codes(), **documents()
    }  # fmt: skip


def broken(promised: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What was promised and is not so, by name, and how."""
    found = {}
    for name, was in promised.items():
        given = now.get(name)
        if given is None:
            found[name] = "is gone"
        elif given not in (was, was.replace("required", "optional")):
            found[name] = f"was {was!r} and is {given!r}"
    asking = [name for name in now.keys() - promised.keys() if now[name].startswith("required")]
    return found | {name: "is new and required" for name in asking if belongs(name, promised)}


def belongs(name: str, promised: Collection[str]) -> bool:
    """Is it a parameter, an option or a field of something that is promised?"""
    group = name[: max(name.rfind(separator) for separator in "(. ") + 1]
    return any(one.startswith(group) or one == group[:-1] for one in promised)


def new(promised: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What may be recorded: it is there now, or asks for less than it did."""
    wrong = broken(promised, now)
    return [name for name in now if promised.get(name) != now[name] and name not in wrong]


def load() -> Inventory:
    return dict(json.loads(PROMISED.read_bytes())) if PROMISED.is_file() else {}


def write(drop: Collection[str]) -> None:
    """Record what is new; refuse what is broken and not dropped."""
    promised = load()
    now = inventory(promised)
    wrong = broken(promised, now)
    if strange := sorted({*drop} - {*wrong}):
        sys.exit(f"nothing is broken at {', '.join(strange)}")
    if left := [f"{name} {how}" for name, how in wrong.items() if name not in drop]:
        sys.exit("\n".join([*left, "Each has to be given up by name: --drop 'NAME'"]))
    PROMISED.write_text(json.dumps(now, indent=0, sort_keys=True) + "\n")
    print(f"{len(now)} promised, {len(new(promised, now))} new, {len(drop)} dropped")


@pytest.fixture(scope="module")
def promised() -> Inventory:
    return load()


@pytest.fixture(scope="module")
def now(promised: Inventory) -> Inventory:
    return inventory(promised)


@pytest.mark.slow
@pytest.mark.xdist_group("compatibility")
def test_what_is_promised_is_there(promised: Inventory, now: Inventory) -> None:
    wrong = [f"{name} {how}" for name, how in broken(promised, now).items()]
    hint = f"see docs/compatibility.md; {COMMAND} --drop 'NAME' gives a promise up"
    assert not wrong, "\n".join([*wrong, hint])


@pytest.mark.slow
@pytest.mark.xdist_group("compatibility")
def test_what_is_new_is_recorded(promised: Inventory, now: Inventory) -> None:
    hint = f"{COMMAND} records what is promised from now on"
    assert not new(promised, now), "\n".join([*new(promised, now), hint])


#: Of each kind something that is promised.
SAMPLES = (
    "narrowfuzz: Plant", "narrowfuzz: Recipe(tap)", "narrowfuzz: watch",
    "imports of recipes: narrowfuzz.recipe.stateful.Subject", "recipe file: defines RECIPES",
    "plants file: defines FAULTS", "ledger entry: workaround", "accepted: suppress[].reason",
    "ledger entry: fact of when region", "command: check --filter", "command: watch command",
    "list: oracles", "pytest: --nf-out", "exit code: script, cannot", "rule: O5",
    "schema: case 1", "summary.json: findings[].fingerprint", "findings.jsonl: [].counts",
    "explain.json: minimal", "compare.json: differences[].counts", "first_bad.json: first_nan",
    "score: summary.families", "replay: outcome", "list known: [].workaround", "run: junit.xml",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_what_goes_is_noticed(name: str, promised: Inventory) -> None:
    assert broken(promised, promised) == {} and new(promised, promised) == []
    rest = {key: value for key, value in promised.items() if key != name}
    assert broken(promised, rest) == {name: "is gone"}
    if promised[name].startswith("required"):
        assert broken(rest, promised) == {name: "is new and required"}
    else:
        assert (broken(rest, promised), new(rest, promised)) == ({}, [name])


def test_a_parameter_that_is_required_from_now_on_is_noticed() -> None:
    def before(a: int, b: int = 0, *, c: int = 0) -> None: ...

    def needs_more(a: int, b: int, *, c: int = 0) -> None: ...

    def needs_another(a: int, b: int = 0, *, c: int = 0, d: int) -> None: ...

    def turned(b: int = 0, a: int = 0, *, c: int = 0) -> None: ...

    def more(a: int, b: int = 0, e: int = 0, *, c: int = 0, d: int = 0) -> None: ...

    def less(a: int = 0, b: int = 0, *, c: int = 0) -> None: ...

    was = parameters("narrowfuzz: f", before)
    assert broken(was, parameters("narrowfuzz: f", needs_more)) == {
        "narrowfuzz: f(b)": "was 'optional 1' and is 'required 1'"
    }
    assert broken(was, parameters("narrowfuzz: f", needs_another)) == {
        "narrowfuzz: f(d)": "is new and required"
    }
    assert broken(was, parameters("narrowfuzz: f", turned)).keys() == {
        "narrowfuzz: f(a)", "narrowfuzz: f(b)"
    }  # fmt: skip
    grown = parameters("narrowfuzz: f", more)
    assert broken(was, grown) == {}
    assert new(was, grown) == ["narrowfuzz: f(e)", "narrowfuzz: f(d)"]
    assert broken(was, parameters("narrowfuzz: f", less)) == {}
    assert new(was, parameters("narrowfuzz: f", less)) == ["narrowfuzz: f(a)"]


def test_a_record_option_or_field_that_asks_for_more_is_noticed(promised: Inventory) -> None:
    for name, given in (
        ("narrowfuzz: Recipe(owner)", "required 28"),
        ("command: run --owner", "required value"),
        ("ledger entry: matches[].owner", "required"),
    ):
        assert broken(promised, promised | {name: given}) == {name: "is new and required"}
        assert new(promised, promised | {name: "optional"}) == [name]


def test_an_exit_code_or_a_flag_that_changes_its_sense_is_noticed(promised: Inventory) -> None:
    for name, given in (("exit code: too_little", "5"), ("command: run --quiet", "optional value")):
        assert broken(promised, promised | {name: given}).keys() == {name}


def test_keys_that_a_document_loses_are_noticed() -> None:
    document = {"a": 1, "b": [{"c": 1}, {"c": 1, "d": 2}], "e": {"anything": {"f": 1}}}
    was = keys("x", document, b="[]", e="{}")
    assert {*was} == {"x: a", "x: b", "x: e", "x: b[].c", "x: b[].d", "x: e{}.f"}
    shorter = {"a": 1, "b": [{"c": 1}], "e": {"other": {"f": 1}}}
    assert broken(was, keys("x", shorter, b="[]", e="{}")) == {"x: b[].d": "is gone"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--drop", action="append", default=[], metavar="NAME")
    write(parser.parse_args().drop)
