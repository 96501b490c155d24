"""A small, correct linear with delayed scaling: the control for trainings with scaling state.

A layer owns its windows (amax histories) and scales. A region (``autocast``) remembers which layers
have staged a maximum, and ``backward`` is a function that commits once the pass is over; the open
regions are the only state that all layers share. It is the reference recipe ``reference.delayed``,
and faults in scaling state are planted in it. Emulated on plain torch: casts produce real FP8
codes, products are fp32 matmuls of the dequantised codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FMAX = {"e4m3": 448.0, "e5m2": 57344.0}
INPUT, WEIGHT = 0, 1


@dataclass(frozen=True)
class DelayedScaling:
    """The settings of delayed scaling."""

    history: int = 4
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    forward: Literal["e4m3", "e5m2"] = "e4m3"
    backward: Literal["e4m3", "e5m2"] = "e5m2"
    #: False: the update handles one tensor after the other, and it shifts a window even if the
    #: staged maximum is 0.
    fused: bool = True


@dataclass(frozen=True)
class Cast:
    """One cast of a tensor to FP8; the tensors are live."""

    layer: DelayedLinear
    direction: Literal["forward", "backward"]
    slot: int
    input: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    format: str


@dataclass(frozen=True)
class Product:
    """One matrix product of codes, with their scales; the tensors are live."""

    role: Literal["output", "grad_input", "grad_weight"]
    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor


Listener = Callable[[Cast | Product], None]


@dataclass(eq=False)
class _Tape:
    """The scales and cached weights that a checkpointed region used in its first pass, for the
    recompute to use again."""

    trains: bool
    recipe: DelayedScaling | None
    scales: list[torch.Tensor] = field(default_factory=list)
    #: Number of a call -> codes and scale of the weight that the call took from the cache.
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    position: int = 0


@dataclass
class _State:
    """The state of execution in this process: open regions, staged layers and checkpoints."""

    recipe: DelayedScaling | None = None
    depth: int = 0
    #: Layers that have staged a forward maximum since the last commit, and their settings.
    staged: dict[DelayedLinear, DelayedScaling] = field(default_factory=dict)
    #: Layers that have staged a maximum of their output gradient, and their settings.
    staged_backward: dict[DelayedLinear, DelayedScaling] = field(default_factory=dict)
    recording: list[_Tape] = field(default_factory=list)
    replaying: list[_Tape] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)


_state = _State()


def reset() -> None:
    """Reset the state to that of a fresh process."""
    _state.__init__()  # type: ignore[misc]


def pending() -> dict[str, int]:
    """Counts that must all be 0 between steps."""
    return {
        "regions": _state.depth,
        "layers staged forward": len(_state.staged),
        "layers staged backward": len(_state.staged_backward),
        "recordings": len(_state.recording),
        "replays": len(_state.replaying),
    }


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with every Cast and every Product."""
    _state.listeners.append(listener)
    try:
        yield
    finally:
        _state.listeners.remove(listener)


@contextmanager
def autocast(recipe: DelayedScaling | None) -> Iterator[None]:
    """Run layers in FP8 (None: in their own dtype). Leaving the outermost region commits."""
    outer, _state.recipe = _state.recipe, recipe
    _state.depth += 1
    try:
        yield
    finally:
        _state.recipe = outer
        _state.depth -= 1
        if _state.depth == 0 and not _state.replaying:
            commit_forward()


def commit_forward() -> None:
    """Update the forward scales of every layer that has staged a maximum since the last commit."""
    for layer, recipe in _state.staged.items():
        layer.commit("forward", recipe)
    _state.staged.clear()


def commit_backward() -> None:
    """Update the scale of the output gradient of every layer that has staged one since the last
    commit."""
    for layer, recipe in _state.staged_backward.items():
        layer.commit("backward", recipe)
    _state.staged_backward.clear()


def backward(
    outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *, retain_graph: bool = False
) -> None:
    """Run one backward pass, then update the output gradients' scales once."""
    torch.autograd.backward(tuple(outputs), tuple(grads), retain_graph=retain_graph)
    commit_backward()


