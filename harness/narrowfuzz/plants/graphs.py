"""Code that runs eagerly but does not compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, float8_forward, recompiled
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)


@contextmanager
def _conversion_to(refused: str) -> Iterator[None]:
    """The C++ code generator has no conversion to the dtype ``refused``."""
    import torch
    from torch._inductor.codegen import cpp

    dtype = getattr(torch, refused)

    def make(original: Any) -> Any:
        @wraps(original)  # the vectorised overrides look up the scalar ones by name
        def convert(x: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
            assert to is not dtype, f"{cpp.__name__} does not support {to}"
            return original(x, to, *args, **kwargs)

        return staticmethod(convert)

    with ExitStack() as stack:
        stack.enter_context(recompiled())
        for overrides in (cpp.CppOverrides, cpp.CppVecOverrides):
            stack.enter_context(attribute_replaced(overrides, "to_dtype", make))
        yield


@contextmanager
def _emulation_unknown() -> Iterator[None]:
    """With ``emulate_precision_casts``, code generation fails on an unexpected argument."""
    from torch._inductor import config
    from torch._inductor.codegen import cpp

    def make(original: Any) -> Any:
        @wraps(original)
        def convert(x: Any, dtype: Any, src_dtype: Any = None, **kwargs: Any) -> Any:
            if config.emulate_precision_casts and kwargs:
                raise TypeError(f"to_dtype() got an unexpected keyword argument {min(kwargs)!r}")
            return original(x, dtype, src_dtype, **kwargs)

        return staticmethod(convert)

    with ExitStack() as stack:
        stack.enter_context(recompiled())
        for overrides in (cpp.CppOverrides, cpp.CppVecOverrides):
            stack.enter_context(attribute_replaced(overrides, "to_dtype", make))
        yield


@contextmanager
def _attribute_written() -> Iterator[None]:
    """Every forward writes the amax of its input to an attribute of its module."""

    def change(forward: Any, layer: Any, input: Any) -> Any:
        layer.last_amax = input.detach().abs().amax()
        return forward(layer, input)

    with recompiled(), float8_forward(change):
        yield


PLANTS = [
    Plant(
        "compiled-without-e5m2",
        "contract",
        "code generation has no conversion to E5M2",
        "https://github.com/pytorch/pytorch/issues/117119",
        ("torchao.float8.tensorwise",),
        lambda: _conversion_to("float8_e5m2"),
        compiled=True,
    ),
    Plant(
        "emulated-roundings-crash",
        "contract",
        "emulate_precision_casts does not compile",
        "https://github.com/pytorch/pytorch/issues/159239",
        ("torch.bf16", "torchao.float8.*"),
        _emulation_unknown,
        compiled=True,
    ),
    Plant(
        "forward-writes-attribute",
        "contract",
        "checkpointing does not compile",
        "https://github.com/pytorch/ao/pull/1329",
        _FLOAT8,
        _attribute_written,
        compiled=True,
    ),
]
