"""Dispatch modes (watches) that record calls of operators, and the calls as plain data."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

from narrowfuzz.arms.lost import reading
from narrowfuzz.arms.tensors import DTYPE_NAME, fp32_array
from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.operators import BY_KERNEL, BY_LIBRARY, BY_NAME, arguments_of, of_function
from narrowfuzz.operators.low_bit_steps import KINDS, ROUNDS, read_low_bit_step
from narrowfuzz.operators.operator import Operator, Read
from narrowfuzz.operators.optimizer_steps import LARGEST_PARAMETER, STEPS, read_step
from narrowfuzz.play.function_call import called
from narrowfuzz.play.layers import in_backward, tensors_of
from narrowfuzz.play.watches import AttentionWatch, KernelWatch, by_name, copied, unseen
from narrowfuzz.trace.trace import OperatorCall

#: The tensor classes that are not a library's subclass.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Kernels, by name without overload, that need no reference: they copy or create values, or make
#: one or two operations that IEEE 754 rounds correctly.
_EXACT = frozenset((
    "_amp_update_scale", "_reshape_copy", "_to_copy", "_unsafe_index", "_unsafe_view", "abs", "add",
    "alias", "amax", "amin", "arange", "bernoulli", "cat", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "constant_pad_nd", "copy", "detach", "diag_embed", "div", "empty",
    "empty_like", "empty_permuted", "empty_strided", "exponential", "eye", "fill", "flip", "floor",
    "full", "full_like", "gather", "hardtanh", "index", "index_copy", "index_fill", "index_select",
    "leaky_relu", "lift_fresh", "masked_fill", "masked_scatter", "masked_select", "max",
    "max_pool2d_with_indices", "maximum", "min", "minimum", "mul", "nan_to_num", "native_dropout",
    "neg", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal", "ones",
    "ones_like", "rand", "rand_like", "randn", "randn_like", "reciprocal", "reflection_pad1d",
    "relu", "repeat", "resize", "roll", "round", "rsub", "scalar_tensor", "scatter",
    "select_scatter", "set", "sgn", "sign", "slice_scatter", "sort", "sqrt", "squeeze", "stack",
    "sub", "take", "threshold", "topk", "tril", "triu", "trunc", "uniform", "unsqueeze", "where",
    "zero", "zeros", "zeros_like",
))  # fmt: skip
#: Why calls of other kernels are not judged: there is no reference; or there is one for another
#: overload, and this one takes other arguments, or writes into an existing tensor.
NO_REFERENCE = "no reference"
OTHER_FORM = "in a form that has no reference"
IN_PLACE = "in place, or into a tensor that is given"
#: Kernels that are judged in at least one overload.
_JUDGED = frozenset(name.partition(".")[0] for name in BY_KERNEL)


@dataclass
class LiveCall:
    """One call of an operator with live tensors; ``OperatorCall`` is the same as plain data."""

    operator: str
    phase: str
    index: int
    tensors: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    strides: dict[str, tuple[int, ...]]
    settings: dict[str, Any]
    module: str
    device: str
    threads: int


class OperatorWatch(AttentionWatch):
    """Records the calls of attention kernels, of operators that are judged one by one, and steps of
    optimizers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.operators: list[LiveCall] = []
        #: Operators (in words) and kernels (by name) that are not judged -> why not.
        self.unjudged: dict[str, str] = {}
        self._times: Counter[str] = Counter()
        #: Steps of an optimizer that have begun: each parameter and its call, without results yet.
        self._begun: list[tuple[Any, LiveCall]] = []
        #: True while an optimizer steps: its kernels do not belong to a forward.
        self._stepping = False
        #: Parameter of a low-bit optimizer -> its initial value and all its gradients so far.
        self._stepped: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._hooks: list[Any] = []
        #: Copies of the arguments that the running kernel will overwrite, by name.
        self._before: dict[str, Any] = {}
        #: While a function runs that is judged as a whole: the unjudged kernels in it, which count
        #: only if the function's call cannot be recorded. None outside of such functions.
        self.within: dict[str, str] | None = None
        #: True while nothing is recorded.
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        operator = BY_KERNEL.get(func.name())
        if isinstance(func, HigherOrderOperator):
            found = self.unjudged if self.within is None else self.within
            found[func.name()] = "torch hides what it calls"
        if operator is not None and operator.overwrites:
            named = by_name(func, args, kwargs or {})
            self._before = {name: _copies(named[name]) for name in operator.overwrites}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Any:
        self._hooks = [
            optimizer.register_optimizer_step_pre_hook(self._begin),
            optimizer.register_optimizer_step_post_hook(self._end),
        ]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super().note(func, args, kwargs, result)
        operator = BY_KERNEL.get(func.name())
        if operator is not None and not (operator.of_linears and self.of_linear()):
            named = by_name(func, args, kwargs)
            if operator.overwrites:
                result = {name: named[name] for name in operator.overwrites}
                named, self._before = named | self._before, {}
            self.record(operator, named, result)

    def of_linear(self) -> bool:
        """May the product that runs belong to a linear, whose products other rules judge? In
        compiled graphs, every product may."""
        return True

    def record(self, operator: Operator, named: Any, result: Any) -> LiveCall | None:
        """Record one call of a kernel or function, given its arguments by name. A call on lists of
        tensors is recorded as one call for each element. Returns the last call that was recorded,
        or None."""
        phase = "backward" if in_backward() else "forward"
        try:
            with unseen(), reading(f"a call of {operator.name}"):
                read = operator.read(named, result)
        except Unjudged as error:
            self.unjudged[operator.words] = str(error)
            return None
        call = None
        for one in read if isinstance(read, Sequence) else (read,):
            if isinstance(one, str):
                self.unjudged[operator.words] = one
                continue
            call = None if one is None else self._called(operator.name, phase, one)
            if call is not None:
                _derive(call)
                self.operators.append(call)
        return call

    def _called(self, name: str, phase: str, read: Read) -> LiveCall | None:
        """The call with copies of its tensors. None where a tensor has a dtype that rules do not
        know (float64, integers), is of a library's own class, or is not dense: sparse, nested or
        on the meta device."""
        live = {**read.tensors, **read.outputs}
        if not all(t.dtype in DTYPE_NAME and _dense(t) for t in live.values()):
            return None
        index = self._times[name]
        self._times[name] += 1
        return LiveCall(
            operator=name,
            phase=phase,
            index=index,
            tensors={name: copied(t) for name, t in read.tensors.items()},
            outputs={name: copied(t) for name, t in read.outputs.items()},
            strides={name: tuple(t.stride()) for name, t in read.tensors.items()},
            settings=dict(read.settings),
            module=self.running(),
            device=next(iter(live.values())).device.type,
            threads=torch.get_num_threads(),
        )

    def _begin(self, stepping: Any, args: Any, kwargs: Any) -> None:
        kind, home = type(stepping).__name__, type(stepping).__module__
        self._stepping, self._begun = True, []
        low_bit = kind in KINDS and home.startswith("torchao.")
        if not low_bit and not home.startswith("torch.optim"):
            self.unjudged[STEPS] = f"{home.partition('.')[0]}'s {kind}"
            return
        if getattr(stepping, "found_inf", None) is not None:
            self.unjudged[STEPS] = f"{kind} that unscales its gradients itself, for a GradScaler"
            return
        every = [parameter for group in stepping.param_groups for parameter in group["params"]]
        if others := sorted({type(p).__name__ for p in every if type(p) not in _PLAIN}):
            # what a library's own tensor wraps may be another parameter's memory
            self.unjudged[STEPS] = f"a parameter is of the tensor subclass {others[0]}"
            return
        for group in stepping.param_groups:
            for parameter in group["params"]:
                if type(parameter.grad) not in _PLAIN:
                    continue  # there is no gradient, or it is a library's own tensor
                state = stepping.state.get(parameter, {})
                try:
                    with reading(f"a step of {kind}"):
                        if low_bit:
                            step = self._low_bit(stepping, group, parameter, state)
                        else:
                            step = read_step(kind, group, parameter, state)
                except Unjudged as error:
                    self.unjudged[STEPS] = str(error)
                    continue
                if step is not None and (call := self._called(step[0], "optimizer", step[1])):
                    self._begun.append((parameter, call))

    def _low_bit(
        self, stepping: Any, group: Any, parameter: Any, state: Any
    ) -> tuple[str, Read] | None:
        """The step of one of torchao's low-bit optimizers; None where its earlier steps were not
        recorded. Raises Unjudged for a parameter that is too large."""
        if parameter.numel() > LARGEST_PARAMETER:
            raise Unjudged(f"a parameter of more than {LARGEST_PARAMETER} elements")
        if not parameter.numel():
            return None
        if not state:
            self._stepped[parameter] = (copied(parameter), [])
        if parameter not in self._stepped:
            return None
        start, grads = self._stepped[parameter]
        grads.append(copied(parameter.grad))
        with unseen():
            kind, every = type(stepping).__name__, torch.stack(grads)
            how = {**group, ROUNDS: stepping.bf16_stochastic_round}
            read = read_low_bit_step(kind, how, parameter, state, start, every)
        return None if read is None else ("low_bit_adam_step", read)

    def _end(self, stepping: Any, args: Any, kwargs: Any) -> None:
        for parameter, call in self._begun:
            state = stepping.state.get(parameter, {})  # indexing would create an entry
            names = BY_NAME[call.operator].results[1:]
            states = {name: state[name] for name in names if state.get(name) is not None}
            call.outputs.update({n: copied(t) for n, t in {"param": parameter, **states}.items()})
            _derive(call)
            self.operators.append(call)
        self._stepping, self._begun = False, []


