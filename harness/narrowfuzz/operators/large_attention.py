"""Attention with too many scores to judge all: some queries and some keys of every head are
judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.operators.operator import Expected
from narrowfuzz.operators.sampled import Judging, judge_sampled, sample_places
from narrowfuzz.trace.trace import OperatorCall

#: The largest number of scores of a call that is judged whole, in float64; the number of scores
#: that are judged of a larger call; and the largest number of scores that one query, or one key, of
#: all heads may have.
_WHOLE, _SAMPLED, _MOST = 2**20, 2**18, 2**22
#: The dimension of the queries, and of the keys, in every tensor that has one entry for each.
_QUERIES = dict.fromkeys(
    ("query", "out", "grad_out", "output", "logsumexp", "grad_query", "mask"), 2
)
_KEYS = dict.fromkeys(("key", "value", "grad_key", "grad_value"), 2)


def some_of(judging: Judging, call: OperatorCall) -> dict[str, Expected]:
    """What ``judging`` expects of a call; for a large one only of some queries, and of the
    gradients of some keys and values. Raises Unjudged if even one query, or one key, of all heads
    has too many scores."""
    batch, heads, rows, _ = call.tensors["query"].shape
    columns = call.tensors["key"].shape[2]
    if batch * heads * rows * columns <= _WHOLE:
        return dict(judging(call))
    if batch * heads * max(rows, columns) > _MOST:
        raise Unjudged("attention of so many scores takes longer to judge than to compute")
    mask = _mask(call)
    if mask is not None:  # the mask then has a row for each query
        written_out = "mask" not in call.tensors
        settings = {**call.settings, "causal": False, "written_out": written_out}
        call = replace(call, tensors={**call.tensors, "mask": mask}, settings=settings)
    queries = sample_places(rows, _SAMPLED // (batch * heads * columns))
    keys = sample_places(columns, _SAMPLED // (batch * heads * rows))
    return {
        **judge_sampled(judging, call, _QUERIES, queries),
        **judge_sampled(judging, call, _KEYS | {"mask": 3}, keys),
    }


def _mask(call: OperatorCall) -> Any:
    """The numbers that are added to the scores, including the causal mask, [batch or 1, heads or 1,
    rows, columns]; None if nothing is added."""
    rows, columns = call.tensors["query"].shape[2], call.tensors["key"].shape[2]
    mask = call.tensors.get("mask")
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = np.broadcast_to(mask, (*mask.shape[:2], rows, columns))
    if call.settings["causal"]:
        ahead = np.triu(np.full((1, 1, rows, columns), -np.inf, np.float32), 1)
        mask = ahead if mask is None else mask + ahead
    return mask
