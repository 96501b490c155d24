"""The rules, in the order they are judged: what is low in the list explains what is higher."""

from __future__ import annotations

from functools import partial
from typing import get_args

from narrowfuzz.case.spec import Spec
from narrowfuzz.rules.census import check_census
from narrowfuzz.rules.contract import check_contract
from narrowfuzz.rules.gemm import (
    check_bias_gradient,
    check_gemm_grads,
    check_gemm_output,
    check_lattice,
    check_layer,
)
from narrowfuzz.rules.gradient_sum import check_gradient_sum
from narrowfuzz.rules.ladder import check_ladder
from narrowfuzz.rules.library.table import OF_LIBRARY
from narrowfuzz.rules.own_backward import check_own_backward
from narrowfuzz.rules.own_functions import check_own_functions
from narrowfuzz.rules.quantiser import check_amax, check_cast, check_scale
from narrowfuzz.rules.recompute import check_checkpoint, check_recompute, check_statistics
from narrowfuzz.rules.relations_recipe import check_copies, check_recipe
from narrowfuzz.rules.relations_shape import check_summed, check_variants
from narrowfuzz.rules.relations_state import (
    check_bias,
    check_microbatches,
    check_reload,
    check_steps,
)
from narrowfuzz.rules.relations_training import (
    check_evaluations,
    check_kept_graph,
    check_order,
    check_reloads,
)
from narrowfuzz.rules.relations_values import (
    check_below_amax,
    check_locality,
    check_monotone,
    check_negation,
    check_requantise,
    check_scaling,
)
from narrowfuzz.rules.repeat import check_repeat
from narrowfuzz.rules.rule import Kind, Reads, Rule
from narrowfuzz.rules.sharded.table import OF_CONTEXT, OF_PIPELINE, OF_SHARDED
from narrowfuzz.rules.special import check_finite, check_nan_provenance
from narrowfuzz.rules.whole import check_ratio, check_strict

_START = frozenset({"contract", "O1"})
_QUANTISER = _START | {"O2", "O3", "O4"}
_MULTIPLY = _QUANTISER | {"O5", "O15"}
_SEEN = _MULTIPLY | {"O11", "O13"}
#: What explains a difference of whole runs.
_WHOLE = _SEEN | {"O6", "O7", "O10", "O12", "O16", "O18", "O21", "O23"}
#: A result that is wrong by itself is not also wrong by comparison. A relation that looks at codes,
#: then at results, is among its own consequences.
_ARRANGED = _SEEN | {"O6", "O7", "O10", "O23"}
_LAID_OUT = _ARRANGED | {"R16", "R17"}

#: Of a rule that asks again: all that it compares, or what multiplies saw.
_AGAIN: tuple[Reads, ...] = ("results again", "operands again", "scales again")
_AGAIN_CODES = _AGAIN[1:]

