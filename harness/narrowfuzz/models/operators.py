"""Models that are one operator: what a linear is to the others, these are to torch's other
operators. A class of ``play/operator_models.py`` and a row here."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowfuzz.models.model import Arguments, Model, heads_of
from narrowfuzz.models.relations import (
    of_attention,
    of_gradients,
    of_loss,
    of_norm,
    of_steps,
    of_steps_on_a_table,
)


def _operator(
    name: str,
    title: str,
    module: str,
    arguments: Callable[[Any], Arguments],
    *operators: str,
    smaller: tuple[str, ...] = (),
    fixed: Mapping[str, Any] = {},
    **more: Any,
) -> Model:
    """A row of a model that is nothing but one operator; what is seen of it may be several, as of
    its forward and its backward."""
    return Model(
        name,
        title,
        module,
        arguments,
        "operator",
        smaller=smaller,
        operators=frozenset(operators),
        fixed={"bias": False, "attention": "flash", **fixed},
        **more,
    )


def _by_norm(spec: Any, *, order: str) -> Arguments:
    return spec.k, order


def _of_scale(spec: Any, *, scale: float) -> Arguments:
    return spec.k, scale


def _by_hand(spec: Any, *, centred: bool) -> Arguments:
    return spec.k, centred


def _product(spec: Any, *, bias: bool) -> Arguments:
    return spec.k, spec.n, bias


def _collects(spec: Any, *, add: str, flat: bool) -> Arguments:
    return spec.k, spec.n, add, flat


def _activated(spec: Any, *, function: str, how: Mapping[str, Any]) -> Arguments:
    return spec.k, function, dict(how)


def _grouped(spec: Any, *, sizes: tuple[int, ...], behind: int) -> Arguments:
    experts = min(spec.n, max(1, _EXPERTS // spec.k**2))
    return spec.k, experts, sizes, behind


def _quantised(
    spec: Any, *, sizes: tuple[int, ...], block: int, most: int = 128, how: tuple[Any, ...] = ()
) -> Arguments:
    width = spec.k - spec.k % -block
    experts = min(spec.n, most, max(1, _EXPERTS // width**2))
    return spec.k, experts, sizes, block, how


def _cast(spec: Any, *, kernel: str, across: bool) -> Arguments:
    return spec.k, kernel, _OF_CASTS[spec.n % len(_OF_CASTS)], across


_MXFP8_GROUPS = "prototype/moe_training/mxfp8_grouped_mm.py"
#: Rows of a group: none, one, and about the tiles that kernels work in.
_UNEVEN = (1, 0, 16, 17, 15, 128, 129, 127)
#: Elements of all experts' matrices, at most.
_EXPERTS = 2**17

#: By the kernel that the device has for it.
_ATTENTION = tuple(
    f"attention{kernel}{direction}"
    for kernel in ("", "_flash", "_efficient", "_cudnn")
    for direction in ("", "_backward")
)


def _sdpa(name: str, title: str, mask: str, shared: int = 1, forbidden: str = "") -> Model:
    def arguments(spec: Any) -> Arguments:
        heads = heads_of(spec)
        return spec.k, spec.n, heads, math.gcd(heads, shared), mask

    return _operator(
        name,
        title,
        "Attends",
        arguments,
        *_ATTENTION,
        values=("aligned", "equal", "outlier_rows"),
        attends=True,
        columns="keys",
        relations=of_attention(mask),
        smaller=("sdpa",) if (mask or shared > 1) and not forbidden else (),
        forbidden=forbidden,
    )


def _cross_entropy(
    name: str, title: str, reduction: str, ignored: int, smoothed: float = 0.0, *more: str
) -> Model:
    return _operator(
        name,
        title,
        "CrossEntropy",
        lambda spec: (spec.k, reduction, ignored, smoothed),
        *("nll_loss", "nll_loss_backward", "log_softmax", "log_softmax_backward", *more),
        relations=of_loss(ignored),
        values=("outlier", "outlier_rows"),
    )


#: Optimizers as a Spec calls them, and the operator that a step of theirs is.
_STEPS = {
    "sgd": "sgd_step",
    "sgd_foreach": "sgd_step",
    "sgd_fused": "sgd_step",
    "sgd_momentum": "sgd_step",
    "sgd_momentum_fused": "sgd_step",
    "adamw": "adam_step",
    "adam_foreach": "adam_step",
    "adam_fused": "adam_step",
    "adamw_foreach": "adam_step",
    "adamw_fused": "adam_step",
    "adagrad": "adagrad_step",
    "adagrad_foreach": "adagrad_step",
    "adagrad_fused": "adagrad_step",
}


#: What stalls a sum, and what it loses beside larger terms.
_OF_SUMS = ("equal", "outlier", "heavy_tail")
#: What is beyond a function's ends, and what it is flat or steep at.
_OF_ACTIVATIONS = ("outlier", "heavy_tail")
#: What stalls a sum of squares, and what its squares lose.
_OF_NORMS = ("equal", "outlier", "heavy_tail", "subnormal")
#: Moments far apart, and those that are squares of what is small.
_OF_STEPS = ("heavy_tail", "outlier", "subnormal")


def _step(optimizer: str, operator: str) -> Model:
    words = optimizer.replace("_", ", ")
    return _operator(
        f"step_{optimizer}",
        f"steps of {words} on a weight and a bias",
        "Scaled",
        lambda spec: (spec.k,),
        operator,
        values=_OF_STEPS,
        relations=of_steps(),
        fixed={"optimizer": optimizer, "grad_mode": "train"},
        device="cpu" if optimizer == "adagrad_fused" else "",
    )


def _linear_cross_entropy(name: str, title: str, ignored: int) -> Model:
    return _operator(
        name,
        title,
        "LinearCrossEntropy",
        lambda spec: (spec.k, spec.n, ignored),
        "linear_cross_entropy",
        values=("outlier_rows", "heavy_tail"),
        columns="classes",
        # torch gives NaN where all are ignored
        relations=of_loss(ignored) if ignored > 1 else of_gradients("weight", scaled=False),
    )


_LINEAR_CROSS_ENTROPIES = (
    _linear_cross_entropy(
        "linear_cross_entropy", "cross entropy of a linear's outputs, in chunks", 5
    ),
    _linear_cross_entropy("linear_cross_entropy_ignored", "the same, all targets ignored", 1),
)


def _has(file: str, of: str = "torch") -> bool:
    """Has the installed package a file of this name? To import it takes seconds."""
    found = find_spec(of)
    return found is not None and (Path(str(found.origin)).parent / file).is_file()


def _low_bit(optimizer: str, title: str, **more: Any) -> Model:
    """torchao keeps a parameter's moments in few bits if it has at least 4,096 elements, in whole
    blocks of 256."""

    def table(spec: Any) -> Arguments:
        whole = 256 // math.gcd(256, spec.k)
        rows = max(spec.n, -(-4096 // spec.k))
        return -(-rows // whole) * whole, spec.k

    return _operator(
        f"step_{optimizer}",
        f"steps of {title} on a table of rows",
        "Lookup",
        table,
        "low_bit_adam_step",
        takes_ids=True,
        columns="ids",
        values=_OF_STEPS,
        fixed={"optimizer": optimizer, "grad_mode": "train"},
        **more,
    )


_LOW_BIT = (
    _low_bit("adamw_8bit", "adamw, 8bit"),
    _low_bit("adamw_4bit", "adamw, 4bit"),
    _low_bit("adamw_fp8", "adamw, fp8"),
    _low_bit("adamw_8bit_rounded", "adamw, 8bit, rounded by chance in bf16", random=True),
)

#: It takes parameters of two dimensions alone.
_MUONS = tuple(
    _operator(
        f"step_{optimizer}",
        f"steps of {title} on a table of rows",
        "Lookup",
        lambda spec: (spec.n, spec.k),
        "muon_step",
        takes_ids=True,
        relations=of_steps_on_a_table(),
        columns="ids",
        values=_OF_STEPS,
        fixed={"optimizer": optimizer, "grad_mode": "train"},
    )
    for optimizer, title in (("muon", "muon"), ("muon_plain", "muon without Nesterov's momentum"))
)

#: Rows that are whole blocks of 32 in each group, and rows that are not.
_BLOCKS, _RAGGED = (32, 0, 64), (1, 0, 16, 40, 33)
_QUANTISED_GROUPS = tuple(
    _operator(
        f"mxfp8_grouped_{name}",
        f"MXFP8 products of groups of rows, {title}",
        "QuantisedGroups",
        partial(_quantised, sizes=sizes, block=32, how=(mode, hp)),
        "mxfp8_grouped_mm",
        "grouped_mm",
        values=("outlier_rows", "heavy_tail", "scale_ends"),
        columns="experts",
        compiled=False,
        lacks={"cpu": ("fp16",), "cuda": ("fp16",)},
        # torchao documents groups of multiples of 32; others lose a GPU in backward (docs/unrun.md)
        device="cpu" if name == "floor" else "",
    )
    for name, title, sizes, mode, hp in (
        ("rceil", "rceil, whole blocks", _BLOCKS, "rceil", False),
        ("floor", "floor, groups that share blocks", _RAGGED, "floor", False),
        ("hp", "rceil, the weight gradient in bf16", _RAGGED, "rceil", True),
    )
)

_IDLE_GROUPS = _operator(
    "mxfp8_grouped_idle",
    "MXFP8 products of groups without a row",
    "QuantisedGroups",
    partial(_quantised, sizes=(), block=32, how=("rceil", False)),
    "mxfp8_grouped_mm",
    columns="experts",
    compiled=False,
    lacks={"cpu": ("fp16",), "cuda": ("fp16",)},
)

#: Of 16 rows or a multiple, which torchao documents, and about the tiles of kernels.
_SIXTEENS = (16, 0, 32, 128, 112, 144)
_FP8_GROUPS = _operator(
    "fp8_grouped_rowwise",
    "FP8 products of groups of rows, one scale a row",
    "QuantisedGroups",
    partial(_quantised, sizes=_SIXTEENS, block=16, most=8),
    "fp8_grouped_mm",
    "fp8_rowwise_2d_scale_and_cast",
    "fp8_colwise_3d_scale_and_cast",
    "fp8_rowwise_transpose_rhs",
    "fp8_per_group_colwise_scales_dual",
    values=("outlier_rows", "heavy_tail", "scale_ends"),
    columns="experts",
    compiled=False,
    lacks={"cpu": ("fp16",), "cuda": ("fp16",)},
    interpreted=True,
    # the interpreter takes a few milliseconds a row
    fixed={"batch": 0, "steps": 1, "microbatches": 1},
)
#: Rows of groups that kernels for experts quantise by themselves: of one size, none, and so unlike
#: that what fits most of them does not fit all.
_OF_CASTS = ((32, 32), (16, 0, 48), (112, 400), (64,), (16, 16, 16, 16), (272, 16))
_FP8_CASTS = tuple(
    _operator(
        f"fp8_cast_{name}",
        f"FP8 casts of groups, {title}",
        "GroupCasts",
        partial(_cast, kernel=f"triton_fp8_per_group_{kernel}", across=name == "rows"),
        f"fp8_per_group_{kernel}",
        values=("outlier_rows", "heavy_tail", "scale_ends"),
        columns="kinds of groups",
        compiled=False,
        interpreted=True,
        lacks={"cpu": ("fp16",), "cuda": ("fp16",)},
        fixed={"batch": 0, "steps": 1, "microbatches": 1},
    )
    for name, title, kernel in (
        ("rows", "one scale a row", "rowwise_scales"),
        ("columns", "one scale a column", "colwise_scales"),
        ("both", "of two tensors, one scale a column", "colwise_scales_dual"),
    )
)

OPERATORS: tuple[Model, ...] = (
    _operator(
        "scale_and_shift",
        "weights and biases whose gradients are sums",
        "Scaled",
        lambda spec: (spec.k,),
        "sum",
        values=_OF_SUMS,
        relations=of_gradients("weight", "bias"),
    ),
    _operator(
        "layer_norm",
        "LayerNorm alone",
        "Normalised",
        lambda spec: ("layer", spec.k, False),
        "layer_norm",
        "layer_norm_backward",
        values=_OF_SUMS,
        relations=of_norm("norm.weight", "norm.bias"),
    ),
    _operator(
        "layer_norm_mixed",
        "LayerNorm in fp32 of bf16",
        "Normalised",
        lambda spec: ("layer", spec.k, True),
        "layer_norm",
        "layer_norm_backward",
        values=_OF_SUMS,
        relations=of_norm("norm.weight", "norm.bias"),
        device="cpu",
    ),
    _operator(
        "rms_norm",
        "RMSNorm alone",
        "Normalised",
        lambda spec: ("rms", spec.k, False),
        "rms_norm",
        "fused_rms_norm",
        "fused_rms_norm_backward",
        relations=of_norm("norm.weight"),
    ),
    *(
        _operator(
            name,
            title,
            "NormalisedByHand",
            partial(_by_hand, centred=centred),
            "mean",
            "pow",
            "sum",
            relations=of_norm("weight"),
        )
        for name, title, centred in (
            ("rms_norm_by_hand", "an RMS norm that is written out", False),
            ("layer_norm_by_hand", "a layer norm that is written out", True),
        )
    ),
    *(
        _operator(
            operator,
            title,
            "Product",
            partial(_product, bias=bias),
            operator,
            "mm",
            values=("equal", "outlier_rows", "heavy_tail"),
            columns="columns",
            relations=of_gradients("weight"),
            wide=True,
        )
        for operator, title, bias in (
            ("mm", "a product of matrices, and no linear", False),
            ("addmm", "the same plus a row", True),
        )
    ),
    _operator(
        "bmm",
        "products of matrices, head by head",
        "Products",
        lambda spec: (spec.k, heads_of(spec)),
        "bmm",
        values=("equal", "outlier_rows", "heavy_tail"),
        relations=of_gradients("weight"),
    ),
    *(
        _operator(
            f"grouped_{name}",
            f"products of groups of rows, {title}",
            "GroupedProducts",
            partial(_grouped, sizes=sizes, behind=behind),
            "grouped_mm",
            values=("equal", "outlier_rows", "heavy_tail"),
            columns="experts",
            # of so many weights one is nearly always too small to be scaled
            relations=of_gradients("up", "down", scaled=False),
        )
        for name, title, sizes, behind in (
            ("uneven", "none, one, and about 16 and 128 of them", _UNEVEN, 0),
            ("tail", "about 16 and 128, and rows that are no group's", _UNEVEN, 5),
            ("last", "all in the last group", (0,), 0),
        )
    ),
    _operator(
        "attention_by_hand",
        "causal attention that is written out",
        "AttendsByHand",
        lambda spec: (spec.k, spec.n, heads_of(spec)),
        "bmm",
        "softmax",
        "softmax_backward",
        values=("aligned", "equal", "outlier_rows"),
        columns="keys",
        relations=of_attention(""),
    ),
    _operator(
        "softmax",
        "softmax of rows",
        "Probabilities",
        lambda spec: (spec.k, False),
        "softmax",
        "softmax_backward",
        relations=of_gradients("weight", scaled=False),
    ),
    _operator(
        "log_softmax",
        "log-softmax of rows",
        "Probabilities",
        lambda spec: (spec.k, True),
        "log_softmax",
        "log_softmax_backward",
        relations=of_gradients("weight", scaled=False),
    ),
    _cross_entropy("cross_entropy", "mean cross entropy, some targets ignored", "mean", 5),
    _cross_entropy("cross_entropy_ignored", "summed cross entropy, all targets ignored", "sum", 1),
    _cross_entropy(
        "cross_entropy_smoothed",
        "mean cross entropy with smoothed labels, some targets ignored",
        "mean",
        5,
        0.1,
        "smoothed_cross_entropy",
    ),
    *(_LINEAR_CROSS_ENTROPIES if _has("nn/modules/linear_cross_entropy_options.py") else ()),
    _operator(
        "embedding",
        "rows of a table by ids",
        "Lookup",
        lambda spec: (spec.n, spec.k),
        "embedding_backward",
        values=_OF_SUMS,
        relations=of_gradients("table", input=False),
        takes_ids=True,
        columns="ids",
    ),
    _operator(
        "indexed",
        "rows of a table by a subscript",
        "Indexed",
        lambda spec: (spec.n, spec.k),
        "index_put",
        values=_OF_SUMS,
        relations=of_gradients("table", input=False),
        takes_ids=True,
        columns="ids",
    ),
    *(
        _operator(
            f"{name}{'_flat' if flat else ''}",
            f"{'numbers' if flat else 'rows'} added up by group with torch.{name}",
            "Collects",
            partial(_collects, add=name, flat=flat),
            name,
            values=_OF_SUMS,
            columns="groups",
            relations=of_gradients("weight"),
        )
        for name in ("index_add", "scatter_add")
        for flat in (False, True)
    ),
    _operator(
        "topk",
        "the largest numbers of each row",
        "Chosen",
        lambda spec: (spec.k, min(spec.n, spec.k)),
        "topk",
        values=("equal", "outlier"),
        columns="choices",
    ),
    _operator(
        "sort",
        "each row in its order",
        "Chosen",
        lambda spec: (spec.k, 0),
        "sort",
        values=("equal", "outlier"),
    ),
    *(
        _operator(
            name,
            title,
            "Activated",
            partial(_activated, function=operator, how=how),
            operator,
            f"{operator}_backward",
            values=_OF_ACTIVATIONS,
            relations=of_gradients("weight", scaled=False),
        )
        for name, title, operator, how in (
            ("silu", "SiLU alone", "silu", {}),
            ("gelu", "GELU alone", "gelu", {}),
            ("gelu_tanh", "GELU, approximated", "gelu", {"approximate": "tanh"}),
            ("sigmoid", "the logistic function alone", "sigmoid", {}),
        )
    ),
    _operator(
        "softcap",
        "a cap on logits, by tanh",
        "Capped",
        lambda spec: (spec.k,),
        "tanh",
        "tanh_backward",
        values=_OF_ACTIVATIONS,
        relations=of_gradients("weight", scaled=False),
    ),
    _operator(
        "z_loss",
        "the mean square of rows' logsumexp",
        "ZLoss",
        lambda spec: (spec.k,),
        "logsumexp",
        "mean",
        values=("outlier", "outlier_rows"),
        relations=of_gradients("weight", scaled=False),
    ),
    _sdpa("sdpa", "attention without a mask", ""),
    _sdpa("sdpa_causal", "causal attention", "causal"),
    _sdpa("sdpa_padding", "attention that sees no padding", "padding"),
    _sdpa("sdpa_empty", "attention of which some rows see nothing", "empty"),
    _sdpa("sdpa_finite", "attention behind a mask of -1e9", "finite"),
    _sdpa("sdpa_bias", "attention with a bias of the distance", "bias"),
    _sdpa("sdpa_grouped", "causal attention with shared keys and values", "causal", 2),
    _sdpa("sdpa_grouped_padding", "the same without a mask but padding's", "padding", 4),
    _sdpa(
        "sdpa_mask_and_causal",
        "attention with a mask that is causal as well",
        "both",
        forbidden="attn_mask and is_causal=True together raise an error, by the documentation",
    ),
    *(_step(optimizer, operator) for optimizer, operator in _STEPS.items()),
    *(
        _operator(
            name,
            title,
            "ScaledByNorm",
            partial(_by_norm, order=order),
            "vector_norm",
            "sum",
            values=_OF_NORMS,
            relations=of_gradients("weight"),
        )
        for name, title, order in (
            ("scaled_by_norm", "rows over their 2-norm", "2"),
            ("scaled_by_sum", "rows over the sum of their magnitudes", "1"),
            ("scaled_by_largest", "rows over their largest magnitude", "inf"),
        )
    ),
    *(
        _operator(
            name,
            title,
            "Unscaled",
            partial(_of_scale, scale=scale),
            "unscale",
            values=("inf_nan", "subnormal", "near_max"),
            relations=of_gradients("weight"),
            compiled=False,
            lacks={"cuda": ("bf16",)},
        )
        for name, title, scale in (
            ("unscaled_gradient", "gradients that are unscaled by a power of two", 2.0**16),
            (
                "unscaled_gradient_by_others",
                "gradients that are unscaled by another number",
                3000.0,
            ),
        )
    ),
    *(_LOW_BIT if _has("optim/adam.py", of="torchao") else ()),
    *((*_QUANTISED_GROUPS, _IDLE_GROUPS) if _has(_MXFP8_GROUPS, of="torchao") else ()),
    *(
        [_FP8_GROUPS, *_FP8_CASTS]
        if _has("prototype/moe_training/fp8_grouped_mm.py", of="torchao")
        else ()
    ),
    *(_MUONS if _has("optim/_muon.py") else ()),
)


def models_of_operators(globs: Iterable[str]) -> tuple[str, ...]:
    """Names of the models that are nothing but operators of these globs. Raises ValueError for a
    glob of none."""
    known = sorted({name for model in OPERATORS for name in model.operators or ()})
    meant: set[str] = set()
    for glob in globs:
        if not (hits := fnmatch.filter(known, glob)):
            raise ValueError(f"no operator {glob!r} is run alone; these are: {', '.join(known)}")
        meant.update(hits)
    return tuple(model.name for model in OPERATORS if meant & (model.operators or frozenset()))
