"""TransformerEngine's kernels that move tokens to experts and back, each judged separately
(TransformerEngine 2.20, ``pytorch/permutation.py``).

By an index map, which names each token's experts, CUDA kernels move rows and compute in their
dtype: weights, products and sums are each rounded to it (``common/permutation/permutation.cu``,
``TCompute``). By a mask of [tokens, experts], Triton's do, which compute in fp32
(``common/triton/permutation.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, UNIT, Expected, Operator, Read
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.trace.trace import OperatorCall

Places = NDArray[np.int64]
#: The place of a choice that is dropped.
_NONE = -1
#: Calls with more numbers than this take longer to judge than to move.
_MOST = 2**22
_LARGEST = 2.0**100


def _read(
    tensors: Mapping[str, Any], outputs: Mapping[str, Any], how: Mapping[str, Any] = {}
) -> Read | None:
    """The call, without the tensors and results that it does not have."""
    have = {name: t for name, t in tensors.items() if t is not None and t.numel()}
    given = {name: t for name, t in outputs.items() if t.numel()}
    if not given or len(have) < 2:
        return None
    if any(t.is_floating_point() and t.dtype.itemsize == 1 for t in have.values()):
        raise Unjudged("rows that are quantised")
    if max(t.numel() for t in (*have.values(), *given.values())) > _MOST:
        raise Unjudged("more than 2^22 numbers take longer to judge than to move")
    floats, results = (
        {name: t if t.is_floating_point() else t.float() for name, t in some.items()}
        for some in (have, given)
    )
    return Read(floats, results, dict(how))


def _read_permute_index(named: Mapping[str, Any], result: Any) -> Read | None:
    output, places = result
    if bool((named["index"] < 0).any()):
        raise Unjudged("choices that send their token nowhere")
    how = {"rows": len(output)}
    given = {"input": named["inp"], "index": named["index"]}
    return _read(given, {"output": output, "places": places}, how)


def _read_permute_index_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    how = {"tokens": named["num_tokens"], "choices": named["topK"]}
    given = {"grad_output": named["grad_permuted_act"], "places": named["row_id_map"]}
    return _read(given, {"grad_input": result}, how)


def _read_unpermute_index(named: Mapping[str, Any], result: Any) -> Read | None:
    how = {"tokens": named["num_tokens"], "choices": named["topK"]}
    given = {"input": named["inp"], "places": named["row_id_map"], "probs": named["probs"]}
    return _read(given, {"output": result}, how)


def _read_unpermute_index_backward(named: Mapping[str, Any], result: Any) -> Read | None:
    if not named["probs"].numel():
        raise Unjudged("without weights")
    tokens, choices = named["probs"].shape
    given = {
        "grad_output": named["unpermuted_act_grad"],
        "input": named["fwd_input"],
        "places": named["row_id_map"],
        "probs": named["probs"],
    }
    how = {"tokens": tokens, "choices": choices}
    return _read(given, dict(zip(("grad_input", "grad_probs"), result, strict=True)), how)


def _read_permute_mask(named: Mapping[str, Any], result: Any) -> Read | None:
    output, _, probs = result
    given = {"input": named["inp"], "mask": named["routing_map"]}
    more = {"probs": named["probs"], "pads": named["pad_offsets"]}
    return _read(given | more, {"output": output, "moved": probs}, {"rows": len(output)})


def _read_mask(
    names: Mapping[str, str], results: tuple[str, ...], named: Mapping[str, Any], result: Any
) -> Read | None:
    """Read a call that is given the map of a mask; ``names`` are our names of its tensors."""
    tokens, experts = named["num_tokens"], named["num_experts"]
    how = {"tokens": tokens, "choices": experts, "columns": named["hidden_size"]}
    how |= {"rows": named["num_permuted_tokens"]} if "num_permuted_tokens" in named else {}
    given = {ours: named[theirs] for theirs, ours in names.items()}
    returned = result if isinstance(result, tuple) else (result,)
    return _read(given, dict(zip(results, returned, strict=True)), how)


def _sent(call: OperatorCall) -> tuple[Places, Places, Places]:
    """Which row goes where: tokens, their experts, and the places they go to, by expert and then by
    token; by an index map each choice counts as an expert's."""
    if "mask" in call.tensors:
        experts, tokens = np.nonzero(call.tensors["mask"].T)
        places = np.arange(len(tokens))
        if "pads" in call.tensors:
            places = places + call.tensors["pads"].astype(int)[experts]
        return tokens, experts, places
    index = call.tensors["index"].astype(int)
    order = np.argsort(index.ravel(), kind="stable")
    return order // index.shape[1], order % index.shape[1], np.arange(len(order))