OF_CONVERTED: tuple[Rule, ...] = (
    Rule(
        "contract", "contract", "exact", "C", "none", check_contract, scope="case",
        reads=("run",),
    ),
    Rule(
        "census", "conversion census", "exact", "C", "eager ran", check_census, scope="case",
        reads=("conversion",),
    ),
    Rule("O1", "self-repeat", "exact", "C", "the arm ran", check_repeat, scope="case"),
    Rule(
        "O4", "amax-exact", "exact", "A", "amax is exposed", check_amax, _START,
        reads=("amax",),
    ),
    Rule(
        "O3", "scale-exact", "exact", "A", "scale is exposed", check_scale, _START | {"O4"},
        reads=("scales",),
    ),
    Rule(
        "O2", "cast-exact", "exact", "A", "codes or operands are exposed", check_cast,
        _START | {"O3", "O4"}, reads=("operands",),
    ),
    Rule(
        "O13", "recompute-consistency", "exact", "A", "a GEMM is recomputed", check_recompute,
        _START, scope="case", reads=("recomputed",),
    ),
    Rule(
        "O18", "saved-statistics", "exact", "C", "attention has a kernel of its own",
        check_statistics, _START | {"O13"}, scope="case", reads=("statistics",),
    ),
    Rule(
        "O5", "gemm-bound, output", "bound", "A", "no partial sum can overflow",
        check_gemm_output, _START | {"O13"},
    ),
    Rule(
        "O15", "gemm-bound, gradients", "bound", "A", "no partial sum can overflow",
        check_gemm_grads, _START | {"O13"},
    ),
    Rule(
        "O11", "nan-provenance", "exact", "C", "no overflow", check_nan_provenance, _MULTIPLY,
        reads=("nan",),
    ),
    Rule(
        "O10", "finite", "bound", "C", "bound 3.3 below max", check_finite, _MULTIPLY | {"O11"},
        reads=("finite",),
    ),
    Rule("O6", "layer-bound", "bound", "C", "finite operands", check_layer, _SEEN | {"O10"}),
    Rule("O7", "lattice-equal", "exact", "C", "every sum exact", check_lattice, _SEEN | {"O6"}),
    Rule(
        "O23", "ladder-equal", "exact", "A", "ladder data; how the multiply adds is known",
        check_ladder, _SEEN | {"O6"},
    ),
    Rule(
        "O16", "bias gradient", "bound", "C", "no sum can overflow", check_bias_gradient, _SEEN,
        reads=("bias gradient",),
    ),
    Rule(
        "O21", "gradient-sum", "bound", "A", "a linear is called twice in a step",
        check_gradient_sum, _SEEN | {"O16"}, scope="case",
    ),
    Rule(
        "O12", "checkpoint-equal", "exact", "C", "eager checkpoint", check_checkpoint, _WHOLE,
        scope="case",
    ),
    Rule(
        "O8", "strict-compile", "exact", "C", "linears and pointwise operations, or aot_eager",
        check_strict, _WHOLE, scope="case",
    ),
    Rule(
        "O9", "error-ratio", "ratio", "C", "eager and float64 are finite", check_ratio,
        _WHOLE | {"O8"}, scope="case",
    ),
    Rule(
        "O22", "backward of its own forward", "ratio", "C", "one linear makes the output",
        check_own_backward, _WHOLE | {"O8", "O9"}, scope="case",
    ),
    Rule(
        "O24", "own autograd.Functions", "ratio", "C", "a model of a user's that calls some",
        check_own_functions, scope="case", reads=("derivatives",),
    ),
    Rule(
        "R1", "scale the input", "exact", "C", "scaling is exact",
        partial(check_scaling, tensor="input"), _SEEN, reruns=True, reads=("results again",),
    ),
    Rule(
        "R2", "scale the output gradient", "exact", "C", "scaling is exact",
        partial(check_scaling, tensor="grad_output"), _SEEN, reruns=True, reads=("results again",),
    ),
    Rule(
        "R3", "scale the weight", "exact", "C", "scaling is exact",
        partial(check_scaling, tensor="weight"), _SEEN, reruns=True, reads=("results again",),
    ),
    Rule(
        "R4", "negate the input", "exact", "C", "none", check_negation, _SEEN, reruns=True,
        reads=("results again",),
    ),
    Rule(
        "R5", "permute tokens", "exact", "C", "same codes by the plan",
        partial(check_variants, name="R5"), _ARRANGED | {"R5"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R6", "permute output features", "exact", "C", "same codes by the plan",
        partial(check_variants, name="R6"), _ARRANGED | {"R6"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R7", "permute K", "exact", "C", "same codes by the plan",
        partial(check_variants, name="R7"), _ARRANGED | {"R7"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R8", "zero-pad K", "exact", "C", "same codes by the plan",
        partial(check_variants, name="R8"), _ARRANGED | {"R8"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R9", "pad or split the batch", "exact", "C", "same codes by the plan",
        partial(check_variants, name="R9"), _LAID_OUT | {"R9"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R10", "sum half batches", "bound", "C", "2 parts of whole blocks", check_summed,
        _LAID_OUT, reruns=True, reads=("results again",),
    ),
    Rule(
        "R11", "swap input and weight", "exact", "C", "same formats on both sides",
        partial(check_variants, name="R11"), _LAID_OUT | {"R11"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R12", "requantise", "exact", "A", "power-of-two scales", check_requantise, _SEEN,
        reruns=True, reads=_AGAIN_CODES,
    ),
    Rule(
        "R13", "monotone", "exact", "A", "finite granule", check_monotone, _QUANTISER,
        reads=("operands",),
    ),
    Rule(
        "R14", "move below amax", "exact", "A", "finite input", check_below_amax, _SEEN,
        reruns=True, reads=("operands again",),
    ),
    Rule(
        "R15", "locality", "exact", "A", "row or block granules", check_locality, _SEEN,
        reruns=True, reads=("operands again",),
    ),
    Rule(
        "R16", "contiguous copy", "exact", "C", "a tensor is not contiguous",
        partial(check_variants, name="R16"), _ARRANGED | {"R16"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R17", "flatten", "exact", "C", "3-D input", partial(check_variants, name="R17"),
        _SEEN | {"R17"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R18", "steps with lr = 0", "exact", "C", "finite gradients", check_steps,
        _ARRANGED | {"R18"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R19", "bias added outside", "exact", "C", "a bias that is not fused", check_bias,
        _ARRANGED, reruns=True, reads=("results again",),
    ),
    Rule(
        "R20", "save and reload", "exact", "C", "none", check_reload,
        _ARRANGED | {"R20"}, reruns=True, reads=_AGAIN,
    ),
    Rule(
        "R21", "change the recipe", "exact", "A", "power-of-two scales, normal codes",
        check_recipe, _SEEN, reruns=True, reads=_AGAIN_CODES,
    ),
    Rule(
        "R22", "row and column copy", "exact", "A", "power-of-two scales, normal codes",
        check_copies, _QUANTISER, reads=("second copies",),
    ),
    Rule(
        "R23", "add microbatches", "exact", "C", "several microbatches of one step",
        check_microbatches, _WHOLE, reruns=True, scope="case", reads=("results again",),
    ),
    Rule(
        "R24", "evaluate in a training", "exact", "C", "forwards without a graph in a training",
        check_evaluations, _WHOLE, reruns=True, scope="case", reads=("results again",),
    ),
    Rule(
        "R25", "reload in a training", "exact", "C", "a save and load in a training",
        check_reloads, _WHOLE, reruns=True, scope="case", reads=("results again",),
    ),
    Rule(
        "R26", "one graph at a time", "exact", "C", "two graphs wait for their backwards",
        check_order, _WHOLE, reruns=True, scope="case", reads=("results again",),
    ),
    Rule(
        "R27", "backward again", "exact", "C", "a graph is kept and used again",
        check_kept_graph, _WHOLE, scope="case",
    ),
)  # fmt: skip

RULES = (*OF_CONVERTED, *OF_SHARDED, *OF_PIPELINE, *OF_CONTEXT, *OF_LIBRARY)
_RULES = {of: {rule.name: rule for rule in RULES if rule.of == of} for of in get_args(Kind)}
#: By name; of a rule that several kinds of case have, the one for converted models.
BY_NAME = (
    _RULES["library"] | _RULES["pipeline"] | _RULES["context"] | _RULES["sharded"]
    | _RULES["converted"]
)  # fmt: skip


def kind_of(spec: Spec) -> Kind:
    """Whose rules judge this Spec's cases."""
    if spec.layer:
        return "library"
    if spec.sharded:
        if spec.sharding.context:
            return "context"
        return "pipeline" if spec.sharding.stages else "sharded"
    return "converted"


def rules_of(spec: Spec) -> dict[str, Rule]:
    """The rules that judge this Spec's cases, in order, by name."""
    return _RULES[kind_of(spec)]
