"""TransformerEngine's own Python: delayed scaling, current scaling and MXFP8.

On a machine without a GPU its compiled extension is emulated (harness/te_on_cpu), in a process of
its own; where the extension and a GPU are present they are used as they are.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from narrowfuzz.case import Spec
from narrowfuzz.models import te_script
from narrowfuzz.numerics.delayed import Policy, Slot
from narrowfuzz.schedule.carries import Carries
from narrowfuzz.schedule.events import Settings
from narrowfuzz.schedule.trace import Direction, SlotName
from narrowfuzz.stateful import (
    Listener,
    RawCast,
    RawProduct,
    RawSide,
    Role,
    ScheduleScript,
    Stateful,
    Subject,
)
from te_on_cpu import watch
from te_on_cpu.environment import (
    CHOICE,
    chosen_version,
    enter,
    provide,
    real_extension,
)
from torch import nn

Kind = Literal["delayed", "current", "mx"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_META: tuple[tuple[Direction, str], ...] = (("forward", "scaling_fwd"), ("backward", "scaling_bwd"))
_ROLES: dict[str, Role] = {"TN": "output", "NN": "grad_input", "NT": "grad_weight"}
_LAYERS_V1 = ("linear", "layernorm_linear", "rmsnorm_linear")
_LAYERS_V2 = (*_LAYERS_V1, "layernorm_mlp", "grouped_linear", "transformer_layer")
#: te.checkpoint, reentrant or not.
_OURS: tuple[tuple[Literal["library"], bool], ...] = (("library", True), ("library", False))
#: A user's own amax algorithm, equal to "max"; what is saved with a model must be picklable.
_LARGEST = functools.partial(torch.amax, dim=0)


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _v1() -> bool:
    return chosen_version().startswith("1.")


def _state_manager() -> Any:
    place = "fp8" if _v1() else "quantization"
    return importlib.import_module(f"transformer_engine.pytorch.{place}").FP8GlobalStateManager


@functools.lru_cache(maxsize=256)
def _recipe(kind: Kind, settings: Settings) -> Any:
    recipe = importlib.import_module("transformer_engine.common.recipe")
    form = recipe.Format.HYBRID if settings.format == "hybrid" else recipe.Format.E4M3
    if kind == "current":
        return recipe.Float8CurrentScaling(fp8_format=form)
    if kind == "mx":
        return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)
    return recipe.DelayedScaling(
        margin=settings.margin,
        fp8_format=form,
        amax_history_len=settings.history,
        amax_compute_algo=_LARGEST if settings.algorithm == "callable" else settings.algorithm,
    )


@contextmanager
def _autocast(kind: Kind, settings: Settings | None) -> Iterator[None]:
    te = _te()
    if settings is not None:
        os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "0" if settings.fused else "1"
    enabled = settings is not None
    recipe = _recipe(kind, settings) if settings is not None else None
    region = te.fp8_autocast if _v1() else te.autocast
    name = "fp8_recipe" if _v1() else "recipe"
    with region(enabled=enabled, **{name: recipe}):
        yield


def _policy(kind: Kind, settings: Settings) -> Policy | None:
    if kind != "delayed":
        return None
    by_tensor = not settings.fused or settings.algorithm == "callable"
    return Policy(
        settings.history,
        "most_recent" if settings.algorithm == "most_recent" else "max",
        settings.margin,
        "e4m3",
        "e5m2" if settings.format == "hybrid" else "e4m3",
        rolls_on_zero=by_tensor,
        reciprocal=by_tensor,
        backward_commits="first",
    )


def _layer(kind: Kind, spec: Spec) -> nn.Module:
    te, schedule = _te(), spec.schedule
    assert schedule is not None
    options: dict[str, Any] = {
        "bias": spec.bias,
        "params_dtype": _DTYPES[spec.dtype],
        "device": "cuda",
    }
    k = spec.k
    if _v1():
        made = te.fp8_model_init(enabled=schedule.quantized_init)
    else:
        recipe = _recipe(kind, schedule.settings)
        made = te.quantized_model_init(enabled=schedule.quantized_init, recipe=recipe)
    # two kernels of one function, which a non-reentrant checkpoint changes for the whole process
    with made, _switch("NVTE_BIAS_GELU_NVFUSION", "0"):
        match schedule.layer:
            case "linear":
                return te.Linear(k, k, **options)
            case "layernorm_linear":
                return te.LayerNormLinear(k, k, **options)
            case "rmsnorm_linear":
                return te.LayerNormLinear(k, k, normalization="RMSNorm", **options)
            case "layernorm_mlp":
                return te.LayerNormMLP(k, 2 * k, **options)
            case "grouped_linear":
                group = functools.partial(_in_two_groups, 32 if kind == "mx" else 16)
                return _Adapted(te.GroupedLinear(2, k, k, **options), group)
            case "transformer_layer":
                # parameters of their own for q, k and v cannot be made in FP8
                shape = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
                return _Adapted(te.TransformerLayer(k, 2 * k, 2, **shape, **options), _as_sequence)
    raise AssertionError(schedule.layer)


class _Adapted(nn.Module):
    """A layer that wants more than rows of features."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        out: torch.Tensor = self.call(self.layer, x, is_first_microbatch)
        return out


