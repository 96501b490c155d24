"""Source of ours as the text of a script: one function with its constants put in, and what it uses.

Branches that are never taken are left out, so a script shows what happens and nothing else.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any


def pasted(
    names: Sequence[str], modules: Iterable[ModuleType], constants: Mapping[str, str] = {}
) -> str:
    """The definitions of the ``modules`` with these names, and all that they need.

    ``constants`` are keyword arguments of the first, as source text; all of its keyword arguments
    disappear from its signature. Raises KeyError if there is no such definition.
    """
    defined: dict[str, ast.stmt] = {}
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                defined[node.targets[0].id] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined[node.target.id] = node
    function = defined[names[0]]
    if constants and isinstance(function, ast.FunctionDef):
        defined[names[0]] = _specialised(function, constants)
    needed = _reachable(names, defined)
    kept = [_plain(node) for name, node in defined.items() if name in needed]
    return "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in kept)


def _reachable(names: Sequence[str], defined: Mapping[str, ast.stmt]) -> set[str]:
    """Names of ``defined`` that these use, directly or not; annotations need nothing."""
    found, left = set(names), list(names)
    while left:
        node = _plain(defined[left.pop()])
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & defined.keys()
        left += used - found
        found |= used
    return found


def _specialised(function: ast.FunctionDef, constants: Mapping[str, str]) -> ast.FunctionDef:
    values = {name: ast.parse(text, mode="eval").body for name, text in constants.items()}
    arguments = function.args
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            values.setdefault(argument.arg, default)
    missing = [a.arg for a in arguments.kwonlyargs if a.arg not in values]
    assert not missing, f"no value for {missing}"
    arguments.kwonlyargs, arguments.kw_defaults = [], []
    folded = _Fold(values).visit(function)
    assert isinstance(folded, ast.FunctionDef)
    return folded


class _Fold(ast.NodeTransformer):
    """Puts constants in, and drops what they decide."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values
        #: What the script itself defines: no constant, and never None.
        self.given = {value.id for value in values.values() if isinstance(value, ast.Name)}

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
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.IsNot: operator.is_not,
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
