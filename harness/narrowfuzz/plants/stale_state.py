"""Weights, states and outputs that are cached too long, overwritten too early or lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, float8_forward, in_backward
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)
_ROWWISE = ("torchao.float8.rowwise*",)
_SCALED_MM = ("torch.scaled_mm",)
#: Rows that a tile of the kernel writes.
_TILE = 16


@contextmanager
def _weight_codes_outlive_step() -> Iterator[None]:
    """A quantised weight is cached until the parameter is written; writes by an optimizer are
    missed."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torchao.float8 import float8_linear

    #: Address, layout and cast of a weight -> [its version, the weight, its codes].
    cache: dict[Any, list[Any]] = {}

    def make(cast: Any) -> Any:
        def cached(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            is_weight = kwargs["gemm_input_role"].value == "weight"
            if not is_weight or torch.compiler.is_compiling() or x.is_inference():
                return cast(x, dtype, *args, **kwargs)
            axis = kwargs["axiswise_dim"]
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, axis, str(kwargs))
            if key not in cache or cache[key][0] != x._version:
                cache[key] = [x._version, x, cast(x, dtype, *args, **kwargs)]
            return cache[key][2]

        return cached

    def still_fresh(*_: Any) -> None:
        for entry in cache.values():
            entry[0] = entry[1]._version

    hook = register_optimizer_step_post_hook(still_fresh)
    try:
        with attribute_replaced(float8_linear, "hp_tensor_to_float8_dynamic", make):
            yield
    finally:
        hook.remove()


@contextmanager
def _codes_of_dead_weights() -> Iterator[None]:
    """Workspaces are looked up by shape: a new weight gets the codes of a weight that no longer
    exists."""
    import weakref

    from torchao.float8 import float8_linear

    graves: dict[Any, Any] = {}
    #: id of a living weight -> for each kind of cast, the stale cast that it found, or None.
    found: dict[int, dict[Any, Any]] = {}

    def make(cast: Any) -> Any:
        def cached(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            made = cast(x, dtype, *args, **kwargs)
            if kwargs["gemm_input_role"].value != "weight" or x.is_inference():
                return made
            weight = x if x._base is None else x._base
            key = (x.shape, x.stride(), x.dtype, str(kwargs))
            if id(weight) not in found:
                weakref.finalize(weight, found.pop, id(weight), None)
            mine = found.setdefault(id(weight), {})
            if key not in mine:
                mine[key] = graves.pop(key, None)
                weakref.finalize(weight, graves.__setitem__, key, made)
            return made if mine[key] is None else mine[key]

        return cached

    with attribute_replaced(float8_linear, "hp_tensor_to_float8_dynamic", make):
        yield


@contextmanager
def _saved_in_bf16() -> Iterator[None]:
    """An fp32 weight is saved in bf16."""
    import torch
    from torchao.float8.float8_linear import Float8Linear

    def make(save: Any) -> Any:
        def saved(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
            save(self, destination, prefix, keep_vars)
            weight = destination[f"{prefix}weight"]
            destination[f"{prefix}weight"] = weight.to(torch.bfloat16)

        return saved

    with attribute_replaced(Float8Linear, "_save_to_state_dict", make):
        yield


@contextmanager
def _scaled_mm(change: Any) -> Iterator[None]:
    """``change(result)`` replaces the result of torch's own scaled multiply, in eager."""
    import torch

    def make(multiply: Any) -> Any:
        def multiplied(*args: Any, **kwargs: Any) -> Any:
            result = multiply(*args, **kwargs)
            return result if torch.compiler.is_compiling() else change(result)

        return multiplied

    with attribute_replaced(torch.nn.functional, "scaled_mm", make):
        yield


@contextmanager
def _rows_unwritten() -> Iterator[None]:
    """Rows after the last whole tile are not written: they hold zeros at first, later the rows of
    the previous result."""
    memory: dict[Any, Any] = {}

    def change(result: Any) -> Any:
        start = result.shape[0] // _TILE * _TILE
        tail = result[start:]
        if not start or not tail.numel():
            return result
        key = (result.shape, result.dtype)
        old = memory.get(key, tail.new_zeros(tail.shape))
        memory[key] = tail.clone()
        result = result.clone()
        result[start:] = old
        return result

    with _scaled_mm(change):
        yield


@contextmanager
def _outputs_share_memory() -> Iterator[None]:
    """All results of one shape share a buffer, so each is overwritten by the next."""
    buffers: dict[Any, Any] = {}

    def change(result: Any) -> Any:
        buffer = buffers.setdefault((result.shape, result.dtype), result.clone())
        buffer.copy_(result)
        return buffer.data  # .data: autograd's version check misses the next write

    with _scaled_mm(change):
        yield


def _guard(forward: Any, layer: Any, input: Any) -> Any:
    """A recompute is refused as if the user had run a second forward without synchronising."""
    if in_backward():
        raise AssertionError("amaxes and scales not synchronised: call sync before forward")
    return forward(layer, input)


@contextmanager
def _refuses_fp32() -> Iterator[None]:
    """The kernel supports only bf16 output, but the converter accepts fp32 layers."""
    import torch
    from torchao.float8 import float8_ops

    def make(multiply: Any) -> Any:
        def checked(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any, **kw: Any) -> Any:
            if dtype is not torch.bfloat16:
                raise RuntimeError("only bf16 output is supported for row-wise scaling")
            return multiply(a, a_scale, b, b_scale, dtype, **kw)

        return checked

    with ExitStack() as stack:
        stack.enter_context(attribute_replaced(float8_ops, "addmm_float8_unwrapped", make))
        yield


PLANTS = [
    Plant("weight-codes-outlive-step", "state", "a step multiplies the weight of the step before",
          "https://github.com/NVIDIA-NeMo/Automodel/pull/3606", _FLOAT8,
          _weight_codes_outlive_step),
    Plant("codes-of-dead-weights", "state",
          "a weight multiplies the codes of another of its shape whose model is dead",
          "https://github.com/pytorch/pytorch/issues/130283", _FLOAT8, _codes_of_dead_weights),
    Plant("saved-in-bf16", "state", "an fp32 weight is saved as bf16",
          "https://github.com/NVIDIA/TransformerEngine/issues/982", _FLOAT8, _saved_in_bf16),
    Plant("rows-unwritten", "tile tail", "rows behind the last whole tile hold old memory",
          "https://github.com/pytorch/pytorch/issues/193633", _SCALED_MM, _rows_unwritten),
    Plant("outputs-share-memory", "layout", "a result is overwritten by the next of its shape",
          "https://github.com/pytorch/FBGEMM/issues/4314", _SCALED_MM, _outputs_share_memory),
    Plant("recompute-trips-guard", "contract", "recompute is refused as a second forward",
          "https://github.com/pytorch/ao/issues/570", _FLOAT8, lambda: float8_forward(_guard)),
    Plant("fp32-layer-refused", "contract", "an fp32 layer converts and dies in its first forward",
          "https://github.com/pytorch/torchtitan/pull/808", _ROWWISE, _refuses_fp32),
]  # fmt: skip
