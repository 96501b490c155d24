"""A user's model, tried once: what it is like, or why it cannot be judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from narrowfuzz.case.spec import LARGEST_OWN
from narrowfuzz.machine.environment import one_thread
from narrowfuzz.models.catalog import FIXED_BY_OWN
from narrowfuzz.models.model import Model
from narrowfuzz.operators import BY_KERNEL
from narrowfuzz.own_models.source import Source, raised, refused

if TYPE_CHECKING:
    import torch
    from torch import nn

    from narrowfuzz.own_models.calls import Answer
    from narrowfuzz.own_models.ids import Lookup
    from narrowfuzz.play.own import OwnModel

    Refuse = Callable[[str], ValueError]

_HOW = "it must return a module and what that is called with: a tensor, a tuple, or a dict by name"


def tried(source: Source) -> Model:
    """Build it, call it several times, and see. Raises ValueError for what cannot be judged."""
    import torch
    from torch import nn

    from narrowfuzz.own_models.calls import kept_outside, multiplications
    from narrowfuzz.own_models.ids import driven, lookups, vocabulary
    from narrowfuzz.play.own import OwnModel

    refuse = partial(refused, source)
    module, given = _built(source, refuse)
    elsewhere = {t.device.type for t in (*module.parameters(), *module.buffers())} - {"cpu"}
    if elsewhere:
        raise refuse(
            f"it is built on {', '.join(sorted(elsewhere))}: build it on the CPU, where "
            "it goes from there is the run's business"
        )
    linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise refuse("it has no nn.Linear: there is nothing that a recipe would quantise")
    dtype = _dtype(next(iter(linears.values())).weight)
    if not dtype:
        kind = str(next(iter(linears.values())).weight.dtype).removeprefix("torch.")
        raise refuse(f"its first linear is {kind}: fp32, bf16 and fp16 can be judged")
    make = partial(OwnModel, source.where, source.build, 1, 1, dict(source.dims))
    with one_thread():
        probe = make(next(key for key, v in given.items() if isinstance(v, torch.Tensor)))
        with lookups() as found:
            call, example = _calling(probe, source, refuse), probe.given[probe.driven]
            call(example)
        call(example)
        own = make(driven(probe.given, found))
        if _buffers(module) != _buffers(own.model):
            raise refuse(f"{source.build}() gives other buffers each time: seed what it draws")
        called, example = _calling(own, source, refuse), own.given[own.driven]
        ids = not example.is_floating_point()
        if example.dim() == 0 or not example.numel():
            raise refuse(
                f"the tensor it is called with has shape {tuple(example.shape)}: it needs "
                "rows and features"
            )
        answers, unreached, operators = _answers(own, example, called, refuse)
        if _buffers(module) != _buffers(own.model):
            other = make(own.driven)
            _calling(other, source, refuse)(example.flip(0) if ids else example * 0.5)
            made = _buffers(other.model)
            if kept := [n for n, then in _buffers(own.model).items() if made.get(n) != then]:
                raise refuse(
                    f"the first forward fills its buffer {kept[0]} by what it is given, so that no "
                    "two runs are alike: fill it where the model is built"
                )

        def again(other: torch.Tensor) -> Sequence[Lookup]:
            with lookups() as found:
                called(other)
            return found

        count = vocabulary(example, found, again) if ids else 0
    fixed = _sizes(example, ids)
    tokens = fixed["m"] * (fixed["batch"] or 1)
    fixed["k" if ids else "n"] = math.ceil(sum(t.numel() for t in answers[0].floats) / tokens)
    if ids:
        fixed["n"] = min(count, LARGEST_OWN)
    largest = max(fixed["m"], fixed["k"], fixed.get("n", 1))
    if largest > LARGEST_OWN:
        raise refuse(
            f"it has {largest} rows or features in or out, and {LARGEST_OWN} is the most that is "
            "judged: build it with fewer tokens, less width or vocabulary"
        )
    fixed |= {
        "heads": 1,
        "attention": "flash",
        "bias": any(linear.bias is not None for linear in linears.values()),
        "dynamic": False,
        "dtype": dtype,
    }
    assert set(fixed) == FIXED_BY_OWN, set(fixed) ^ FIXED_BY_OWN
    blocks = _blocks(module)
    unrepeatable = kept_outside(own, blocks, lambda: called(example.clone()))
    where, place, dims = (source.where, source.build), own.driven, dict(source.dims)
    return Model(
        source.name,
        source.title,
        "OwnModel",
        lambda spec: (*where, spec.tokens, spec.width, dims, place),
        "block",
        wide=not ids,
        takes_ids=ids,
        random=any("torch" in answer.moved for answer in answers),
        attends=True,
        regions=() if unrepeatable else blocks,
        fixed=fixed,
        own=True,
        linears=tuple(f"model.{name}".rstrip(".") for name in linears),
        by_default=not source.dims,
        unreached=unreached,
        inputs=_inputs(given),
        unrepeatable=unrepeatable,
        multiplications=multiplications(own, lambda: called(example.clone())),
        operators=operators,
    )


def _inputs(given: Mapping[Any, Any]) -> tuple[str, ...]:
    """``mask [2, 32] bool``: each tensor's name where it has one, its shape and its dtype."""
    import torch

    return tuple(
        f"{f'{key} ' if isinstance(key, str) else ''}{list(one.shape)} "
        f"{str(one.dtype).removeprefix('torch.')}"
        for key, one in given.items()
        if isinstance(one, torch.Tensor)
    )


