"""References and bounds for the results of torch's operators, one file each.

A module registers its operators by defining ``OPERATOR``, or several ``OPERATORS``; nothing else
registers them. Their calls are judged one by one (rule O25). Exact relations between two calls are
in ``models/relations.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import Signature, signature
from pkgutil import iter_modules
from typing import Any

from narrowfuzz.operators.operator import Deviation, Operator


def _found() -> Iterator[Operator]:
    for module in map(import_module, (m.name for m in iter_modules(__path__, f"{__name__}."))):
        if hasattr(module, "OPERATOR"):
            yield module.OPERATOR
        yield from getattr(module, "OPERATORS", ())


#: All operators that the modules of this package define, by name.
BY_NAME: dict[str, Operator] = {operator.name: operator for operator in _found()}
#: Known deviations of kernels, by the name that an entry of the ledger refers to.
DEVIATIONS: dict[str, Deviation] = {
    deviation.name: deviation for operator in BY_NAME.values() for deviation in operator.deviations
}
#: Names of the operators that have a deviation, by the deviation's name.
OPERATORS_OF: dict[str, frozenset[str]] = {
    name: frozenset(o.name for o in BY_NAME.values() if name in {d.name for d in o.deviations})
    for name in DEVIATIONS
}
#: Operators by the names of the torch kernels that implement them: ``aten::sum.dim_IntList``.
BY_KERNEL: dict[str, Operator] = {
    kernel: operator for operator in BY_NAME.values() for kernel in operator.kernels
}
#: Operators by the names of the torch functions that implement them.
BY_FUNCTION: dict[str, Operator] = {
    function: operator for operator in BY_NAME.values() for function in operator.functions
}
#: Operators by the names of the library functions that implement them: ``torchao.some:function``.
BY_LIBRARY: dict[str, Operator] = {
    function: operator for operator in BY_NAME.values() for function in operator.library
}


@cache
def of_function(function: Any) -> Operator | None:
    """The operator of a torch function; None if it has none."""
    module, name = (getattr(function, what, "") for what in ("__module__", "__name__"))
    return BY_FUNCTION.get(f"{module}.{name}")


def arguments_of(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    call = _signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


@cache
def _signature(function: Any) -> Signature:
    return signature(function)
