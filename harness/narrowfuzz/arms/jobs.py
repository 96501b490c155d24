"""Translates a Spec and an arm into a Job, the description of a training that ``play/`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from narrowfuzz.arms.available import options_on
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.events import (
    Backward,
    Close,
    Forward,
    Open,
    Reload,
    Settings,
    Step,
    Switch,
    with_settings,
)
from narrowfuzz.case.spec import OPTIMIZERS, Spec
from narrowfuzz.models.catalog import MODELS, takes_ids
from narrowfuzz.play import library
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.job import Compile, Event, Job, Layers, Recompute

T = TypeVar("T")


def _pass(number: int) -> tuple[Event, ...]:
    """A plain forward of this number and its backward."""
    return ("forward", number, 0, "train", False), ("backward", number, (number,), False)


#: Sequences of events that a rule runs in place of a plain forward and backward, by name. On the
#: same data, the last forward and backward must give the same results.
AFTER: dict[str, tuple[Event, ...]] = {
    "steps": (*_pass(0), ("step", True), *_pass(1), ("step", False), *_pass(2)),
    "reload": (*_pass(0), ("reload", True), *_pass(1)),
    "reload_trusted": (*_pass(0), ("reload", False), *_pass(1)),
}

#: An optimizer whose steps change nothing, and its options.
_NO_STEP: tuple[str, dict[str, Any]] = "SGD", {"lr": 0.0}


def with_model_names(spec: Spec, tensors: Mapping[str, T]) -> Mapping[str, T]:
    """The tensors by name, where parameters have their names in the model."""
    called = {own: name for name, own in spec.parameters.items()}
    return {called.get(name, name): t for name, t in tensors.items()}


def events_of(spec: Spec) -> tuple[Event, ...]:
    """The events of a converted model's training, as the player takes them."""
    return tuple(_events(spec, lambda used: ()))


def events_of_layers(spec: Spec) -> tuple[Event, ...]:
    """The events of a training of a library's own layers, as the player takes them. They carry the
    settings of the layers; a converted model contains its own."""
    return tuple(_events(spec, lambda used: (plain(used),)))


def _events(
    spec: Spec, settings_of: Callable[[Settings], tuple[library.Settings, ...]]
) -> Iterator[Event]:
    forwards = backwards = row_shift = steps = 0
    early = spec.sharding.resumes == "early"
    if early:
        yield ("handover",)
    for event, used in with_settings(spec.training, spec.settings):
        own_settings = settings_of(used)
        match event:
            case Open(enabled=enabled):
                yield "open", (*own_settings, True)[0] if enabled else None
            case Close():
                yield ("close",)
            case Forward(mode=mode, inside=inside):
                narrow = not own_settings and (spec.autocast or inside)
                yield "forward", forwards, row_shift, mode, narrow
                forwards += 1
                # each microbatch of a model has the same rows, rotated by one more; forwards that
                # do not train use the current rotation
                row_shift += mode == "train" and not own_settings
            case Backward(of=of, retain=retain):
                yield "backward", backwards, of, retain
                backwards += 1
            case Step():
                yield "step", True
                if spec.sharding.resumes and not (early or steps):
                    yield ("handover",)
                steps += 1
            case Reload(back=back):
                yield ("rollback",) if back else ("reload", False, *own_settings)
            case Switch():
                yield ("switch",)


def job_of(spec: Spec, arm: Arm, device: str, events: tuple[Event, ...] | None = None) -> Job:
    """The training of a converted model on an arm in one process. ``tied`` is not set: the caller
    that builds the model does that. If ``events`` replace those of the Spec, optimizer steps
    change nothing."""
    stepping = OPTIMIZERS[spec.optimizer] if events is None else _NO_STEP
    return replace(
        _job(spec, device, events_of(spec) if events is None else events, stepping),
        lifecycle=spec.lifecycle,
        buffers=MODELS[spec.model].saved_buffers,
        kernels="native" if arm.native else "default",
        recompute=Recompute(arm.checkpoint, *MODELS[spec.model].recomputed(spec)),
        compile=_compiled(spec, arm, device) if arm.compiler else Compile(),
    )


def _job(
    spec: Spec, device: str, events: tuple[Event, ...], stepping: tuple[str, dict[str, Any]]
) -> Job:
    """The part of a Job that all Specs have in common; ``stepping``: optimizer and its options."""
    steps = any(event == "step" for event, *_ in events)
    narrow = [how[-1] for event, *how in events if event in ("open", "forward")]
    optimizer, options = stepping if steps else ("", {})
    return Job(
        events,
        dtype=str(DTYPES[spec.dtype]).removeprefix("torch."),
        device=device,
        input_shape=spec.input_shape,
        output_shape=spec.output_shape,
        ids=takes_ids(spec.model),
        input_grad=spec.layout != "frozen_first",
        optimizer=optimizer,
        options=options,
        loss_scaling=spec.loss_scaling if optimizer else "none",
        clipping=spec.clipping if optimizer else "none",
        autocast=True in narrow,
        input_layout=spec.input_layout,
        grad_layout=spec.grad_layout,
    )


def _compiled(spec: Spec, arm: Arm, device: str) -> Compile:
    options = options_on(arm, device)
    if arm.compiler == "inductor" and MODELS[spec.model].random:
        options["fallback_random"] = True  # eager's random numbers, else no two arms agree
    given = {"dynamic": spec.dynamic, "fullgraph": spec.fullgraph, "options": options}
    given = {name: value for name, value in given.items() if value != {}}
    return Compile(arm.compiler, given, spec.memory_budget / 100)


def job_of_layers(spec: Spec, device: str, *, recomputed: bool, caching: bool) -> Job:
    """The training of a library's own layers; ``caching``: whether they take
    is_first_microbatch."""
    names = [str(i) for i in range(spec.layers)]
    layers = Layers(
        order=tuple(names * 2 if spec.layout == "twice" else names),
        layout=spec.layout,
        hows=_forward_options(spec),
        frozen=spec.layout == "frozen_first",
        recomputed=recomputed,
        each=spec.region in ("each", "nested"),
        whole=spec.region in ("whole", "nested"),
        by=spec.checkpoint_by,
        reentrant=spec.reentrant,
        caching=caching,
        settings=plain(spec.settings),
    )
    job = _job(spec, device, events_of_layers(spec), OPTIMIZERS[spec.optimizer])
    return replace(job, layers=layers)


def plain(settings: Settings) -> library.Settings:
    """The settings as the player passes them to a library's functions."""
    return library.Settings(*(getattr(settings, name) for name in library.Settings._fields))


def _forward_options(spec: Spec) -> dict[int, dict[str, Any]]:
    """Number of a forward -> the options with which it calls the library's layers."""
    events = with_settings(spec.training, spec.settings)
    forwards = [(event, used) for event, used in events if isinstance(event, Forward)]
    return {
        number: {
            "inside": plain(used) if event.inside else None,
            "first": event.first,
            "path": event.path,
        }
        for number, (event, used) in enumerate(forwards)
    }
