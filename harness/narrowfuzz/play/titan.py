"""torchtitan's own Llama 3, as one of our models: token ids in, rows of logits out.

torchtitan is imported when a model is built: it is installed only where it is under test. In 0.1
and 0.2 a model is built from arguments, in 0.3 from a tree of configurations, which its converters
change before the model exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class TorchtitanLlama(nn.Module):
    """The decoder of one of torchtitan's configurations (``flavor``), with ``changes`` to it."""

    def __init__(self, flavor: str, vocabulary: int, rows: int, changes: dict[str, Any]) -> None:
        super().__init__()
        from torchtitan.models import llama3

        flavors = llama3.llama3_configs if hasattr(llama3, "llama3_configs") else llama3.llama3_args
        args = dataclasses.replace(
            flavors[flavor], vocab_size=vocabulary, max_seq_len=rows, **changes
        )
        self.model = llama3.Transformer(args)
        self.checkpoint = operators_kept()  # made here, where no compiler traces it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x.reshape(-1, x.shape[-1]))
        return logits.reshape(*x.shape, -1)

    def selective(self, function: Any, *args: Any, **named: Any) -> Any:
        """Run a block that is recomputed, except for the operators that torchtitan saves."""
        return self.checkpoint(function, *args, **named)

    def shard(
        self, mesh: Any, *, data: int, tensor: int, narrow_styles: bool, averages: bool
    ) -> None:
        """Lay it out over ranks as ``parallelize_llama`` does; logits stay sharded, as torchtitan's
        loss takes them."""
        from torchtitan.models.llama3.infra import parallelize

        if tensor:
            more: Any = {"enable_async_tp": False}
            if "cp_enabled" in inspect.signature(parallelize.apply_tp).parameters:
                more = {}  # 0.2
            parallelize.apply_tp(
                self.model,
                mesh["tensor"],
                loss_parallel=True,
                enable_float8_tensorwise_tp=narrow_styles,
                **more,
            )
        if data:
            kind = self.model.tok_embeddings.weight.dtype
            parallelize.apply_fsdp(
                self.model,
                mesh["data"],
                param_dtype=kind,
                reduce_dtype=torch.float32,
                pp_enabled=False,
            )
            if not averages:
                summed(self.model)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with rotations_kept(self.model):
            super()._apply(fn, recurse)
        return self


def operators_kept() -> Any:
    """The checkpoint function of 0.1 or 0.2 that saves the results of some operators."""
    how: Any = {"mode": "selective", "selective_ac_option": "op"}
    try:
        from torchtitan.config_manager import ActivationCheckpoint
        from torchtitan.models.llama3.infra.parallelize import _apply_ac_to_transformer_block

        block: Any = _apply_ac_to_transformer_block(nn.Identity(), ActivationCheckpoint(**how))
    except ImportError:  # 0.2
        from torchtitan.config.job_config import ActivationCheckpoint
        from torchtitan.distributed.activation_checkpoint import _apply_op_sac
        from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

        block = _apply_op_sac(
            nn.Identity(), ActivationCheckpoint(**how), op_sac_save_list=_op_sac_save_list
        )
    return block.checkpoint_fn


class TorchtitanDecoder(nn.Module):
    """The same for 0.3: the decoder that its configuration builds, and which stores that.

    torchtitan's language models call FlexAttention, which has no backward on CPUs. This one calls
    torchtitan's own SDPA module, which is causal and takes no mask: for one document the same.
    """

    def __init__(self, flavor: str, vocabulary: int, rows: int, changes: dict[str, Any]) -> None:
        super().__init__()
        from torchtitan.distributed.activation_checkpoint import SelectiveAC
        from torchtitan.models import llama3
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3.sharding import set_llama3_sharding_config

        config = llama3.llama3_configs[flavor](attn_backend="flex")
        if changes:
            narrow(config, **changes)
        config.vocab_size = config.tok_embeddings.num_embeddings = vocabulary
        config.lm_head.out_features = vocabulary
        for layer in config.layers:
            rope, attention = layer.attention.rope, ScaledDotProductAttention.Config()
            layer.attention.rope = dataclasses.replace(rope, max_seq_len=rows)
            layer.attention.inner_attention = attention
        set_llama3_sharding_config(config, enable_sp=True)
        self.model = config.build()
        block: Any = SelectiveAC.Config().build()._wrap_block(nn.Identity())
        self.checkpoint = block.checkpoint_fn  # made here, where no compiler traces it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x.reshape(-1, x.shape[-1]))
        return logits.reshape(*x.shape, -1)

    def selective(self, function: Any, *args: Any, **named: Any) -> Any:
        """Run a block that is recomputed, except for the operators that torchtitan saves."""
        return self.checkpoint(function, *args, **named)

    def shard(
        self, mesh: Any, *, data: int, tensor: int, narrow_styles: bool, averages: bool
    ) -> None:
        """Lay it out over ranks as ``parallelize_llama`` does with the backend "partial_dtensor":
        shared parameters are DTensors, as they were up to 0.2. The FSDP of torch 2.13 cannot read
        the annotations on plain tensors of the default backend, "spmd_types"."""
        import torch.testing._internal.distributed.fake_pg  # mesh axes of size 1 use its groups
        from torchtitan.distributed import parallel_dims
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
        from torchtitan.distributed.utils import set_spmd_backend

        set_spmd_backend("partial_dtensor")
        parallel_dims.device_type = mesh.device_type  # its default is "cuda", even without a GPU
        dims = parallel_dims.ParallelDims(
            dp_replicate=1,
            dp_shard=max(data, 1),
            cp=1,
            tp=max(tensor, 1),
            pp=1,
            ep=1,
            world_size=mesh.size(),
            spmd_backend="partial_dtensor",
        )
        if tensor:
            self.model.parallelize(dims)
        if data:
            apply_fsdp_to_decoder(
                self.model,
                dims.get_mesh(["fsdp"]),
                reduce_dtype=torch.float32,
                pp_enabled=False,
                param_dtype=self.model.tok_embeddings.weight.dtype,
            )
            summed(self.model)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with rotations_kept(self.model):
            super()._apply(fn, recurse)
        return self


def narrow(
    config: Any, *, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, multiple_of: int
) -> None:
    """Give a decoder this width and these heads; its feed-forward retains the proportions of the
    configuration's."""
    from torchtitan.models.llama3 import _build_llama3_layers

    block = config.layers[0]
    hidden = -(-block.feed_forward.w1.out_features * dim // (config.dim * multiple_of))
    config.layers = _build_llama3_layers(
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden_dim=hidden * multiple_of,
        attn_backend="flex",
        rope=dataclasses.replace(block.attention.rope, dim=dim // n_heads),
    )
    config.dim = config.tok_embeddings.embedding_dim = dim
    config.norm.normalized_shape = config.lm_head.in_features = dim


def summed(model: nn.Module) -> None:
    """FSDP adds gradients up and does not average: only NCCL's groups support a factor."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def rotations_kept(model: nn.Module) -> Iterator[None]:
    """Tables of rotations stay complex, whatever parameters are converted to; they only move to the
    parameters' device."""
    tables = [
        (part, name, table)
        for part in model.modules()
        for name, table in part._buffers.items()
        if table is not None and table.is_complex()
    ]
    for part, name, _ in tables:
        part._buffers[name] = None
    try:
        yield
    finally:
        device = next(model.parameters()).device
        for part, name, table in tables:
            part._buffers[name] = table.to(device)
