"""Records every call of every linear in a model at the layer's own boundary.

Hooks and identity autograd nodes stand before and behind each linear, so its input, its output and
both gradients are those of exactly that call, however its tensors are shared. The recipe's tap adds
the operands of its GEMMs. Nothing the library computes changes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from narrowfuzz.play.player import innermost


class Probe(torch.autograd.Function):
    """Identity that passes its gradient to ``note``."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.note = note
        return t.detach()  # a view would be one more operator that DTensor must lay out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.note(grad)
        return grad, None


@dataclass
class Call:
    """One call of a linear; ``tensors`` are what it got, ``outputs`` what it returned."""

    module: str
    #: The number of this call among the module's calls in the same phase.
    index: int
    phase: str
    #: Number of the forward that it belongs to.
    forward: int
    #: Number of the checkpoint() region of that forward in which it runs; 0: none.
    segment: int = 0
    #: False for a recompute that a function of the model's own makes, not torch's checkpoint.
    checkpointed: bool = True
    weight: Any = None
    bias: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    #: The GEMM list that was being filled when this call began: a recompute interrupts a backward.
    interrupted: list[Any] | None = None
    forward_gemms: list[Any] = field(default_factory=list)
    backward_gemms: list[Any] = field(default_factory=list)
    #: Names of the module's own parameters that required a gradient when it was called.
    trained: frozenset[str] = frozenset()
    #: The parameters (weight, bias) whose gradients include this call's part by now.
    added: set[str] = field(default_factory=set)
    #: The number of this call in the order in which calls ended; set by ``watch_any`` only.
    ended: int = -1

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """Its tokens, in_features and out_features; None if it is no linear or has no input yet."""
        given, weight = self.tensors.get("input"), self.weight
        if given is None or not given.dim() or weight is None or weight.dim() != 2:
            return None
        return math.prod(given.shape[:-1]), given.shape[-1], weight.shape[0]

    def held(self, name: str) -> torch.Tensor:
        """The tensor it computed with: input, weight, bias or grad_output. Raises KeyError."""
        return {"weight": self.weight, "bias": self.bias, **self.tensors}[name]  # type: ignore[return-value]


