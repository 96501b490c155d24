"""Dispatch modes that record the operands of kernels in eager runs and inside compiled code:
``AttentionWatch`` those of attention, ``KernelWatch`` those of matrix multiplies as well.
``AttentionWatch.note`` recognises a kernel of attention and copies its operands and results.

A dispatch mode entered inside a compiled artefact's call sees the kernels with their operands, and
the generated code stays as it was. (A mode around torch.compile would change what is traced.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from narrowfuzz.play.layers import in_backward


@dataclass
class Product:
    """One matrix multiply: a [m, k] times the transpose of b [n, k]; scales are inverse, None for
    plain values."""

    phase: str
    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    bias: torch.Tensor | None
    result: torch.Tensor

    def operands(self) -> list[Any]:
        """Both operands and their scales, as a recipe's tap emits them."""
        return [self.a, self.scale_a, self.b, self.scale_b]


@dataclass
class Attended:
    """One attention kernel: ``out`` and ``lse`` as the forward returned them or as the backward got
    them back."""

    phase: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    #: What is added to the scores, -inf where a query does not see a key; None: nothing.
    added: torch.Tensor | None
    scale: float
    #: The module that called it, "" where none is known.
    module: str = ""
    #: An argument that changes the scores in a way that is not known here.
    unknown: str = ""


#: Scaled multiplies and the names of their positional arguments.
SCALED = {
    "_scaled_mm": ("a", "b", "scale_a", "scale_b", "bias"),
    "_scaled_mm_v2": (
        "a",
        "b",
        "scale_a",
        "recipe_a",
        "swizzle_a",
        "scale_b",
        "recipe_b",
        "swizzle_b",
        "bias",
    ),
}
#: Attention kernels: flash (for_cpu), efficient and cudnn.
ATTENTION = ("_scaled_dot_product_flash", "_scaled_dot_product_eff", "_scaled_dot_product_cudnn")
#: Their known arguments, which determine the scores. Dropout does not change these: it is applied
#: after the sums.
KNOWN = {
    "query",
    "key",
    "value",
    "scale",
    "is_causal",
    "attn_mask",
    "attn_bias",
    "dropout_p",
    "out",
    "logsumexp",
    "grad_out",
    "grad_out_",
    "grad_input_mask",
    "return_debug_mask",
    "compute_log_sumexp",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "philox_seed",
    "philox_offset",
}


class AttentionWatch(TorchDispatchMode):
    """Records the arguments of attention kernels, forward and backward; ``running`` names the
    module that calls one."""

    supports_higher_order_operators = True

    def __init__(self, running: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.attention: list[Attended] = []
        self.running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(a) for a in args if isinstance(a, torch.Tensor)):
            return NotImplemented  # the library's own tensor comes first
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return result  # the operators inside of it do not reach this mode
        self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record one kernel call, if it is attention."""
        name = func.overloadpacket.__name__
        if not name.startswith(ATTENTION):
            return
        named = by_name(func, args, kwargs)
        q, k, v = (copied(named[name]) for name in ("query", "key", "value"))
        backward = name.endswith("_backward")
        if backward and _by_hand():
            return
        out, lse = (named["out"], named["logsumexp"]) if backward else result[:2]
        if lse is None or lse.numel() == 0:
            return  # nothing is saved for a backward
        # some kernels add a trailing dimension of one, some pad the rows
        lse = copied(lse).reshape(*q.shape[:2], -1)[..., : q.shape[-2]]
        added = to_add(q, k, mask_of(named), causal=bool(named.get("is_causal", False)))
        scale = float(named.get("scale") or q.shape[-1] ** -0.5)
        phase = "backward" if backward else "forward"
        unknown = next((n for n in named if n not in KNOWN and named[n] is not None), "")
        self.attention.append(
            Attended(phase, q, k, v, copied(out), lse, added, scale, self.running(), unknown)
        )


#: Packages whose own Functions are no models': libraries, and narrowfuzz, which injects bugs.
_LIBRARIES = ("torch", "torchao", "transformer_engine", "triton", "narrowfuzz")


def _by_hand() -> bool:
    """Does an autograd.Function of a model's own call what runs? Ring attention, for example, calls
    kernels with the parts of a sequence, and their backward with the merged results."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    package = type(node)._forward_cls.__module__.partition(".")[0]  # type: ignore[attr-defined]
    return package not in _LIBRARIES


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a kernel's call by their names in its schema: kernels differ in their order,
    but not in their names."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def mask_of(named: Mapping[str, Any]) -> Any:
    """The mask of an attention kernel's call, given its arguments by name; None without one."""
    return next((named[n] for n in ("attn_mask", "attn_bias") if named.get(n) is not None), None)