def _permute(call: OperatorCall) -> dict[str, Expected]:
    """Rows as they are. Places that no row goes to are padding with zeros, or unknown. A row whose
    weight moves along and is 0 becomes zeros ("for routing_map padding", ``_permute_kernel``)."""
    tokens, experts, places = _sent(call)
    rows, there = call.settings["rows"], places < call.settings["rows"]
    if "mask" in call.tensors and not there.all():
        # https://github.com/NVIDIA/TransformerEngine/issues/3346: it writes beyond the result
        raise Unjudged("a mask that sends tokens to more rows than the result has")
    x = call.tensors["input"].astype(np.float64)
    at, of = places[there], tokens[there]
    found, unknown = np.zeros((rows, x.shape[1])), np.full(rows, "pads" not in call.tensors)
    found[at], unknown[at] = x[of], False
    results = {}
    if "probs" in call.tensors:
        weights = call.tensors["probs"].astype(np.float64)[of, experts[there]]
        found[at] = np.where(weights[:, None] == 0.0, 0.0, found[at])
        moved = np.zeros(rows)
        moved[at] = weights
        results["moved"] = Expected.between(moved, moved, unknown)
    wide = np.broadcast_to(unknown[:, None], found.shape)
    results["output"] = Expected.between(found, found, wide)
    if "index" in call.tensors:
        where = np.full((call.tensors["index"].shape[1], len(x)), _NONE)
        where[experts[there], of] = at
        results["places"] = Expected.exactly(where.ravel())
    return results


def _placed(call: OperatorCall, rows: int) -> Places:
    """The place of each choice of each token, [choices, tokens]; -1 for one that has none. Raises
    Unjudged if one is outside of the ``rows``."""
    found = _read_places(call)
    if found.size and not (found.min() >= _NONE and found.max() < rows):
        raise Unjudged("tokens at places outside of the rows")
    return found


def _read_places(call: OperatorCall) -> Places:
    choices, tokens = call.settings["choices"], call.settings["tokens"]
    if "places" in call.tensors:
        return call.tensors["places"].astype(int).reshape(choices, tokens)
    held = call.tensors["map"].astype(int)
    found = np.full((choices, tokens), _NONE)
    for choice in range(choices):
        routed = choice < held[:, -1]
        experts, token = held[routed, choices + choice], np.flatnonzero(routed)
        if not ((experts >= 0) & (experts < choices)).all():
            raise Unjudged("a map with experts that do not exist")
        places = held[routed, choice]
        if "pads" in call.tensors:
            places = places + call.tensors["pads"].astype(int)[experts]
        found[experts, token] = places
    return found


def _computed_in(call: OperatorCall) -> tuple[float, float, float]:
    """Of the dtype that a kernel computes in: unit roundoff, the largest error of a product below
    its normal numbers, which may be flushed to zero, and a bound below which nothing overflows."""
    dtype = call.dtypes[next(iter(call.tensors))] if "places" in call.tensors else "fp32"
    unit, subnormal = UNIT[dtype]
    return unit, max(subnormal, FLUSHED), min(FORMATS[dtype].max / 2.0, _LARGEST)


