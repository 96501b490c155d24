"""Calls of a user's model, observed module by module, to find out which module draws random
numbers, and which returns different results for the same inputs.

A forward is called several times with the same arguments and the same state of every random
generator. The first module that then gets the same inputs and returns something else is the one
that keeps state between calls, or reads a clock or uninitialised memory.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from narrowfuzz.models.model import Product
from narrowfuzz.operators import arguments_of, of_function
from narrowfuzz.play import player
from narrowfuzz.play.kernels import eagerly
from narrowfuzz.play.own import floats_in, tensors_in

#: Number of identical calls: enough to reveal a counter that matters every second or third time.
CALLS = 4
#: Number of other seeds that are tried, because a generator's numbers may have no effect by chance.
_SEEDS = 8
#: The random generators of a process that can be seeded, but that a checkpoint does not restore.
FOREIGN = ("Python's random", "numpy.random")


@dataclass(frozen=True)
class Seen:
    """One call of a module: hashes of its inputs and outputs, and whether they contain NaN."""

    name: str
    #: Name of the module's class.
    kind: str
    #: Number of earlier calls of the same module.
    number: int
    got: bytes
    gave: bytes
    nan_in: bool
    nan_out: bool

    @property
    def called(self) -> str:
        """The module's name in a message."""
        return f"{self.name} ({self.kind})" if self.name else f"the model itself ({self.kind})"


@dataclass
class Answer:
    """What a forward returned, the calls of its modules in the order in which they ended, and the
    names of the random generators whose state changed."""

    given: Any = None
    seen: list[Seen] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    @property
    def floats(self) -> list[torch.Tensor]:
        return floats_in(self.given)

    def same(self, other: Answer) -> bool:
        """True if all floating-point tensors are equal to the bit."""
        mine, theirs = self.floats, other.floats
        return len(mine) == len(theirs) and all(
            digest([a]) == digest([b]) for a, b in zip(mine, theirs, strict=True)
        )


def observe_call(model: nn.Module, call: Callable[[], Any], *, foreign: int = 0) -> Answer:
    """Run ``call``, which calls the model, and record it. torch's generator is seeded with 0, the
    others with ``foreign``; their states are restored afterwards."""
    answer = Answer()
    with eagerly(), kept_generators(), ExitStack() as hooks:
        for name, module in model.named_modules():
            _watch(answer.seen, name, module, hooks)
        player.seed(0)
        random.seed(foreign)
        np.random.seed(foreign)
        before = _states()
        answer.given = call()
        answer.moved = [name for name, state in _states().items() if state != before[name]]
    return answer


def _watch(seen: list[Seen], name: str, module: nn.Module, hooks: ExitStack) -> None:
    running: list[tuple[bytes, bool]] = []
    numbers: Counter[str] = Counter()

    def before(module: Any, args: Any, kwargs: Any) -> None:
        got = tensors_in([args, kwargs])
        running.append((digest(got), _has_nan(got)))

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        gave, (got, nan_in) = tensors_in(output), running.pop()
        seen.append(
            Seen(
                name,
                type(module).__name__,
                numbers[name],
                got,
                digest(gave),
                nan_in,
                _has_nan(gave),
            )
        )
        numbers[name] += 1

    hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)


def first_differing_module(first: Answer, other: Answer) -> str:
    """The module that got the same inputs in both answers and returned something else: the first of
    them, and of nested ones the innermost."""
    before = {(one.name, one.number): one for one in first.seen}
    for one in other.seen:
        then = before.get((one.name, one.number))
        if then is not None and then.got == one.got and then.gave != one.gave:
            return one.called
    return other.seen[-1].called if other.seen else "the model itself"


def forgetful(answers: Sequence[Answer]) -> str:
    """The module that makes one of the answers to identical calls differ from the first; "" if all
    are the same."""
    other = next((one for one in answers if not one.same(answers[0])), None)
    return "" if other is None else first_differing_module(answers[0], other)


def strange_generator(model: nn.Module, call: Callable[[], Any], first: Answer) -> str:
    """Text that names the module, and the generator other than torch's, that determine what the
    model returns; "" if no such generator does."""
    moved = [name for name in FOREIGN if name in first.moved]
    for seed in range(1, _SEEDS + 1) if moved else ():
        other = observe_call(model, call, foreign=seed)
        if not other.same(first):
            return f"{first_differing_module(first, other)} draws from {' or '.join(moved)}"
    return ""


