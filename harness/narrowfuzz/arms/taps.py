"""Seeing what was multiplied, without changing what is compiled.

Eager recipes bring their own tap. Compiled arms are watched from *inside* the compiled artefact's
call: a dispatch mode entered there sees the kernels that are called with their operands, and the
generated code stays as it was. (A mode around torch.compile would change what is traced.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from narrowfuzz.arms.tensors import DTYPE_NAME, fp8_codes, fp32_array
from narrowfuzz.play.layers import in_backward
from narrowfuzz.trace import AttentionCall, Multiplied, Phase, Seen

_FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
)
_ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention_backward,
)
#: Scaled multiplies and the names of their positional arguments.
_SCALED = {
    _aten._scaled_mm: ("a", "b", "scale_a", "scale_b", "bias"),
    _aten._scaled_mm_v2: (
        "a", "b", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias",
    ),
}  # fmt: skip
#: Innermost last: the taps whose programs are running now.
_recording: list[CompiledTap] = []


@dataclass
class Records:
    """What one run handed to kernels."""

    multiplied: list[Multiplied] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)


class AttentionWatch(TorchDispatchMode):
    """Records the arguments of attention kernels, forward and backward."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self._records = records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(a) for a in args if isinstance(a, torch.Tensor)):
            return NotImplemented  # the library's own tensor comes first
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(func.overloadpacket, args, kwargs, result)
        return result

    def _note(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        if packet in _ATTENTION:
            causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal", False))
            self._attention("forward", args[:3], result[0], result[1], causal, kwargs)
        elif packet in _ATTENTION_BACKWARD:
            # the CPU operator has no block of sequence lengths before its flags
            causal = bool(args[7]) if packet is _ATTENTION_BACKWARD[0] else bool(args[11])
            self._attention("backward", args[1:4], args[4], args[5], causal, kwargs)

    def _attention(
        self, phase: Phase, qkv: Any, out: Any, lse: Any, causal: bool, kwargs: Any
    ) -> None:
        scale = kwargs.get("scale") or qkv[0].shape[-1] ** -0.5
        q, k, v, o, statistics = (fp32_array(t).copy() for t in (*qkv, out, lse))
        self._records.attention.append(
            AttentionCall(phase, q, k, v, o, statistics, causal, float(scale))
        )


class _KernelWatch(AttentionWatch):
    """Records every matrix multiply as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        # operands first: compiled code may let the result overwrite them
        seen = _operands(packet, args, kwargs)
        result = func(*args, **kwargs)
        if seen is not None and result.dtype in DTYPE_NAME:
            phase: Phase = "backward" if in_backward() else "forward"
            self._records.multiplied.append(
                Multiplied(phase, *seen[:2], fp32_array(result).copy(),
                           DTYPE_NAME[result.dtype], seen[2])
            )  # fmt: skip
        self._note(packet, args, kwargs, result)
        return result


def _let_rng_pass() -> None:
    """Under a mode, torch's operators around recomputed random ones need a rule: run inside it."""
    from torch._prims import rng_prims

    @rng_prims.run_and_save_rng_state.py_impl(_KernelWatch)
    def save(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return torch.get_rng_state(), op(*args, **kwargs)

    @rng_prims.run_with_rng_state.py_impl(_KernelWatch)
    def restore(mode: Any, state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        with mode:
            result = op(*args, **kwargs)
        torch.set_rng_state(now)
        return result


_let_rng_pass()


def _operands(packet: Any, args: Any, kwargs: Any) -> tuple[Seen, Seen, Any] | None:
    if packet in _SCALED:
        named = dict(zip(_SCALED[packet], args, strict=False)) | kwargs
        # version 2 takes lists; two-level formats, which pass two scales, do not run compiled yet
        scales = [named[name] for name in ("scale_a", "scale_b")]
        scale_a, scale_b = (s[0] if isinstance(s, list) else s for s in scales)
        bias = named.get("bias")
        return (
            _scaled(named["a"], scale_a, transpose=False),
            _scaled(named["b"], scale_b, transpose=True),
            None if bias is None else fp32_array(bias).copy(),
        )
    if packet in (_aten.mm, _aten.addmm) and not {"alpha", "beta"} & set(kwargs):
        a, b = args[:2] if packet is _aten.mm else args[1:3]
        if a.dtype in DTYPE_NAME:
            bias = fp32_array(args[0]).copy() if packet is _aten.addmm else None
            values = (Seen(values=fp32_array(t).copy()) for t in (a, b.t()))
            return next(values), next(values), bias
    return None


def _scaled(codes: torch.Tensor, inverse: torch.Tensor, *, transpose: bool) -> Seen:
    assert codes.dtype in _FP8, codes.dtype
    # copies: compiled code reuses its buffers as soon as the GEMM has read them
    bytes_, scale = fp8_codes(codes).copy(), fp32_array(inverse).copy()
    if transpose:
        bytes_, scale = bytes_.T, scale.T
    return Seen(bytes_, scale, scale_is_inverse=True, format=_FP8[codes.dtype])


class CompiledTap:
    """Switch and store of one program's compiled artefacts."""

    def __init__(self) -> None:
        self.records = Records()
        self._on = False
        self.calls = 0

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        self.records, self._on, self.calls = Records(), on, 0
        _recording.append(self)
        try:
            yield
        finally:
            _recording.pop()
            self._on = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context to run a compiled artefact in."""
        self.calls += 1
        with ExitStack() as stack:
            if self._on:
                stack.enter_context(_KernelWatch(self.records))
            yield


def tapped_backend(compiler: str, tap: CompiledTap, memory_budget: float) -> Any:
    """The torch.compile backend of that name, with ``tap`` inside every artefact it makes."""
    from torch._functorch import config as functorch_config

    if compiler == "inductor":
        _watch_inductor()

    def backend(graph: Any, example_inputs: Any, *, options: Any = None) -> Any:
        # a budget of 1 is the default: then what a user has set holds
        limited = {"activation_memory_budget": memory_budget} if memory_budget < 1 else {}
        with functorch_config.patch(limited):
            if compiler == "inductor":
                from torch._inductor.compile_fx import compile_fx

                return compile_fx(graph, example_inputs, config_patches=dict(options or {}))
            return _eager_graphs(compiler, tap)(graph, example_inputs)

    return backend


def _eager_graphs(compiler: str, tap: CompiledTap) -> Any:
    """AOT autograd with graphs that run eagerly, as torch's own backends of these names do."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run_inside(graph: Any, example_inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            with tap.inside():
                return graph(*args)

        return make_boxed_func(call)

    if compiler == "aot_eager":
        return aot_autograd(fw_compiler=run_inside, bw_compiler=run_inside)
    assert compiler == "aot_eager_decomp_partition", compiler
    from functools import partial

    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import select_decomp_table

    return aot_autograd(
        fw_compiler=run_inside,
        bw_compiler=run_inside,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


def _watch_inductor() -> None:
    """Let CompiledFxGraph.__call__ run inside the tap that is recording, if any. Idempotent."""
    from torch._inductor.output_code import CompiledFxGraph

    plain: Callable[..., Any] = CompiledFxGraph.__call__
    if getattr(plain, "_narrowfuzz", False):
        return

    def call(self: Any, inputs: Any) -> Any:
        tap = _recording[-1] if _recording else None
        if tap is None:
            return plain(self, inputs)
        with tap.inside():
            return plain(self, inputs)

    call._narrowfuzz = True  # type: ignore[attr-defined]
    CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
