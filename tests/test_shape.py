"""What the code may not do, counted on its syntax: ``python tests/test_shape.py`` prints it."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import pytest
from narrowfuzz.case.kind import LAYERS
from narrowfuzz.models.catalog import COMPOSED
from narrowfuzz.models.operators import OPERATORS
from narrowfuzz.operators import BY_NAME as OF_TORCH
from narrowfuzz.plants.registry import builtin_plants
from narrowfuzz.power.probe import falsifying
from narrowfuzz.power.reads import FALSIFIES
from narrowfuzz.rules import RULES
from narrowfuzz.rules.rule import Rule

pytestmark = pytest.mark.xdist_group("shape")  # one worker parses all of it
ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "harness" / "narrowfuzz"
WATCH = ROOT / "harness" / "narrowfuzz_watch"
#: Attributes of verdicts, findings and errors that hold words for people.
WORDS = {"got", "why", "sentence", "symptom", "why_suspected"}
#: What takes words apart.
STRING_OPERATIONS = {
    "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix",
    "removesuffix", "find", "index", "replace", "match", "search", "fullmatch", "splitlines",
}  # fmt: skip
#: Modules that write scripts.
WRITERS = sorted((OURS / "triage" / "script").glob("*.py"))


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """Every module of the packages, and its syntax."""
    files = sorted(path for folder in (OURS, WATCH) for path in folder.rglob("*.py"))
    return tuple((path, ast.parse(path.read_text())) for path in files)


@cache
def nodes(part: ast.AST) -> tuple[ast.AST, ...]:
    """It and everything in it, of which every count looks through the same."""
    return (*ast.walk(part),)


def words(node: ast.AST) -> bool:
    """Is this the words of a verdict, or a sentence made of one?"""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Attribute) and node.attr in WORDS


def parsed(tree: ast.AST) -> Iterator[int]:
    """Lines that take the words of a verdict apart."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            told = words(node.func.value) or any(words(argument) for argument in node.args)
            if node.func.attr in STRING_OPERATIONS and told:
                yield node.lineno
        contains = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)
        if contains and isinstance(node.left, ast.Constant) and any(map(words, node.comparators)):
            yield node.lineno


def lines_of(count: Callable[[ast.AST], Iterator[int]]) -> list[str]:
    """Every line of the package that is counted."""
    return [f"{path.relative_to(ROOT)}:{line}" for path, tree in trees() for line in count(tree)]


#: What an arm may be called: names that are taken apart would be one of these.
ARM_WORDS = {
    "eager",
    "eager_native",
    "aot_eager",
    "inductor",
    "inductor_strict",
    "+",
    "+checkpoint",
}


def arms_taken_apart() -> list[str]:
    """Every line that takes an arm's name apart instead of asking the arm."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees()
        for node in nodes(tree)
        if _takes_apart(node)
    ]


def _takes_apart(node: ast.AST) -> bool:
    def says(part: ast.AST) -> bool:
        return isinstance(part, ast.Constant) and part.value in ARM_WORDS

    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        parts = [p for a in node.args for p in (a.elts if isinstance(a, ast.Tuple) else [a])]
        return node.func.attr in STRING_OPERATIONS and any(map(says, parts))
    contains = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
    return contains and says(node.left)


def test_no_code_takes_an_arms_name_apart() -> None:
    allowed = {"ledger.py"}  # a version's local part
    assert not [line for line in arms_taken_apart() if Path(line.split(":")[0]).name not in allowed]


def lines_of_scripts() -> int:
    """Lines that write scripts. What recipes add is their source itself."""
    return sum(len(path.read_text().splitlines()) for path in WRITERS)


def test_no_code_takes_a_sentence_apart() -> None:
    assert not lines_of(parsed)


def test_the_count_sees_what_it_counts() -> None:
    source = 'verdict.symptom.startswith("x")\n"bound" in verdict.symptom\nre.search("a", v.got)\n'
    assert list(parsed(ast.parse(source + "name.split()\nlayer in names\n"))) == [1, 2, 3]


def test_a_relation_costs_two_files() -> None:
    """Its own and the table of rules: scripts, vacuity and fingerprints do not name it."""
    texts = {path: path.read_text() for path in sorted(OURS.rglob("*.py"))}
    # those of schedules share names
    both = {rule.name for rule in RULES if LAYERS in rule.cases}
    for rule in (rule for rule in RULES if rule.reruns or rule.name == "O21"):
        if rule.name in both:
            continue
        named = [path.name for path, text in texts.items() if f'"{rule.name}"' in text]
        assert len(named) <= 2 and "table.py" in named, (rule.name, named)


@cache
def modules_by_word() -> dict[str, set[str]]:
    """Each string of the package, and the modules that it stands in."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees():
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[node.value].add(os.path.relpath(path, OURS))
    return found


