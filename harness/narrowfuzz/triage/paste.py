"""Source of ours as the text of a script: one function with its constants put in, and what it uses.

Branches that are never taken are left out, so a script shows what happens and nothing else.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any


def pasted(
    names: Sequence[str],
    modules: Iterable[ModuleType],
    constants: Mapping[str, str] = {},
    open: Collection[str] = (),
) -> str:
    """The definitions of the ``modules`` with these names, and all that they need.

    ``constants`` are keyword-only arguments of the first, as source text; its others have their
    defaults, but for those that stay ``open``. All but these disappear from its signature, and so
    do arguments of the same names from whatever else takes them by keyword only. Raises KeyError if
    there is no such definition.
    """
    defined = _definitions(modules)
    function = defined[names[0]]
    if constants and isinstance(function, ast.FunctionDef):
        fold = _Fold(_values(function, constants, open))
        taking = {n.name for n in defined.values() if isinstance(n, ast.FunctionDef)}
        fold.taking = {name for name in taking if defined[name].args.kwonlyargs}  # type: ignore[attr-defined]
        for name in fold.taking:
            defined[name] = fold.visit(defined[name])
    needed = _reachable(names, defined)
    kept = [_plain(node) for name, node in defined.items() if name in needed]
    return "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in kept)


def defined_in(modules: Iterable[ModuleType]) -> set[str]:
    """Names that ``pasted`` knows."""
    return set(_definitions(modules))


def _definitions(modules: Iterable[ModuleType]) -> dict[str, ast.stmt]:
    """Functions, classes and constants by name, in order."""
    defined: dict[str, ast.stmt] = {}
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                defined[node.targets[0].id] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined[node.target.id] = node
    return defined


def _values(
    function: ast.FunctionDef, constants: Mapping[str, str], open: Collection[str]
) -> dict[str, ast.expr]:
    """Every keyword-only argument that does not stay open, as it is put in."""
    values = {name: ast.parse(text, mode="eval").body for name, text in constants.items()}
    arguments = function.args
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and argument.arg not in open:
            values.setdefault(argument.arg, default)
    missing = [a.arg for a in arguments.kwonlyargs if a.arg not in {*values, *open}]
    assert not missing, f"no value for {missing}"
    return values


def _reachable(names: Sequence[str], defined: Mapping[str, ast.stmt]) -> set[str]:
    """Names of ``defined`` that these use, directly or not; annotations need nothing."""
    found, left = set(names), list(names)
    while left:
        used = _free(_plain(defined[left.pop()])) & defined.keys()
        left += used - found
        found |= used
    return found


def _free(definition: ast.stmt) -> set[str]:
    """Names that it reads and does not bind itself."""
    nodes = list(ast.walk(definition))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - bound


class _Fold(ast.NodeTransformer):
    """Puts constants in, and drops what they decide."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values
        #: What the script itself defines: no constant, and never None.
        self.given = {value.id for value in values.values() if isinstance(value, ast.Name)}
        #: Functions that lose the arguments that are put in.
        self.taking: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = node.args
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        left = [(a, default) for a, default in pairs if a.arg not in self.values]
        arguments.kwonlyargs, arguments.kw_defaults = [a for a, _ in left], [d for _, d in left]
        outer, own = self.values, {argument.arg for argument in arguments.args}
        self.values = {name: value for name, value in outer.items() if name not in own}
        folded = self.generic_visit(node)
        self.values = outer
        return folded  # type: ignore[return-value]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id in self.taking:
            node.keywords = [k for k in node.keywords if k.arg not in self.values]
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        left = []
        for value in node.values:
            truth = self._truth(value)
            if truth is decides:
                left.append(value)
                break
            if truth is None or value is node.values[-1]:
                left.append(value)
        if len(left) == 1:
            return left[0]
        decided = next((value for value in left if self._truth(value) is decides), None)
        if decided is not None and decided is left[0]:
            return decided
        node.values = left
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        node.test = self.visit(node.test)
        truth = self._truth(node.test)
        if truth is None:
            return self.generic_visit(node)  # type: ignore[return-value]
        body: list[ast.stmt] = []
        for statement in node.body if truth else node.orelse:
            made = self.visit(statement)
            body += made if isinstance(made, list) else [made]
        return body

    def _truth(self, node: ast.expr) -> bool | None:
        """What a condition comes to; None where that is only known when it runs."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self._truth(node.operand)
            return None if truth is None else not truth
        if not isinstance(node, ast.Compare):
            return None if (known := _known(node)) is None else bool(known[0])
        how, other = node.ops[0], node.comparators[0]
        if isinstance(node.left, ast.Name) and node.left.id in self.given:
            none = isinstance(other, ast.Constant) and other.value is None
            return True if none and isinstance(how, ast.IsNot) else None
        left, right = _known(node.left), _known(other)
        if left is None or right is None or type(how) not in _COMPARED:
            return None
        return bool(_COMPARED[type(how)](left[0], right[0]))

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        truth = self._truth(node.test)
        return node if truth is None else node.body if truth else node.orelse


_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.Lt: operator.lt,
    ast.IsNot: operator.is_not,
}  # fmt: skip


def _known(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, alone in a tuple; None for any other expression."""
    try:
        return (ast.literal_eval(node),)
    except ValueError:
        return None


def _plain(node: ast.stmt) -> ast.stmt:
    """Without annotations (of a dataclass they are its fields) and without long docstrings."""
    return _Plain().visit(node)  # type: ignore[no-any-return]


class _Plain(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        arguments = node.args
        for argument in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if argument is not None:
                argument.annotation = None
        node.returns = None
        node.body = [self._bare(statement) for statement in self._undocumented(node)]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.body = self._undocumented(node)
        return node

    @staticmethod
    def _undocumented(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
        text = ast.get_docstring(node)
        return node.body[1:] if text and "\n" in text and len(node.body) > 1 else node.body

    @staticmethod
    def _bare(statement: ast.stmt) -> ast.stmt:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            return ast.Assign([statement.target], statement.value, lineno=statement.lineno)
        return statement
