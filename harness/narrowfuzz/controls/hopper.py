"""torchao's FP8 linears on a simulated Hopper GPU, whose accumulator is not fp32."""

from __future__ import annotations

from narrowfuzz.controls.control import Control

_WHY = "docs/rules.md, accumulators: how a multiply adds is part of the plan"


def _control(name: str, title: str, recipes: tuple[str, ...]) -> Control:
    return Control(
        f"hopper-{name}", title, _WHY, recipes, models=("linear",), arms=("eager*",),
        device="simulated", wild_shapes=False,
    )  # fmt: skip


CONTROLS = [
    _control("tensorwise", "one scale a tensor, fast and slow accumulation, K split",
             ("torchao.float8.tensorwise",)),
    _control("rowwise", "one scale a row",
             ("torchao.float8.rowwise", "torchao.float8.rowwise_gw_hp")),
]  # fmt: skip