def named_in(names: Collection[str]) -> dict[str, set[str]]:
    """In which modules of the package each of these words stands."""
    return {name: modules_by_word().get(name, set()) for name in names}


def test_a_model_costs_its_class_and_a_row() -> None:
    """All else asks the row. A library's own layers have names of their own, some of them alike."""
    of_layers = {"linear", "layernorm_linear", "rmsnorm_linear", "frozen_first"}
    words = {"attention", "dropout"}  # of the field
    for name, modules in named_in(set(COMPOSED) - of_layers - words).items():
        assert modules == {"models/catalog.py"}, (name, modules)
    # what is one operator alone may be called as that is
    for name, modules in named_in({m.name for m in OPERATORS} - set(OF_TORCH)).items():
        assert modules in ({"models/operators.py"}, {"models/groups.py"}, set()), (name, modules)


def compared_with_none(tree: ast.AST) -> Iterator[int]:
    """Lines that ask whether there is a schedule: what happens is part of every Spec."""
    for node in nodes(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            none = any(isinstance(side, ast.Constant) and side.value is None for side in sides)
            if none and any(_named(side) == "schedule" for side in sides):
                yield node.lineno
        elif isinstance(node, ast.match_case) and _matches_none(node.pattern):
            yield node.pattern.lineno


def _matches_none(pattern: ast.pattern) -> bool:
    """Is this a pattern of an attribute ``schedule`` that is None?"""
    return isinstance(pattern, ast.MatchClass) and any(
        name == "schedule" and isinstance(part, ast.MatchSingleton) and part.value is None
        for name, part in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True)
    )


