"""A transformer layer cannot go on with another length of the amax history."""

import os
import sys

os.environ["NVTE_FLASH_ATTN"] = os.environ["NVTE_FUSED_ATTN"] = "0"
os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import torch

from te_on_cpu.environment import enter

enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

shown = 0
x = torch.ones(16, 2, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for fused in (True, False):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": fused}
    model = te.TransformerLayer(32, 64, 2, params_dtype=torch.bfloat16, device="cuda", **options)
    for length in (4, 8):
        said = "runs"
        try:
            with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
                try:
                    model(x)
                except (NotImplementedError, ValueError) as error:
                    shown, said = shown + 1, f"must run too, got {type(error).__name__}: {error}"
        except RuntimeError as error:
            said += f"; at the end of the region: {error}"  # te-history-switch-crash
        print(f"fuse_qkv_params={fused}, history {length}: {said}")
    FP8GlobalStateManager.reset()
sys.exit(shown > 0)
