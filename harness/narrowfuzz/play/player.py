"""Plays one training on a model and keeps what it left.

The functions here are written to be specialised: a script gets them with every keyword argument
that is a constant put in, and without the branches that are never taken.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.checkpoint import full, recomputing, reentrant, selective
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.play.layers import LayerWatch, copies


@dataclass
class Trace:
    """Results by name (output, grad_input, <parameter>.grad and, after steps, <parameter>), the
    calls of watched linears, or what was multiplied where none is watched, and how far the run
    came."""

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    gemms: list[Any] = field(default_factory=list)
    phase: str = "convert"

    def call(self, module: str, index: int, phase: str = "forward") -> Any:
        """One call of a linear. Raises LookupError if there was none."""
        for call in self.calls:
            if (call.module, call.index, call.phase) == (module, index, phase):
                return call
        raise LookupError(f"{module} was not called {index + 1} times in {phase}")


#: ("run", turn): forward and backward of the input's rows, turned by so many. ("step",) of the
#: optimizer. ("clear", to_none): the gradients. ("reload", weights_only): a new model gets the
#: state, from a file that may hold nothing but weights or anything.
Event = tuple[Any, ...]


def default_events(steps: int, microbatches: int, *, optimizes: bool) -> tuple[Event, ...]:
    """A training: so many steps of so many microbatches, each the same rows, turned by one more."""
    events: list[Event] = []
    for turn in range(steps * microbatches):
        if optimizes and turn and turn % microbatches == 0:
            events += [("step",), ("clear", True)]
        events.append(("run", turn))
    return (*events, ("step",)) if optimizes else tuple(events)


def play(
    trace: Trace,
    build: Callable[[], nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    events: Sequence[Event],
    *,
    device: str,
    dtype: torch.dtype,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    tied: Mapping[str, str],
    parameters: bool = False,
    ids: bool = False,
    optimizer: str = "",
    rate: float = 0.0,
    mode: str = "train",
    autocast: bool = False,
    lifecycle: str = "none",
    reloads: bool = False,
    input_layout: str = "contiguous",
    grad_layout: str = "contiguous",
    checkpoint: str = "",
    regions: tuple[str, ...] = (),
    kernels: str = "default",
    compiler: str = "",
    compile_with: Mapping[str, Any] = {},
    memory_budget: float = 1.0,
    watch: tuple[str, ...] = (),
    tap: Callable[[Callable[..., None]], contextlib.AbstractContextManager[None]] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Trace:
    """Every event in order. ``watch`` names the linears whose calls are kept, ``tap`` shows what
    they multiply, ``around`` surrounds everything that runs. ``parameters`` are results, too;
    ``reloads`` says whether an event does."""
    with torch.no_grad():
        model = convert(build())
        if lifecycle == "deepcopy":
            model = copy.deepcopy(model)
        if lifecycle == "reload":
            state, model = model.state_dict(), convert(build())
            model.load_state_dict(state)
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[tied.get(name, name)].to(dtype))
    call = called(
        model, checkpoint=checkpoint, regions=regions, compiler=compiler,
        compile_with=compile_with, memory_budget=memory_budget,
    )  # fmt: skip
    if optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        stepping: Any = getattr(torch.optim, optimizer)(trained, lr=rate)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if watch:
            watching = stack.enter_context(contextlib.ExitStack())
            watched(trace, model, watching, watch=watch, tap=tap)
        if tap is not None and not watch:
            stack.enter_context(tap(copies(lambda *gemm: trace.gemms.append(gemm))))
        if around is not None:
            stack.enter_context(around())
        if kernels == "native":
            stack.enter_context(without_onednn())
        for event, *how in events:
            if optimizer and event == "step":
                stepping.step()
            elif optimizer and event == "clear":
                stepping.zero_grad(set_to_none=how[0])
            elif reloads and event == "reload":
                torch.save(model.state_dict(), file := io.BytesIO())
                file.seek(0)
                call = model = convert(build())
                model.load_state_dict(torch.load(file, weights_only=how[0]))
                if watch:
                    watched(trace, model, watching, watch=watch, tap=tap)
            else:
                x, y = once(
                    trace, call, tensors, how[0], device=device, dtype=dtype,
                    input_shape=input_shape, output_shape=output_shape, ids=ids,
                    input_layout=input_layout, grad_layout=grad_layout, mode=mode,
                    autocast=autocast,
                )  # fmt: skip
    trace.results = results_of(model, x, y, parameters=parameters)
    return trace


def called(
    model: nn.Module,
    *,
    checkpoint: str,
    regions: tuple[str, ...],
    compiler: str,
    compile_with: Mapping[str, Any],
    memory_budget: float,
) -> Any:
    """The model as it is called: recomputed, compiled, both or neither."""
    call: Any = model
    if checkpoint == "full":
        call = recomputing(model, full, regions)
    if checkpoint == "reentrant":
        call = recomputing(model, reentrant, regions)
    if checkpoint == "selective":
        call = recomputing(model, selective, regions)
    if memory_budget < 1:
        from torch._functorch import config

        config.activation_memory_budget = memory_budget
    if compiler:
        call = torch.compile(call, backend=compiler, **compile_with)
    return call


def watched(
    trace: Trace,
    model: nn.Module,
    stack: contextlib.ExitStack,
    *,
    watch: tuple[str, ...],
    tap: Callable[[Callable[..., None]], contextlib.AbstractContextManager[None]] | None,
) -> None:
    """Keep the calls of these linears from now on, until ``stack`` closes."""
    stack.close()
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = LayerWatch({name: modules[name] for name in watch if name in modules})
    stack.enter_context(layers.recording())
    trace.calls = layers.calls
    if tap is not None:
        stack.enter_context(tap(copies(layers.emit)))


def once(
    trace: Trace,
    call: Any,
    tensors: Mapping[str, torch.Tensor],
    turn: int,
    *,
    device: str,
    dtype: torch.dtype,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    ids: bool,
    input_layout: str,
    grad_layout: str,
    mode: str,
    autocast: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward and backward of the rows, turned by so many: input and output."""
    x = tensors["input"].roll(turn, 0)
    if ids:
        x = x.to(device).long().reshape(input_shape[:-1])
    else:
        x = x.to(device, dtype).reshape(input_shape)
        if input_layout != "contiguous":
            x = arranged(x, input_layout)
        x = x.detach().requires_grad_(True)
    trace.phase = "forward"
    modes = {"train": torch.enable_grad, "no_grad": torch.no_grad}
    grad_mode = modes.get(mode, torch.inference_mode)()
    with grad_mode, torch.autocast(device, torch.bfloat16, enabled=autocast):
        # a leaf's cast would be cached by autocast, which a view is not
        y = call(x.view_as(x) if x.requires_grad else x)
    if mode == "train":
        trace.phase = "backward"
        g = tensors["grad_output"].to(device, dtype).reshape(output_shape)
        if grad_layout != "contiguous":
            g = arranged(g, grad_layout)
        y.backward(g.to(y.dtype))
    return x, y


def results_of(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, parameters: bool
) -> dict[str, torch.Tensor]:
    """What the last step left, on the CPU; of a library's own tensor what is inside."""
    found = {"output": y.detach().flatten(0, -2)}
    if x.grad is not None:
        found["grad_input"] = x.grad.flatten(0, -2)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = getattr(parameter.grad, "_data", parameter.grad)
        if parameters:
            found[name] = getattr(parameter, "_data", parameter).detach()
    return {name: t.cpu() for name, t in found.items()}


def arranged(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in a memory layout."""
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    if layout == "expanded" and t.numel():
        return t.reshape(-1, t.shape[-1])[0].expand(t.shape)
    return t