def unwritten(model: nn.Module, call: Callable[[], Any], first: Answer) -> str:
    """The module whose result contains NaN if ``torch.empty`` is filled with NaN, and did not
    before: it returns uninitialised memory. "" if there is none."""
    if any(t.isnan().any() for t in first.floats):
        return ""
    try:
        with filled():
            other = observe_call(model, call)
    except Exception as error:  # noqa: BLE001 - reported: without the filling it did not raise
        return f"the model itself, which raises {type(error).__name__},"
    if not any(t.isnan().any() for t in other.floats):
        return ""
    return next(one.called for one in other.seen if one.nan_out and not one.nan_in)


def products(model: nn.Module, call: Callable[[], Any]) -> list[Product]:
    """The products of a model's linears in ``call``, in their order."""
    found: list[Product] = []

    def note(name: str, linear: Any, given: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and linear.out_features:
            rows = output.numel() // linear.out_features
            found.append(Product(name, rows, linear.in_features, linear.out_features))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        observe_call(model, call)
    return found


class Kernels(TorchDispatchMode):
    """Records the name of every ATen operator that runs inside it, with the shapes it returns."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ran.append((func.name(), tuple(t.shape for t in tensors_in(made))))
        return made


class Functions(TorchFunctionMode):
    """Records the operators that are called inside it through functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        operator = of_function(func)
        try:
            if operator is not None and operator.read(arguments_of(func, args, kwargs), made):
                self.operators.add(operator.name)
        except ValueError:  # such a call cannot be judged; the run reports that
            return made
        return made


def kept_outside(model: nn.Module, blocks: Sequence[str], call: Callable[[], Any]) -> str:
    """The first of these submodules that computes something else if it is called a second time with
    the same unchanged inputs, because it keeps state for the rest of the model's forward, as layers
    with a cache of keys and values do. "" if none does."""
    found: list[str] = []

    def again(name: str, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        def computed() -> tuple[Any, Any]:
            torch.clear_autocast_cache()  # else a weight is cast only the first time
            torch.set_rng_state(before)
            with Kernels() as operators:
                given = forward(*args, **named)
            return given, (operators.ran, digest(tensors_in(given)))

        inputs, before = tensors_in([args, named]), torch.get_rng_state()
        were = digest(inputs)
        try:
            first, what = computed()
        except Exception:  # noqa: BLE001 - nothing watches it: as it is, it may run
            return forward(*args, **named)
        after = torch.get_rng_state()
        if not found and digest(inputs) == were:
            try:
                alike = computed()[1] == what
            except Exception:  # noqa: BLE001 - it did not raise the first time
                alike = False
            torch.set_rng_state(after)
            if not alike:
                found.append(name)
        return first

    with ExitStack() as patches:
        for name in blocks:
            block = model.get_submodule(name)
            twice = partial(again, name, block.forward)
            patches.enter_context(patch.object(block, "forward", twice))
        observe_call(model, call)
    return found[0] if found else ""


@contextmanager
def filled() -> Iterator[None]:
    """Inside, uninitialised memory is filled with NaN, by torch's deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def kept_generators() -> Iterator[None]:
    """After it, the random generators are as before it."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)


def _states() -> dict[str, Any]:
    """Generator -> its state, in a form that can be compared."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": digest([torch.get_rng_state()]),
        FOREIGN[0]: random.getstate(),
        FOREIGN[1]: (kind, np.asarray(keys).tobytes(), *rest),
    }


def digest(tensors: Sequence[torch.Tensor]) -> bytes:
    """A hash of the shapes, dtypes and bits of these tensors."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(f"{tuple(t.shape)} {t.dtype}".encode())
        if not _transformed(t):
            found.update(_strided(t.detach()).reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.digest()


def _strided(t: torch.Tensor) -> torch.Tensor:
    """Its numbers as a plain tensor."""
    if t.is_nested:
        return t.values() if t.layout == torch.jagged else torch.cat([*map(torch.flatten, t)])
    return t.resolve_conj().resolve_neg() if t.layout == torch.strided else t.to_dense()


def _has_nan(tensors: Sequence[torch.Tensor]) -> bool:
    return any(
        t.is_floating_point() and not _transformed(t) and bool(t.isnan().any()) for t in tensors
    )


def _transformed(t: torch.Tensor) -> bool:
    """Is it inside of a transform of torch.func, such as vmap? Then its numbers cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t))
