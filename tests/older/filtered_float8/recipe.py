"""torchao's rowwise float8 on some of a model's linears, as training code converts it.

    narrowfuzz run --recipe-file examples/filtered_float8 --recipe 'mine.*'

Everything but the filter is the shipped recipe's. ``convertible`` is the same filter: what it
leaves alone is judged as the plain linear that it is, and conversion is held to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from narrowfuzz import load_recipes
from narrowfuzz.case import Spec

from .filters import wanted


def _convert(model: Any, spec: Spec) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = dataclasses.replace(config, emulate=spec.backend == "emulated")
    return convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def _convertible(module: Any, name: str, spec: Spec) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and wanted(module, name)


RECIPES = [
    dataclasses.replace(
        load_recipes()["torchao.float8.rowwise"],
        name="mine.float8.filtered",
        based_on="torchao.float8.rowwise",
        title="rowwise float8 where the filter allows it",
        convert=_convert,
        convertible=_convertible,
    )
]
