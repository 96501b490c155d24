"""Sharding: the layout of a model over ranks, as plain data of a case."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

#: Ways in which a recipe can declare that it runs on ranks; "codes": ranks may communicate FP8
#: codes in place of values.
Shards = Literal["fsdp", "tensor", "codes", "context", "classes"]
#: Ways in which DistributedDataParallel is called.
DDP = Literal["plain", "views", "static", "unused"]


class Sharding(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The layout of a model over ranks. The defaults are one process and the simplest value of each
    field."""

    #: Number of data-parallel ranks: each has its share of the rows, and FSDP shards the parameters
    #: over them; 0: no FSDP. For a library's own layers: ranks that train independently on rows of
    #: their own, and may reduce amaxes over all (``Settings.reduces``).
    data: Annotated[int, Meta(ge=0, le=4)] = 0
    #: Number of groups of data-parallel ranks, each of which holds all parameters in shards and is
    #: a replica of the others (hybrid sharding); 0: one group.
    replicas: Annotated[int, Meta(ge=0, le=4)] = 0
    #: DistributedDataParallel in place of FSDP: every data-parallel rank is a replica with all
    #: parameters. "plain": called with its defaults; "views": gradients are views of its buckets;
    #: "static": with a static graph; "unused": it searches for unused parameters. "": FSDP.
    ddp: Literal["", DDP] = ""
    #: Expert parallelism: number of consecutive data-parallel ranks that share the experts. Each
    #: holds some experts and receives the rows routed to them; 0: every rank holds all experts.
    experts: Annotated[int, Meta(ge=0, le=4)] = 0
    #: Number of tensor-parallel ranks, which share each linear, or with ``experts`` each expert; 0:
    #: no tensor parallelism.
    tensor: Annotated[int, Meta(ge=0, le=4)] = 0
    #: Whether a single linear is sharded by its output features or by its input features.
    style: Literal["colwise", "rowwise"] = "colwise"
    #: Use torchao's float8 tensor-parallel styles, which communicate codes.
    narrow_styles: bool = False
    #: Activations between tensor-parallel linears are sharded by rows.
    sequence: bool = False
    #: False: layers return distributed tensors.
    local_output: bool = True
    #: What FSDP gathers: values of parameters, codes, or codes whose scales are computed after each
    #: step.
    gathers: Literal["values", "codes", "precomputed"] = "values"
    #: "whole": FSDP gathers all parameters at once, and DDP reduces all gradients at once. "each":
    #: FSDP gathers those of each region (or linear) separately, and DDP reduces each parameter's.
    units: Literal["whole", "each"] = "whole"
    #: FSDP reduces gradients in fp32, whatever their dtype.
    reduces_fp32: bool = False
    #: FSDP divides the sum of gradients by the number of ranks.
    averages: bool = True
    #: FSDP's collectives only add, and the division is separate
    #: (``set_force_sum_reduction_for_comms``).
    forces_sums: bool = False
    #: Run it on ranks that are processes, too.
    processes: bool = False
    #: Number of pipeline stages, each a copy of the model; 0: no pipeline.
    stages: Annotated[int, Meta(ge=0, le=4)] = 0
    #: Schedule of a pipeline's microbatches; with "interleaved" each rank has two stages.
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    #: Number of context-parallel ranks, which share the rows of each sequence and exchange its keys
    #: and values; 0: no context parallelism.
    context: Annotated[int, Meta(ge=0, le=4)] = 0
    #: How keys and values are exchanged: gathered at once, or passed from one rank to the next.
    rotates: Literal["allgather", "alltoall"] = "allgather"
    #: Number of ranks that share the classes of a loss (columns of its logits); 0: none do.
    classes: Annotated[int, Meta(ge=0, le=4)] = 0
    #: After the first step the state is saved, and another model loads it: "same" is laid out the
    #: same, "fewer" on one data-parallel rank less, "swapped" with data- and tensor-parallel ranks
    #: swapped, "regrouped" with half as many ranks that share experts, "alone" on each rank by
    #: itself. "early": as "same", but before the first step. "": training is not interrupted.
    resumes: Literal["", "same", "early", "fewer", "swapped", "regrouped", "alone"] = ""

    def __str__(self) -> str:
        """The fields that differ from their defaults, or "alone"."""
        own = {name: getattr(self, name) for name in self.__struct_fields__}
        return (
            ", ".join(f"{k}={v}" for k, v in own.items() if v != getattr(UNSHARDED, k)) or "alone"
        )

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 if the model is not sharded."""
        if self.stages:
            return self.stages // 2 if self.schedule == "interleaved" else self.stages
        if together := self.context or self.classes:
            return together
        return max(self.data, 1) * max(self.tensor, 1) if self.data or self.tensor else 0

    @property
    def groups(self) -> int:
        """Number of data-parallel ranks, or with ``experts`` of groups that share experts."""
        return max(self.data, 1) // max(self.experts, 1)

    @property
    def resumed(self) -> Sharding:
        """The sharding after the resume. "fewer", "swapped" and "alone" have neither replicas, DDP
        nor shared experts."""
        plain: dict[str, Any] = {"replicas": 0, "ddp": "", "experts": 0}
        ranks = {
            "fewer": {"data": self.data - 1, **plain},
            "swapped": {"data": self.tensor, "tensor": self.data, **plain},
            "regrouped": {"experts": max(self.experts // 2, 1)},
            "alone": {"data": 0, "tensor": 0, **plain},
        }
        return msgspec.structs.replace(self, **ranks.get(self.resumes, {}))


UNSHARDED = Sharding()
