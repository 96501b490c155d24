"""Torch's CUDA names on a machine without CUDA: a device "cuda" that is the CPU.

TransformerEngine asks for CUDA tensors by name. After ``patch()`` those names work in this process:
factories and moves put everything on the CPU, queries describe one Hopper GPU, and the generator
of "the GPU" is a separate CPU generator. The patch cannot be undone: such a process tests
TransformerEngine and nothing else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

#: Factories and moves that take a ``device``.
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn",
    "randn_like", "randperm", "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
#: The properties of the one GPU that is reported: a Hopper, compute capability 9.0.
_PROPERTIES = SimpleNamespace(
    name="CPU in place of a Hopper GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
)


def on_cpu(device: Any) -> Any:
    """``device`` with any CUDA device ("cuda", "cuda:0", torch.device, index 0) made "cpu"."""
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    # A bare int is the index of a CUDA device; a bool is no index.
    return "cpu" if type(device) is int else device


def patch() -> None:
    """Make the CUDA names of torch work on the CPU, in this process, for good. Idempotent."""
    if getattr(torch.cuda, "is_the_cpu", False):
        return
    # These query CUDA when they are imported, and must get the real answers.
    for name in ("torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(name)

    _patch_contexts()
    for name in _FACTORIES:
        setattr(torch, name, _with_device(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _with_device(getattr(torch.Tensor, name)))
    _set(torch.Tensor, "to", _move(torch.Tensor.to))
    _set(torch.Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)
    _set(torch.Tensor, "is_cuda", property(lambda _tensor: True))
    _set(torch, "load", _load(torch.load))
    _patch_queries()
    _set(torch.cuda, "is_the_cpu", True)


def patch_subclasses() -> None:
    """Let subclasses that wrap other tensors be made on a CUDA device. Not in ``patch()``: only
    older releases need it."""
    make = torch.Tensor._make_wrapper_subclass
    _set(torch.Tensor, "_make_wrapper_subclass", staticmethod(_with_device(make)))


def _patch_contexts() -> None:
    """Let ``with torch.device(...)`` accept CUDA, and ``with torch.cuda.device(...)`` the CPU.
    The first must see the factories before these are
    patched, as it lists them on first use."""
    from torch.utils import _device

    _device._device_constructors()
    init = _device.DeviceContext.__init__
    _set(_device.DeviceContext, "__init__", lambda self, device: init(self, on_cpu(device)))
    # contexts of CUDA's current device, which some releases enter with the device of a parameter
    _set(torch.cuda.device, "__init__", lambda _self, _device: None)
    _set(torch.cuda.device, "__enter__", lambda _self: None)
    _set(torch.cuda.device, "__exit__", lambda _self, *_error: False)


def _set(owner: Any, name: str, value: Any) -> None:
    # An assignment would not pass the type checker, which knows another type for the name.
    setattr(owner, name, value)


def _with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` whose keyword ``device`` may be CUDA."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _move(to: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to``, whose first positional argument may be the device.

    A move to the tensor's own device returns it without dispatch, as the library's
    ``__torch_dispatch__`` of quantised tensors would move them on any device but CUDA.
    """

    @functools.wraps(to)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, torch.device, int)):
            args = (on_cpu(args[0]), *args[1:])
        asked = [*args, *kwargs.values()]
        if len(asked) == 1 and isinstance(asked[0], (str, torch.device)):
            asked[0] = on_cpu(asked[0])
            if torch.device(asked[0]) == tensor.device:
                return tensor
        return to(tensor, *args, **kwargs)

    return call


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load`` whose ``map_location`` may be CUDA."""

    @functools.wraps(load)
    def call(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(file, on_cpu(map_location), *args, **kwargs)

    return call


def _patch_queries() -> None:
    generator = torch.Generator()
    generator.manual_seed(torch.initial_seed())
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda callback, **_kwargs: callback(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_properties": lambda _device=None: _PROPERTIES,
        "get_device_capability": lambda _device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "get_device_name": lambda _device=None: _PROPERTIES.name,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda _device=None: None,
        "empty_cache": lambda: None,
        "default_generators": (generator,),
        "get_rng_state": lambda _device="cuda": generator.get_state(),
        "set_rng_state": lambda state, _device="cuda": generator.set_state(state) and None,
    }
    for name, answer in answers.items():
        _set(torch.cuda, name, answer)
    for name in ("_lazy_call", "device_count"):  # by which torch.manual_seed seeds the generator
        _set(torch.cuda.random, name, answers[name])
    _set(torch.cuda.nvtx, "range", _no_range)
    _set(torch.cuda.nvtx, "range_push", lambda _message: 0)
    _set(torch.cuda.nvtx, "range_pop", lambda: 0)


@contextmanager
def _no_range(_message: str, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield
