"""TransformerEngine's own operators for mixtures of experts: its fused router, the auxiliary loss
and the movement of tokens to experts and back. Nothing is quantised.

Without a GPU the compiled extension is emulated (harness/te_on_cpu), in a process of its own.
Movement by a mask is Triton's, which its interpreter runs if Triton is added to the environment:
``--with triton==3.6.0``.
"""

from __future__ import annotations

import os
from typing import Any

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.plan import unquantised
from narrowfuzz.recipe.recipe import Recipe, converts_nothing, promises_nothing
from te_on_cpu.environment import chosen_version, enter, provide, real_extension
from te_on_cpu.v2_releases import ROUTER, release_of


def _prepare() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and not real_extension():
        import triton_on_cpu

        triton_on_cpu.install()  # before TransformerEngine, whose kernels it then interprets
    enter()


def _convert(model: Any, spec: Spec) -> Any:
    return model


def _unavailable(backend: str, device: str) -> str:
    version = chosen_version()
    if version.startswith("1."):
        return f"TransformerEngine {version} has no fused router"
    if release_of(version) < ROUTER and not real_extension():
        return f"TransformerEngine {version}'s fused router is not emulated, that of 2.18 on is"
    if device == "cuda" and not real_extension():
        return "needs TransformerEngine with its compiled extension"
    return ""


RECIPES = [
    Recipe(
        name="te.experts",
        family="te.experts",
        title="TransformerEngine's router and movement of tokens to experts; nothing is quantised; "
        "without its compiled extension, kernels are emulated on the CPU",
        plan=lambda spec: unquantised(spec.dtype),
        convert=_convert,
        converted=converts_nothing,
        convertible=promises_nothing,
        dtypes=("bf16", "fp32", "fp16"),
        models_of="transformer_engine",
        unavailable=_unavailable,
        eager=("",),
        process="te",
        provide=provide,
        prepare=_prepare,
    )
]
