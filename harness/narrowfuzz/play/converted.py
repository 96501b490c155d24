"""Makes a model, converts and fills it, and has it trained: what a recipe's case is.

As in the player, every function is written to be specialised.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from narrowfuzz.play.checkpoint import full, numbered, recomputing, reentrant, selective
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.play.layers import LayerWatch, copies, on_this_rank
from narrowfuzz.play.player import (
    Event,
    Trace,
    Training,
    in_order,
    keep_norm,
    keep_state,
    leave,
    train,
)


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
    ids: bool = False,
    input_grad: bool = True,
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
    keeps: bool = True,
    watch: tuple[str, ...] = (),
    tap: Callable[[Callable[..., None]], contextlib.AbstractContextManager[None]] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    shard: Callable[[nn.Module], None] | None = None,
    precomputes: bool = False,
    handover: Callable[[Training], None] | None = None,
    ends: bool = True,
) -> Trace:
    """A model that is made, filled and trained, and what it leaves, with its results if it
    ``keeps`` them. ``watch`` names the linears whose calls are kept, ``tap`` shows what they
    multiply, ``around`` surrounds everything that runs. ``shard`` lays the model out over ranks;
    then calls are watched from outside of that, and scales may be precomputed for FSDP. The state
    is handed on by ``handover``; unless it ``ends``, the training goes on elsewhere."""
    with torch.no_grad():
        model = convert(build())
        if lifecycle != "none":
            model = renewed(model, lambda: convert(build()), lifecycle=lifecycle)
        fill(model, tensors, tied=tied, dtype=dtype)
    if shard is not None:
        shard(model)
    run = Training(model, backward=torch.autograd.backward)
    if precomputes:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        run.stepped = precompute_float8_dynamic_scale_for_fsdp
        run.stepped(model)
    if "open" in happens or autocast:
        run.region = regions_of(device, autocast)

    def prepare() -> None:
        run.call = called(
            run, checkpoint=checkpoint, regions=regions, whole=whole, compiler=compiler,
            compile_with=compile_with, memory_budget=memory_budget, watch=watch,
        )  # fmt: skip
        if watch:
            watching.follow(linears(run.model, watch=watch))

    if "reload" in happens:
        run.anew, run.prepare = lambda: convert(build()), prepare
    run.handover = handover
    if "reload" in happens or "rollback" in happens:
        run.load = nn.Module.load_state_dict
    with contextlib.ExitStack() as stack:
        if watch:
            watching = LayerWatch(run)
            if shard is not None:
                watching.outside, watching.own = True, on_this_rank
            trace.calls = watching.calls
            if shard is None:  # who shards does it for all ranks, which share the switch
                stack.enter_context(set_checkpoint_early_stop(False))
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
            trace, run, tensors, events, happens=happens, modes=modes, device=device, dtype=dtype,
            input_shape=input_shape, output_shape=output_shape, ids=ids, input_grad=input_grad,
            optimizer=optimizer, rate=rate, autocast=autocast, input_layout=input_layout,
            grad_layout=grad_layout, keeps=keeps,
        )  # fmt: skip
    if keeps and ends:
        keep_state(trace, run, rate=rate)
        if shard is not None:
            keep_norm(trace, run)
        trace.results = {name: t.cpu() for name, t in in_order(trace.kept).items()}
    if "reload" in happens:
        leave(run)
    return trace


def regions_of(device: str, autocast: bool) -> Callable[[bool | None], Any]:
    """What opens a region, in high precision under None: torch's autocast, or nothing."""
    if autocast:
        return lambda narrow: torch.autocast(device, torch.bfloat16, enabled=bool(narrow))
    return lambda narrow: contextlib.nullcontext()


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
            # a package's own model may know better what to keep
            how = getattr(run.model, "selective", selective)
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
