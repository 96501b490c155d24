"""Models of TransformerEngine's router and its movement of tokens to experts and back, which run in
a process that has TransformerEngine, or its Python on the emulated extension."""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowfuzz.models.model import Arguments, Model
from narrowfuzz.models.single_operator import operator_model

#: Largest numbers of experts, of which each pair is compared, and of rows; and both where Triton's
#: interpreter moves them, which takes milliseconds for each.
_MOST, _INTERPRETED = (64, 2**10), (8, 24)


def _routed(spec: Any, *, topk: int, moves: str, how: dict[str, Any]) -> Arguments:
    groups = how["num_groups"] or 1
    least = topk * groups // (how["group_topk"] or 1)  # each group has as many as are chosen of it
    most, rows = _MOST if moves.startswith("index") else _INTERPRETED
    experts = max(least, min(spec.n, most) // groups * groups)
    return spec.k, experts, topk, moves, rows, how


def _how(score_function: str, *, early: bool, groups: int, factor: float | None) -> dict[str, Any]:
    """Options of the router. Half of the ``groups`` of experts are used."""
    return {
        "use_pre_softmax": early,
        "num_groups": groups or None,
        "group_topk": groups // 2 or None,
        "scaling_factor": factor,
        "score_function": score_function,
    }


_SOFTMAX = _how("softmax", early=True, groups=0, factor=None)
_CHOSEN = _how("softmax", early=False, groups=0, factor=1.5)
_SIGMOID = _how("sigmoid", early=False, groups=4, factor=2.5)
_MANY = _how("sigmoid", early=False, groups=0, factor=1.5)
_ROOT = _how("sqrtsoftplus", early=False, groups=0, factor=None)
_ROUTER = ("te_router", "te_scores", "te_aux_loss")
_INDEX = tuple(
    f"te_{kernel}_index_map{direction}"
    for kernel, direction in (
        ("permute", ""),
        ("permute", "_bwd"),
        ("unpermute", "_fwd"),
        ("unpermute", "_bwd"),
    )
)
_MASK = ("te_permute_mask_map_fwd", "te_permute_mask_map_bwd", "te_unpermute_mask_map_fwd")
_WEIGHTED, _PLAIN = (f"te_unpermute_mask_map_bwd_{how}_probs" for how in ("with", "no"))

#: Model -> its title, the number of experts for each token, how rows move, the router's options.
_VARIANTS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "softmax": ("softmax of all experts", 2, "index", _SOFTMAX),
    "chosen": ("softmax of the chosen experts", 4, "index", _CHOSEN),
    "groups": ("sigmoid, with a bias and groups", 4, "index", _SIGMOID),
    "one": ("square root of softplus, one expert a token", 1, "index", _ROOT),
    "radix": ("sigmoid, so many experts a token that radix selects them", 17, "index", _MANY),
    "dropping": ("square root of softplus, tokens are dropped", 3, "index_dropping", _ROOT),
    "mask": ("by a mask, weighted when added up", 2, "mask", _SOFTMAX),
    "mask_groups": ("by a mask, weights move along", 4, "mask_with_probs", _SIGMOID),
    "padded": ("by a mask, padded for each expert", 2, "padded", _CHOSEN),
}
#: How rows move -> the operators that move them.
_MOVES = {
    "index": _INDEX,
    "index_dropping": _INDEX,
    "mask": (*_MASK, _WEIGHTED),
    "mask_with_probs": (*_MASK, _PLAIN),
    "padded": (*_MASK, _PLAIN),
}

TE_EXPERTS: tuple[Model, ...] = tuple(
    operator_model(
        f"te_experts_{name}",
        f"TransformerEngine's router of experts and movement of tokens, {title}",
        "TeExperts",
        partial(_routed, topk=topk, moves=moves, how=how),
        *_ROUTER,
        *_MOVES[moves],
        values=("equal", "outlier_rows", "heavy_tail"),
        columns="experts",
        package="transformer_engine",
        compiled=False,
        interpreted=not moves.startswith("index"),
        fixed={"threads": 1},
    )
    for name, (title, topk, moves, how) in _VARIANTS.items()
)
