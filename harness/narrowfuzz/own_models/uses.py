"""Which gradients of a user's model come from elsewhere than its linears' products, and which hooks
change them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from narrowfuzz.arms.tensors import DTYPE_NAME
from narrowfuzz.models.model import Gradients
from narrowfuzz.play.own import tensors_in


class UnrecordableError(Exception):
    """The model does something that narrowfuzz cannot record."""


class ParameterUses(TorchFunctionMode):
    """Finds out which gradients of a model are not those of its linears' products alone: functions
    outside of a linear use its parameters, too, hooks change gradients, or the forward
    differentiates something, so that any part of a gradient may come from there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        #: Parameter of a linear -> its names.
        self._names: dict[int, list[str]] = {}
        self._elsewhere: set[str] = set()
        self._twice = False
        self._hooked = any(
            m._backward_hooks or m._backward_pre_hooks for m in model.modules()
        ) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        #: Parameter -> the number of functions that used it in a forward.
        self._uses = dict.fromkeys(map(id, model.parameters()), 0)
        #: Does the forward differentiate anything?
        self.differentiates = False
        self._running: list[nn.Linear] = []
        self._hooks = ExitStack()
        for layer, linear in self._linears.items():
            changed = ["input"] * bool(linear._backward_hooks or linear._backward_pre_hooks)
            changed += ["weight", "bias"] * bool(linear._backward_pre_hooks)
            self._elsewhere.update(f"{layer}.{name}" for name in changed)
            for name, parameter in linear.named_parameters(recurse=False):
                self._names.setdefault(id(parameter), []).append(f"{layer}.{name}")
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    self._elsewhere.add(f"{layer}.{name}")

    def found(self, dtype: torch.dtype) -> Gradients:
        """What was found, for a model whose first linear has this dtype."""
        other = {n: p.dtype for n, p in self._model.named_parameters() if p.dtype != dtype}
        return Gradients(
            tuple(sorted(self._elsewhere)),
            self._hooked,
            any(uses > 1 for uses in self._uses.values()),
            self._twice,
            {name: DTYPE_NAME.get(one, "") for name, one in other.items()},
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._hooked |= func is torch.Tensor.register_hook
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            self.differentiates = True
            self._elsewhere.update(itertools.chain.from_iterable(self._names.values()))
            if (kwargs or {}).get("create_graph"):  # its gradients have gradients of their own
                self._elsewhere.update(f"{layer}.input" for layer in self._linears)
                self._twice = True
        elif any(t.requires_grad and id(t) not in self._uses for t in tensors_in(made)):
            running = self._running[-1:]
            own = {id(p) for linear in running for p in linear.parameters(recurse=False)}
            for t in tensors_in((args, kwargs)):
                if id(t) in self._uses:
                    self._uses[id(t)] += 1
                if id(t) not in own:
                    self._elsewhere.update(self._names.get(id(t), ()))
        return made

    def __enter__(self) -> Any:
        for linear in self._linears.values():
            begins = linear.register_forward_pre_hook(self._begins, with_kwargs=True)
            ends = linear.register_forward_hook(self._ends, always_call=True)
            self._hooks.callback(begins.remove)
            self._hooks.callback(ends.remove)
        # a reentrant checkpoint runs its forward without a graph, which would hide uses
        plainly = staticmethod(lambda function, preserve, *args: function(*args))
        self._hooks.enter_context(patch.object(CheckpointFunction, "apply", plainly))
        return super().__enter__()

    def _begins(self, linear: Any, args: Any, kwargs: Any) -> None:
        self._running.append(linear)
        for t in tensors_in((args, kwargs)):
            mapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
            if mapped or t.is_nested:
                why = (
                    "inside of a transform of torch.func, such as vmap"
                    if mapped
                    else "with a nested tensor"
                )
                raise UnrecordableError(f"it calls a linear {why}: its products cannot be recorded")

    def _ends(self, *_: Any) -> None:
        self._running.pop()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hooks.close()
        self._running.clear()


@contextmanager
def changed_by_older_hooks(model: nn.Module) -> Iterator[list[str]]:
    """The names of modules whose hooks of ``register_backward_hook`` change gradients in backwards
    of the forwards inside."""
    found: list[str] = []

    def noting(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            made = hook(*args)
            if made is not None:
                found.append(name)
            return made

        return noted

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module._is_full_backward_hook is False:
                hooks = {key: noting(name, one) for key, one in module._backward_hooks.items()}
                stack.enter_context(patch.dict(module._backward_hooks, hooks))
        yield found
