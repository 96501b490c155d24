"""Plays one training on a model, event by event, and keeps what it left.

Arms, the float64 twin and scripts are made of these functions. They are written to be specialised:
a script gets them with every keyword argument that is a constant put in, and without the branches
that are never taken.
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

from narrowfuzz.play.checkpoint import full, numbered, recomputing, reentrant, selective
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.play.layers import LayerWatch, copies


@dataclass
class Trace:
    """Results by name (output, grad_input, <parameter>.grad and, after steps, <parameter>): the
    last of each, and those before it with their numbers, as in output@0. The calls of watched
    linears, or what was multiplied where none is watched, and how far the run came."""

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


#: ("open", narrow) and ("close",): an autocast region. ("forward", number, turn, mode, autocast):
#: on the input's rows, turned by so many, or on an input of its own. ("backward", number, of,
#: retain): through the outputs of these forwards. ("step",) of the optimizer. ("clear", to_none):
#: the gradients. ("reload", weights_only): a new model gets the state, from a file that may hold
#: nothing but weights or anything. ("rollback",): the model gets the state that it began with.
Event = tuple[Any, ...]


@dataclass
class Training:
    """A model as far as it is trained: how it is called, its optimizer if any, the state it began
    with, and input and output of each forward whose graph exists."""

    model: nn.Module
    call: Any
    optimizer: Any = None
    began: Any = None
    live: dict[int, Any] = field(default_factory=dict)
    forward: int = 0
    regions: list[Any] = field(default_factory=list)


def play(
    trace: Trace,
    build: Callable[[], nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    events: Sequence[Event],
    *,
    happens: tuple[str, ...],
    modes: tuple[str, ...],
    device: str,
    dtype: torch.dtype,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    tied: Mapping[str, str],
    parameters: bool = False,
    ids: bool = False,
    optimizer: str = "",
    rate: float = 0.0,
    autocast: bool = False,
    lifecycle: str = "none",
    input_layout: str = "contiguous",
    grad_layout: str = "contiguous",
    checkpoint: str = "",
    regions: tuple[str, ...] = (),
    whole: bool = True,
    kernels: str = "default",
    compiler: str = "",
    compile_with: Mapping[str, Any] = {},
    memory_budget: float = 1.0,
    watch: tuple[str, ...] = (),
    tap: Callable[[Callable[..., None]], contextlib.AbstractContextManager[None]] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Trace:
    """A model that is made, filled and trained. ``watch`` names the linears whose calls are kept,
    ``tap`` shows what they multiply, ``around`` surrounds everything that runs."""
    with torch.no_grad():
        model = convert(build())
        if lifecycle != "none":
            model = renewed(model, lambda: convert(build()), lifecycle=lifecycle)
        fill(model, tensors, tied=tied, dtype=dtype)
    run = Training(model, model)

    def prepare() -> None:
        run.call = called(
            run, checkpoint=checkpoint, regions=regions, whole=whole, compiler=compiler,
            compile_with=compile_with, memory_budget=memory_budget, watch=watch,
        )  # fmt: skip
        if watch:
            watching.follow(linears(run.model, watch=watch))

    with contextlib.ExitStack() as stack:
        if watch:
            watching = LayerWatch(run)
            trace.calls = watching.calls
            stack.enter_context(watching.recording())
            if tap is not None:
                stack.enter_context(tap(copies(watching.emit)))
        if tap is not None and not watch:
            stack.enter_context(tap(copies(lambda *gemm: trace.gemms.append(gemm))))
        prepare()
        torch.manual_seed(0)
        if around is not None:
            stack.enter_context(around())
        if kernels == "native":
            stack.enter_context(without_onednn())
        train(
            trace, run, tensors, events, lambda: convert(build()), prepare,
            happens=happens, modes=modes, device=device, dtype=dtype, input_shape=input_shape,
            output_shape=output_shape, ids=ids, optimizer=optimizer, rate=rate, autocast=autocast,
            input_layout=input_layout, grad_layout=grad_layout, parameters=parameters,
        )  # fmt: skip
    trace.results = {name: t.cpu() for name, t in trace.results.items()}
    return trace


def renewed(model: nn.Module, anew: Callable[[], nn.Module], *, lifecycle: str) -> nn.Module:
    """The model itself, a copy of it, or another one that has loaded its state."""
    if lifecycle == "deepcopy":
        return copy.deepcopy(model)
    if lifecycle == "reload":
        other = anew()
        other.load_state_dict(model.state_dict())
        return other
    return model


def fill(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    tied: Mapping[str, str],
    dtype: torch.dtype,
) -> None:
    """Write a case's values into the parameters and clear their gradients."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[tied.get(name, name)].to(dtype))
        parameter.grad = None


