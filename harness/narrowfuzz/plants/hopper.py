"""FP8 multiplies of the simulated Hopper GPU, whose accumulator is not fp32: faults and legal
runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

_ALL = ("torchao.float8.tensorwise", "torchao.float8.rowwise")
_ROWWISE = ("torchao.float8.rowwise",)
_STEP, _TILE = 32, 128


@contextmanager
def _accumulates(change: Callable[..., Any]) -> Iterator[None]:
    """``change(accumulate, a, b, fast, split)`` replaces the simulated accumulator, which returns
    fp32 [M, N] for codes a [M, K] and b [N, K]."""
    from narrowfuzz.machine import simulated

    def make(original: Any) -> Any:
        return lambda a, b, *, fast, split: change(original, a, b, fast, split)

    with attribute_replaced(simulated, "accumulate", make):
        yield


def _without(a: Any, columns: slice) -> Any:
    """The codes with zeros in these columns."""
    import torch

    codes = a.view(torch.uint8).clone()
    codes[:, columns] = 0
    return codes.view(a.dtype)


def _loses(columns: Callable[[int], slice]) -> Any:
    """The products of ``columns(K)`` are never added."""

    def change(accumulate: Any, a: Any, b: Any, fast: bool, split: int) -> Any:
        return accumulate(_without(a, columns(a.shape[1])), b, fast=fast, split=split)

    return lambda: _accumulates(change)


def _parts(accumulate: Any, a: Any, b: Any, fast: bool, split: int) -> list[Any]:
    """The sums of the parts into which K is split, as mmaemu splits it."""
    tiles = -(-a.shape[1] // _TILE)
    length = -(-tiles // split) * _TILE
    found = []
    for start in range(0, a.shape[1], length):
        before, after = slice(0, start), slice(start + length, None)
        found.append(accumulate(_without(_without(a, before), after), b, fast=fast, split=1))
    return found


def _of_parts(change: Callable[[list[Any]], list[Any]]) -> Any:
    """Where K is split, ``change`` is applied to the list of the parts' sums."""

    def changed(accumulate: Any, a: Any, b: Any, fast: bool, split: int) -> Any:
        if split == 1:
            return accumulate(a, b, fast=fast, split=split)
        return sum(change(_parts(accumulate, a, b, fast, split)))

    return lambda: _accumulates(changed)


def _narrow(parts: list[Any]) -> list[Any]:
    return [part.bfloat16().float() for part in parts]


def _never_promotes(accumulate: Any, a: Any, b: Any, fast: bool, split: int) -> Any:
    return accumulate(a, b, fast=True, split=split)


def _by_plan(a: Any, b: Any, fast: bool, split: int, preset: Any, chain: Any) -> Any:
    """mmaemu's GEMM with another accumulator: ``chain`` adds up one run of products."""
    import torch
    from mmaemu.formats import fmt_of
    from mmaemu.model.plan import execute_plan, make_plan

    plan = make_plan(a.shape[1], fast=fast, S=split, scheme="contiguous", preset=preset)
    codes = (a.view(torch.uint8), b.view(torch.uint8))
    formats = {"fmt_a": fmt_of(a.dtype), "fmt_b": fmt_of(b.dtype)}
    return execute_plan(plan, *codes, **formats, chain_fn=partial(chain, preset=preset, **formats))


def _of_preset(**changes: Any) -> Any:
    """Hopper's accumulator with some numbers of its preset changed."""

    def change(accumulate: Any, a: Any, b: Any, fast: bool, split: int) -> Any:
        from mmaemu.model.chain import chain_gemm
        from mmaemu.model.presets import HOPPER

        preset = replace(HOPPER, maturity="custom", **changes)
        return _by_plan(a, b, fast, split, preset, chain_gemm)

    return lambda: _accumulates(change)


def _to_nearest(accumulate: Any, a: Any, b: Any, fast: bool, split: int) -> Any:
    from mmaemu.model.presets import HOPPER

    return _by_plan(a, b, fast, split, HOPPER, _rounding_chain)


