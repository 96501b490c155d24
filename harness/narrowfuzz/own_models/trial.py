"""The trial of a user's model: finds its properties, or the reason why it cannot be judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from narrowfuzz.arms.model_names import other_names
from narrowfuzz.case.spec import LARGEST_OWN
from narrowfuzz.machine.environment import one_thread
from narrowfuzz.models.catalog import FIXED_BY_OWN
from narrowfuzz.models.model import Model
from narrowfuzz.operators import BY_KERNEL
from narrowfuzz.own_models.affected import affected, parts_of
from narrowfuzz.own_models.beside import disturbed
from narrowfuzz.own_models.blocks import blocks_of
from narrowfuzz.own_models.calls import (
    CALLS,
    Answer,
    Functions,
    Kernels,
    digest,
    forgetful,
    kept_outside,
    observe_call,
    products,
    strange_generator,
    unwritten,
)
from narrowfuzz.own_models.changing import (
    Changing,
    calling,
    changed_after_a_step,
    changed_inside,
)
from narrowfuzz.own_models.first import Fresh, buffers_of, check_filled, check_first
from narrowfuzz.own_models.ids import Lookup, driven, lookups, vocabulary
from narrowfuzz.own_models.linears import fields_of, linears_of
from narrowfuzz.own_models.ranks import (
    gradients_by_input,
    other_values,
    reached_by_chance,
    saves_as_named,
    sparse,
    units_of,
    unshardable,
)
from narrowfuzz.own_models.source import Source, raised
from narrowfuzz.own_models.uses import ParameterUses, changed_by_older_hooks
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.kernels import eagerly
from narrowfuzz.play.own import OwnModel, by_place, imported, tensors_in

_HOW = (
    "it must return a module and the arguments of a call: a tensor, a tuple of arguments, or a "
    "dict of arguments by name"
)
#: Part of torch's message if requires_grad is set of a tensor that operators have made.
_LEAVES_ONLY = "can only change requires_grad flags of leaf variables"


def tried(source: Source) -> Model:
    """Build the model, call it several times, and describe it. Raises ValueError with the reason if
    it cannot be judged."""
    module, given = _built(source)
    linears, dtype = linears_of(source, module)
    changing = Changing(dict(module.named_buffers()))
    with one_thread(), eagerly():
        own, found = _driven(source, module, given, changing)
        changing.note(own.model, changed_after_a_step(source, _made(source, own.driven, own.cut)))
        called, example = calling(own, source, changing), own.given[own.driven]
        ids = not example.is_floating_point()
        uses = _uses(source, own, called, changing)
        answers, unreached, operators = _answers(source, own, example, called)
        _check_first_forwards(source, own, example, changing)
        count = _vocabulary(example, found, called) if ids else 0
        remembers = bool(changing.parameters)
        remembers |= bool(changing.names) and _remembers(source, own, example, answers[0])
    has_bias = any(linear.bias is not None for linear in linears.values())
    sizes = _sizes(source, example, sum(t.numel() for t in answers[0].floats), count)
    fixed = sizes | {"bias": has_bias, "dtype": dtype} | _WITHOUT_CHOICE
    assert set(fixed) == FIXED_BY_OWN, set(fixed) ^ FIXED_BY_OWN
    blocks, given_gradients = blocks_of(own, module, lambda: called(example.clone()))
    unrepeatable = kept_outside(own, blocks, lambda: called(example.clone()))
    regions = () if unrepeatable else blocks
    random = any("torch" in answer.moved for answer in answers)
    alike = not (random or remembers)
    with one_thread(), eagerly():
        on_ranks = _on_ranks(own, called, blocks) | (
            _beside_others(source, own, called, count) if alike else {}
        )
    where, dims = (source.where, source.build), dict(source.dims)
    place = (own.driven, True) if own.cut else (own.driven,)
    return Model(
        source.name,
        source.title,
        "OwnModel",
        lambda spec: (*where, spec.tokens // spec.sharding.groups, spec.width, dims, *place),
        "block",
        wide=not ids,
        takes_ids=ids,
        random=random,
        attends=True,
        regions=regions,
        **on_ranks,
        fixed=fixed,
        own=True,
        **fields_of(own, linears),
        also=other_names(own),
        by_default=not source.dims,
        unreached=unreached,
        gradients=uses.found(DTYPES[dtype]),
        regions_get_gradients=(ids or own.cut) and given_gradients,
        cut=own.cut,
        inputs=_inputs(given),
        unrepeatable=unrepeatable,
        **_of_changes(module, changing),
        changing_again=tuple(changed_inside(own, changing, regions, example.clone())),
        remembers=remembers,
        products=tuple(products(own, lambda: called(example.clone()))),
        operators=operators,
        modules=parts_of(module),
        affected=_affected(source, own, operators, autocast=dtype == "fp32"),
    )


#: What models that are drawn choose and a model of one's own does not: fields of its Specs.
_WITHOUT_CHOICE = {
    "heads": 1,
    "attention": "flash",
    "dynamic": False,
    "weight_layout": "contiguous",
}


def _of_changes(module: nn.Module, changing: Changing) -> dict[str, Any]:
    """What a Model says of the buffers and parameters that its forward changes, by field."""
    return {
        "changing": tuple(f"model.{name}" for name in sorted(changing.names)),
        "changing_parameters": tuple(f"model.{name}" for name in sorted(changing.parameters)),
        "saved_buffers": _saved(module, changing.names),
    }


def _uses(
    source: Source, own: OwnModel, called: Callable[[torch.Tensor], Any], changing: Changing
) -> ParameterUses:
    """What one call does with the model's parameters. Raises ValueError for an example without
    elements, and for a forward that trains."""
    example = own.given[own.driven]
    if example.dim() == 0 or not example.numel():
        raise source.refused(
            f"the tensor it is called with has shape {tuple(example.shape)}: it needs "
            "rows and features"
        )
    with ParameterUses(own) as uses:
        called(example.clone().requires_grad_(example.is_floating_point()))
    if uses.differentiates and (stepped := changing.trained(own.model)):
        raise source.refused(
            f"its forward makes a training step of its own: it differentiates, and changes "
            f"{stepped}. Return the loss, and leave the step to the training that calls it"
        )
    return uses


def _on_ranks(
    own: OwnModel, called: Callable[[torch.Tensor], Any], blocks: tuple[str, ...]
) -> dict[str, Any]:
    """What FSDP needs to know of a model, as fields of a Model."""
    example = own.given[own.driven]
    return {
        "units": units_of(own, blocks, lambda: called(example.clone())),
        "saves_as_named": saves_as_named(own),
        "unshardable": unshardable(own),
    }


def _beside_others(
    source: Source, own: OwnModel, called: Callable[[torch.Tensor], Any], ids: int
) -> dict[str, Any]:
    """What its runs with several inputs tell of a model that ranks may train."""
    example = own.given[own.driven]
    given = example, other_values(example, ids)
    gradients = gradients_by_input(own.model, called, example, ids)
    return {
        "reached_by_chance": reached_by_chance(gradients),
        "alone": sparse(gradients)
        or disturbed(own, called, lambda: _made(source, own.driven, own.cut), given),
    }


def _affected(
    source: Source, own: OwnModel, operators: frozenset[str] | None, *, autocast: bool
) -> frozenset[str] | None:
    """What ``affected`` finds, on an instance of its own, as autocast may change what the model
    keeps."""
    if operators is None:
        return None
    made, example = _made(source, own.driven, own.cut), own.given[own.driven]

    def call() -> Any:
        x = example.clone()
        return made.called(x.requires_grad_() if x.is_floating_point() else x)

    return affected(made, call, operators, autocast=autocast)


def _made(source: Source, place: Any, cut: bool = False) -> OwnModel:
    """A new instance of the model, built as players build it: a case's input replaces the argument
    at this position or of this name; ``cut``: without its gradient."""
    return OwnModel(source.where, source.build, 1, 1, dict(source.dims), place, cut)


def _driven(
    source: Source, module: nn.Module, given: Mapping[Any, Any], changing: Changing
) -> tuple[OwnModel, Sequence[Lookup]]:
    """The model with the argument determined that a case's input replaces, and its lookups in
    embedding tables."""
    probe = _made(source, next(k for k, v in given.items() if isinstance(v, torch.Tensor)))
    call, example = calling(probe, source, changing), probe.given[probe.driven]
    with lookups() as found:
        call(example)
    call(example)
    probe.driven = driven(probe.given, found)
    own = _made(source, probe.driven, _takes_leaves_only(probe))
    if buffers_of(module) != buffers_of(own.model):
        raise source.refused(
            f"{source.build}() gives other buffers each time: seed its random numbers"
        )
    return own, found


def _takes_leaves_only(own: OwnModel) -> bool:
    """Does its forward set requires_grad of its input, or of a view of that, as Wav2Vec2 does? That
    raises an error for any but a leaf."""
    example = own.given[own.driven]
    if not example.is_floating_point():
        return False
    try:
        own.called(example.clone().requires_grad_())
    except Exception as error:  # noqa: BLE001 - the calls of the trial proper report any other
        return _LEAVES_ONLY in str(error)
    return False


def _check_first_forwards(
    source: Source, own: OwnModel, example: torch.Tensor, changing: Changing
) -> None:
    """Refuse a model whose first forward does what later ones do not."""
    fresh = Fresh(
        lambda: _made(source, own.driven, own.cut),
        lambda made: calling(made, source, changing),
        changing.names,
    )
    check_filled(source, fresh, example)
    check_first(source, fresh.make(), example, changing.names)


def _vocabulary(
    example: torch.Tensor, found: Sequence[Lookup], called: Callable[[torch.Tensor], Any]
) -> int:
    def again(other: torch.Tensor) -> Sequence[Lookup]:
        with lookups() as found:
            called(other)
        return found

    return vocabulary(example, found, again)


def _inputs(given: Mapping[Any, Any]) -> tuple[str, ...]:
    """``mask [2, 32] bool``: name (if there is one), shape and dtype of each tensor."""
    return tuple(
        f"{f'{key} ' if isinstance(key, str) else ''}{list(one.shape)} "
        f"{str(one.dtype).removeprefix('torch.')}"
        for key, one in given.items()
        if isinstance(one, torch.Tensor)
    )


def _built(source: Source) -> tuple[nn.Module, dict[Any, Any]]:
    """The module that ``build`` returns, and the arguments to call it with, by position or name.
    Raises ValueError if it returns anything else."""
    try:
        torch.manual_seed(0)
        made = getattr(imported(source.where), source.build)(**dict(source.dims))
    except (Exception, SystemExit) as error:
        raise source.refused(raised(f"{source.build}()", error)) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise source.refused(f"{source.build}() gives {_kind(made)}; {_HOW}")
    given = by_place(made[1])
    if not any(isinstance(value, torch.Tensor) for value in given.values()):
        gives = "no tensor to call the model with"
        if tensors_in(made[1]):
            gives = "its tensors inside of other tuples, lists or dicts, as ((args), {kwargs}) does"
        raise source.refused(f"{source.build}() gives {gives}; {_HOW}")
    return made[0], given


def _remembers(source: Source, own: OwnModel, example: torch.Tensor, first: Answer) -> bool:
    """True if a forward computes something else after forwards that have changed buffers. Raises
    ValueError if it fails after them."""
    try:
        later = [observe_call(own.model, lambda: own.called(example.clone())) for _ in range(CALLS)]
    except Exception as error:
        raise source.refused(raised("calling it several times in a row", error)) from error
    return any(digest(answer.floats) != digest(first.floats) for answer in later)


def _saved(module: nn.Module, names: set[str]) -> tuple[str, ...]:
    """Those of the buffers of these names that a state_dict holds, and that are real numbers."""
    saved = names & module.state_dict().keys()
    return tuple(f"model.{n}" for n in sorted(saved) if not module.get_buffer(n).is_complex())


def _answers(
    source: Source, own: OwnModel, example: torch.Tensor, called: Callable[[torch.Tensor], Any]
) -> tuple[list[Answer], tuple[str, ...], frozenset[str] | None]:
    """The answers to identical calls, the parameters that get no gradient, and the operators that
    the model calls; None if backward fails. Raises ValueError for a model that returns nothing to
    compare or differentiate, or whose runs differ."""

    def call() -> Any:
        x = example.clone()
        return called(x.requires_grad_() if x.is_floating_point() else x)

    with changed_by_older_hooks(own.model) as changed:
        with Kernels() as kernels, Functions() as functions:
            first = observe_call(own.model, call)
        before = buffers_of(own.model)
        with kernels:  # before it is called again: that may change buffers that backward needs
            unreached = _unreached(own.model, first)
        buffers = [name for name, now in buffers_of(own.model).items() if before.get(name) != now]
        _judgeable(source, own, call, first)
    if changed:
        raise source.refused(
            f"a hook of register_backward_hook changes gradients of {changed[0] or 'the model'}: "
            "torch applies it to whichever function made the module's output, and recording adds "
            "functions there. Use register_full_backward_hook"
        )
    answers = [first]
    answers += [
        observe_call(own.model, call) for _ in range(CALLS - 1)
    ]  # after a backward: what it leaves may change the next forward
    if which := forgetful(answers):
        if buffers and not forgetful(answers[1:]):
            raise source.refused(
                f"its backward changes its buffer {buffers[0]}, as a hook does, and a forward "
                "after it gives another output for the same input and the same random numbers: the "
                f"first module that does is {which}. Change the buffer in the forward, or outside "
                "of forward and backward"
            )
        raise source.refused(
            "with the same input and the same random numbers it gives another output each time: "
            f"the first module with the same input and another output is {which}, and a recompute "
            "would differ from its forward. Keep nothing between calls (a counter, a cache), read "
            "no clock, and draw from torch's own generator"
        )
    if which := strange_generator(own.model, call, first):
        raise source.refused(
            f"its random numbers cannot be repeated: {which}, and torch.manual_seed and "
            "checkpoints restore torch's generator alone. Draw with torch.rand or torch.bernoulli"
        )
    if unreached is None:
        return answers, (), None
    ran = (BY_KERNEL.get(name) for name, _ in kernels.ran)
    names = functions.operators | {operator.name for operator in ran if operator}
    return answers, unreached, frozenset(names)


def _judgeable(source: Source, own: OwnModel, call: Callable[[], Any], first: Answer) -> None:
    """Refuse a model that returns nothing to compare or differentiate, or memory that nobody
    wrote."""
    if not sum(t.numel() for t in first.floats):
        raise source.refused("it returns no tensor of floats: there is nothing to compare")
    if not any(t.requires_grad for t in first.floats):
        raise source.refused(
            "nothing that it returns has a gradient: return the loss, or what it is made of, "
            "without detach() and outside of torch.no_grad(), and with parameters that train"
        )
    if which := unwritten(own.model, call, first):
        raise source.refused(
            f"it returns uninitialised memory: the output of {which} is NaN where torch.empty "
            "gives NaN. Write every element of such a tensor, or use torch.zeros"
        )


def _unreached(model: nn.Module, answer: Answer) -> tuple[str, ...] | None:
    """The trainable parameters that get no gradient from what the model returned; None if backward
    fails."""
    ends = [t for t in answer.floats if t.requires_grad]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return ()
    try:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception:  # noqa: BLE001 - the judge runs it again, and what it raises is a finding
        return None
    return tuple(name for name, p in trained.items() if p.grad is None)


def _sizes(source: Source, example: torch.Tensor, given: int, ids: int) -> dict[str, Any]:
    """The example's shape as fields of a Spec: rows, a batch if it has three dimensions, and
    features in and out. ``given``: number of floats that the model returns. ``ids``: size of the
    vocabulary, 0 if the example holds features."""
    *rows, features = (*example.shape, 1) if ids else example.shape
    fixed: dict[str, Any] = {"batch": 0, "m": math.prod(rows)}
    if len(rows) == 2 and rows[0] <= 64:
        fixed = {"batch": rows[0], "m": rows[1]}
    out = math.ceil(given / math.prod(rows))
    fixed |= {"k": out, "n": min(ids, LARGEST_OWN)} if ids else {"k": features, "n": out}
    largest = max(fixed["m"], fixed["k"], fixed["n"])
    if largest > LARGEST_OWN:
        raise source.refused(
            f"it has {largest} rows or features in or out, and at most {LARGEST_OWN} can be "
            "checked: build it with fewer tokens, or a smaller width or vocabulary"
        )
    return fixed


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a {type(made).__name__}" if made is not None else "nothing"
