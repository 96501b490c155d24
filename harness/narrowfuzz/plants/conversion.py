"""Conversions of a model that change too little or too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_WRAPPER = ("torchao.mxfp8.*",)


def _float8_swap(change: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """``change(old, new)`` replaces the layer ``old``, where torchao would put ``new``."""
    from torchao.float8.float8_linear import Float8Linear

    def make(from_float: Any) -> Any:
        return lambda mod, config=None: change(mod, from_float(mod, config=config))

    return attribute_replaced(Float8Linear, "from_float", make)


@contextmanager
def _mx_transform(change: Callable[[Any], None]) -> Iterator[None]:
    """``change(module)`` runs after ``quantize_`` has put its tensor class into ``module``."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER

    original = _QUANTIZE_CONFIG_HANDLER[MXFP8TrainingOpConfig]

    def transform(module: Any, config: Any) -> Any:
        converted = original(module, config)
        change(converted)
        return converted

    _QUANTIZE_CONFIG_HANDLER[MXFP8TrainingOpConfig] = transform
    try:
        yield
    finally:
        _QUANTIZE_CONFIG_HANDLER[MXFP8TrainingOpConfig] = original


def _keeps_the_old(old: Any, new: Any) -> Any:
    return old


def _copies_parameters(old: Any, new: Any) -> Any:
    """Every layer gets a parameter of its own on the same memory, so tied weights are untied."""
    import torch

    new.weight = torch.nn.Parameter(new.weight.detach(), requires_grad=new.weight.requires_grad)
    return new


def _rewraps_weight(old: Any, new: Any) -> Any:
    import torch

    new.weight = torch.nn.Parameter(new.weight.detach())
    return new


def _freezes_weight(old: Any, new: Any) -> Any:
    import torch

    new.weight = torch.nn.Parameter(new.weight.detach(), requires_grad=False)
    return new


def _drops_hooks(module: Any) -> None:
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


@contextmanager
def _every_second() -> Iterator[None]:
    """The caller's filter is replaced by one that selects every second linear of a model."""
    import torchao.float8
    from torch import nn

    def make(convert: Any) -> Any:
        def converts(module: Any, **kwargs: Any) -> Any:
            linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
            taken = {id(linear) for linear in linears[::2]}
            kwargs["module_filter_fn"] = lambda m, name: id(m) in taken
            return convert(module, **kwargs)

        return converts

    with attribute_replaced(torchao.float8, "convert_to_float8_training", make):
        yield


PLANTS = [
    Plant(
        "conversion-does-nothing",
        "census",
        "the converter matches no layer and says nothing",
        "https://github.com/pytorch/torchtitan/pull/3199",
        _FLOAT8,
        lambda: _float8_swap(_keeps_the_old),
    ),
    Plant(
        "conversion-skips-layers",
        "census",
        "every second linear stays as it was",
        "https://github.com/pytorch/torchtitan/pull/1391",
        _FLOAT8,
        _every_second,
        needs="a model",
    ),
    Plant(
        "conversion-unties-weights",
        "census",
        "parameters become one for each name",
        "https://github.com/pytorch/torchtitan/pull/3174",
        _FLOAT8,
        lambda: _float8_swap(_copies_parameters),
        needs="a model",
    ),
    Plant(
        "conversion-unfreezes",
        "census",
        "a frozen weight is trainable again",
        "https://github.com/pytorch/ao/pull/1873",
        _FLOAT8,
        lambda: _float8_swap(_rewraps_weight),
        needs="a model",
    ),
    Plant(
        "conversion-freezes",
        "census",
        "the rewrapped weight asks for no gradient",
        "https://github.com/pytorch/ao/pull/1873",
        _FLOAT8,
        lambda: _float8_swap(_freezes_weight),
    ),
    Plant(
        "conversion-drops-hooks",
        "census",
        "forward hooks and pre-hooks are gone",
        "https://github.com/pytorch/pytorch/pull/37233",
        _WRAPPER,
        lambda: _mx_transform(_drops_hooks),
        needs="a model",
    ),
]