def _dense(t: torch.Tensor) -> bool:
    plain = type(t) in _PLAIN and t.layout == torch.strided
    return plain and not (t.is_meta or t.is_nested)


def _copies(given: Any) -> Any:
    """A copy of a tensor, or of each tensor of a list."""
    return [copied(t) for t in given] if isinstance(given, (list, tuple)) else copied(given)


def _derive(call: LiveCall) -> None:
    """Add the results that the operator defines as derived from the recorded ones."""
    derived = BY_NAME[call.operator].derived
    if derived is not None:
        with unseen():
            call.outputs |= derived.make(call.tensors, call.outputs, call.settings)


class EagerWatch(OperatorWatch):
    """An OperatorWatch for eager runs. It also records calls of functions that torch composes of
    kernels, and notes in ``unjudged`` the other kernels that a forward calls outside of the
    ``linears``."""

    def __init__(self, running: Callable[[], str] = lambda: "") -> None:
        super().__init__(running)
        #: Names of the linears whose products other rules judge.
        self.linears: Collection[str] = frozenset()
        #: Autograd sequence numbers of the products outside of linears that have a backward.
        self._products: set[int] = set()

    def of_linear(self) -> bool:
        """A product in backward belongs to the forward product for which autograd made the running
        node. Where gradients are enabled, even in backward, it is a forward's or a recompute's."""
        if in_backward() and not torch.is_grad_enabled():
            node = torch._C._current_autograd_node()
            return node is None or node._sequence_nr() not in self._products
        if self.running() in self.linears:
            return True
        if torch.is_grad_enabled():
            self._products.add(torch.autograd._get_sequence_nr() - 1)
        return False

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super().note(func, args, kwargs, result)
        name = _rounds(func)
        if not name or self._stepping or in_backward() or self.running() in self.linears:
            return
        moves = name == "index_put" and not by_name(func, args, kwargs).get("accumulate")
        if not moves and _floating(result):
            found = self.unjudged if self.within is None else self.within
            found[name] = _why_not(func)

    def __enter__(self) -> Any:
        self._functions = FunctionWatch(self)
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._functions.__exit__(*raised)
        if raised[0] is None:
            self._functions.repeat()


