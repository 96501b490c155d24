"""Operators of torch, computed in other legal ways: wider, in another order, or by other
kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.operators import models_of_operators
from narrowfuzz.plants.grouped import of_groups, spans
from narrowfuzz.plants.operators import kernel_replaced
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.sums import ANY_ORDER, WIDER

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _in_float64(run: Any) -> Any:
    """The kernel on float64 tensors; each result is rounded once, to the dtype it normally has."""
    import torch

    narrow = (torch.float32, torch.bfloat16, torch.float16)

    def wider(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.double() if x.dtype in narrow else x
        return torch.float64 if x in narrow else x

    def wide(*args: Any, **kwargs: Any) -> Any:
        narrow_results = run(*args, **kwargs)
        results = run(*map(wider, args), **{name: wider(x) for name, x in kwargs.items()})
        if isinstance(results, torch.Tensor):
            return results.to(narrow_results.dtype)
        return tuple(
            None if w is None else w.to(n.dtype)
            for w, n in zip(results, narrow_results, strict=True)
        )

    return wide


def _from_the_last(run: Any) -> Any:
    """A sum over dimensions adds its terms from the last to the first, in fp32."""

    def total(x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        if not dims:
            return run(x, dims, keepdim, dtype=dtype)
        return run(x.flip(dims).contiguous(), dims, keepdim, dtype=dtype)

    return total


def _ids_from_the_last(run: Any) -> Any:
    """The rows of an id are added up from the last to the first, in fp32."""

    def backward(grad: Any, indices: Any, *args: Any) -> Any:
        rows = grad.float().reshape(indices.numel(), -1).flip(0)
        return run(rows, indices.reshape(-1).flip(0), *args).to(grad.dtype)

    return backward


def _groups_in_float64(run: Any, y: Any, a: Any, b: Any, ends: list[int]) -> None:
    """The groups in fp64, from the last to the first; rows that belong to no group are NaN."""
    import torch

    right = torch.full_like(y, float("nan"))
    for number, start, end in reversed(spans(ends)):
        if a.ndim < b.ndim:
            right[start:end] = a[start:end].double() @ b[number].double()
        else:
            right[number] = a[:, start:end].double() @ b[start:end].double()
    y.copy_(right)


@contextmanager
def _all(make: Callable[[Any], Any], *names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(kernel_replaced(name, make))
        yield


@contextmanager
def _as_a_loop() -> Iterator[None]:
    """Fused and foreach optimizer steps run as a loop over the parameters."""
    import torch

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = [(group["foreach"], group["fused"]) for group in self.param_groups]
            for group in self.param_groups:
                group["foreach"], group["fused"] = False, None
            try:
                return original(self, *args, **kwargs)
            finally:
                for group, (foreach, fused) in zip(self.param_groups, before, strict=True):
                    group["foreach"], group["fused"] = foreach, fused

        return step

    def make_init(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._step_supports_amp_scaling = False  # GradScaler then divides, not the step

        return init

    with ExitStack() as stack:
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            stack.enter_context(attribute_replaced(kind, "step", make))
            stack.enter_context(attribute_replaced(kind, "__init__", make_init))
        yield


_legal = partial(Plant, recipes=("torch.*",), legal=True, arms=("eager*",))

PLANTS = [
    _legal(
        "sums-from-the-last",
        "sums",
        "sums over rows, from the last to the first",
        ANY_ORDER,
        plant=partial(_all, _from_the_last, "sum.dim_IntList"),
        models=models_of_operators(["sum"]),
    ),
    _legal(
        "embedding-from-the-last",
        "sums",
        "rows of an id, added up from the last to the first",
        ANY_ORDER,
        plant=partial(_all, _ids_from_the_last, "embedding_dense_backward"),
        models=models_of_operators(["embedding_backward"]),
    ),
    _legal(
        "groups-in-float64",
        "wider",
        "products of groups, from the last to the first, in fp64 and rounded once",
        WIDER,
        plant=partial(_all, of_groups(_groups_in_float64, (2, 3), (2, 2)), "_grouped_mm"),
        models=models_of_operators(["grouped_mm"]),
    ),
    _legal(
        "steps-as-a-loop",
        "optimizers",
        "fused and foreach steps, taken in a loop",
        "which of the three is taken is torch's choice: "
        "https://docs.pytorch.org/docs/stable/optim.html",
        plant=_as_a_loop,
        models=tuple(name for name in MODELS if name.endswith(("_fused", "_foreach"))),
    ),
    *(
        _legal(
            f"{name}-in-float64",
            "wider",
            f"{words}, in fp64 and rounded once",
            WIDER,
            plant=partial(_all, _in_float64, *kernels),
            models=models_of_operators([operator]),
        )
        for name, words, kernels, operator in (
            ("sums", "sums over rows", ("sum.dim_IntList",), "sum"),
            ("means", "means", ("mean.dim",), "mean"),
            (
                "softmaxes",
                "softmax and its gradient",
                ("_softmax", "_softmax_backward_data"),
                "softmax*",
            ),
            (
                "log-softmaxes",
                "log-softmax and its gradient",
                ("_log_softmax", "_log_softmax_backward_data"),
                "log_softmax*",
            ),
            (
                "layer-norms",
                "layer norms and their gradients",
                ("native_layer_norm", "native_layer_norm_backward"),
                "layer_norm*",
            ),
            (
                "embeddings",
                "gradients of embeddings",
                ("embedding_dense_backward",),
                "embedding_backward",
            ),
            (
                "nll-losses",
                "negative log likelihoods and their gradients",
                ("nll_loss_forward", "nll_loss_backward"),
                "nll_loss",
            ),
            (
                "attentions",
                "attention and its gradients",
                (_FLASH, f"{_FLASH}_backward"),
                "attention*",
            ),
        )
    ),
]
