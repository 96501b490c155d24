"""Which gradients of a user's model come from elsewhere than its linears' products, and which hooks
change them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

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
        #: How many forwards of autograd functions are running: a checkpoint, or a function that
        #: recomputes in backward, calls functions and linears there without a graph.
        self._inside = 0
        self._hooks = ExitStack()
        for layer, linear in self._linears.items():
            self._note_hooks(layer, linear)
            for name, parameter in linear.named_parameters(recurse=False):
                self._names.setdefault(id(parameter), []).append(f"{layer}.{name}")
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    self._elsewhere.add(f"{layer}.{name}")

    def _note_hooks(self, layer: str, linear: nn.Linear) -> None:
        changed = ["input"] * bool(linear._backward_hooks or linear._backward_pre_hooks)
        changed += ["weight", "bias"] * bool(linear._backward_pre_hooks)
        self._elsewhere.update(f"{layer}.{name}" for name in changed)
        self._hooked |= bool(changed)

    def found(self, dtype: torch.dtype) -> Gradients:
        """What was found, for a model whose first linear has this dtype."""
        other = {n: p.dtype for n, p in self._model.named_parameters() if p.dtype != dtype}
        return Gradients(
            tuple(sorted(self._elsewhere)),
            self._hooked,
            self._twice or any(uses > 1 for uses in self._uses.values()),
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
        elif any(
            (t.requires_grad or self._inside) and id(t) not in self._uses for t in tensors_in(made)
        ):
            running = self._running[-1:]
            own = {id(p) for linear in running for p in linear.parameters(recurse=False)}
            for t in tensors_in((args, kwargs)):
                if id(t) in self._uses:
                    self._uses[id(t)] += 1
                if id(t) not in own:
                    self._elsewhere.update(self._names.get(id(t), ()))
        return made

    def __enter__(self) -> Any:
        for layer, linear in self._linears.items():
            begin = partial(self._begins, layer)
            begins = linear.register_forward_pre_hook(begin, with_kwargs=True)
            ends = linear.register_forward_hook(self._ends, always_call=True)
            self._hooks.callback(begins.remove)
            self._hooks.callback(ends.remove)
        applied = vars(Function)["apply"]  # of Python or, from torch 2.15 on, of C++

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return applied.__get__(None, function)(*args, **kwargs)
            finally:
                self._inside -= 1

        self._hooks.enter_context(patch.object(Function, "apply", classmethod(apply)))
        return super().__enter__()

    def _begins(self, layer: str, linear: Any, args: Any, kwargs: Any) -> None:
        self._note_hooks(layer, linear)  # the forward may have added some
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
    of the forwards inside, which may add such hooks."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    added = nn.Module.register_backward_hook

    def add(module: nn.Module, hook: Callable[..., Any]) -> Any:
        return added(module, noting(names.get(module, ""), hook))

    def noting(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            given, every = tensors_in(args[1]), tensors_in(args[1:])
            versions = [t._version for t in every]
            made = hook(*args)
            returned = given if made is None else tensors_in(made)
            others = any(t is not g for t, g in itertools.zip_longest(returned, given))
            if others or versions != [t._version for t in every]:
                found.append(name)
            return made

        return noted

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "register_backward_hook", add))
        for module, name in names.items():
            if module._is_full_backward_hook is False:
                hooks = {key: noting(name, one) for key, one in module._backward_hooks.items()}
                stack.enter_context(patch.dict(module._backward_hooks, hooks))
        yield found