class FunctionWatch(TorchFunctionMode):
    """Records calls of functions, and the gradients of their results and arguments.

    Autograd adds the gradients of arguments to those of other uses of the same tensors, so for
    these each call is run once more by itself. A hook in the graph would change the order in which
    autograd adds them.
    """

    def __init__(self, watch: EagerWatch) -> None:
        super().__init__()
        self.watch = watch
        #: For each call to repeat: its record, the function, the arguments, and the names of the
        #: arguments whose gradients are required.
        self._again: list[tuple[LiveCall, Any, dict[str, Any], tuple[str, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = of_function(func)
        if operator is None or any(kind not in _PLAIN for kind in types):
            return func(*args, **(kwargs or {}))
        return self.call(operator, func, args, kwargs)

    def __enter__(self) -> Any:
        self._stack = ExitStack()
        for path, operator in BY_LIBRARY.items():
            module, _, name = path.partition(":")
            function = getattr(_home(module), name, None)
            if function is not None:
                self._stack.enter_context(held_everywhere(function, partial(self.call, operator)))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()

    def call(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func``, record the call and return the result."""
        if self.watch.is_paused:
            return func(*args, **(kwargs or {}))
        why = ""
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_of((args, kwargs)))):
            why = "inside of torch.func.vmap or another transform"
        elif operator.autocasts and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            why = "under autocast"
        if why:
            self.watch.unjudged[operator.words] = why
            return func(*args, **(kwargs or {}))
        inside: dict[str, str] = {}
        self.watch.within = inside
        try:
            with unseen() if operator.compiles else nullcontext():
                made = func(*args, **(kwargs or {}))
        finally:
            self.watch.within = None
        given = arguments_of(func, args, kwargs or {})
        call = self.watch.record(operator, given, made)
        if call is None:
            self.watch.unjudged.update(inside)
        result = made[operator.graded] if isinstance(made, tuple) else made
        if call is not None and operator.gradients and result.requires_grad:
            tensors = {n: t for n, t in given.items() if isinstance(t, torch.Tensor)}
            held = given | {name: copied(t) for name, t in tensors.items()}
            trains = tuple(n for n in operator.gradients if n in tensors and given[n].requires_grad)
            self._again.append((call, func, held, trains))
            result.register_hook(partial(_keep, call))
        return made

    def repeat(self) -> None:
        """Repeat each call whose result got a gradient, to record its arguments' gradients."""
        for call, func, held, trains in self._again:
            if "grad_output" not in call.tensors:
                continue
            operator = BY_NAME[call.operator]
            function = partial(_graded, func, operator.graded)
            _, *gradients = called(function, held, call.tensors["grad_output"], *trains)
            names = operator.gradients
            for name, gradient in zip(trains, gradients, strict=True):
                if gradient is not None:
                    call.outputs[names[name]] = gradient


def _graded(function: Any, position: int, /, **arguments: Any) -> Any:
    """What the function returns; of several results the one at this position."""
    returned = function(**arguments)
    return returned[position] if isinstance(returned, tuple) else returned


def _home(module: str) -> Any:
    """A module: one of torch's is imported, any other is returned only if it is loaded already."""
    return import_module(module) if module.startswith("torch.") else sys.modules.get(module)


def _keep(call: LiveCall, gradient: torch.Tensor) -> None:
    """Record the first gradient of a call's result only: a graph may run backward twice."""
    if "grad_output" not in call.tensors and type(gradient) in _PLAIN:
        call.tensors["grad_output"] = copied(gradient)
        call.strides["grad_output"] = tuple(gradient.stride())


@contextmanager
def held_everywhere(function: Any, call: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Inside, every module that has imported this function of a library calls
    ``call(function, args, kwargs)`` instead."""

    def standing_in(*args: Any, **kwargs: Any) -> Any:
        return call(function, args, kwargs)

    name, holders = function.__name__, _holders(function, len(sys.modules))
    for holder in holders:
        setattr(holder, name, standing_in)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, function)


@cache
def _holders(function: Any, loaded: int) -> tuple[Any, ...]:
    """The modules that hold the function under its name. ``loaded``, the number of loaded modules,
    is only part of the cache's key."""
    named = (
        (m, getattr(m, "__dict__", {}).get(function.__name__)) for m in [*sys.modules.values()]
    )
    return tuple(module for module, held in named if held is function)


@cache
def _rounds(func: Any) -> str:
    """The name of a kernel that is not judged and whose bits IEEE 754 does not fix; "" for any
    other kernel."""
    name: str = func.overloadpacket.__name__.removesuffix("_")
    if func.is_view or func.name() in BY_KERNEL or func.name() == "aten::embedding":
        return ""  # it is a view, is judged, or copies rows
    if func.namespace != "aten":
        return f"{func.namespace}::{name}"
    return "" if name in _EXACT and "reduce" not in func._overloadname else name


def _why_not(func: Any) -> str:
    """Why calls of this kernel are not judged."""
    if func._schema.name.removesuffix("_") not in _JUDGED:
        return NO_REFERENCE
    return IN_PLACE if func._schema.is_mutable else OTHER_FORM


def _floating(result: Any) -> bool:
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    return isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex())


class GraphWatch(OperatorWatch, KernelWatch):
    """An OperatorWatch for compiled graphs, which also records every matrix multiply."""


def operators_of(calls: Iterable[LiveCall]) -> tuple[OperatorCall, ...]:
    """All recorded calls as plain data. Calls of functions are last, after the kernels that may be
    the cause of a wrong result."""
    return tuple(map(_call, sorted(calls, key=lambda one: bool(BY_NAME[one.operator].functions))))


def _call(one: LiveCall) -> OperatorCall:
    tensors, outputs = (
        {name: fp32_array(t) for name, t in live.items()} for live in (one.tensors, one.outputs)
    )
    dtypes = {name: DTYPE_NAME[t.dtype] for name, t in {**one.tensors, **one.outputs}.items()}
    return OperatorCall(
        one.operator,
        one.phase,  # type: ignore[arg-type]
        one.index,
        tensors,
        outputs,
        dtypes,
        one.strides,
        one.settings,
        one.module,
        one.device,
        one.threads,
    )
