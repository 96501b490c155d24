"""What operators of torch may return: their references and bounds, one file each.

Calls of those that define ``OPERATOR``, or several ``OPERATORS``, are judged one by one (rule O25);
nothing else registers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from narrowfuzz.operators.operator import Deviation, Operator


def _found() -> Iterator[Operator]:
    for module in map(import_module, (m.name for m in iter_modules(__path__, f"{__name__}."))):
        if hasattr(module, "OPERATOR"):
            yield module.OPERATOR
        yield from getattr(module, "OPERATORS", ())


#: By name: what the modules of this package define.
BY_NAME: dict[str, Operator] = {operator.name: operator for operator in _found()}
#: What kernels are known to do otherwise, by the name that an entry of the ledger gives.
DEVIATIONS: dict[str, Deviation] = {
    deviation.name: deviation for operator in BY_NAME.values() for deviation in operator.deviations
}
#: Whose kernels those are, by the same name.
OPERATOR_OF: dict[str, str] = {
    deviation.name: operator.name
    for operator in BY_NAME.values()
    for deviation in operator.deviations
}
#: By the name of a kernel of torch that is a call of it: ``aten::sum.dim_IntList``.
BY_KERNEL: dict[str, Operator] = {
    kernel: operator for operator in BY_NAME.values() for kernel in operator.kernels
}
