"""A training's state, carried from one layout over ranks to another by torch's distributed
checkpoint, and by hand.

Scripts contain the source of these functions, with the values of a job substituted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from narrowfuzz.play.converted import play
from narrowfuzz.play.job import Taps
from narrowfuzz.play.mesh import OnMesh, on_mesh
from narrowfuzz.play.player import Kept, Trace, Training, in_order, innermost


def play_resumed(
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    job: Any,
    taps: Taps,
    on: Callable[..., list[Trace]],
) -> list[Trace]:
    """The traces of all ranks after a training that continues on another mesh after its "handover".
    ``on`` runs a function on every rank. Raises the first exception of any rank."""

    def part(trace: Trace, mesh: Any) -> None:
        both_parts(trace, make, tensors, mesh, folder, job=job, taps=taps)

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return on_mesh(part, job.layout.before.shape, on, taps=taps)


def both_parts(
    trace: Trace,
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    mesh: Any,
    folder: str,
    *,
    job: Any,
    taps: Taps,
) -> None:
    """A training up to its "handover", and the rest of it in a new model, laid out over the first
    ranks; without a mesh for it, on each rank by itself.

    Results of the second part follow those of the first, and are also stored as resumed:<name>. In
    addition: afresh:<name>, of a model into which the same state was written by hand; saved:<name>
    and loaded:<name>, the state before and after.
    """
    before, after, events = job.layout.before, job.layout.after, job.events
    names = [folder]
    dist.broadcast_object_list(names)
    here, group = first_ranks(after.shape, mesh.device_type)
    end = events.index(("handover",))
    rest, state, first = events[end:], {}, dist.group.WORLD
    scale: dict[str, Any] = {}

    def save_state(run: Training) -> None:
        state.update(gathered(first, run.model, run.optimizer))
        scale.update({} if run.scaler is None else run.scaler.state_dict())
        save(names[0], run.model, run.optimizer)

    def load_state(run: Training) -> None:
        load(names[0], group, run.model, run.optimizer)
        found.update(under("loaded", gathered(group, run.model, run.optimizer)))
        finish_load(run)

    def write_state(run: Training) -> None:
        put(state, run.model, run.optimizer)
        finish_load(run)

    def finish_load(run: Training) -> None:
        if scale:
            run.scaler.load_state_dict(scale)
        if run.stepped is not None:
            run.stepped(run.model)

    first_part = OnMesh(before, mesh, events[: end + 1], save_state, ends=False)
    play(trace, make, tensors, job=job, taps=taps, layout=first_part)
    found, first_kept = under("saved", state), len(trace.kept)
    # an equal mesh has new groups, and DTensor's cache for operators holds those of the old one
    _clear_sharding_prop_cache()
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        loads, writes = (OnMesh(after, here, rest, begin) for begin in (load_state, write_state))
        play(trace, make, tensors, job=job, taps=Taps(), layout=loads)
        found |= under("resumed", in_order(trace.kept[first_kept:]))
        again = play(Trace(), make, tensors, job=job, taps=Taps(), layout=writes)
        found |= under("afresh", again.results)
    results = in_order(trace.kept) if len(trace.kept) > first_kept else first_of(trace.kept)
    trace.results = {name: t.cpu() for name, t in results.items()} | found
    _clear_sharding_prop_cache()


def first_of(results: Sequence[Kept]) -> dict[str, torch.Tensor]:
    """Results of a rank that stops at the handover, each by name and number: others have more."""
    before: Counter[str] = Counter()
    found = {}
    for result in results:
        found[f"{result.name}@{before[result.name]}"] = result.tensor
        before[result.name] += 1
    return found


def under(kind: str, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results with ``kind`` in front of their names."""
    return {f"{kind}:{name}": t for name, t in results.items()}


def first_ranks(shape: Mapping[str, int], on: str) -> tuple[Any, Any]:
    """A device mesh of this shape over the first ranks, ``on`` this kind of device, and their
    group, which all ranks must create; None for both without a shape."""
    if not shape:
        return None, None
    sizes = tuple(shape.values())
    ranks = torch.arange(torch.Size(sizes).numel())
    mesh = DeviceMesh(on, ranks.reshape(sizes), mesh_dim_names=tuple(shape))
    return mesh, dist.new_group(ranks.tolist())


def save(folder: str, model: nn.Module, optimizer: Any) -> None:
    """Every rank writes its part."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
    except CheckpointException as error:
        raise cause(error) from None


def load(folder: str, group: Any, model: nn.Module, optimizer: Any) -> None:
    """The ranks of this group read what their layout needs; without a group, each process all."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    try:
        dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise cause(error) from None
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def cause(error: CheckpointException) -> BaseException:
    """The exception that a rank raised while it saved or loaded."""
    return next(iter(error.failures.values()))[0]


def gathered(group: Any, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter and its optimizer state, assembled from the parts that the ranks of a group
    hold; without a group, this process holds all."""
    own = {}
    for name, parameter in model.named_parameters():
        tensors = {name: parameter.detach()}
        for kind, t in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{kind}"] = t
        for key, t in tensors.items():
            if isinstance(t, torch.Tensor):
                own[key] = t.shape, place(t), innermost(t).detach().cpu().clone()
    everyone = [own]
    if group is not None:
        everyone = [{} for _ in range(group.size())]
        dist.all_gather_object(everyone, own, group=group)
    wholes = {
        name: torch.full(shape, torch.nan, dtype=t.dtype)
        for parts in everyone
        for name, (shape, _, t) in parts.items()
    }
    for parts in everyone:
        for name, (_, where, t) in parts.items():
            if t.numel():  # FSDP2's part of a tensor of shape (1, 0) is one of shape (0, 0)
                wholes[name][where] = t
    return wholes


def place(t: Any) -> tuple[slice, ...]:
    """Where this rank's part of a tensor stands in the whole."""
    shape, offset = tuple(t.shape), (0,) * t.dim()
    if hasattr(t, "placements"):
        shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def put(wholes: Mapping[str, torch.Tensor], model: nn.Module, optimizer: Any) -> None:
    """Write the result of ``gathered`` into a model and its optimizer, in any layout."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            write(parameter, wholes[name])
            for key, whole in wholes.items():
                kind = key.removeprefix(f"{name}.")
                if key == f"{name}.step":
                    optimizer.state[parameter][kind] = whole.clone()
                elif kind in ("exp_avg", "exp_avg_sq", "momentum_buffer") and kind != key:
                    optimizer.state[parameter][kind] = torch.zeros_like(parameter.detach())
                    write(optimizer.state[parameter][kind], whole)


def write(t: Any, whole: torch.Tensor) -> None:
    """Set this rank's part of a tensor to that part of the whole."""
    if t.numel():
        innermost(t).copy_(whole[place(t)])