def _combined(given: str, call: OperatorCall) -> tuple[F64, F64, Any]:
    """The sum of each token's rows, times their weights if it has any; the largest error on the
    way; and where nothing is known of it.

    Proof. A weight, a product and each of n - 1 additions err by at most u, relative to the sum of
    magnitudes (Higham, "Accuracy and Stability", 3.3); a weight and a product may also be below the
    normal numbers, and err by as much as these do; a copy does not err.
    """
    x = call.tensors[given].astype(np.float64)
    places = _placed(call, len(x))
    weights = call.tensors.get("probs")
    unit, subnormal, largest = _computed_in(call)
    total, size, lost = (np.zeros((places.shape[1], x.shape[1])) for _ in range(3))
    fits = np.ones((places.shape[1], 1), bool)
    for choice, at in enumerate(places):
        there = (at != _NONE)[:, None]
        rows = np.where(there, x[at], 0.0)
        if weights is not None:
            weight = weights.astype(np.float64)[:, choice, None]
            lost += np.where(there, subnormal * (np.abs(rows) + 1.0), 0.0)
            fits &= (np.abs(weight) < largest) | ~there
            rows = rows * np.where(there, weight, 0.0)
        total, size = total + rows, size + np.abs(rows)
    n = (places != _NONE).sum(0)[:, None]
    errors = (n - 1 + 2 * (weights is not None)).clip(0)
    share = errors * unit
    most = np.where(share < 1.0, (share * size + lost) / (1.0 - share), np.inf)
    radius = np.where(errors > 0, most + FLUSHED, 0.0)
    return total, radius, ~((size < largest) & fits) & (errors > 0)


def _added(given: str, result: str, call: OperatorCall) -> dict[str, Expected]:
    with np.errstate(all="ignore"):
        total, radius, unknown = _combined(given, call)
        fmt = FORMATS[call.dtypes[result]]
        unknown = unknown | ~np.isfinite(total) & (radius > 0.0)
        found = {result: Expected.within(total, radius, fmt, unknown)}
        if "moved" in call.tensors:  # the gradients of weights that moved along
            moved = call.tensors["moved"].astype(np.float64)
            places = _placed(call, len(moved))
            back = np.where(places != _NONE, moved[places], 0.0).T
            found["grad_probs"] = Expected.exactly(back)
    return found


def _spread(call: OperatorCall) -> dict[str, Expected]:
    """Each row's gradient is its token's, times its weight if it has one; each weight's is the sum
    of products of its token's gradient and its row, added in fp32, and 0 if it has no row."""
    dy = call.tensors["grad_output"].astype(np.float64)
    x, probs = call.tensors.get("input"), call.tensors.get("probs")
    count = len(x) if x is not None else call.settings["rows"]
    places = _placed(call, count)
    rows, radius = (np.zeros((count, dy.shape[1])) for _ in range(2))
    unwritten = np.full(count, "pads" not in call.tensors)
    of_weights, off, top = (np.zeros((dy.shape[0], len(places))) for _ in range(3))
    unit, subnormal, largest = _computed_in(call)
    with np.errstate(all="ignore"):
        for choice, place in enumerate(places):
            token = np.flatnonzero(place != _NONE)
            at, grad = place[token], dy[token]
            unwritten[at] = False
            if probs is None or x is None:
                rows[at] = grad
                continue
            weight = probs.astype(np.float64)[token, choice, None]
            rows[at] = grad * weight
            off_weight = np.where(np.abs(weight) < largest, 1.01 * subnormal, np.inf)
            radius[at] = np.abs(rows[at]) * 2.02 * unit + off_weight * (np.abs(grad) + 1.0)
            products = grad * x.astype(np.float64)[at]
            of_weights[token, choice] = products.sum(1)
            count, size = products.shape[1], np.abs(products)
            of_sum = count * U32 / (1.0 - count * U32)
            off[token, choice] = size.sum(1) * (1.01 * unit + of_sum) + 1.01 * count * subnormal
            top[token, choice] = size.max(1)
        unknown = unwritten[:, None] | ~(np.abs(rows) < _LARGEST) & (radius > 0.0)
        fmt = FORMATS[call.dtypes["grad_input"]]
        found = {"grad_input": Expected.within(rows, radius, fmt, unknown)}
        if "grad_probs" in call.outputs:
            fmt = FORMATS[call.dtypes["grad_probs"]]
            overflows = ~((off < _LARGEST) & (top < largest))
            found["grad_probs"] = Expected.within(of_weights, off, fmt, overflows)
    return found


def _title(kernel: str, call: OperatorCall) -> str:
    name, x = next(iter(call.tensors.items()))
    return f"TransformerEngine's {kernel} of a {TORCH_DTYPE[call.dtypes[name]]} {list(x.shape)}"


