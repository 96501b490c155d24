"""TransformerEngine's delayed scaling, updated at the wrong time or for the wrong layers.

Each fault has the mechanism of a real bug, planted in ``transformer_engine.pytorch`` where it stood
or would stand today. A fault's own memory lasts from its planting to its removal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant

_Context = AbstractContextManager[None]


def _state() -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager.quantization_state


def _never_first_in_a_recompute(first: Any) -> bool:
    from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

    is_first = bool(first())
    return is_first and not in_fp8_activation_recompute_phase()


def _frozen_layers_ask(prepare: Any, layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer that will have no backward also calls ``is_first_fp8_module``, and so takes over the
    update that the first layer with a backward must run."""
    import torch
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    x = prepare(layer, x, *args, **kwargs)
    trains = x.requires_grad or any(p.requires_grad for p in layer.parameters())
    if layer.fp8 and torch.is_grad_enabled() and not trains:
        FP8GlobalStateManager.is_first_fp8_module()
    return x


def _idle_windows_roll(update: Any, forward: bool = True) -> None:
    """An update also shifts the history of layers that did not run."""
    windows = [
        window
        for key, buffer in _state().global_amax_history_buffer.items()
        if key.startswith("forward") == forward
        for window in buffer
    ]
    before = [window.clone() for window in windows]
    update(forward=forward)
    for window, old in zip(windows, before, strict=True):
        rolled = old.roll(-1, 0)
        rolled[0] = 0
        # only windows that the update did not shift: the unfused one has shifted all of them
        idle = (old[0] == 0) & (window == old).all(0)
        window.copy_(rolled.where(idle, window))


def _lost_at_evaluation() -> _Context:
    """Leaving a region updates nothing if its last layer ran in evaluation mode."""
    training = [True]

    def prepare(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        training[0] = layer.training
        return original(layer, *args, **kwargs)

    def leave(original: Any, enabled: bool, _graph: bool) -> None:
        original(enabled and training[0], _graph)

    return te_calls(
        {
            "module.base:TransformerEngineBaseModule.prepare_forward": prepare,
            "quantization:FP8GlobalStateManager.autocast_exit": leave,
        }
    )


def _keyed_by_number() -> _Context:
    """The state that is registered for updates is stored under a number, which a later layer gets
    again once the first owner is gone."""
    living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    known: dict[int, list[Any]] = {}

    def init(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, *args, **kwargs)
        number = next(i for i in range(len(living) + 1) if i not in living)
        living[number] = layer

    def register(original: Any, meta: dict[str, Any]) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        number = next((n for n, layer in living.items() if layer.fp8_meta is meta), None)
        place = FP8GlobalStateManager.get_buffer_info()
        if number in known and place not in meta:
            meta[place] = known[number]
        original(meta)
        if number is not None and place in meta:
            known[number] = meta[place]

    def reset(original: Any) -> None:
        known.clear()
        original()

    return te_calls(
        {
            "quantization:FP8GlobalStateManager.reset": reset,
            "module.base:TransformerEngineBaseModule.__init__": init,
            "quantization:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": register,
        }
    )


def _narrow_parameters_wait() -> _Context:
    """Leaving a region updates nothing if its last layer has FP8 parameters, as if the next
    optimizer step did it; it does not."""
    narrow = [False]

    def prepare(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

        narrow[0] = any(isinstance(p, QuantizedTensor) for p in layer.parameters())
        return original(layer, *args, **kwargs)

    def leave(original: Any, enabled: bool, _graph: bool) -> None:
        original(enabled and not narrow[0], _graph)

    return te_calls(
        {
            "module.base:TransformerEngineBaseModule.prepare_forward": prepare,
            "quantization:FP8GlobalStateManager.autocast_exit": leave,
        }
    )


_TE = "https://github.com/NVIDIA/TransformerEngine"
_FIRST = "quantization:FP8GlobalStateManager.is_first_fp8_module"


def _fault(id: str, title: str, link: str, plant: Callable[[], _Context]) -> Plant:
    return Plant(id, "delayed updates", title, link, ("te.delayed",), plant)


def _calls(name: str, change: Callable[..., Any]) -> Callable[[], _Context]:
    return lambda: te_calls({name: change})


PLANTS = [
    _fault("te-recompute-owns-no-update", "a layer that is recomputed never updates gradients",
           f"{_TE}/issues/1190", _calls(_FIRST, _never_first_in_a_recompute)),
    _fault("te-frozen-layer-owns-update", "a first layer without gradients keeps others' update",
           f"{_TE}/pull/784",
           _calls("module.base:TransformerEngineBaseModule.prepare_forward", _frozen_layers_ask)),
    _fault("te-every-layer-owns-update", "each layer's backward updates all gradients' scales",
           "https://github.com/NVIDIA/Megatron-LM/pull/7051", _calls(_FIRST, lambda first: True)),
    _fault("te-idle-history-rolls", "zeros move into the history of layers that did not run",
           f"{_TE}/pull/825",
           _calls("quantization:FP8GlobalStateManager.reduce_and_update_fp8_tensors",
                  _idle_windows_roll)),
    _fault("te-update-lost-at-evaluation", "an evaluation drops the update that was due",
           f"{_TE}/pull/59", _lost_at_evaluation),
    _fault("te-updates-of-dead-model", "a new layer is taken for one that is gone, and not updated",
           f"{_TE}/pull/1326", _keyed_by_number),
    _fault("te-fp8-parameters-wait", "layers with FP8 parameters are not updated with the others",
           "https://github.com/ROCm/TransformerEngine/pull/349", _narrow_parameters_wait),
]  # fmt: skip
