"""Pastes source of ours into a script: one function with its constants put in, and the definitions
that it uses.

Branches that are never taken are removed, so a script shows what happens and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import pickle
import symtable
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from narrowfuzz.triage.script.constants import Fold, InlineConstantCalls, Tidy

#: A module, or a file of Python source.
Source = ModuleType | Path


def pasted(
    names: Sequence[str],
    sources: Iterable[Source],
    constants: Mapping[str, str] = {},
    open: Collection[str] = (),
) -> str:
    """The text of the definitions in ``sources`` with these names, and of all that they need.

    ``constants`` maps keyword-only arguments of the first definition to source text. Its other
    keyword-only arguments are replaced by their defaults, except those in ``open``. All replaced
    arguments disappear from its signature, and so do keyword-only arguments of the same names from
    every other definition. A name with a dot is an attribute, which is replaced wherever it is
    read. Raises KeyError if there is no definition of a name.
    """
    names, defined = list(dict.fromkeys(names)), _definitions(sources)
    functions = {n: d for n, d in defined.items() if isinstance(d, ast.FunctionDef)}
    first = functions.get(names[0])
    values = _values(first, constants, open) if first and constants else {}
    given = frozenset(filter(str.isidentifier, values.values()))
    taking = frozenset(name for name, node in functions.items() if node.args.kwonlyargs)

    def fold(node: ast.stmt) -> ast.stmt:
        if not constants or not isinstance(node, ast.FunctionDef):
            return node
        mine = tuple((n, v) for n, v in values.items() if "." in n or n in _takes(node))
        return _folded(node, mine, given, taking)

    folded = _reachable(names, defined, fold)
    answers = {name: value for name in folded if (value := _answer(defined[name]))}
    for name in folded:
        used = _free(defined[name])
        known_answers = tuple((n, answer) for n, answer in answers.items() if n in used)
        defined[name] = _tidied(defined[name], known_answers)
    needed = _reachable(names, defined)
    assert needed <= folded, needed - folded
    needed_nodes = dict.fromkeys(node for name, node in defined.items() if name in needed)
    return "\n".join(filter(None, map(_text, needed_nodes)))


# Scripts of one model share most of the definitions that they paste, so each is folded, tidied and
# printed once for all of them. Code that changes a cached statement must copy it first.
_shared = functools.lru_cache(maxsize=512)


@_shared
def _folded(
    node: ast.FunctionDef,
    values: tuple[tuple[str, str], ...],
    given: frozenset[str],
    taking: frozenset[str],
) -> ast.stmt:
    """The function with these values in place of arguments and attributes, and without the branches
    that they decide."""
    return Fold({n: _expression(v) for n, v in values}, given, taking).visit(_copy(node))  # type: ignore[no-any-return]


@_shared
def _tidied(node: ast.stmt, answers: tuple[tuple[str, ast.Constant], ...]) -> ast.stmt:
    """The statement with calls of constant functions replaced by ``answers``, and without code that
    has no effect."""
    mine = _copy(node)
    return Tidy().visit(InlineConstantCalls(dict(answers)).visit(mine) if answers else mine)  # type: ignore[no-any-return]


@_shared
def _text(node: ast.stmt) -> str:
    text = ast.unparse(ast.fix_missing_locations(node))
    return "\n".join(line for line in text.splitlines() if line.strip())


def _copy(node: ast.stmt) -> ast.stmt:
    return pickle.loads(pickle.dumps(node))  # type: ignore[no-any-return]  # ten times faster than a deep copy


@functools.lru_cache(maxsize=1024)
def _as_printed(expression: str) -> str:
    return ast.unparse(_expression(expression))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@_shared
def _takes(node: ast.FunctionDef) -> frozenset[str]:
    """Names that constants may replace in a function: its own keyword-only arguments, and keywords
    of the calls that it makes."""
    own = {argument.arg for argument in node.args.kwonlyargs}
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
    return frozenset(own | {k.arg for call in calls for k in call.keywords if k.arg})


def _answer(node: ast.stmt) -> ast.Constant | None:
    """The constant that a function returns if that is all it does; else None."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    lines = [line for line in node.body if not _is_text(line)]
    last = lines[-1] if len(lines) == 1 else None
    answers = isinstance(last, ast.Return) and isinstance(last.value, ast.Constant)
    return last.value if answers else None  # type: ignore[union-attr, return-value]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def hoisted(text: str) -> str:
    """The same script with its imports first, each once, and without unused fields of records and
    unused methods."""
    body = ast.parse(text).body
    modules: dict[str, None] = {}
    members: dict[str, dict[str, None]] = {}
    for node in body:
        if isinstance(node, ast.Import):
            modules |= dict.fromkeys(map(ast.unparse, node.names))
        elif isinstance(node, ast.ImportFrom):
            members.setdefault(node.module or "", {}).update(
                dict.fromkeys(map(ast.unparse, node.names))
            )
    lines = [f"import {', '.join(modules)}"] if modules else []
    lines += [f"from {module} import {', '.join(names)}" for module, names in members.items()]
    idle = (*_imports(body), *_idle_fields(body), *_idle_methods(body))
    gone = {line for node in idle for line in _lines_of(node)}
    rest = [line for i, line in enumerate(text.splitlines(), 1) if i not in gone]
    return "\n".join([*lines, *rest])


