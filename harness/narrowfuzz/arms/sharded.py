"""Run a case on the ranks of its sharding, and the piece of each data-parallel rank in one process.

Both are played by the same functions, so what differs is the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from narrowfuzz.arms.layers import calls_of
from narrowfuzz.arms.lost import raise_if_lost
from narrowfuzz.arms.plain_steps import play_chain, play_steps
from narrowfuzz.arms.processes import TRANSPORT, in_processes
from narrowfuzz.arms.program import run_error
from narrowfuzz.arms.tensors import fp32_array
from narrowfuzz.arms.training import events_of, named, playing
from narrowfuzz.arms.zoo import layer_names, ties
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.spec import ALONE, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.converted import play
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.player import Trace as Played
from narrowfuzz.play.ranks import Disagree, on_ranks
from narrowfuzz.play.resumed import resumed_on
from narrowfuzz.play.sharded import mesh_of, play_sharded
from narrowfuzz.recipe.recipe import ROUNDED, Emit, Recipe
from narrowfuzz.trace.trace import ErrorPhase, RunError, Trace

#: DTensor asks fake tensors for shapes, and torch keeps what they answered for the life of the
#: process. A library's tensor that is a new key each time fills that without an end.
MOST_SHAPES = 4096


def sharded_traces(
    spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], arms: Sequence[Arm], device: str
) -> dict[str, Trace]:
    """The traces of these arms, by name, up to the first that raised."""
    traces = {EAGER.name: run_alone(spec, recipe, tensors, device)}
    if traces[EAGER.name].error is None:
        for arm in arms:
            if arm.sharded:
                traces[arm.name] = run_sharded(spec, recipe, tensors, arm, device)
                if traces[arm.name].error is not None:
                    break
    return traces


def pieces_of(spec: Spec) -> tuple[Spec, ...]:
    """The linears that ranks multiply, where a linear is cut: by rows, then by a feature."""
    own, tensor = on_its_own(spec), max(spec.sharding.tensor, 1)
    cut = [msgspec.structs.replace(own, **{name: getattr(own, name) // tensor}) for name in "kn"]
    return own, *cut


def on_its_own(spec: Spec) -> Spec:
    """The Spec of one data-parallel rank's piece of the rows, in one process."""
    pieces = max(spec.sharding.data, 1)
    size = "batch" if spec.batch else "m"
    rows = getattr(spec, size) // pieces
    return msgspec.structs.replace(spec, sharding=ALONE, checkpoint="none", **{size: rows})


def piece_of(spec: Spec, tensors: Mapping[str, F32], piece: int) -> dict[str, F32]:
    """The tensors of that: all parameters, and its rows of inputs and output gradients."""
    pieces = max(spec.sharding.data, 1)

    def cut(name: str, x: F32) -> F32:
        rows = name.partition("@")[0] in ("input", "grad_output")
        return np.split(x, pieces)[piece] if rows else x

    return {name: cut(name, x) for name, x in tensors.items()}


def run_alone(spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], device: str) -> Trace:
    """The trace of the unsharded model; ``ranks`` has one for each data-parallel rank's piece."""
    ranks = []
    for piece in range(max(spec.sharding.data, 1)):
        own = on_its_own(spec)
        arguments = _arguments(own, recipe, piece_of(spec, tensors, piece), EAGER, device)
        played = Played()
        try:
            if spec.sharding.stages:
                play_chain(played, spec, recipe, tensors, device)
            else:
                play(played, *arguments.pop("positional"), **arguments)
        except Exception as error:
            raise_if_lost(error, device)
            return Trace(EAGER.name, error=run_error(error, played.phase))  # type: ignore[arg-type]
        ranks.append(_trace_of(EAGER.name, own, recipe, played))
    return Trace(EAGER.name, ranks=tuple(ranks))


def run_sharded(
    spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], arm: Arm, device: str
) -> Trace:
    """The trace of the sharded one, with one for each rank; an error says on which rank."""
    if not arm.processes:
        return _play(on_ranks, spec, recipe, tensors, arm, device)
    left, where = in_processes(
        spec.sharding.ranks,
        partial(_play, spec=spec, recipe=recipe, tensors=tensors, arm=arm, device=device),
        device,
    )
    phase: ErrorPhase = "forward"
    for trace in left.values():
        if trace.error is not None:
            if TRANSPORT not in trace.error.message:  # the others miss the one that raised
                return trace
            phase = trace.error.phase
    if len(left) == spec.sharding.ranks and left[0].error is None:
        return left[0]
    here = f"{__name__}.run_sharded"
    return Trace(arm.name, error=RunError(phase, Disagree.__name__, where, here, ""))


