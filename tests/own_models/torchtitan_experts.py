"""torchtitan 0.3's own mixtures of experts, as its configurations build them, made smaller: token
ids in, logits out.

They call FlexAttention, which has no backward on a CPU; torchtitan's own SDPA module stands in its
place. Rows go to experts by torchtitan's dispatchers, of one rank.
"""

import dataclasses

import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchtitan.components.quantization import mx
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention

VOCABULARY, ROWS, EXPERTS, WIDTH = 256, 16, 6, 64


def smaller(config):
    """One block, with as many experts as a few tokens need, each as wide."""
    block = next(block for block in config.layers if block.moe is not None)
    moe = block.moe
    experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
    for part in (moe, experts, dispatcher, moe.router):
        part.num_experts = EXPERTS
    moe.router.gate.out_features, experts.hidden_dim = EXPERTS, WIDTH
    dispatcher.top_k = moe.router.top_k = min(moe.router.top_k, 3)
    block.attention.rope = dataclasses.replace(block.attention.rope, max_seq_len=ROWS)
    block.attention.inner_attention = ScaledDotProductAttention.Config()
    config.layers = [block]
    config.vocab_size = config.tok_embeddings.num_embeddings = VOCABULARY
    config.lm_head.out_features = VOCABULARY
    return config


def built(config):
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model, torch.randint(VOCABULARY, (2, ROWS))


def deepseek_config():
    make = deepseek_v3.deepseekv3_configs["debugmodel"]
    return smaller(make(attn_backend="flex", moe_comm_backend="standard"))


def deepseek():
    return built(deepseek_config())


def qwen():
    make = qwen3.qwen3_configs["debugmodel_moe"]
    return built(smaller(make(attn_backend="flex", moe_comm_backend="standard")))


class Loss(nn.Module):
    """The model and the loss that its trainer takes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        logits = self.model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def qwen_loss():
    model, ids = qwen()
    return Loss(model), {"ids": ids, "labels": torch.randint(VOCABULARY, ids.shape)}


def deepseek_mxfp8():
    """Products of experts in MXFP8, as torchtitan's converter makes them, but for two things: it
    asks for a GPU that has them, and torchao emulates them here."""
    config = deepseek_config()
    asked, mx.has_cuda_capability = mx.has_cuda_capability, lambda major, minor: True
    try:
        how = mx.MXFP8GroupedExpertsConverter.Config(model_compile_enabled=True, pad_multiple=32)
        how.build().convert(config)
    finally:
        mx.has_cuda_capability = asked
    model, ids = built(config)
    emulated = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    for part in model.modules():
        if hasattr(part, "_mxfp8_op_config"):
            part._mxfp8_op_config = emulated
    return model, ids
