"""TransformerEngine's own Python: delayed and current scaling, FP8 block scaling, MXFP8, NVFP4.

On a machine without a GPU its compiled extension is emulated (harness/te_on_cpu), in a process of
its own; where the extension and a GPU are present they are used as they are.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from narrowfuzz.case.events import Settings
from narrowfuzz.case.spec import AnyCheckpoint, Spec
from narrowfuzz.numerics.delayed import Policy
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.library import Cast, Product, Side
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.recipe.stateful import Held, Listener, Subject
from te_on_cpu import watch
from te_on_cpu.environment import chosen_version, enter, provide, real_extension
from te_on_cpu.v2_native import listening_to_extension
from te_on_cpu.v2_releases import NVFP4, STORAGES_ARE_CALLED_SO, release_of
from torch import nn

Kind = Literal["delayed", "current", "block", "mx", "nvfp4", "nvfp4_stochastic"]
_FP4 = ("nvfp4", "nvfp4_stochastic")
#: Selects one of two kernels for bias and GELU: a non-reentrant checkpoint changes to the other one
#: for the rest of the process.
_ONE_KERNEL = {"NVTE_BIAS_GELU_NVFUSION": "0"}
_META = (("forward", "scaling_fwd"), ("backward", "scaling_bwd"))
_ROLES = {"TN": "output", "NN": "grad_input", "NT": "grad_weight"}
_LAYERS_V1 = ("linear", "layernorm_linear", "rmsnorm_linear")
_LAYERS_V2 = (*_LAYERS_V1, "layernorm_mlp", "grouped_linear", "transformer_layer")
#: te.checkpoint, reentrant or not.
_OURS: tuple[AnyCheckpoint, ...] = ("reentrant", "full")
#: A user's own amax algorithm, equal to "max"; picklable, because it is saved with a model.
_LARGEST = functools.partial(torch.amax, dim=0)


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _v1() -> bool:
    return chosen_version().startswith("1.")


def _fp8_names() -> bool:
    """Whether what is called quantization and autocast since 2.9 still has its names with fp8."""
    return release_of(chosen_version()) < STORAGES_ARE_CALLED_SO


def _enter(*, version: str) -> None:
    """Without a GPU, TransformerEngine's own Python runs on an emulated extension."""
    if not torch.cuda.is_available():
        from te_on_cpu.environment import VERSION_VARIABLE, enter

        os.environ.setdefault(VERSION_VARIABLE, version)
        enter()


def _manager(*, fp8: bool) -> Any:
    place = "transformer_engine.pytorch.fp8" if fp8 else "transformer_engine.pytorch.quantization"
    return importlib.import_module(place).FP8GlobalStateManager


def _recipe(settings: Any, *, kind: Kind) -> Any:
    recipe = importlib.import_module("transformer_engine.common.recipe")
    form = recipe.Format.HYBRID if settings.format == "hybrid" else recipe.Format.E4M3
    if kind == "current":
        return recipe.Float8CurrentScaling(fp8_format=form)
    if kind == "block":
        return recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3)
    if kind == "mx":
        return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)
    if kind in ("nvfp4", "nvfp4_stochastic"):
        return recipe.NVFP4BlockScaling(disable_stochastic_rounding=kind == "nvfp4")
    return recipe.DelayedScaling(
        margin=settings.margin,
        fp8_format=form,
        amax_history_len=settings.history,
        amax_compute_algo=_LARGEST if settings.algorithm == "callable" else settings.algorithm,
        reduce_amax=settings.reduces != "none",
    )


@functools.cache
def _alone(world: Any) -> Any:
    """A group of this rank only, cached for each group of all ranks."""
    return dist.new_subgroups(1)[0]


@contextmanager
def _autocast(settings: Any, *, kind: Kind, fp8: bool) -> Iterator[None]:
    recipe = group = None  # without a group, all ranks share their amaxes
    if settings is not None:
        recipe = _recipe(settings, kind=kind)
        if settings.reduces == "own" and dist.is_initialized():
            group = _alone(dist.group.WORLD)
        os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "0" if settings.fused else "1"
    on = recipe is not None
    if fp8:
        region = _te().fp8_autocast(enabled=on, fp8_recipe=recipe, fp8_group=group)
    else:
        region = _te().autocast(enabled=on, recipe=recipe, amax_reduction_group=group)
    with region:
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


def _layer(spec: Any, settings: Any, *, kind: Kind, v1: bool, fp8: bool) -> nn.Module:
    if not spec.quantized_init:
        return _module(spec, kind=kind)
    if v1:
        made = _te().fp8_model_init()
    elif fp8:
        made = _te().fp8_model_init(recipe=_recipe(settings, kind=kind))
    else:
        made = _te().quantized_model_init(recipe=_recipe(settings, kind=kind))
    with made:
        return _module(spec, kind=kind)