def _imports(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    return (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))


def _idle_fields(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The fields of our own records that have a default and that no other code mentions."""
    records = [n for n in body if isinstance(n, ast.ClassDef) and n.name in ("Trace", "Training")]
    if not records:
        return
    mentioned = _mentioned(body)
    for field in (field for record in records for field in record.body):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and field.value is not None and field.target.id not in mentioned:  # type: ignore[union-attr, attr-defined]
            yield field


def _idle_methods(body: Sequence[ast.stmt]) -> list[ast.FunctionDef]:
    """The methods that no code mentions but such methods, of classes that inherit nothing: of
    others a library may call them."""
    owners = [n for n in body if isinstance(n, ast.ClassDef) and not n.bases]
    methods = [m for n in owners for m in n.body if isinstance(m, ast.FunctionDef)]
    outside = [n for n in body if n not in owners]
    outside += [m for n in owners for m in n.body if m not in methods]
    used = [m for m in methods if m.name.startswith("__")]
    while True:
        mentioned = _mentioned([*outside, *used])
        more = [m for m in methods if m not in used and m.name in mentioned]
        if not more:
            return [m for m in methods if m not in used]
        used += more


def _mentioned(body: Iterable[ast.stmt]) -> set[str]:
    """Names of attributes and keywords that the statements mention."""
    nodes = [node for one in body for node in ast.walk(one)]
    mentioned = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return mentioned | {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}


def _lines_of(node: ast.stmt) -> range:
    decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
    return range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)


def defined_in(sources: Iterable[Source]) -> set[str]:
    """All names that ``pasted`` can take from the sources."""
    return set(_definitions(sources))


def named_in(text: str) -> set[str]:
    """Names that a script's text uses."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


@functools.lru_cache(maxsize=64)
def definitions_of(text: str) -> frozenset[str]:
    """Names of the functions, classes and constants that a text defines at its top level."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {
                n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)
            }
    return frozenset(found)


def undefined_in(text: str) -> list[str]:
    """Global names that a script's text reads and that neither the text nor Python defines."""
    whole = symtable.symtable(text, "repro.py", "exec")
    known = {s.get_name() for s in whole.get_symbols() if s.is_assigned() or s.is_imported()}
    read, to_do = set[str](), [whole]
    while to_do:
        table = to_do.pop()
        to_do += [one for one in table.get_children() if one.get_type() != "annotation"]
        for symbol in table.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                known.add(symbol.get_name())
            if symbol.is_referenced() and (symbol.is_global() or table is whole):
                read.add(symbol.get_name())
    return sorted(read - known - vars(builtins).keys() - {"__file__", "__name__"})


def _definitions(sources: Iterable[Source]) -> dict[str, ast.stmt]:
    """Functions, classes, constants and imports of the sources by name, in order, without
    annotations and docstrings."""
    defined: dict[str, ast.stmt] = {}
    for source in sources:
        text = source.read_text() if isinstance(source, Path) else inspect.getsource(source)
        defined |= _defined(text)
    return defined


@functools.lru_cache(maxsize=64)
def _defined(text: str) -> dict[str, ast.stmt]:
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = _plain(node)
        elif isinstance(node, ast.Assign):
            for target in ast.walk(node.targets[0]):
                if isinstance(target, ast.Name):
                    defined[target.id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined[node.target.id] = node
        elif isinstance(node, ast.Import | ast.ImportFrom) and not _ours(node):
            for alias in node.names:
                one = ast.Import([alias])
                if isinstance(node, ast.ImportFrom):
                    one = ast.ImportFrom(node.module, [alias], 0)  # type: ignore[assignment]
                defined[(alias.asname or alias.name).split(".")[0]] = one
    return defined


def _ours(node: ast.stmt) -> bool:
    """True for imports that scripts do not need: definitions from narrowfuzz are pasted, and
    annotations (``from __future__``) are not evaluated."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return True
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    return module.split(".")[0] in ("narrowfuzz", "__future__")


def _values(
    function: ast.FunctionDef, constants: Mapping[str, str], open: Collection[str]
) -> dict[str, str]:
    """Source text of the constants, and of the defaults of the function's other keyword-only
    arguments except those in ``open``."""
    values = {name: _as_printed(text) for name, text in constants.items()}
    arguments = function.args
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and argument.arg not in open:
            values.setdefault(argument.arg, ast.unparse(default))
    missing = [a.arg for a in arguments.kwonlyargs if a.arg not in {*values, *open}]
    assert not missing, f"no value for {missing}"
    return values


def _reachable(
    names: Sequence[str],
    defined: dict[str, ast.stmt],
    change: Callable[[ast.stmt], ast.stmt] = lambda node: node,
) -> set[str]:
    """These names, and all names of ``defined`` that they use, directly or not. ``change`` is
    applied to each definition first. Annotations do not count as use."""
    found, to_do = set(names), list(names)
    while to_do:
        name = to_do.pop()
        defined[name] = change(defined[name])
        used = _free(defined[name]) & defined.keys()
        to_do += used - found
        found |= used
    return found


@_shared
def _free(definition: ast.stmt) -> frozenset[str]:
    """Names that a definition reads and does not bind. Annotations are skipped, as scripts do not
    evaluate them."""
    read: set[str] = set()
    bound: set[str] = set()
    to_do: list[ast.AST] = [definition]
    while to_do:
        node = to_do.pop()
        if isinstance(node, ast.Name):
            read.add(node.id)
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom) and node is not definition:
            bound |= {alias.asname or alias.name for alias in node.names}
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        to_do += [child for child in ast.iter_child_nodes(node) if child is not skipped]
    return frozenset(read - bound)


def _plain(node: ast.stmt) -> ast.stmt:
    """The definition without docstrings and without annotations, except in classes, where they may
    be a dataclass's fields."""
    return _Plain().visit(node)  # type: ignore[no-any-return]


class _Plain(ast.NodeTransformer):
    inside = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.inside += 1
        node.body = _returned_at_once(node.body)
        self.generic_visit(node)
        self.inside -= 1
        arguments = node.args
        for argument in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if argument is not None:
                argument.annotation = None
        node.returns = None
        node.body = self._undocumented(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.body = self._undocumented(node)
        return node

    @staticmethod
    def _undocumented(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
        return node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if _ours(node) else node

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        # every script imports torch at its top
        return None if self.inside and [a.name for a in node.names] == ["torch"] else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if self.inside and node.value is not None:
            return ast.Assign([node.target], node.value, lineno=node.lineno)
        return None if self.inside else node


def _returned_at_once(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body without a name that its result gets for a type checker alone."""
    match body:
        case [
            *before,
            ast.AnnAssign(target=ast.Name(id=named), value=ast.expr() as value),
            ast.Return(value=ast.Name(id=returned)),
        ] if named == returned:
            return [*before, ast.Return(value)]
    return body