def _built(source: Source, refuse: Refuse) -> tuple[nn.Module, dict[Any, Any]]:
    """What ``build`` gives, if that is a module and something to call it with."""
    import torch
    from torch import nn

    from narrowfuzz.play.own import by_place, imported

    try:
        torch.manual_seed(0)
        made = getattr(imported(source.where), source.build)(**dict(source.dims))
    except (Exception, SystemExit) as error:
        raise refuse(raised(f"{source.build}()", error)) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise refuse(f"{source.build}() gives {_kind(made)}; {_HOW}")
    given = by_place(made[1])
    if not any(isinstance(value, torch.Tensor) for value in given.values()):
        raise refuse(f"{source.build}() gives no tensor to call the model with; {_HOW}")
    return made[0], given


def _calling(own: OwnModel, source: Source, refuse: Refuse) -> Callable[[torch.Tensor], Any]:
    """The model as it is called with an input; what that raises, and buffers that a call after the
    first changes, are refused."""

    called_before = False

    def call(x: torch.Tensor) -> Any:
        nonlocal called_before
        before, called_before, first = _buffers(own.model), True, not called_before
        try:
            given = own.called(x)
        except Exception as error:
            called = f"calling it with what {source.build}() gives"
            raise refuse(raised(called, error)) from error
        after = _buffers(own.model)
        if first:
            return given  # it may make what later calls keep: a cache
        if changed := [name for name, then in after.items() if before.get(name) != then]:
            raise refuse(_changing(own.model, changed[0]))
        return given

    return call


def _changing(model: nn.Module, buffer: str) -> str:
    """Why a buffer that a forward changes is in the way."""
    from torch import nn

    holder = model.get_submodule(buffer.rpartition(".")[0])
    if isinstance(holder, nn.modules.batchnorm._NormBase):
        return (
            f"a forward changes its buffer {buffer}, running statistics of "
            f"{type(holder).__name__}, so that no two runs are alike: build it in eval mode, or "
            "with track_running_stats=False"
        )
    return (
        f"a forward changes its buffer {buffer}, so that no two runs are alike; under a "
        "checkpoint the recompute changes it once more. To have the rest checked, freeze it: build "
        "the model so that a forward only reads the buffer (in eval mode, if it does not update "
        "there), and update it outside of forward"
    )


