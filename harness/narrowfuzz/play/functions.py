"""Records the calls of a user's own ``torch.autograd.Function``s in a forward of their model, and
repeats such a call in float64.

A stand-alone script is written from this source, as from that of ``models.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.player import seed

#: Packages whose Functions are not a user's.
LIBRARIES = ("torch", "torchao", "transformer_engine", "triton", "narrowfuzz", "te_on_cpu")


@dataclass
class FunctionCall:
    """Copies of the arguments of a Function's call, and the module that ran; ``needs`` states for
    each argument whether it needs a gradient."""

    function: Any
    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: tuple[bool, ...]

    @property
    def name(self) -> str:
        """The module and the qualified name of the Function, the same in every process: without
        what ``imported`` adds where another module has the file's name."""
        module = self.function.__module__.removesuffix("_of_a_user")
        return f"{module}.{self.function.__qualname__}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for two calls that differ only in their numbers."""
        return self.name, self.needs, tuple(map(kind_of, self.args)), repr(self.kwargs.keys())

    def argument(self, i: int) -> str:
        """The name of this argument in the signature of ``forward``."""
        names = list(inspect.signature(self.function.forward).parameters.values())
        names = names[takes_context(self.function) :]
        if i < len(names) and names[i].kind is not inspect.Parameter.VAR_POSITIONAL:
            return names[i].name
        return f"argument {i}"


def kind_of(value: Any) -> Any:
    """A tensor's shape and dtype, a plain value itself, otherwise the value's type."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    plain = value is None or isinstance(value, (bool, int, str, torch.dtype))
    return value if plain else type(value)


def takes_context(function: Any) -> bool:
    """True if ``forward`` gets ``ctx``; False if ``setup_context`` does."""
    same: bool = function.setup_context == torch.autograd.Function.setup_context
    return same


def is_own(function: Any) -> bool:
    """True of a Function that is defined outside of the libraries."""
    return function.__module__.partition(".")[0] not in LIBRARIES


def own_functions() -> list[Any]:
    """All user-defined Functions that exist."""
    found, open_ones = [], [torch.autograd.Function]
    while open_ones:
        function = open_ones.pop()
        open_ones += function.__subclasses__()
        if is_own(function) and function not in found:
            found.append(function)
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with ``change`` applied to every tensor, also in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(part, change) for part in value)
    if type(value) is dict:
        return {key: mapped(part, change) for key, part in value.items()}
    return value


@contextlib.contextmanager
def functions_seen(model: nn.Module, calls: list[FunctionCall]) -> Iterator[None]:
    """Add every call of a user's Function to ``calls``, however the model obtained its ``apply``:
    the class's ``forward``, which ``apply`` calls, is replaced. For a class that is created during
    the model's forward, ``apply`` of the base class is replaced."""
    running = [""]

    def enter(module: nn.Module, args: Any, *, name: str) -> None:
        running.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def record(function: Any, args: Any, kwargs: Any) -> None:
        needs = [isinstance(a, torch.Tensor) and a.requires_grad for a in args]
        copied, named = mapped((args, kwargs), lambda t: t.detach().clone())
        calls.append(FunctionCall(function, running[-1], copied, named, tuple(needs)))

    def seen(function: Any, forward: Any) -> Any:
        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            context = type(args[0]) if takes_context(function) else None
            # a subclass may call this forward
            if getattr(context, "_forward_cls", function) is function:
                record(function, args[takes_context(function) :], kwargs)
            return forward(*args, **kwargs)

        return staticmethod(recorded)

    functions = {function: function.forward for function in own_functions()}
    of_all = vars(torch.autograd.Function)["apply"]

    def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_own(function) and function not in functions:
            record(function, args, kwargs)
        return of_all.__get__(None, function)(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(functools.partial(enter, name=name))
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.callback(setattr, torch.autograd.Function, "apply", of_all)
        setattr(torch.autograd.Function, "apply", classmethod(applied))  # noqa: B010
        for function, forward in functions.items():
            if "forward" in vars(function):
                stack.callback(setattr, function, "forward", vars(function)["forward"])
            else:
                stack.callback(delattr, function, "forward")
            function.forward = seen(function, forward)
        yield


def function_calls(own: Any, ids: int, seed: int) -> list[FunctionCall]:
    """The calls in one forward of an ``OwnModel`` on random input of this seed: normal numbers, or
    token ids below ``ids``."""
    example = own.given[own.driven]
    weight = next(m.weight for m in own.modules() if isinstance(m, nn.Linear))
    generator = torch.Generator().manual_seed(seed)
    if ids:
        x = torch.randint(ids, (example.numel(),), generator=generator).to(weight.device)
    else:
        x = torch.randn(example.shape, generator=generator).reshape(-1, example.shape[-1])
        x = x.to(weight.device, weight.dtype).requires_grad_(True)
    calls: list[FunctionCall] = []
    torch.manual_seed(0)
    with functions_seen(own, calls), torch.enable_grad():
        own(x)
    return calls


def widened(t: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128; unchanged if it holds no floats."""
    if t.is_complex():
        return t.to(torch.complex128)
    return t.to(torch.float64) if t.is_floating_point() else t


def in_float64(call: FunctionCall) -> FunctionCall:
    """The same call with its tensors in float64."""
    args, kwargs = mapped((call.args, call.kwargs), widened)
    return FunctionCall(call.function, call.module, args, kwargs, call.needs)


def called_with(call: FunctionCall, values: Mapping[int, torch.Tensor]) -> list[Any]:
    """The results of the Function with ``values``, by argument index, in place of the arguments
    that need a gradient; random numbers are the same each time. Arguments are copied: the Function
    may write into them."""
    state = torch.get_rng_state()
    seed(0)
    args, kwargs = mapped((call.args, call.kwargs), torch.clone)
    args = [values[i].clone() if i in values else a for i, a in enumerate(args)]
    for generator in (a for a in args if isinstance(a, torch.Generator)):
        generator.manual_seed(0)
    with torch.enable_grad():
        y = call.function.apply(*args, **kwargs)
    torch.set_rng_state(state)
    return list(y) if isinstance(y, (list, tuple)) else [y]


def needing(values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The same values as leaves that require a gradient."""
    return {i: x.detach().requires_grad_(True) for i, x in values.items()}


def backward_of(
    call: FunctionCall, values: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of the values by the Function's backward, if the gradients ``sent`` are those
    of its results, by index."""
    leaves = needing(values)
    y = called_with(call, leaves)
    ends = [y[j] for j in sent]
    return list(torch.autograd.grad(ends, [*leaves.values()], [*sent.values()], allow_unused=True))