def called(
    run: Training,
    *,
    checkpoint: str,
    regions: tuple[str, ...],
    whole: bool,
    compiler: str,
    compile_with: Mapping[str, Any],
    memory_budget: float,
    watch: tuple[str, ...],
) -> Any:
    """The model as it is called: recomputed, compiled, both or neither. Where calls are watched, a
    recompute knows which forward it repeats."""
    call: Any = run.model
    if checkpoint:
        how: Any = full
        if checkpoint == "reentrant":
            how = reentrant
        if checkpoint == "selective":
            how = selective
        if watch:
            how = numbered(how, run)
        call = recomputing(run.model, how, regions, whole)
    if memory_budget < 1:
        from torch._functorch import config

        config.activation_memory_budget = memory_budget
    if compiler:
        call = torch.compile(call, backend=compiler, **compile_with)
    return call


def linears(model: nn.Module, *, watch: tuple[str, ...]) -> dict[str, nn.Module]:
    """The watched modules of a model by name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: modules[name] for name in watch if name in modules}


def train(
    trace: Trace,
    run: Training,
    tensors: Mapping[str, torch.Tensor],
    events: Sequence[Event],
    anew: Callable[[], nn.Module],
    prepare: Callable[[], None],
    *,
    happens: tuple[str, ...],
    modes: tuple[str, ...],
    device: str,
    dtype: torch.dtype,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    ids: bool,
    optimizer: str,
    rate: float,
    autocast: bool,
    input_layout: str,
    grad_layout: str,
    parameters: bool,
) -> None:
    """Every event in order; results are left live. ``happens`` and ``modes`` are the kinds of
    events and of forwards. Where a model is made ``anew``, ``prepare`` says how it is called."""
    if optimizer:
        run.optimizer = optimizing(run.model, optimizer=optimizer, rate=rate)
    if "rollback" in happens:
        run.began = saved(run.model)
    for event, *how in events:
        if "open" in happens and event == "open":
            run.regions.append(contextlib.ExitStack())
            narrow = torch.autocast(device, torch.bfloat16, enabled=how[0])
            run.regions[-1].enter_context(narrow if autocast else contextlib.nullcontext())
        if "close" in happens and event == "close":
            run.regions.pop().close()
        if "forward" in happens and event == "forward":
            forward(
                trace, run, tensors, *how, modes=modes, device=device, dtype=dtype,
                input_shape=input_shape, ids=ids, input_layout=input_layout, autocast=autocast,
            )  # fmt: skip
        if "backward" in happens and event == "backward":
            backward(
                trace, run, tensors, *how, device=device, dtype=dtype, output_shape=output_shape,
                grad_layout=grad_layout,
            )  # fmt: skip
        if "step" in happens and event == "step":
            run.optimizer.step()
        if "clear" in happens and event == "clear":
            clear(trace, run, *how)
        if "reload" in happens and event == "reload":
            trace.phase, state = "convert", saved(run.model)
            run.model = anew()
            run.model.load_state_dict(loaded(state, weights_only=how[0]))
            prepare()
            if optimizer:
                moments = run.optimizer.state_dict()
                run.optimizer = optimizing(run.model, optimizer=optimizer, rate=rate)
                run.optimizer.load_state_dict(moments)
        if "rollback" in happens and event == "rollback":
            trace.phase = "convert"
            run.model.load_state_dict(loaded(run.began, weights_only=False))
            if optimizer:
                run.optimizer = optimizing(run.model, optimizer=optimizer, rate=rate)
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            keep(trace, f"{name}.grad", inner(parameter.grad))
        if parameters:
            keep(trace, name, inner(parameter).detach())


def saved(model: nn.Module) -> io.BytesIO:
    """A file with the model's state."""
    torch.save(model.state_dict(), file := io.BytesIO())
    return file


