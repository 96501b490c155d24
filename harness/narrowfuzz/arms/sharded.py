"""Runs a case on the ranks of its layout and, for comparison, each data-parallel rank's rows in one
process.

Both are run by the same functions, so that they differ only in the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from narrowfuzz.arms.census import RecipeError
from narrowfuzz.arms.jobs import with_model_names
from narrowfuzz.arms.layers import calls_of
from narrowfuzz.arms.layouts import (
    copies_of,
    job_alone,
    job_on_ranks,
    made,
    prefixes,
    reference_model,
    single_process_spec,
    tensors_of_group,
)
from narrowfuzz.arms.lost import raise_if_lost
from narrowfuzz.arms.model_names import layer_names, ties
from narrowfuzz.arms.processes import TRANSPORT, in_processes
from narrowfuzz.arms.program import run_error
from narrowfuzz.arms.propagation import shared_propagation
from narrowfuzz.arms.tensors import fp32_array
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.converted import play
from narrowfuzz.play.experts import rolled_inputs, split_by_rank
from narrowfuzz.play.job import Taps
from narrowfuzz.play.mesh import of_this_thread
from narrowfuzz.play.names import name_of
from narrowfuzz.play.player import Trace as Played
from narrowfuzz.play.ranks import Disagree, on_ranks
from narrowfuzz.recipe.recipe import ROUNDED, Emit, Recipe
from narrowfuzz.trace.trace import ErrorPhase, RunError, Trace

#: Size at which torch's cache of fake tensor results, which DTensor fills for shapes, is cleared.
#: Torch never does: a library's tensor that is a new key each time would fill it without end.
MOST_SHAPES = 4096
#: From torch 2.15 on, FSDP gives the gathered parameter the dtype in which gradients are reduced as
#: that of its gradient: ``FSDPParam.init_unsharded_param``.
KEEPS_GRADIENTS = hasattr(FSDPParam, "unsharded_grad_dtype")


def sharded_traces(
    spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], arms: Sequence[Arm], device: str
) -> dict[str, Trace]:
    """The traces of the eager run in one process and of the sharded ones of these arms, by name, up
    to the first sharded arm that raised. If eager raised, the others run only where the model is
    one that is expected to raise."""
    traces = {EAGER.name: run_alone(spec, recipe, tensors, device)}
    if traces[EAGER.name].error is None or MODELS[spec.model].forbidden:
        for arm in arms:
            if arm.sharded:
                traces[arm.name] = run_sharded(spec, recipe, tensors, arm, device)
                if traces[arm.name].error is not None:
                    break
    return traces


def run_alone(spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], device: str) -> Trace:
    """The trace of the unsharded model; its ``ranks`` are the traces of the data-parallel ranks'
    rows. The models of ranks that share experts are trained together."""
    ranks: list[Played] = []
    for piece in range(spec.sharding.groups):
        played, shared = Played(), spec.sharding.experts
        # the linears of a pipeline's stages are not recorded
        taps = Taps() if copies_of(spec) else _taps(spec, _emitting(recipe), EAGER)
        watch = tuple(f"{before}{name}" for before in prefixes(spec) for name in taps.watch)
        given = _given(spec, tensors_of_group(spec, tensors, piece))
        if shared:
            given = rolled_inputs(given, shared, spec.steps * spec.microbatches)
        try:
            play(
                played,
                partial(reference_model, spec, recipe, device),
                given,
                job=job_alone(spec, device),
                taps=replace(taps, watch=watch, adds=spec.microbatches > 1),
            )
        except RecipeError:
            raise
        except Exception as error:
            raise_if_lost(error, device)
            return Trace(EAGER.name, error=run_error(error, played.phase))  # type: ignore[arg-type]
        ranks += split_by_rank(played, shared) if shared else [played]
    own = single_process_spec(spec)
    return Trace(
        EAGER.name, ranks=tuple(_trace_of(EAGER.name, own, recipe, played) for played in ranks)
    )


def run_sharded(
    spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], arm: Arm, device: str
) -> Trace:
    """The trace of the sharded model, with a trace for each rank in ``ranks``; an error names its
    rank."""
    if not arm.processes:
        return _play(on_ranks, spec, recipe, tensors, arm, device)
    part = partial(_play, spec=spec, recipe=recipe, tensors=tensors, arm=arm, device=device)
    if MODELS[spec.model].own:
        part = partial(_play_own, MODELS[spec.model], part)
    results, where = in_processes(spec.sharding.ranks, part, device)
    phase: ErrorPhase = "forward"
    for trace in results.values():
        if trace.error is not None:
            if TRANSPORT not in trace.error.message:  # else it only lost contact with a failed rank
                return trace
            phase = trace.error.phase
    if len(results) == spec.sharding.ranks and results[0].error is None:
        return results[0]
    here = f"{__name__}.run_sharded"
    return Trace(arm.name, error=RunError(phase, Disagree.__name__, where, here))


def _play_own(model: Model, part: Callable[..., Trace], on: Callable[..., list[Any]]) -> Trace:
    """``part`` of a user's own model, which only the process that was given it has registered."""
    MODELS[model.name] = model
    return part(on)


