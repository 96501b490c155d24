"""The converters of torchtitan 0.3, which change the configuration that a model is built from.

Therefore the configuration that a decoder stores is converted, and a new decoder is built from it,
which takes over parameters and buffers. torchtitan lays layers out over ranks after it has
converted them: each new layer has the layout of the one that it replaces. MXFP8Linear casts with
Triton and CUDA kernels and multiplies with cuBLAS: here it emulates all three, by an option of
torchao's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from unittest.mock import patch

from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS

from .promises import linears, release, version

_ONLY = "only linears inside of a torchtitan Decoder are supported"


def convert(
    model: Any, spec: Spec, *, recipe: str, filters: tuple[str, ...], only: tuple[str, ...] = ()
) -> Any:
    """The model with every decoder built anew from its converted configuration."""
    import copy

    from narrowfuzz.recipe.recipe import named
    from torch import nn
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.linear import Linear

    decoders = [(name, m) for name, m in model.named_modules() if isinstance(m, Decoder)]
    if not decoders:
        linear = next((n for n, m in model.named_modules() if isinstance(m, nn.Linear)), "it")
        raise ValueError(f"{_ONLY}, whose configuration is converted: {linear} is in none")
    for name, decoder in decoders:
        config = copy.deepcopy(decoder.config)
        every = [fqn for fqn, _, _, _ in config.traverse(Linear.Config)]
        left_out = [fqn for fqn in every if not named(f"{name}.{fqn}".lstrip("."), only)]
        config = _converted(config, left_out, spec, recipe=recipe, filters=filters)
        made = _built(config, decoder, recipe=recipe)
        above, _, last = name.rpartition(".")
        if not name:
            return made
        setattr(model.get_submodule(above), last, made)
    return model


def _converted(
    config: Any, left_out: list[str], spec: Spec, *, recipe: str, filters: tuple[str, ...]
) -> Any:
    """A configuration after torchtitan's converter, which gets layers' names as users give them."""
    import dataclasses

    from torchtitan.components.quantization import float8, mx
    from torchtitan.models.common.linear import Linear

    home: Any = mx if recipe == "mxfp8" else float8
    with patch.object(home, "has_cuda_capability", lambda major, minor: True):
        if recipe == "mxfp8":
            fqns = [*filters]
            if left_out:
                every = [fqn for fqn, _, _, _ in config.traverse(Linear.Config)]
                fqns = [fqn for fqn in every if _among(fqn, filters) and fqn not in left_out]
                if not fqns:
                    return config  # an empty list would mean all layers
            told: Any = {"fqns": fqns, "model_compile_enabled": True}  # else it warns
            return mx.MXFP8LinearConverter.Config(**told).build().convert(config)
        told = {"recipe_name": recipe, "filter_fqns": [*filters, *left_out]}
        made = float8.Float8LinearConverter.Config(**told).build()
        # its own `emulate` forgets the recipe
        emulate = spec.backend == "emulated"
        made.torchao_config = dataclasses.replace(made.torchao_config, emulate=emulate)
        return made.convert(config)


def _built(config: Any, decoder: Any, *, recipe: str) -> Any:
    """A decoder of the converted configuration, with the parameters and the layout of this one."""
    import torch
    from torchtitan.models.common.linear import Linear

    laid = {fqn: c.sharding_config for fqn, c, _, _ in decoder.config.traverse(Linear.Config)}
    for fqn, layer, _, _ in config.traverse(Linear.Config):
        layer.sharding_config = laid[fqn]
    with torch.device("meta"):
        made = config.build().train(decoder.training)
    there = dict(decoder.named_modules())
    for name, part in made.named_modules():
        part._parameters.update(there[name]._parameters)
        part._buffers.update(there[name]._buffers)
        if recipe == "mxfp8" and hasattr(part, "kernel_preference"):
            part.kernel_preference = type(part.kernel_preference).EMULATED
    return made


def _among(name: str, filters: tuple[str, ...]) -> bool:
    return not filters or any(text in name for text in filters)


def convertible(
    module: Any,
    name: str,
    spec: Spec,
    *,
    recipe: str,
    filters: tuple[str, ...],
    only: tuple[str, ...] = (),
) -> bool:
    """As documented: float8 skips filtered names and linears with a dimension that is no multiple
    of 16; MXFP8 takes the named linears, or all."""
    from narrowfuzz.recipe.recipe import named
    from torchtitan.models.common.linear import Linear

    if not isinstance(module, Linear) or not named(name, only):
        return False
    if recipe == "mxfp8":
        return _among(name, filters)
    aligned = not any(size % 16 for size in module.weight.shape)
    return aligned and not any(text in name for text in filters)


def refusal(
    spec: Spec,
    device: str,
    *,
    recipe: str,
    filters: tuple[str, ...],
    only: tuple[str, ...] = (),
) -> str:
    """Why this case is refused, "" if it is not: a user's model has no decoder, or the MX casts of
    some layer refuse sizes that are not of whole blocks."""
    from narrowfuzz.recipe.recipe import named

    if spec.model in MODELS and MODELS[spec.model].own and not _has_decoder(spec):
        return _ONLY
    for name, (out, features) in linears(spec).items() if recipe == "mxfp8" else ():
        if not _among(name, filters) or not named(name, only):
            continue
        sizes = {"tokens": spec.tokens, "in_features": features, "out_features": out}
        for what, size in sizes.items():
            if size % 32:
                layer = name.removeprefix("model.")
                return f"{what} of {layer} must be a multiple of 32, the MX block, got {size}"
    return ""


@lru_cache(64)
def _has_decoder(spec: Spec) -> bool:
    import torch
    from torchtitan.models.common.decoder import Decoder

    model = MODELS[spec.model].build(spec, dtype=torch.float32, device="meta")
    return any(isinstance(module, Decoder) for module in model.modules())


def unavailable_mx(backend: str, device: str) -> str:
    if device != "cpu":
        return "it is emulated for CPUs: on a GPU torchao's own recipes run the same kernels"
    if release("torchao") < (0, 18):
        return f"its MXFP8 is torchao 0.18's, and {version('torchao') or 'none'} is installed"
    return ""