def to_add(q: Any, k: Any, mask: Any, *, causal: bool) -> Any:
    """The fp32 tensor that a kernel adds to the scores of q and k, for a mask and for being causal;
    None for neither."""
    with unseen():
        added = None
        if mask is not None and mask.dtype == torch.bool:
            added = torch.zeros(mask.shape, device=q.device).masked_fill(~mask, float("-inf"))
        elif mask is not None:
            added = mask.detach().float().clone()
        if causal:
            rows = torch.full((q.shape[-2], k.shape[-2]), float("-inf"), device=q.device).triu(1)
            added = rows if added is None else added + rows
        return added


class KernelWatch(AttentionWatch):
    """Records every matrix multiply as well."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(
                *args, **(kwargs or {})
            )  # the operators inside of it do not reach this mode
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        # operands first: compiled code may let the result overwrite them, and reuses its buffers as
        # soon as the GEMM has read them
        seen = operands(name, args, kwargs) if func.namespace == "aten" else None
        held: Any = [None if t is None else copied(t) for t in seen or ()]
        result = func(*args, **kwargs)
        if seen is not None and result.is_floating_point():
            phase = "backward" if in_backward() else "forward"
            a, b, scale_a, scale_b, bias = held
            self.products.append(Product(phase, a, b, scale_a, scale_b, bias, copied(result)))
        self.note(func, args, kwargs, result)
        return result


def operands(name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any, Any] | None:
    """a, b, their inverse scales and the bias of a multiply; None for another kernel."""
    if name in SCALED:
        named = dict(zip(SCALED[name], args, strict=False)) | kwargs
        # version 2 takes lists; two-level formats, which pass two scales, do not run compiled yet
        scales = [named[role] for role in ("scale_a", "scale_b")]
        scale_a, scale_b = (s[0] if isinstance(s, list) else s for s in scales)
        return named["a"], named["b"].t(), scale_a, scale_b.t(), named.get("bias")
    if name in ("mm", "addmm") and not {"alpha", "beta"} & set(kwargs):
        a, b = args[:2] if name == "mm" else args[1:3]
        if a.is_floating_point():
            return a, b.t(), None, None, args[0] if name == "addmm" else None
    return None


def copied(t: Any) -> Any:
    """A tensor's values now, cloned with all dispatch modes off: selective checkpointing would
    count the clone as an operator of the model, and miss it when it recomputes."""
    with unseen():
        return t.detach().clone()


def unseen() -> AbstractContextManager[Any]:
    """Operators in this context are hidden from all dispatch modes."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _disable_current_modes()


@contextmanager
def inside(watch: TorchDispatchMode, *, compiler: str) -> Iterator[None]:
    """Code that the compiler generates until the context ends runs inside ``watch``."""

    def run(made: Any, inputs: Any) -> Any:
        with watch:
            return made(inputs)

    if compiler == "inductor":
        from torch._inductor.output_code import CompiledFxGraph

        place, name, plain = CompiledFxGraph, "__call__", CompiledFxGraph.__call__
        make: Any = lambda graph, inputs: run(partial(plain, graph), inputs)  # noqa: E731
    else:
        from torch._dynamo.backends import debugging

        place, name, plain = debugging, "boxed_nop", debugging.boxed_nop

        def make(graph: Any, inputs: Any) -> Any:
            call = partial(run, plain(graph, inputs))
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

    setattr(place, name, make)
    try:
        yield
    finally:
        setattr(place, name, plain)


@cache
def let_rng_pass(watch: type = KernelWatch) -> None:
    """torch's operators that save and restore RNG states for recomputes need a rule for the class
    of an active mode: run them inside it."""
    from torch._prims import rng_prims

    def ruled(operator: Any) -> None:
        # dispatched by device: CUDA graphs use another generator's state
        plain = operator.py_kernels[torch._C.DispatchKey.BackendSelect]

        def run(mode: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return plain(*args, **kwargs)

        operator.py_impl(watch)(run)

    ruled(rng_prims.run_and_save_rng_state)
    ruled(rng_prims.run_with_rng_state)
    ruled(rng_prims.graphsafe_run_with_rng_state)
