"""Every call of every linear in a model, seen from the layer's own edges.

Hooks and identity autograd nodes stand before and behind each linear, so its input, its output and
both their gradients are what that very call got and returned, however its tensors are shared. The
recipe's tap adds the operands of its GEMMs. Nothing the library computes changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from narrowfuzz.arms.tensors import DTYPE_NAME, fp32_array
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Plan, Role
from narrowfuzz.trace import LayerCall, Phase, Seen, Site, SiteTrace


class _Probe(torch.autograd.Function):
    """Identity that tells its gradient to ``note``."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.note = note
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.note(grad)
        return grad, None


@dataclass
class _Open:
    """A call while its run goes on."""

    module: str
    index: int
    phase: Phase
    weight: torch.Tensor
    bias: torch.Tensor | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Whose GEMMs were being recorded when this call began: a recompute interrupts a backward.
    interrupted: list[tuple[Seen, Seen]] | None = None
    forward_gemms: list[tuple[Seen, Seen]] = field(default_factory=list)
    backward_gemms: list[tuple[Seen, Seen]] = field(default_factory=list)


class LayerWatch:
    """Records the calls of the named linears during one run."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], focus: int | None) -> None:
        """``focus``: watch one of the layers, this many-th in turn; None: all of them."""
        modules = dict(model.named_modules(remove_duplicate=False))
        #: A module that replaced its linear's forward by its own is no linear to judge.
        self.layers = {n: modules[n] for n in names if n in modules and _is_linear(modules[n])}
        if focus is not None and self.layers:
            name = sorted(self.layers)[focus % len(self.layers)]
            self.layers = {name: self.layers[name]}
        self.calls: list[_Open] = []
        self._current: list[tuple[Seen, Seen]] | None = None
        self._counts: Counter[tuple[str, str]] = Counter()

    def emit(self, a: Seen, b: Seen) -> None:
        """The recipe's tap: one GEMM, of the call that is running."""
        if self._current is not None:
            self._current.append((a, b))

    def wanted(self) -> bool:
        """True while a watched layer multiplies."""
        return self._current is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch until the context ends."""
        self.calls, self._current, self._counts = [], None, Counter()
        with ExitStack() as stack:
            # a recompute that stops early would leave its last call open
            stack.enter_context(set_checkpoint_early_stop(False))
            for name, module in self.layers.items():
                self._attach(name, module, stack)
            yield

    def _attach(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        running: list[_Open] = []

        def before(module: Any, args: Any) -> Any:
            phase: Phase = "recompute" if in_backward() else "forward"
            bias = getattr(module, "bias", None)
            call = _Open(
                name,
                self._counts[name, phase],
                phase,
                _copy(module.weight),
                None if bias is None else _copy(bias),
            )
            self._counts[name, phase] += 1
            self.calls.append(call)
            running.append(call)
            call.tensors["input"] = args[0].detach()
            call.interrupted, self._current = self._current, call.forward_gemms

            def note(grad: torch.Tensor) -> None:
                call.outputs["grad_input"] = grad.detach()
                if self._current is call.backward_gemms:
                    self._current = None  # what comes next may be a layer that is not watched

            return (_Probe.apply(args[0], note), *args[1:])

        def after(module: Any, args: Any, output: Any) -> Any:
            call = running.pop()
            self._current = call.interrupted
            call.outputs["output"] = output.detach()

            def note(grad: torch.Tensor) -> None:
                call.tensors["grad_output"] = grad.detach()
                self._current = call.backward_gemms

            return _Probe.apply(output, note)

        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after, prepend=True).remove)
        for role in ("weight", "bias"):
            parameter = getattr(module, role, None)
            if parameter is not None and parameter.requires_grad:
                stack.callback(parameter.register_hook(self._grad_of(name, role)).remove)

    def _grad_of(self, name: str, role: str) -> Callable[[torch.Tensor], None]:
        """A parameter's gradient belongs to a call only if no other call adds to it."""

        def note(grad: torch.Tensor) -> None:
            calls = [c for c in self.calls if c.module == name and "grad_output" in c.tensors]
            fresh = [c for c in calls if f"grad_{role}" not in c.outputs]
            if len(fresh) == 1:
                fresh[0].outputs[f"grad_{role}"] = grad.detach().clone()

        return note

    def finished(self, plan: Plan, shared: frozenset[str]) -> tuple[LayerCall, ...]:
        """The calls as plain data; layers named in ``shared`` share their weight with others."""
        closed = []
        for call in self.calls:
            if call.module in shared:
                call.outputs.pop("grad_weight", None)
            if "output" in call.outputs:
                closed.append(_close(call, plan))
        return tuple(closed)


def _close(call: _Open, plan: Plan) -> LayerCall:
    tensors = {"weight": call.weight, **call.tensors}
    if call.bias is not None:
        tensors["bias"] = call.bias
    sites, unobserved = _sites(call, plan)
    return LayerCall(
        call.module,
        call.index,
        call.phase,
        DTYPE_NAME[call.outputs["output"].dtype],
        {name: _rows(t) for name, t in tensors.items()},
        {name: _rows(t) for name, t in call.outputs.items()},
        sites,
        unobserved,
        call.tensors["input"].shape[0] if call.tensors["input"].dim() == 3 else 0,
    )


def _sites(call: _Open, plan: Plan) -> tuple[tuple[SiteTrace, ...], str]:
    """Name the GEMMs: one in forward, and in backward those of the plan that are quantised."""
    gradients: tuple[Role, ...] = ("grad_input", "grad_weight")
    expected = [role for role in gradients if plan.gemms[role].a.format is not None]
    if not plan.quantised:
        return (), ""
    seen, backward = len(call.forward_gemms), len(call.backward_gemms)
    wanted = len(expected) if "grad_output" in call.tensors else 0
    if seen != 1 or backward != wanted:
        return (), f"expected 1 and {wanted} GEMMs, saw {seen} and {backward}"
    named = [("output", call.phase, call.forward_gemms[0])]
    named += [(role, "backward", gemm) for role, gemm in zip(expected, call.backward_gemms,
                                                             strict=False)]  # fmt: skip
    return tuple(
        SiteTrace(Site(call.module, role, phase), a, b)  # type: ignore[arg-type]
        for role, phase, (a, b) in named
    ), ""


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    """Its values now: an optimizer may step before they are looked at. Taken from inside a
    library's tensor, which need not support what a plain one does (inference mode, for one)."""
    inner: torch.Tensor = getattr(parameter, "_data", parameter)
    return inner.detach().clone()


def _rows(t: torch.Tensor) -> F32:
    """[..., C] as float32 [rows, C]; a bias stays 1-D."""
    inner: Any = getattr(t, "_data", t)
    if inner.dim() == 1:
        return fp32_array(inner).copy()
    return fp32_array(inner.reshape(math.prod(inner.shape[:-1]), inner.shape[-1])).copy()


def _is_linear(module: nn.Module) -> bool:
    """True unless somebody gave this linear a forward of its own."""
    # scaled_linear stands for a library that has no linear of its own
    libraries = ("torch.", "torchao.", "narrowfuzz.arms.scaled_linear")
    user_made = not type(module).__module__.startswith(libraries)
    return not user_made and "forward" not in vars(module) and hasattr(module, "weight")


def in_backward() -> bool:
    """True while autograd runs a backward, recomputation included."""
    return torch._C._current_graph_task_id() != -1
