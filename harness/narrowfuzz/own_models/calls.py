"""Calls of a user's model, watched module by module: what draws random numbers, and what gives
another answer to the same question.

A forward is asked several times with the same arguments and the same state of every generator. The
first module that then gets the same and returns something else is the one that keeps something
between calls, or reads a clock, or memory that nobody wrote.
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

from narrowfuzz.operators import arguments_of, of_function
from narrowfuzz.play import player
from narrowfuzz.play.kernels import eagerly
from narrowfuzz.play.own import floats_in, tensors_in

#: How often the same is asked: a counter that is looked at every second or every third time shows.
CALLS = 4
#: Other seeds that are tried of a generator whose numbers may change nothing.
_SEEDS = 8
#: The generators of a process whose state a seed sets and a checkpoint does not restore.
FOREIGN = ("Python's random", "numpy.random")


@dataclass(frozen=True)
class Seen:
    """One call of a module: hashes of what it got and gave, and whether there was a NaN."""

    name: str
    kind: str
    #: This module's how many-th call.
    number: int
    got: bytes
    gave: bytes
    nan_in: bool
    nan_out: bool

    @property
    def called(self) -> str:
        """As a sentence names it."""
        return f"{self.name} ({self.kind})" if self.name else f"the model itself ({self.kind})"


@dataclass
class Answer:
    """What a forward returns, its modules' calls in the order in which they end, and the generators
    that have moved."""

    given: Any = None
    seen: list[Seen] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    @property
    def floats(self) -> list[torch.Tensor]:
        return floats_in(self.given)

    def same(self, other: Answer) -> bool:
        """Bit for bit, in all tensors of floats."""
        mine, theirs = self.floats, other.floats
        return len(mine) == len(theirs) and all(
            digest([a]) == digest([b]) for a, b in zip(mine, theirs, strict=True)
        )


def asked(model: nn.Module, call: Callable[[], Any], *, foreign: int = 0) -> Answer:
    """``call``, which calls the model: torch's generator begins at 0, the others at ``foreign``.
    Their states are afterwards as they were."""
    answer = Answer()
    with eagerly(), _kept_generators(), ExitStack() as hooks:
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


def parted(first: Answer, other: Answer) -> str:
    """The module that gets the same in both and gives something else, the innermost that did so
    first."""
    before = {(one.name, one.number): one for one in first.seen}
    for one in other.seen:
        then = before.get((one.name, one.number))
        if then is not None and then.got == one.got and then.gave != one.gave:
            return one.called
    return other.seen[-1].called if other.seen else "the model itself"


def forgetful(answers: Sequence[Answer]) -> str:
    """Of answers to the same question: the module that makes one differ from the first, "" if none
    does."""
    other = next((one for one in answers if not one.same(answers[0])), None)
    return "" if other is None else parted(answers[0], other)


def strange_generator(model: nn.Module, call: Callable[[], Any], first: Answer) -> str:
    """Whether a generator that is not torch's decides what the model returns: which, and in which
    module; "" if none does."""
    moved = [name for name in FOREIGN if name in first.moved]
    for seed in range(1, _SEEDS + 1) if moved else ():
        other = asked(model, call, foreign=seed)
        if not other.same(first):
            return f"{parted(first, other)} draws from {' or '.join(moved)}"
    return ""


def unwritten(model: nn.Module, call: Callable[[], Any], first: Answer) -> str:
    """The module whose result is NaN where ``torch.empty`` gives NaN, and was a number before; ""
    if there is none."""
    if any(t.isnan().any() for t in first.floats):
        return ""
    try:
        with filled():
            other = asked(model, call)
    except Exception as error:  # noqa: BLE001 - told: without the filling it did not raise
        return f"the model itself, which raises {type(error).__name__},"
    if not any(t.isnan().any() for t in other.floats):
        return ""
    return next(one.called for one in other.seen if one.nan_out and not one.nan_in)


def multiplications(model: nn.Module, call: Callable[[], Any]) -> int:
    """How often the linears of a model multiply in ``call``: rows x in_features x out_features."""
    found = 0

    def count(linear: Any, given: Any, output: torch.Tensor) -> None:
        nonlocal found
        found += output.numel() * linear.in_features

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(count).remove)
        asked(model, call)
    return found


class Kernels(TorchDispatchMode):
    """The kernels that run in it, by name, each with the shapes that it returns."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ran.append((func.name(), tuple(t.shape for t in tensors_in(made))))
        return made


class Functions(TorchFunctionMode):
    """The operators that are called in it as functions of torch."""

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
        except ValueError:  # nobody judges such a call, and the run says so
            return made
        return made


def kept_outside(model: nn.Module, blocks: Sequence[str], call: Callable[[], Any]) -> str:
    """The first of these submodules that, called again with what it was just called with, computes
    something else though none of its inputs has changed: it keeps something for the rest of the
    model's forward, as layers with a cache of keys and values do. "" if none does."""
    found: list[str] = []

    def again(name: str, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        def computed() -> tuple[Any, Any]:
            torch.clear_autocast_cache()  # else a weight is cast the first time alone
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
        asked(model, call)
    return found[0] if found else ""


@contextmanager
def filled() -> Iterator[None]:
    """What is allocated and not written holds NaN inside, by torch's own switch for that."""
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
def _kept_generators() -> Iterator[None]:
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)


def _states() -> dict[str, Any]:
    """The state of each generator, comparable."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": digest([torch.get_rng_state()]),
        FOREIGN[0]: random.getstate(),
        FOREIGN[1]: (kind, np.asarray(keys).tobytes(), *rest),
    }


def digest(tensors: Sequence[torch.Tensor]) -> bytes:
    """A hash of their bits."""
    found = hashlib.sha256()
    for t in tensors:
        raw = t.detach().reshape(-1).contiguous().view(torch.uint8)
        found.update(f"{tuple(t.shape)} {t.dtype}".encode())
        found.update(raw.numpy())
    return found.digest()


def _has_nan(tensors: Sequence[torch.Tensor]) -> bool:
    return any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors)
