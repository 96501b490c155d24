"""Sums at places that are given by ids: ``torch.index_add``, ``torch.scatter_add`` and the backward
of ``weight[ids]``. Gradients of looked-up rows and outputs of experts are computed this way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import F32, F64, FORMATS, FP32, Format
from narrowfuzz.operators.operator import (
    TORCH_DTYPE,
    UNIT,
    Deviation,
    Expected,
    Operator,
    Read,
    narrow,
)
from narrowfuzz.operators.sum import FLUSHED, rounded, unit_of
from narrowfuzz.trace.trace import OperatorCall

Places = NDArray[np.int64]
#: Larger problems take longer to judge than to add; below this number of places, ids are exact in
#: fp32.
_MOST = 2**20


def sums_at(
    base: F64,
    terms: F64,
    places: Places,
    fmt: Format,
    unit: float = U32,
    flushed: float = 0.0,
) -> Expected:
    """``base`` plus, at each place, the sum of the terms that go there; ``places`` are indices into
    the flattened ``base``. Each addition is rounded by at most ``unit`` (relative), and may flush a
    term and its sum to zero where they are below ``flushed``; the result is rounded once to
    ``fmt``.

    Proof. n rounded additions in any order err by at most gamma_n of the sum of magnitudes (Higham,
    "Accuracy and Stability", 4.2), and by nothing where all terms are multiples of one power of two
    and their magnitudes add up to at most 1 / unit times it; adding to 0 does not count as an
    addition.
    """
    start, terms, places = base.ravel(), terms.ravel(), places.ravel()
    with np.errstate(all="ignore"):
        centre = start + np.bincount(places, terms, start.size)
        size = np.abs(start) + np.bincount(places, np.abs(terms), start.size)
        least = unit_of(start)
        np.minimum.at(least, places, unit_of(terms))
        additions = np.bincount(places, minlength=start.size) - (start == 0.0)
        share = np.maximum(additions, 1) * unit
        factor = np.where(share < 1.0, share / (1.0 - share), np.inf)
        exact = (size <= least / unit) & (least >= FLUSHED)
        radius = np.where(exact, 0.0, factor * size + 2.0 * additions * flushed + FLUSHED)
    largest = FP32.max if unit == U32 else fmt.max
    shape, unknown = base.shape, ~(size < largest * 0.5)
    return Expected.within(
        centre.reshape(shape), radius.reshape(shape), fmt, unknown.reshape(shape)
    )


def _limited(base: Any, source: Any, ids: Any) -> None:
    if max(base.numel(), source.numel()) > _MOST:
        raise Unjudged(f"more than {_MOST} numbers take longer to judge than to add")
    if not ids.numel() or not base.numel():
        raise Unjudged("nothing is added")


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    """Read a call of ``index_add`` or ``scatter_add``."""
    base, ids = named["self"], named["index"]
    source = named["source"] if "source" in named else named["src"]
    _limited(base, source, ids)
    if named.get("alpha", 1) != 1 or not base.ndim or ("source" in named and not ids.ndim):
        raise Unjudged("a factor other than 1, or a tensor or an index without dimensions")
    tensors = {"input": base, "index": ids.float(), "source": source}
    return Read(tensors, {"output": result}, {"dim": named["dim"] % base.ndim})


def _read_put(named: Mapping[str, Any], result: Any) -> Read | None:
    """Read a call of ``index_put``; None unless it accumulates."""
    if not named.get("accumulate"):
        return None
    base, given = named["self"], list(named["indices"])
    tensors = [(dim, ids) for dim, ids in enumerate(given) if ids is not None]
    if len(tensors) != 1 or tensors[0][1].dtype.itemsize < 4:
        raise Unjudged("indices in several dimensions, or a mask")
    dim, ids = tensors[0]
    _limited(base, named["values"], ids)
    settings = {"dim": dim, "before": [None] * dim}
    tensors_of = {"input": base, "index": ids.float(), "source": named["values"]}
    return Read(tensors_of, {"output": result}, settings)


def _numbered(call: OperatorCall) -> tuple[Places, Places, int]:
    """The index of each place of the flattened result, in the shape of the result; the ids; and the
    dimension that they index."""
    shape = call.tensors["input"].shape
    ids = call.tensors["index"].astype(np.int64)
    return np.arange(int(np.prod(shape))).reshape(shape), ids, call.settings["dim"]


def _taken(call: OperatorCall) -> tuple[F64, Places]:
    """The terms of ``index_add`` and of ``index_put``, and the place of each."""
    every, ids, dim = _numbered(call)
    places = np.take(every, ids, axis=dim)
    source = np.broadcast_to(call.tensors["source"].astype(np.float64), places.shape)
    return source, places


def _scattered(call: OperatorCall) -> tuple[F64, Places]:
    """The terms of ``scatter_add``, whose ids name a place for each term, and the place of each."""
    every, ids, dim = _numbered(call)
    ids, source = np.atleast_1d(ids), np.atleast_1d(call.tensors["source"].astype(np.float64))
    at: list[Places] = list(np.indices(ids.shape, sparse=True))
    at[dim] = ids
    return source[tuple(slice(n) for n in ids.shape)], every[tuple(at)]


def _unit(call: OperatorCall) -> float:
    """Unit roundoff of an addition: a CPU adds in fp32; a GPU's atomic additions round each sum to
    the dtype."""
    return UNIT[call.dtypes["output"]][0] if call.device == "cuda" else U32


def _expected(terms: Any, call: OperatorCall) -> dict[str, Expected]:
    """A GPU's atomic additions of fp32 treat subnormal terms and sums as zero (PTX ISA, ``red``:
    "flushes subnormal inputs and results to sign-preserving zero")."""
    base, fmt = call.tensors["input"].astype(np.float64), FORMATS[call.dtypes["output"]]
    source, places = terms(call)
    flushed = FLUSHED if call.device == "cuda" else 0.0
    return {"output": sums_at(base, source, places, fmt, _unit(call), flushed)}


def _narrow_sums(call: OperatorCall) -> dict[str, Expected]:
    """The result of torch's CPU kernels that add bf16 and fp16 terms one by one and round each sum:
    ``index_put`` always, ``index_add`` into a tensor of one dimension, along a dimension that is
    neither the first nor the last, or by int32 ids."""
    dtype = call.dtypes["output"]
    if dtype == "fp32":
        return {}
    _, ids, dim = _numbered(call)
    got = call.outputs["output"]
    first, *others = permutations(range(dim, dim + ids.ndim))
    total = _one_by_one(call, first)
    for order in others:
        if np.array_equal(total, got, equal_nan=True):
            break
        total = _one_by_one(call, order)
    return {"output": Expected.exactly(total)}


def _one_by_one(call: OperatorCall, order: tuple[int, ...]) -> F32:
    """The sums, added one by one with the ids' dimensions traversed in this ``order``, which
    follows from the memory layout of the values."""
    terms, places = _taken(call)
    rows = (*order, *(dim for dim in range(terms.ndim) if dim not in order))
    count = int(np.prod([terms.shape[dim] for dim in order]))
    total = call.tensors["input"].astype(np.float32).ravel().copy()
    slices = places.transpose(rows).reshape(count, -1)
    added = terms.astype(np.float32).transpose(rows).reshape(count, -1)
    with np.errstate(all="ignore"):
        for at, row in zip(slices, added, strict=True):
            total[at] = rounded(total[at] + row, call.dtypes["output"])
    return np.asarray(total.reshape(call.tensors["input"].shape))


def _title(name: str, call: OperatorCall) -> str:
    base, source = (list(call.tensors[n].shape) for n in ("input", "source"))
    dtype = TORCH_DTYPE[call.dtypes["output"]]
    return f"{name} of {source} into a {dtype} tensor of {base} over dim {call.settings['dim']}"


def _may_add_narrow(given: Sequence[Any], made: Sequence[Any]) -> bool:
    """May ``index_add`` of these tensors add them up one by one, in 16 bits? Where the dimension
    does not follow from their shapes, every one that fits counts."""
    if not narrow(given, made):
        return False
    base, ids, source = given[:3]
    to, of = tuple(base.shape), tuple(source.shape)
    inner = any(of == (*to[:dim], ids.numel(), *to[dim + 1 :]) for dim in range(1, base.ndim - 1))
    return inner or base.ndim < 2 or ids.element_size() < 8


def _narrow(name: str, may_affect: Any = narrow) -> Deviation:
    words = f"what {name} adds up in bf16 and fp16 is rounded after each addition"
    return Deviation(f"{name}_narrow_sums", words, ("cpu",), _narrow_sums, may_affect)


def _operator(name: str, expression: str, read: Any, **how: Any) -> Iterator[Operator]:
    """The operators of the kernel that returns a new tensor and of the one that adds in place."""
    of_both: dict[str, Any] = {"unordered": lambda call: call.device == "cuda", **how}
    yield Operator(
        name=name,
        words=name,
        kernels=(f"aten::{name}",),
        read=read,
        expression=expression,
        title=partial(_title, f"torch.{name}"),
        **of_both,
    )
    yield Operator(
        name=f"{name}_",
        words=f"{name}_",
        kernels=(f"aten::{name}_",),
        overwrites=("self",),
        read=lambda named, result: read(named, result["self"]),
        expression=expression.replace(f"{name}(", f"{name}_("),
        title=partial(_title, f"torch.Tensor.{name}_"),
        **of_both,
    )


OPERATORS = (
    *_operator(
        "index_add",
        "input.index_add({dim}, index.long(), source)",
        read=_read,
        expected=partial(_expected, _taken),
        deviations=(_narrow("index_add", _may_add_narrow),),
    ),
    *_operator(
        "scatter_add",
        "input.scatter_add({dim}, index.long(), source)",
        read=_read,
        expected=partial(_expected, _scattered),
    ),
    next(
        _operator(
            "index_put",
            "torch.ops.aten.index_put(input, [*{before}, index.long()], source, True)",
            read=_read_put,
            expected=partial(_expected, _taken),
            deviations=(_narrow("index_put"),),
            # documented: torch.use_deterministic_algorithms names it
            unordered=lambda call: call.device == "cuda" or call.threads > 1,
        )
    ),
)