def loaded(file: io.BytesIO, *, weights_only: bool) -> Any:
    """The state in such a file."""
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def optimizing(model: nn.Module, *, optimizer: str, rate: float) -> Any:
    """An optimizer of what trains."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return getattr(torch.optim, optimizer)(trained, lr=rate)


def keep(trace: Trace, name: str, result: torch.Tensor) -> None:
    """The last of a name has it alone, those before it their numbers."""
    if name in trace.results:
        before = sum(other.startswith(f"{name}@") for other in trace.results)
        trace.results[f"{name}@{before}"] = trace.results.pop(name)
    trace.results[name] = result


def inner(t: Any) -> torch.Tensor:
    """Of a library's own tensor what is inside."""
    return getattr(t, "_data", t)  # type: ignore[no-any-return]


def forward(
    trace: Trace,
    run: Training,
    tensors: Mapping[str, torch.Tensor],
    number: int,
    turn: int,
    mode: str,
    narrow: bool,
    *,
    modes: tuple[str, ...],
    device: str,
    dtype: torch.dtype,
    input_shape: tuple[int, ...],
    ids: bool,
    input_layout: str,
    autocast: bool,
) -> None:
    """Run the model, with ``mode`` train on a graph; ``narrow``: under autocast."""
    x = tensors.get(f"input@{number}", tensors["input"]).roll(turn, 0)
    if ids:
        x = x.to(device).long().reshape(input_shape[:-1])
    else:
        x = x.to(device, dtype).reshape(input_shape)
        if input_layout != "contiguous":
            x = arranged(x, input_layout)
        x = x.detach().requires_grad_(True)
    trace.phase, run.forward = "forward", number
    if "eval" in modes:
        run.model.train(mode != "eval")
    modes_of = {"train": torch.enable_grad, "inference": torch.inference_mode}
    own = contextlib.nullcontext()
    if autocast and narrow:
        own = torch.autocast(device, torch.bfloat16)
    with modes_of.get(mode, torch.no_grad)(), own:
        if autocast and not ids:  # noqa: SIM108 - a leaf's cast would be cached by autocast
            y = run.call(x.view_as(x))
        else:
            y = run.call(x)
    if "eval" in modes:
        run.model.train()
    keep(trace, "output", y.detach().flatten(0, -2))
    if mode == "train":
        run.live[number] = x, y


def backward(
    trace: Trace,
    run: Training,
    tensors: Mapping[str, torch.Tensor],
    number: int,
    of: tuple[int, ...],
    retain: bool,
    *,
    device: str,
    dtype: torch.dtype,
    output_shape: tuple[int, ...],
    grad_layout: str,
) -> None:
    """One backward through the outputs of these forwards."""
    trace.phase = "backward"
    g = tensors.get(f"grad_output@{number}", tensors["grad_output"])
    g = g.to(device, dtype).reshape(output_shape)
    if grad_layout != "contiguous":
        g = arranged(g, grad_layout)
    ends = [run.live[f][1] for f in of]
    torch.autograd.backward(ends, [g.to(y.dtype) for y in ends], retain_graph=retain)
    for f in of:
        x = run.live[f][0] if retain else run.live.pop(f)[0]
        if x.grad is not None:
            keep(trace, "grad_input", x.grad.flatten(0, -2))
            x.grad = None


def clear(trace: Trace, run: Training, to_none: bool) -> None:
    """The optimizer's gradients are gone, or zero."""
    for name, parameter in run.model.named_parameters():
        if to_none and parameter.grad is not None:
            keep(trace, f"{name}.grad", inner(parameter.grad))
    run.optimizer.zero_grad(set_to_none=to_none)


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