def _in_two_groups(
    block: int, layer: nn.Module, x: torch.Tensor, first: bool | None
) -> torch.Tensor:
    rows = len(x) // (2 * block) * block  # products want groups of whole blocks
    out: torch.Tensor = layer(x, [len(x) - rows, rows], is_first_microbatch=first)
    return out


def _as_sequence(layer: nn.Module, x: torch.Tensor, first: bool | None) -> torch.Tensor:
    out = layer(x.reshape(-1, 2, x.shape[-1]), is_first_microbatch=first)
    return out.reshape(x.shape)  # type: ignore[no-any-return]


def _checkpoint(function: Callable[[Any], Any], x: Any, reentrant: bool) -> Any:
    return _te().checkpoint(function, x, use_reentrant=reentrant)


def _backward(outputs: list[Any], grads: list[Any], retain: bool) -> None:
    torch.autograd.backward(tuple(outputs), tuple(grads), retain_graph=retain)


def _metas(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, Direction, Any]]:
    """(layer, direction, scaling state) of everything that has scaling state."""
    for name, layer in layers.items():
        for path, module in layer.named_modules():
            meta = getattr(module, "fp8_meta", None) or {}
            for direction, key in _META:
                state = meta.get(key)
                if getattr(state, "amax_history", None) is not None:
                    yield f"{name}.{path}" if path else name, direction, state


def _state(layers: Mapping[str, nn.Module]) -> dict[SlotName, Slot]:
    found: dict[SlotName, Slot] = {}
    for name, direction, state in _metas(layers):
        window, scale = state.amax_history.cpu().numpy(), state.scale.cpu().numpy()
        for i in range(len(scale)):
            slot = Slot(scale[i].copy(), window[:, i].copy())
            found[SlotName(name, direction, i)] = slot
    return found


def _pending() -> dict[str, int]:
    manager = _state_manager()
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    state = manager if _v1() else manager.quantization_state
    buffers = state.fp8_tensors_recompute_buffer
    depth = manager.FP8_AUTOCAST_DEPTH if _v1() else state.autocast_depth
    context = getattr(distributed, "activation_recompute_forward", None)
    flags = getattr(context, "_is_first_fp8_module", None)
    return {
        "regions": depth,
        "stashed scales": sum(len(queue) for queue in buffers),
        "first-module flags": len(flags) if flags is not None else 0,
    }


def _reset() -> None:
    _state_manager().reset()
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    context = getattr(distributed, "activation_recompute_forward", None)
    flags = getattr(context, "_is_first_fp8_module", None)
    if flags is not None:
        flags.clear()


