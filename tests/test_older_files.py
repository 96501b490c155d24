"""Files that users wrote for 0.1.0: each loads, with a warning where a name is old, or is refused
in one sentence that says what to write."""

from __future__ import annotations

import datetime
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import narrowfuzz
import pytest
from fresh import ends, python
from narrowfuzz.case.spec import dump_case, load_case
from narrowfuzz.ledger.ledger import load_entries
from narrowfuzz.plants.registry import load_plants
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.deprecated import GOES, LISTS, NAMES, Deprecated
from narrowfuzz.recipe.recipe import Recipe, load_every
from narrowfuzz.report.accepted import accepted
from narrowfuzz.report.store import load_finding

OLDER = Path(__file__).parent / "older"
ROOT = Path(__file__).parents[1]
#: What of the case must still be said, schema by schema.
CASES: dict[int, dict[str, Any]] = {
    1: {
        "recipe": "torchao.float8.tensorwise",
        "m": 17,
        "k": 48,
        "bias": True,
        "checkpoint": "full",
    },
    2: {"recipe": "reference.delayed", "model": "library_linear", "layout": "twice"},
    3: {"model": "attention", "kernels": "native", "backend": "linear"},
    4: {"recipe": "torch.scaled_mm.tensorwise", "m": 64, "k": 64, "n": 32},
    5: {"recipe": "torchao.mxfp8.rceil_wgrad_with_hp", "m": 64, "n": 64},
    6: {"recipe": "torch.fp32", "backend": "native"},
}


