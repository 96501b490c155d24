"""Puts constants into source and removes branches that they decide, so that a script contains only
what it does."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any


class Fold(ast.NodeTransformer):
    """Replaces names by constants, and evaluates the conditions that then are constant."""

    def __init__(
        self, values: Mapping[str, ast.expr], given: Collection[str], taking: Collection[str]
    ) -> None:
        self.values = values
        self.everywhere = values
        #: Names that the script itself defines; their values are not constant, but never None.
        self.given = given
        #: Functions whose arguments are removed where a constant replaces them.
        self.taking = taking
        #: The number of functions around the present node.
        self.inside = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments, outer = node.args, self.values
        own = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
        if self.inside:  # a nested function has the outer one's constants but for its own arguments
            self.values = {n: value for n, value in outer.items() if n not in own}
        else:
            put_in = {a.arg for a in arguments.kwonlyargs} & outer.keys()
            _refuse_rebound(node, put_in)
            self.values = {n: value for n, value in outer.items() if "." in n or n in put_in}
            pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            rest = [(a, default) for a, default in pairs if a.arg not in put_in]
            arguments.kwonlyargs, arguments.kw_defaults = (
                [a for a, _ in rest],
                [d for _, d in rest],
            )
        self.inside += 1
        self.generic_visit(node)
        self.inside -= 1
        self.values = outer
        for parent in ast.walk(node):  # a block may have lost all its statements
            blocks = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.ExceptHandler
            if isinstance(parent, blocks | ast.match_case) or (parent is node):
                parent.body = parent.body or [ast.Pass()]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        known = self.values.get(ast.unparse(node))
        if known is not None and isinstance(node.ctx, ast.Load):
            return known
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("getattr"), [of, ast.Constant(str(name))]):
                return ast.Attribute(of, name, ast.Load())
        node.keywords = [k for k in node.keywords if k.arg or _known(k.value) != ({},)]
        if isinstance(node.func, ast.Name) and node.func.id in self.taking:
            for keyword in node.keywords:
                known = self.everywhere.get(keyword.arg or "")
                if known is not None and ast.dump(known) != ast.dump(keyword.value):
                    raise ValueError(
                        f"{node.func.id} is called with another {keyword.arg} than is put in"
                    )
            node.keywords = [k for k in node.keywords if k.arg not in self.everywhere]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        truth = self._truth(node)
        return node if truth is None else ast.Constant(truth)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        truth = self._truth(node) if isinstance(node.op, ast.Not) else None
        return node if truth is None else ast.Constant(truth)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        rest = []
        for value in node.values:
            truth = self._truth(value)
            if truth is decides:
                rest.append(value)
                break
            if truth is None or value is node.values[-1]:
                rest.append(value)
        if len(rest) == 1:
            return rest[0]
        decided = next((value for value in rest if self._truth(value) is decides), None)
        if decided is not None and decided is rest[0]:
            return decided
        node.values = rest
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
        """The value of a condition; None if it is only known when the script runs."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self._truth(node.operand)
            return None if truth is None else not truth
        if not isinstance(node, ast.Compare):
            return None if (known := _known(node)) is None else bool(known[0])
        if len(node.ops) > 1:
            return None
        how, other = node.ops[0], node.comparators[0]
        if isinstance(node.left, ast.Name) and node.left.id in self.given:
            none = isinstance(other, ast.Constant) and other.value is None
            return True if none and isinstance(how, ast.IsNot) else None
        first, right = _known(node.left), _known(other)
        if first is None or right is None or type(how) not in _COMPARED:
            return None
        return bool(_COMPARED[type(how)](first[0], right[0]))

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        truth = self._truth(node.test)
        return node if truth is None else node.body if truth else node.orelse


_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
}


def _known(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, in a tuple of one; None for any other expression."""
    try:
        return (ast.literal_eval(node),)
    except ValueError:
        return None


def _refuse_rebound(function: ast.FunctionDef, names: Collection[str]) -> None:
    """Raises ValueError if a function also binds a name that is replaced by a constant."""
    for node in ast.walk(function):
        rebound = (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names
        )
        bound = isinstance(node, ast.Lambda) and {a.arg for a in node.args.args} & set(names)
        if rebound or bound:
            raise ValueError(f"{function.name} uses the name of an argument that is put in again")


class InlineConstantCalls(ast.NodeTransformer):
    """Replaces calls of functions that only return a constant by that constant."""

    def __init__(self, answers: Mapping[str, ast.expr]) -> None:
        self.answers = answers

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        known = isinstance(node.func, ast.Name) and self.answers.get(node.func.id)
        return known or node


class Tidy(ast.NodeTransformer):
    """Removes what folding left without effect: unreachable statements, inner functions that nobody
    calls, operands that never decide a condition, ``try`` without handlers."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, _reached(statements))
        if isinstance(node, ast.FunctionDef):
            read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            node.body = [
                s
                for s in node.body
                if not isinstance(s, ast.FunctionDef) or s.decorator_list or s.name in read
            ]
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            node.test = _needed(node.test)
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        return node if node.handlers or node.finalbody else node.body


def _reached(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements up to the first return, raise, continue or break."""
    leaves = (ast.Return, ast.Raise, ast.Continue, ast.Break)
    for i, statement in enumerate(statements):
        if isinstance(statement, leaves):
            return statements[: i + 1]
    return statements


def _needed(test: ast.expr) -> ast.expr:
    """The condition without the operands that never decide it."""
    if not isinstance(test, ast.BoolOp):
        return test
    idle = isinstance(test.op, ast.And)
    values = [v for v in test.values if not (isinstance(v, ast.Constant) and bool(v.value) is idle)]
    if not values:
        return ast.Constant(idle)
    return values[0] if len(values) == 1 else ast.BoolOp(test.op, values)
