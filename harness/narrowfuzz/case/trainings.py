"""Which events a converted model supports.

The events are the same as for a library's own layers. An event that converted models do not support
is refused with its index and the reason.
"""

from __future__ import annotations

from functools import partial
from typing import get_args

from narrowfuzz.case.event_rules import Standing, check_fields, check_order
from narrowfuzz.case.events import Backward, Close, Event, Forward, Open, Step, Switch
from narrowfuzz.case.spec import Checkpoint, Spec
from narrowfuzz.models.catalog import FIELDS_OF_LIBRARY, MODELS, takes_ids, unregistered


def check_events(spec: Spec, *, autocasts: bool) -> None:
    """Raise ValueError naming the first event that is invalid at its place, or that a converted
    model of this Spec does not support. ``autocasts``: its recipe is drawn under autocast."""
    if why := unregistered(spec.model):
        raise ValueError(why)
    if spec.layer:
        raise ValueError(f"{spec.recipe} converts models, and {spec.model} is a library's own")
    check_fields(spec, FIELDS_OF_LIBRARY, "a library's own layers")
    if spec.checkpoint not in get_args(Checkpoint):
        raise ValueError(
            f"checkpoint {spec.checkpoint!r} is of a library that has one of its own: "
            f"{spec.recipe} takes {', '.join(get_args(Checkpoint))}"
        )
    if spec.wraps != "whole" and (reason := _not_wrapped(spec)):
        raise ValueError(f"checkpoint {spec.checkpoint!r} does not wrap {spec.wraps!r}: {reason}")
    check_order(spec.events, partial(_objection, spec, autocasts))
    if sum(isinstance(e, Open) - isinstance(e, Close) for e in spec.events):
        raise ValueError("a region is open when the training ends: close it")


def _not_wrapped(spec: Spec) -> str:
    """Why the Spec's checkpoint cannot wrap ``spec.wraps``; "" if it can."""
    if spec.wraps == "each":
        return "of a converted model it wraps the whole, or that and parts of it ('nested')"
    if not MODELS[spec.model].parts:
        return f"{spec.model} has no parts that could be recomputed alone"
    selective = "torch keeps nothing for a selective checkpoint inside another"
    return selective if spec.checkpoint == "selective" else ""


def not_reentrant(model: str, *, autocast: bool) -> str:
    """Why the reentrant checkpoint cannot recompute this model; "" if it can."""
    row = MODELS.get(model)
    if row is not None and not (row.input_grad or row.regions_get_gradients):
        what = "token ids carry" if row.takes_ids else "its input carries"
        return f"{what} no gradient, and it needs an input that does"
    return "its detached inputs are leaves, whose casts autocast keeps" if autocast else ""


def _objection(spec: Spec, autocasts: bool, event: Event, standing: Standing) -> str:
    """Why a model of this Spec does not support the event at this place; "" if it does."""
    ids = takes_ids(spec.model)
    match event:
        case Backward() | Step() if standing.regions:
            return "autocast is for forwards: close the region first"
        case Open() if spec.autocast:
            return "all of it runs under autocast: leave the Spec's autocast at its default"
        case Switch():
            return "a model is converted once, and its recipe does not change"
        case Forward(first=first, path=path) if first is not None or path:
            return "a converted model has neither weights to keep nor branches"
        case Open() | Forward(inside=True) if spec.dtype != "fp32" or not autocasts:
            return f"{spec.recipe} is not run under autocast in {spec.dtype}"
        case Open() | Forward(inside=True) if spec.checkpoint == "reentrant":
            return f"no reentrant checkpoint: {not_reentrant(spec.model, autocast=True)}"
        case Forward(mode="inference"):
            return "a training is evaluated with mode 'eval' or 'no_grad'"
        case Forward(values=values, shift=shift) if ids and (values != "gaussian" or shift):
            return f"token ids of {spec.model} are neither scaled nor special"
        case Backward(retain=True) if spec.compile != "none":
            return "a compiled graph gives its buffers away: kept graphs need compile 'none'"
        case Backward(retain=True) if spec.checkpoint == "selective":
            return "torch runs a selectively recomputed region backward once"
    return ""
