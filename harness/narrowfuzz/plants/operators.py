"""Faults inside operators of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from narrowfuzz.models.operators import models_of_operators
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant

#: The dispatch keys of functions that torch composes from several kernels.
COMPOSED = ("CPU", "AutogradCPU")


def of_operator(
    id: str,
    family: str,
    title: str,
    source: str,
    plant: Callable[[], AbstractContextManager[object]],
    operator: str,
    needs: str = "an operator",
) -> Plant:
    """A fault of an operator. It is searched for only in models of this operator, like those of
    ``run --operator NAME``."""
    models = models_of_operators([operator])
    return Plant(id, family, title, source, ("torch.*",), plant, needs=needs, models=models)


@contextmanager
def kernel_replaced(
    name: str, make: Callable[[Any], Any], keys: tuple[str, ...] = ("CPU",)
) -> Iterator[None]:
    """``make(run)`` replaces the CPU kernel of this name; ``run`` is torch's own.

    It is registered with the dispatcher, so that eager runs, autograd and dispatch modes all use
    it. A function that torch composes from several kernels must stay differentiable, so it needs
    the keys ``COMPOSED``. Only fp32, bf16 and fp16 inputs reach it; reference runs are in float64
    and use torch's own.
    """
    import torch

    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        return kernel.call_boxed(cpu, *args, **kwargs)

    wrong = make(run)

    def narrow(x: Any, *args: Any, **kwargs: Any) -> Any:
        first = x[0] if isinstance(x, (list, tuple)) else x
        ours = first.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return (wrong if ours else run)(x, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    for key in keys:
        library.impl(name, narrow, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _sum(change: Any) -> AbstractContextManager[None]:
    """``change(run, x, dims, keepdim, dtype)`` replaces the CPU's sum over dimensions."""

    def make(run: Any) -> Any:
        def total(x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
            return (
                change(run, x, dims, keepdim, dtype) if dims else run(x, dims, keepdim, dtype=dtype)
            )

        return total

    return kernel_replaced("sum.dim_IntList", make)


def _narrow(run: Any, x: Any, dims: Any, keepdim: bool, dtype: Any) -> Any:
    """A pairwise sum over the first of ``dims`` whose partial sums are rounded to bf16."""
    import torch

    dim = dims[0] % x.ndim
    part = x.to(torch.bfloat16).movedim(dim, 0)
    while len(part) > 1:
        half = len(part) // 2
        part = torch.cat([part[:half] + part[half : 2 * half], part[2 * half :]])
    return run(part.movedim(0, dim).to(x.dtype), dims, keepdim, dtype=dtype)


def _last_row(run: Any, x: Any, dims: Any, keepdim: bool, dtype: Any) -> Any:
    """The last row is left out of more than 16 rows whose number is no multiple of 16."""
    dim = dims[0] % x.ndim
    rows = x.shape[dim]
    kept = rows - 1 if rows > 16 and rows % 16 else rows
    return run(x.narrow(dim, 0, kept), dims, keepdim, dtype=dtype)


def _padded_mean(run: Any) -> Any:
    """A mean over the last dimension divides by its length rounded up to a multiple of 16."""

    def mean(x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        right = run(x, dims, keepdim, dtype=dtype)
        if dtype is not None or not dims or [d % x.ndim for d in dims] != [x.ndim - 1]:
            return right
        return right * (x.shape[-1] / (-(-x.shape[-1] // 16) * 16))

    return mean


def _norm_drops_rows(run: Any) -> Any:
    """Rows after the last full block of eight are left out of the parameters' gradients."""

    def backward(
        dy: Any, x: Any, shape: Any, mean: Any, rstd: Any, w: Any, b: Any, mask: Any
    ) -> Any:
        found = run(dy, x, shape, mean, rstd, w, b, mask)
        rows = mean.numel()
        kept = rows - rows % 8
        if rows < 16 or kept == rows:
            return found
        cut = (t.reshape(rows, -1)[:kept] for t in (dy, x))
        flat = [math.prod(shape)]
        stats = (t.reshape(rows, 1)[:kept] for t in (mean, rstd))
        weight, bias = (None if p is None else p.reshape(flat) for p in (w, b))
        _, *of_parameters = run(*cut, flat, *stats, weight, bias, [False, *mask[1:]])
        return found[0], *(None if g is None else g.reshape(shape) for g in of_parameters)

    return backward


def _norm_counts_padding(run: Any) -> Any:
    """Rows are padded with zeros to a power of two, and the padding adds to the variance around the
    mean of the unpadded row."""
    import torch

    def forward(x: Any, shape: Any, w: Any, b: Any, eps: float) -> Any:
        output, mean, rstd = run(x, shape, w, b, eps)
        n = math.prod(shape)
        padding = (1 << (n - 1).bit_length()) - n if n > 1 else 0
        if not padding or not x.numel():
            return output, mean, rstd
        rows = x.reshape(-1, n).float()
        centre = rows.mean(1, keepdim=True)
        off = (rows - centre).square().sum(1, keepdim=True) + padding * centre.square()
        scale = torch.rsqrt(off / n + eps)
        one = torch.ones(n) if w is None else w.reshape(n).float()
        y = (rows - centre) * scale * one + (0.0 if b is None else b.reshape(n).float())
        return y.to(x.dtype).reshape(x.shape), mean, scale.to(rstd.dtype).reshape(rstd.shape)

    return forward


def _embedding_loses_repeats(run: Any) -> Any:
    """The gradient of an id that is looked up more than once lacks the last of its rows."""
    import torch

    def backward(dy: Any, indices: Any, *args: Any) -> Any:
        ids = indices.reshape(-1)
        later = torch.triu(ids[:, None] == ids[None, :], 1).any(1)
        earlier = torch.tril(ids[:, None] == ids[None, :], -1).any(1)
        kept = (later | ~earlier).reshape(indices.shape)
        return run(dy * kept[..., None], indices, *args)

    return backward


def _norm_bias_narrow(run: Any) -> Any:
    """The gradient of the bias of an fp32 layer norm is summed in fp16."""
    import torch

    def backward(
        dy: Any, x: Any, shape: Any, mean: Any, rstd: Any, w: Any, b: Any, mask: Any
    ) -> Any:
        grads = list(run(dy, x, shape, mean, rstd, w, b, mask))
        if grads[2] is not None and x.dtype == torch.float32 and mean.numel():
            rows = dy.reshape(mean.numel(), -1).to(torch.float16)
            grads[2] = rows.cumsum(0)[-1].to(grads[2].dtype).reshape(grads[2].shape)
        return tuple(grads)

    return backward


def _norm_epsilon_outside(run: Any) -> Any:
    """sqrt(eps) is added to the standard deviation, instead of eps to the variance."""
    import torch

    def forward(x: Any, shape: Any, w: Any, b: Any, eps: float) -> Any:
        output, mean, rstd = run(x, shape, w, b, eps)
        n = math.prod(shape)
        if not x.numel():
            return output, mean, rstd
        rows = x.reshape(-1, n).float()
        off = rows - rows.mean(1, keepdim=True)
        scale = 1.0 / (off.square().mean(1, keepdim=True).sqrt() + math.sqrt(eps))
        one = torch.ones(n) if w is None else w.reshape(n).float()
        y = off * scale * one + (0.0 if b is None else b.reshape(n).float())
        return y.to(x.dtype).reshape(x.shape), mean, scale.to(rstd.dtype).reshape(rstd.shape)

    return forward


def _norm_gradient_uncentred(run: Any) -> Any:
    """The mean of the gradients is not subtracted from the input gradient."""

    def backward(
        dy: Any, x: Any, shape: Any, mean: Any, rstd: Any, w: Any, b: Any, mask: Any
    ) -> Any:
        grads = list(run(dy, x, shape, mean, rstd, w, b, mask))
        if grads[0] is not None and mean.numel():
            g = dy.float() if w is None else dy.float() * w.float()
            rows = g.reshape(mean.numel(), -1)
            extra = rows.mean(1, keepdim=True) * rstd.reshape(-1, 1).float()
            grads[0] = (grads[0].reshape(rows.shape).float() + extra).to(x.dtype).reshape(x.shape)
        return tuple(grads)

    return backward


def _embedding(change: Any) -> Any:
    """``change(run, dy, indices, rows, *args)`` replaces the gradient of an embedding's table of
    ``rows`` rows."""

    def make(run: Any) -> Any:
        return lambda dy, indices, rows, *args: change(run, dy, indices, rows, *args)

    return lambda: kernel_replaced("embedding_dense_backward", make)


def _last_ids_only(run: Any, dy: Any, indices: Any, rows: int, *args: Any) -> Any:
    """Of an id that repeats, only the last row counts, as if rows were written and not added."""
    import torch

    ids = indices.reshape(-1)
    again = torch.triu(ids[:, None] == ids[None, :], 1).any(1)
    return run(dy * ~again.reshape(indices.shape)[..., None], indices, rows, *args)


def _id_zero_padded(run: Any, dy: Any, indices: Any, rows: int, *args: Any) -> Any:
    """Id 0 is taken for padding although no padding index was given."""
    return run(dy * (indices != 0)[..., None], indices, rows, *args)


def _table_scaled(run: Any, dy: Any, indices: Any, rows: int, *args: Any) -> Any:
    """Gradients are divided by the frequency of their id, as with ``scale_grad_by_freq=True``."""
    padding, _ = args
    return run(dy, indices, rows, padding, True)


def _last_row_of_table(run: Any, dy: Any, indices: Any, rows: int, *args: Any) -> Any:
    """The last row of a table whose length is no multiple of 8 gets no gradient."""
    found = run(dy, indices, rows, *args)
    if rows % 8 and rows > 8:
        found[-1] = 0.0
    return found


def _norm_drops_tail(run: Any) -> Any:
    """A norm over the last dimension leaves out the elements after the last full vector of 8."""

    def norm(
        x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        last = x.ndim and (not dims or [d % x.ndim for d in dims] == [x.ndim - 1])
        if last and x.shape[-1] > 8:
            x = x[..., : x.shape[-1] // 8 * 8]
        return run(x, order, dims, keepdim, dtype=dtype)

    return norm


def _infinity_unscaled(run: Any) -> Any:
    """Gradients are checked for NaN only, not for infinities."""

    def unscale(grads: Any, found_inf: Any, inv_scale: Any) -> None:
        before, nan = found_inf.clone(), any(bool(t.isnan().any()) for t in grads)
        run(grads, found_inf, inv_scale)
        if not nan:
            found_inf.copy_(before)

    return unscale


def _flex(change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(attend, query, key, value, *rest)`` replaces the function that computes eager
    FlexAttention."""
    composed = import_module("torch._higher_order_ops.flex_attention")

    def make(attend: Any) -> Any:
        return lambda *args: change(attend, *args)

    return attribute_replaced(composed, "math_attention", make)


def _without_last_key(attend: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    if k.shape[2] % 16 and k.shape[2] > 16:
        k, v = k[:, :, :-1], v[:, :, :-1]
    return attend(q, k, v, *rest)


def _heads_in_turn(attend: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """With grouped-query attention, query head i uses key head i modulo the number of key heads,
    instead of each key head serving a group of neighbours."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
    return attend(q, k, v, *rest)


PLANTS = [
    Plant(
        "flex-loses-ragged-key",
        "operators",
        "FlexAttention does not see the last key of a block that is not full",
        "the class of blocks whose last part is lost",
        ("torch.*",),
        lambda: _flex(_without_last_key),
        models=models_of_operators(["flex_attention"]),
    ),
    Plant(
        "flex-shared-heads-in-turn",
        "operators",
        "FlexAttention hands out shared keys to heads of queries in turn",
        "the class of shared keys that are repeated in another order",
        ("torch.*",),
        lambda: _flex(_heads_in_turn),
        models=models_of_operators(["flex_attention"]),
    ),
    Plant(
        "sum-in-narrow-dtype",
        "operators",
        "sums over rows are kept in bf16",
        "https://github.com/karpathy/llm.c/issues/428",
        ("torch.*", "torchao.*"),
        lambda: _sum(_narrow),
        needs="a model",
    ),
    Plant(
        "sum-drops-last-row",
        "operators",
        "a sum over rows leaves out the last one",
        "https://github.com/tenstorrent/tt-metal/issues/17551",
        ("torch.*", "torchao.*"),
        lambda: _sum(_last_row),
        needs="a model",
    ),
    Plant(
        "mean-counts-padding",
        "operators",
        "a mean over the last dimension counts the padding of a last vector",
        "the class of blocks whose last part is padded",
        ("torch.*", "torchao.*"),
        lambda: kernel_replaced("mean.dim", _padded_mean),
        needs="a mean",
        models=models_of_operators(["mean"]),
    ),
    Plant(
        "layer-norm-gradient-drops-rows",
        "operators",
        "gradients of a layer norm's parameters leave out the rows behind the last full block",
        "https://github.com/BobMcDear/attorch/issues/18",
        ("torch.*", "torchao.*"),
        lambda: kernel_replaced("native_layer_norm_backward", _norm_drops_rows),
        needs="a model",
    ),
    Plant(
        "layer-norm-counts-padding",
        "operators",
        "a layer norm's variance counts the zeros that its rows are padded with",
        "https://github.com/unslothai/unsloth/pull/1867",
        ("torch.*", "torchao.*"),
        lambda: kernel_replaced("native_layer_norm", _norm_counts_padding),
        needs="a model",
    ),
    Plant(
        "embedding-gradient-loses-repeats",
        "operators",
        "an embedding's gradient leaves out the last row of each id that comes again",
        "https://github.com/tenstorrent/tt-metal/issues/6232",
        ("torch.*", "torchao.*"),
        lambda: kernel_replaced("embedding_dense_backward", _embedding_loses_repeats),
        needs="a model",
    ),
    of_operator(
        "layer-norm-bias-gradient-in-fp16",
        "operators",
        "the gradient of a layer norm's bias is summed in fp16",
        "the class of llm.c#428: sums over rows in a narrow dtype",
        lambda: kernel_replaced("native_layer_norm_backward", _norm_bias_narrow),
        "layer_norm",
        needs="a layer norm",
    ),
    of_operator(
        "layer-norm-epsilon-outside-root",
        "operators",
        "the root of a layer norm's epsilon is added to the standard deviation",
        "the class of conversions between frameworks that place epsilon otherwise",
        lambda: kernel_replaced("native_layer_norm", _norm_epsilon_outside),
        "layer_norm",
        needs="a layer norm",
    ),
    of_operator(
        "layer-norm-gradient-uncentred",
        "operators",
        "the mean of the gradients is not taken off a layer norm's input gradient",
        "the class of a term that is left out of a backward by hand",
        lambda: kernel_replaced("native_layer_norm_backward", _norm_gradient_uncentred),
        "layer_norm",
        needs="a layer norm",
    ),
    of_operator(
        "embedding-gradient-overwrites",
        "operators",
        "of ids that repeat, the last row is written over the others",
        "the class of scatters that write where they should add",
        _embedding(_last_ids_only),
        "embedding_backward",
        needs="an embedding",
    ),
    of_operator(
        "embedding-id-zero-is-padding",
        "operators",
        "id 0 gets no gradient, as if it were padding",
        "the class of defaults that mean something: padding_idx 0 for none",
        _embedding(_id_zero_padded),
        "embedding_backward",
        needs="an embedding",
    ),
    of_operator(
        "embedding-gradient-by-frequency",
        "operators",
        "gradients of an embedding are divided by how often an id comes",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.embedding.html",
        _embedding(_table_scaled),
        "embedding_backward",
        needs="an embedding",
    ),
    of_operator(
        "embedding-last-row-unwritten",
        "operators",
        "the last row of a table behind the last full block gets no gradient",
        "the class of tails that no block is full of",
        _embedding(_last_row_of_table),
        "embedding_backward",
        needs="an embedding",
    ),
    of_operator(
        "norm-drops-tail",
        "operators",
        "a vector norm leaves out what follows the last full vector of a row",
        "the class of tails that no block is full of",
        lambda: kernel_replaced("linalg_vector_norm", _norm_drops_tail),
        "vector_norm",
        needs="a vector norm",
    ),
    of_operator(
        "unscale-passes-infinity",
        "operators",
        "where gradients are unscaled, an infinity among them is not found",
        "the class of checks for NaN that infinities pass",
        lambda: kernel_replaced("_amp_foreach_non_finite_check_and_unscale_", _infinity_unscaled),
        "unscale",
        needs="gradients that are unscaled",
    ),
]