def _operator(
    kernel: str, words: str, read: Any, expected: Any, given: str, **how: Any
) -> Operator:
    return Operator(
        name=f"te_{kernel}",
        words=words,
        kernels=(f"te_moe::{kernel}",),
        read=read,
        expected=expected,
        expression=f"te_moves({kernel!r}, {given})",
        title=partial(_title, kernel),
        helper="te_moves",
        **how,
    )


_MAP, _SIZES = "map.int()", "{tokens}, {choices}, {columns}"
_PADS = "None if pads is None else pads.long()"
_BACK = "gradients of tokens that were moved"

OPERATORS = (
    _operator(
        "permute_index_map",
        "tokens moved to experts",
        _read_permute_index,
        _permute,
        "input, index.int(), {rows}, -1",
        results=("output", "places"),
    ),
    _operator(
        "permute_index_map_bwd",
        _BACK,
        _read_permute_index_backward,
        partial(_added, "grad_output", "grad_input"),
        "grad_output, places.int(), {tokens}, {choices}",
        results=("grad_input",),
    ),
    _operator(
        "unpermute_index_map_fwd",
        "tokens moved back from experts",
        _read_unpermute_index,
        partial(_added, "input", "output"),
        "input, places.int(), torch.empty(0) if probs is None else probs, {tokens}, {choices}",
        optional=("probs",),
    ),
    _operator(
        "unpermute_index_map_bwd",
        "gradients of tokens that were moved back",
        _read_unpermute_index_backward,
        _spread,
        "grad_output, input, places.int(), probs",
        results=("grad_input", "grad_probs"),
    ),
    _operator(
        "permute_mask_map_fwd",
        "tokens moved to experts by a mask",
        _read_permute_mask,
        _permute,
        f"input, mask.int(), {{rows}}, probs, {_PADS}",
        results=("output", "map", "moved"),
        optional=("probs", "pads"),
    ),
    _operator(
        "permute_mask_map_bwd",
        f"{_BACK} by a mask",
        partial(
            _read_mask,
            {
                "permuted_act_grad": "grad_output",
                "permuted_probs_grad": "moved",
                "row_id_map": "map",
                "pad_offsets": "pads",
            },
            ("grad_input", "grad_probs"),
        ),
        partial(_added, "grad_output", "grad_input"),
        f"grad_output, moved, {_MAP}, {_PADS}, {_SIZES}",
        results=("grad_input", "grad_probs"),
        optional=("moved", "pads"),
    ),
    _operator(
        "unpermute_mask_map_fwd",
        "tokens moved back from experts by a mask",
        partial(
            _read_mask,
            {"inp": "input", "row_id_map": "map", "merging_probs": "probs", "pad_offsets": "pads"},
            ("output",),
        ),
        partial(_added, "input", "output"),
        f"input, {_MAP}, probs, {_SIZES}, {_PADS}",
        optional=("probs", "pads"),
    ),
    _operator(
        "unpermute_mask_map_bwd_with_probs",
        "gradients of tokens that were moved back by a mask",
        partial(
            _read_mask,
            {
                "unpermuted_act_grad": "grad_output",
                "row_id_map": "map",
                "fwd_input": "input",
                "merging_probs": "probs",
                "pad_offsets": "pads",
            },
            ("grad_input", "grad_probs"),
        ),
        _spread,
        f"grad_output, {_MAP}, input, probs, {_PADS}, {{tokens}}, {{choices}}, {{rows}}, "
        "{columns}",
        results=("grad_input", "grad_probs"),
        optional=("pads",),
    ),
    _operator(
        "unpermute_mask_map_bwd_no_probs",
        "gradients of tokens that were moved back by a mask, unweighted",
        partial(
            _read_mask,
            {"unpermuted_act_grad": "grad_output", "row_id_map": "map", "pad_offsets": "pads"},
            ("grad_input",),
        ),
        _spread,
        f"grad_output, {_MAP}, {_PADS}, {{tokens}}, {{choices}}, {{rows}}, {{columns}}",
        results=("grad_input",),
        optional=("pads",),
    ),
)
