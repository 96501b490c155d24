"""Models that consist of a single operator of torch's or torchao's, so that it can be judged by
itself, as a linear is. Each is a class of ``play/operator_models.py`` and a row here; products of
groups have ``play/group_models.py`` and ``groups.py``, optimizer steps ``optimizer_steps.py``."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from narrowfuzz.models.groups import PRODUCTS, QUANTISED
from narrowfuzz.models.model import Arguments, Model, heads_of
from narrowfuzz.models.optimizer_steps import LOW_BIT, MUONS, STEPS
from narrowfuzz.models.relations import of_attention, of_gradients, of_loss, of_norm
from narrowfuzz.models.single_operator import has, operator_model
from narrowfuzz.models.te_experts import TE_EXPERTS


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


#: The operators that attention may run as, depending on the device's kernels.
_ATTENTION = tuple(
    f"attention{kernel}{direction}"
    for kernel in ("", "_flash", "_efficient", "_cudnn")
    for direction in ("", "_backward")
)


def _attending(spec: Any, *, mask: str, shared: int) -> Arguments:
    heads = heads_of(spec)
    return spec.k, spec.n, heads, math.gcd(heads, shared), mask


def _sdpa(name: str, title: str, mask: str, shared: int = 1, forbidden: str = "") -> Model:
    return operator_model(
        name,
        title,
        "Attends",
        partial(_attending, mask=mask, shared=shared),
        *_ATTENTION,
        values=("aligned", "equal", "outlier_rows"),
        attends=True,
        columns="keys",
        relations=of_attention(mask),
        smaller=("sdpa",) if (mask or shared > 1) and not forbidden else (),
        forbidden=forbidden,
    )


def _flex(name: str, title: str, mask: str, shared: int = 1) -> Model:
    return operator_model(
        name,
        title,
        "AttendsFlexibly",
        partial(_attending, mask=mask, shared=shared),
        "flex_attention",
        values=("aligned", "equal", "outlier_rows"),
        columns="keys",
        smaller=("flex_attention",) if mask or shared > 1 else (),
        # FlexAttention has no backward on a CPU
        fixed={"grad_mode": "no_grad", "checkpoint": "none", "steps": 1, "microbatches": 1},
    )


def _cross_entropy(
    name: str,
    title: str,
    reduction: str,
    ignored: int,
    *more: str,
    fields: Mapping[str, Any] = {},
    **options: Any,
) -> Model:
    return operator_model(
        name,
        title,
        "CrossEntropy",
        lambda spec: (spec.k, reduction, ignored, dict(options)),
        *("nll_loss", "nll_loss_backward", "log_softmax", "log_softmax_backward", *more),
        classes="label_smoothing" not in options,  # documented as not supported by loss_parallel
        relations=of_loss(ignored),
        values=("outlier", "outlier_rows"),
        **fields,
    )


#: The model of a graph of many operators: to compile it takes little longer than one of a single
#: operator.
MANY = "many_operators"
#: Value classes for sums: equal numbers, at which a sum stalls, and numbers that are lost beside
#: larger ones.
_OF_SUMS = ("equal", "outlier", "heavy_tail")
#: Value classes for activations: numbers at which a function saturates, is flat or is steep.
_OF_ACTIVATIONS = ("outlier", "heavy_tail")
#: Value classes for norms: as for sums, and numbers whose squares underflow.
_OF_NORMS = ("equal", "outlier", "heavy_tail", "subnormal")


def _layer_norm(name: str, title: str, *, mixed: bool, **fields: Any) -> Model:
    return operator_model(
        name,
        title,
        "Normalised",
        lambda spec: ("layer", spec.k, mixed),
        "layer_norm",
        "layer_norm_backward",
        values=_OF_SUMS,
        relations=of_norm("norm.weight", "norm.bias"),
        **fields,
    )


def _softmax(name: str, title: str, *, log: bool) -> Model:
    return operator_model(
        name,
        title,
        "Probabilities",
        lambda spec: (spec.k, log),
        name,
        f"{name}_backward",
        relations=of_gradients("weight", scaled=False),
    )


def _rows_of_a_table(name: str, title: str, module: str, operator: str) -> Model:
    return operator_model(
        name,
        title,
        module,
        lambda spec: (spec.n, spec.k),
        operator,
        values=_OF_SUMS,
        relations=of_gradients("table", input=False),
        takes_ids=True,
        columns="ids",
    )


def _linear_cross_entropy(name: str, title: str, ignored: int) -> Model:
    return operator_model(
        name,
        title,
        "LinearCrossEntropy",
        lambda spec: (spec.k, spec.n, ignored),
        "linear_cross_entropy",
        values=("outlier_rows", "heavy_tail"),
        columns="classes",
        # torch returns NaN if all targets are ignored
        relations=of_loss(ignored) if ignored > 1 else of_gradients("weight", scaled=False),
    )


_LINEAR_CROSS_ENTROPIES = (
    _linear_cross_entropy(
        "linear_cross_entropy", "cross entropy of a linear's outputs, in chunks", 5
    ),
    _linear_cross_entropy("linear_cross_entropy_ignored", "the same, all targets ignored", 1),
)


OPERATORS: tuple[Model, ...] = (
    operator_model(
        "scale_and_shift",
        "weights and biases whose gradients are sums",
        "Scaled",
        lambda spec: (spec.k,),
        "sum",
        values=_OF_SUMS,
        relations=of_gradients("weight", "bias"),
    ),
    _layer_norm("layer_norm", "LayerNorm alone", mixed=False),
    _layer_norm("layer_norm_mixed", "LayerNorm in fp32 of bf16", mixed=True, device="cpu"),
    operator_model(
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
        operator_model(
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
        operator_model(
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
    operator_model(
        "bmm",
        "products of matrices, head by head",
        "Products",
        lambda spec: (spec.k, heads_of(spec)),
        "bmm",
        values=("equal", "outlier_rows", "heavy_tail"),
        relations=of_gradients("weight"),
    ),
    *PRODUCTS,
    operator_model(
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
    _softmax("softmax", "softmax of rows", log=False),
    _softmax("log_softmax", "log-softmax of rows", log=True),
    _cross_entropy("cross_entropy", "mean cross entropy, some targets ignored", "mean", 5),
    _cross_entropy("cross_entropy_ignored", "summed cross entropy, all targets ignored", "sum", 1),
    _cross_entropy(
        "cross_entropy_smoothed",
        "mean cross entropy with smoothed labels, some targets ignored",
        "mean",
        5,
        "smoothed_cross_entropy",
        label_smoothing=0.1,
    ),
    _cross_entropy(
        "cross_entropy_weighted",
        "mean cross entropy with weights of classes, some targets ignored",
        "mean",
        5,
        weighted=True,
    ),
    _cross_entropy(
        "cross_entropy_outside",
        "mean cross entropy, a target of which is no class",
        "mean",
        5,
        fields={
            "forbidden": "a target that is neither a class nor ignore_index raises an error",
            "device": "cpu",  # on a GPU an assertion in the kernel ends the process
        },
        outside=True,
    ),
    *(_LINEAR_CROSS_ENTROPIES if has("nn/modules/linear_cross_entropy_options.py") else ()),
    _rows_of_a_table("embedding", "rows of a table by ids", "Lookup", "embedding_backward"),
    _rows_of_a_table("indexed", "rows of a table by a subscript", "Indexed", "index_put"),
    *(
        operator_model(
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
    operator_model(
        "topk",
        "the largest numbers of each row",
        "Chosen",
        lambda spec: (spec.k, min(spec.n, spec.k)),
        "topk",
        values=("equal", "outlier"),
        columns="choices",
    ),
    operator_model(
        "sort",
        "each row in its order",
        "Chosen",
        lambda spec: (spec.k, 0),
        "sort",
        values=("equal", "outlier"),
    ),
    *(
        operator_model(
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
    operator_model(
        "softcap",
        "a cap on logits, by tanh",
        "Capped",
        lambda spec: (spec.k,),
        "tanh",
        "tanh_backward",
        values=_OF_ACTIVATIONS,
        relations=of_gradients("weight", scaled=False),
    ),
    operator_model(
        "z_loss",
        "the mean square of rows' logsumexp",
        "ZLoss",
        lambda spec: (spec.k,),
        "logsumexp",
        "mean",
        values=("outlier", "outlier_rows"),
        relations=of_gradients("weight", scaled=False),
    ),
    operator_model(
        MANY,
        "activations, softmaxes and norms in one graph, each on its share of the features",
        "ManyOperators",
        lambda spec: (spec.k,),
        *(
            f"{name}{direction}"
            for name in ("gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "layer_norm")
            for direction in ("", "_backward")
        ),
        *("rms_norm", "fused_rms_norm", "fused_rms_norm_backward"),
        *("mean", "pow", "vector_norm"),
        values=_OF_ACTIVATIONS,
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
    _flex("flex_attention", "FlexAttention without a mask", ""),
    _flex("flex_causal", "causal FlexAttention", "causal"),
    _flex("flex_documents", "FlexAttention inside of documents", "documents"),
    _flex("flex_grouped", "causal FlexAttention with shared keys and values", "causal", 2),
    *STEPS,
    *(
        operator_model(
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
        operator_model(
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
    *LOW_BIT,
    *QUANTISED,
    *TE_EXPERTS,
    *MUONS,
)


def models_of_operators(globs: Iterable[str]) -> tuple[str, ...]:
    """Names of the models of one operator that run an operator which matches one of the globs.
    Raises ValueError for a glob that matches none."""
    alone = [model for model in OPERATORS if model.name != MANY]
    known = sorted({name for model in alone for name in model.operators or ()})
    meant: set[str] = set()
    for glob in globs:
        if not (hits := fnmatch.filter(known, glob)):
            raise ValueError(f"no operator {glob!r} is run alone; these are: {', '.join(known)}")
        meant.update(hits)
    return tuple(model.name for model in alone if meant & (model.operators or frozenset()))
