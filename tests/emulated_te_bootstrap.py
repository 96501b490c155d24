"""Names a CUDA device on the CPU, as much as the checks of the emulated extension need."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

import torch

_FACTORIES = "empty zeros ones full rand randn tensor arange empty_like zeros_like full_like eye"


def _is_cuda(device):
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(factory):
    @functools.wraps(factory)
    def call(*args, **kwargs):
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        args = tuple(
            "cpu" if isinstance(x, (str, torch.device)) and _is_cuda(x) else x for x in args
        )
        return factory(*args, **kwargs)

    return call


def patch(capability=(9, 0)):
    for name in ("torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(name)
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    torch.load = _on_cpu(torch.load)
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor
    torch.Tensor.is_cuda = property(lambda tensor: True)
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=1)
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "_lazy_init": None,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_args, answer=answer: answer)
    torch.cuda._lazy_call = lambda callback, **_kwargs: callback()
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda.get_rng_state = lambda *_args: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_args: torch.set_rng_state(state)