def _named(node: ast.AST) -> str:
    """What a name or an attribute is called; "" for all else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


#: Records that only one kind of case has, or that had a twin for the other.
KINDS = {"Recipe", "OwnLayers"}


def told_apart(tree: ast.AST) -> Iterator[int]:
    """Lines that do one thing for what converts a model and another for a library's own layers:
    they ask the recipe, for a class, or whether a Spec has a ``layer``."""
    for node in nodes(tree):
        if _source_of_a_recipe(node):
            yield node.lineno
        asked: list[ast.AST] = []
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, kinds]):
                parts = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
                if KINDS & {_named(part) for part in parts}:
                    yield node.lineno
            case ast.MatchClass(cls=kind) if _named(kind) in KINDS:
                yield node.lineno
            case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
                asked = [node.test]
            case ast.BoolOp():
                asked = list(node.values)
            case ast.UnaryOp(op=ast.Not()):
                asked = [node.operand]
            case ast.comprehension():
                asked = list(node.ifs)
            case ast.Call(func=ast.Name("bool")):
                asked = list(node.args)
        yield from (one.lineno for one in asked if _layer_of_a_spec(one))


def _source_of_a_recipe(node: ast.AST) -> bool:
    """Is it compared, where what goes apart by it could stand in its record?"""
    match node:
        case ast.Compare(left=ast.Attribute(attr="source"), ops=[ast.Is() | ast.IsNot()]):
            return True
    return False


def _layer_of_a_spec(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "layer" and _named(node.value) == "spec"


def test_no_code_asks_whether_there_is_a_schedule() -> None:
    assert not lines_of(compared_with_none)


def test_the_count_of_such_questions_sees_them() -> None:
    source = (
        "if case.spec.schedule is None: pass\n"
        "x = schedule is not None\n"
        "y = None == told.schedule\n"
        "match spec:\n"
        "    case Spec(schedule=None): pass\n"
    )
    assert list(compared_with_none(ast.parse(source))) == [1, 2, 3, 5]
    other = "schedules is None\nschedule.events is None\nspec.schedule is spec\nx is None\n"
    assert not list(compared_with_none(ast.parse(other)))


#: Places that tell a library's own layers from a converted model. Fewer is better.
MOST_TOLD_APART = 8


def test_few_places_ask_which_kind_of_recipe_it_is() -> None:
    assert len(lines_of(told_apart)) <= MOST_TOLD_APART, lines_of(told_apart)


def test_the_count_of_those_places_sees_them() -> None:
    source = (
        "if recipe.source is LIBRARY: pass\n"
        "found = [r for r in able if isinstance(r, recipe.Recipe)]\n"
        "assert isinstance(seen, (int, OwnLayers))\n"
        "if spec.layer: pass\n"
        "kind = 1 if case.spec.layer else 2\n"
        "if not spec.layer: pass\n"
        "x = spec.layer or None\n"
        "y = [s for s in cases if s.spec.layer]\n"
        "library = bool(case.spec.layer)\n"
        "while spec.layer: pass\n"
        "match recipe:\n"
        "    case OwnLayers(): pass\n"
    )
    assert sorted(told_apart(ast.parse(source))) == [*range(1, 11), 12]
    other = 'isinstance(x, Spec)\nif at.layer: pass\nspec.layer == "linear"\nf(spec.layer)\n'
    assert not list(told_apart(ast.parse(other)))


def test_a_plant_is_named_in_its_own_file_alone() -> None:
    """The registry finds it, and score and list ask the registry."""
    ids = {name for name in builtin_plants() if "-" in name}
    for name, modules in named_in(ids).items():
        assert len(modules) <= 1 and all(m.startswith("plants/") for m in modules), name


def test_what_vacuity_falsifies_follows_from_what_a_rule_reads() -> None:
    """A rule's own record is all it takes: no list of vacuity's names one."""
    rule = Rule("exact", "trial", lambda evidence: iter(()), reads=("amax",))
    assert falsifying([rule], FALSIFIES) == {"trial": FALSIFIES["amax"]}
    names = {rule.name for rule in RULES} - {"contract", "census"}
    named = set().union(*named_in(names).values())
    assert not [module for module in named if module.startswith("power/")]


#: What says which of the kinds of case a Spec is.
KIND_OF_CASE = {"direct", "sharded", "layer", "native", "stages", "context"}


def kinds_read(tree: ast.AST) -> Iterator[int]:
    """Reads of what kind of case a Spec is, or its sharding."""
    for node in nodes(tree):
        asks = isinstance(node, ast.Attribute) and node.attr in KIND_OF_CASE
        if asks and _named(node.value) in ("spec", "sharding", "own"):
            yield node.lineno


def kinds_of_record(tree: ast.AST) -> Iterator[int]:
    """Questions for the class of a recipe, or of what is seen of a case."""
    for node in nodes(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, kinds]):
                parts = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
                if KINDS & {_named(part) for part in parts}:
                    yield node.lineno
            case ast.MatchClass(cls=kind) if _named(kind) in KINDS:
                yield node.lineno
            case _ if _source_of_a_recipe(node):
                yield node.lineno


#: What marks a result's forward, its event and its part of a training in a text key, whatever holds
#: it; and what does so in a key alone: files, devices and plots have the same marks.
_MARKS, _MARKS_OF_KEYS = (
    {"@", ".grad@", "resumed:", "afresh:", "saved:", "loaded:"},
    {":", "y", "x"},
)
#: What is held by such keys.
_BY_KEY = {"outputs", "results", "tensors", "exact", "parameters", "began"}


def keys_taken_apart(tree: ast.AST) -> Iterator[int]:
    """Lines that take the text key of a result apart at one of its marks."""
    scopes = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.Module)]
    yield from sorted({line for scope in scopes for line in _taken_apart(scope)})


def _taken_apart(scope: ast.AST) -> Iterator[int]:
    loops = [node for node in nodes(scope) if isinstance(node, ast.For | ast.comprehension)]
    keys = {
        _named(part)
        for loop in loops
        if any(_named(part) in _BY_KEY for part in nodes(loop.iter))
        for part in nodes(loop.target)
    } - {""}
    for node in nodes(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            key = _named(node.func.value) in keys and not isinstance(scope, ast.Module)
            marks = _MARKS | _MARKS_OF_KEYS if key else _MARKS
            at = [a for a in node.args if isinstance(a, ast.Constant) and a.value in marks]
            if node.func.attr in STRING_OPERATIONS - {"replace"} and at:
                yield node.lineno
        contains = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
        if contains and isinstance(node.left, ast.Constant) and node.left.value in _MARKS:
            yield node.lineno


def outside(*packages: str) -> tuple[tuple[Path, ast.Module], ...]:
    """Modules of all other packages."""
    apart = [OURS / package for package in packages]
    return tuple(
        (path, tree) for path, tree in trees() if not any(path.is_relative_to(a) for a in apart)
    )


def counted(count: Callable[[ast.AST], Iterator[int]], *apart: str) -> int:
    """How often it is found outside of these packages."""
    return sum(len([*count(tree)]) for _, tree in outside(*apart))


def most_parameters() -> int:
    """Of a function of the player that trains."""
    files = ("player", "converted", "library", "mesh", "resumed", "pipeline", "context_parallel")
    functions = [
        node
        for path, tree in trees()
        if path.parent == OURS / "play" and path.stem in files
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("play", "train"))
    ]
    return max(len((*f.args.args, *f.args.kwonlyargs)) for f in functions)


def loose_modules() -> list[str]:
    return sorted(path.stem for path in OURS.glob("*.py"))


def writers_of_scripts() -> list[str]:
    """Functions that write a script."""
    return sorted(
        node.name
        for path, tree in trees()
        if path.is_relative_to(OURS / "triage")
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("write_")
        and node.name.endswith("_script")
    )


def skipped() -> int:
    """Statements that the formatter leaves as they are."""
    return sum(path.read_text().count("# fmt: skip") for path, _ in trees())


def test_the_player_takes_records() -> None:
    assert most_parameters() <= 6


def test_what_was_reached_is_kept() -> None:
    """Each is a count that CONTRIBUTING.md says, with what it is to become."""
    assert counted(kinds_read, "case", "draw") <= 14
    assert not counted(kinds_of_record)
    assert not counted(keys_taken_apart)
    assert len(writers_of_scripts()) <= 2
    assert skipped() < 30


def test_nothing_lies_loose_at_the_root() -> None:
    assert len(loose_modules()) <= 4


def test_the_counts_of_kinds_see_them() -> None:
    source = "spec.direct\nx = case.spec.layer\nspec.sharding.stages\nat.layer\nspec.m\n"
    assert sorted(kinds_read(ast.parse(source))) == [1, 2, 3]
    source = "if recipe.source is LIBRARY: pass\nisinstance(x, OwnLayers)\nisinstance(x, Spec)\n"
    assert sorted(kinds_of_record(ast.parse(source))) == [1, 2]
    source = 'name.partition("@")\n"@" in name\nname.split(".")\nname.startswith("resumed:")\n'
    assert sorted(keys_taken_apart(ast.parse(source))) == [1, 2, 4]
    source = (
        "def number(run):\n"
        "    for key, x in run.outputs.items(): key.removeprefix('y')\n"
        "    return [name for name in sorted(run.results) if name.split(':')]\n"
        "def file(name): return name.rpartition(':'), 'x' in name, name.replace('@', '')\n"
    )
    assert sorted(keys_taken_apart(ast.parse(source))) == [2, 3]


if __name__ == "__main__":
    print(f"{sum(len(path.read_text().splitlines()) for path, _ in trees())} lines in the package")
    plain = [path for path, _ in trees() if OURS in path.parents and "plants" not in path.parts]
    print(f"{sum(len(path.read_text().splitlines()) for path in plain)} without plants and watch")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "older"]
    print(f"{sum(len(path.read_text().splitlines()) for path in tests)} lines of tests")
    print(f"{len(lines_of(parsed))} lines take sentences apart")
    print(f"{lines_of_scripts()} lines of text and of writers, {len(WRITERS)} writers")
    print(f"{len(lines_of(compared_with_none))} lines ask whether there is a schedule")
    print(f"{len(lines_of(told_apart))} places ask which kind of recipe it is")
    read = counted(kinds_read, "case", "draw")
    print(f"{read} reads of what kind of case a Spec is, outside case and draw (at most 15)")
    print(f"{counted(kinds_of_record)} questions for the class of a recipe or of evidence (0)")
    print(f"{counted(keys_taken_apart)} lines take the text key of a result apart (0)")
    print(f"{most_parameters()} parameters of the player, at most (6)")
    print(f"{len(loose_modules())} loose modules (at most 4): {', '.join(loose_modules())}")
    print(f"{len(writers_of_scripts())} writers of scripts (2): {', '.join(writers_of_scripts())}")
    print(f"{skipped()} lines that the formatter skips (under 30)")
