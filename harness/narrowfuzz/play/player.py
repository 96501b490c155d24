"""Plays one training on a model and keeps what it left.

``play`` is written to be specialised: a script gets it with every argument that is a constant put
in, and without the branches that are never taken.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.checkpoint import full, recomputing, reentrant, selective
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.play.layers import Call, LayerWatch


@dataclass
class Trace:
    """Results by name (output, grad_input, <parameter>.grad and, after steps, <parameter>), the
    calls of watched linears, and how far the run came."""

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    phase: str = "convert"

    def call(self, module: str, index: int, phase: str = "forward") -> Call:
        """One call of a linear. Raises LookupError if there was none."""
        for call in self.calls:
            if (call.module, call.index, call.phase) == (module, index, phase):
                return call
        raise LookupError(f"{module} was not called {index + 1} times in {phase}")


def play(
    trace: Trace,
    build: Callable[[], nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    tied: Mapping[str, str],
    ids: bool = False,
    steps: int = 1,
    microbatches: int = 1,
    optimizer: str = "",
    rate: float = 0.0,
    mode: str = "train",
    autocast: bool = False,
    lifecycle: str = "none",
    input_layout: str = "contiguous",
    grad_layout: str = "contiguous",
    checkpoint: str = "",
    regions: tuple[str, ...] = (),
    kernels: str = "default",
    compiler: str = "",
    compile_with: Mapping[str, Any] = {},
    watch: tuple[str, ...] = (),
    tap: Callable[[Callable[..., None]], contextlib.AbstractContextManager[None]] | None = None,
) -> Trace:
    """Every step's forwards and backwards; each microbatch is the same rows, turned by one more.
    ``watch`` names the linears whose calls are kept, ``tap`` shows what they multiply."""
    with torch.no_grad():
        model = convert(build())
        if lifecycle == "deepcopy":
            model = copy.deepcopy(model)
        if lifecycle == "reload":
            state, model = model.state_dict(), convert(build())
            model.load_state_dict(state)
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[tied.get(name, name)].to(dtype))
    call: Any = model
    if checkpoint == "full":
        call = recomputing(model, full, regions)
    if checkpoint == "reentrant":
        call = recomputing(model, reentrant, regions)
    if checkpoint == "selective":
        call = recomputing(model, selective, regions)
    if compiler:
        call = torch.compile(call, backend=compiler, **compile_with)
    if optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        stepping: Any = getattr(torch.optim, optimizer)(trained, lr=rate)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if kernels == "native":
            stack.enter_context(without_onednn())
        if watch:
            modules = dict(model.named_modules(remove_duplicate=False))
            watching = LayerWatch({name: modules[name] for name in watch if name in modules})
            stack.enter_context(watching.recording())
            trace.calls = watching.calls
        if tap is not None:
            stack.enter_context(tap(watching.emit))
        for turn in range(steps * microbatches):
            if optimizer and turn and turn % microbatches == 0:
                stepping.step()
                stepping.zero_grad()
            x = tensors["input"].roll(turn, 0)
            if ids:
                x = x.long().reshape(input_shape[:-1])
            else:
                x = x.to(dtype).reshape(input_shape)
                if input_layout != "contiguous":
                    x = arranged(x, input_layout)
                x = x.detach().requires_grad_(True)
            trace.phase = "forward"
            modes = {"train": torch.enable_grad, "no_grad": torch.no_grad}
            grad_mode = modes.get(mode, torch.inference_mode)()
            with grad_mode, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                # a leaf's cast would be cached by autocast, which a view is not
                y = call(x.view_as(x) if x.requires_grad else x)
            if mode == "train":
                trace.phase = "backward"
                g = tensors["grad_output"].to(dtype).reshape(output_shape)
                if grad_layout != "contiguous":
                    g = arranged(g, grad_layout)
                y.backward(g.to(y.dtype))
        if optimizer:
            stepping.step()
    trace.results = results_of(model, x, y, parameters=steps > 1)
    return trace


def results_of(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, parameters: bool
) -> dict[str, torch.Tensor]:
    """What the last step left; of a library's own tensor what is inside."""
    found = {"output": y.detach().flatten(0, -2)}
    if x.grad is not None:
        found["grad_input"] = x.grad.flatten(0, -2)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = getattr(parameter.grad, "_data", parameter.grad)
        if parameters:
            found[name] = getattr(parameter, "_data", parameter).detach()
    return found


def arranged(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in a memory layout."""
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    if layout == "expanded" and t.numel():
        return t.reshape(-1, t.shape[-1])[0].expand(t.shape)
    return t