def _module(spec: Any, *, kind: Kind) -> Any:
    te = _te()
    options = {"bias": spec.bias, "params_dtype": DTYPES[spec.dtype], "device": "cuda"}
    if spec.layer == "layernorm_linear":
        return te.LayerNormLinear(spec.k, spec.k, **options)
    if spec.layer == "rmsnorm_linear":
        return te.LayerNormLinear(spec.k, spec.k, normalization="RMSNorm", **options)
    if spec.layer == "layernorm_mlp":
        with patch.dict(os.environ, _ONE_KERNEL):
            return te.LayerNormMLP(spec.k, 2 * spec.k, **options)
    if spec.layer == "grouped_linear":
        groups = te.GroupedLinear(2, spec.k, spec.k, **options)
        return _InTwoGroups(groups, 32 if kind in ("mx", *_FP4) else 16)
    if spec.layer == "transformer_layer":
        # separate parameters for q, k and v cannot be made in FP8
        options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
        with patch.dict(os.environ, _ONE_KERNEL):
            return _OfSequences(te.TransformerLayer(spec.k, 2 * spec.k, 2, **options))
    return te.Linear(spec.k, spec.k, **options)


class _InTwoGroups(nn.Module):
    """GroupedLinear with two groups, on rows of features."""

    def __init__(self, layer: nn.Module, block: int) -> None:
        super().__init__()
        self.layer, self.block = layer, block

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        rows = len(x) // (2 * self.block) * self.block  # products need groups of whole blocks
        splits = [len(x) - rows, rows]
        return self.layer(x, splits, is_first_microbatch=is_first_microbatch)


class _OfSequences(nn.Module):
    """TransformerLayer on rows of features, as two sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        rows = x.reshape(-1, 2, x.shape[-1])
        return self.layer(rows, is_first_microbatch=is_first_microbatch).reshape(x.shape)


def _checkpoint(function: Callable[[Any], Any], x: Any, reentrant: bool) -> Any:
    return _te().checkpoint(function, x, use_reentrant=reentrant)


def _backward(outputs: list[Any], grads: list[Any], retain: bool) -> None:
    torch.autograd.backward(tuple(outputs), tuple(grads), retain_graph=retain)


def _metas(layers: Any) -> Iterator[tuple[str, str, Any]]:
    """(layer, direction, scaling state) of everything that has scaling state."""
    for name, layer in layers.items():
        for path, module in layer.named_modules():
            meta = getattr(module, "fp8_meta", None) or {}
            for direction, key in _META:
                state = meta.get(key)
                if getattr(state, "amax_history", None) is not None:
                    yield f"{name}.{path}" if path else name, direction, state


def _state(layers: Any) -> Iterator[Held]:
    for name, direction, state in _metas(layers):
        for i in range(len(state.scale)):
            yield (name, direction, i), state.scale[i].cpu(), state.amax_history[:, i].cpu()


#: How deep regions are nested, until 2.8, until 2.14 and since then.
_DEPTHS = ("FP8_AUTOCAST_DEPTH", "AUTOCAST_DEPTH", "autocast_depth")


def _pending(*, fp8: bool) -> dict[str, int]:
    manager = _manager(fp8=fp8)
    state = getattr(manager, "quantization_state", manager)  # an object of its own from 2.15 on
    flags = _flags()
    return {
        "regions": next(getattr(state, name) for name in _DEPTHS if hasattr(state, name)),
        "stashed scales": sum(len(queue) for queue in state.fp8_tensors_recompute_buffer),
        "first-module flags": len(flags) if flags is not None else 0,
    }


def _flags() -> Any:
    """Checkpoints' record of which layer is the first; None in versions that have none."""
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    context = getattr(distributed, "activation_recompute_forward", None)
    return getattr(context, "_is_first_fp8_module", None)


def _reset(*, fp8: bool) -> None:
    _manager(fp8=fp8).reset()
    flags = _flags()
    if flags is not None:
        flags.clear()


@contextmanager
def _listen(layers: Any, listener: Listener) -> Iterator[None]:
    """Kernels of TransformerEngine's own extension that quantise their results hide these: for
    layers that call such kernels, only the formats of products are reported."""
    own, te = real_extension(), _te()
    hidden = own and any(
        isinstance(module, (te.LayerNormLinear, te.LayerNormMLP)) for module in layers.modules()
    )

    def hear(seen: Any) -> None:
        if isinstance(seen, watch.Cast) and not hidden:
            slot = None if seen.amax is None else _slot(layers, seen.amax)
            listener(Cast(slot, seen.input, seen.codes, seen.scale, seen.format))
        elif isinstance(seen, watch.Multiply):
            sides = (_side(one, scaled=not hidden) for one in (seen.a, seen.b))
            listener(Product(_ROLES[seen.layout], *sides))

    with listening_to_extension(hear) if own else watch.listening(hear):
        yield


def _side(operand: Any, *, scaled: bool) -> Side:
    return Side(operand.data, operand.scale_inv if scaled else None, operand.format)


