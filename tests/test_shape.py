"""What the code may not do, counted on its syntax: ``python tests/test_shape.py`` prints it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from narrowfuzz.catalog import MODELS
from narrowfuzz.oracles import ORACLES
from narrowfuzz.oracles.schedule import OF_LIBRARY

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "harness" / "narrowfuzz"
#: Attributes of verdicts, findings and errors that hold words for people.
WORDS = {"got", "why", "sentence", "symptom", "why_suspected"}
#: What takes words apart.
STRING_OPERATIONS = {
    "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix",
    "removesuffix", "find", "index", "replace", "match", "search", "fullmatch", "splitlines",
}  # fmt: skip
#: Modules that write scripts.
WRITERS = sorted((OURS / "triage").glob("script*.py"))


def words(node: ast.AST) -> bool:
    """Is this the words of a verdict, or a sentence made of one?"""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Attribute) and node.attr in WORDS


def parsed(tree: ast.AST) -> Iterator[int]:
    """Lines that take the words of a verdict apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            told = words(node.func.value) or any(words(argument) for argument in node.args)
            if node.func.attr in STRING_OPERATIONS and told:
                yield node.lineno
        contains = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)
        if contains and isinstance(node.left, ast.Constant) and any(map(words, node.comparators)):
            yield node.lineno


def places() -> list[str]:
    """Every such line of the package."""
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(OURS.rglob("*.py"))
        for line in parsed(ast.parse(path.read_text()))
    ]


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
        for path in sorted(OURS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
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
    assert not places()


def test_the_count_sees_what_it_counts() -> None:
    source = 'verdict.symptom.startswith("x")\n"bound" in verdict.symptom\nre.search("a", v.got)\n'
    assert list(parsed(ast.parse(source + "name.split()\nlayer in names\n"))) == [1, 2, 3]


def test_scripts_take_no_more_text_than_they_did() -> None:
    """Scripts are made of source that runs elsewhere, too; what writes them counts, the census'
    own writer among it. A device and sums that may come out in several ways cost forty lines."""
    assert lines_of_scripts() <= 1650


def test_a_relation_costs_two_files() -> None:
    """Its own and the table of rules: scripts, vacuity and fingerprints do not name it."""
    texts = {path: path.read_text() for path in sorted(OURS.rglob("*.py"))}
    both = {oracle.name for oracle in OF_LIBRARY}  # those of schedules share names
    for rule in (rule for rule in ORACLES if rule.reruns or rule.name == "O21"):
        if rule.name in both:
            continue
        named = [path.name for path, text in texts.items() if f'"{rule.name}"' in text]
        assert len(named) <= 2 and "__init__.py" in named, (rule.name, named)


def named_in(names: Collection[str]) -> dict[str, set[str]]:
    """In which modules of the package each of these words stands."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in sorted(OURS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in found:
                found[node.value].add(path.relative_to(OURS).as_posix())
    return found


def test_a_model_costs_its_class_and_a_row() -> None:
    """All else asks the row. A library's own layers have names of their own, some of them alike."""
    of_layers = {"linear", "layernorm_linear", "rmsnorm_linear", "frozen_first"}
    words = {"attention", "dropout"}  # of the field
    for name, modules in named_in(set(MODELS) - of_layers - words).items():
        assert modules == {"catalog.py"}, (name, modules)


if __name__ == "__main__":
    print(f"{len(places())} lines take sentences apart")
    print(f"{lines_of_scripts()} lines of text and of writers, {len(WRITERS)} writers")
