"""What operators of torch may return: their references and bounds, one file each.

Calls of those that define ``OPERATOR`` are judged one by one (rule O25); nothing else registers
them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from narrowfuzz.operators.operator import Operator

#: By name: ``OPERATOR`` of every module of this package that defines one.
BY_NAME: dict[str, Operator] = {
    operator.name: operator
    for module in iter_modules(__path__, f"{__name__}.")
    if isinstance(operator := getattr(import_module(module.name), "OPERATOR", None), Operator)
}
#: By the name of a kernel of torch that is a call of it: ``aten::sum.dim_IntList``.
BY_KERNEL: dict[str, Operator] = {
    kernel: operator for operator in BY_NAME.values() for kernel in operator.kernels
}
