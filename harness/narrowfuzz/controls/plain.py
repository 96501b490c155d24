"""torch as it is, in fp32 and bf16: nothing is quantised, so nothing may be found.

Two kinds of rule make these legal: on the eager rungs the recipe is its own definition, and on the
compiled ones every difference that torch documents is a legal one.
"""

from __future__ import annotations

from narrowfuzz.catalog import MODELS, of_kind
from narrowfuzz.controls.control import Control

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


CONTROLS = [
    Control("plain-fp32-linear", "nn.Linear in fp32", _DEFINITION,
            ("torch.fp32",), ("linear",), _EAGER),
    Control("plain-bf16-linear", "nn.Linear in bf16", _DEFINITION,
            ("torch.bf16",), ("linear",), _EAGER),
    Control("plain-mlps", "feed-forward models, eager", _DEFINITION,
            _PLAIN, of_kind("mlp"), _EAGER),
    Control("plain-norms", "norms, ties, hooks and own forwards, eager", _DEFINITION,
            _PLAIN, of_kind("norm"), _EAGER),
    Control("plain-blocks", "attention and Llama blocks, eager", _DEFINITION,
            _PLAIN, of_kind("block"), _EAGER),
    Control("plain-traced", "every model in traced graphs", _TRACED, _PLAIN, (), ("aot_eager",
            "aot_eager+*")),
    Control("plain-partitioned", "every model in partitioned graphs", _TRACED, _PLAIN, (),
            ("aot_eager_decomp_partition*",)),
    Control("plain-inductor-pointwise", "linears and pointwise operations, compiled", _GENERATED,
            _PLAIN, _POINTWISE, ("inductor*",)),
    Control("plain-inductor-blocks", "attention and Llama blocks, compiled", _GENERATED,
            _PLAIN, of_kind("block"), ("inductor*",)),
]  # fmt: skip