class LayerWatch:
    """Records the calls of modules during one run: of linears with their GEMMs; of other modules,
    or of all with ``everything``, only tensors at their boundary. ``place.forward`` is the forward
    that runs or is recomputed. With ``outside``, hooks stand outside the layer's own, such as those
    that lay it out over ranks; ``own`` takes this rank's part of a tensor."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.outside, self.own, self.everything = False, innermost, False
        self.calls: list[Call] = []
        self._current: list[Any] | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._hooks = ExitStack()
        self._ended = 0

    def now(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of its values: the next module may overwrite them, as in-place activations do."""
        held: torch.Tensor = self.own(t.detach()).clone()
        return held

    def emit(self, *operands: Any) -> None:
        """Called by the recipe's tap with one GEMM, which belongs to the call that is running."""
        if self._current is not None:
            self._current.append(operands)

    def wanted(self) -> bool:
        """True while a watched layer multiplies."""
        return self._current is not None

    def running(self) -> Call | None:
        """The call of a linear whose GEMMs are being recorded, None if there is none."""
        return next(
            (
                c
                for c in self.calls
                if self._current is c.forward_gemms or self._current is c.backward_gemms
            ),
            None,
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep watching followed modules until the context ends. A recompute must not stop early:
        its last call would stay open."""
        with self._hooks:
            yield

    def follow(self, layers: dict[str, nn.Module]) -> None:
        """Watch these modules from now on, and no others."""
        self._hooks.close()
        for name, module in layers.items():
            linear = _has_weight(module) and not self.everything
            (self._attach if linear else self.watch_any)(name, module, self._hooks)

    def _begun(self, name: str) -> Call:
        """Record that a call of this module begins."""
        phase = "recompute" if in_backward() else "forward"
        number, own = self._counts[name, phase], phase == "recompute" and not in_checkpoint()
        call = Call(name, number, phase, self.place.forward, self.place.segment, not own)
        self._counts[name, phase] += 1
        self.calls.append(call)
        return call

    def watch_any(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        """Record every tensor that a module of any kind gets and returns, and the gradient of its
        output. Nothing is inserted in between."""
        running: list[Call] = []

        def before(module: Any, args: Any, named: Any) -> None:
            running.append(self._begun(name))
            running[-1].tensors |= self._every("input", (args, named))
            running[-1].trained = frozenset(
                n for n, p in module.named_parameters(recurse=False) if p.requires_grad
            )

        def after(module: Any, args: Any, named: Any, output: Any) -> None:
            call = running.pop()
            call.outputs |= self._every("output", output)
            call.ended, self._ended = self._ended, self._ended + 1

            def note(grad: torch.Tensor) -> None:
                call.tensors["grad_output"] = self.now(grad)

            for t in tensors_of(output):
                if t.requires_grad:
                    t.register_hook(note)

        pre = module.register_forward_pre_hook(before, with_kwargs=True)
        stack.callback(pre.remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def _every(self, name: str, held: Any) -> dict[str, torch.Tensor]:
        """The tensors in ``held``, by this name and their index (none for the first)."""
        return {f"{name}{i or ''}": self.now(t) for i, t in enumerate(tensors_of(held))}

    def _attach(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        running: list[Call] = []

        def before(module: Any, args: Any, named: Any) -> Any:
            call = self._begun(name)
            running.append(call)
            x, *rest = args or named.values()
            call.tensors["input"] = self.now(x)
            call.interrupted, self._current = self._current, call.forward_gemms

            def note(grad: torch.Tensor) -> None:
                # autograd adds up the gradients of a leaf in place
                call.outputs["grad_input"] = (
                    self.now(grad) if x.is_leaf else self.own(grad.detach())
                )
                if self._current is call.backward_gemms:
                    self._current = None  # what comes next may be a layer that is not watched

            return (Probe.apply(x, note), *rest), named if args else {}

        def weigh(module: Any, args: Any) -> None:
            # after hooks that put the parameters in place
            running[-1].weight = kept(module.weight)
            if getattr(module, "bias", None) is not None:
                running[-1].bias = kept(module.bias)
            running[-1].trained = frozenset(
                role
                for role in ("weight", "bias")
                if getattr(getattr(module, role, None), "requires_grad", False)
            )

        def after(module: Any, args: Any, output: Any) -> Any:
            call = running.pop()
            self._current = call.interrupted
            call.outputs["output"] = self.now(output)

            def note(grad: torch.Tensor) -> None:
                if "grad_output" in call.tensors:  # a retained graph runs backward again
                    call.backward_gemms = []
                    call.added.clear()
                    for role in ("grad_weight", "grad_bias"):
                        call.outputs.pop(role, None)
                call.tensors["grad_output"] = self.own(grad.detach())
                self._current = call.backward_gemms

            if _forbids_writing(output):  # a Probe behind it would allow it
                output.register_hook(note)
                return None
            return Probe.apply(output, note)

        begins = module.register_forward_pre_hook(before, prepend=self.outside, with_kwargs=True)
        stack.callback(begins.remove)
        stack.callback(module.register_forward_pre_hook(weigh).remove)
        stack.callback(module.register_forward_hook(after, prepend=not self.outside).remove)
        # a parametrized module computes its weight anew in each call, and cannot outside on ranks
        own = dict(module.named_parameters(recurse=False))
        for role in ("weight", "bias"):
            parameter = own.get(role)
            if parameter is not None and parameter.requires_grad:
                stack.callback(parameter.register_hook(self._grad_of(name, role)).remove)

    def _grad_of(self, name: str, role: str) -> Callable[[torch.Tensor], None]:
        """A parameter's gradient belongs to a call only if no other call adds to it."""

        def note(grad: torch.Tensor) -> None:
            fresh = [
                c
                for c in self.calls
                if c.module == name and "grad_output" in c.tensors and role not in c.added
                if role in c.trained
            ]
            for call in fresh:
                call.added.add(role)
                if len(fresh) == 1:
                    call.outputs[f"grad_{role}"] = self.own(grad).detach().clone()

        return note


def _has_weight(module: nn.Module) -> bool:
    # the class of a parametrized module computes it when it is read
    return hasattr(type(module), "weight") or hasattr(module, "weight")


def _forbids_writing(t: torch.Tensor) -> bool:
    """Is this a view that an autograd.Function made? Writing into one that has a gradient
    raises."""
    made = torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION
    return t.requires_grad and t._is_view() and torch._C._autograd._get_creation_meta(t) == made


def tensors_of(held: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, at any depth."""
    return [t for t in tree_leaves(held) if isinstance(t, torch.Tensor)]


def whole_sum(t: Any) -> Any:
    """A tensor that is laid out over ranks, with its partial sums added up."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in t.placements]
    return t.redistribute(placements=placements)


def on_this_rank(t: Any) -> Any:
    """This rank's part of a tensor that is laid out over ranks, after partial sums are added up."""
    if any(placement.is_partial() for placement in getattr(t, "placements", ())):
        t = whole_sum(t)
    return innermost(t)


def copies(take: Callable[..., None]) -> Callable[..., None]:
    """``take``, called with copies of what a tap emits, which may be overwritten; for a tensor that
    is laid out over ranks, with this rank's part."""

    def copied(t: Any) -> Any:
        if isinstance(t, tuple):
            return tuple(map(copied, t))
        return innermost(t).clone() if isinstance(t, torch.Tensor) else t

    def emit(
        a: Any, a_scale: Any, b: Any, b_scale: Any, a_amax: Any = None, b_amax: Any = None
    ) -> None:
        take(*map(copied, (a, a_scale, b, b_scale, a_amax, b_amax)))

    return emit


def kept(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of its values: an optimizer may step before they are checked. Taken from inside a
    library's tensor, which need not support what a plain one does (inference mode, for one)."""
    inner: torch.Tensor = innermost(parameter)
    return inner.detach().clone()


def in_backward() -> bool:
    """True while autograd runs a backward, recomputation included."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """True while torch's checkpoint recomputes for the backward that runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