def _slot(layers: Any, cell: torch.Tensor) -> tuple[str, str, int] | None:
    """The slot whose staging cell a kernel wrote to."""
    for name, direction, state in _metas(layers):
        staging = state.amax_history
        index, rest = divmod(cell.data_ptr() - staging.data_ptr(), staging.element_size())
        if 0 <= index < staging.shape[1] and not rest:
            return name, direction, index
    return None


def _load(layers: Any, state: dict[str, Any]) -> None:
    # scales are saved as a pickle, which 2.x refuses unless this marks it as trusted
    with patch.dict(os.environ, NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE="1"):
        layers.load_state_dict(state)


def _subject(kind: Kind, device: str) -> Subject:
    v1, fp8 = _v1(), _fp8_names()
    return Subject(
        kind="nvfp4" if kind == "nvfp4_stochastic" else kind,
        layer=functools.partial(_layer, kind=kind, v1=v1, fp8=fp8),
        autocast=functools.partial(_autocast, kind=kind, fp8=fp8),
        checkpoint=_checkpoint,
        backward=_backward,
        state=_state,
        pending=functools.partial(_pending, fp8=fp8),
        reset=functools.partial(_reset, fp8=fp8),
        listen=_listen,
        policy=functools.partial(_policy, kind),
        load=_load,
        resizing=frozenset({"quantization", "fp8", "base"}),
        enter=functools.partial(_enter, version=chosen_version()),
        gradient_rounding="stochastic" if kind == "nvfp4_stochastic" else "nearest",
    )


#: Sizes of FP8 block scaling: a part of a block of 128, one and a part, two and a part.
_FEATURES, _ROWS = (144, 32, 144, 272), (32, 144, 32, 272)


def _carries(kind: Kind) -> Carries:
    delayed = kind == "delayed"
    return Carries(
        layers=_LAYERS_V1 if _v1() else _LAYERS_V2,
        layouts=("chain", "twice", "frozen_first", "dangling", "branch"),
        # torch's own does not see regions, a known issue: drawn once for two of the library's
        checkpoints=(*_OURS, *_OURS, "by_torch", "by_torch_reentrant"),
        caching=True,
        quantized_init=True,
        settings=delayed,
        algorithms=("max", "most_recent", "callable") if delayed else ("max",),
        unfused=delayed,
        reload=True,
        switch=delayed,
        ranks=delayed,
        features=_FEATURES if kind == "block" else Carries.features,
        rows=_ROWS if kind == "block" else Carries.rows,
        keeps_graphs=False,  # it frees what a backward used: reports/known/te-second-backward.toml
    )


def _refusal(kind: Kind, spec: Spec, device: str) -> str:
    if kind == "mx" and (spec.m % 32 or spec.k % 32):
        return "MXFP8 quantises blocks of 32 along both dimensions"
    if kind in _FP4 and (spec.m % 32 or spec.k % 32):
        return "NVFP4 multiplies multiples of 32 along both dimensions"
    return ""


def _unavailable(kind: Kind, backend: str, device: str) -> str:
    version = chosen_version()
    if kind != "delayed" and _v1():
        return f"TransformerEngine {version} has delayed scaling only"
    if kind in _FP4 and release_of(version) < NVFP4 and not real_extension():
        return f"the casts to NVFP4 of TransformerEngine {version} are not emulated"
    if device == "cuda" and not real_extension():
        return "needs TransformerEngine with its compiled extension"
    return ""


def _stateful(name: str, kind: Kind, title: str) -> Recipe:
    return Recipe(
        name=f"te.{name}",
        family=f"te.{name.partition('.')[0]}",
        title=title,
        subject=functools.partial(_subject, kind),
        carries=functools.partial(_carries, kind),
        dtypes=("bf16",) if kind in _FP4 else ("bf16", "fp32"),
        refusal=functools.partial(_refusal, kind),
        alignment=32 if kind in ("mx", *_FP4) else 16,
        process="te",
        provide=provide,
        prepare=enter,
        unavailable=functools.partial(_unavailable, kind),
    )


_EMULATED = "without its compiled extension, kernels are emulated on the CPU"

RECIPES = [
    _stateful("delayed", "delayed", f"TransformerEngine's Python, DelayedScaling; {_EMULATED}"),
    _stateful(
        "current", "current", f"TransformerEngine's Python, Float8CurrentScaling; {_EMULATED}"
    ),
    _stateful("blockwise", "block", f"TransformerEngine's Python, Float8BlockScaling; {_EMULATED}"),
    _stateful("mxfp8", "mx", f"TransformerEngine's Python, MXFP8BlockScaling; {_EMULATED}"),
    _stateful(
        "nvfp4",
        "nvfp4",
        f"TransformerEngine's Python, NVFP4BlockScaling without stochastic rounding; {_EMULATED}",
    ),
    _stateful(
        "nvfp4.stochastic",
        "nvfp4_stochastic",
        f"TransformerEngine's Python, NVFP4BlockScaling as it is, gradients rounded stochastically;"
        f" {_EMULATED}",
    ),
]
