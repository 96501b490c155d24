"""The baselines: a plain nn.Linear in fp32, bf16 and fp16. Nothing is quantised; any finding is a
false alarm."""

from __future__ import annotations

from typing import Any

from narrowfuzz.case.spec import Dtype, Spec
from narrowfuzz.numerics.plan import unquantised
from narrowfuzz.recipe.recipe import (
    ROUNDED,
    Recipe,
    converts_nothing,
    promises_nothing,
)


def _keep(model: Any, spec: Spec) -> Any:
    return model


def _never_refuses(spec: Spec, device: str) -> str:
    return ""


def _recipe(dtype: Dtype) -> Recipe:
    return Recipe(
        name=f"torch.{dtype}",
        family="torch",
        title=f"plain nn.Linear, {dtype} parameters",
        backends=("native",),
        backend_words={"native": "a plain nn.Linear, nothing is converted"},
        package="",
        dtypes=(dtype,),
        plan=lambda spec: unquantised(dtype),
        convert=_keep,
        refusal=_never_refuses,
        autocast=lambda device: ROUNDED,
        shards=() if dtype == "fp16" else ("fsdp", "tensor", "context", "classes"),
        leaves_out={
            f"dtype={other}": f"torch.{other} takes it" for other in _DTYPES if other != dtype
        },
        converted=converts_nothing,
        convertible=promises_nothing,
    )


_DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")

RECIPES = [_recipe(dtype) for dtype in _DTYPES]