def checkpoint(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, use_reentrant: bool
) -> torch.Tensor:
    """Call ``function`` and recompute it in backward with the scales of its first pass."""
    tape = _Tape(_trains(), _state.recipe)
    ran = False

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal ran
        if ran:
            return _replay(tape, function, x)
        ran = True
        _state.recording.append(tape)
        try:
            return function(x)
        finally:
            _state.recording.remove(tape)

    out = torch_checkpoint(run, x, use_reentrant=use_reentrant)
    assert isinstance(out, torch.Tensor)
    return out


def _replay(
    tape: _Tape, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    tape.position = 0
    outer = (_state.recipe, _state.recording)
    _state.recipe, _state.recording = tape.recipe, []
    _state.replaying.append(tape)
    try:
        return function(x)
    finally:
        _state.replaying.remove(tape)
        _state.recipe, _state.recording = outer


def _trains() -> bool:
    """Will there be a backward? A reentrant checkpoint's first pass builds no graph of its own."""
    return torch.is_grad_enabled() or any(tape.trains for tape in _state.recording)


class DelayedLinear(nn.Module):
    """y = x @ weight.T + bias with operands in FP8, whose scales follow from past maxima.

    Buffers: ``forward_window`` fp32 [history, 2] and ``forward_scale`` fp32 [2] of input and
    weight; ``backward_window`` [history, 1] and ``backward_scale`` [1] of the output gradient.
    The current maximum is staged in cell 0 of a window.
    """

    forward_window: torch.Tensor
    forward_scale: torch.Tensor
    backward_window: torch.Tensor
    backward_scale: torch.Tensor

    def __init__(self, k: int, n: int, *, bias: bool, dtype: torch.dtype, history: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, k, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(n, dtype=dtype)) if bias else None
        for direction, slots in (("forward", 2), ("backward", 1)):
            self.register_buffer(f"{direction}_window", torch.zeros(history, slots))
            self.register_buffer(f"{direction}_scale", torch.ones(slots))
        self.cached: tuple[torch.Tensor, torch.Tensor] | None = None
        #: (direction, slot) of every maximum that was staged since the last commit.
        self.waiting: set[tuple[str, int]] = set()

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """x [..., k] -> [..., n]."""
        recipe = _state.recipe
        if recipe is None:
            return nn.functional.linear(x, self.weight, self.bias)
        scales = self._scales(recipe)
        stages = not _state.replaying and _trains()
        if is_first_microbatch is False:
            weight = self._kept()
        else:
            weight = (self.cast("forward", WEIGHT, self.weight, scales, recipe), scales[WEIGHT])
            if is_first_microbatch and not _state.replaying:
                self.cached = weight
        if stages:
            _state.staged[self] = recipe
            if is_first_microbatch is not False:
                self.stage("forward", WEIGHT, self.weight)
            self.stage("forward", INPUT, x)
        out: torch.Tensor = _Product.apply(
            x, self.weight, self.bias, self, scales[INPUT], weight, recipe
        )
        return out

    def _scales(self, recipe: DelayedScaling) -> torch.Tensor:
        """The scales with which this call quantises: in a recompute, those of the first pass."""
        if _state.replaying:
            # the windows are not resized: the settings may be newer by now
            tape = _state.replaying[-1]
            scales = tape.scales[tape.position]
            tape.position += 1
        else:
            self.resize(recipe.history)
            scales = self.forward_scale.clone()
        for tape in _state.recording:
            tape.scales.append(scales)
        return scales

    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cached weight; in a recompute the one that the first pass used, as a later forward
        may have replaced it in the cache."""
        if _state.replaying:
            tape = _state.replaying[-1]
            operand = tape.kept[tape.position - 1]
        else:
            assert self.cached is not None, "no forward has cached the weight"
            operand = self.cached
        for tape in _state.recording:
            tape.kept[len(tape.scales) - 1] = operand
        return operand

    def resize(self, history: int) -> None:
        """Resize the windows to ``history`` cells: drop the oldest, or add empty ones before them.
        The staging cell is unchanged."""
        for name in ("forward_window", "backward_window"):
            window = getattr(self, name)
            if len(window) != history:
                resized = torch.zeros(history, window.shape[1], device=window.device)
                kept = min(history, len(window)) - 1
                resized[0] = window[0]
                resized[history - kept :] = window[len(window) - kept :]
                setattr(self, name, resized)

    def cast(
        self,
        direction: Literal["forward", "backward"],
        slot: int,
        x: torch.Tensor,
        scales: torch.Tensor,
        recipe: DelayedScaling,
    ) -> torch.Tensor:
        """FP8 codes of x * scale, saturating."""
        kind = getattr(recipe, direction)
        scaled = x.detach().float() * scales[slot]
        codes = scaled.clamp(-FMAX[kind], FMAX[kind]).to(FLOAT8[kind])
        for listener in _state.listeners:
            listener(Cast(self, direction, slot, x, codes, scales[slot], kind))
        return codes

    def stage(self, direction: str, slot: int, x: torch.Tensor) -> None:
        """Raise the staging cell to max|x|; NaN elements are ignored."""
        self.waiting.add((direction, slot))
        cell = getattr(self, f"{direction}_window")[0]
        numbers = x.detach().abs().nan_to_num(nan=0.0, posinf=float("inf"))
        cell[slot] = torch.maximum(cell[slot], numbers.amax().float())

    def commit(self, direction: Literal["forward", "backward"], recipe: DelayedScaling) -> None:
        """Compute the next scales from the windows, then shift the windows by one cell."""
        window, scale = getattr(self, f"{direction}_window"), getattr(self, f"{direction}_scale")
        ran = window[0] != 0
        if not recipe.fused:
            waiting = [(direction, slot) in self.waiting for slot in range(len(scale))]
            ran = torch.tensor(waiting, device=window.device)
        self.waiting -= {(direction, slot) for slot in range(len(scale))}
        amax = window.amax(0) if recipe.algorithm == "max" else window[0]
        # torch computes number / tensor as number * (1 / tensor), which rounds twice
        largest = torch.full_like(amax, FMAX[getattr(recipe, direction)])
        quotient = largest / amax / 2.0**recipe.margin
        fits = quotient.clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(ran & amax.isfinite() & (amax > 0), fits, scale))
        rolled = window.roll(-1, 0)
        rolled[0] = 0
        window.copy_(torch.where(ran, rolled, window))


class _Product(torch.autograd.Function):
    """The three products of a linear, from codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: DelayedLinear,
        scale: torch.Tensor,
        cast: tuple[torch.Tensor, torch.Tensor],
        recipe: DelayedScaling,
    ) -> torch.Tensor:
        scales = torch.stack((scale, cast[1]))
        codes = layer.cast("forward", INPUT, x, scales, recipe)
        ctx.save_for_backward(codes, scale, *cast)
        ctx.layer, ctx.recipe, ctx.bias, ctx.dtype = layer, recipe, bias is not None, x.dtype
        out = _product("output", codes, scale, cast[0].t(), cast[1])
        return (out if bias is None else out + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        codes, scale, weight, weight_scale = ctx.saved_tensors
        layer, recipe = ctx.layer, ctx.recipe
        scales = layer.backward_scale.clone()
        seen = layer.cast("backward", 0, grad, scales, recipe)
        layer.stage("backward", 0, grad)
        _state.staged_backward[layer] = recipe
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            product = _product("grad_input", seen, scales[0], weight, weight_scale)
            grad_input = product.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            rows, x = (t.reshape(-1, t.shape[-1]) for t in (seen, codes))
            grad_weight = _product("grad_weight", rows.t(), scales[0], x, scale).to(ctx.dtype)
        if ctx.bias and ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).float().sum(0).to(ctx.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _product(
    role: Literal["output", "grad_input", "grad_weight"],
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
) -> torch.Tensor:
    """a @ b of the dequantised codes, in fp32."""
    for listener in _state.listeners:
        listener(Product(role, a, a_scale, b, b_scale))
    return (a.float() / a_scale) @ (b.float() / b_scale)
