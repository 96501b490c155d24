"""Where torchao calls its Triton kernels, and plants that change what such a call does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any

from narrowfuzz import Plant
from narrowfuzz.plants.patching import attribute_replaced

_GROUPS = "torchao.prototype.moe_training.fp8_grouped_mm"
ROWS = "triton_fp8_rowwise_2d_scale_and_cast"
COLUMNS = "triton_fp8_per_group_colwise_scales_dual"
MX = "torchao.prototype.mx_formats.mx_tensor"
BLOCKS_OF = "torchao.prototype.moe_training.blockwise_fp8"
PRODUCT = "torch._scaled_grouped_mm"
#: Rows of the smallest group that is drawn.
TILE = 16


def _changed(module: str, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(original, *args)`` replaces this function wherever the module calls it."""
    import triton_on_cpu

    triton_on_cpu.install_torchao()  # before anything of torchao is imported
    owner = import_module(module)
    if name.startswith("torch."):
        owner, name = owner.torch, name.removeprefix("torch.")

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    return attribute_replaced(owner, name, make)


def plants(
    of: str, module: str, legal: bool, *rows: tuple[str, str, str, str, Callable[..., Any]],
    recipes: tuple[str, ...], models: tuple[str, ...] = (),
) -> list[Plant]:  # fmt: skip
    """Plants named after ``of``: for each row (id, title, source, name, change), ``change`` stands
    before the function of this name in the module."""
    return [
        Plant(
            f"triton-{of}-{id}",
            "triton",
            title,
            source,
            recipes,
            partial(_changed, module, name, change),
            legal=legal,
            models=models,
            arms=("eager",),
        )
        for id, title, source, name, change in rows
    ]


GROUPED = partial(
    plants,
    "groups",
    _GROUPS,
    recipes=("torch.bf16", "torch.fp32"),
    models=("fp8_grouped_rowwise",),
)
IN_BLOCKS = partial(
    plants,
    "group-blocks",
    recipes=("torch.bf16", "torch.fp32"),
    models=("fp8_grouped_blockwise", "fp8_grouped_blockwise_straddled"),
)


def groups(offs: Any) -> list[slice]:
    """The rows of each group."""
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class _Launched:
    """A kernel whose arguments ``change`` may alter after each launch."""

    def __init__(self, kernel: Any, change: Callable[..., None]) -> None:
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **how: Any) -> None:
            self.kernel[grid](*args, **how)
            self.change(*args, **how)

        return launch


def after_launches(
    module: str, name: str, change: Callable[..., None]
) -> AbstractContextManager[None]:
    """``change`` gets the arguments of this kernel after each of its launches."""
    import triton_on_cpu

    triton_on_cpu.install_torchao()
    return attribute_replaced(import_module(module), name, lambda kernel: _Launched(kernel, change))
