"""Seeing what was multiplied, without changing what is compiled.

Eager recipes bring their own tap. Compiled arms are watched from *inside* the compiled artefact's
call: a dispatch mode entered there sees the extern GEMMs with their operands, and the generated
code stays as it was. (A mode around torch.compile would change what is traced.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.arms.ladder import Arm
from harness.arms.tensors import fp8_codes, fp32_array
from harness.case import Spec
from harness.numerics.plan import Plan, Role
from harness.trace import Phase, Seen, Site, SiteTrace

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_aten = torch.ops.aten
#: Innermost last: the taps whose programs are running now.
_recording: list[CompiledTap] = []


class _GemmWatch(TorchDispatchMode):
    """Records both operands of every scaled or plain matrix multiply."""

    def __init__(self, records: list[tuple[Seen, Seen]]) -> None:
        super().__init__()
        self._records = records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is _aten._scaled_mm:
            named = dict(zip(("a", "b", "scale_a", "scale_b"), args, strict=False))
            named.update(kwargs or {})
            self._records.append(
                (
                    _scaled(named["a"], named["scale_a"], transpose=False),
                    _scaled(named["b"], named["scale_b"], transpose=True),
                )
            )
        elif packet is _aten._scaled_mm_v2:
            names = ("a", "b", "scale_a", "recipe_a", "swizzle_a", "scale_b")
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            # one scale an operand here; two-level formats, which pass two, do not run compiled yet
            (scale_a,), (scale_b,) = named["scale_a"], named["scale_b"]
            self._records.append(
                (
                    _scaled(named["a"], scale_a, transpose=False),
                    _scaled(named["b"], scale_b, transpose=True),
                )
            )
        elif packet in (_aten.mm, _aten.addmm):
            a, b = args[:2] if packet is _aten.mm else args[1:3]
            if a.dtype in (torch.float32, torch.bfloat16):
                self._records.append(
                    (Seen(values=fp32_array(a).copy()), Seen(values=fp32_array(b).T.copy()))
                )
        return func(*args, **(kwargs or {}))


def _scaled(codes: torch.Tensor, inverse: torch.Tensor, *, transpose: bool) -> Seen:
    assert codes.dtype in _FP8, codes.dtype
    # copies: compiled code reuses its buffers as soon as the GEMM has read them
    bytes_, scale = fp8_codes(codes).copy(), fp32_array(inverse).copy()
    if transpose:
        bytes_, scale = bytes_.T, scale.T
    return Seen(bytes_, scale, scale_is_inverse=True)


class CompiledTap:
    """Switch and store of one program's compiled artefacts."""

    def __init__(self) -> None:
        self.records: list[tuple[Seen, Seen]] = []
        self._on = False
        self.calls = 0

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        self.records, self._on, self.calls = [], on, 0
        _recording.append(self)
        try:
            yield
        finally:
            _recording.pop()
            self._on = False

    def mark(self) -> int:
        """How many GEMMs have been recorded so far."""
        return len(self.records)

    def inside(self) -> Any:
        """The context to run a compiled artefact in."""
        self.calls += 1
        return _GemmWatch(self.records) if self._on else nullcontext()


def tapped_backend(compiler: str, tap: CompiledTap) -> Any:
    """The torch.compile backend of that name, with ``tap`` inside every artefact it makes."""
    if compiler == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        def run_inside(graph: Any, example_inputs: Any) -> Any:
            from functorch.compile import make_boxed_func

            def call(*args: Any) -> Any:
                with tap.inside():
                    return graph(*args)

            return make_boxed_func(call)

        return aot_autograd(fw_compiler=run_inside, bw_compiler=run_inside)
    assert compiler == "inductor", compiler
    _watch_inductor()

    def backend(graph: Any, example_inputs: Any, *, options: Any = None) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, example_inputs, config_patches=dict(options or {}))

    return backend


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


def expected_sites(arm: Arm, plan: Plan) -> tuple[tuple[Role, Phase], ...]:
    """The GEMMs one forward and backward of a linear must show, in order.

    An eager recipe's tap sees the quantised ones; inside a compiled artefact every multiply shows.
    """
    recompute: tuple[tuple[Role, Phase], ...] = (("output", "recompute"),) if arm.checkpoint else ()
    every: tuple[tuple[Role, Phase], ...] = (
        ("output", "forward"),
        *recompute,
        ("grad_input", "backward"),
        ("grad_weight", "backward"),
    )
    return tuple(site for site in every if arm.compiler or plan.gemms[site[0]].quantised)


def name_sites(
    records: list[tuple[Seen, Seen]], forward_count: int, spec: Spec, arm: Arm, plan: Plan
) -> tuple[tuple[SiteTrace, ...], str]:
    """Name the recorded GEMMs, or say why they cannot be named.

    Eager runs them in the order the recipe's code does; a compiled backward may reorder, so there
    the two gradients are told apart by exposure where only one is quantised, else by shape, and
    not at all where the shapes coincide. A high-precision GEMM gets no site: its operands are the
    layer's own tensors, which the rules have.
    """
    expected = expected_sites(arm, plan)
    in_forward = sum(phase == "forward" for _, phase in expected)
    if len(records) != len(expected) or forward_count != in_forward:
        return (), (
            f"expected {len(expected)} GEMMs, {in_forward} of them in forward; saw {len(records)}"
        )
    if arm.compiler:
        backward = _grad_input_first(records[1], records[2], spec, plan)
        if backward is None:
            return (), "the two backward GEMMs have the same shape and may be reordered"
        records = [records[0], *backward]
    sites = tuple(
        SiteTrace(Site("proj", role, phase), a, b)
        for (role, phase), (a, b) in zip(expected, records, strict=True)
        if plan.gemms[role].quantised
    )
    return sites, ""


def _grad_input_first(
    one: tuple[Seen, Seen], other: tuple[Seen, Seen], spec: Spec, plan: Plan
) -> tuple[tuple[Seen, Seen], tuple[Seen, Seen]] | None:
    """The two backward GEMMs in the order grad_input, grad_weight, or None where both fit both."""
    in_codes = tuple(record[0].codes is not None for record in (one, other))
    if in_codes[0] != in_codes[1]:
        one_is_first = in_codes[0] == plan.gemms["grad_input"].quantised
    elif spec.tokens == spec.n:
        return None
    else:
        one_is_first = _rows(one[0]) == spec.tokens
    return (one, other) if one_is_first else (other, one)


def _rows(seen: Seen) -> int:
    array = seen.codes if seen.codes is not None else seen.values
    assert array is not None
    return int(array.shape[0])
