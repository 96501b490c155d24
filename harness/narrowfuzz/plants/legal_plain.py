"""Unchanged torch in fp32 and bf16: nothing is quantised, so nothing may be found.

Two reasons make these legal: in eager arms the recipe is its own definition, and in compiled arms
every difference that torch documents is legal.
"""

from __future__ import annotations

from functools import partial

from narrowfuzz.case.layout import layouts
from narrowfuzz.models.catalog import MODELS, of_kind
from narrowfuzz.plants.plant import Plant

_PLAIN = ("torch.fp32", "torch.bf16")
_EAGER = ("eager*",)
_POINTWISE = tuple(
    name for name, model in MODELS.items() if model.pointwise and model.kind != "linear"
)

_DEFINITION = (
    "a plain nn.Linear is what every bound is measured from: docs/rules.md, Bounds (any order of "
    "sums in fp32, one rounding to the layer's dtype)"
)
_TRACED = (
    "traced graphs run the same operators: docs/rules.md, what O8 leaves out; "
    "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html"
)
_GENERATED = (
    "generated code may drop inner roundings and reorder sums: docs/rules.md, O9 and what O8 "
    "leaves out; torch/_inductor/config.py, emulate_precision_casts"
)

_SHARED = (
    "ranks leave what one process leaves, but for sums in another order: docs/sharding.md; "
    "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
)
_ON_RANKS = tuple(name for name in MODELS if layouts(name, ("fsdp", "tensor")))
_LOSSES = tuple(name for name, model in MODELS.items() if model.classes and not model.forbidden)

_legal = partial(Plant, legal=True, arms=_EAGER)

PLANTS = [
    _legal("plain-fp32-linear", "as it is", "nn.Linear in fp32", _DEFINITION, ("torch.fp32",),
           models=("linear",)),
    _legal("plain-bf16-linear", "as it is", "nn.Linear in bf16", _DEFINITION, ("torch.bf16",),
           models=("linear",)),
    _legal("plain-mlps", "as it is", "feed-forward models, eager", _DEFINITION, _PLAIN,
           models=of_kind("mlp")),
    _legal("plain-norms", "as it is", "norms, ties, hooks and own forwards, eager", _DEFINITION,
           _PLAIN, models=of_kind("norm")),
    _legal("plain-blocks", "as it is", "attention and Llama blocks, eager", _DEFINITION, _PLAIN,
           models=of_kind("block")),
    _legal("plain-operators", "as it is", "operators that are no linears, alone, eager",
           _DEFINITION, _PLAIN, models=of_kind("operator")),
    _legal("plain-traced", "as it is", "every model in traced graphs", _TRACED, _PLAIN,
           arms=("aot_eager", "aot_eager+*")),
    _legal("plain-partitioned", "as it is", "every model in partitioned graphs", _TRACED, _PLAIN,
           arms=("aot_eager_decomp_partition*",)),
    _legal("plain-inductor-pointwise", "as it is", "linears and pointwise operations, compiled",
           _GENERATED, _PLAIN, models=_POINTWISE, arms=("inductor*",)),
    _legal("plain-inductor-blocks", "as it is", "attention and Llama blocks, compiled", _GENERATED,
           _PLAIN, models=of_kind("block"), arms=("inductor*",)),
    _legal("plain-ranks", "as it is", "linears and models on ranks", _SHARED, _PLAIN,
           models=_ON_RANKS, arms=("sharded*",)),
    _legal("plain-shared-classes", "as it is", "losses whose classes ranks share", _SHARED, _PLAIN,
           models=_LOSSES, arms=("sharded*",)),
]  # fmt: skip
