"""Plain torch, computed in other legal ways: sums in another order or wider, operators spelled
out."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.plants import sums
from narrowfuzz.plants.patching import attribute_replaced, recompiled
from narrowfuzz.plants.plant import Plant

_PLAIN = ("torch.fp32", "torch.bf16")
_EAGER = ("eager*",)
_ATTENDING = tuple(name for name, model in MODELS.items() if model.attends)
_NORMED = tuple(name for name, model in MODELS.items() if model.normalises)


@contextmanager
def _linear(product: Callable[[Any, Any], Any]) -> Iterator[None]:
    """All three products of a linear are ``product`` of operands in fp32, rounded once; the bias
    gradient is summed in parts of eight rows."""
    import torch

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.biased = bias is not None
            rows = _wider(x).flatten(0, -2)
            out = product(rows, _wider(weight).t())
            out = out if bias is None else out + _wider(bias)
            return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            rows = _wider(grad).flatten(0, -2)
            grad_input = product(rows, _wider(weight)).to(x.dtype).reshape(x.shape)
            tokens = _wider(x).flatten(0, -2)
            grad_weight = product(rows.t(), tokens).to(weight.dtype)
            grad_bias = None
            if ctx.biased:
                parts = [part.sum(0) for part in rows.split(8)]
                grad_bias = sum(parts, rows.new_zeros(rows.shape[-1])).to(weight.dtype)
            return grad_input, grad_weight, grad_bias

    def make(original: Any) -> Any:
        def linear(x: Any, weight: Any, bias: Any = None) -> Any:
            # under autocast the operator casts its operands; an autograd function would not
            if torch.is_autocast_enabled(x.device.type):
                return original(x, weight, bias)
            return Linear.apply(x, weight, bias)

        return linear

    with attribute_replaced(torch.nn.functional, "linear", make):
        yield


def _wider(x: Any) -> Any:
    import torch

    return x if x.dtype == torch.float64 else x.float()


@contextmanager
def _viewed() -> Iterator[None]:
    """Linears get views of their operands and return a copy of the result."""
    import torch

    def make(original: Any) -> Any:
        def linear(x: Any, weight: Any, bias: Any = None) -> Any:
            return original(x.view_as(x), weight.view_as(weight), bias).clone()

        return linear

    with recompiled(), attribute_replaced(torch.nn.functional, "linear", make):
        yield


@contextmanager
def _attention(weights: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Attention is ``weights(scores, seen, v)`` of fp32 scores instead of the fused operator, which
    stays in use for masks and shared heads."""
    import torch

    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, is_causal: bool = False, **how: Any) -> Any:
            if how:
                return original(q, k, v, is_causal=is_causal, **how)
            dtype = q.dtype
            with torch.autocast(q.device.type, enabled=False):
                q, k, v = (_wider(t) for t in (q, k, v))
                scores = (q / q.shape[-1] ** 0.5) @ k.transpose(-2, -1)
                size = scores.shape[-2:]
                seen = torch.ones(size, dtype=torch.bool, device=scores.device)
                return weights(scores, seen.tril() if is_causal else seen, v).to(dtype)

        return attend

    with attribute_replaced(torch.nn.functional, "scaled_dot_product_attention", make):
        yield


def _softmax(scores: Any, seen: Any, v: Any) -> Any:
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def _divided_last(scores: Any, seen: Any, v: Any) -> Any:
    """exp(scores) @ v, divided by the sum of exp(scores) at the end, as fused kernels do."""
    scores = scores.masked_fill(~seen, float("-inf"))
    powers = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return (powers @ v) / powers.sum(-1, keepdim=True)


@contextmanager
def _wide_norms() -> Iterator[None]:
    import torch
    import torch.nn.functional as F

    def rms(original: Any) -> Any:
        def norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
            eps = torch.finfo(x.dtype).eps if eps is None else eps
            wide = x.double()
            wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            return (wide if weight is None else wide * weight.double()).to(x.dtype)

        return norm

    def layer(original: Any) -> Any:
        def norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Any:
            wide = x.double()
            wide = wide - wide.mean(-1, keepdim=True)
            wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            wide = wide if weight is None else wide * weight.double()
            return (wide if bias is None else wide + bias.double()).to(x.dtype)

        return norm

    with ExitStack() as stack:
        stack.enter_context(attribute_replaced(F, "rms_norm", rms))
        stack.enter_context(attribute_replaced(F, "layer_norm", layer))
        yield


@contextmanager
def _saved_between_steps() -> Iterator[None]:
    """After every optimizer step the parameters are saved to a file and loaded again."""
    import torch

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            parameters = [p for group in self.param_groups for p in group["params"]]
            file = io.BytesIO()
            torch.save([p.detach() for p in parameters], file)
            file.seek(0)
            with torch.no_grad():
                for parameter, saved in zip(parameters, torch.load(file), strict=True):
                    parameter.copy_(saved)
            return out

        return step

    with ExitStack() as stack:
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            stack.enter_context(attribute_replaced(kind, "step", make))
        yield


_legal = partial(Plant, legal=True, arms=_EAGER)

PLANTS = [
    _legal("linear-reversed-sums", "sums", "K, N and tokens summed from the last to the first",
           sums.ANY_ORDER, _PLAIN, lambda: _linear(sums.reversed_sum)),
    _legal("linear-blocked-sums", "sums", "partial sums of 16 products, in fp32", sums.ANY_ORDER,
           _PLAIN, lambda: _linear(sums.blocked)),
    _legal("linear-float64-sums", "sums", "fp64 accumulators",
           sums.WIDER, _PLAIN,
           lambda: _linear(sums.wide)),
    _legal("linear-views", "copies", "views of the operands, a copy of the result",
           "views and copies change no value: docs/rules.md, R16, R17", _PLAIN, _viewed,
           arms=("aot_eager*",)),
    _legal("attention-spelled-out", "attention",
           "softmax(q k) v in fp32 instead of the fused operator",
           "the fused operator is one of several implementations: "
           "https://docs.pytorch.org/docs/stable/generated/"
           "torch.nn.functional.scaled_dot_product_attention.html", _PLAIN,
           lambda: _attention(_softmax), models=_ATTENDING),
    _legal("attention-divided-last", "attention", "exp(q k) v, divided by its sum at the end",
           "the order of the fused kernels: https://arxiv.org/abs/2205.14135", _PLAIN,
           lambda: _attention(_divided_last), models=_ATTENDING),
    _legal("norms-in-float64", "norms", "norms with fp64 sums",
           "sums of norms have no fixed order or width: docs/rules.md, what O8 leaves out", _PLAIN,
           _wide_norms, models=_NORMED),
    _legal("saved-between-steps", "state", "parameters saved and loaded after every optimizer step",
           "saving and loading changes nothing: docs/rules.md, R20", _PLAIN, _saved_between_steps),
]  # fmt: skip