@contextmanager
def _listen(layers: Mapping[str, nn.Module], listener: Listener) -> Iterator[None]:
    def hear(seen: watch.Seen) -> None:
        if isinstance(seen, watch.Cast):
            slot = None if seen.amax is None else _slot(layers, seen.amax)
            listener(RawCast(slot, seen.input, seen.codes, seen.scale, seen.format))
        elif isinstance(seen, watch.Multiply):
            listener(RawProduct(_ROLES[seen.layout], _side(seen.a), _side(seen.b)))

    with watch.listening(hear):
        yield


def _side(operand: watch.Operand) -> RawSide:
    return RawSide(operand.data, operand.scale_inv, operand.format)


def _slot(layers: Mapping[str, nn.Module], cell: torch.Tensor) -> SlotName | None:
    """The slot whose staging cell a kernel wrote to."""
    at = cell.data_ptr()
    for name, direction, state in _metas(layers):
        staging = state.amax_history
        index, rest = divmod(at - staging.data_ptr(), staging.element_size())
        if 0 <= index < staging.shape[1] and not rest:
            return SlotName(name, direction, index)
    return None


def _load(layers: nn.Module, state: dict[str, Any]) -> None:
    # scales are saved as a pickle, which 2.x refuses unless told that it is trusted
    with _switch("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1"):
        layers.load_state_dict(state)


@contextmanager
def _switch(name: str, value: str) -> Iterator[None]:
    """The library's environment switch, for the time of the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _subject(kind: Kind) -> Subject:
    return Subject(
        kind=kind,
        layer=functools.partial(_layer, kind),
        autocast=functools.partial(_autocast, kind),
        checkpoint=_checkpoint,
        backward=_backward,
        state=_state,
        pending=_pending,
        reset=_reset,
        listen=_listen,
        policy=functools.partial(_policy, kind),
        load=_load,
    )


def _carries(kind: Kind) -> Carries:
    delayed = kind == "delayed"
    return Carries(
        layers=_LAYERS_V1 if _v1() else _LAYERS_V2,  # type: ignore[arg-type]
        layouts=("chain", "twice", "frozen_first", "dangling", "branch"),
        # torch's own is known not to see regions: once for two of the library's
        checkpoints=(*_OURS, *_OURS, ("torch", False), ("torch", True)),
        caching=True,
        quantized_init=True,
        settings=delayed,
        algorithms=("max", "most_recent", "callable") if delayed else ("max",),
        unfused=delayed,
        reload=True,
        switch=delayed,
        keeps_graphs=False,  # it frees what a backward used: reports/known/te-second-backward.toml
    )


def _script(kind: Kind, spec: Spec) -> ScheduleScript:
    return te_script.script(kind, CHOICE, chosen_version(), spec)


def _refusal(kind: Kind, spec: Spec) -> str:
    if kind == "mx" and (spec.m % 32 or spec.k % 32):
        return "MXFP8 quantises blocks of 32 along both dimensions"
    return ""


def _unavailable(kind: Kind, device: str) -> str:
    if kind != "delayed" and _v1():
        return f"TransformerEngine {chosen_version()} has delayed scaling only"
    if device == "cuda" and not real_extension():
        return "needs TransformerEngine with its compiled extension"
    return ""


def _stateful(name: str, kind: Kind, title: str) -> Stateful:
    return Stateful(
        name=f"te.{name}",
        family=f"te.{name}",
        title=title,
        subject=functools.partial(_subject, kind),
        carries=functools.partial(_carries, kind),
        script=functools.partial(_script, kind),
        dtypes=("bf16", "fp32"),
        refusal=functools.partial(_refusal, kind),
        alignment=32 if kind == "mx" else 16,
        process="te",
        provide=provide,
        prepare=enter,
        unavailable=functools.partial(_unavailable, kind),
    )


RECIPES = [
    _stateful("delayed", "delayed", "TransformerEngine, DelayedScaling"),
    _stateful("current", "current", "TransformerEngine, Float8CurrentScaling"),
    _stateful("mxfp8", "mx", "TransformerEngine, MXFP8BlockScaling"),
]