def refused(*argv: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr of a command that ends with 2, old names that still work apart."""
    assert ends(*argv) == 2
    lines = capfd.readouterr().err.splitlines()
    (line,) = (line for line in lines if "is deprecated and goes in" not in line)
    return line


def test_plants_of_the_older_names_load_and_say_what_to_write() -> None:
    with pytest.warns(Deprecated) as said:
        plants = load_plants(OLDER / "plants.py")
    sentences = {str(one.message) for one in said}
    assert len(sentences) == 4 and all(f"goes in narrowfuzz {GOES}" in one for one in sentences)
    for old in ("narrowfuzz.Fault", "narrowfuzz.Control", *LISTS):
        assert any(one.startswith(f"{old} ") for one in sentences), old
    larger, compiled, legal = plants["larger"], plants["larger-compiled"], plants["as-it-is"]
    assert (larger.legal, larger.compiled, larger.source) == (False, False, "no report")
    assert (compiled.compiled, compiled.wild_shapes, compiled.legal) == (True, False, False)
    assert (legal.legal, legal.source) == (True, "docs/rules.md, Bounds")
    assert (legal.models, legal.arms) == (("linear",), ("eager*",))


def test_who_runs_a_command_reads_of_each_old_name_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert ends("score", "--faults", OLDER / "plants.py", "--only", "nothing-of-this-name") == 2
    lines = capfd.readouterr().err.splitlines()
    old = [line for line in lines if "deprecated" in line]
    assert len(old) == len(set(old)) == 4, lines


def test_a_process_of_its_own_says_so_too() -> None:
    """Python's own filters hide what is deprecated; a folder's warnings are not pytest's here."""
    plain: dict[str, str | None] = {"PYTHONWARNINGS": None}
    done = python("-m", "narrowfuzz", "list", "oracles", "--json", env=plain, cwd=ROOT)
    assert done.stdout.startswith("[")
    assert done.stderr.count("\n") == 1 and "use list rules" in done.stderr


def test_a_file_that_defines_the_new_name_is_asked_for_no_older_one(tmp_path: Path) -> None:
    file = tmp_path / "plants.py"
    file.write_text("PLANTS, FAULTS = [], 'a name of its own'\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Deprecated)
        assert load_plants(file) == {}
    file.write_text("FAULTS = 'no list'\n")
    with pytest.warns(Deprecated), pytest.raises(ValueError, match="must define PLANTS"):
        load_plants(file)


def test_the_face_has_the_older_names_and_no_others() -> None:
    for name in NAMES:
        assert name not in narrowfuzz.__all__
        with pytest.warns(Deprecated, match=rf"narrowfuzz\.{name} .*use narrowfuzz\.[PR]"):
            assert callable(getattr(narrowfuzz, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        narrowfuzz.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "warned"),
    [
        ("import narrowfuzz.watch; old, new = narrowfuzz.watch, 'narrowfuzz_watch'", True),
        ("import narrowfuzz.watch.read as old; new = 'narrowfuzz_watch.read'", True),
        ("from narrowfuzz.watch import records as old; new = 'narrowfuzz_watch.records'", True),
        ("from narrowfuzz import watch as old; new = 'narrowfuzz_watch'", False),
        ("import narrowfuzz; old, new = narrowfuzz.watch, 'narrowfuzz_watch'", False),
    ],
)
def test_what_watches_a_training_is_one_module_by_either_name(statement: str, warned: bool) -> None:
    """The public name is no old one."""
    code = f"{statement}; import importlib; assert old is importlib.import_module(new)"
    done = python("-W", "always", "-c", code)
    sentence = "<string>:1: Deprecated: import narrowfuzz.watch is deprecated and goes in"
    assert done.stderr.count(sentence) == done.stderr.count("Deprecated") == warned


def test_a_recipe_of_public_names_loads_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Deprecated)
        recipe = load_every([OLDER / "recipe.py"])["mine.rowwise"]
    assert isinstance(recipe, Recipe) and recipe.based_on == "torchao.float8.rowwise"


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        (
            "recipe_with_script.py",
            "says 'from narrowfuzz import HIGH_PRECISION, GemmPlan, OperandPlan, Plan, Recipe, "
            "ScriptText, Spec': ScriptText is gone, leave it out: scripts are made of the source "
            "of convert, tap and converted",
        ),
        (
            "filtered_float8",
            "says 'from narrowfuzz.case import Spec': write 'from narrowfuzz import Spec'",
        ),
    ],
)
def test_a_recipe_that_cannot_load_is_told_what_to_write(
    file: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = refused("list", "recipes", "--recipe-file", str(OLDER / file), capfd=capfd)
    assert said.startswith(f"narrowfuzz: recipe file {OLDER / file}") and said.endswith(sentence)


#: What a recipe of today says, with one thing as it was.
RECIPE = """
from narrowfuzz import HIGH_PRECISION, Plan, Recipe
RECIPES = [Recipe(**(dict(
    name="mine", family="torch", title="", backends=("",), package="",
    plan=lambda spec: Plan({}), convert=lambda model, spec: model,
    refusal=lambda spec, device: "",
) | dict(%s)))]
"""
STATEFUL = """
from narrowfuzz import Stateful
RECIPES = [Stateful(**(dict(
    name="mine", family="torch", title="", subject=lambda device: None, carries=lambda: None,
) | dict(%s)))]
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("text", "field", "sentence"),
    [
        (RECIPE, "script=None", "the field 'script' of Recipe is gone: leave it out"),
        (RECIPE, "autocasts=True", "the field 'autocasts' of Recipe is gone: write autocast"),
        (
            RECIPE,
            "may_refuse=None",
            "the field 'may_refuse' of Recipe is gone: write refusal, a function of (spec, device)",
        ),
        (
            RECIPE,
            "refusal=lambda spec: ''",
            "mine: refusal takes (spec): write it to take (spec, device)",
        ),
        (
            RECIPE,
            "convertible=lambda module, spec: False",
            "mine: convertible takes (module, spec): write it to take (module, name, spec)",
        ),
        (STATEFUL, "script=None", "the field 'script' of Stateful is gone: leave it out"),
        (STATEFUL, "may_refuse=None", "the field 'may_refuse' of Stateful is gone: write refusal"),
        (
            STATEFUL,
            "subject=lambda: None",
            "mine: subject takes (): write it to take (device)",
        ),
        (
            STATEFUL,
            "unavailable=lambda device: ''",
            "mine: unavailable takes (device): write it to take (backend, device)",
        ),
        (
            STATEFUL,
            "refusal=lambda spec: ''",
            "mine: refusal takes (spec): write it to take (spec, device)",
        ),
    ],
)
def test_a_field_that_is_gone_or_is_called_otherwise_is_named(
    text: str, field: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipes.py"
    file.write_text(text % field)
    said = refused("list", "recipes", "--recipe-file", str(file), capfd=capfd)
    assert said.startswith(f"narrowfuzz: recipe file {file}: {sentence}")


@pytest.mark.parametrize("field", ["link", "why"])
def test_a_plant_with_the_field_of_a_fault_or_a_control_is_told_its_name(
    field: str, tmp_path: Path
) -> None:
    file = tmp_path / "plants.py"
    fields = f"id='a', family='f', title='t', recipes=('*',), {field}='x'"
    file.write_text(f"from narrowfuzz import Plant\nPLANTS = [Plant({fields})]\n")
    with pytest.raises(ValueError, match=f"'{field}' of Plant is gone: write source$"):
        load_plants(file)


@pytest.mark.parametrize(
    "written",
    [
        ("narrowfuzz.faults.fault import Fault", "narrowfuzz import Fault"),
        ("harness import Fault", "narrowfuzz import Fault"),
        ("harness.faults.fault import Fault", "narrowfuzz import Fault"),
        ("narrowfuzz.controls.control import Control", "narrowfuzz import Control"),
        ("narrowfuzz.faults.patching import x", "narrowfuzz.plants.patching import x"),
        ("narrowfuzz.oracles.gemm import x", "narrowfuzz.rules.gemm import x"),
    ],
)
def test_an_import_of_the_older_modules_is_told_the_new(
    written: tuple[str, str], tmp_path: Path
) -> None:
    old, new = written
    file = tmp_path / "plants.py"
    file.write_text(f"from {old}\nPLANTS = []\n")
    with pytest.raises(ValueError, match=f"says 'from {old}': write 'from {new}'$"):
        load_plants(file)


def test_what_a_library_carries_names_its_checkpoints() -> None:
    pair: Any = ("library", True)
    with pytest.raises(ValueError, match=r"has \('library', True\): known are none, full, reentr"):
        Carries(checkpoints=(pair,))


def test_a_finding_that_calls_its_rule_an_oracle_is_read() -> None:
    finding = load_finding(OLDER / "finding")
    assert (finding.rule, finding.oracle) == ("O5", "O5")


def test_an_entry_of_the_first_ledger_folders_loads() -> None:
    entries = load_entries([OLDER / "ledger"])
    assert entries[0].folder == str(OLDER / "ledger") and entries[0].searched


def test_an_entry_of_the_first_day_is_told_its_fields(tmp_path: Path) -> None:
    """One field at a time: msgspec names the first."""
    text = (OLDER / "first_ledger" / "float8-empty-dimensions.toml").read_text()
    file = tmp_path / "float8-empty-dimensions.toml"
    file.write_text(text)
    for field, instead in (
        ("severity", "write symptom, effect, data and use, of which it follows"),
        ("link", "write links = [...]"),
        ("fingerprints", "write [[matches]] with fingerprints = [...]"),
    ):
        sentence = f"ledger entry {file.name}: the field {field!r} of Entry is gone: {instead}"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            load_entries([tmp_path])
        head, _, rest = file.read_text().partition(f"\n{field} = ")
        file.write_text(head + "\n" + ("" if field == "fingerprints" else rest.split("\n", 1)[1]))


def test_accepted_findings_load() -> None:
    loaded = accepted([], OLDER / "accepted.toml", datetime.date(2026, 12, 1))
    assert len(loaded.suppressions) == 1 and not loaded.expired


@pytest.mark.parametrize("schema", CASES)
def test_a_case_of_each_schema_says_what_it_said(schema: int) -> None:
    raw = (OLDER / "cases" / f"schema_{schema}.json").read_bytes()
    case = load_case(raw)
    assert f'"schema":{schema},'.encode() in raw and load_case(dump_case(case)) == case
    for field, value in CASES[schema].items():
        assert getattr(case.spec, field) == value
    seeds = {1: 41, 2: 28, 3: 599, 4: 7, 5: 33127564, 6: 1206}
    assert case.data.seed == seeds[schema]


def test_replay_reads_a_case_of_the_first_schema(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "case.json"
    shutil.copy(OLDER / "cases" / "schema_1.json", file)
    assert ends("replay", file, "--arm", "eager") == 0 and "sound" in capfd.readouterr().out
