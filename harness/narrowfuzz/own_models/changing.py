"""What each forward of a user's model changes by itself: buffers, and parameters that follow
others. It is set back before the next forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from narrowfuzz.own_models.calls import digest
from narrowfuzz.own_models.first import buffers_of
from narrowfuzz.own_models.source import Source, raised
from narrowfuzz.own_models.uses import UnrecordableError
from narrowfuzz.play.own import OwnModel

#: By which share of themselves, at most, trained parameters are moved before it is seen which
#: others follow them.
_MOVED = 0.125


@dataclass
class Changing:
    """The buffers of a model as built, the names of those that every forward changes, and the
    parameters that forwards change, as built."""

    built: Mapping[str, torch.Tensor]
    names: set[str] = field(default_factory=set)
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def note(self, model: nn.Module, names: Collection[str]) -> None:
        """Note that forwards change these parameters and buffers of a model that was not called
        yet."""
        self.names |= self.built.keys() & names
        parameters = dict(model.named_parameters()).items()
        self.parameters = {n: p.detach().clone() for n, p in parameters if n in names}

    def trained(self, model: nn.Module) -> str:
        """The first parameter of those that forwards change that trains, "" if none does."""
        trained = (n for n in self.parameters if model.get_parameter(n).requires_grad)
        return next(trained, "")

    def restore(self, model: nn.Module) -> None:
        """Set what changes back to its initial values for the next forward. Through ``data``,
        because autograd must not count this as a new version: a backward may still need it."""
        for name in self.names:
            model.get_buffer(name).data.copy_(self.built[name])
        for name, value in self.parameters.items():
            model.get_parameter(name).data.copy_(value)

    def fits(self, model: nn.Module, name: str) -> bool:
        """Can the buffer of this name be set back to its initial value?"""
        buffer = model.get_buffer(name)
        return buffer.shape == self.built[name].shape and not is_expanded(buffer)


def is_expanded(t: torch.Tensor) -> bool:
    """Do several of its elements share one place in memory, so that it cannot be written to?"""
    return any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True))


def _check_restorable(own: OwnModel, source: Source, changing: Changing) -> None:
    if other := [name for name in sorted(changing.names) if not changing.fits(own.model, name)]:
        raise source.refused(
            f"each forward replaces its buffer {other[0]} by one of another shape, or by an "
            "expanded one, which cannot be set back: write into it with copy_()"
        )


def calling(own: OwnModel, source: Source, changing: Changing) -> Callable[[torch.Tensor], Any]:
    """A function that calls the model with an input, each time with the initial values of its
    changing buffers. The first call may fill a cache that later calls use. If the model raises an
    error, the model is refused."""
    called_before = False

    def call(x: torch.Tensor) -> Any:
        nonlocal called_before
        _check_restorable(own, source, changing)
        changing.restore(own.model)
        before, called_before, first = buffers_of(own.model), True, not called_before
        try:
            given = own.called(x)
        except UnrecordableError as why:
            raise source.refused(str(why)) from why
        except Exception as error:
            called = f"calling it with what {source.build}() gives"
            raise source.refused(raised(called, error)) from error
        after = buffers_of(own.model)
        changed = {name for name, then in after.items() if before.get(name) != then}
        if not first and (new := changed - changing.names):
            if made := new - changing.built.keys():
                raise source.refused(
                    f"each forward changes its buffer {min(made)}, which the first one makes: "
                    "create it where the model is built"
                )
            changing.names |= new
            _check_restorable(own, source, changing)
        return given

    return call


def changed_after_a_step(source: Source, own: OwnModel) -> set[str]:
    """The names of the parameters and buffers that a forward in training changes by itself (a
    teacher that follows its student, weights that are clipped), the first one aside, which may fill
    caches. Parameters that train are moved in between, as steps move them: what begins as their
    copy does not change before."""
    calling(own, source, Changing({}))(own.given[own.driven])
    random = torch.Generator().manual_seed(0)
    for parameter in own.model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            moved = 1.0 + _MOVED * torch.rand(parameter.shape, generator=random)
            parameter.data.mul_(moved.to(parameter.dtype))
    before = _digests(own.model)
    try:
        own.called(own.given[own.driven].clone())
    except Exception as error:
        called = f"calling it after its weights changed by up to {100 * _MOVED:g} %"
        raise source.refused(raised(called, error)) from error
    return {name for name, value in _digests(own.model).items() if before.get(name) != value}


def changed_inside(
    own: OwnModel, changing: Changing, regions: Collection[str], x: torch.Tensor
) -> list[str]:
    """The buffers and parameters that a checkpoint's recompute of these submodules changes again:
    of those that a forward changes the ones in a submodule, and those that a forward of one changes
    in a call with x. Also those that the call does not change, of which it is not known. If there
    are no ``regions``, the whole model is recomputed."""
    names = {f"model.{name}" for name in (*changing.names, *changing.parameters)}
    rest = {n for n in names if regions and not any(n.startswith(f"{one}.") for one in regions)}
    if not rest:
        return sorted(names)

    def values() -> dict[str, bytes]:
        every = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        return {name: digest([every[name]]) for name in rest}

    before: list[dict[str, bytes]] = []
    moved: set[str] = set()

    def ends(*_: Any) -> None:
        then = before.pop()
        moved.update(name for name, value in values().items() if then[name] != value)

    changing.restore(own.model)
    began = values()
    with ExitStack() as hooks:
        for module in map(own.get_submodule, regions):
            begins = module.register_forward_pre_hook(lambda *_: before.append(values()))
            hooks.callback(begins.remove)
            hooks.callback(module.register_forward_hook(ends).remove)
        own.called(x)
    ended = values()
    return sorted(n for n in names if n not in rest or n in moved or began[n] == ended[n])


def _digests(module: nn.Module) -> dict[str, bytes]:
    """Name -> hash of the bytes of every parameter and buffer."""
    return {name: digest([p]) for name, p in module.named_parameters()} | buffers_of(module)