def _answers(
    own: OwnModel, example: torch.Tensor, called: Callable[[torch.Tensor], Any], refuse: Refuse
) -> tuple[list[Answer], tuple[str, ...], frozenset[str] | None]:
    """What it answers again and again to the same, its parameters that no gradient reaches, and the
    operators that it calls."""

    from narrowfuzz.own_models.calls import (
        CALLS,
        Functions,
        Kernels,
        asked,
        forgetful,
        strange_generator,
        unwritten,
    )

    def call() -> Any:
        x = example.clone()
        return called(x.requires_grad_() if x.is_floating_point() else x)

    with Kernels() as kernels, Functions() as functions:
        first = asked(own.model, call)
    answers = [first]
    if not sum(t.numel() for t in first.floats):
        raise refuse("it returns no tensor of floats: there is nothing to compare")
    if not any(t.requires_grad for t in first.floats):
        raise refuse(
            "nothing that it returns has a gradient: return the loss, or what it is made of, "
            "without detach() and outside of torch.no_grad(), and with parameters that train"
        )
    if which := unwritten(own.model, call, first):
        raise refuse(
            f"it returns memory that nobody wrote: the output of {which} is NaN where torch.empty "
            "gives NaN. Write all of what torch.empty gives, or take torch.zeros"
        )
    with kernels:
        unreached = _unreached(own.model, first)
    answers += [
        asked(own.model, call) for _ in range(CALLS - 1)
    ]  # what a backward left matters, too
    if which := forgetful(answers):
        raise refuse(
            "with the same input and the same random numbers it gives another output each time: "
            f"the first to get the same and give something else is {which}, and a recompute of it "
            "is not what forward was. Keep nothing between calls (a counter, a cache), read no "
            "clock, and draw from torch's own generator"
        )
    if which := strange_generator(own.model, call, first):
        raise refuse(
            f"its random numbers cannot be repeated: {which}, and torch.manual_seed and "
            "checkpoints restore torch's generator alone. Draw with torch.rand or torch.bernoulli"
        )
    if unreached is None:
        return answers, (), None
    ran = (BY_KERNEL.get(name) for name, _ in kernels.ran)
    names = functions.operators | {operator.name for operator in ran if operator}
    return answers, unreached, frozenset(names)


def _unreached(model: nn.Module, answer: Answer) -> tuple[str, ...] | None:
    """The parameters that train, and get no gradient from what it returned; None where backward
    fails."""
    import torch

    ends = [t for t in answer.floats if t.requires_grad]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return ()
    try:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception:  # noqa: BLE001 - the judge runs it again, and what it raises is a finding
        return None
    return tuple(name for name, p in trained.items() if p.grad is None)


def _sizes(example: torch.Tensor, ids: bool) -> dict[str, Any]:
    """The example's shape as a Spec's: rows, features, and a batch where there are three sizes."""
    *rows, features = example.shape if not ids else (*example.shape, 1)
    if len(rows) == 2 and rows[0] <= 64:
        return {"batch": rows[0], "m": rows[1], "k": features}
    return {"batch": 0, "m": math.prod(rows), "k": features}


def _blocks(module: Any) -> tuple[str, ...]:
    """The blocks of the first list of modules with linears: what training code recomputes one by
    one. A list of norms before it is none."""
    from torch import nn

    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and any(
            isinstance(m, nn.Linear) for m in part.modules()
        ):
            return tuple(f"model.{name}.{i}" for i in range(len(part)))
    return ()


def _dtype(weight: torch.Tensor) -> str:
    from narrowfuzz.play.dtypes import DTYPES

    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(weight.dtype, "")


def _buffers(module: nn.Module) -> dict[str, bytes]:
    """A hash of every buffer's bytes."""
    from narrowfuzz.own_models.calls import digest

    return {name: digest([buffer]) for name, buffer in module.named_buffers()}


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a {type(made).__name__}" if made is not None else "nothing"