def _play(
    on: Callable[..., list[Any]],
    spec: Spec,
    recipe: Recipe,
    tensors: Mapping[str, F32],
    arm: Arm,
    device: str,
) -> Trace:
    """The trace where ``on`` runs a function on every rank."""
    arguments = _arguments(spec, recipe, tensors, arm, device) | sharding_of(spec)
    if spec.sharding.resumes:
        arguments["resume"] = partial(resumed_on, **resuming(spec))
    if arm.compiler:
        torch._dynamo.reset()  # it gives up compiling what it has compiled for many Specs
        _clear_sharding_prop_cache()  # or results are laid out over the mesh of a run before
    graphs = counters["stats"]["unique_graphs"]
    try:
        if spec.sharding.together:
            played = play_steps(on, spec, recipe, tensors, arm, device)
        else:
            played = play_sharded(*arguments.pop("positional"), on=on, **arguments)
    except Exception as error:
        raise_if_lost(error, device)
        failed = run_error(error, getattr(error, "phase", "convert"))
        return Trace(arm.name, error=replace(failed, rank=getattr(error, "rank", -1)))
    finally:
        if FakeTensorMode.cache_info().size > MOST_SHAPES:
            FakeTensorMode.cache_clear()
    if arm.compiler and counters["stats"]["unique_graphs"] == graphs:
        return Trace(arm.name, void="no graph was compiled")
    return Trace(arm.name, ranks=tuple(_trace_of(arm.name, spec, recipe, one) for one in played))


def sharding_of(spec: Spec) -> dict[str, Any]:
    """What ``play_sharded`` takes by keyword besides what ``play`` takes."""
    sharding, model = spec.sharding, MODELS[spec.model]
    tied = {name.rpartition(".")[0] for name in ties(spec)}  # these stay in one unit
    each = model.regions or tuple(name for name in layer_names(spec) if name not in tied)
    return {
        "data": sharding.data,
        "tensor": sharding.tensor,
        "styles": model.styles(spec),
        "narrow_styles": sharding.narrow_styles,
        "sequence": sharding.sequence,
        "local_output": sharding.local_output,
        "units": (*each, "") if sharding.units == "each" else ("",),
        "reduces": "float32" if sharding.reduces_fp32 else "",
        "averages": sharding.averages,
        "precomputes": sharding.gathers == "precomputed",
        "cuts": _cuts(spec),
        "rows": (spec.batch or spec.m,) + ((spec.m,) if spec.batch else ()),
        "width_in": spec.k,
        "width_out": spec.width,
    }


def resuming(spec: Spec) -> dict[str, Any]:
    """What ``resumed_on`` takes by keyword."""
    other = spec.sharding.resumed
    laid = {"data": other.data, "tensor": other.tensor}
    cuts = _cuts(msgspec.structs.replace(spec, sharding=other))
    return {"shape": mesh_of(**laid), "laid": {**laid, "cuts": cuts}}


def _cuts(spec: Spec) -> dict[str, int]:
    """Along which dimension tensor parallelism cuts what a model is given; 0: it does not."""
    sharding, model = spec.sharding, MODELS[spec.model]
    styles, rows = (*model.styles(spec).values(),) or ("",), -2 if sharding.sequence else 0
    cuts = {
        # token ids are whole
        "input": 0 if model.takes_ids else -1 if styles[0] == "rowwise" else rows,
        "grad_output": -1 if styles[-1] == "colwise" else rows,
    }
    return cuts if sharding.tensor else dict.fromkeys(cuts, 0)


def _arguments(
    spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], arm: Arm, device: str
) -> dict[str, Any]:
    """What plays it; of a sharded one, the pieces' shapes are not known yet."""

    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=dtype, device=device)

    dtype = DTYPES[spec.dtype]
    how = playing(spec, arm, device)
    if spec.sharded:
        del how["input_shape"], how["output_shape"]
    given = {name: torch.from_numpy(x.copy()) for name, x in named(spec, tensors).items()}
    return how | {
        "positional": (build, lambda model: recipe.convert(model, spec), given, events_of(spec)),
        "dtype": dtype,
        "watch": () if arm.compiler else layer_names(spec),
        "tap": None if arm.compiler else lambda take: recipe.tap(Emit(take)),
    }


def _trace_of(arm: str, spec: Spec, recipe: Recipe, played: Played) -> Trace:
    """One rank's, or one piece's."""
    outputs = {name: fp32_array(t).copy() for name, t in played.results.items()}
    shared = frozenset((*ties(spec), *ties(spec).values()))
    plan, inverse = recipe.plan(spec), recipe.inverse_scales
    calls = calls_of(played.calls, plan, shared, ROUNDED, inverse=inverse)
    return Trace(arm, outputs, calls=calls)
