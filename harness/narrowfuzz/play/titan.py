"""torchtitan's own Llama 3, as one of our models: token ids in, rows of logits out.

torchtitan is imported when one is built: it is there only where it is under test.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class TorchtitanLlama(nn.Module):
    """The decoder of one of torchtitan's configurations (``flavor``), with what of it changes."""

    def __init__(self, flavor: str, vocabulary: int, rows: int, changes: dict[str, Any]) -> None:
        super().__init__()
        from torchtitan.models import llama3

        flavors = llama3.llama3_configs if hasattr(llama3, "llama3_configs") else llama3.llama3_args
        args = dataclasses.replace(
            flavors[flavor], vocab_size=vocabulary, max_seq_len=rows, **changes
        )
        self.model = llama3.Transformer(args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x.reshape(-1, x.shape[-1]))
        return logits.reshape(*x.shape, -1)

    def selective(self, function: Any, *args: Any, **named: Any) -> Any:
        """A block that is recomputed but for the operators that torchtitan keeps."""
        how: Any = {"mode": "selective", "selective_ac_option": "op"}
        try:
            from torchtitan.config_manager import ActivationCheckpoint
            from torchtitan.models.llama3.infra.parallelize import _apply_ac_to_transformer_block

            block = _apply_ac_to_transformer_block(nn.Identity(), ActivationCheckpoint(**how))
        except ImportError:  # 0.2
            from torchtitan.config.job_config import ActivationCheckpoint
            from torchtitan.distributed.activation_checkpoint import _apply_op_sac
            from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

            block = _apply_op_sac(
                nn.Identity(), ActivationCheckpoint(**how), op_sac_save_list=_op_sac_save_list
            )
        return block.checkpoint_fn(function, *args, **named)

    def shard(
        self, mesh: Any, *, data: int, tensor: int, narrow_styles: bool, averages: bool
    ) -> None:
        """Lay it out over ranks as ``parallelize_llama`` does: torchtitan's loss takes logits in
        parts."""
        from torchtitan.models.llama3.infra import parallelize

        if tensor:
            more: Any = {"enable_async_tp": False}
            if "cp_enabled" in inspect.signature(parallelize.apply_tp).parameters:
                more = {}  # 0.2
            parallelize.apply_tp(
                self.model, mesh["tensor"], loss_parallel=True,
                enable_float8_tensorwise_tp=narrow_styles, **more,
            )  # fmt: skip
        if data:
            kind = self.model.tok_embeddings.weight.dtype
            parallelize.apply_fsdp(
                self.model, mesh["data"], param_dtype=kind, reduce_dtype=torch.float32,
                pp_enabled=False,
            )  # fmt: skip
            for part in self.model.modules() if not averages else ():
                if isinstance(part, FSDPModule):  # a group that is not NCCL's knows no factor
                    part.set_force_sum_reduction_for_comms(True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Its table of rotations is complex, whatever the parameters are."""
        table = self.model._buffers.pop("freqs_cis")
        super()._apply(fn, recurse)
        self.model._buffers["freqs_cis"] = table.to(self.model.tok_embeddings.weight.device)
        return self