def _play(
    on: Callable[..., list[Any]],
    spec: Spec,
    recipe: Recipe,
    tensors: Mapping[str, F32],
    arm: Arm,
    device: str,
) -> Trace:
    """The trace of a sharded run; ``on`` runs a function on every rank (threads or processes)."""
    make, job = partial(made, spec, recipe, device), job_on_ranks(spec, arm, device)
    layout = layout_of(spec)
    taps = Taps() if layout.single_group else _taps(spec, of_this_thread, arm)
    taps = replace(taps, steps=layout.follows_steps)
    if taps.tap is not None:
        taps = replace(taps, shared=_emitting(recipe))
    if arm.compiler:
        torch._dynamo.reset()  # else it stops compiling a function after many Specs
        _clear_sharding_prop_cache()  # else results are laid out over the mesh of an earlier run
    graphs = counters["stats"]["unique_graphs"]
    try:
        with shared_propagation():
            played = layout.play(make, _given(spec, tensors), job=job, taps=taps, on=on)
    except Exception as error:
        raise_if_lost(error, device)
        failed = run_error(error, getattr(error, "phase", "convert"))
        return Trace(arm.name, error=replace(failed, rank=getattr(error, "rank", -1)))
    finally:
        if FakeTensorMode.cache_info().size > MOST_SHAPES:
            FakeTensorMode.cache_clear()
    if arm.compiler and counters["stats"]["unique_graphs"] == graphs:
        return Trace(arm.name, unusable_because="no graph was compiled")
    ranks = tuple(_trace_of(arm.name, spec, recipe, one) for one in played)
    unrounded = KEEPS_GRADIENTS and spec.sharding.reduces_fp32 and spec.dtype != "fp32"
    return Trace(arm.name, ranks=ranks, adds_unrounded=unrounded)


def _taps(spec: Spec, tap: Any, arm: Arm) -> Taps:
    """Taps that record every linear's calls and GEMMs; none inside compiled code."""
    return Taps() if arm.compiler else Taps(watch=layer_names(spec), tap=tap)


def _emitting(recipe: Recipe) -> Any:
    """The recipe's tap in the form that the player takes."""
    return lambda take: recipe.tap(Emit(take))


def _given(spec: Spec, tensors: Mapping[str, F32]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x.copy()) for name, x in with_model_names(spec, tensors).items()}


def _trace_of(arm: str, spec: Spec, recipe: Recipe, played: Played) -> Trace:
    """The trace of one rank, or of one data-parallel rank's rows."""
    outputs, added = {}, dict[str, tuple[F32, ...]]()
    for name, t in played.results.items():  # in the order of the backwards
        x, parameter = fp32_array(t).copy(), name_of(name).added_of
        if parameter:
            added[parameter] = (*added.get(parameter, ()), x)
        else:
            outputs[name] = x
    shared = frozenset((*ties(spec), *ties(spec).values()))
    plan, inverse = recipe.plan(spec), recipe.inverse_scales
    calls = calls_of(played.calls, plan, shared, ROUNDED, inverse=inverse)
    return Trace(arm, outputs, calls=calls, accumulated_gradients=added)