def _rounding_chain(a: Any, b: Any, *, preset: Any, fmt_a: str, fmt_b: str) -> Any:
    """A run of products whose terms are aligned by rounding to nearest; sums are still
    truncated."""
    import torch
    from mmaemu.formats import DTYPE_OF

    x, y = (t.view(DTYPE_OF[f]).double() for t, f in ((a, fmt_a), (b, fmt_b)))
    total = torch.zeros(len(x), len(y), dtype=torch.float64)
    for start in range(0, x.shape[1], _STEP):
        some = slice(start, start + _STEP)
        terms = torch.cat([x[:, None, some] * y[None, :, some], total[..., None]], dim=2)
        top = torch.frexp(terms.abs().amax(2))[1] - 1
        unit = torch.ldexp(torch.ones_like(total), top - preset.frac)
        total = torch.round(terms / unit[..., None]).sum(2) * unit
        significand, exponent = torch.frexp(total)
        cut = torch.trunc(torch.ldexp(significand, torch.tensor(preset.frac_out + 1)))
        total = torch.ldexp(cut, exponent - preset.frac_out - 1)
    return total.float()


@contextmanager
def _exchanged_scales() -> Iterator[None]:
    from narrowfuzz.machine import simulated

    def make(original: Any) -> Any:
        def scaled(total: Any, scale_a: Any, scale_b: Any) -> Any:
            if scale_a.numel() > 1:
                scale_a = scale_a.clone()
                scale_a[[0, 1]] = scale_a[[1, 0]]
            return original(total, scale_a, scale_b)

        return scaled

    with attribute_replaced(simulated, "scaled", make):
        yield


def _hopper(
    name: str,
    family: str,
    title: str,
    source: str,
    plant: Any = nullcontext,
    recipes: tuple[str, ...] = _ALL,
    **more: Any,
) -> Plant:
    return Plant(
        f"hopper-{name}",
        family,
        title,
        source,
        recipes,
        plant,
        device="simulated",
        wild_shapes=False,
        **more,
    )


_legal = partial(_hopper, legal=True, models=("linear",), arms=("eager*",))

_PROMOTION = "https://github.com/deepseek-ai/DeepSeek-V3/issues/197"
_MODEL = "https://arxiv.org/abs/2512.07004"
_SPLIT = "https://github.com/pytorch/pytorch/issues/83863"
_PLANNED = "docs/rules.md, accumulators: how a multiply adds is part of the plan"

PLANTS = [
    _hopper("product-lost", "tile tail", "the last product of K is never added",
            "https://github.com/pytorch/pytorch/issues/193633", _loses(lambda k: slice(k - 1, k))),
    _hopper("step-lost", "tile tail", "the last step of 32 products is never added",
            "https://github.com/pytorch/pytorch/issues/193633",
            _loses(lambda k: slice((k - 1) // _STEP * _STEP, k))),
    _hopper("part-dropped", "accumulator", "of a split K the last part is never added", _SPLIT,
            _of_parts(lambda parts: parts[:-1])),
    _hopper("part-twice", "accumulator", "of a split K the last part is added twice", _SPLIT,
            _of_parts(lambda parts: [*parts, parts[-1]])),
    _hopper("scales-exchanged", "scale", "two rows have each other's scale",
            "https://github.com/pytorch/ao/pull/4229", _exchanged_scales, _ROWWISE),
    _hopper("never-promotes", "accumulator", "slow accumulation behaves as the fast one",
            _PROMOTION, lambda: _accumulates(_never_promotes)),
    _hopper("promotes-early", "accumulator", "sums are promoted every 64 products", _PROMOTION,
            _of_preset(slow_chunk=64)),
    _hopper("bit-less", "accumulator", "12 fraction bits in place of 13", _MODEL,
            _of_preset(frac=12, frac_out=12)),
    _hopper("aligns-to-nearest", "accumulator", "aligned products are rounded, not cut", _MODEL,
            lambda: _accumulates(_to_nearest)),
    _hopper("parts-in-bf16", "accumulator", "of a split K the parts' sums are kept in bf16", _SPLIT,
            _of_parts(_narrow)),
    _legal("tensorwise", "as it is", "one scale a tensor, fast and slow accumulation, K split",
           _PLANNED, recipes=("torchao.float8.tensorwise",)),
    _legal("rowwise", "as it is", "one scale a row", _PLANNED,
           recipes=("torchao.float8.rowwise", "torchao.float8.rowwise_gw_hp")),
]  # fmt: skip
